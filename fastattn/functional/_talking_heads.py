"""Attention whose heads mix: talking heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastattn._args.rowwise import talking_args
from fastattn.functional._pieces import run_rowwise

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.options import NoSoftmaxOptions
    from fastattn._args.types import Array


def talking_heads_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    pre: ArrayLike | None = None,
    post: ArrayLike | None = None,
    **options: Unpack[NoSoftmaxOptions],
) -> Array:
    """Attention whose scores are mixed across heads before the softmax, and probabilities after it [1]_.

    With ``S[h] = scale * q[h] @ k[h].T``: ``M[g] = sum_h pre[h, g] S[h]``, ``P[g] = softmax(M[g])``,
    ``out[f] = sum_g post[g, f] P[g] @ v[f]``.

    Parameters
    ----------
    q, k, v : array_like
        As in `attention`. Grouped heads, too: heads are those of q.
    pre, post : array_like, (heads_q, heads_q), optional
        What head h gives to head g is ``[h, g]``; left out, heads do not mix there. Any of the four dtypes.
    **options
        Keyword arguments of `attention`, but sinks, return_lse and stats. Masks, bias, softcap and ALiBi are
        of the mixed scores.

    Returns
    -------
    out : ndarray, (..., heads_q, len_q, head_dim_v)
        In q's dtype; 2-D if q, k and v all are.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    ``4 * heads * head_dim + 2 * heads * head_dim_v + 6 * heads**2`` FLOP a query and key: scores are computed
    and mixed twice, so that memory is O(threads * heads), whatever the lengths. A key that no mixed head lets
    a query attend never reaches that query's results; one that some head does reaches all with which that
    head mixes. A query that may attend nothing in a head gets no share from it.

    References
    ----------
    .. [1] N. Shazeer, Z. Lan, Y. Cheng, N. Ding and L. Hou, "Talking-Heads Attention", 2020,
       arXiv:2003.02436.

    Examples
    --------
    >>> import fastattn, numpy as np
    >>> x, mix = np.ones((1, 2, 5, 8), np.float32), np.full((2, 2), 0.5)
    >>> fastattn.functional.talking_heads_attention(x, x, x, mix, mix, causal=True).shape
    (1, 2, 5, 8)
    """
    return run_rowwise(talking_args("talking_heads_attention", q, k, v, pre, post, options), options)
