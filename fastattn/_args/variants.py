"""The arguments of `fastattn.functional`, checked: what they add to those of `attention`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.attention import attention_args
from fastattn._args.ops import vector
from fastattn._args.options import NoSoftmaxOptions, require_options
from fastattn._args.types import AttentionArgs, RowwiseArgs, lane_dtype
from fastattn._args.values import float_array, integer, require_broadcast

if TYPE_CHECKING:
    from fastattn._args.options import ComputeOptions


def variant_args(
    q: Any, k: Any, v: Any, options: ComputeOptions, taken: type, return_lse: bool = False, **fixed: Any
) -> AttentionArgs:
    """The arguments of an inner `attention`: the caller takes the options `taken`, some are `fixed`."""
    require_options(options, taken)
    return attention_args(q, k, v, return_lse=return_lse, **fixed, **options)


def how(options: ComputeOptions) -> ComputeOptions:
    """`num_threads` and `backend` of `options`, for other operations of the same call."""
    return {"num_threads": options.get("num_threads"), "backend": options.get("backend")}


def rowwise_args(kind: str, q: Any, k: Any, v: Any, options: NoSoftmaxOptions) -> RowwiseArgs:
    """The arguments of attention that needs a whole row of scores at a time, but for those of some kinds."""
    return RowwiseArgs(variant_args(q, k, v, options, NoSoftmaxOptions), kind)


def additive_args(q: Any, k: Any, v: Any, weight: Any, options: NoSoftmaxOptions) -> RowwiseArgs:
    """The arguments of additive attention."""
    if options.get("scale") is None:
        options["scale"] = 1.0
    args = rowwise_args("additive", q, k, v, options)
    given, shape = float_array("weight", weight), (args.attention.heads_q, args.attention.head_dim)
    require_broadcast("weight", given.shape, shape, "(heads_q, head_dim)")
    lanes = given.astype(lane_dtype(args.out.dtype))
    args.weight = np.ascontiguousarray(np.broadcast_to(lanes, shape))
    return args


def talking_heads_args(q: Any, k: Any, v: Any, pre: Any, post: Any, options: NoSoftmaxOptions) -> RowwiseArgs:
    """The arguments of talking heads."""
    args = rowwise_args("talking_heads", q, k, v, options)
    lane, shape = lane_dtype(args.out.dtype), (args.attention.heads_q,) * 2
    # Copies: the result may share their memory.
    args.pre = None if pre is None else np.array(vector("pre", pre, shape, lane))
    args.post = None if post is None else np.array(vector("post", post, shape, lane))
    return args


def top_k_args(q: Any, k: Any, v: Any, top_k: Any, options: NoSoftmaxOptions) -> RowwiseArgs:
    """The arguments of attention to the k largest scores."""
    args = rowwise_args("top_k", q, k, v, options)
    # More keys than there are is all of them.
    args.top_k = min(integer("top_k", top_k, 1), max(1, args.attention.len_k))
    return args
