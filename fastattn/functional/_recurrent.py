"""Attention without softmax: a state of fixed size is carried from token to token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fastattn._args.recurrent import recurrent_args
from fastattn._engine import dispatch

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fastattn._args.options import Backend
    from fastattn._args.types import Array

    Rule = Literal["linear", "decay", "gated", "delta", "gated_delta", "kimi_delta"]
    State = Array | tuple[Array, Array]


def linear_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    rule: Rule,
    log_decay: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    causal: bool = True,
    scale: float | None = None,
    normalize: bool = False,
    eps: float = 1e-6,
    state: State | None = None,
    return_state: bool = False,
    out_state: State | None = None,
    out: Array | None = None,
    num_threads: int | None = None,
    backend: Backend | None = None,
) -> Any:
    r"""``out_t = scale * S_t.T @ q_t``, where every token writes to the state S (head_dim, head_dim_v).

    ============= ================================================================== =====================
    rule          S_t                                                                who
    ============= ================================================================== =====================
    "linear"      ``S + k v^T``                                                      linear attention [1]_
    "decay"       ``a S + k v^T``                                                    RetNet [2]_, Mamba-2
                                                                                     [3]_
    "gated"       ``diag(a) S + k v^T``                                              GLA [4]_
    "delta"       ``S + b k (v - S^T k)^T``                                          DeltaNet [5]_
    "gated_delta" ``a S + b k (v - (a S)^T k)^T``                                    gated DeltaNet [6]_
    "kimi_delta"  ``diag(a) S + b k (v - (diag(a) S)^T k)^T``                        Kimi Linear [7]_
    ============= ================================================================== =====================

    with S of the token before, ``a = exp(log_decay)`` and ``b = beta``.

    Parameters
    ----------
    q : array_like, (..., heads_q, len, head_dim)
        float32, float64, float16 or bfloat16; features of queries, where the rule asks for a feature map
        (`fastattn.functional.feature_maps`).
    k : array_like, (..., heads_k, len, head_dim)
        q's dtype, or 16-bit with v, for float32 queries. The delta rules expect vectors of length 1 at most
        (as models ensure by normalising them), or the state may grow without bound.
    v : array_like, (..., heads_v, len, head_dim_v)
        There are ``heads = max(heads_k, heads_v)`` states, a multiple of both: state h reads head
        ``h // (heads // heads_k)`` of k, and so for v. heads_q is a multiple of heads (grouped queries: query
        head h reads state ``h // (heads_q // heads)``), or divides it (as in Qwen3-Next, where queries and
        keys have fewer heads than values).
    rule : {"linear", "decay", "gated", "delta", "gated_delta", "kimi_delta"}
    log_decay : array_like, (heads,), (..., heads, len) or, gated and kimi_delta, (..., heads, len, head_dim)
        Logarithms of decays, 0 or less; -inf forgets all that was. A length of 1 is the same for all tokens.
    beta : array_like, (..., heads, len), optional
        Write strength of the delta rules, 1 if left out. It may exceed 1.
    causal : bool, default True
        If False, which only "linear" knows, every query reads the state after the last key, and the length
        of q may be another than that of k.
    scale : float, optional
        Default ``head_dim ** -0.5``; with `normalize`, 1.
    normalize : bool, default False
        Divide each result by ``scale * q_t . z_t + eps``, where z is the sum of the keys, decayed as the
        state is. Not with the delta rules.
    eps : float, default 1e-6
    state : ndarray, (..., heads, head_dim, head_dim_v), optional
        What stood before the first token; 0 if left out. float32, float64 for float64 q, k and v. With
        `normalize` a pair of it and z, (..., heads, head_dim).
    return_state : bool, default False
        Return ``(out, state)``: with it, a later call goes on where this one ended.
    out_state : ndarray, optional
        Where that state goes (a pair with `normalize`); it may be `state` itself, and implies `return_state`.
    out : ndarray, (..., max(heads_q, heads), len, head_dim_v), optional
        Where the result goes: q's dtype, last axis contiguous.
    num_threads : int, optional
        Default ``get_num_threads()``. Any number gives the same bits.
    backend : {"compiled", "numpy"}, optional
        Run this implementation and no other.

    Returns
    -------
    out : ndarray, (..., max(heads_q, heads), len, head_dim_v)
        In q's dtype.
    state : ndarray, or a pair of them
        Only with `return_state` or `out_state`.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    About ``4 * heads * len * head_dim * head_dim_v`` FLOP, half as much again with the delta rules. Tokens
    are taken 32 at a time (16 with a decay for every dimension), up to 4 of them one by one: decoding reads
    and writes the state once. Decays are multiplied and never divided by, so that nothing overflows. What is
    not finite reaches the results of its token and of those after it, and a decay of 0 does not clear it; it
    reaches no earlier one. `log_decay` and `beta` are converted to the state's dtype where they have another.

    References
    ----------
    .. [1] A. Katharopoulos et al., "Transformers are RNNs", 2020, arXiv:2006.16236.
    .. [2] Y. Sun et al., "Retentive Network: A Successor to Transformer for Large Language Models", 2023,
       arXiv:2307.08621.
    .. [3] T. Dao and A. Gu, "Transformers are SSMs", 2024, arXiv:2405.21060.
    .. [4] S. Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training", 2024,
       arXiv:2312.06635.
    .. [5] S. Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024,
       arXiv:2406.06484.
    .. [6] S. Yang, J. Kautz and A. Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule",
       2024, arXiv:2412.06464.
    .. [7] Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025, arXiv:2510.26692.

    Examples
    --------
    >>> import numpy as np
    >>> from fastattn.functional import linear_attention
    >>> q = k = v = np.ones((2, 100, 64), np.float32)
    >>> out, state = linear_attention(q, k, v, rule="decay", log_decay=[-0.1, -0.2], return_state=True)
    >>> step = np.ones((2, 1, 64), np.float32)
    >>> next_out, state = linear_attention(
    ...     step, step, step, rule="decay", log_decay=[-0.1, -0.2], state=state, out_state=state
    ... )
    >>> next_out.shape, state.shape
    ((2, 1, 64), (2, 64, 64))
    """
    args = recurrent_args(
        "linear_attention", q, k, v, rule, log_decay, beta, causal, scale, normalize, eps, state,
        return_state, out_state, out, num_threads, backend,
    )  # fmt: skip
    dispatch.run(args, backend)
    return args.result
