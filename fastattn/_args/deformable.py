"""The arguments of deformable attention, checked and normalised."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from fastattn._args.errors import wrong_shape
from fastattn._args.grad_types import DeformableGradArgs
from fastattn._args.results import result_array
from fastattn._args.types import Array, DeformableArgs, Ints, Shape, lane_dtype
from fastattn._args.values import (
    broadcast_batch,
    choice,
    integers,
    operand,
    readable,
    real_values,
)
from fastattn._engine.settings import require_backend, threads

MODES = ("bilinear", "discrete")
_MOST_SIDE = 2**24  # of a level: float32 holds all smaller integers


def deformable_args(
    v: Any,
    spatial_shapes: Any,
    locations: Any,
    weights: Any,
    num_points: Any = None,
    mode: str = "bilinear",
    out: Any = None,
    num_threads: int | None = None,
    backend: str | None = None,
) -> DeformableArgs:
    """Check the arguments of `functional.deformable_attention`."""
    require_backend(backend)
    values = operand("v", v, [])
    if values.ndim < 3:
        raise wrong_shape("v", values, "(..., heads, len_v, head_dim)")
    *batch, heads, len_v, head_dim = values.shape
    lane = lane_dtype(values.dtype)
    places = real_values("locations", locations, lane, [])
    if places.ndim < 4 or places.shape[-1] != 2 or places.shape[-4] != heads:
        expected = f"(..., heads, len_q, points, 2) with {heads} heads, as v"
        raise wrong_shape("locations", places, expected)
    *others, _, len_q, points, _ = places.shape
    shares = real_values("weights", weights, lane, [])
    if shares.ndim < 3 or shares.shape[-3:] != (heads, len_q, points):
        expected = f"(..., heads, len_q, points) = (..., {heads}, {len_q}, {points}), as locations"
        raise wrong_shape("weights", shares, expected)
    batch_shape = broadcast_batch(v=tuple(batch), locations=tuple(others), weights=shares.shape[:-3])
    levels = _levels(spatial_shapes, num_points, len_v, points)
    discrete = choice("mode", mode, MODES) == "discrete"
    inputs = [("v", v, values), ("locations", locations, places), ("weights", weights, shares)]
    shape = (*batch_shape, heads, len_q, head_dim)
    whole = result_array(out, shape, values.dtype, "v", inputs) if out is not None else None
    count = threads(num_threads)
    return DeformableArgs(
        batch_shape, levels, heads, values,
        readable(places.reshape(*places.shape[:-2], 2 * points), "locations", [], "the last axis"),
        readable(shares, "weights", [], "the last axis"),
        _room(shape, values.dtype, values) if whole is None else whole,
        discrete, count,
    )  # fmt: skip


def _levels(spatial_shapes: Any, num_points: Any, len_v: int, points: int) -> Ints:
    """Height, width, first row and end of the points of each level."""
    sides = integers("spatial_shapes", spatial_shapes, low=0, high=_MOST_SIDE)
    if sides.ndim != 2 or sides.shape[1] != 2 or not len(sides):
        raise wrong_shape("spatial_shapes", sides, "(levels, 2), the height and the width of each level")
    n = len(sides)
    sizes = [int(height) * int(width) for height, width in sides]
    if sum(sizes) != len_v:
        came = f"spatial_shapes has levels of {sum(sizes)} places"
        raise ValueError(f"(): {came}; expected {len_v}, the length of v")
    if num_points is None:
        if points % n:
            came = f"locations has {points} points, and spatial_shapes {n} levels"
            raise ValueError(f"(): {came}; expected a multiple, or num_points=, the number of each level")
        counts = np.full(n, points // n)
    else:
        counts = integers("num_points", num_points, low=0)
        if counts.shape != (n,):
            raise wrong_shape("num_points", counts, f"({n},), a number for each level of spatial_shapes")
        if sum(counts.tolist()) != points:
            came = f"num_points has {sum(counts.tolist())} points in all"
            raise ValueError(f"(): {came}; expected {points}, the points of locations")
    rows = np.cumsum([0, *sizes[:-1]])
    return np.column_stack([sides, rows, np.cumsum(counts)]).astype(np.int64)


def deformable_grad_args(args: DeformableArgs, dout: Array, need: Collection[str]) -> DeformableGradArgs:
    """The arguments of its gradient, of a checked `dout`."""
    lane = args.locations.dtype
    rows = args.out.shape[:-1]
    v = (*args.batch_shape, *args.v.shape[-3:])
    dv = _room(v, lane, args.v) if "dv" in need else None
    if dv is not None:
        dv[...] = 0
    places, shares = (
        _room((*rows, x.shape[-1]), lane, args.v) if name in need else None
        for name, x in (("dlocations", args.locations), ("dweights", args.weights))
    )
    return DeformableGradArgs(args, dout, dv, places, shares)


def _room(shape: Shape, dtype: np.dtype[Any], v: Array) -> Array:
    """A new array (..., heads, length, any) that lies in memory as v: its heads within its tokens, or not."""
    *batch, heads, length, width = shape
    if not v.swapaxes(-3, -2).flags.c_contiguous or v.flags.c_contiguous:
        return np.empty(shape, dtype)
    return np.empty((*batch, length, heads, width), dtype).swapaxes(-3, -2)
