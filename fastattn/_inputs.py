"""One value from a caller at a time: returned in the form that the kernels take, or an error that says what was expected.

Every function takes the name of the public function and of the argument first, for its messages. How the values fit
together is `_check.py`'s business.
"""

from __future__ import annotations

import operator
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    Shape = tuple[int, ...]

# Bits of ndarray.flags.num: C-contiguous and aligned, which nearly every array is.
_READY = 0x1 | 0x100
# How long to look for an element that two interleaved views share before refusing them.
_OVERLAP_WORK = 10_000

# The native floating types met so far: bfloat16, which NumPy does not know, joins when its first array comes.
_native = {np.dtype(t) for t in (np.float32, np.float64, np.float16)}


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether `dtype` is float32, float64, float16 or bfloat16, in any byte order."""
    return dtype in _native or (dtype.kind == "f" and dtype.itemsize <= 8) or is_bfloat16(dtype)


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Whether `dtype` is ml_dtypes.bfloat16, told by its name so that ml_dtypes need not be imported."""
    return dtype.itemsize == 2 and dtype.name == "bfloat16"


def as_array(func: str, name: str, x: Any) -> NDArray[Any]:
    """`x` as a plain ndarray, any dtype."""
    if type(x) is np.ndarray:
        return x
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{func}(): {name} is a masked array, whose mask would be ignored; expected a plain array"
                        f" (say which keys count with mask=)")  # fmt: skip
    try:
        return np.asarray(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{func}(): {name} of type {type(x).__name__} does not become an array: {error}") from error


def float_array(func: str, name: str, x: Any) -> NDArray[Any]:
    """`x` as an array of one of the four floating types, any strides, any byte order."""
    array = as_array(func, name, x)
    if not is_float(array.dtype):
        raise TypeError(f"{func}(): {name} has dtype {array.dtype}; expected float32, float64, float16 or bfloat16")
    return array


def readable(array: NDArray[Any], name: str, copies: list[str], what_is_last: str = "") -> NDArray[Any]:
    """`array`, or where the kernels cannot read it in place, a copy; `copies` then gets the reason.

    With `what_is_last` given, the name of the last axis, that axis must be contiguous.
    """
    reasons = []
    if not array.dtype.isnative:
        reasons.append("foreign byte order")
    if not array.flags.aligned:
        reasons.append("elements not aligned to their size")
    if what_is_last and array.shape[-1] > 1 and array.size and array.strides[-1] != array.itemsize:
        reasons.append(f"{what_is_last} is not contiguous (stride {array.strides[-1]} bytes)")
    if not reasons:
        return array
    copies.append(f"{name} copied: {', '.join(reasons)}")
    return np.array(array, array.dtype.newbyteorder("="), order="C")


def operand(func: str, name: str, x: Any, copies: list[str]) -> NDArray[Any]:
    """`x` as q, k or v: a floating array that is native, aligned, and contiguous along the head dimension."""
    if type(x) is np.ndarray and x.dtype in _native and x.flags.num & _READY == _READY:
        return x
    array = float_array(func, name, x)
    if array.ndim < 2:
        raise ValueError(f"{func}(): {name} has shape {array.shape}; expected (..., heads, length, head_dim),"
                         f" or (length, head_dim) for one head")  # fmt: skip
    array = readable(array, name, copies, "the head dimension")
    _native.add(array.dtype)
    return array


def head_values(func: str, name: str, x: Any, shape: Shape, dtype: np.dtype[Any]) -> NDArray[Any]:
    """`x`, one number a query head, in the accumulator's `dtype`; broadcasts to `shape`, (*batch, heads_q)."""
    array = float_array(func, name, x)
    require_broadcast(func, name, array.shape, shape, "(..., heads_q)")
    return np.array(array, dtype, ndmin=1)


def integers(func: str, name: str, x: Any, shape: Shape, dims: str) -> NDArray[np.int64]:
    """`x`, an integer or an array of integers, as int64; broadcasts to `shape`, described by `dims`."""
    array = as_array(func, name, x)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{func}(): {name} has dtype {array.dtype}; expected integers")
    require_broadcast(func, name, array.shape, shape, dims)
    return np.array(array, np.int64)


def integer(func: str, name: str, x: Any, low: int, high: int | None = None) -> int:
    """`x` as an int of at least `low` and at most `high`; a bool is not one."""
    try:
        value = operator.index(x)
    except TypeError:
        value = None
    if value is None or isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{func}(): {name} is {_short(x)}; expected an integer")
    if value < low or (high is not None and value > high):
        expected = f"at least {low}" if high is None else f"{low} to {high}"
        raise ValueError(f"{func}(): {name} is {value}; expected {expected}")
    return value


def number(func: str, name: str, x: Any, largest: float, above: float | None = None) -> float:
    """`x` as a float, finite in the computation (`largest`), and at least `above` where that is given."""
    if isinstance(x, (bool, np.bool_, str, bytes)) or np.ndim(x):
        raise TypeError(f"{func}(): {name} is {_short(x)}; expected a real number")
    try:
        value = float(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{func}(): {name} is {_short(x)}; expected a real number") from error
    if not isfinite(value) or abs(value) > largest:
        raise ValueError(f"{func}(): {name} is {value}; expected a finite number")
    if above is not None and value < above:
        raise ValueError(f"{func}(): {name} is {value}; expected a number above 0")
    return value


def flag(func: str, name: str, x: Any) -> bool:
    """`x` as a bool; anything else is an error, since a mask would be true as well."""
    if not isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{func}(): {name} is {_short(x)}; expected True or False")
    return bool(x)


def require_broadcast(func: str, name: str, shape: Shape, target: Shape, dims: str) -> None:
    """Raise unless an array of `shape` broadcasts to `target`, whose axes are `dims`."""
    if shape == target:
        return
    if len(shape) > len(target) or any(n not in (1, m) for n, m in zip(shape[::-1], target[::-1], strict=False)):
        raise ValueError(f"{func}(): {name} has shape {shape}; expected one that broadcasts to {dims} = {target}")


def require_writable_result(
    func: str, out: Any, shape: Shape, dtype: np.dtype[Any], inputs: Iterable[tuple[str, Any]]
) -> None:
    """Raise unless a result of `shape` and `dtype` can be written to `out` while `inputs`, (name, value), are read."""
    if not isinstance(out, np.ndarray) or isinstance(out, np.ma.MaskedArray):
        raise TypeError(f"{func}(): out is of type {type(out).__name__}; expected an ndarray")
    if out.dtype != dtype:
        raise TypeError(f"{func}(): out has dtype {out.dtype}; expected q's, {dtype}, in native byte order")
    if out.shape != shape:
        raise ValueError(f"{func}(): out has shape {out.shape}; expected {shape}")
    if not out.flags.writeable:
        raise ValueError(f"{func}(): out is read-only; expected a writable array")
    if not out.flags.aligned:
        raise ValueError(f"{func}(): out has elements not aligned to their size; expected an aligned array")
    if out.size == 0:
        return
    if shape[-1] > 1 and out.strides[-1] != out.itemsize:
        raise ValueError(f"{func}(): out has strides {out.strides}; expected its last axis to be contiguous")
    if _overlaps_itself(out):
        raise ValueError(f"{func}(): out has strides {out.strides} for shape {shape}, so that its elements overlap;"
                         f" expected an array with one place for each element")  # fmt: skip
    for name, x in inputs:
        if isinstance(x, np.ndarray) and np.may_share_memory(out, x) and _share_memory(out, x):
            raise ValueError(f"{func}(): out overlaps {name} in memory; expected an array of its own")


def _overlaps_itself(array: NDArray[Any]) -> bool:
    """Whether elements of `array` may lie over each other: some stride is less than what the smaller ones span."""
    span = array.itemsize
    for stride, n in sorted((abs(stride), n) for stride, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride < span:
            return True
        span += stride * (n - 1)
    return False


def _share_memory(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Whether `a` and `b` share an element; where that is too hard to tell, they are taken to."""
    try:
        return np.shares_memory(a, b, max_work=_OVERLAP_WORK)
    except np.exceptions.TooHardError:
        return True


def _short(x: Any) -> str:
    """`x` for a message: its value, or for what prints long, its type."""
    if isinstance(x, np.ndarray):
        return f"an array of shape {x.shape} and dtype {x.dtype}"
    text = repr(x)
    return text if len(text) <= 40 else f"a {type(x).__name__}"
