"""Memory that is kept from call to call: the system hands out new pages in each, and clears them.

NumPy's allocator keeps small arrays itself; large ones would hold too much memory.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fastattn._args.blocks import aligned_empty
from fastattn._args.types import Array, Shape

# Temporary arrays of layers and models, by their use: new ones cost an encoder layer 5% of its time at
# (32, 128) tokens. `scratch` takes memory out, so that two threads never share it.
_LEAST_SCRATCH, _MOST_SCRATCH = 1 << 18, 1 << 26
_scratch: dict[str, Array] = {}

# What a forward pass keeps for its gradients, by its bytes: new memory costs 5% of a training step, and
# sometimes much more.
_LEAST_KEPT, _MOST_KEPT = 1 << 20, 1 << 30
_kept: dict[int, list[Array]] = {}


def scratch(use: str, rows: int, columns: int, dtype: np.dtype[Any]) -> Array:
    """An uninitialised array (rows, columns), from a cache line on; the caller may give it back to `keep`."""
    kept = _LEAST_SCRATCH <= rows * columns * dtype.itemsize <= _MOST_SCRATCH
    return aligned_empty((rows, columns), dtype, _scratch.pop(use, None) if kept else None)


def keep(use: str, array: Array) -> None:
    """Keep the memory of `array`, which came from `scratch`, for the next call; nobody reads it any more."""
    if _LEAST_SCRATCH <= array.nbytes <= _MOST_SCRATCH:
        assert array.base is not None
        _scratch[use] = array.base


class _Lease:
    """The owner of an array's memory: when the last view of the array is gone, so is this."""

    def __init__(self, memory: Array):
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__

    def __del__(self, kept: dict[int, list[Array]] = _kept, most: int = _MOST_KEPT) -> None:
        n_bytes = self._memory.nbytes
        if sum(size * len(free) for size, free in list(kept.items())) + n_bytes <= most:
            kept.setdefault(n_bytes, []).append(self._memory)


def recycled_empty(shape: Shape, dtype: np.dtype[Any]) -> Array:
    """An uninitialised C-contiguous array."""
    n_bytes = math.prod(shape) * dtype.itemsize
    if n_bytes < _LEAST_KEPT:
        return np.empty(shape, dtype)
    try:
        memory = _kept[n_bytes].pop()
    except (KeyError, IndexError):
        _kept.clear()  # shapes changed: drop the old blocks
        memory = aligned_empty((n_bytes,), np.dtype(np.uint8))
    result: Array = np.asarray(_Lease(memory)).view(dtype).reshape(shape)
    return result
