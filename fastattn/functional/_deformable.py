"""Deformable attention: a query samples a few places of grids, wherever it says."""

from __future__ import annotations

from typing import Literal

from fastattn._args.backward import of_source
from fastattn._args.deformable import deformable_args, deformable_grad_args
from fastattn._args.options import Backend
from fastattn._args.types import Array, ArrayLike
from fastattn._engine import dispatch
from fastattn.functional._differentiable import Steps, differentiable


@differentiable("v", "locations", "weights", calls_kernels=True)
def deformable_attention(
    v: ArrayLike,
    spatial_shapes: ArrayLike,
    locations: ArrayLike,
    weights: ArrayLike,
    *,
    num_points: ArrayLike | None = None,
    mode: Literal["bilinear", "discrete"] = "bilinear",
    out: Array | None = None,
    num_threads: int | None = None,
    backend: Backend | None = None,
) -> Steps[Array]:
    """Multi-scale deformable attention: weighted sum of values sampled at each query's points.

    Values are on levels, grids of different sizes. There are no keys and no softmax: locations and weights
    are computed from the query by the caller.

    Parameters
    ----------
    v : array_like, (..., heads, len_v, head_dim)
        Values, level after level, each row by row. float32, float64, float16 or bfloat16. Arrays (..., len_v,
        heads, head_dim) are read in place as ``v.swapaxes(-3, -2)``; the result then has the same memory
        layout.
    spatial_shapes : array_like of int, (levels, 2)
        Height and width of each level, at most 2**24. Their products add up to len_v.
    locations : array_like, (..., heads, len_q, points, 2)
        (x, y) of each point, the points of the first level first. (0, 0) is the upper left corner of a level,
        (1, 1) the lower right one: the centre of pixel i of n is at (i + 1/2) / n. Computed in float32
        (float64 for float64 v), as are weights.
    weights : array_like, (..., heads, len_q, points)
        Usually a softmax over all points.
    num_points : array_like of int, (levels,), optional
        Points of each level; by default as many on all.
    mode : {"bilinear", "discrete"}, default "bilinear"
        "bilinear" interpolates between the four nearest pixels, with 0 outside, as torch's ``grid_sample``
        with ``align_corners=False``. "discrete" takes pixel (x * width + 1/2, y * height + 1/2), rounded down
        and clipped to the level, as RT-DETRv2; locations then have gradient 0.
    out : ndarray, (..., heads, len_q, head_dim), optional
        In v's dtype.
    num_threads, backend
        As in `attention`.

    Returns
    -------
    ndarray, (..., heads, len_q, head_dim)
        In v's dtype.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, before anything is computed.

    Notes
    -----
    Batch dimensions broadcast. Time is O(len_q * points * head_dim) per head, whatever len_v is; no memory
    beyond the result.

    Pixels without weight are not read, so their NaN has no effect. A location of NaN makes its query's result
    NaN, unless its weight is 0; an infinite one is outside, or clipped with "discrete". On a line between
    pixels, the gradient of a location is the one to the right and downwards, as in torch, and reads the
    pixels there. A weight's gradient is the sample, also where the weight is 0.

    Gradients of v are summed over queries in order: the bits do not depend on threads. Source: X. Zhu et al.,
    "Deformable DETR: Deformable Transformers for End-to-End Object Detection", 2020, arXiv:2010.04159;
    "discrete": W. Lv et al., "RT-DETRv2", 2024, arXiv:2407.17140.

    Examples
    --------
    >>> import numpy as np
    >>> from fastattn.functional import deformable_attention
    >>> v = np.arange(20, dtype=np.float32).reshape(1, 20, 1)  # one head; levels of 4 x 4 and 2 x 2
    >>> locations = np.full((1, 1, 2, 2), 0.5, np.float32)  # one query, a point in the middle of each level
    >>> deformable_attention(v, [(4, 4), (2, 2)], locations, np.full((1, 1, 2), 0.5)).item()
    12.5
    """
    args = deformable_args(v, spatial_shapes, locations, weights, num_points, mode, out, num_threads, backend)
    dispatch.run(args, backend)
    request = yield args.out

    back = deformable_grad_args(args, request.dout, request.need)
    dispatch.run_grad(back, backend)
    if (x := back.dlocations) is not None:
        back.dlocations = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    return tuple(of_source(request.given[name[1:]], getattr(back, name)) for name in request.need)
