"""Variants that change queries and keys before their product, or the result of each head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from fastattn import grad, ops
from fastattn._args.attention import attention_args
from fastattn._args.backward import summed_to
from fastattn._args.errors import wrong_shape
from fastattn._args.ops import epsilon, vector
from fastattn._args.options import CosineOptions, InnerOptions, VariantOptions, require_options
from fastattn._args.types import FLOAT64, Array, ArrayLike, AttentionArgs, Unpack, lane_dtype
from fastattn._args.values import choice, float_array, number, operand
from fastattn._args.variants import how, per_head, variant_args
from fastattn._engine import dispatch
from fastattn.functional._composed_gradients import ComposedGradients, cotangents, product_sums, shown
from fastattn.functional._differentiable import Steps, differentiable

if TYPE_CHECKING:
    from fastattn._args.options import ComputeOptions

# The norms of queries and keys: functions of `ops`, with gradients in `grad`.
Norm = Literal["rms_norm", "layer_norm"]


@differentiable("q", "k", "v", "scale", options=CosineOptions)
def cosine_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    scale: ArrayLike = 1.0,
    eps: float = 1e-12,
    return_lse: bool = False,
    **options: Unpack[CosineOptions],
) -> Steps[Any]:
    """Cosine attention, ``softmax(scale * cos(q_i, k_j) + bias) @ v``, as in Swin v2 and QKNorm.

    Parameters
    ----------
    q, k, v, return_lse
        As in `attention`, like the results and errors.
    scale : float or array_like, (..., heads_q), default 1
        Swin v2's ``exp(min(logit_scale, log(100)))``, one a head; QKNorm's g.
    eps : float, default 1e-12
        Lengths are ``sqrt(sum(x**2) + eps**2)``.
    **options
        All other keyword arguments of `attention`, but stats.

    Notes
    -----
    `attention`, and one pass over q and k. Scores are bounded by scale. Sources: Z. Liu et al., "Swin
    Transformer V2", 2022, arXiv:2111.09883; A. Henry et al., "Query-Key Normalization for Transformers",
    2020, arXiv:2010.04245.
    """
    args = variant_args(q, k, v, options, CosineOptions, return_lse)
    queries, keys = args.q, args.k
    factor, small = _cosines(args, scale, eps, options)
    dispatch.run(args, options.get("backend"))
    request = yield args.result

    found = ComposedGradients(request, options)
    once = factor.size == 1  # then it is the call's scale, and else q has been multiplied by it
    args.scale, scaled = (1.0, args.q * args.scale) if once else (1.0, args.q)
    args.q = np.ascontiguousarray(scaled, args.q.dtype)
    call = found.attend(args, *cotangents(args, request), uses={"dq": ("dq", "dscale")})
    factor = factor.reshape(()) if once else factor[..., None, None]
    if found.wants("dscale"):
        units = ops.rms_norm(queries, eps=small, **how(options))
        found.add("dscale", product_sums(shown(units, call.dq), call.dq) / args.head_dim)
    if found.wants("dq"):
        found.add("dq", _through(grad.rms_norm, call.dq * factor, queries, None, small, options)[0])
    if found.wants("dk"):
        found.add("dk", _through(grad.rms_norm, call.dk, keys, None, small, options)[0])
    found.add("dv", call.dv)
    return found.results()


def _cosines(args: AttentionArgs, scale: Any, eps: Any, options: ComputeOptions) -> tuple[Array, float]:
    """Normalise the queries and keys of `args`, and set its scale.

    Returns the factor of products of normalised queries and keys, (..., heads_q), and the eps of the norm.
    """
    factor = per_head("scale", scale, args)
    small = number("eps", eps, FLOAT64, positive=True) ** 2 / args.head_dim
    if small > float(np.finfo(lane_dtype(args.q.dtype)).max):
        raise ValueError(f"(): eps is {eps}; expected a number whose square is finite")
    # rms_norm leaves a length of sqrt(head_dim): the two of them are divided out of the scale.
    args.q, args.k = (ops.rms_norm(x, eps=small, **how(options)) for x in (args.q, args.k))
    factor = factor / args.head_dim
    args.scale = 1.0
    if factor.size == 1:
        args.scale = float(factor.ravel()[0])
    else:
        args.q = np.ascontiguousarray(args.q * factor[..., None, None], args.q.dtype)
    return factor, small


@differentiable("q", "k", "v", "q_weight", "k_weight", options=VariantOptions)
def qk_norm_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    q_weight: ArrayLike | None = None,
    k_weight: ArrayLike | None = None,
    *,
    norm: Norm = "rms_norm",
    eps: float = 1e-6,
    return_lse: bool = False,
    **options: Unpack[VariantOptions],
) -> Steps[Any]:
    """Attention of normalised queries and keys, each head's on its own: ``attention(norm(q), norm(k), v)``.

    Parameters
    ----------
    q, k, v, return_lse
        As in `attention`, like the results and errors.
    q_weight, k_weight : array_like, (head_dim,), optional
        The norms' weights.
    norm : {"rms_norm", "layer_norm"}
        RMSNorm as in Qwen3 and OLMo 2, LayerNorm as in ViT-22B.
    eps : float, default 1e-6
    **options
        Keyword arguments of `attention`, but stats. Rotary positions come between norm and attention: there
        `ops.rms_norm` and `positions.apply_rope` do the same.

    Notes
    -----
    `attention`, and one pass over q and k. Source: M. Dehghani et al., "Scaling Vision Transformers to 22
    Billion Parameters", 2023, arXiv:2302.05442.
    """
    args = variant_args(q, k, v, options, VariantOptions, return_lse)
    queries, keys = args.q, args.k
    choice("norm", norm, get_args(Norm))
    lane = lane_dtype(args.q.dtype)
    of_queries = vector("q_weight", q_weight, (args.head_dim,), lane)
    of_keys = vector("k_weight", k_weight, (args.head_dim,), lane)
    small = epsilon("eps", eps, lane)
    normalise: Any = getattr(ops, norm)
    args.q = normalise(queries, of_queries, eps=small, **how(options))
    args.k = normalise(keys, of_keys, eps=small, **how(options))
    dispatch.run(args, options.get("backend"))
    request = yield args.result

    found = ComposedGradients(request, options)
    uses = {f"d{x}": (f"d{x}", f"d{x}_weight") for x in "qk"}
    call = found.attend(args, *cotangents(args, request), uses=uses)
    for name, dx, x, weight in (("q", call.dq, queries, of_queries), ("k", call.dk, keys, of_keys)):
        if found.wants(f"d{name}", f"d{name}_weight"):
            dx, dweight = _through(getattr(grad, norm), dx, x, weight, small, options)
            found.add(f"d{name}", dx)
            found.add(f"d{name}_weight", dweight)
    found.add("dv", call.dv)
    return found.results()


@differentiable("q", "k", "v", "lambda_", "norm_weight", options=InnerOptions)
def differential_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    lambda_: ArrayLike,
    *,
    lambda_init: float | None = None,
    norm_weight: ArrayLike | None = None,
    eps: float = 1e-5,
    **options: Unpack[InnerOptions],
) -> Steps[Array]:
    """Differential attention, ``(softmax(q1 @ k1.T) - lambda * softmax(q2 @ k2.T)) @ v``.

    Parameters
    ----------
    q : array_like, (..., 2 * heads_q, len_q, head_dim)
        q1 and q2 of each head, one after the other.
    k : array_like, (..., 2 * heads_kv, len_k, head_dim)
        Likewise k1 and k2.
    v : array_like, (..., heads_kv, len_k, head_dim_v)
        One for both; in the paper head_dim_v is 2 * head_dim.
    lambda_ : float or array_like, (..., heads_q)
        The paper's ``exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init``.
    lambda_init : float, optional
        With it each head's result goes through RMSNorm and is multiplied by ``1 - lambda_init``; the paper's
        is ``0.8 - 0.6 * exp(-0.3 * layer)``, layers counted from 0.
    norm_weight : array_like, (head_dim_v,), optional
        That norm's weight, as `eps` is its.
    **options
        Keyword arguments of `attention`, but out, return_lse and stats, for both softmaxes.

    Returns
    -------
    ndarray, (..., heads_q, len_q, head_dim_v)
        In q's dtype.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    Two calls of `attention` on strided views, and one pass over the result. In 16 bits both results are
    rounded before they are subtracted.
    Source: T. Ye et al., "Differential Transformer", 2024, arXiv:2410.05258.
    """
    args = _differential_args(q, k, v, lambda_, lambda_init, norm_weight, eps, options)
    first, second = args.calls
    for call in args.calls:
        dispatch.run(call, options.get("backend"))
    out: Array = first.out - args.factor * second.out
    if args.share is not None:
        out = ops.rms_norm(out, args.norm_weight, eps=args.eps, **how(options)) * args.share
    out = out.astype(first.out.dtype, copy=False)
    request = yield out

    found = ComposedGradients(request, options)
    lane = lane_dtype(first.q.dtype)
    dout = cotangents(first, request)[0].astype(lane)
    if args.share is not None:
        x = first.out.astype(lane) - args.factor * second.out.astype(lane)
        normed = shown(dout * args.share, x)  # 0 in a row without keys
        dout, dweight = _through(grad.rms_norm, normed, x, args.norm_weight, args.eps, options)
        found.add("dnorm_weight", dweight)
    found.add("dlambda_", -product_sums(dout, second.out.astype(lane)))
    for n, (each, factor) in enumerate(zip(args.calls, (lane.type(1), -args.factor), strict=True)):
        parts = found.attend(each, dout * factor)
        for name, dx in (("dq", parts.dq), ("dk", parts.dk)):
            if dx is not None:
                whole = np.zeros((*dx.shape[:-3], 2 * dx.shape[-3], *dx.shape[-2:]), lane)
                whole[..., n::2, :, :] = dx
                found.add(name, whole)
        found.add("dv", parts.dv)
    return found.results()


class _Differential(NamedTuple):
    """Both calls of attention, and how their results are combined."""

    calls: tuple[AttentionArgs, AttentionArgs]
    factor: Array  # lambda, (..., heads_q, 1, 1)
    share: Any  # 1 - lambda_init; None: no norm
    norm_weight: Array | None
    eps: float


def _differential_args(
    q: Any, k: Any, v: Any, lambda_: Any, lambda_init: Any, norm_weight: Any, eps: Any, options: InnerOptions
) -> _Differential:
    """Check the arguments of differential attention."""
    require_options(options, InnerOptions)
    queries, keys = operand("q", q, []), operand("k", k, [])
    values = float_array("v", v, least_dims=2)
    for name, x in (("q", queries), ("k", keys)):
        if x.ndim < 3 or x.shape[-3] % 2:
            raise wrong_shape(name, x, "(..., 2 * heads, length, head_dim)")
    heads = keys.shape[-3] // 2
    if (values.shape[-3] if values.ndim > 2 else 1) != heads:
        raise wrong_shape("v", values, f"{heads} heads, half as many as k has, shape {keys.shape}")
    first, second = (
        attention_args(queries[..., n::2, :, :], keys[..., n::2, :, :], v, return_lse=True, **options)
        for n in (0, 1)
    )
    factor = per_head("lambda_", lambda_, first)[..., None, None]
    lane, share = lane_dtype(first.q.dtype), None
    if lambda_init is not None:
        share = lane.type(1 - number("lambda_init", lambda_init, lane))
        norm_weight = vector("norm_weight", norm_weight, (first.head_dim_v,), lane)
        eps = epsilon("eps", eps, lane)
    elif norm_weight is not None:
        raise ValueError("(): norm_weight is given without lambda_init; expected both or neither")
    return _Differential((first, second), factor, share, norm_weight, eps)


def _through(
    norm: Any, dx: Any, x: Array, weight: Array | None, eps: float, options: Any
) -> tuple[Array, Array]:
    """Gradients of x (..., head_dim) and of the weight of a norm, from the gradient of its result."""
    dx = summed_to(x.shape, dx)
    dx, dweight = norm(dx, shown(x, dx), weight, eps=eps, need=("dx", "dweight"), **how(options))
    return dx, dweight
