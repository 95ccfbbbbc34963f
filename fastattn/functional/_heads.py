"""Variants that change what goes into the product of queries and keys, or what comes out of each head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from fastattn import ops
from fastattn._args.options import CosineOptions, InnerOptions, VariantOptions
from fastattn._args.variants import how, variant_args
from fastattn._engine import dispatch
from fastattn.functional._head_args import cosines, differential_args, general_args, qk_normed
from fastattn.functional._pieces import run

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.types import Array
    from fastattn.functional._head_args import Norm


@overload
def cosine_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    scale: ArrayLike = 1.0,
    eps: float = 1e-12,
    return_lse: Literal[False] = False,
    **options: Unpack[CosineOptions],
) -> Array: ...
@overload
def cosine_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    scale: ArrayLike = 1.0,
    eps: float = 1e-12,
    return_lse: Literal[True],
    **options: Unpack[CosineOptions],
) -> tuple[Array, Array]: ...
@np.errstate(all="ignore")  # as in the kernels
def cosine_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    scale: ArrayLike = 1.0,
    eps: float = 1e-12,
    return_lse: bool = False,
    **options: Unpack[CosineOptions],
) -> Any:
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
    func = "cosine_attention"
    args = variant_args(func, q, k, v, options, CosineOptions, return_lse)
    cosines(func, args, scale, eps, options)
    return run(args, options)


@overload
def qk_norm_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    q_weight: ArrayLike | None = None,
    k_weight: ArrayLike | None = None,
    *,
    norm: Norm = "rms_norm",
    eps: float = 1e-6,
    return_lse: Literal[False] = False,
    **options: Unpack[VariantOptions],
) -> Array: ...
@overload
def qk_norm_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    q_weight: ArrayLike | None = None,
    k_weight: ArrayLike | None = None,
    *,
    norm: Norm = "rms_norm",
    eps: float = 1e-6,
    return_lse: Literal[True],
    **options: Unpack[VariantOptions],
) -> tuple[Array, Array]: ...
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
) -> Any:
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
    func = "qk_norm_attention"
    args = variant_args(func, q, k, v, options, VariantOptions, return_lse)
    qk_normed(func, args, q_weight, k_weight, norm, eps, options)
    return run(args, options)


@overload
def general_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    weight: ArrayLike,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[VariantOptions],
) -> Array: ...
@overload
def general_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    weight: ArrayLike,
    *,
    return_lse: Literal[True],
    **options: Unpack[VariantOptions],
) -> tuple[Array, Array]: ...
@np.errstate(all="ignore")  # as in the kernels
def general_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    weight: ArrayLike,
    *,
    return_lse: bool = False,
    **options: Unpack[VariantOptions],
) -> Any:
    """Luong's general attention, ``softmax(q_i^T W k_j) @ v``; his dot product is ``attention(scale=1.0)``.

    Parameters
    ----------
    q : array_like, (..., heads_q, len_q, query_dim)
    k, v : array_like
        As in `attention`, like the results and errors.
    weight : array_like, (query_dim, head_dim) or (heads_q, query_dim, head_dim)
        W.
    return_lse : bool, default False
        As in `attention`.
    **options
        Keyword arguments of `attention`, but stats; scale is 1 by default.

    Notes
    -----
    `attention`, and ``q @ W`` in NumPy: O(len_q * query_dim * head_dim) a head. His third form, "concat", is
    additive attention, and his "location" has no keys. Source: M.-T. Luong, H. Pham, C. D. Manning,
    "Effective Approaches to Attention-based Neural Machine Translation", 2015, arXiv:1508.04025.
    """
    args, _ = general_args("general_attention", q, k, v, weight, options, VariantOptions, return_lse)
    return run(args, options)


@np.errstate(all="ignore")  # as in the kernels
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
) -> Array:
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
    args = differential_args(
        "differential_attention", q, k, v, lambda_, lambda_init, norm_weight, eps, options, False
    )
    for call in args.calls:
        dispatch.run(call, options.get("backend"))
    first, second = args.calls
    out: Array = first.out - args.factor * second.out
    if args.share is not None:
        out = ops.rms_norm(out, args.norm_weight, eps=args.eps, **how(options)) * args.share
    return out.astype(first.out.dtype, copy=False)
