"""Writers of GGUF's blocks: how scales and minima are fitted to numbers, and where codes lie in a block.

Weighted squares of errors are least: `_least_squares` has the mathematics. In blocks of 256, the scales of
groups are codes times a scale themselves, as minima are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._least_squares import best_of, half, lines_of, nearest, planes_of, scales_of, squares

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastattn._args.types import Array

_ROUNDS = 2  # in which scales of scales, and their codes, are chosen in turn
# Codes of a group's outermost number that are tried. Whole ones find numbers again that had such codes.
_OF_4_BITS = (-8, -7.75, -7.5, -7.25, -7, -6.5, -6, -5.5, -5, -4, -3, -2, -1, -8.25, -8.5, -9)
_OF_6_BITS = (*range(-34, -15), -32.5, -31.5, -30.5)
_OF_8_BITS = (-127, -128, *range(-126, -111))
_OF_SCALES = tuple(range(63, 31, -1))  # of the largest of several scales
# Likewise, how many scales lie between the ends of a group.
_RANGES = (15, 14.75, 14.5, 14.25, 14, 13.7, 13.4, *range(13, 0, -1), 12.5, 15.3, 15.6, 16)


class Writer(NamedTuple):
    """How blocks of a format are made of numbers."""

    codes: tuple[int, int]  # the lowest and the highest
    # Writes the scales of x, with weights, both (n, features), to blocks (n,).
    fit: Callable[[Array, Array, Any], None]
    put: Callable[[Any, Array], None]  # writes codes (n, features) to blocks


def _together(codes: Array, width: int, groups: int = 1) -> Array:
    """Bytes whose fields `_bits` takes apart; codes are not negative."""
    apart = codes.view(np.uint8).reshape(len(codes), groups, 8 // width, -1)
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    found: Array = np.bitwise_or.reduce(apart << shifts, axis=2)
    return found.reshape(len(codes), -1)


def _scale_writer(low: int, high: int, grid: Sequence[float], put: Callable[[Any, Array], None]) -> Writer:
    """Writer of a format with one scale a block; that of the outermost number's lowest code is tried, too."""

    def fit(x: Array, w: Array, b: Any) -> None:
        outermost = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
        tried = half(np.stack((outermost / np.float32(low), scales_of(x, w, low, high, grid)[0])))
        which = best_of(x, w, low, high, tried, np.zeros_like(tried))
        b["d"] = tried[which, np.arange(len(x)), 0]

    return Writer((low, high), fit, put)


def _put_q4_0(b: Any, codes: Array) -> None:
    b["qs"] = _together(codes + np.int8(8), 4)


def _put_q8_0(b: Any, codes: Array) -> None:
    b["qs"] = codes


def _fit_q4_1(x: Array, w: Array, b: Any) -> None:
    """Fit a line to each block; the one from its smallest to its largest number is tried, too."""
    line, first = lines_of(x, w, 15, _RANGES, below=False), x.min(axis=1, keepdims=True)
    scales = half(np.stack(((x.max(axis=1, keepdims=True) - first) / np.float32(15), line.scale)))
    minima = half(np.stack((first, line.mean - scales[1] * line.code)))
    which, each = best_of(x, w, 0, 15, scales, minima), np.arange(len(x))
    b["d"], b["m"] = scales[which, each, 0], minima[which, each, 0]


def _put_q4_1(b: Any, codes: Array) -> None:
    b["qs"] = _together(codes, 4)


def _fit_q4_k(x: Array, w: Array, b: Any) -> None:
    """Fit lines to groups of 32, then a scale to their scales, then one to what minima are best with these.

    Codes of both may then change by 1; and given all codes, both scales are those of a regression.
    """
    shape, numbers, weights = (len(x), 8), x.reshape(-1, 32), w.reshape(-1, 32)
    line, total = lines_of(numbers, weights, 15, _RANGES, below=True), weights.sum(axis=1).reshape(shape)
    wanted = line.scale.reshape(shape)
    d = half(scales_of(wanted, line.stiffness.reshape(shape), 0, 63, _OF_SCALES)[0])
    scales = nearest(wanted, d, 0.0, 0, 63)
    wanted = np.maximum((d * scales).reshape(-1, 1) * line.code - line.mean, 0).reshape(shape)
    dmin = half(scales_of(wanted, total, 0, 63, _OF_SCALES)[0])
    minima, each = nearest(wanted, dmin, 0.0, 0, 63), np.arange(len(numbers))
    for _ in range(_ROUNDS):
        near = np.array([(0, -1, 1, 0, 0), (0, 0, 0, -1, 1)], np.float32)[:, :, None, None]
        tried, below = np.clip(scales + near[0], 0, 63), np.clip(minima + near[1], 0, 63)
        lines = (d * tried).reshape(5, -1, 1), -(dmin * below).reshape(5, -1, 1)
        which = best_of(numbers, weights, 0, 15, *lines)
        scales, minima = (codes.reshape(5, -1)[which, each].reshape(shape) for codes in (tried, below))
        q = nearest(numbers, lines[0][which, each], lines[1][which, each], 0, 15).reshape(x.shape)
        units = planes_of(x, w, q * scales.repeat(32, axis=1), -minima.repeat(32, axis=1))
        pairs = [(d, dmin), tuple(map(half, units))]
        d, dmin = _better(numbers, weights, (0, 15), scales, minima, pairs)
    b["d"], b["dmin"] = d[:, 0], dmin[:, 0]
    low, high = np.split(scales.astype(np.uint8), 2, axis=1)
    lower, higher = np.split(minima.astype(np.uint8), 2, axis=1)
    thirds = low | high >> 4 << 6, lower | higher >> 4 << 6, high & 15 | higher << 4
    b["scales"] = np.concatenate(thirds, axis=1)


def _better(
    x: Array, w: Array, codes: tuple[int, int], scales: Array, minima: Array, pairs: Sequence[Any]
) -> tuple[Array, Array]:
    """The pair of scales, of two, whose squares are least, for each block of `scales` and `minima`."""
    errors = [
        squares(x, w, (d * scales).reshape(-1, 1), -(dmin * minima).reshape(-1, 1), *codes)
        .reshape(scales.shape)
        .sum(axis=1, keepdims=True)
        for d, dmin in pairs
    ]
    second = errors[1] < errors[0]
    d, dmin = (np.where(second, *found[::-1]) for found in zip(*pairs, strict=True))
    return d, dmin


def _put_q4_k(b: Any, codes: Array) -> None:
    b["qs"] = _together(codes, 4, 4)


def _fit_q6_k(x: Array, w: Array, b: Any) -> None:
    """Fit scales to groups of 16, then a scale to these; and so on, as in Q4_K."""
    shape, numbers, weights = (len(x), 16), x.reshape(-1, 16), w.reshape(-1, 16)
    wanted, stiffness = (each.reshape(shape) for each in scales_of(numbers, weights, -32, 31, _OF_6_BITS))
    d = half(scales_of(wanted, stiffness, -128, 127, _OF_8_BITS)[0])
    scales, each = nearest(wanted, d, 0.0, -128, 127), np.arange(len(numbers))
    for _ in range(_ROUNDS):
        tried = np.clip(scales + np.array([0, -1, 1], np.float32)[:, None, None], -128, 127)
        lines = (d * tried).reshape(3, -1, 1)
        which = best_of(numbers, weights, -32, 31, lines, np.zeros_like(lines))
        scales = tried.reshape(3, -1)[which, each].reshape(shape)
        q = nearest(numbers, lines[which, each], 0.0, -32, 31).reshape(x.shape)
        unit, _ = planes_of(x, w, q * scales.repeat(16, axis=1), np.zeros_like(x))
        none = np.zeros_like(d)
        pairs = [(d, none), (half(unit), none)]
        d, _ = _better(numbers, weights, (-32, 31), scales, np.zeros_like(scales), pairs)
    b["d"], b["scales"] = d[:, 0], scales


def _put_q6_k(b: Any, codes: Array) -> None:
    codes = codes + np.int8(32)
    b["ql"], b["qh"] = _together(codes & 15, 4, 2), _together(codes >> 4, 2, 2)


WRITERS = {
    "Q4_0": _scale_writer(-8, 7, _OF_4_BITS, _put_q4_0),
    "Q4_1": Writer((0, 15), _fit_q4_1, _put_q4_1),
    "Q8_0": _scale_writer(-127, 127, _OF_8_BITS, _put_q8_0),
    "Q4_K": Writer((0, 15), _fit_q4_k, _put_q4_k),
    "Q6_K": Writer((-32, 31), _fit_q6_k, _put_q6_k),
}
