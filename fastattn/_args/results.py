"""Checks of arrays that a caller gives for results."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from fastattn._args.errors import wrong_dtype, wrong_shape, wrong_type
from fastattn._args.types import Array, Shape
from fastattn._args.values import ALIGNED, CONTIGUOUS, OWNS_DATA, WRITEABLE, is_masked

_WRITABLE = CONTIGUOUS | ALIGNED | WRITEABLE
# Limit of np.shares_memory: so many candidates are tried for an element that two interleaved views share.
# Views of one array that do not overlap need far fewer.
_OVERLAP_WORK: Any = 10_000


def result_array(
    out: Array | None,
    shape: Shape,
    dtype: np.dtype[Any],
    like: str,
    inputs: Iterable[tuple[str, Any, Any]],
    called: str = "out",
) -> Array:
    """`out`, checked for a result of `shape` and `dtype`, that of the argument `like`; None is a new array.

    `called` is the name of the argument `out`. It may share no memory with `inputs`, which are read while it
    is written. Each input is its name, what the caller passed, and the array made of that. The array shows
    which memory a memoryview or a tensor has.
    """
    if out is None:
        return np.empty(shape, dtype)
    flags = out.flags.num if type(out) is np.ndarray else 0
    if flags & _WRITABLE != _WRITABLE or out.dtype != dtype or out.shape != shape:
        _require_writable(out, shape, dtype, like, called)
    owns = flags & OWNS_DATA
    for name, given, array in inputs:
        memory = given if isinstance(given, np.ndarray) else array
        # Two arrays that own their memory share none: this test takes a tenth of the time.
        if memory is None or (memory.flags.num & owns and memory is not out):
            continue
        if _share_memory(out, memory):
            expected = "it apart from all inputs"
            raise ValueError(f"(): {called} shares memory with {name}; expected {expected}")
    return out


def require_apart(results: list[tuple[str, Array]]) -> None:
    """Raise if two of the named results share memory."""
    for i, (name, x) in enumerate(results):
        for other, y in results[:i]:
            if _share_memory(x, y):
                raise ValueError(f"(): {name} shares memory with {other}; expected them apart")


def _require_writable(out: Any, shape: Shape, dtype: np.dtype[Any], like: str, called: str) -> None:
    """Raise unless `out` is a writable array of `shape` and `dtype` whose elements do not overlap."""
    if not isinstance(out, np.ndarray) or is_masked(out):
        raise wrong_type(called, out, "an ndarray")
    if out.dtype != dtype:
        order = "" if out.dtype.isnative else " in native byte order"
        raise wrong_dtype(called, out, f"{like}'s, {dtype}{order}")
    if out.shape != shape:
        raise wrong_shape(called, out, shape)
    fault = ""
    if not out.flags.writeable:
        fault = "is read-only; expected a writable array"
    elif not out.flags.aligned:
        fault = "has elements not aligned to their size; expected an aligned array"
    elif out.size and shape[-1] > 1 and out.strides[-1] != out.itemsize:
        fault = f"has strides {out.strides}; expected its last axis to be contiguous"
    elif out.size and overlaps_itself(shape, out.strides, out.itemsize):
        fault = f"has strides {out.strides} for shape {shape}; expected no two elements to overlap"
    if fault:
        raise ValueError(f"(): {called} {fault}")


@lru_cache(256)  # one cache is written in each step
def overlaps_itself(shape: Shape, strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether elements of an array may overlap: a stride is less than the span of all smaller strides."""
    span = itemsize
    for stride, n in sorted((abs(stride), n) for stride, n in zip(strides, shape, strict=True) if n > 1):
        if stride < span:
            return True
        span += stride * (n - 1)
    return False


def _share_memory(a: Array, b: Array) -> bool:
    """Whether `a` and `b` share an element; True if that takes too long to decide."""
    try:
        return np.shares_memory(a, b, max_work=_OVERLAP_WORK)
    except np.exceptions.TooHardError:
        return True
