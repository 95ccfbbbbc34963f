"""The arguments of a choice of keys, checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._args import key_ranges
from fastattn._args.attention import attention_args
from fastattn._args.types import Array, AttentionArgs, SelectionArgs, lane_dtype
from fastattn._args.values import (
    MAX_POSITION,
    MOST_SIZE,
    choice,
    flag,
    float_array,
    integer,
    of_sequences,
    real_values,
    require_broadcast,
)


def selection_args(
    q: Any,
    k: Any,
    top_k: Any,
    *,
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
    length = np.array(a.len_k * size)
    ranges: list[key_ranges.Range] = []
    if kv_lengths is not None:
        length = of_sequences("kv_lengths", kv_lengths, a.batch_shape, 0, a.len_k * size)
        ranges.append(key_ranges.lengths(-(-length // size)))
    offset = length - a.len_q
    if q_offset is not None:
        offset = of_sequences("q_offset", q_offset, a.batch_shape, -MAX_POSITION, MAX_POSITION)
    if flag("causal", causal):
        if q_offset is None and kv_lengths is not None and (offset < 0).any():
            came = f"kv_lengths has {length.min()} for {a.len_q} queries, and without q_offset"
            came += f" the last query is at the last key, the first at {offset.min()}"
            raise ValueError(f"(): {came}; expected q_offset=0 (query i is at key i) or another q_offset")
        ranges.append(key_ranges.causal(key_ranges.positions(np.asarray(offset), a.len_q) // size))
    a.row_end = key_ranges.intersect(ranges, a.len_k)[1]


def given_scores(args: SelectionArgs, begin: int, end: int, scores: Any) -> Array:
    """`scores`, which the argument `score` has returned for queries `begin` to `end`."""
    a = args.attention
    found = float_array("what score returns", scores)
    shape = (*a.batch_shape, a.heads_kv, end - begin, a.len_k)
    require_broadcast("what score returns", found.shape, shape, "(..., heads_kv, rows, num_blocks)")
    return np.ascontiguousarray(np.broadcast_to(found, shape), lane_dtype(a.q.dtype))
