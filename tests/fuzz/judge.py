"""Judge of cases: each returns a right result, or raises an error that says what is wrong."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fastattn._args.types import INT4_BYTES
from fastattn._args.values import is_int4
from fastattn._engine import settings
from fastattn._reference import int4
from fastattn.layers import Layer
from fastattn.ops import PackedLinear

# Largest difference of two backends, relative to 1 and to the largest value, where arguments are moderate.
TOLERANCE = {"float64": 1e-8, "float32": 2e-3, "float16": 3e-2, "bfloat16": 2e-1}
MODERATE = 1e3
NAMED = (
    TypeError,
    ValueError,
    FileNotFoundError,
    FloatingPointError,
    NotImplementedError,
)  # of which errors are


class Like(NamedTuple):
    """Shape and dtype that an array of the result must have."""

    shape: tuple[int, ...]
    dtype: Any
    finite: bool = True  # where arguments are moderate


class Case(NamedTuple):
    """One call. It may change its arguments: another backend gets a case that is drawn anew."""

    names: tuple[str, ...]  # with one of which and "()" the message of an error begins; the first is its own
    call: Callable[[], Any]
    arguments: Any  # all that goes in
    expected: Callable[[], Sequence[Like] | None] | None = None  # what comes out; asked for when it is there
    tolerance: float = 1.0  # times what backends may differ by; infinite where they differ in kind
    twice: bool = (
        True  # in one thread, which gives the same bits, and on the NumPy backend, which does the same
    )
    clean: Callable[[BaseException], bool] | None = None  # whether another error may be
    kept: Any = ()  # what the call must not write to
    same_bits: bool = True  # for any number of threads
    check: Callable[[list[np.ndarray]], str | None] | None = None  # what is wrong with a result


class Outcome(NamedTuple):
    error: BaseException | None
    arrays: list[np.ndarray]
    wrong: str | None = None  # with what was written to, or what the case's own check says


def problem(draw: Callable[[], Case], isa: str | None) -> str | None:
    """Say what is wrong with the case that `draw` makes, which is the same each time; None if it is right."""
    first, *others = ways(isa)
    case, outcome = carried_out(draw, first, checked=True)
    found = outcome.wrong or _wrong(case, outcome)
    for way in others if case.twice else ():
        if not found:
            compare = _other_bits if way["backend"] == first["backend"] else _different
            found = compare(case, outcome, carried_out(draw, way)[1])
    return found and f"{case.names[0]}: {found}"


def ways(isa: str | None) -> list[dict[str, Any]]:
    """Ways to run a case: by the kernels for `isa` in several threads and in one, then on NumPy."""
    compiled = [{"isa": isa, "backend": "compiled", "num_threads": n} for n in (3, 1)]
    return [*(compiled if isa else []), {"backend": "numpy"}]


def carried_out(draw: Callable[[], Case], way: dict[str, Any], checked: bool = False) -> tuple[Case, Outcome]:
    """The case and what it did; `checked`: also whether that is right by itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = draw()
    kept = [(x, x.tobytes()) for x in arrays_in(case.kept)]
    with settings.forced(**way), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            outcome = Outcome(None, arrays_in(case.call()))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            outcome = Outcome(error, [])
        if written := [x for x, before in kept if x.tobytes() != before]:
            return case, outcome._replace(
                wrong=f"it wrote to {described(written[0])}, which it was given to read"
            )
        if checked and case.check and outcome.error is None:
            outcome = outcome._replace(wrong=case.check(outcome.arrays))
        return case, outcome


def message(error: BaseException | None) -> str:
    """Type and text of `error`, without what differs from run to run."""
    if error is None:
        return "a result"
    return re.sub(r"0x[0-9a-f]+", "0x...", f"{type(error).__name__}: {error}")


def _wrong(case: Case, outcome: Outcome) -> str | None:
    if outcome.error is not None:
        return None if _clean(case, outcome.error) else message(outcome.error)
    expected = None if case.expected is None else case.expected()
    if expected is None:
        return None
    got = [(x.shape, x.dtype) for x in outcome.arrays]
    if got != [(like.shape, np.dtype(like.dtype)) for like in expected]:
        return f"returned {got}; expected {expected}"
    if largest(case.arguments) <= MODERATE:
        for x, like in zip(outcome.arrays, expected, strict=True):
            if like.finite and not largest(x) < np.inf:
                return f"NaN or an infinity in {described(x)}, of moderate numbers"
    return None


def _clean(case: Case, error: BaseException) -> bool:
    names = tuple(f"{name}():" for name in case.names)
    named = isinstance(error, NAMED) and str(error).startswith(names)
    return named or isinstance(error, MemoryError) or (case.clean is not None and case.clean(error))


def _other_bits(case: Case, first: Outcome, second: Outcome) -> str | None:
    """Say how the second outcome, of one thread, differs from that of several."""
    if MemoryError in (type(first.error), type(second.error)):
        return None
    if message(first.error) != message(second.error):
        return f"{message(first.error)}; in one thread {message(second.error)}"
    if not case.same_bits:
        return None
    for a, b in zip(first.arrays, second.arrays, strict=True):
        if (a.shape, a.dtype, _bits(a)) != (b.shape, b.dtype, _bits(b)):
            return f"{described(a)} has other bits in one thread"
    return None


def _bits(x: np.ndarray) -> bytes:
    """The bits of an array, where NaN is NaN: its sign and payload mean nothing."""
    return np.where(np.isnan(x), x.dtype.type(np.nan), x).tobytes() if x.dtype.kind in "fV" else x.tobytes()


def _different(case: Case, first: Outcome, second: Outcome) -> str | None:
    """Say how the second outcome, of another backend, differs."""
    if MemoryError in (type(first.error), type(second.error)):
        return None
    if message(first.error) != message(second.error):
        return f"{message(first.error)}; on numpy {message(second.error)}"
    if case.tolerance == np.inf or largest(case.arguments) > MODERATE:
        return None
    for a, b in zip(first.arrays, second.arrays, strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{a.dtype}{a.shape}, and on numpy {b.dtype}{b.shape}"
        tolerance = case.tolerance * TOLERANCE.get(a.dtype.name, 0)
        with np.errstate(all="ignore"):
            x, y = a.astype(np.float64), b.astype(np.float64)
            far = abs(x - y) / (1 + largest(y))
            bad = ~((far <= tolerance) | (x == y) | (np.isnan(x) & np.isnan(y)))
        if bad.any():
            where = tuple(int(n) for n in np.argwhere(bad)[0])
            return f"{a[where]} at {where} of {a.dtype}{a.shape}, and on numpy {b[where]}"
    return None


def arrays_in(x: Any) -> list[np.ndarray]:
    """All arrays of a result, or of arguments, in order."""
    if isinstance(x, np.ndarray):
        return [x]
    if isinstance(x, memoryview):
        return [np.asarray(x)]
    if isinstance(x, PackedLinear):
        return arrays_in([x.panels, x.scales, x.sums])
    if isinstance(x, Layer):
        return arrays_in(vars(x))
    if isinstance(x, Mapping):
        return arrays_in(list(x.values()))
    if isinstance(x, (list, tuple)):
        return [array for part in x for array in arrays_in(part)]
    return [np.asarray(x)] if isinstance(x, (float, np.number)) else []


def largest(x: Any) -> float:
    """The largest magnitude in `x`; infinite if there is a NaN or an infinity."""
    most = 0.0
    for array in arrays_in(x):
        if is_int4(array):  # wrong ones may have a scale that is NaN
            whole = array.ndim and array.shape[-1] % INT4_BYTES == 0
            array = int4.lanes(array, np.dtype(float)) if whole else np.zeros(0)
        if array.dtype.kind in "fV" and array.size:
            with np.errstate(all="ignore"):
                here = float(abs(np.asarray(array).astype(np.float64)).max())
            most = max(most, here if here < np.inf else np.inf)
    return most


def described(x: Any) -> str:
    """`x`, the arguments of a case, with arrays by their shapes."""
    if isinstance(x, np.ndarray):
        strides = "" if x.flags.c_contiguous else f", strides {x.strides}"
        kind = "" if type(x) is np.ndarray else type(x).__name__ + " "
        values = f" = {x.tolist()}" if x.size <= 6 else ""
        return f"<{kind}{x.dtype} {x.shape}{strides}{values}>"
    if isinstance(x, memoryview):
        return f"memoryview {described(np.asarray(x))}"
    if isinstance(x, dict):
        return "{" + ", ".join(f"{key!r}: {described(value)}" for key, value in x.items()) + "}"
    if type(x) in (list, tuple):
        return "[" + ", ".join(map(described, x)) + "]"
    return repr(x)[:300]
