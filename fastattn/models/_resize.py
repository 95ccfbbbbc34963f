"""A part of an enlarged image, to the bit as Pillow makes it, which would enlarge the whole."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastattn._args.types import Array, Ints, Shape

NEAREST = 0  # Pillow's filter that takes one pixel
_BITS = 22  # behind the point of a weight in integers


def part(image: Array, size: Shape, rows: slice, columns: slice, resample: int) -> Array:
    """`rows` and `columns` of the uint8 `image` (height, width, 3) enlarged to `size`, (height, width)."""
    if resample == NEAREST:
        places = (_nearest(*each) for each in zip(image.shape, size, (rows, columns), strict=False))
        return image[np.ix_(*places)]
    begins, weights = _weights(image.shape[0], size[0], rows, resample)
    first, last = begins.min(), (begins + weights.shape[1]).max()
    # Pillow rounds to integers between the passes, the first of which is along rows where it enlarges.
    wide = _summed(image[first:last], *_weights(image.shape[1], size[1], columns, resample))
    return _summed(wide.swapaxes(0, 1), begins - first, weights).swapaxes(0, 1)


def _nearest(old: int, new: int, kept: slice) -> Ints:
    """The pixels that Pillow takes. It adds steps up, so that their rounding counts at a tie."""
    steps = np.full(kept.stop, old / new)
    steps[0] /= 2
    return steps.cumsum()[kept].astype(np.int64)


def _weights(old: int, new: int, kept: slice, resample: int) -> tuple[Ints, Ints]:
    """The first pixel of each sum (n,), and the weights (n, count) of it and of those that follow it."""
    support, weigh = _FILTERS[resample]
    scale = old / new
    stretch = max(scale, 1.0)
    centers = (np.arange(kept.start, kept.stop) + 0.5) * scale
    begins = np.maximum(centers - support * stretch + 0.5, 0).astype(np.int64)
    ends = np.minimum(centers + support * stretch + 0.5, old).astype(np.int64)
    pixels = begins[:, None] + np.arange((ends - begins).max())
    distances = (pixels - centers[:, None] + 0.5) * (1 / stretch)
    weights = np.where(pixels < ends[:, None], np.vectorize(weigh, [float])(distances), 0.0)
    total = weights.cumsum(axis=1)[:, -1:]  # one after another
    weights = np.divide(weights, total, out=weights, where=total != 0) * (1 << _BITS)
    return begins, np.trunc(weights + np.where(weights < 0, -0.5, 0.5)).astype(np.int64)


def _summed(image: Array, begins: Ints, weights: Ints) -> Array:
    """Weighted sums of pixels side by side: (rows, n, 3) of an image (rows, old, 3)."""
    total = np.full((len(image), len(begins), image.shape[2]), 1 << _BITS - 1, np.int32)
    for i in range(weights.shape[1]):
        places = np.minimum(begins + i, image.shape[1] - 1)  # behind the end, weights are 0
        total += image[:, places] * weights[:, i, None].astype(np.int32)
    return (total >> _BITS).clip(0, 255).astype(np.uint8)


def _sinc(x: float) -> float:
    return 1.0 if x == 0 else math.sin(x * math.pi) / (x * math.pi)


def _lanczos(x: float) -> float:
    return _sinc(x) * _sinc(x / 3) if -3 <= x < 3 else 0.0


def _bilinear(x: float) -> float:
    return max(1 - abs(x), 0.0)


def _bicubic(x: float) -> float:
    x, a = abs(x), -0.5
    if x < 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * a if x < 2 else 0.0


def _box(x: float) -> float:
    return float(-0.5 < x <= 0.5)


def _hamming(x: float) -> float:
    a, b = float(np.float32(0.54)), float(np.float32(0.46))  # as Pillow has them
    return _sinc(x) * (a + b * math.cos(x * math.pi)) if -1 < x < 1 else 0.0


# How far a filter reaches, and what it weighs a pixel at a distance, by Pillow's numbers.
_FILTERS: dict[int, tuple[float, Callable[[float], float]]] = {
    1: (3.0, _lanczos),
    2: (1.0, _bilinear),
    3: (2.0, _bicubic),
    4: (0.5, _box),
    5: (1.0, _hamming),
}
