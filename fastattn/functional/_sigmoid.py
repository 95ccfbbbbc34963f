"""Sigmoid attention: weights that do not compete."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

from fastattn._args.attention import attention_args
from fastattn._args.options import NoSoftmaxOptions, require_options
from fastattn._args.types import lane_dtype
from fastattn._args.values import number
from fastattn.functional._pieces import run

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.types import Array


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
        As in `attention`.
    sigmoid_bias : float, optional
        Added to every score, after everything else; default ``-log(len_k)``, as the paper has it, by which
        the weights of a row start out summing to about 1. It is that of the array k, whatever masks hide.
    **options
        Keyword arguments of `attention`, but sinks, return_lse and stats. What is masked has the weight 0. A
        bias of each head goes to bias, as ``bias[:, None, None]``.

    Returns
    -------
    ndarray, (..., heads_q, len_q, head_dim_v)
        In q's dtype; 2-D if q, k and v all are.

    Raises
    ------
    TypeError, ValueError
        As `attention`, and if `sigmoid_bias` is no finite number.

    Notes
    -----
    Time and memory are those of `attention`, whose kernels run it, with the same rules: a query that attends
    nothing gets 0, what it does not attend never reaches its result, and the same input gives the same bits.

    References
    ----------
    J. Ramapuram et al., "Theory, Analysis, and Best Practices for Sigmoid Self-Attention", 2024,
    arXiv:2409.04431.

    Examples
    --------
    >>> import fastattn, numpy as np
    >>> x = np.zeros((1, 2, 4, 8))
    >>> fastattn.functional.sigmoid_attention(x, x, x + 1)[0, 0, 0]  # four weights of 1 / (1 + 4)
    array([0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8])
    """
    func = "sigmoid_attention"
    require_options(func, options, NoSoftmaxOptions)
    args = attention_args(func, q, k, v, **options)
    if sigmoid_bias is None:
        args.sigmoid_bias = -log(max(1, args.len_k))
    else:
        args.sigmoid_bias = number(func, "sigmoid_bias", sigmoid_bias, lane_dtype(args.q.dtype))
    result: Array = run(args, options)
    return result
