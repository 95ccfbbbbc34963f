"""The gradients of variants that change queries and keys, or what comes out of each head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn import ops
from fastattn._args.backward import like_result, summed_to
from fastattn._args.options import CosineInnerOptions, InnerOptions
from fastattn._args.types import lane_dtype
from fastattn._args.values import operand
from fastattn._args.variants import how, variant_args
from fastattn._engine import dispatch
from fastattn.functional._chain import NEED, Chain, product_sums, shown
from fastattn.functional._head_args import cosines, differential_args, general_args, qk_normed
from fastattn.grad import layer_norm, rms_norm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.types import Array
    from fastattn.functional._head_args import Norm

_NORMS: Any = {"rms_norm": rms_norm, "layer_norm": layer_norm}


@np.errstate(all="ignore")  # as in the kernels
def cosine_attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    scale: ArrayLike = 1.0,
    eps: float = 1e-12,
    dlse: ArrayLike | None = None,
    need: Sequence[str] = NEED,
    **options: Unpack[CosineInnerOptions],
) -> tuple[Any, ...]:
    """Gradients of `cosine_attention`.

    Parameters
    ----------
    dout, out, lse, dlse
        As in `attention_backward`: out and lse are what the forward pass returned with ``return_lse=True``.
    q, k, v, scale, eps, **options
        As they were given to `cosine_attention`, but for `out`.
    need : tuple of str, default ("dq", "dk", "dv")
        Which gradients to compute, and in which order to return them: ``"dq"``, ``"dk"``, ``"dv"``,
        ``"dscale"``, of the scale's shape, and those of options, as in `attention_backward`.

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
    `attention_backward`, and two passes over q and k.
    """
    func = "cosine_attention_backward"
    args = variant_args(func, q, k, v, options, CosineInnerOptions, True)
    chain = Chain(func, need, {"q": q, "k": k, "v": v, "scale": scale}, options, CosineInnerOptions)
    saved = chain.saved(args, dout, out, lse, dlse)
    queries, keys = args.q, args.k
    factor, small = cosines(func, args, scale, eps, options)
    once = factor.size == 1  # then it is the call's scale, and else q is times it
    args.scale, scaled = (1.0, args.q * args.scale) if once else (1.0, args.q)
    args.q = np.ascontiguousarray(scaled, args.q.dtype)
    call = chain.attend(args, *saved, uses={"dq": ("dq", "dscale")})
    factor = factor.reshape(()) if once else factor[..., None, None]
    if chain.wants("dscale"):
        units = ops.rms_norm(queries, eps=small, **how(options))
        chain.add("dscale", product_sums(shown(units, call.dq), call.dq) / args.head_dim)
    if chain.wants("dq"):
        chain.add("dq", _through(rms_norm, call.dq * factor, queries, None, small, options)[0])
    if chain.wants("dk"):
        chain.add("dk", _through(rms_norm, call.dk, keys, None, small, options)[0])
    chain.add("dv", call.dv)
    return chain.results()


def _through(
    norm: Any, dx: Any, x: Array, weight: Array | None, eps: float, options: Any
) -> tuple[Array, Array]:
    """Gradients of x and of the weight of a norm over x (..., head_dim), from that of its result."""
    dx = summed_to(x.shape, dx)
    clean = shown(x, dx)
    dx, dweight = norm(dx, clean, weight, eps=eps, need=("dx", "dweight"), **how(options))
    return dx, dweight


def qk_norm_attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    q_weight: ArrayLike | None = None,
    k_weight: ArrayLike | None = None,
    *,
    norm: Norm = "rms_norm",
    eps: float = 1e-6,
    dlse: ArrayLike | None = None,
    need: Sequence[str] = NEED,
    **options: Unpack[InnerOptions],
) -> tuple[Any, ...]:
    """Gradients of `qk_norm_attention`.

    Parameters
    ----------
    dout, out, lse, dlse
        As in `attention_backward`.
    q, k, v, q_weight, k_weight, norm, eps, **options
        As they were given to `qk_norm_attention`, but for `out`.
    need : tuple of str, default ("dq", "dk", "dv")
        As in `attention_backward`, with ``"dq_weight"`` and ``"dk_weight"``.

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
    `attention_backward`, and two passes over q and k.
    """
    func = "qk_norm_attention_backward"
    args = variant_args(func, q, k, v, options, InnerOptions, True)
    given = {"q": q, "k": k, "v": v, "q_weight": q_weight, "k_weight": k_weight}
    chain = Chain(func, need, given, options, InnerOptions)
    saved = chain.saved(args, dout, out, lse, dlse)
    queries, keys = args.q, args.k
    of_queries, of_keys, small = qk_normed(func, args, q_weight, k_weight, norm, eps, options)
    call = chain.attend(args, *saved, uses={f"d{x}": (f"d{x}", f"d{x}_weight") for x in "qk"})
    for name, dx, x, weight in (("q", call.dq, queries, of_queries), ("k", call.dk, keys, of_keys)):
        if not chain.wants(f"d{name}", f"d{name}_weight"):
            continue
        found, dweight = _through(_NORMS[norm], dx, x, weight, small, options)
        chain.add(f"d{name}", found)
        chain.add(f"d{name}_weight", dweight)
    chain.add("dv", call.dv)
    return chain.results()


@np.errstate(all="ignore")  # as in the kernels
def general_attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    weight: ArrayLike,
    *,
    dlse: ArrayLike | None = None,
    need: Sequence[str] = (*NEED, "dweight"),
    **options: Unpack[InnerOptions],
) -> tuple[Any, ...]:
    """Gradients of `general_attention`, Luong's.

    Parameters
    ----------
    dout, out, lse, dlse
        As in `attention_backward`.
    q, k, v, weight, **options
        As they were given to `general_attention`, but for `out`.
    need : tuple of str, default ("dq", "dk", "dv", "dweight")
        As in `attention_backward`, with ``"dweight"``.

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
    `attention_backward`, and the products of a linear map in NumPy.
    """
    func = "general_attention_backward"
    args, matrix = general_args(func, q, k, v, weight, options, InnerOptions, True)
    chain = Chain(func, need, {"q": q, "k": k, "v": v, "weight": weight}, options, InnerOptions)
    uses = {"dq": ("dq", "dweight")}
    call = chain.attend(args, *chain.saved(args, dout, out, lse, dlse), uses=uses)
    queries: Array = operand(func, "q", q, [])
    chain.add("dk", call.dk)
    chain.add("dv", call.dv)
    if chain.wants("dq"):
        chain.add("dq", call.dq @ matrix.swapaxes(-1, -2))
    if chain.wants("dweight"):
        chain.add("dweight", shown(queries, call.dq).swapaxes(-1, -2) @ call.dq)
    return chain.results()


@np.errstate(all="ignore")  # as in the kernels
def differential_attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    lambda_: ArrayLike,
    *,
    lambda_init: float | None = None,
    norm_weight: ArrayLike | None = None,
    eps: float = 1e-5,
    need: Sequence[str] = (*NEED, "dlambda_"),
    **options: Unpack[InnerOptions],
) -> tuple[Any, ...]:
    """Gradients of `differential_attention`.

    Parameters
    ----------
    dout : array_like, (..., heads_q, len_q, head_dim_v)
        The gradient of a scalar with respect to the result, in q's dtype.
    q, k, v, lambda_, lambda_init, norm_weight, eps, **options
        As they were given to `differential_attention`.
    need : tuple of str, default ``("dq", "dk", "dv", "dlambda_")``
        As in `attention_backward`, with ``"dlambda_"`` and ``"dnorm_weight"``.

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
    Both results are computed again: twice `attention` and `attention_backward`, with half the heads each.
    """
    func = "differential_attention_backward"
    given = {"q": q, "k": k, "v": v, "lambda_": lambda_, "norm_weight": norm_weight}
    chain = Chain(func, need, given, options, InnerOptions)
    args = differential_args(func, q, k, v, lambda_, lambda_init, norm_weight, eps, options, True)
    first, second = args.calls
    lane = lane_dtype(first.q.dtype)
    cotangent = like_result(func, "dout", dout, first, np.shape(first.result[0]), []).astype(lane)
    for call in args.calls:
        dispatch.run(call, options.get("backend"))
    if args.share is not None:
        x = first.out.astype(lane) - args.factor * second.out.astype(lane)
        normed = shown(cotangent * args.share, x)  # 0 of a row without keys
        cotangent, dweight = _through(rms_norm, normed, x, args.norm_weight, args.eps, options)
        chain.add("dnorm_weight", dweight)
    chain.add("dlambda_", -product_sums(cotangent, second.out.astype(lane)))
    for n, (call, factor) in enumerate(zip(args.calls, (lane.type(1), -args.factor), strict=True)):
        parts = chain.attend(call, cotangent * factor)
        for name, x in (("dq", parts.dq), ("dk", parts.dk)):
            if x is None:
                continue
            whole = np.zeros((*x.shape[:-3], 2 * x.shape[-3], *x.shape[-2:]), lane)
            whole[..., n::2, :, :] = x
            chain.add(name, whole)
        chain.add("dv", parts.dv)
    return chain.results()
