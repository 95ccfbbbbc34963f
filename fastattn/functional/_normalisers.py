"""Attention with other normalisers than softmax: sparsemax, entmax-1.5, the k largest scores, sigmoid."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

from fastattn._args.options import NoSoftmaxOptions
from fastattn._args.types import lane_dtype
from fastattn._args.values import integer, number
from fastattn._args.variants import rowwise_args, variant_args
from fastattn.functional._pieces import run, run_rowwise

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.types import Array


def sparsemax_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    **options: Unpack[NoSoftmaxOptions],
) -> Array:
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
    return run_rowwise(rowwise_args("sparsemax_attention", "sparsemax", q, k, v, options), options)


def entmax15_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    **options: Unpack[NoSoftmaxOptions],
) -> Array:
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
    return run_rowwise(rowwise_args("entmax15_attention", "entmax15", q, k, v, options), options)


def top_k_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    top_k: int,
    **options: Unpack[NoSoftmaxOptions],
) -> Array:
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
    args = rowwise_args("top_k_attention", "top_k", q, k, v, options)
    # More keys than there are is all of them.
    args.top_k = min(integer("top_k_attention", "top_k", top_k, 1), max(1, args.attention.len_k))
    return run_rowwise(args, options)


def sigmoid_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    sigmoid_bias: float | None = None,
    **options: Unpack[NoSoftmaxOptions],
) -> Array:
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
    func = "sigmoid_attention"
    args = variant_args(func, q, k, v, options, NoSoftmaxOptions)
    if sigmoid_bias is None:
        args.sigmoid_bias = -log(max(1, args.len_k))
    else:
        args.sigmoid_bias = number(func, "sigmoid_bias", sigmoid_bias, lane_dtype(args.q.dtype))
    result: Array = run(args, options)
    return result
