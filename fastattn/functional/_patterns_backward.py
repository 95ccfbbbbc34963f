"""The gradients of patterns of single keys, of neighborhoods, and of given scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.attention import attention_args
from fastattn._args.errors import wrong_shape
from fastattn._args.options import (
    LocationInnerOptions,
    NeighborhoodOptions,
    StridedInnerOptions,
    require_options,
)
from fastattn._args.types import lane_dtype
from fastattn._args.values import as_array, integer, real_array, require_broadcast
from fastattn.functional._chain import NEED, Chain
from fastattn.functional._neighborhood import grid_of
from fastattn.functional._patterns import far_ranges, interleaved, self_args
from fastattn.functional._scores import location_args
from fastattn.masks import neighborhood
from fastattn.masks._grid import neighborhood_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.types import Array, AttentionArgs, Shape


def dilated_window_attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    window: int,
    dilation: int,
    causal: bool = False,
    dlse: ArrayLike | None = None,
    need: Sequence[str] = NEED,
    **options: Unpack[StridedInnerOptions],
) -> tuple[Any, ...]:
    """Gradients of `dilated_window_attention`.

    Parameters
    ----------
    dout, out, lse, dlse, need
        As in `attention_backward`.
    q, k, v, window, dilation, causal, **options
        As they were given to `dilated_window_attention`, but for `out`.

    Returns
    -------
    tuple
        A gradient for each name in `need`, with the shape and dtype of what it is the gradient of.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    `attention_backward` of every interleaved sequence, on views: as many calls as the forward pass.
    """
    func = "dilated_window_attention_backward"
    args = self_args(func, q, k, v, options, StridedInnerOptions, True)
    chain = Chain(func, need, {"q": q, "k": k, "v": v}, options, StridedInnerOptions)
    saved = chain.saved(args, dout, out, lse, dlse)
    width, step = integer(func, "window", window, 0), integer(func, "dilation", dilation, 1)
    _add_interleaved(chain, args, *saved, step, options, causal=causal, window=(width, width))
    return chain.results()


def strided_attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    stride: int,
    dlse: ArrayLike | None = None,
    need: Sequence[str] = NEED,
    **options: Unpack[StridedInnerOptions],
) -> tuple[Any, ...]:
    """Gradients of `strided_attention`.

    Parameters
    ----------
    dout, out, lse, dlse, need
        As in `attention_backward`.
    q, k, v, stride, **options
        As they were given to `strided_attention`, but for `out`.

    Returns
    -------
    tuple
        A gradient for each name in `need`, with the shape and dtype of what it is the gradient of.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    `attention_backward` of the window, and of every interleaved sequence: they share out and lse.
    """
    func = "strided_attention_backward"
    args = self_args(func, q, k, v, options, StridedInnerOptions, True)
    chain = Chain(func, need, {"q": q, "k": k, "v": v}, options, StridedInnerOptions)
    cotangent, slope = chain.saved(args, dout, out, lse, dlse)
    step = integer(func, "stride", stride, 1)
    near = attention_args(func, q, k, v, return_lse=True, **options, window=(step, 0))
    near.out, near.lse = args.out, args.lse
    call = chain.attend(near, cotangent, slope)
    for name in NEED:
        chain.add(name, getattr(call, name))
    rest: Any = {**options, "sinks": None}
    _add_interleaved(chain, args, cotangent, slope, step, rest, row_ranges=far_ranges(args.len_q, step))
    return chain.results()


def _add_interleaved(
    chain: Chain, args: AttentionArgs, dout: Array, dlse: Any, step: int, options: Any, **more: Any
) -> None:
    """Add the gradients of all sequences of every step-th token."""
    lane = lane_dtype(args.q.dtype)
    sums = {
        name: np.zeros((*args.batch_shape, heads, args.len_q, width), lane)
        for name, heads, width in (
            ("dq", args.heads_q, args.head_dim),
            ("dk", args.heads_kv, args.head_dim),
            ("dv", args.heads_kv, args.head_dim_v),
        )
    }
    lse: Any = args.lse
    for tokens, part in interleaved(args, chain.func, step, options, **more):
        part.lse = lse[..., tokens]
        own = None if dlse is None else dlse[..., tokens]
        call = chain.attend(part, dout[..., tokens, :], own)
        for name, x in sums.items():
            if chain.wants(name):
                x[..., tokens, :] = getattr(call, name)
    for name, x in sums.items():
        chain.add(name, x)


def neighborhood_attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    kernel: int | Shape,
    dilation: int | Shape = 1,
    causal: bool | tuple[bool, ...] = False,
    dlse: ArrayLike | None = None,
    need: Sequence[str] = NEED,
    **options: Unpack[NeighborhoodOptions],
) -> tuple[Any, ...]:
    """Gradients of `neighborhood_attention`.

    Parameters
    ----------
    dout : array_like, (..., heads_q, *spatial, head_dim_v)
        The gradient of a scalar with respect to `out`, in q's dtype.
    q, k, v, kernel, dilation, causal, **options
        As they were given to `neighborhood_attention`.
    out, lse : array_like
        Its results with ``return_lse=True``.
    dlse, need
        As in `attention_backward`.

    Returns
    -------
    tuple
        A gradient for each name in `need`, with the shape and dtype of what it is the gradient of.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    `attention_backward` of flattened grids with `masks.neighborhood`: unlike in the forward pass, the queries
    of a tile lie along the last axis of the grid.
    """
    func = "neighborhood_attention_backward"
    require_options(func, options, NeighborhoodOptions)
    arrays, grid = grid_of(func, q, k, v, kernel)
    mask = neighborhood(*neighborhood_sizes(func, grid, kernel, dilation, causal))
    chain = Chain(func, need, {"q": q, "k": k, "v": v}, options, NeighborhoodOptions)
    places = int(np.prod(grid))

    def flat(x: Array, n_last: int) -> Array:
        lead = x.shape[: x.ndim - len(grid) - n_last]
        return x.reshape(*lead, places, *x.shape[x.ndim - n_last :])

    queries, keys, values = (flat(x, 1) for x in arrays)
    args = attention_args(func, queries, keys, values, mask, return_lse=True, **options)
    heads = (*args.batch_shape, args.heads_q)
    given = {}
    for name, x, last in (
        ("dout", dout, (args.head_dim_v,)),
        ("out", out, (args.head_dim_v,)),
        ("lse", lse, ()),
    ):
        array = as_array(func, name, x)
        if array.shape != (*heads, *grid, *last):
            raise wrong_shape(func, name, array, f"{(*heads, *grid, *last)}, as of the forward pass")
        given[name] = flat(array, len(last))
    if dlse is not None:
        slopes = real_array(func, "dlse", dlse)
        require_broadcast(func, "dlse", slopes.shape, (*heads, *grid), "lse's shape")
        dlse = flat(np.broadcast_to(slopes, (*heads, *grid)), 0)
    call = chain.attend(args, *chain.saved(args, **given, dlse=dlse))
    for name, x in zip(NEED, (call.dq, call.dk, call.dv), strict=True):
        if x is not None:
            chain.add(name, x.reshape(*x.shape[:-2], *grid, x.shape[-1]))
    return chain.results()


def location_attention_backward(
    dout: ArrayLike,
    logits: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    dlse: ArrayLike | None = None,
    need: Sequence[str] = ("dlogits", "dv"),
    **options: Unpack[LocationInnerOptions],
) -> tuple[Any, ...]:
    """Gradients of `location_attention`.

    Parameters
    ----------
    dout, out, lse, dlse
        As in `attention_backward`.
    logits, v, **options
        As they were given to `location_attention`, but for `out`.
    need : tuple of str, default ("dlogits", "dv")
        Which gradients to compute, and in which order to return them.

    Returns
    -------
    tuple
        A gradient for each name in `need`, with the shape and dtype of what it is the gradient of.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    `attention_backward`, with logits for a bias.
    """
    func = "location_attention_backward"
    args = location_args(func, logits, v, options, LocationInnerOptions, True)
    chain = Chain(func, need, {"logits": logits, "v": v}, options, LocationInnerOptions, bias=False)
    saved = chain.saved(args, dout, out, lse, dlse)
    call = chain.attend(args, *saved, uses={"dbias": ("dlogits",)})
    chain.add("dlogits", call.dbias)
    chain.add("dv", call.dv)
    return chain.results()
