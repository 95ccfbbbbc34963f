"""The calls of attention that the variants of `_heads.py` are: for these, and for their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from fastattn import ops
from fastattn._args.attention import attention_args
from fastattn._args.errors import wrong_shape
from fastattn._args.ops import epsilon, vector
from fastattn._args.options import InnerOptions, require_options
from fastattn._args.types import FLOAT64, lane_dtype
from fastattn._args.values import choice, float_array, number, operand
from fastattn._args.variants import how, per_head

if TYPE_CHECKING:
    from fastattn._args.options import ComputeOptions
    from fastattn._args.types import Array, AttentionArgs

# What may normalise queries and keys: functions of `ops`.
Norm = Literal["rms_norm", "layer_norm"]


@np.errstate(all="ignore")  # as in the kernels
def cosines(
    func: str, args: AttentionArgs, scale: Any, eps: Any, options: ComputeOptions
) -> tuple[Array, float]:
    """Make `args` the call of attention that cosine attention is.

    Returns the factor of products of normalised queries and keys, (..., heads_q), and the eps of the norm.
    """
    factor = per_head(func, "scale", scale, args)
    small = number(func, "eps", eps, FLOAT64, positive=True) ** 2 / args.head_dim
    if small > float(np.finfo(lane_dtype(args.q.dtype)).max):
        raise ValueError(f"{func}(): eps is {eps}; expected a number whose square is finite")
    # rms_norm leaves a length of sqrt(head_dim): the two of them are divided out of the scale.
    args.q, args.k = (ops.rms_norm(x, eps=small, **how(options)) for x in (args.q, args.k))
    factor = factor / args.head_dim
    args.scale = 1.0
    if factor.size == 1:
        args.scale = float(factor.ravel()[0])
    else:
        args.q = np.ascontiguousarray(args.q * factor[..., None, None], args.q.dtype)
    return factor, small


def qk_normed(
    func: str,
    args: AttentionArgs,
    q_weight: Any,
    k_weight: Any,
    norm: Norm,
    eps: Any,
    options: ComputeOptions,
) -> tuple[Array | None, Array | None, float]:
    """Normalise the queries and keys of `args`; returns the weights and the eps, checked."""
    choice(func, "norm", norm, get_args(Norm))
    lane = lane_dtype(args.q.dtype)
    of_queries = vector(func, "q_weight", q_weight, (args.head_dim,), lane)
    of_keys = vector(func, "k_weight", k_weight, (args.head_dim,), lane)
    small = epsilon(func, "eps", eps, lane)
    normalise: Any = getattr(ops, norm)
    args.q = normalise(args.q, of_queries, eps=small, **how(options))
    args.k = normalise(args.k, of_keys, eps=small, **how(options))
    return of_queries, of_keys, small


def general_args(
    func: str, q: Any, k: Any, v: Any, weight: Any, options: InnerOptions, taken: type, return_lse: bool
) -> tuple[AttentionArgs, Array]:
    """The call of attention that general attention is, and W in the lane dtype."""
    require_options(func, options, taken)
    queries = operand(func, "q", q, [])
    matrix = float_array(func, "weight", weight)
    keys = operand(func, "k", k, [])
    heads = queries.shape[-3] if queries.ndim > 2 else 1
    shape = (queries.shape[-1], keys.shape[-1])
    if matrix.shape not in (shape, (heads, *shape)):
        expected = f"(query_dim, head_dim) = {shape}, or one of those a head, {(heads, *shape)}"
        raise wrong_shape(func, "weight", matrix, expected)
    lane = lane_dtype(queries.dtype)
    if queries.ndim == 2:
        matrix = matrix.reshape(shape)
    matrix = matrix.astype(lane)
    projected = (queries.astype(lane, copy=False) @ matrix).astype(queries.dtype, copy=False)
    if options.get("scale") is None:
        options["scale"] = 1.0
    return attention_args(func, projected, keys, v, return_lse=return_lse, **options), matrix


class DifferentialArgs(NamedTuple):
    """Both calls of attention, and what is made of their results."""

    calls: tuple[AttentionArgs, AttentionArgs]
    factor: Array  # lambda, (..., heads_q, 1, 1)
    share: Any  # 1 - lambda_init; None: no norm
    norm_weight: Array | None
    eps: float


def differential_args(
    func: str,
    q: Any,
    k: Any,
    v: Any,
    lambda_: Any,
    lambda_init: Any,
    norm_weight: Any,
    eps: Any,
    options: InnerOptions,
    return_lse: bool,
) -> DifferentialArgs:
    """Check the arguments of differential attention."""
    require_options(func, options, InnerOptions)
    queries, keys = operand(func, "q", q, []), operand(func, "k", k, [])
    values = float_array(func, "v", v, least_dims=2)
    for name, x in (("q", queries), ("k", keys)):
        if x.ndim < 3 or x.shape[-3] % 2:
            raise wrong_shape(func, name, x, "(..., 2 * heads, length, head_dim)")
    heads = keys.shape[-3] // 2
    if (values.shape[-3] if values.ndim > 2 else 1) != heads:
        raise wrong_shape(func, "v", values, f"{heads} heads, half as many as k has, shape {keys.shape}")
    first, second = (
        attention_args(
            func, queries[..., n::2, :, :], keys[..., n::2, :, :], v, return_lse=return_lse, **options
        )
        for n in (0, 1)
    )
    factor = per_head(func, "lambda_", lambda_, first)[..., None, None]
    lane, share = lane_dtype(first.q.dtype), None
    if lambda_init is not None:
        share = lane.type(1 - number(func, "lambda_init", lambda_init, lane))
        norm_weight = vector(func, "norm_weight", norm_weight, (first.head_dim_v,), lane)
        eps = epsilon(func, "eps", eps, lane)
    elif norm_weight is not None:
        raise ValueError(f"{func}(): norm_weight is given without lambda_init; expected both or neither")
    return DifferentialArgs((first, second), factor, share, norm_weight, eps)
