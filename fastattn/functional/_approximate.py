"""Attention that is estimated in less than quadratic time, made of exact attention over fewer keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.attention import attention_args
from fastattn._args.errors import wrong_shape
from fastattn._args.options import LinformerOptions, ScaledOptions, require_options
from fastattn._args.types import lane_dtype
from fastattn._args.values import float_array, integer, require_broadcast
from fastattn.functional._attention import attention, attention_weights
from fastattn.functional._hashed import lsh_args

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.types import Array, AttentionArgs, Ints


@np.errstate(all="ignore")  # as in the kernels
def linformer_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    key_projection: ArrayLike,
    value_projection: ArrayLike | None = None,
    **options: Unpack[LinformerOptions],
) -> Array:
    """``softmax(scale * q @ (E @ k).T) @ (F @ v)``: keys and values projected to a fixed number.

    Parameters
    ----------
    q, k, v : array_like
        As in `attention`, like the errors.
    key_projection, value_projection : array_like, (n, len_k) or (..., heads_kv, n, len_k)
        The learned projections E and F, one for all heads or one for each; F is E if left out. Any of the
        four dtypes.
    **options
        scale, out, num_threads and backend of `attention`.

    Returns
    -------
    out : ndarray, (..., heads_q, len_q, head_dim_v)
        In q's dtype.

    Notes
    -----
    O(n * (len_k + len_q) * (head_dim + head_dim_v)) a head; the projections are NumPy's products, in float32
    (float64 for float64), and rounded to k's dtype. Not causal: every projected key has seen all keys.
    Source: S. Wang, B. Z. Li, M. Khabsa, H. Fang and H. Ma, "Linformer: Self-Attention with Linear
    Complexity", 2020, arXiv:2006.04768.
    """
    func = "linformer_attention"
    projections = projections_of(func, q, k, v, key_projection, value_projection, options, LinformerOptions)
    return attention(q, *(projected(*each) for each in projections), **options)


def projections_of(
    func: str,
    q: Any,
    k: Any,
    v: Any,
    key_projection: Any,
    value_projection: Any,
    options: ScaledOptions,
    taken: type,
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Check the arguments of Linformer's attention: E and k, then F and v."""
    require_options(func, options, taken)
    attention_args(func, q, k, v, **options)
    keys, values = float_array(func, "k", k), float_array(func, "v", v)
    first = second = _projection(func, "key_projection", key_projection, "k", keys)
    if value_projection is None:
        _projection(func, "key_projection", first, "v", values)
    else:
        second = _projection(func, "value_projection", value_projection, "v", values)
    if first.shape[-2] != second.shape[-2]:
        expected = f"(..., n, len_k) with key_projection's n = {first.shape[-2]}"
        raise wrong_shape(func, "value_projection", second, expected)
    return (first, keys), (second, values)


def _projection(func: str, name: str, x: Any, of: str, other: Array) -> Array:
    """`x` as a matrix (n, length) for each head of `other`, which is called `of`."""
    matrix, length = float_array(func, name, x), other.shape[-2]
    if matrix.ndim < 2 or matrix.shape[-1] != length or matrix.shape[-2] < 1:
        expected = f"(..., n, {length}), as many columns as {of} has rows, shape {other.shape}"
        raise wrong_shape(func, name, matrix, expected)
    dims = f"(..., n, {length}) with {of}'s leading axes"
    require_broadcast(func, name, matrix.shape, (*other.shape[:-2], *matrix.shape[-2:]), dims)
    return matrix


def projected(matrix: Array, x: Array) -> Array:
    """matrix (n, length) @ x (..., length, d), in x's dtype."""
    lane = lane_dtype(x.dtype)
    return np.asarray(matrix.astype(lane) @ x.astype(lane), x.dtype)


@np.errstate(all="ignore")  # as in the kernels
def nystrom_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    num_landmarks: int = 64,
    num_iterations: int = 6,
    **options: Unpack[ScaledOptions],
) -> Array:
    """Nyström's method on the matrix of probabilities, as in the Nyströmformer.

    With landmarks Q', K', the means of `num_landmarks` segments of queries and keys:
    ``softmax(Q K'^T) @ pinv(softmax(Q' K'^T)) @ softmax(Q' K^T) @ V``.

    Parameters
    ----------
    q, k, v : array_like
        As in `attention`, like the errors; q and k have as many heads.
    num_landmarks : int, default 64
        Segments differ in length by one at most. Where there are no more queries or keys than landmarks, the
        result is that of `attention`.
    num_iterations : int, default 6
        Of the pseudo-inverse, each of the fourth order; it begins with the transposed matrix, divided by its
        head's largest sum of a column.
    **options
        scale, num_threads and backend of `attention`.

    Returns
    -------
    out : ndarray, (..., heads, len_q, head_dim_v)
        In q's dtype.

    Notes
    -----
    O((len_q + len_k) * num_landmarks * (head_dim + head_dim_v) + num_iterations * num_landmarks ** 3) a head.
    The depthwise convolution of the values, which the model adds, is not in it. Source: Y. Xiong et al.,
    "Nyströmformer: A Nyström-Based Algorithm for Approximating Self-Attention", 2021, arXiv:2102.03902.
    """
    func = "nystrom_attention"
    args, n = nystrom_args(func, q, k, v, num_landmarks, num_iterations, options)
    options["scale"] = args.scale
    if n >= min(args.len_q, args.len_k):
        return attention(q, k, v, **options)
    q, k, v = (float_array(func, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    q_mean, k_mean, dtype = segment_means(q, n), segment_means(k, n), q.dtype
    inverse = pseudo_inverses(attention_weights(q_mean, k_mean, scale=args.scale), num_iterations)[-1]
    q, k, v = (x.astype(q_mean.dtype, copy=False) for x in (q, k, v))
    values = attention(q_mean, k, v, **options)
    return np.asarray(attention(q, k_mean, inverse @ values, **options), dtype)


def nystrom_args(
    func: str, q: Any, k: Any, v: Any, num_landmarks: int, num_iterations: int, options: ScaledOptions
) -> tuple[AttentionArgs, int]:
    """Check the arguments of the Nyströmformer's attention: those of `attention`, and the landmarks."""
    require_options(func, options, ScaledOptions)
    args = attention_args(func, q, k, v, return_lse=True, **options)
    if args.heads_q != args.heads_kv:
        came = f"q has {args.heads_q} heads and k {args.heads_kv}"
        raise ValueError(f"{func}(): {came}; expected the same number of both")
    integer(func, "num_iterations", num_iterations, 0)
    return args, integer(func, "num_landmarks", num_landmarks, 1)


def segment_edges(length: int, n: int) -> Ints:
    """Where each of n segments begins, and the end."""
    return np.arange(n + 1) * length // n


def segment_means(x: Array, n: int) -> Array:
    """x (..., length, d) to (..., n, d), in the dtype in which it is accumulated."""
    edges = segment_edges(x.shape[-2], n)
    x = x.astype(np.promote_types(x.dtype, np.float32) if x.dtype.itemsize > 2 else np.float32, copy=False)
    return np.asarray(np.add.reduceat(x, edges[:-1], axis=-2) / np.diff(edges)[:, None].astype(x.dtype))


def pseudo_inverses(a: Array, num_iterations: int) -> list[Array]:
    """Razavi et al. 2014: x = x (13 I - a x (15 I - a x (7 I - a x))) / 4, of matrices (..., n, n).

    All x, from the first guess to the result.
    """
    one = np.eye(a.shape[-1], dtype=a.dtype)
    found: list[Array] = [a.swapaxes(-1, -2) / a.sum(axis=-2).max(axis=-1)[..., None, None]]
    for _ in range(num_iterations):
        x = found[-1]
        ax = a @ x
        found.append(x @ (13 * one - ax @ (15 * one - ax @ (7 * one - ax))) / 4)
    return found


@np.errstate(all="ignore")  # as in the kernels
def lsh_attention(
    qk: ArrayLike,
    v: ArrayLike,
    *,
    num_buckets: int,
    chunk: int = 64,
    num_rounds: int = 1,
    rng: np.random.Generator | int | None = 0,
    rotations: ArrayLike | None = None,
    causal: bool = False,
    **options: Unpack[ScaledOptions],
) -> Array:
    """The Reformer's attention: each query attends keys that are hashed near to it.

    Keys are the queries, normalised. In each round tokens are hashed, ``argmax([x R, -x R])`` with a random
    R, sorted by hash and position and cut into chunks; a token attends its chunk and the one before, which
    for a round's first chunk is the last one of the round before. It attends itself only where there is
    nothing else. Rounds are joined by their log-sum-exps.

    Parameters
    ----------
    qk : array_like, (..., heads, len, head_dim)
        Queries, and keys before their normalisation.
    v : array_like, (..., heads, len, head_dim_v)
        qk's dtype.
    num_buckets : int
        Even, at least 2.
    chunk : int, default 64
        Tokens of a chunk; at most all there are.
    num_rounds : int, default 1
        Independent hashes.
    rng : Generator, int or None, default 0
        Draws the rotations R, which are standard normal: a generator, its seed, or None for an unknown one.
    rotations : array_like, (heads, num_rounds, head_dim, num_buckets // 2), optional
        R itself; `rng` is not looked at.
    causal : bool, default False
        A token attends none that comes after it.
    **options
        scale, num_threads and backend of `attention`. Scale multiplies products of queries with keys whose
        root mean square is 1.

    Returns
    -------
    out : ndarray, (..., heads, len, head_dim_v)
        In qk's dtype.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    O(num_rounds * len * (chunk * (head_dim + head_dim_v) + num_buckets * head_dim)) a head, and a bias of 2 *
    chunk numbers for every token and round. As in the authors' code and transformers', a pair that meets in
    several rounds counts in each. Source: N. Kitaev, Ł. Kaiser and A. Levskaya, "Reformer: The Efficient
    Transformer", 2020, arXiv:2001.04451.
    """
    x = lsh_args("lsh_attention", qk, v, num_buckets, chunk, num_rounds, rng, rotations, causal, options)
    if not x.args.out.size:
        return x.args.out
    calls = x.attended(options)
    shares, outs = x.shares(calls), x.by_token(calls.args.out)
    return np.asarray((shares[..., None] * outs).sum(axis=-3), x.args.out.dtype)
