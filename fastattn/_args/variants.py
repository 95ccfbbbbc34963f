"""The arguments of `fastattn.functional`, checked: what they add to those of `attention`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.attention import attention_args
from fastattn._args.errors import wrong_shape
from fastattn._args.ops import vector
from fastattn._args.options import NoSoftmaxOptions, RelativeOptions, require_options
from fastattn._args.types import Array, AttentionArgs, RowwiseArgs, Shape, lane_dtype
from fastattn._args.values import float_array, head_values, integer, require_broadcast

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


def per_head(name: str, x: Any, args: AttentionArgs) -> Array:
    """`x`, a number or one a query head, in the lane dtype; at least one axis."""
    return head_values(name, x, (*args.batch_shape, args.heads_q), lane_dtype(args.q.dtype), [])


def with_shape(name: str, x: Any, shape: Shape, dims: str, n_last: int, lane: np.dtype[Any]) -> Array:
    """`x` in `lane`: its last `n_last` axes are those of `shape`, called `dims`, and the others broadcast."""
    array = float_array(name, x)
    require_broadcast(name, array.shape, shape, dims)
    if array.shape[-n_last:] != shape[-n_last:]:
        raise wrong_shape(name, array, f"{dims} = {shape}")
    return np.asarray(array, lane)


def relative_args(
    q: Any, k: Any, v: Any, options: RelativeOptions, return_lse: bool
) -> tuple[AttentionArgs, np.dtype[Any], int]:
    """Return `variant_args`, the lane type, and the first query's position, the same in all sequences."""
    args = variant_args(q, k, v, options, RelativeOptions, return_lse)
    lane = lane_dtype(args.q.dtype)
    if options.get("q_offset") is not None:
        return args, lane, integer("q_offset", options["q_offset"], -(2**53), 2**53)
    if options.get("kv_lengths") is not None:
        expected = "both: one position of the first query for all sequences"
        raise ValueError(f"(): kv_lengths is given without q_offset; expected {expected}")
    return args, lane, args.len_k - args.len_q


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
