"""Large arrays a block at a time: Ctrl-C waits for NumPy's calls to end, and temporaries stay small."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastattn._args.types import Array, Shape

# Elements of a block: milliseconds of a loop of NumPy's, and thousands of times what calling it costs.
BLOCK = 1 << 20


def blocks(shape: Shape, width: int = 1) -> Iterator[Any]:
    """Indices that cut an array of `shape`, of `width` numbers each, into blocks of at most `BLOCK`."""
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
    """`to`, with the elements of `array` in it."""
    for block in blocks(array.shape):
        to[block] = array[block]
    return to
