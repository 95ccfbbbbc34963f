"""Attention with other scores than scaled products, or with another normaliser than softmax."""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np

from fastattn._args.backward import gradients, like_result, rowwise_backward_args
from fastattn._args.errors import named
from fastattn._args.options import NoSoftmaxOptions, SigmoidOptions
from fastattn._args.types import (
    Array,
    ArrayLike,
    AttentionArgs,
    BackwardArgs,
    RowwiseArgs,
    Unpack,
    lane_dtype,
)
from fastattn._args.values import number
from fastattn._args.variants import additive_args, rowwise_args, talking_heads_args, top_k_args, variant_args
from fastattn._engine import dispatch
from fastattn.functional._composed_gradients import computed
from fastattn.functional._differentiable import Request, Steps, differentiable


@differentiable("q", "k", "v", "weight", options=NoSoftmaxOptions, without=("scale",), calls_kernels=True)
def additive_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, weight: ArrayLike, **options: Unpack[NoSoftmaxOptions]
) -> Steps[Array]:
    """Additive (Bahdanau) attention: softmax of ``scores[i, j] = weight @ tanh(q[i] + k[j])``, times v.

    Parameters
    ----------
    q, k : array_like, (..., heads, len, head_dim)
        Projected queries and keys: W s and U h of the paper, biases included. Grouped heads are allowed.
    v : array_like, (..., heads_kv, len_k, head_dim_v)
        Values; in the paper, the states themselves.
    weight : array_like, (head_dim,) or (heads_q, head_dim)
        Any of the four dtypes.
    **options
        Keyword arguments of `attention` except sinks, return_lse and stats. Scale defaults to 1. Masks,
        result and errors are as in `attention`.

    Notes
    -----
    len_q * len_k * head_dim hyperbolic tangents per head, none stored; O(threads * len_k) memory for scores.
    Source: D. Bahdanau, K. Cho and Y. Bengio, "Neural Machine Translation by Jointly Learning to Align and
    Translate", 2015, arXiv:1409.0473.
    """
    return _steps(additive_args(q, k, v, weight, options), options)


@differentiable("q", "k", "v", "pre", "post", options=NoSoftmaxOptions, calls_kernels=True)
def talking_heads_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    pre: ArrayLike | None = None,
    post: ArrayLike | None = None,
    **options: Unpack[NoSoftmaxOptions],
) -> Steps[Array]:
    """Talking-heads attention: heads are mixed before the softmax, and after it.

    With ``S[h] = scale * q[h] @ k[h].T``: ``M[g] = sum_h pre[h, g] S[h]``, ``P[g] = softmax(M[g])``,
    ``out[f] = sum_g post[g, f] P[g] @ v[f]``.

    Parameters
    ----------
    q, k, v : array_like
        As in `attention`, also for the result and errors. With grouped heads, q's heads are mixed.
    pre, post : array_like, (heads_q, heads_q), optional
        Weight ``[h, g]`` of head h in head g; by default no mixing. Any of the four dtypes.
    **options
        Keyword arguments of `attention` except sinks, return_lse and stats. Masks and modifiers
        of scores apply to the mixed scores.

    Notes
    -----
    ``4 * heads * head_dim + 2 * heads * head_dim_v + 6 * heads**2`` FLOP per query and key: scores are
    computed and mixed twice, for O(threads * heads) memory. A key that a query attends in no mixed head never
    affects its results; one that it attends in some head affects all heads mixed with that one. A head
    without keys contributes nothing. Source: N. Shazeer, Z. Lan, Y. Cheng, N. Ding and L. Hou, "Talking-Heads
    Attention", 2020, arXiv:2003.02436.
    """
    return _steps(talking_heads_args(q, k, v, pre, post, options), options)


@differentiable("q", "k", "v", options=NoSoftmaxOptions, calls_kernels=True)
def sparsemax_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, **options: Unpack[NoSoftmaxOptions]
) -> Steps[Array]:
    """Sparsemax attention, ``sparsemax(scale * q @ k.T) @ v``: scores projected onto the probabilities.

    ``sparsemax(s) = max(s - tau, 0)``, with tau such that the sum is 1. It is exact: keys whose scores are 1
    or more below the largest get exactly 0.

    Parameters
    ----------
    q, k, v : array_like
        As in `attention`, also for the result and errors. Grouped heads are allowed.
    **options
        Keyword arguments of `attention` except sinks, return_lse and stats.

    Notes
    -----
    O(len_q * len_k * head_dim) per head for the scores; values are read only where some query of a tile gives
    them weight. tau is found by Newton's method, in a few passes over the remaining keys. Memory is O(threads
    * len_k) for scores, at most 32 float32 rows of len_k per thread. Values of keys with probability 0, NaN
    and Inf included, never affect the result; a query without keys gets 0. Source: A. F. T. Martins and R. F.
    Astudillo, "From Softmax to Sparsemax: A Sparse Model of Attention and Multi-Label Classification", 2016,
    arXiv:1602.02068.

    Examples
    --------
    >>> import fastattn, numpy as np
    >>> q, k = np.array([[2.0]]), np.array([[0.0], [0.25], [-3.0]])
    >>> fastattn.functional.sparsemax_attention(q, k, np.eye(3), scale=1.0)
    array([[0.25, 0.75, 0.  ]])
    """
    return _steps(rowwise_args("sparsemax", q, k, v, options), options)


@differentiable("q", "k", "v", options=NoSoftmaxOptions, calls_kernels=True)
def entmax15_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, **options: Unpack[NoSoftmaxOptions]
) -> Steps[Array]:
    """Entmax-1.5 attention, ``entmax15(scale * q @ k.T) @ v``: between softmax and sparsemax.

    ``entmax15(s) = max(s / 2 - tau, 0) ** 2``, with tau such that the sum is 1.

    Parameters
    ----------
    q, k, v, **options
        As in `sparsemax_attention`, also for the result and errors.

    Notes
    -----
    As `sparsemax_attention`; keys 2 or more below the largest score have probability 0. Source: B. Peters, V.
    Niculae and A. F. T. Martins, "Sparse Sequence-to-Sequence Models", 2019, arXiv:1905.05702.
    """
    return _steps(rowwise_args("entmax15", q, k, v, options), options)


@differentiable("q", "k", "v", options=NoSoftmaxOptions, calls_kernels=True)
def top_k_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, top_k: int, **options: Unpack[NoSoftmaxOptions]
) -> Steps[Array]:
    """Attention to the `top_k` largest scores of each query, ``softmax(top_k(scale * q @ k.T)) @ v``.

    Parameters
    ----------
    q, k, v, **options
        As in `sparsemax_attention`, also for the result and errors.
    top_k : int
        Number of keys that each query attends, at least 1; all keys if there are fewer. Ties go to the lowest
        index.

    Notes
    -----
    The k-th largest score is found by bisection, in up to 32 passes over the scores (64 in float64),
    typically half of them. Other costs are as for `sparsemax_attention`. Values of other keys never affect
    the result; a score of NaN makes its row NaN. Source: A. Gupta, G. Dar, S. Goodman, D. Ciprut and J.
    Berant, "Memory-efficient Transformers via Top-k Attention", 2021, arXiv:2106.06899.

    Examples
    --------
    >>> import fastattn, numpy as np
    >>> q, k = np.array([[1.0]]), np.array([[0.0], [9.0], [9.0], [-3.0]])
    >>> fastattn.functional.top_k_attention(q, k, np.eye(4), top_k=2)
    array([[0. , 0.5, 0.5, 0. ]])
    """
    return _steps(top_k_args(q, k, v, top_k, options), options)


@differentiable("q", "k", "v", options=SigmoidOptions, calls_kernels=True)
def sigmoid_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    sigmoid_bias: float | None = None,
    **options: Unpack[SigmoidOptions],
) -> Steps[Array]:
    """Sigmoid attention, ``sigmoid(scale * q @ k.T + sigmoid_bias) @ v``, fused.

    Weights are between 0 and 1, independent of each other. There is no denominator: no lse and no sinks, and
    results over disjoint keys (with the same `sigmoid_bias`) add up.

    Parameters
    ----------
    q, k, v : array_like
        As in `attention`, also for the result and errors.
    sigmoid_bias : float, optional
        Added to every score, last; default ``-log(len_k)`` as in the paper, so that a row's weights sum to
        about 1 before training. len_k is that of the array, whatever masks hide.
    **options
        Keyword arguments of `attention` except sinks, return_lse and stats. Masked keys have weight 0. Pass a
        bias per head as ``bias[:, None, None]``.

    Notes
    -----
    Runs in the kernels of `attention`, with the same time, memory and guarantees. Source: J. Ramapuram et
    al., "Theory, Analysis, and Best Practices for Sigmoid Self-Attention", 2024, arXiv:2409.04431.

    Examples
    --------
    >>> import fastattn, numpy as np
    >>> x = np.zeros((1, 2, 4, 8))
    >>> fastattn.functional.sigmoid_attention(x, x, x + 1)[0, 0, 0]  # four weights of 1 / (1 + 4)
    array([0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8])
    """
    args = sigmoid_args(q, k, v, sigmoid_bias, options)
    dispatch.run(args, options.get("backend"))
    request = yield args.result
    return _sigmoid_gradients(args, request, options)


@named("sigmoid_attention_backward")
def sigmoid_attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    need: tuple[str, ...],
    sigmoid_bias: float | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Gradients of `sigmoid_attention`, which need nothing of its forward pass."""
    args = sigmoid_args(q, k, v, sigmoid_bias, options)
    given = {"q": q, "k": k, "v": v, **options}
    request = Request(like_result("dout", dout, args, np.shape(args.result), []), None, need, given)
    return _sigmoid_gradients(args, request, options)


def sigmoid_args(q: Any, k: Any, v: Any, sigmoid_bias: float | None, options: Any) -> AttentionArgs:
    """Check and normalise the arguments of `sigmoid_attention`."""
    args = variant_args(q, k, v, options, SigmoidOptions, scales="k_scale and v_scale")
    if sigmoid_bias is None:
        args.sigmoid_bias = -log(max(1, args.len_k))
    else:
        args.sigmoid_bias = number("sigmoid_bias", sigmoid_bias, lane_dtype(args.q.dtype))
    return args


def _sigmoid_gradients(args: AttentionArgs, request: Request, options: Any) -> tuple[Any, ...]:
    """Gradients by the kernels of `attention_backward`: ``ds = p * (1 - p) * dp``."""
    names = list(request.need)
    dout = request.dout.reshape(args.out.shape)
    backward = BackwardArgs(args, dout, dq_factor=1.0 if "dscale" in names else args.scale)
    return computed(gradients(backward, names, request.given), options)


def _steps(args: RowwiseArgs, options: NoSoftmaxOptions) -> Steps[Array]:
    """The result, and gradients by kernels that compute scores again."""
    dispatch.run(args, options.get("backend"))
    request = yield args.attention.result
    return computed(rowwise_backward_args(args, request.dout, request.given, request.need), options)
