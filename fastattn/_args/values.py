"""Checks of single values: each function returns a value in the form that the kernels take, or raises.

The first argument, `name`, is that of the public function's argument, for error messages. How values fit
together is checked in `attention.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeGuard

import numpy as np

from fastattn._args.blocks import copied
from fastattn._args.errors import wrong_dtype, wrong_shape, wrong_type
from fastattn._args.types import FLOAT32, FLOAT64, INT4, INT4_BYTES, Array, Ints, Shape

# Bits of ndarray.flags.num: reading it once takes a tenth of the time of reading the flags one by one.
CONTIGUOUS, OWNS_DATA, ALIGNED, WRITEABLE = 0x1, 0x4, 0x100, 0x400
_READABLE = CONTIGUOUS | ALIGNED

MAX_POSITION = 2**53  # larger integers are not exact in float64, in which distances may be computed
MOST_SIZE = 2**48  # no memory holds more; NumPy would reject a larger size without naming the argument

# Types that float() accepts although they are not numbers.
_NO_NUMBERS = (bool, np.bool_, str, bytes)

# What functions call keys and values.
KEYS_VALUES = ("k", "v", "key", "value")

# What DLPack calls memory that the CPU reads: its own, and what CUDA and ROCm have pinned or manage.
_HOST = (1, 3, 11, 13)

# What conversions to arrays and numbers raise, in other libraries, too; handlers of signals raise others.
UNCONVERTED = (
    TypeError, ValueError, ArithmeticError, AttributeError, BufferError, LookupError, RuntimeError, Warning,
)  # fmt: skip

# Smallest and largest normal number of the lane types.
_LIMITS = {dtype: (float(np.finfo(dtype).tiny), float(np.finfo(dtype).max)) for dtype in (FLOAT32, FLOAT64)}

# Floating types in native byte order. bfloat16, which NumPy does not know, is added with its first array.
_native = {np.dtype(t) for t in (np.float32, np.float64, np.float16)}


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether `dtype` is float32, float64, float16 or bfloat16, in any byte order."""
    # Kind and size do not decide: float8_e5m2 has kind "f", and longdouble may have 8 bytes. bfloat16 is
    # recognised by its name, so that ml_dtypes need not be imported.
    return dtype.type in (np.float32, np.float64, np.float16) or (
        dtype.name == "bfloat16" and dtype.itemsize == 2
    )


def as_array(name: str, x: Any) -> Array:
    """`x` as a plain ndarray of any dtype but object."""
    if is_masked(x):
        expected = "a plain one (mask= says which keys count)"
        raise TypeError(f"(): {name} is a masked array; expected {expected}")
    try:
        array = shared(x)
    except UNCONVERTED as error:
        kind = type(x).__name__
        hint = "; .float() makes it one" if "BFloat16" in str(error) else ""  # a tensor of torch
        raise TypeError(f"(): {name} is of type {kind}; expected an array ({error}{hint})") from error
    if isinstance(x, (list, tuple)) and _holds_masked(x, array.ndim - 1):
        kind = type(x).__name__
        raise TypeError(f"(): {name} is a {kind} that holds masked arrays; expected plain ones")
    if array.dtype == np.object_:
        if array.size and all(type(element) is int for element in array.flat):
            largest = max(array.flat, key=abs)
            if not -(2**63) <= largest < 2**63:
                raise ValueError(f"(): {name} has {short(largest)}; expected integers of at most 64 bits")
        held = ", ".join(sorted({type(element).__name__ for element in array.flat}))
        kind = "dtype object" if x is array else f"type {type(x).__name__}"
        what = f"of {kind} and holds {held}" if array.ndim else short(x)
        raise TypeError(f"(): {name} is {what}; expected an array of one numeric type")
    return array


def mask_array(name: str, x: Any) -> Array:
    """`x`, a mask as torch's, as an array: no function, and none of `fastattn.masks`."""
    function = callable(x) and not hasattr(x, "__array__")
    if function or hasattr(x, "to_array"):
        what = "a function" if function else short(x)
        raise TypeError(f"(): {name} is {what}; expected an array (masks.Mask.to_array makes one)")
    return as_array(name, x)


def shared(x: Any) -> Array:
    """`x` as an array: the same memory wherever NumPy can read it."""
    if hasattr(x, "__array__") or not hasattr(x, "__dlpack__"):
        return np.asarray(x)
    kind, number = x.__dlpack_device__()
    if kind not in _HOST:
        raise BufferError(f"it is on device {number} of DLPack's type {int(kind)}, not in the CPU's memory")
    return np.from_dlpack(x)


def is_masked(x: Any) -> bool:
    """Whether `x` is a masked array, without importing numpy.ma to know."""
    return isinstance(x, np.ndarray) and hasattr(x, "mask")


def _holds_masked(x: list[Any] | tuple[Any, ...], depth: int) -> bool:
    """Whether the list, or a list nested in it up to `depth` deep, holds masked arrays.

    It looks at the types of all elements, which takes a tenth of the time of converting the list.
    """
    level: list[Any] = [x]
    for _ in range(depth):
        level = list(chain.from_iterable(each for each in level if isinstance(each, (list, tuple))))
        if any(issubclass(kind, np.ndarray) and hasattr(kind, "mask") for kind in set(map(type, level))):
            return True
    return False


def float_array(name: str, x: Any, least_dims: int = 0, hint: str = "") -> Array:
    """`x` as an array of one of the four floating types, in any strides and byte order.

    The message to one who passes another type ends with `hint`.
    """
    array = as_array(name, x)
    if not is_float(array.dtype):
        if name in KEYS_VALUES and array.dtype == np.int8:
            hint = hint or " (attention takes int8 with k_scale and v_scale)"
        raise wrong_dtype(name, array, f"float32, float64, float16 or bfloat16{hint}")
    if array.dtype.isnative:
        _native.add(array.dtype)
    return require_dims(name, array, least_dims)


def require_dims(name: str, array: Array, least_dims: int) -> Array:
    """Raise unless `array`, an operand of attention, has so many dimensions."""
    if array.ndim < least_dims:
        expected = "(..., heads, length, head_dim), or (length, head_dim) for one head"
        raise wrong_shape(name, array, expected)
    return array


def integer_array(name: str, x: Any, expected: str = "integers") -> Array:
    """`x` as an array of integers of any type, which messages call `expected`."""
    if type(x) is np.ndarray and x.dtype.kind in "iu":  # the usual case: this takes a tenth of the time
        return x
    array = as_array(name, x)
    if array.dtype.kind not in "iu":
        raise wrong_dtype(name, array, expected)
    return array


def real_array(name: str, x: Any) -> Array:
    """`x` as an array of real numbers, which the caller converts: floats or integers, but no bools."""
    array = as_array(name, x)
    if array.dtype.kind not in "iu" and not is_float(array.dtype):
        raise wrong_dtype(name, array, "float32, float64, float16, bfloat16 or integers")
    return array


def readable(array: Array, name: str, copies: list[str], last_axis: str = "") -> Array:
    """`array`, or a copy if the kernels cannot read it in place; the reason is appended to `copies`.

    If `last_axis` names the last axis, it has to be contiguous.
    """
    reasons = []
    if not array.dtype.isnative:
        reasons.append("foreign byte order")
    if not array.flags.aligned:
        reasons.append("elements not aligned to their size")
    if last_axis and array.shape[-1] > 1 and array.size and array.strides[-1] != array.itemsize:
        reasons.append(f"{last_axis} not contiguous (stride of {array.strides[-1]} bytes)")
    if not reasons:
        return array
    copies.append(f"{name} copied: {', '.join(reasons)}")
    return copied(array, np.empty(array.shape, array.dtype.newbyteorder("=")))


def is_ready(x: Any, least_dims: int) -> TypeGuard[Array]:
    """Whether `x` is a floating array that is native, aligned, and contiguous along its last axis.

    This is a quick test, which most arrays pass. `float_array` and `readable` convert the others, or raise.
    """
    if type(x) is not np.ndarray or x.dtype not in _native or x.ndim < least_dims:
        return False
    flags = x.flags.num & _READABLE
    return flags == _READABLE or (flags == ALIGNED and x.strides[-1] == x.itemsize)


def operand(name: str, x: Any, copies: list[str], hint: str = "") -> Array:
    """`x` as q, k or v: a floating array that is native, aligned, and contiguous along the head dimension."""
    if is_ready(x, 2):
        return x
    return readable(float_array(name, x, 2, hint), name, copies, "the head dimension")


def is_int4(x: Any) -> bool:
    """Whether `x` is keys or values of a cache in int4."""
    return isinstance(x, np.ndarray) and x.dtype.kind == "V" and x.dtype == INT4


def keys_operand(name: str, x: Any, copies: list[str], hint: str = "") -> Array:
    """`x` as k or v: as `operand`, or bytes in INT4."""
    if is_int4(x):
        array = require_dims(name, as_array(name, x), 2)
        if array.shape[-1] % INT4_BYTES:
            raise wrong_shape(name, array, f"a last axis of a multiple of {INT4_BYTES} bytes in int4")
        return readable(array, name, copies, "the head dimension")
    return operand(name, x, copies, hint)


def int8_operand(name: str, scale: str, x: Any, copies: list[str]) -> Array:
    """`x` as k or v beside the argument `scale`: int8, contiguous along the head dimension."""
    array = as_array(name, x)
    if array.dtype != np.int8:
        raise wrong_dtype(name, array, f"int8, as {scale} is given")
    return readable(require_dims(name, array, 2), name, copies, "the head dimension")


def real_values(name: str, x: Any, dtype: np.dtype[Any], copies: list[str]) -> Array:
    """`x`, numbers, as `dtype`."""
    array = real_array(name, x)
    if array.dtype.newbyteorder("=") == dtype:
        return readable(array, name, copies)
    copies.append(f"{name} converted: {array.dtype} to {dtype}")
    with np.errstate(over="ignore"):  # a float64 too large for float32 becomes infinite
        return array.astype(dtype)


def head_values(name: str, x: Any, shape: Shape, dtype: np.dtype[Any], copies: list[str]) -> Array:
    """`x`, one number for each query head, as `dtype`; it broadcasts to `shape`, (*batch, heads_q)."""
    array = real_array(name, x)
    require_broadcast(name, array.shape, shape, "(..., heads_q)")
    if array.dtype != dtype:
        copies.append(f"{name} converted: {array.dtype} to {dtype}")
    with np.errstate(over="ignore"):  # a float64 too large for float32 becomes infinite
        return np.array(array, dtype, ndmin=1)


def integers(
    name: str, x: Any, shape: Shape | None = None, dims: str = "", low: int = -(2**62), high: int = 2**62
) -> Ints:
    """`x`, integers from `low` to `high`, as int64; it broadcasts to `shape`, if given, called `dims`."""
    if type(x) is int and low <= x <= high:  # the usual case: this takes a tenth of the time
        return np.array(x, np.int64)
    array = integer_array(name, x)
    if shape is not None:
        require_broadcast(name, array.shape, shape, dims)
    if array.size and not (low <= (least := array.min()) and (most := array.max()) <= high):
        raise ValueError(f"(): {name} has {most if low <= least else least}; expected {low} to {high}")
    return np.array(array, np.int64)


def of_sequences(name: str, x: Any, batch_shape: Shape, low: int = -(2**62), high: int = 2**62) -> Ints:
    """`x` as int64, one integer from `low` to `high` for all sequences, or one for each of `batch_shape`."""
    array = integers(name, x, low=low, high=high)
    if array.shape not in ((), batch_shape):
        each = f", or one for each sequence, shape {batch_shape}" if batch_shape else ""
        raise wrong_shape(name, array, f"one number{each}")
    return array


def sequence_begins(name: str, x: Any, of: str, tokens: int | None) -> Ints:
    """`x` as the begin of each sequence, and their end: the `tokens` of the argument `of`, if given."""
    given = as_array(name, x)
    begins = integers(name, given) if given.size else np.zeros(given.shape, np.int64)
    if begins.ndim != 1 or not begins.size:
        raise wrong_shape(name, begins, "(sequences + 1,)")
    if begins[0] != 0 or begins[-1] != (begins[-1] if tokens is None else tokens):
        came = f"{name} goes from {begins[0]} to {begins[-1]}"
        expected = "it to begin at 0" if tokens is None else f"0 to {tokens}, the tokens of {of}"
        raise ValueError(f"(): {came}; expected {expected}")
    if (begins[1:] < begins[:-1]).any():
        i = int(np.argmax(begins[1:] < begins[:-1]))
        came = f"{name} falls from {begins[i]} to {begins[i + 1]} at index {i + 1}"
        raise ValueError(f"(): {came}; expected it not to fall: the begin of each sequence, in order")
    return begins


def integer(name: str, x: Any, low: int, high: int | None = None) -> int:
    """`x` as an int from `low` to `high`; a bool is not accepted."""
    try:
        if isinstance(x, (bool, np.bool_)):
            raise TypeError
        value = operator.index(x)
    except TypeError:
        raise TypeError(f"(): {name} is {short(x)}; expected an integer") from None
    if value < low or (high is not None and value > high):
        no_limit = high is None or (value < low and high >= MOST_SIZE)
        expected = f"at least {low}" if no_limit else f"{low} to {high}"
        raise ValueError(f"(): {name} is {short(value)}; expected {expected}")
    return value


def number(name: str, x: Any, dtype: np.dtype[Any], positive: bool = False) -> float:
    """`x` as a float that is finite in `dtype`, and if `positive`, a normal number of `dtype` above 0."""
    if type(x) is float:
        value = x
    else:
        try:
            if isinstance(x, _NO_NUMBERS) or is_masked(x) or np.ndim(x):
                raise TypeError
            value = float(x)
        except UNCONVERTED:
            raise TypeError(f"(): {name} is {short(x)}; expected a real number") from None
    least, most = _LIMITS[dtype]
    if not abs(value) <= most:  # NaN fails this test
        raise ValueError(f"(): {name} is {value}; expected a number that is finite in {dtype}")
    if positive and value < least:
        expected = (
            f"at least {least}, the least normal number in {dtype}" if value > 0 else "a number above 0"
        )
        raise ValueError(f"(): {name} is {value}; expected {expected}")
    return value


def flag(name: str, x: Any) -> bool:
    """`x` as a bool; other types are not accepted, so that a mask never counts as True."""
    if not isinstance(x, (bool, np.bool_)):
        raise TypeError(f"(): {name} is {short(x)}; expected True or False")
    return bool(x)


def one_of(options: Collection[str]) -> str:
    """`options` as messages list what is expected."""
    return f"{'one of ' if len(options) > 1 else ''}{', '.join(options)}"


def choice(name: str, x: Any, options: Collection[str]) -> str:
    """`x`, one of the strings in `options`."""
    if not isinstance(x, str) or x not in options:
        raise ValueError(f"(): {name} is {short(x)}; expected {one_of(options)}")
    return x


def generator(name: str, x: Any) -> np.random.Generator:
    """`x` as a generator: itself, a new one of the seed `x`, or of an unpredictable seed where it is None."""
    if x is not None and not isinstance(x, np.random.Generator):
        try:
            x = integer(name, x, 0)
        except TypeError:
            expected = "a numpy.random.Generator, an integer or None"
            raise TypeError(f"(): {name} is {short(x)}; expected {expected}") from None
    return np.random.default_rng(x)


def iterated(name: str, x: Any, expected: str) -> Iterator[Any]:
    """An iterator over `x`; `expected` describes `x` in messages."""
    try:  # isinstance(x, Iterable) would accept an array of no dimensions
        return iter(x)
    except TypeError:
        raise wrong_type(name, x, expected) from None


def several(name: str, x: Any, expected: str) -> Iterator[Any]:
    """An iterator over a list, a tuple, an array, a column or a generator; others have no order or no rows.

    Of a table, a mapping or an open file, what comes out is not what `x` is taken for.
    """
    ordered = isinstance(x, (Sequence, Iterator)) or hasattr(x, "__array__")
    is_file, is_table = hasattr(x, "readline"), hasattr(type(x), "columns")
    if not ordered or is_file or is_table or isinstance(x, (str, bytes, bytearray, memoryview, Mapping)):
        raise wrong_type(name, x, expected)
    return iterated(name, x, expected)


def require_broadcast(name: str, shape: Shape, target: Shape, dims: str, hint: str = "") -> None:
    """Raise unless an array of `shape` broadcasts to `target`, which messages call `dims`."""
    if len(shape) > len(target) or any(
        n not in (1, m) for n, m in zip(reversed(shape), reversed(target), strict=False)
    ):
        expected = f"one that fits {dims} = {target}{hint}"
        raise ValueError(f"(): {name} has shape {shape}; expected {expected}")


def require_dtypes(arrays: dict[str, Array], hint: str = "", given: Iterable[Any] = ()) -> None:
    """Raise unless all have one dtype, or the first is float32 and the others are all of one 16-bit type.

    The arrays were made of what was `given`.
    """
    first, *others = (x.dtype for x in arrays.values())
    cached = first == FLOAT32 and others[0].itemsize == 2
    if any(dtype != others[0] for dtype in others) or not (first == others[0] or cached):
        came = f"{_listed(arrays)} have dtypes {_listed([first, *others])}"
        cache = f"float32 for {next(iter(arrays))} with float16 or bfloat16 for all others"
        hint += of_lists(dict(zip(arrays, given, strict=False)))
        raise TypeError(f"(): {came}; expected the same for all, or {cache}{hint}")


def of_lists(given: Mapping[str, Any]) -> str:
    """Hint of a message on dtypes, where one of the arguments `given` is a list."""
    found = (n for n, x in given.items() if isinstance(x, (list, tuple)) and np.asarray(x).dtype == FLOAT64)
    return next((f" (NumPy makes float64 of a list: np.array({name}, np.float32))" for name in found), "")


def converted(name: str, x: Any, dtype: str) -> str:
    """Hint of a message: what makes an array of `dtype` of the argument `name`."""
    return f": {name}.astype(np.{dtype})" if isinstance(x, np.ndarray) else f": np.array({name}, np.{dtype})"


def broadcast_batch(**shapes: Shape) -> Shape:
    """The batch dimensions that those of the named arrays broadcast to."""
    try:
        return np.broadcast_shapes(*shapes.values())
    except ValueError:
        came = f"{_listed(shapes)} have batch dimensions {_listed(shapes.values())}"
        raise ValueError(f"(): {came}; expected ones that broadcast to each other") from None


def _listed(items: Iterable[Any]) -> str:
    *most, last = map(str, items)
    return f"{', '.join(most)} and {last}"


_LONG = 40  # characters that a message shows of a value


def short(x: Any) -> str:
    """`x` as messages show it, as a noun: its value, or if that is long, its beginning or its type."""
    if isinstance(x, np.ndarray):
        return f"an array of shape {x.shape} and dtype {x.dtype}"
    if isinstance(x, int) and x.bit_length() > 128:  # Python refuses to print thousands of digits
        return f"an integer of {x.bit_length()} bits"
    text = repr(x)
    if len(text) <= _LONG and "\n" not in text:
        return text
    if type(x) is str:
        return f"{text[: _LONG - 4]}...{text[-1]}"
    return f"a value of type {type(x).__name__}"
