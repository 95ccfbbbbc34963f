"""The arguments of a choice of keys, and of attention to chosen ones, checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._args import key_ranges
from fastattn._args.attention import attention_args, lengths_of
from fastattn._args.errors import wrong_dtype, wrong_shape
from fastattn._args.types import Array, AttentionArgs, SelectedArgs, SelectionArgs, Shape, lane_dtype
from fastattn._args.values import (
    MAX_POSITION,
    MOST_SIZE,
    choice,
    flag,
    float_array,
    integer,
    integer_array,
    is_int4,
    real_values,
    require_broadcast,
)


def selection_args(
    q: Any,
    k: Any,
    top_k: Any,
    weights: Any,
    activation: Any,
    k_scale: Any,
    causal: Any,
    q_offset: Any,
    kv_lengths: Any,
    block_size: Any,
    first: Any,
    last: Any,
    num_threads: Any,
    backend: Any,
) -> SelectionArgs:
    """Check and normalise the arguments of `select_keys`, whose names these are."""
    how = {"scales": "k_scale", "num_threads": num_threads, "backend": backend}
    a = attention_args(q, k, k, k_scale=k_scale, v_scale=k_scale, names=("q", "k", "k"), **how)
    if is_int4(a.k):
        raise wrong_dtype("k", a.k, "floats, or int8 with k_scale")
    one_head = a.result.ndim == 2
    shapes = [np.shape(x) for x in (q, k)]
    if len(shapes[1]) < len(shapes[0]) and a.heads_kv > 1:  # more likely a batch than heads
        expected = f"as many axes as q, {shapes[0]}, where it has several heads"
        raise ValueError(f"(): k has shape {shapes[1]}; expected {expected}")
    count = integer("top_k", top_k, 1, MOST_SIZE)
    first, last = integer("first", first, 0), integer("last", last, 0)
    if first + last > count:
        came = f"first is {first} and last is {last}"
        raise ValueError(f"(): {came}; expected no more than top_k, {count}, together")
    relu = activation is not None and choice("activation", activation, ("relu",)) == "relu"
    if weights is not None:
        lanes = real_values("weights", weights, lane_dtype(a.q.dtype), [])
        shape = (a.len_q,) if one_head else (*a.batch_shape, a.heads_q, a.len_q)
        require_broadcast("weights", lanes.shape, shape, "(..., heads_q, len_q)")
        weights = lanes if lanes.ndim >= 2 else lanes[(None,) * (2 - lanes.ndim)]
    _place(a, causal, q_offset, kv_lengths, block_size)
    a.out = np.empty((*a.batch_shape, a.heads_kv, a.len_q, count), np.int64)
    a.result = a.out[0] if one_head else a.out
    return SelectionArgs(a, a.out, count, first, last, relu, weights)


def _place(a: AttentionArgs, causal: Any, q_offset: Any, kv_lengths: Any, block_size: Any) -> None:
    """Add to `a` how many blocks of keys each query may select."""
    size = integer("block_size", block_size, 1, MAX_POSITION // max(1, a.len_k))
    causal = flag("causal", causal)
    length, offset = lengths_of(kv_lengths, q_offset, a.batch_shape, a.len_q, a.len_k * size, causal)
    ranges = [] if kv_lengths is None else [key_ranges.lengths(-(-length // size))]
    if causal:
        ranges.append(key_ranges.causal(key_ranges.positions(offset, a.len_q) // size))
    a.row_end = key_ranges.intersect(ranges, a.len_k)[1]


def given_scores(args: SelectionArgs, begin: int, end: int, scores: Any) -> Array:
    """`scores`, which the argument `score` has returned for queries `begin` to `end`."""
    a = args.attention
    shape = (*a.batch_shape, a.heads_kv, end - begin, a.len_k)
    found = returned("score", scores, shape, "(..., heads_kv, rows, num_blocks)")
    return np.ascontiguousarray(found, lane_dtype(a.q.dtype))


def returned(function: str, scores: Any, shape: Shape, dims: str) -> Array:
    """`scores`, which the argument `function` has returned, of a shape that messages call `dims`."""
    found = float_array(f"what {function} returns", scores)
    require_broadcast(f"what {function} returns", found.shape, shape, dims)
    return np.broadcast_to(found, shape)


_DIMS = "(..., heads_kv, len_q, any number)"


def selected_args(
    q: Any, k: Any, v: Any, selected: Any, block_size: Any, return_lse: Any, options: Any
) -> SelectedArgs:
    """Check and normalise the arguments of `fastattn.functional.selected_attention`."""
    args = attention_args(
        q, k, v, return_lse=return_lse, names=("q", "k", "v"), scales="k_scale and v_scale", **options
    )
    size = integer("block_size", block_size, 1, 2**31 - 1)
    array = integer_array("selected", selected, "integers: keys, or blocks of keys")
    one_head = args.result.ndim == 2 if args.lse is None else args.result[0].ndim == 2
    if array.ndim < (2 if one_head else 3):
        raise wrong_shape("selected", array, "(len_q, any number)" if one_head else _DIMS)
    if array.ndim == 2:
        array = array[None]
    shape = (*args.batch_shape, args.heads_kv, args.len_q, array.shape[-1])
    require_broadcast("selected", array.shape, shape, _DIMS)
    count = -(-args.len_k // size)
    if count >= 2**31:
        raise ValueError(f"(): k has {count} blocks of {size} keys; expected fewer than {2**31}")
    if array.size and not (array.min() >= -1 and array.max() < count):
        wrong = array.min() if array.min() < -1 else array.max()
        what = "keys" if size == 1 else f"blocks of {size} keys"
        some = f"0 to {count - 1}, as k has {count} {what}, or " if count else ""
        raise ValueError(f"(): selected has {wrong}; expected {some}-1 for none")
    return SelectedArgs(args, np.asarray(array, np.int64), size)
