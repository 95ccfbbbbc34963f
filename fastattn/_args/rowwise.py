"""The arguments of attention with other normalisers and other scores, checked and normalised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.attention import attention_args
from fastattn._args.options import NoSoftmaxOptions, require_options
from fastattn._args.types import RowwiseArgs, lane_dtype
from fastattn._args.values import float_array, integer, require_broadcast

if TYPE_CHECKING:
    from fastattn._args.types import Array, AttentionArgs


def rowwise_args(func: str, kind: str, q: Any, k: Any, v: Any, options: NoSoftmaxOptions) -> RowwiseArgs:
    """Check what every kind has."""
    require_options(func, options, NoSoftmaxOptions)
    return RowwiseArgs(attention_args(func, q, k, v, **options), kind)


def top_k_args(func: str, q: Any, k: Any, v: Any, top_k: Any, options: NoSoftmaxOptions) -> RowwiseArgs:
    """Check those of `top_k_attention`; more keys than there are is all of them."""
    args = rowwise_args(func, "top_k", q, k, v, options)
    args.top_k = min(integer(func, "top_k", top_k, 1), max(1, args.attention.len_k))
    return args


def additive_args(func: str, q: Any, k: Any, v: Any, weight: Any, options: NoSoftmaxOptions) -> RowwiseArgs:
    """Check those of `additive_attention`."""
    if options.get("scale") is None:
        options["scale"] = 1.0
    args = rowwise_args(func, "additive", q, k, v, options)
    a = args.attention
    array = float_array(func, "weight", weight)
    require_broadcast(func, "weight", array.shape, (a.heads_q, a.head_dim), "(heads_q, head_dim)", "")
    lanes = array.astype(lane_dtype(a.q.dtype))
    args.weight = np.ascontiguousarray(np.broadcast_to(lanes, (a.heads_q, a.head_dim)))
    return args


def talking_args(
    func: str, q: Any, k: Any, v: Any, pre: Any, post: Any, options: NoSoftmaxOptions
) -> RowwiseArgs:
    """Check those of `talking_heads_attention`."""
    args = rowwise_args(func, "talking_heads", q, k, v, options)
    args.pre = _mixing(func, "pre", pre, args.attention)
    args.post = _mixing(func, "post", post, args.attention)
    return args


def _mixing(func: str, name: str, x: Any, a: AttentionArgs) -> Array | None:
    if x is None:
        return None
    array = float_array(func, name, x)
    if array.shape != (a.heads_q, a.heads_q):
        raise ValueError(
            f"{func}(): {name} has shape {array.shape}; expected {(a.heads_q, a.heads_q)}, (heads_q, heads_q)"
        )
    return np.array(array, lane_dtype(a.q.dtype), order="C")  # a copy: the result may share its memory
