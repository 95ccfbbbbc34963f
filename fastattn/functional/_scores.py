"""Attention with other scores than scaled products, or with another normaliser than softmax."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.backward import gradients, like_result
from fastattn._args.errors import named
from fastattn._args.options import NoSoftmaxOptions, SigmoidOptions
from fastattn._args.rowwise_backward import rowwise_backward_args
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
from fastattn.functional._differentiable import Request, Steps, differentiable

if TYPE_CHECKING:
    from fastattn._args.backward import Gradients


@differentiable("q", "k", "v", "weight", options=NoSoftmaxOptions, without=("scale",), calls_kernels=True)
def additive_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, weight: ArrayLike, **options: Unpack[NoSoftmaxOptions]
) -> Steps[Array]:
    """``softmax(scores) @ v`` with ``scores[i, j] = weight @ tanh(q[i] + k[j])``, Bahdanau's attention.

    Parameters
    ----------
    q, k : array_like, (..., heads, len, head_dim)
        Projected: W s and U h of the paper, a bias of theirs included.
    v : array_like, (..., heads_kv, len_k, head_dim_v)
        The states themselves, in the paper.
    weight : array_like, (head_dim,) or (heads_q, head_dim)
        Any of the four dtypes.
    **options
        Keyword arguments of `attention`, but sinks, return_lse and stats. Scale, a factor of the scores, is 1
        by default. Grouped heads, too. Result and errors are those of `attention`.

    Notes
    -----
    len_q * len_k * head_dim hyperbolic tangents a head, none of which is stored; memory O(threads * len_k)
    for scores. Masked as in `attention`. Source: D. Bahdanau, K. Cho and Y. Bengio, "Neural Machine
    Translation by Jointly Learning to Align and Translate", 2015, arXiv:1409.0473.
    """
    args = additive_args(q, k, v, weight, options)
    dispatch.run(args, options.get("backend"))
    request = yield args.attention.result
    return _gradients(args, request, options)


@differentiable("q", "k", "v", "pre", "post", options=NoSoftmaxOptions, calls_kernels=True)
def talking_heads_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    pre: ArrayLike | None = None,
    post: ArrayLike | None = None,
    **options: Unpack[NoSoftmaxOptions],
) -> Steps[Array]:
    """Attention whose scores are mixed across heads before the softmax, and probabilities after it.

    With ``S[h] = scale * q[h] @ k[h].T``: ``M[g] = sum_h pre[h, g] S[h]``, ``P[g] = softmax(M[g])``,
    ``out[f] = sum_g post[g, f] P[g] @ v[f]``.

    Parameters
    ----------
    q, k, v : array_like
        As in `attention`, like the result and the errors. Grouped heads, too: heads are those of q.
    pre, post : array_like, (heads_q, heads_q), optional
        What head h gives to head g is ``[h, g]``; left out, heads do not mix there. Any of the four dtypes.
    **options
        Keyword arguments of `attention`, but sinks, return_lse and stats. Masks, bias, softcap and ALiBi are
        of the mixed scores.

    Notes
    -----
    ``4 * heads * head_dim + 2 * heads * head_dim_v + 6 * heads**2`` FLOP a query and key: scores are computed
    and mixed twice, so that memory is O(threads * heads), whatever the lengths. A key that no mixed head lets
    a query attend never reaches that query's results; one that some head does reaches all with which that
    head mixes. A query that may attend nothing in a head gets no share from it. Source: N. Shazeer, Z. Lan,
    Y. Cheng, N. Ding and L. Hou, "Talking-Heads Attention", 2020, arXiv:2003.02436.
    """
    args = talking_heads_args(q, k, v, pre, post, options)
    dispatch.run(args, options.get("backend"))
    request = yield args.attention.result
    return _gradients(args, request, options)


@differentiable("q", "k", "v", options=NoSoftmaxOptions, calls_kernels=True)
def sparsemax_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, **options: Unpack[NoSoftmaxOptions]
) -> Steps[Array]:
    """``sparsemax(scale * q @ k.T) @ v``: each row of scores projected onto the probabilities.

    ``sparsemax(s) = max(s - tau, 0)``, with the tau that makes them sum to 1: exact, and exactly 0 for
    keys whose scores lie 1 or more below the largest.

    Parameters
    ----------
    q, k, v : array_like
        As in `attention`, like the result and the errors. Grouped heads, too.
    **options
        Keyword arguments of `attention`, but sinks, return_lse and stats.

    Notes
    -----
    O(len_q * len_k * head_dim) a head for the scores; values are read only where some query of a tile gives
    them weight. tau by Newton's method, a few passes over the keys that may still matter. Memory O(threads *
    len_k) for scores, at most 32 float32 rows of len_k a thread. What stands in the value of a key with
    probability 0, NaN and Inf included, never reaches the result; a query that may attend nothing gets 0.
    Source: A. F. T. Martins and R. F. Astudillo, "From Softmax to Sparsemax: A Sparse Model of Attention and
    Multi-Label Classification", 2016, arXiv:1602.02068.

    Examples
    --------
    >>> import fastattn, numpy as np
    >>> q, k = np.array([[2.0]]), np.array([[0.0], [0.25], [-3.0]])
    >>> fastattn.functional.sparsemax_attention(q, k, np.eye(3), scale=1.0)
    array([[0.25, 0.75, 0.  ]])
    """
    args = rowwise_args("sparsemax", q, k, v, options)
    dispatch.run(args, options.get("backend"))
    request = yield args.attention.result
    return _gradients(args, request, options)


@differentiable("q", "k", "v", options=NoSoftmaxOptions, calls_kernels=True)
def entmax15_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, **options: Unpack[NoSoftmaxOptions]
) -> Steps[Array]:
    """``entmax15(scale * q @ k.T) @ v``: between softmax (alpha = 1) and sparsemax (alpha = 2).

    ``entmax15(s) = max(s / 2 - tau, 0) ** 2``, with the tau that makes them sum to 1.

    Parameters
    ----------
    q, k, v, **options
        As in `sparsemax_attention`, like the result and the errors.

    Notes
    -----
    As `sparsemax_attention`; keys 2 or more below the largest score have probability 0. Source: B. Peters, V.
    Niculae and A. F. T. Martins, "Sparse Sequence-to-Sequence Models", 2019, arXiv:1905.05702.
    """
    args = rowwise_args("entmax15", q, k, v, options)
    dispatch.run(args, options.get("backend"))
    request = yield args.attention.result
    return _gradients(args, request, options)


@differentiable("q", "k", "v", options=NoSoftmaxOptions, calls_kernels=True)
def top_k_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, top_k: int, **options: Unpack[NoSoftmaxOptions]
) -> Steps[Array]:
    """Softmax over the `top_k` largest scores of each query, ``softmax(top_k(scale * q @ k.T)) @ v``.

    Parameters
    ----------
    q, k, v, **options
        As in `sparsemax_attention`, like the result and the errors.
    top_k : int
        At least 1. Of the keys that a query may attend, those with the largest scores: exactly so many, or
        all if there are fewer. Of equal scores the keys with the lowest index.

    Notes
    -----
    The selection is by bisection of the k-th largest score, up to 32 passes over the scores (64 in
    float64), typically half of them. Time and memory otherwise as of `sparsemax_attention`. The values of
    keys that are not selected never reach the result; a score of NaN makes its row NaN.
    Source: A. Gupta, G. Dar, S. Goodman, D. Ciprut and J. Berant, "Memory-efficient Transformers via Top-k
    Attention", 2021, arXiv:2106.06899.

    Examples
    --------
    >>> import fastattn, numpy as np
    >>> q, k = np.array([[1.0]]), np.array([[0.0], [9.0], [9.0], [-3.0]])
    >>> fastattn.functional.top_k_attention(q, k, np.eye(4), top_k=2)
    array([[0. , 0.5, 0.5, 0. ]])
    """
    args = top_k_args(q, k, v, top_k, options)
    dispatch.run(args, options.get("backend"))
    request = yield args.attention.result
    return _gradients(args, request, options)


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

    Each weight is between 0 and 1 whatever the others are; a row's weights need not sum to anything. So there
    is no denominator: no lse, no sinks, and results over disjoint keys simply add up (of calls with the same
    `sigmoid_bias`).

    Parameters
    ----------
    q, k, v : array_like
        As in `attention`, like the result and the errors.
    sigmoid_bias : float, optional
        Added to every score, after everything else; default ``-log(len_k)``, as the paper has it, by which
        the weights of a row start out summing to about 1. It is that of the array k, whatever masks hide.
    **options
        Keyword arguments of `attention`, but sinks, return_lse and stats. What is masked has the weight 0. A
        bias of each head goes to bias, as ``bias[:, None, None]``.

    Notes
    -----
    Time and memory are those of `attention`, whose kernels run it, with the same rules: a query that attends
    nothing gets 0, what it does not attend never reaches its result, and the same input gives the same bits.
    Source: J. Ramapuram et al., "Theory, Analysis, and Best Practices for Sigmoid Self-Attention", 2024,
    arXiv:2409.04431.

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
    """Gradients of `sigmoid_attention`, without its forward pass, of which they need nothing."""
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
    return _run(gradients(backward, names, request.given), options)


def _gradients(args: RowwiseArgs, request: Request, options: NoSoftmaxOptions) -> tuple[Any, ...]:
    """Gradients by kernels that compute scores again."""
    found = rowwise_backward_args(args, request.dout, request.given, request.need)
    return _run(found, options)


def _run(found: Gradients, options: NoSoftmaxOptions) -> tuple[Any, ...]:
    if found.args.out.size:
        dispatch.run(found.args, options.get("backend"))
    else:
        found.clear()
    return found.results()
