"""``python -m fastattn selftest``: every instruction set of this CPU and the fallback against float64."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import util
from typing import Any, NamedTuple

import numpy as np

import fastattn
from fastattn._bench.cases import STRUCTURES, VARIANTS, Array, Shape, combine, definition, make_inputs, pairs
from fastattn._engine import settings

# Lengths around the sizes of vectors and tiles, and 0.
LENGTHS = (0, 1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 97, 127, 129, 257)
HEAD_DIMS = (1, 3, 8, 16, 32, 40, 64, 72, 80, 96, 128)
# One call in `EVERY` has many keys, over which rounding errors add up.
MANY_KEYS, EVERY = 5000, 23


class Case(NamedTuple):
    """One call: its inputs, its options, and a name that says which variants these are."""

    name: str
    inputs: tuple[Array, Array, Array]
    options: dict[str, Any]


def draw(n: int, seed: int) -> Iterator[Case]:
    """`n` random calls in every dtype, with one variant or two, and values of one sign or of both."""
    dtypes = ["float32", "float64", "float16"] + ["bfloat16"] * (util.find_spec("ml_dtypes") is not None)
    variants = [*((name,) for name in (*VARIANTS, *STRUCTURES)), *pairs()]
    for index in range(n):
        rng = np.random.default_rng([seed, index])
        heads_kv, group = (int(x) for x in rng.integers(1, 4, 2))
        batch = int(rng.integers(1, 4))
        len_q, len_k, dim, dim_v = (int(rng.choice(x)) for x in (LENGTHS, LENGTHS, HEAD_DIMS, HEAD_DIMS))
        if index % EVERY == EVERY - 1:
            batch, len_q, len_k = 1, min(len_q, 65), MANY_KEYS
        shape = Shape("", batch, heads_kv * group, heads_kv, len_q, len_k, dim, dim_v)
        names = variants[int(rng.integers(len(variants)))]
        dtype = dtypes[index % len(dtypes)]
        layout = ("bhld", "blhd")[int(rng.integers(2))]
        name = f"case {index}: {' + '.join(names)}, {dtype}, {layout}, {tuple(shape[1:])}"
        q, k, v = make_inputs(shape, dtype, rng, layout=layout)
        structural = names[0] in STRUCTURES
        options = {"mask": STRUCTURES[names[0]](shape, rng)} if structural else combine(names, shape, rng)
        yield Case(name, (q, k, abs(v) if rng.integers(2) else v), options)


class Bound(NamedTuple):
    """The result in a wider type, and the error allowed: twice that of plain computation and a few eps."""

    out: Array
    lse: Array
    out_error: float
    lse_error: float

    @classmethod
    def of(cls, case: Case) -> Bound:
        q, _, v = case.inputs
        wider = np.longdouble if q.dtype == np.float64 else np.float64
        out, lse = definition(*case.inputs, dtype=wider, **case.options)
        plain_out, plain_lse = definition(*case.inputs, dtype=q.dtype, **case.options)
        lse_dtype = np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
        out_error = allowed(plain_out, out, epsilon(q.dtype) * largest(v))
        return cls(out, lse, out_error, allowed(plain_lse, lse, epsilon(lse_dtype) * max(1, largest(lse))))

    def share(self, out: Array, lse: Array) -> float:
        """The error, divided by what is allowed. Above 1 the result is wrong."""
        return max(distance(out, self.out) / (self.out_error or 1), distance(lse, self.lse) / self.lse_error)


def allowed(plain: Array, exact: Array, unit: float) -> float:
    """Twice the error of the plain computation and 4 units; 8 units where that error is not finite."""
    if plain.dtype == np.float64 and np.finfo(np.longdouble).eps == np.finfo(np.float64).eps:
        return 32 * unit  # this machine has no wider type, so the error of the plain computation is unknown
    error = distance(plain, exact)
    return 2 * error + 4 * unit if np.isfinite(error) else 8 * unit


def largest(x: Array) -> float:
    """The largest finite magnitude."""
    x = np.abs(x.astype(np.float64))
    return float(x[np.isfinite(x)].max(initial=0))


def epsilon(dtype: np.dtype[Any]) -> float:
    return 2.0**-7 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)


def distance(a: Array, b: Array) -> float:
    """The largest difference; infinite if one value is NaN or infinite and the other is not the same."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.where(a == b, 0, np.abs(a - b))
    return float(np.where(np.isnan(difference), np.inf, difference).max(initial=0))


def main(n: int, seed: int) -> int:
    """Print what was tested and how it went; returns the exit status."""
    isas = fastattn.show_config()["isas_available"]
    settings_of: dict[str, dict[str, Any]] = {isa: {"isa": isa, "backend": "compiled"} for isa in isas}
    if not isas:
        print(f"The NumPy fallback only; {fastattn.show_config()['why_numpy']}")
    settings_of["numpy"] = {"backend": "numpy"}
    worst, failures = dict.fromkeys(settings_of, 0.0), 0
    for case in draw(n, seed):
        bound = Bound.of(case)
        for name, setting in settings_of.items():
            try:
                share = bound.share(*compute(case, setting))
                worst[name] = max(worst[name], share)
                problem = f"error {share:.3g} times what is allowed" if share > 1 else ""
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            if problem:
                failures += 1
                print(f"FAILED on {name}, {problem}; {case.name}", file=sys.stderr)
    for name, share in worst.items():
        print(f"{name:<12} {n} random calls (seed {seed}), largest error {share:.2f} of what is allowed")
    print(f"{failures} FAILED" if failures else "all good")
    return int(failures > 0)


def compute(case: Case, setting: dict[str, Any]) -> tuple[Array, Array]:
    options: dict[str, Any] = {**case.options, "return_lse": True, "backend": setting["backend"]}
    with settings.forced(**setting):
        out, lse = fastattn.attention(*case.inputs, **options)
    return out, lse
