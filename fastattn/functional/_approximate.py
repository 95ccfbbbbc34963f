"""Attention that is estimated in less than quadratic time, made of exact attention over fewer keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.attention import attention_args
from fastattn._args.errors import wrong_dtype, wrong_shape
from fastattn._args.options import LinformerOptions, ScaledOptions, require_options
from fastattn._args.types import lane_dtype
from fastattn._args.values import MOST_SIZE, flag, float_array, generator, integer, require_broadcast
from fastattn.functional._attention import attention, attention_weights

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.types import Array, Ints


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
    require_options(func, options, LinformerOptions)
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
    keys, values = _projected(first, keys), _projected(second, values)
    return attention(q, keys, values, **options)


def _projection(func: str, name: str, x: Any, of: str, other: Array) -> Array:
    """`x` as a matrix (n, length) for each head of `other`, which is called `of`."""
    matrix, length = float_array(func, name, x), other.shape[-2]
    if matrix.ndim < 2 or matrix.shape[-1] != length or matrix.shape[-2] < 1:
        expected = f"(..., n, {length}), as many columns as {of} has rows, shape {other.shape}"
        raise wrong_shape(func, name, matrix, expected)
    dims = f"(..., n, {length}) with {of}'s leading axes"
    require_broadcast(func, name, matrix.shape, (*other.shape[:-2], *matrix.shape[-2:]), dims)
    return matrix


def _projected(matrix: Array, x: Array) -> Array:
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
    require_options(func, options, ScaledOptions)
    args = attention_args(func, q, k, v, **options)
    if args.heads_q != args.heads_kv:
        came = f"q has {args.heads_q} heads and k {args.heads_kv}"
        raise ValueError(f"{func}(): {came}; expected the same number of both")
    integer(func, "num_iterations", num_iterations, 0)
    n = integer(func, "num_landmarks", num_landmarks, 1)
    options["scale"] = args.scale
    if n >= min(args.len_q, args.len_k):
        return attention(q, k, v, **options)
    q, k, v = (float_array(func, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    q_mean, k_mean, dtype = _segment_means(q, n), _segment_means(k, n), q.dtype
    inverse = _pseudo_inverse(attention_weights(q_mean, k_mean, scale=args.scale), num_iterations)
    q, k, v = (x.astype(q_mean.dtype, copy=False) for x in (q, k, v))
    values = attention(q_mean, k, v, **options)
    return np.asarray(attention(q, k_mean, inverse @ values, **options), dtype)


def _segment_means(x: Array, n: int) -> Array:
    """x (..., length, d) to (..., n, d), in the dtype in which it is accumulated."""
    edges = np.arange(n + 1) * x.shape[-2] // n
    x = x.astype(np.promote_types(x.dtype, np.float32) if x.dtype.itemsize > 2 else np.float32, copy=False)
    return np.asarray(np.add.reduceat(x, edges[:-1], axis=-2) / np.diff(edges)[:, None].astype(x.dtype))


def _pseudo_inverse(a: Array, num_iterations: int) -> Array:
    """Razavi et al. 2014: x = x (13 I - a x (15 I - a x (7 I - a x))) / 4, of matrices (..., n, n)."""
    one = np.eye(a.shape[-1], dtype=a.dtype)
    x: Array = a.swapaxes(-1, -2) / a.sum(axis=-2).max(axis=-1)[..., None, None]
    for _ in range(num_iterations):
        ax = a @ x
        x = x @ (13 * one - ax @ (15 * one - ax @ (7 * one - ax))) / 4
    return x


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
    func = "lsh_attention"
    require_options(func, options, ScaledOptions)
    queries, values = float_array(func, "qk", qk, least_dims=3), float_array(func, "v", v, least_dims=3)
    if queries.shape[:-1] != values.shape[:-1]:
        came = f"qk has shape {queries.shape} and v {values.shape}"
        raise ValueError(f"{func}(): {came}; expected the same but for the last axis")
    if queries.dtype != values.dtype:
        raise wrong_dtype(func, "v", values, f"qk's, {queries.dtype}")
    args = attention_args(func, queries, queries, values, names=("qk", "qk", "v"), **options)
    n = integer(func, "num_buckets", num_buckets, 2, MOST_SIZE)
    if n % 2:
        raise ValueError(f"{func}(): num_buckets is {n}; expected an even number")
    num_rounds = integer(func, "num_rounds", num_rounds, 1, MOST_SIZE)
    lane, length = lane_dtype(queries.dtype), queries.shape[-2]
    shape = (args.heads_q, num_rounds, args.head_dim, n // 2)
    if rotations is None:
        r = generator(func, "rng", rng).standard_normal(shape).astype(lane)
    else:
        r = float_array(func, "rotations", rotations).astype(lane)
        if r.shape != shape:
            dims = "(heads, num_rounds, head_dim, num_buckets // 2)"
            raise wrong_shape(func, "rotations", r, f"{shape}, {dims}")
    chunk = min(integer(func, "chunk", chunk, 1), max(1, length))  # a longer one would only be padded
    causal = flag(func, "causal", causal)
    options["scale"] = args.scale
    q, values = queries.astype(lane), values.astype(lane)
    if not q.size or not values.size:
        return np.zeros(args.out.shape, args.out.dtype)
    k = q / np.sqrt(np.mean(q * q, axis=-1, keepdims=True) + lane.type(1e-6))  # of a root mean square of 1
    order = np.stack([_hash_order(q, r[:, i], chunk) for i in range(num_rounds)], axis=-2)
    out, lse = _attend_chunks(q, k, values, order, chunk, causal, options)
    back = np.argsort(order, axis=-1)[..., :length]
    out = np.take_along_axis(out, back[..., None], axis=-2)
    lse = np.take_along_axis(lse, back, axis=-1)
    # Rounds are joined here: the lse of a token that has only itself is large, and so is its rounding.
    weights = np.exp(lse - lse.max(axis=-2, keepdims=True))[..., None]
    return np.asarray((weights * out).sum(axis=-3) / weights.sum(axis=-3), args.out.dtype)


def _hash_order(x: Array, rotations: Array, chunk: int) -> Ints:
    """Tokens of x (..., heads, length, d) by hash and position, and behind them what fills the last chunk."""
    length = x.shape[-2]
    rotated = x @ rotations
    buckets = np.argmax(np.concatenate([rotated, -rotated], axis=-1), axis=-1)
    order = np.argsort(buckets, axis=-1, kind="stable")
    n_more = -length % chunk
    more = np.broadcast_to(np.arange(length, length + n_more), (*order.shape[:-1], n_more))
    return np.concatenate([order, more], axis=-1)


_ITSELF = -1e5  # a token's bias towards itself: of weight where it has nothing else


def _attend_chunks(
    q: Array, k: Array, v: Array, order: Ints, chunk: int, causal: bool, options: Any
) -> tuple[Array, Array]:
    """Results (..., heads, rounds, padded length, d) and their lses, in the order of the hashes."""
    length = q.shape[-2]

    def cut(x: Array) -> Array:
        """x (..., heads, rounds, padded length, d) as (..., heads, chunks of all rounds, chunk, d)."""
        return x.reshape(*x.shape[:-3], -1, chunk, x.shape[-1])

    def with_previous(x: Array) -> Array:
        return np.concatenate([np.roll(x, 1, axis=-3), x], axis=-2) if x.shape[-3] > 1 else x

    place = cut(order[..., None])
    i, j = place, with_previous(place).swapaxes(-1, -2)
    hidden = (j > i) | (j >= length) if causal else j >= length
    bias = np.where(hidden & (i != j), -np.inf, np.where(i == j, _ITSELF, 0)).astype(q.dtype)
    real = np.minimum(order, length - 1)[..., None]
    q, k, v = (cut(np.take_along_axis(x[..., None, :, :], real, axis=-2)) for x in (q, k, v))
    out, lse = attention(q, with_previous(k), with_previous(v), bias=bias, return_lse=True, **options)
    return out.reshape(*order.shape, -1), lse.reshape(order.shape)
