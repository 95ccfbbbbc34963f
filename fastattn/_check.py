"""From what a caller passed to one normalised argument object; the only place where user input raises.

`_inputs.py` checks one value at a time, this file how they fit together: shapes, dtypes, positions. Nothing is
computed before everything is checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn import masks
from fastattn._backend import get_num_threads, threads
from fastattn._inputs import (
    as_array,
    flag,
    float_array,
    head_values,
    integer,
    integers,
    is_bfloat16,
    number,
    operand,
    readable,
    require_broadcast,
    require_writable_result,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from fastattn._inputs import Shape

_FLOAT32 = np.dtype(np.float32)
_FLOAT64 = np.dtype(np.float64)
_LARGEST = {t: float(np.finfo(t).max) for t in (_FLOAT32, _FLOAT64)}
_SMALLEST = {t: float(np.finfo(t).tiny) for t in (_FLOAT32, _FLOAT64)}
# Positions beyond are not exact in float64, in which ALiBi's distances may be taken.
_MAX_POSITION = 2**53


class AttentionArgs:
    """One attention call, checked and normalised: all that the compiled layer and its NumPy twin read."""

    __slots__ = (
        "alibi_slopes",  # (..., heads_q) in the accumulator's dtype, broadcastable to (*batch_shape, heads_q), or None
        "batch_shape",  # broadcast batch dimensions of q, k and v, maybe ()
        "bias",  # ndim >= 3, broadcastable to (*batch_shape, heads_q, len_q, len_k), native and aligned, or None
        "copies",  # what was copied or converted, and why: strings, normally none
        "head_dim",
        "head_dim_v",
        "heads_kv",
        "heads_q",
        "k",  # q, k, v: native, aligned, last axis contiguous, ndim >= 3; their own batch dimensions broadcast
        "len_k",
        "len_q",
        "lse",  # (*batch_shape, heads_q, len_q) in the accumulator's dtype, or None
        "mask",  # bool, ndim >= 3, broadcastable to (*batch_shape, heads_q, len_q, len_k), or None
        "num_threads",
        "out",  # (*batch_shape, heads_q, len_q, head_dim_v) in q's dtype
        "q",
        "q_position",  # int64, broadcastable to batch_shape: position of query row 0; None unless ALiBi needs it
        "result",  # what the caller gets: out, or (out, lse), without the head axis if q, k and v had none
        "row_begin",  # row_begin, row_end: int64 in [0, len_k], ndim >= 2, broadcastable to (*batch_shape, heads_q,
        "row_end",  # len_q): row i attends keys begin <= j < end; None is an open side
        "scale",
        "sinks",  # as alibi_slopes
        "softcap",  # 0.0: none
        "v",
    )


def attention_args(
    func: str,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    q_offset: ArrayLike | None = None,
    row_ranges: tuple[ArrayLike, ArrayLike] | None = None,
    out: NDArray[Any] | None = None,
    return_lse: bool = False,
    num_threads: int | None = None,
) -> AttentionArgs:
    """Check and normalise the arguments of `func`, named in the messages; see `fastattn.attention`."""
    args = AttentionArgs()
    inputs = (("q", q), ("k", k), ("v", v), ("mask", mask), ("bias", bias), ("alibi_slopes", alibi_slopes),
              ("sinks", sinks)) if out is not None else ()  # fmt: skip
    copies: list[str] = []
    q = operand(func, "q", q, copies)
    k = operand(func, "k", k, copies)
    v = operand(func, "v", v, copies)
    dtype = q.dtype
    if not (k.dtype is dtype and v.dtype is dtype):
        _require_dtypes_fit(func, dtype, k.dtype, v.dtype)
    lane = _FLOAT64 if dtype == _FLOAT64 else _FLOAT32

    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    one_head = len(q_shape) == len(k_shape) == len(v_shape) == 2
    if len(q_shape) == 2:
        q, q_shape = q[None], (1, *q_shape)
    if len(k_shape) == 2:
        k, k_shape = k[None], (1, *k_shape)
    if len(v_shape) == 2:
        v, v_shape = v[None], (1, *v_shape)
    heads_q, len_q, head_dim = q_shape[-3:]
    heads_kv, len_k, k_head_dim = k_shape[-3:]
    head_dim_v = v_shape[-1]
    if k_head_dim != head_dim or v_shape[-3:-1] != k_shape[-3:-1] or not heads_kv or heads_q % heads_kv or not (
        heads_q and head_dim and head_dim_v
    ):
        _raise_shapes(func, q_shape, k_shape, v_shape)
    batch_shape = q_shape[:-3]
    if k_shape[:-3] != batch_shape or v_shape[:-3] != batch_shape:
        batch_shape = _broadcast_batch(func, q_shape, k_shape, v_shape)

    args.batch_shape, args.heads_q, args.heads_kv = batch_shape, heads_q, heads_kv
    args.len_q, args.len_k, args.head_dim, args.head_dim_v = len_q, len_k, head_dim, head_dim_v
    args.q, args.k, args.v = q, k, v
    args.scale, args.softcap = head_dim**-0.5, 0.0
    args.mask = args.bias = args.alibi_slopes = args.sinks = None
    args.row_begin = args.row_end = args.q_position = None
    if scale is not None:
        args.scale = number(func, "scale", scale, _LARGEST[lane])
    if softcap is not None:
        args.softcap = number(func, "softcap", softcap, _LARGEST[lane], above=_SMALLEST[lane])
    if not (mask is None and bias is None and alibi_slopes is None and sinks is None):
        _add_arrays(args, func, lane, mask, bias, alibi_slopes, sinks, copies)
    if not (causal is False and window is None and alibi_slopes is None and kv_lengths is None and q_offset is None
            and row_ranges is None):  # fmt: skip
        _add_ranges(args, func, causal, window, kv_lengths, q_offset, row_ranges)
    args.num_threads = get_num_threads() if num_threads is None else threads(func, num_threads)

    rows_shape = (len_q,) if one_head else (*batch_shape, heads_q, len_q)
    if out is None:
        out = np.empty((*rows_shape, head_dim_v), dtype)
    else:
        require_writable_result(func, out, (*rows_shape, head_dim_v), dtype, inputs)
    args.out = out[None] if one_head else out
    if return_lse is False:
        args.lse, args.result = None, out
    else:
        lse = np.empty(rows_shape, lane) if flag(func, "return_lse", return_lse) else None
        args.lse = lse[None] if one_head and lse is not None else lse
        args.result = out if lse is None else (out, lse)
    args.copies = tuple(copies)
    return args


def _require_dtypes_fit(func: str, q: np.dtype[Any], k: np.dtype[Any], v: np.dtype[Any]) -> None:
    """Raise unless all are the same, or k and v are a 16-bit cache for float32 queries."""
    if not (q == k == v or (q == _FLOAT32 and k == v and k.itemsize == 2)):
        raise TypeError(f"{func}(): q, k and v have dtypes {q}, {k} and {v}; expected the same for all, or float32 for q"
                        f" with float16 or bfloat16 for both k and v")  # fmt: skip


def _raise_shapes(func: str, q: Shape, k: Shape, v: Shape) -> None:
    """Say which of the last three axes, (heads, length, head_dim), do not fit."""
    for name, shape in (("q", q), ("k", k), ("v", v)):
        for axis, what in ((-3, "heads"), (-1, "head_dim")):
            if shape[axis] < 1:
                raise ValueError(f"{func}(): {name} has shape {shape}, {what} 0; expected at least 1")
    if k[-1] != q[-1]:
        raise ValueError(f"{func}(): k has shape {k}, head_dim {k[-1]}; expected head_dim {q[-1]} as in q, shape {q}")
    if v[-2] != k[-2]:
        raise ValueError(f"{func}(): v has shape {v}, length {v[-2]}; expected length {k[-2]} as in k, shape {k}")
    if v[-3] != k[-3]:
        raise ValueError(f"{func}(): v has shape {v}, {v[-3]} heads; expected {k[-3]} heads as in k, shape {k}")
    raise ValueError(f"{func}(): q has shape {q}, {q[-3]} heads; expected a multiple of the {k[-3]} heads of k and v")


def _broadcast_batch(func: str, q: Shape, k: Shape, v: Shape) -> Shape:
    """Batch dimensions of the result."""
    try:
        return np.broadcast_shapes(q[:-3], k[:-3], v[:-3])
    except ValueError:
        raise ValueError(f"{func}(): q, k and v have batch dimensions {q[:-3]}, {k[:-3]} and {v[:-3]} (shapes {q}, {k},"
                         f" {v}); expected ones that broadcast to each other") from None  # fmt: skip


def _add_arrays(
    args: AttentionArgs, func: str, lane: np.dtype[Any], mask: Any, bias: Any, alibi_slopes: Any, sinks: Any, copies: list[str]
) -> None:
    """Check mask, bias, alibi_slopes and sinks into `args`."""
    heads_shape = (*args.batch_shape, args.heads_q)
    shape, dims = (*heads_shape, args.len_q, args.len_k), "(..., heads_q, len_q, len_k)"
    if mask is not None:
        mask = as_array(func, "mask", mask)
        if mask.dtype != np.bool_:
            raise TypeError(f"{func}(): mask has dtype {mask.dtype}; expected bool, True where a query attends"
                            f" (numbers to add to the scores are bias=)")  # fmt: skip
        require_broadcast(func, "mask", mask.shape, shape, dims)
        args.mask = mask if mask.ndim >= 3 else mask[(None,) * (3 - mask.ndim)]
    if bias is not None:
        bias = as_array(func, "bias", bias)
        native = bias.dtype.newbyteorder("=") if bias.dtype.kind == "f" else bias.dtype
        if native not in (_FLOAT32, args.q.dtype):
            hint = "; a bool array is mask=" if native == np.bool_ else ""
            raise TypeError(f"{func}(): bias has dtype {bias.dtype}; expected float32 or q's, {args.q.dtype}{hint}")
        require_broadcast(func, "bias", bias.shape, shape, dims)
        bias = readable(bias, "bias", copies)
        args.bias = bias if bias.ndim >= 3 else bias[(None,) * (3 - bias.ndim)]
    if alibi_slopes is not None:
        args.alibi_slopes = head_values(func, "alibi_slopes", alibi_slopes, heads_shape, lane)
    if sinks is not None:
        args.sinks = head_values(func, "sinks", sinks, heads_shape, lane)


def _add_ranges(
    args: AttentionArgs, func: str, causal: Any, window: Any, kv_lengths: Any, q_offset: Any, row_ranges: Any
) -> None:
    """Check what selects keys by their place, and turn it into row_begin and row_end; O(batch * heads * len_q)."""
    len_q, len_k, batch_shape = args.len_q, args.len_k, args.batch_shape
    left, right = _window_sides(func, window)
    causal = flag(func, "causal", causal)
    bounded = left is not None or right is not None
    ranges: list[masks.Range] = []

    length = np.array(len_k)
    if kv_lengths is not None:
        length = integers(func, "kv_lengths", kv_lengths, batch_shape, "the batch dimensions")
        _require_range(func, "kv_lengths", length, 0, len_k)
        ranges.append(masks.lengths(length))
    if q_offset is not None:
        offset = integers(func, "q_offset", q_offset, batch_shape, "the batch dimensions")
        _require_range(func, "q_offset", offset, -_MAX_POSITION, _MAX_POSITION)
    else:
        offset = length - len_q
        if kv_lengths is not None and (causal or bounded or args.alibi_slopes is not None) and np.any(offset < 0):
            raise ValueError(
                f"{func}(): kv_lengths has {length.min()} for {len_q} queries, so that by default (the last query stands at"
                f" the last key) the first would stand at {offset.min()}; expected q_offset to be given: q_offset=0 if"
                f" query i stands at key i (padded self-attention)"
            )
    if causal or bounded:
        position = masks.positions(offset, len_q)
        if causal:
            ranges.append(masks.causal(position))
        if bounded:
            ranges.append(masks.window(position, left, right))
    if row_ranges is not None:
        ranges.append(_explicit_ranges(func, row_ranges, (*batch_shape, args.heads_q, len_q)))
    args.row_begin, args.row_end = masks.intersect(ranges, len_k)
    if args.alibi_slopes is not None:
        args.q_position = offset


def _window_sides(func: str, window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"{func}(): window is {window!r}; expected a pair (left, right) of integers or None")
    left, right = (None if n is None else integer(func, f"window[{i}]", n, 0) for i, n in enumerate(window))
    return left, right


def _explicit_ranges(func: str, row_ranges: Any, shape: Shape) -> masks.Range:
    if not isinstance(row_ranges, (tuple, list)) or len(row_ranges) != 2:
        raise TypeError(f"{func}(): row_ranges is of type {type(row_ranges).__name__}; expected a pair (begin, end)")
    dims = "(..., heads_q, len_q)"
    begin, end = (integers(func, f"row_ranges[{i}]", x, shape, dims) for i, x in enumerate(row_ranges))
    return begin, end


def _require_range(func: str, name: str, x: NDArray[np.int64], low: int, high: int) -> None:
    bad = (x < low) | (x > high)
    if bad.any():
        raise ValueError(f"{func}(): {name} has {x[bad].flat[0]}; expected {low} to {high}")
