"""Deformable attention and its gradient in NumPy: the readable twins of the kernels, and the fallback."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from fastattn._args.blocks import BLOCK
from fastattn._args.grad_types import DeformableGradArgs
from fastattn._args.quiet import quiet
from fastattn._args.types import Array, DeformableArgs, Ints

# Along an axis: the first place, and of it and the next one the weights, and whether they are there.
_Side = tuple[Ints, list[Array], list[Array]]


class _Block(NamedTuple):
    """The points of one level, of some queries: arrays (*batch, heads, queries, points)."""

    queries: slice
    points: slice
    size: tuple[int, int]  # width and height
    weights: Array
    nan: Array  # whether a weight or, unless that is 0, a location is NaN
    sides: list[_Side]  # of x and of y
    first: int  # row of v

    def corner(self, right: int, below: int) -> tuple[Ints, Array, Array, Array]:
        """Rows of v, whether they are there, and the weights of both sides."""
        (column, by_x, in_x), (line, by_y, in_y) = self.sides
        there = in_x[right] & in_y[below]
        rows = self.first + (line + below) * self.size[0] + column + right
        return np.where(there, rows, 0), there, by_x[right], by_y[below]


def _side(x: Array, size: int, discrete: bool) -> _Side:
    if discrete:
        some = (x == x) & (size > 0)
        cut = np.clip(np.where(some, x, 0), 0, max(0, size - 1))
        return cut.astype(np.int64), [np.ones_like(x), np.zeros_like(x)], [some, np.zeros_like(some)]
    near = (x >= -1) & (x < size)
    x = np.where(near, x, 0)
    first = np.floor(x)
    return (
        first.astype(np.int64),
        [1 - (x - first), x - first],
        [near & (first >= 0), near & (first + 1 < size)],
    )


def _blocks(a: DeformableArgs) -> Iterator[_Block]:
    shape = (*a.batch_shape, *a.weights.shape[-3:])
    places = np.broadcast_to(a.locations, (*shape[:-1], 2 * shape[-1])).reshape(*shape, 2)
    weights, length = np.broadcast_to(a.weights, shape), shape[-2]
    begin = 0
    for height, width, first, end in a.levels.tolist():
        points, begin = slice(begin, end), end
        each = max(1, weights.size // max(1, length * shape[-1]) * (end - points.start) * a.v.shape[-1])
        step = max(1, BLOCK // each)
        for i in range(0, length if end > points.start else 0, step):
            queries = slice(i, i + step)
            at, w = places[..., queries, points, :], weights[..., queries, points]
            size = np.array([width, height], at.dtype)
            # Infinity times no width is NaN: nowhere.
            x = at * size + at.dtype.type(0.5 if a.discrete else -0.5)
            nan = ((at != at).any(-1) & (w != 0)) | (w != w)
            sides = [_side(x[..., axis], (width, height)[axis], a.discrete) for axis in (0, 1)]
            yield _Block(queries, points, (width, height), w, nan, sides, first)


def _taken(v: Array, rows: Ints, wanted: Array, lane: Any) -> Array:
    """Rows of v (*batch, heads, len_v, head_dim) that are wanted, 0 for the others."""
    if not v.shape[-2]:
        return np.zeros((*rows.shape, v.shape[-1]), lane)
    flat = rows.reshape(*rows.shape[:-2], -1, 1)
    found = np.take_along_axis(v, flat, axis=-2).reshape(*rows.shape, v.shape[-1])
    return np.where(wanted[..., None], found.astype(lane), 0)


@quiet
def deformable(a: DeformableArgs) -> None:
    """Fill args.out."""
    lane = a.locations.dtype
    v = np.broadcast_to(a.v, (*a.batch_shape, *a.v.shape[-3:]))
    total = np.zeros(a.out.shape, lane)
    for block in _blocks(a):
        part = total[..., block.queries, :]
        for below, right in product((0, 1), repeat=2):
            rows, there, by_x, by_y = block.corner(right, below)
            factor = np.where(there, by_x * by_y * block.weights, 0)
            part += (factor[..., None] * _taken(v, rows, factor != 0, lane)).sum(-2)
        part += np.where(block.nan.any(-1), np.nan, 0)[..., None].astype(lane)
    a.out[...] = total


@quiet
def deformable_grad(args: DeformableGradArgs) -> None:
    """Fill args.dlocations and args.dweights, and add to args.dv: those that are there."""
    a, lane = args.forward, args.forward.locations.dtype
    v = np.broadcast_to(a.v, (*a.batch_shape, *a.v.shape[-3:]))
    for block in _blocks(a):
        dout = args.dout[..., block.queries, None, :].astype(lane)
        slopes, dweights = (
            [np.zeros(block.weights.shape, lane) for _ in range(2)],
            np.zeros_like(block.weights),
        )
        for below, right in product((0, 1), repeat=2):
            rows, there, by_x, by_y = block.corner(right, below)
            if args.dlocations is not None or args.dweights is not None:
                read = there & ((by_x != 0) | (by_y != 0))
                dot = (dout * _taken(v, rows, read, lane)).sum(-1)
                dweights += np.where((by_x != 0) & (by_y != 0), by_x * by_y * dot, 0)
                slopes[0] += (1 if right else -1) * np.where(by_y != 0, by_y * dot, 0)
                slopes[1] += (1 if below else -1) * np.where(by_x != 0, by_x * dot, 0)
            if args.dv is not None:
                _add(args.dv, rows, np.where(there, by_x * by_y * block.weights, 0), dout)
        nan = np.where(block.nan, np.nan, 0).astype(lane)
        if args.dweights is not None:
            args.dweights[..., block.queries, block.points] = dweights + nan
        if args.dlocations is None:
            continue
        for axis, slope in enumerate(slopes):
            found = np.where(block.weights != 0, slope * lane.type(block.size[axis]) * block.weights, 0)
            columns = slice(2 * block.points.start + axis, 2 * block.points.stop, 2)
            args.dlocations[..., block.queries, columns] = (0 if a.discrete else found) + nan


def _add(dv: Array, rows: Ints, factor: Array, dout: Array) -> None:
    """dv (*batch, heads, len_v, head_dim)[rows] += factor times dout, but for factors of 0."""
    used = np.nonzero(factor)
    *heads, _, _ = used
    np.add.at(dv, (*heads, rows[used]), factor[used][:, None] * dout[(*used[:-1], 0)])
