"""Large arrays, block by block: Ctrl-C waits for the current block only, and temporary arrays stay small."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from fastattn._args.types import Array, Shape

# Elements of a block: NumPy takes milliseconds for it, thousands of times the overhead of a call.
BLOCK = 1 << 20
_ALIGNMENT = 64  # a cache line


def blocks(shape: Shape, width: int = 1) -> Iterator[Any]:
    """Indices of blocks of an array of `shape`; with `width` numbers an element, a block has up to BLOCK."""
    most, axis = max(1, BLOCK // max(1, width)), len(shape)
    while axis and math.prod(shape[axis - 1 :]) <= most:
        axis -= 1
    if axis == 0:
        yield ...
        return
    step = max(1, most // max(1, math.prod(shape[axis:])))
    for outer in np.ndindex(shape[: axis - 1]):
        for i in range(0, shape[axis - 1], step):
            yield (*outer, slice(i, i + step), ...)


def copied(array: Array, to: Array) -> Array:
    """Copy `array` to `to`, and return `to`."""
    for block in blocks(array.shape):
        to[block] = array[block]
    return to


def aligned_empty(shape: Shape, dtype: Any, memory: Array | None = None) -> Array:
    """An uninitialised array that begins at a cache line; in `memory`, bytes, if that is large enough."""
    n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if memory is None or len(memory) < n_bytes + _ALIGNMENT:
        memory = np.empty(n_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    array: Array = memory[start : start + n_bytes].view(dtype).reshape(shape)
    return array
