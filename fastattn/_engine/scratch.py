"""Memory of what only lives inside one call of a layer or a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fastattn._args.types import Array

# By its use: pages that the system hands out anew cost a layer at
# (32, 128) tokens 5% of its time. A use is taken out while it lasts, so that threads do not share it; small
# arrays, which the allocator keeps itself, and those above the limit are not worth keeping.
_LEAST_KEPT, _MOST_KEPT = 1 << 18, 1 << 26
_ALIGNMENT = 64
_kept: dict[str, Array] = {}


def scratch(use: str, rows: int, columns: int, dtype: np.dtype[Any]) -> Array:
    """An array (rows, columns) of anything, to be given back to `keep`, or not."""
    n_bytes = rows * columns * dtype.itemsize
    if not _LEAST_KEPT <= n_bytes <= _MOST_KEPT:
        return np.empty((rows, columns), dtype)
    memory = _kept.pop(use, None)
    if memory is None or len(memory) < n_bytes + _ALIGNMENT:
        memory = np.empty(n_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    array: Array = memory[start : start + n_bytes].view(dtype).reshape(rows, columns)
    return array


def keep(use: str, array: Array) -> None:
    """Keep the memory of `array`, of `scratch`, for the next one; nobody reads it any more."""
    if array.base is not None:
        _kept[use] = array.base
