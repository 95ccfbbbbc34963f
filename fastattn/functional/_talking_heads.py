"""Attention whose heads mix: talking heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fastattn._args.rowwise import talking_args
from fastattn._engine import dispatch

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from fastattn.masks import Mask


def talking_heads_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    pre: ArrayLike | None = None,
    post: ArrayLike | None = None,
    *,
    mask: ArrayLike | Mask | None = None,
    bias: ArrayLike | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    q_offset: ArrayLike | None = None,
    out: NDArray[Any] | None = None,
    num_threads: int | None = None,
    backend: Literal["compiled", "numpy"] | None = None,
) -> NDArray[Any]:
    """Attention whose scores are mixed across heads before the softmax, and probabilities after it [1]_.

    With ``S[h] = scale * q[h] @ k[h].T``: ``M[g] = sum_h pre[h, g] S[h]``, ``P[g] = softmax(M[g])``,
    ``out[f] = sum_g post[g, f] P[g] @ v[f]``.

    Parameters
    ----------
    q, k, v, scale, out, num_threads, backend
        As in `attention`. Grouped heads, too: heads are those of q.
    pre, post : array_like, (heads_q, heads_q), optional
        What head h gives to head g is ``[h, g]``; left out, heads do not mix there. Any of the four dtypes.
    mask, bias, causal, window, softcap, alibi_slopes, kv_lengths, q_offset
        As in `attention`, of the mixed scores.

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
    options = {
        "mask": mask, "bias": bias, "causal": causal, "window": window, "scale": scale, "softcap": softcap,
        "alibi_slopes": alibi_slopes, "kv_lengths": kv_lengths, "q_offset": q_offset, "out": out,
        "num_threads": num_threads, "backend": backend,
    }  # fmt: skip
    args = talking_args("talking_heads_attention", q, k, v, pre, post, options)
    dispatch.run(args, backend)
    result: NDArray[Any] = args.attention.result
    return result
