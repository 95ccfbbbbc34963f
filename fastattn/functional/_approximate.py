"""Attention that is estimated in less than quadratic time, made of exact attention over fewer keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.attention import attention_args
from fastattn._args.types import lane_dtype
from fastattn._args.values import float_array, integer
from fastattn.functional._attention import attention, attention_weights

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from fastattn._args.options import Backend, InnerOptions
    from fastattn._args.types import Array


def linformer_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    key_projection: ArrayLike,
    value_projection: ArrayLike | None = None,
    *,
    scale: float | None = None,
    out: NDArray[Any] | None = None,
    num_threads: int | None = None,
    backend: Backend | None = None,
) -> NDArray[Any]:
    """``softmax(scale * q @ (E @ k).T) @ (F @ v)``: keys and values projected to a fixed number [1]_.

    Parameters
    ----------
    q, k, v, scale, out, num_threads, backend
        As in `attention`.
    key_projection, value_projection : array_like, (n, len_k) or (..., heads_kv, n, len_k)
        The learned projections E and F, one for all heads or one for each; F is E if left out. Any of the
        four dtypes.

    Returns
    -------
    out : ndarray, (..., heads_q, len_q, head_dim_v)
        In q's dtype.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    O(n * (len_k + len_q) * (head_dim + head_dim_v)) a head; the projections are NumPy's products, in float32
    (float64 for float64), and rounded to k's dtype. Not causal: every projected key has seen all keys.

    References
    ----------
    .. [1] S. Wang, B. Z. Li, M. Khabsa, H. Fang and H. Ma, "Linformer: Self-Attention with Linear
       Complexity", 2020, arXiv:2006.04768.

    Examples
    --------
    >>> import fastattn, numpy as np
    >>> x = np.ones((1, 2, 100, 8), np.float32)
    >>> fastattn.functional.linformer_attention(x, x, x, np.full((16, 100), 0.01)).shape
    (1, 2, 100, 8)
    """
    func = "linformer_attention"
    attention_args(func, q, k, v, scale=scale, out=out, num_threads=num_threads, backend=backend)
    keys, values = float_array(func, "k", k), float_array(func, "v", v)
    first = second = _projection(func, "key_projection", key_projection, "k", keys)
    if value_projection is None:
        _require_leading(func, "key_projection", first, "v", values)
    else:
        second = _projection(func, "value_projection", value_projection, "v", values)
        if first.shape[-2] != second.shape[-2]:
            raise ValueError(
                f"{func}(): value_projection has shape {second.shape}; expected (..., n, len_k) with"
                f" key_projection's n = {first.shape[-2]}"
            )
    keys, values = _projected(first, keys), _projected(second, values)
    return attention(q, keys, values, scale=scale, out=out, num_threads=num_threads, backend=backend)


def _projection(func: str, name: str, x: Any, of: str, other: Array) -> Array:
    """`x` as a matrix (n, length) for each head of `other`, which is called `of`."""
    matrix, length = float_array(func, name, x), other.shape[-2]
    if matrix.ndim < 2 or matrix.shape[-1] != length or matrix.shape[-2] < 1:
        raise ValueError(
            f"{func}(): {name} has shape {matrix.shape}; expected (..., n, {length}), as many columns as"
            f" {of} has rows, shape {other.shape}"
        )
    _require_leading(func, name, matrix, of, other)
    return matrix


def _require_leading(func: str, name: str, matrix: Array, of: str, other: Array) -> None:
    """Raise unless there is one matrix, or one for each head of `other`, which is called `of`."""
    try:
        fits = np.broadcast_shapes(matrix.shape[:-2], other.shape[:-2]) == other.shape[:-2]
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"{func}(): {name} has shape {matrix.shape}; expected (n, len_k), or leading axes that broadcast"
            f" to {of}'s, shape {other.shape}"
        )


@np.errstate(all="ignore")
def _projected(matrix: Array, x: Array) -> Array:
    """matrix (n, length) @ x (..., length, d), in x's dtype."""
    lane = lane_dtype(x.dtype)
    result: Array = (matrix.astype(lane) @ x.astype(lane)).astype(x.dtype)
    return result


def nystrom_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    num_landmarks: int = 64,
    num_iterations: int = 6,
    scale: float | None = None,
    num_threads: int | None = None,
    backend: Backend | None = None,
) -> NDArray[Any]:
    """Nyström's method on the matrix of probabilities, as in the Nyströmformer [1]_.

    With landmarks Q', K', the means of `num_landmarks` segments of queries and keys:
    ``softmax(Q K'^T) @ pinv(softmax(Q' K'^T)) @ softmax(Q' K^T) @ V``.

    Parameters
    ----------
    q, k, v, num_threads, backend
        As in `attention`; q and k have as many heads.
    num_landmarks : int, default 64
        Segments differ in length by one at most. Where there are no more queries or keys than landmarks, the
        result is that of `attention`.
    num_iterations : int, default 6
        Of the pseudo-inverse, each of the fourth order; it begins with the transposed matrix, divided by its
        head's largest sum of a column.
    scale : float, optional
        Default ``1 / sqrt(head_dim)``.

    Returns
    -------
    out : ndarray, (..., heads, len_q, head_dim_v)
        In q's dtype.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    O((len_q + len_k) * num_landmarks * (head_dim + head_dim_v) + num_iterations * num_landmarks ** 3) a head.
    The
    depthwise convolution of the values, which the model adds, is not in it.

    References
    ----------
    .. [1] Y. Xiong et al., "Nyströmformer: A Nyström-Based Algorithm for Approximating Self-Attention", 2021,
       arXiv:2102.03902.

    Examples
    --------
    >>> import fastattn, numpy as np
    >>> x = np.ones((1, 2, 300, 8), np.float32)
    >>> fastattn.functional.nystrom_attention(x, x, x, num_landmarks=32).shape
    (1, 2, 300, 8)
    """
    func = "nystrom_attention"
    args = attention_args(func, q, k, v, scale=scale, num_threads=num_threads, backend=backend)
    if args.heads_q != args.heads_kv:
        raise ValueError(
            f"{func}(): q has {args.heads_q} heads and k {args.heads_kv}; expected the same number of both"
        )
    integer(func, "num_iterations", num_iterations, 0)
    n = integer(func, "num_landmarks", num_landmarks, 1)
    options: InnerOptions = {"scale": args.scale, "num_threads": args.num_threads, "backend": backend}
    if n >= min(args.len_q, args.len_k):
        return attention(q, k, v, **options)
    q, k, v = (float_array(func, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    q_mean, k_mean, dtype = _segment_means(q, n), _segment_means(k, n), q.dtype
    inverse = _pseudo_inverse(attention_weights(q_mean, k_mean, scale=args.scale), num_iterations)
    q, k, v = (x.astype(q_mean.dtype, copy=False) for x in (q, k, v))
    values = attention(q_mean, k, v, **options)
    with np.errstate(all="ignore"):
        values = inverse @ values
    result: Array = attention(q, k_mean, values, **options)
    with np.errstate(all="ignore"):
        return result.astype(dtype, copy=False)


@np.errstate(all="ignore")
def _segment_means(x: Array, n: int) -> Array:
    """x (..., length, d) to (..., n, d), in the dtype in which it is accumulated."""
    edges = np.arange(n + 1) * x.shape[-2] // n
    x = x.astype(np.promote_types(x.dtype, np.float32) if x.dtype.itemsize > 2 else np.float32, copy=False)
    means: Array = np.add.reduceat(x, edges[:-1], axis=-2) / np.diff(edges)[:, None].astype(x.dtype)
    return means


@np.errstate(all="ignore")
def _pseudo_inverse(a: Array, num_iterations: int) -> Array:
    """Razavi et al. 2014: x = x (13 I - a x (15 I - a x (7 I - a x))) / 4, of matrices (..., n, n)."""
    one = np.eye(a.shape[-1], dtype=a.dtype)
    x = a.swapaxes(-1, -2) / a.sum(axis=-2).max(axis=-1)[..., None, None]
    for _ in range(num_iterations):
        ax = a @ x
        x = x @ (13 * one - ax @ (15 * one - ax @ (7 * one - ax))) / 4
    result: Array = x
    return result
