"""Linear attention: tokens read and update a state of fixed size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fastattn._args.errors import named
from fastattn._args.options import Backend
from fastattn._args.recurrent import recurrent_args, recurrent_backward_args
from fastattn._args.recurrent_types import RecurrentArgs, RecurrentBackwardArgs
from fastattn._args.types import Array, ArrayLike, Shape
from fastattn._args.values import is_float, shared
from fastattn._engine import dispatch
from fastattn.functional._differentiable import Request, Steps, differentiable

if TYPE_CHECKING:
    Rule = Literal["linear", "decay", "gated", "delta", "gated_delta", "kimi_delta"]
    State = Array | tuple[Array, Array]
    Result = Array | tuple[Array, State]  # the state where it is asked for


@differentiable("q", "k", "v", "log_decay", "beta", "erase", "state", calls_kernels=True)
def linear_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    rule: Rule,
    log_decay: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    erase: ArrayLike | None = None,
    causal: bool = True,
    scale: float | None = None,
    normalize: bool = False,
    eps: float = 1e-6,
    state: State | None = None,
    begins: ArrayLike | None = None,
    return_state: bool = False,
    out_state: State | None = None,
    out: Array | None = None,
    num_threads: int | None = None,
    backend: Backend | None = None,
) -> Steps[Result]:
    r"""Linear attention with a recurrent state, ``out_t = scale * S_t.T @ q_t``.

    Each token updates the state S (head_dim, head_dim_v):

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

    Here S is the state after the previous token, ``a = exp(log_decay)`` and ``b = beta``. With `erase`, delta
    rules compute ``S^T erase`` instead of ``S^T k``.

    Parameters
    ----------
    q : array_like, (..., heads_q, len, head_dim)
        Queries: float32, float64, float16 or bfloat16. Apply a feature map first where the rule needs one
        (`fastattn.functional.feature_maps`).
    k : array_like, (..., heads_k, len, head_dim)
        Keys in q's dtype, or 16-bit with v for float32 queries. Normalize the keys of delta rules to length 1
        at most (`feature_maps.unit`), or the state may grow without bound.
    v : array_like, (..., heads_v, len, head_dim_v)
        Values. There are ``heads = max(heads_k, heads_v)`` states, a multiple of both numbers. State h reads
        head ``h // (heads // heads_k)`` of k, and head ``h // (heads // heads_v)`` of v. heads_q is a
        multiple of heads (query head h reads state ``h // (heads_q // heads)``), or divides it (as in
        Qwen3-Next).
    rule : {"linear", "decay", "gated", "delta", "gated_delta", "kimi_delta"}
    log_decay : array_like, (heads,), (..., heads, len) or, gated and kimi_delta, (..., heads, len, head_dim)
        Logarithms of the decays, at most 0; -inf clears the state, except for NaN and infinities (use
        `begins` to separate documents). A length of 1 applies to all tokens.
    beta : array_like, (..., heads, len), optional
        Write strength of delta rules, default 1; may exceed 1.
    erase : array_like, (..., heads_k, len, head_dim), optional
        Keys by which delta rules read the value to replace, in k's dtype; default k. If they differ much from
        k, the state may grow.
    causal : bool, default True
        If False (rule "linear" only), every query reads the last state, and q and k may differ in length.
    scale : float, optional
        Default ``head_dim ** -0.5``; with `normalize`, 1.
    normalize : bool, default False
        Divide each result by ``scale * q_t . z_t + eps``, where z is the sum of keys, decayed as the state.
        Not for delta rules.
    eps : float, default 1e-6
    state : ndarray, (..., heads, head_dim, head_dim_v), optional
        Initial state, default 0: float32, or float64 for float64 inputs. With `normalize`, a pair of it and
        z, (..., heads, head_dim). With `begins`, ... is (sequences,).
    begins : array_like of int, (sequences + 1,), optional
        Boundaries of sequences of different lengths, concatenated without a batch dimension: sequence s has
        tokens ``begins[s]`` to ``begins[s + 1] - 1``. Starts with 0 and ends with the number of tokens.
    return_state : bool, default False
        Return ``(out, state)``; a later call with this `state` continues the sequence.
    out_state : ndarray, optional
        Array for the last state (a pair with `normalize`); may be `state`. Implies `return_state`.
    out, num_threads, backend
        As in `attention`; out has the shape of the result below.

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
    About ``4 * heads * len * head_dim * head_dim_v`` FLOP, 1.5 times that for delta rules. Tokens are
    processed in chunks of 32 (16 with per-feature decay), up to 4 tokens one by one: a decoding step reads
    and writes the state once. Decays are multiplied, never divided by, so nothing overflows. NaN and
    infinities reach results of their token and of later ones, even after a decay of 0, but no earlier ones.
    Sequences of `begins` have the bits of separate calls. `log_decay` and `beta` are converted to the state's
    dtype.

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
        q, k, v, rule, log_decay, beta, erase, causal, scale, normalize, eps, state,
        begins, return_state, out_state, out, num_threads, backend,
    )  # fmt: skip
    dispatch.run(args, backend)
    request = yield args.result

    given = {"log_decay": log_decay, "beta": beta, "erase": erase}
    return gradients_of(request, args, given, backend)


@named("linear_attention_backward")
def linear_attention_backward(
    dout: Any, q: Any, k: Any, v: Any, need: tuple[str, ...], **forward: Any
) -> tuple[Any, ...]:
    """Gradients of `linear_attention`, without its forward pass."""
    args = recurrent_args(q, k, v, **forward)
    return gradients_of(Request(dout, None, need), args, forward, forward.get("backend"))


def gradients_of(
    request: Request, forward: RecurrentArgs, given: dict[str, Any], backend: str | None
) -> tuple[Any, ...]:
    """Gradients of a call, of whose arguments some were `given` so.

    They are summed over axes that were broadcast and heads that were shared.
    """
    need = request.need
    args = recurrent_backward_args(request.dout, forward, need, request.dmore, given)
    dispatch.run(args, backend)
    a, results = forward, list[Any]()
    for name in need:
        if name == "dscale":
            results.append(_dscale(args))
            continue
        x: Array = getattr(args, name)
        if name == "dstate":
            results.append(x if args.dnorm is None else (x, args.dnorm))
        elif name in ("dlog_decay", "dbeta"):
            results.append(summed_like(given[name[1:]], x, 2 if a.gated and name == "dlog_decay" else 1))
        else:
            like = getattr(a, name[1:])
            if name == "dq" and args.dq_factor != a.scale:
                x = x * x.dtype.type(a.scale)
            results.append(_added(x, like.shape, 2).astype(like.dtype, copy=False))
    return tuple(results)


def summed_like(given: Any, x: Array, token_axis: int = 1) -> Array:
    """`x` in the shape and dtype of `given`: (heads,), or one that broadcasts to x. See `_added`."""
    shape = shared(given).shape
    whole = (*shape, 1) if token_axis == 1 and len(shape) == 1 else shape
    return _added(x, whole, token_axis).reshape(shape).astype(_dtype_of(given, x.dtype), copy=False)


def _dscale(args: RecurrentBackwardArgs) -> float:
    """The sum of q dq, where dq is the gradient of scaled queries."""
    dq: Any = args.dq
    heads, heads_q = dq.shape[-3], args.forward.heads_q
    q = args.forward.q
    q = np.broadcast_to(q, (*dq.shape[:-3], *q.shape[-3:]))
    total = 0.0
    for b in np.ndindex(dq.shape[:-2]):
        head = (*b[:-1], b[-1] // (heads // heads_q))
        total += float(np.vdot(q[head].astype(np.float64), dq[b].astype(np.float64)))
    return total


def _dtype_of(given: Any, otherwise: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of `given` in native byte order, or `otherwise` if it is not floating."""
    dtype = shared(given).dtype if hasattr(given, "dtype") else otherwise
    return dtype.newbyteorder("=") if is_float(dtype) else otherwise


def _added(x: Array, shape: Shape, token_axis: int) -> Array:
    """`x` summed to `shape`: over heads that share one, axes of length 1, and missing axes.

    One term after the other, so that the bits of a sum do not depend on what is computed beside it. Only
    tokens, whose axis is the last but `token_axis` - 1, may be many: they are added in float64.
    """
    if x.shape == shape:
        return x
    whole = (1,) * (x.ndim - len(shape)) + shape
    for axis, (n, kept) in enumerate(zip(x.shape, whole, strict=True)):
        if n == kept:
            continue
        if axis == x.ndim - token_axis:
            x = np.ascontiguousarray(np.moveaxis(x, axis, -1)).sum(-1, dtype=np.float64)[..., None]
            x = np.moveaxis(x, -1, axis)
            continue
        parts = x.reshape(*x.shape[:axis], kept, n // kept, *x.shape[axis + 1 :])
        total = np.zeros((*x.shape[:axis], kept, *x.shape[axis + 1 :]), x.dtype)
        for i in range(n // kept):
            total += parts[(slice(None),) * (axis + 1) + (i,)]
        x = total
    return x.reshape(shape)
