"""Variants that change the result of each head: gates, and the difference of two softmaxes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fastattn import grad, ops
from fastattn._args.attention import attention_args
from fastattn._args.backward import summed_to
from fastattn._args.errors import wrong_dtype, wrong_shape
from fastattn._args.ops import epsilon, vector
from fastattn._args.options import InnerOptions, VariantOptions, require_options
from fastattn._args.types import Array, ArrayLike, AttentionArgs, Unpack, lane_dtype
from fastattn._args.values import float_array, head_values, number, operand, require_broadcast
from fastattn._args.variants import how, variant_args
from fastattn._engine import dispatch
from fastattn.functional._composed_gradients import ComposedGradients, cotangents, product_sums, shown
from fastattn.functional._differentiable import Steps, differentiable


@differentiable("q", "k", "v", "gate", options=VariantOptions)
def gated_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    gate: ArrayLike,
    *,
    return_lse: bool = False,
    **options: Unpack[VariantOptions],
) -> Steps[Any]:
    """Gated attention, ``attention(q, k, v) * sigmoid(gate)``.

    Parameters
    ----------
    q, k, v, return_lse
        As in `attention`, also for results and errors.
    gate : array_like, (..., heads_q, len_q, head_dim_v) or (..., heads_q, len_q, 1)
        Logits, computed from the layer's input; per feature or per head. q's dtype.
    **options
        Keyword arguments of `attention` except stats.

    Notes
    -----
    `attention` and one pass over the result; ``output_gate=True`` in `layers.MultiHeadAttention`. Source: Z.
    Qiu et al., "Gated Attention for Large Language Models", 2025, arXiv:2505.06708.
    """
    args = variant_args(q, k, v, options, VariantOptions, return_lse)
    share = _shares(args, gate, options)
    dispatch.run(args, options.get("backend"))
    np.multiply(args.out, share, out=args.out)
    request = yield args.result

    found = ComposedGradients(request, options)
    dout, dlse = cotangents(args, request)
    lane = lane_dtype(args.q.dtype)
    share, dout, gated = share.astype(lane), dout.astype(lane), args.out.astype(lane)
    terms = np.where(gated == 0, 0, dout * gated)  # a row without keys has no gradient
    found.add("dgate", terms * (1 - share))
    # The kernels need the sum over features of dout * out of attention itself: it is that of `terms`, which
    # dlse carries. A row of zeros stands for out; its last axis is one that kernels read.
    args.out = np.broadcast_to(np.zeros(args.out.shape[-1], args.out.dtype), args.out.shape)
    dlse = (0 if dlse is None else dlse) - terms.sum(axis=-1)
    found.add_all(found.attend(args, dout * share, dlse))
    return found.results()


def _shares(args: AttentionArgs, gate: Any, options: VariantOptions) -> Array:
    """Sigmoids of the gates, which broadcast to the result."""
    logits = float_array("gate", gate)
    if logits.dtype.newbyteorder("=") != args.q.dtype:
        raise wrong_dtype("gate", logits, f"q's, {args.q.dtype}")
    dims = "(..., heads_q, len_q, head_dim_v), or 1 for the last,"
    require_broadcast("gate", logits.shape, args.out.shape, dims)
    return ops.activate(np.atleast_1d(logits), "sigmoid", **how(options))


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
        q1 and q2 of each head, alternating.
    k : array_like, (..., 2 * heads_kv, len_k, head_dim)
        k1 and k2 of each head, alternating.
    v : array_like, (..., heads_kv, len_k, head_dim_v)
        Shared by both; in the paper head_dim_v is 2 * head_dim.
    lambda_ : float or array_like, (..., heads_q)
        The paper's ``exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init``.
    lambda_init : float, optional
        Apply RMSNorm to each head's result and multiply it by ``1 - lambda_init``. In the paper
        ``0.8 - 0.6 * exp(-0.3 * layer)``, with layers from 0.
    norm_weight : array_like, (head_dim_v,), optional
        Weight of that norm.
    eps : float, default 1e-5
        Added to its mean square.
    **options
        Keyword arguments of `attention` except out, return_lse and stats, for both softmaxes.

    Returns
    -------
    ndarray, (..., heads_q, len_q, head_dim_v)
        In q's dtype.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, before anything is computed.

    Notes
    -----
    Two calls of `attention` on strided views, and one pass over the result. In 16 bits both results are
    rounded before the subtraction. Source: T. Ye et al., "Differential Transformer", 2024, arXiv:2410.05258.
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
        normed = summed_to(x.shape, shown(dout * args.share, x))  # 0 in a row without keys
        need = ("dx", "dweight")
        dout, dweight = grad.rms_norm(
            normed, shown(x, normed), args.norm_weight, eps=args.eps, need=need, **how(options)
        )
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
    lane, share = lane_dtype(first.q.dtype), None
    heads_shape = (*first.batch_shape, first.heads_q)
    factor = head_values("lambda_", lambda_, heads_shape, lane, [])[..., None, None]
    if lambda_init is not None:
        share = lane.type(1 - number("lambda_init", lambda_init, lane))
        norm_weight = vector("norm_weight", norm_weight, (first.head_dim_v,), lane)
        eps = epsilon("eps", eps, lane)
    elif norm_weight is not None:
        raise ValueError("(): norm_weight is given without lambda_init; expected both or neither")
    return _Differential((first, second), factor, share, norm_weight, eps)
