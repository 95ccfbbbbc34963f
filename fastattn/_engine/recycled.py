"""Memory for what a forward pass keeps for its gradients: that of one training step serves the next."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fastattn._args.blocks import aligned_empty
from fastattn._args.types import Array, Shape

# New memory is cleared by the system, page by page: 5% of a training step, and sometimes much more. NumPy's
# allocator keeps small arrays itself.
_LEAST_KEPT, _MOST_KEPT = 1 << 20, 1 << 30
_kept: dict[int, list[Array]] = {}  # memory that nobody uses, by its bytes


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
