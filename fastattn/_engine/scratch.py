"""Memory for temporary arrays of layers and models, kept from call to call."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._args.blocks import aligned_empty
from fastattn._args.types import Array

# Kept memory, by its use. Without it, the system hands out new pages in each call, which costs an encoder
# layer 5% of its time at (32, 128) tokens. `scratch` takes memory out, so that two threads never share it.
# NumPy's allocator keeps small arrays itself; large ones would hold too much memory.
_LEAST_KEPT, _MOST_KEPT = 1 << 18, 1 << 26
_kept: dict[str, Array] = {}


def scratch(use: str, rows: int, columns: int, dtype: np.dtype[Any]) -> Array:
    """An uninitialised array (rows, columns), from a cache line on; the caller may give it back to `keep`."""
    kept = _LEAST_KEPT <= rows * columns * dtype.itemsize <= _MOST_KEPT
    return aligned_empty((rows, columns), dtype, _kept.pop(use, None) if kept else None)


def keep(use: str, array: Array) -> None:
    """Keep the memory of `array`, which came from `scratch`, for the next call; nobody reads it any more."""
    if _LEAST_KEPT <= array.nbytes <= _MOST_KEPT:
        assert array.base is not None
        _kept[use] = array.base
