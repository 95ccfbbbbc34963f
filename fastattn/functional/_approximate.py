"""Attention that is estimated in less than quadratic time, made of exact attention over fewer keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastattn import grad
from fastattn._args.attention import attention_args
from fastattn._args.backward import summed_to
from fastattn._args.errors import wrong_shape
from fastattn._args.options import LinformerOptions, ScaledOptions, require_options
from fastattn._args.types import Array, ArrayLike, AttentionArgs, Ints, Unpack, lane_dtype
from fastattn._args.values import float_array, integer, require_broadcast
from fastattn._args.variants import how
from fastattn._engine import dispatch
from fastattn.functional._attention import attention_weights
from fastattn.functional._composed_gradients import ComposedGradients, cotangents
from fastattn.functional._differentiable import Steps, differentiable
from fastattn.functional._hashed import EPS, lsh_args

_MOST_ITERATIONS = 1000  # each doubles the correct digits at least: after some tens nothing changes


@differentiable("q", "k", "v", "key_projection", "value_projection", options=ScaledOptions)
def linformer_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    key_projection: ArrayLike,
    value_projection: ArrayLike | None = None,
    **options: Unpack[LinformerOptions],
) -> Steps[Array]:
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
    arrays = (q, k, v, key_projection, value_projection)
    projections = _projections(*arrays, options)
    keys, values = (_projected(*each) for each in projections)
    args = attention_args(q, keys, values, return_lse=True, **options)
    dispatch.run(args, options.get("backend"))
    request = yield args.result[0]

    found = ComposedGradients(request, options)
    of_values = "dkey_projection" if value_projection is None else "dvalue_projection"
    uses = {"dk": ("dk", "dkey_projection"), "dv": ("dv", of_values)}
    call = found.attend(args, *cotangents(args, request), uses=uses)
    found.add("dq", call.dq)
    lane = lane_dtype(args.q.dtype)
    for name, (matrix, x), dx in zip(("dk", "dv"), projections, (call.dk, call.dv), strict=True):
        if dx is not None:
            found.add(name, np.swapaxes(matrix.astype(lane), -1, -2) @ dx)
            found.add(uses[name][1], dx @ np.swapaxes(x.astype(lane), -1, -2))
    return found.results()


def _projections(
    q: Any, k: Any, v: Any, key_projection: Any, value_projection: Any, options: LinformerOptions
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Check the arguments of Linformer's attention: E and k, then F and v."""
    require_options(options, LinformerOptions)
    attention_args(q, k, v, **options)
    keys, values = float_array("k", k), float_array("v", v)
    first = second = _projection("key_projection", key_projection, "k", keys)
    if value_projection is None:
        _projection("key_projection", first, "v", values)
    else:
        second = _projection("value_projection", value_projection, "v", values)
    if first.shape[-2] != second.shape[-2]:
        expected = f"(..., n, len_k) with key_projection's n = {first.shape[-2]}"
        raise wrong_shape("value_projection", second, expected)
    return (first, keys), (second, values)


def _projection(name: str, x: Any, of: str, other: Array) -> Array:
    """`x` as a matrix (n, length) for each head of `other`, which is called `of`."""
    matrix, length = float_array(name, x), other.shape[-2]
    if matrix.ndim < 2 or matrix.shape[-1] != length or matrix.shape[-2] < 1:
        expected = f"(..., n, {length}), as many columns as {of} has rows, shape {other.shape}"
        raise wrong_shape(name, matrix, expected)
    dims = f"(..., n, {length}) with {of}'s leading axes"
    require_broadcast(name, matrix.shape, (*other.shape[:-2], *matrix.shape[-2:]), dims)
    return matrix


def _projected(matrix: Array, x: Array) -> Array:
    """matrix (n, length) @ x (..., length, d), in x's dtype."""
    lane = lane_dtype(x.dtype)
    return np.asarray(matrix.astype(lane) @ x.astype(lane), x.dtype)


@differentiable("q", "k", "v", options=ScaledOptions)
def nystrom_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    num_landmarks: int = 64,
    num_iterations: int = 6,
    **options: Unpack[ScaledOptions],
) -> Steps[Array]:
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
        Fourth-order Newton steps for the pseudo-inverse, at most 1000. The first guess is the transposed
        matrix, divided by its head's largest sum of a column.
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
    require_options(options, ScaledOptions)
    args = attention_args(q, k, v, return_lse=True, **options)
    if args.heads_q != args.heads_kv:
        came = f"q has {args.heads_q} heads and k {args.heads_kv}"
        raise ValueError(f"(): {came}; expected the same number of both")
    integer("num_iterations", num_iterations, 0, _MOST_ITERATIONS)
    given: dict[str, Any] = {"q": q, "k": k, "v": v}
    n = integer("num_landmarks", num_landmarks, 1)
    if n >= min(args.len_q, args.len_k):
        dispatch.run(args, options.get("backend"))
        request = yield args.result[0]
        found = ComposedGradients(request, options)
        found.add_all(found.attend(args, *cotangents(args, request)))
        return found.results()

    def call_of(q: Array, k: Array, v: Array) -> AttentionArgs:
        wide: Any = dict(zip("qkv", (x.astype(lane, copy=False) for x in (q, k, v)), strict=True))
        call = attention_args(**wide, scale=args.scale, return_lse=True, **how(options))
        dispatch.run(call, options.get("backend"))
        return call

    queries, keys, vectors = (float_array(name, x) for name, x in given.items())
    q_mean, k_mean = _segment_means(queries, n), _segment_means(keys, n)
    lane = q_mean.dtype
    weights = attention_weights(q_mean, k_mean, scale=args.scale)
    guesses, summary = _pseudo_inverses(weights, num_iterations), call_of(q_mean, keys, vectors)
    inverse, values = guesses[-1], summary.result[0]
    last = call_of(queries, k_mean, inverse @ values)
    out = np.asarray(last.result[0], args.out.dtype)
    request = yield out

    found = ComposedGradients(request, options)
    call = found.attend(last, *cotangents(last, request), uses={"dv": ("dq", "dk", "dv", "dscale")})
    found.add("dq", call.dq)
    if call.dv is None:
        return found.results()
    _add_means(found, "dk", call.dk, args.len_k)
    if weights.ndim == 2:  # one head, which the calls have an axis for
        weights, values, inverse = weights[None], values[None], inverse[None]
        guesses = [x[None] for x in guesses]
    of_values = summed_to(values.shape, inverse.swapaxes(-1, -2) @ call.dv)
    of_inverse = summed_to(inverse.shape, call.dv @ values.swapaxes(-1, -2))
    call = found.attend(summary, of_values)
    _add_means(found, "dq", call.dq, args.len_q)
    found.add("dk", call.dk)
    found.add("dv", call.dv)
    if found.wants("dq", "dk", "dscale"):
        # The weights are attention to the identity matrix.
        landmarks = call_of(q_mean, k_mean, np.broadcast_to(np.eye(n, dtype=lane), (args.heads_kv, n, n)))
        dweights = _through_inverses(weights, guesses, of_inverse)
        call = found.attend(landmarks, dweights, uses={"dv": ()})
        _add_means(found, "dq", call.dq, args.len_q)
        _add_means(found, "dk", call.dk, args.len_k)
    return found.results()


def _segment_edges(length: int, n: int) -> Ints:
    """Begin of each of n segments, and the end."""
    return np.arange(n + 1) * length // n


def _segment_means(x: Array, n: int) -> Array:
    """x (..., length, d) to (..., n, d), in the dtype in which it is accumulated."""
    edges = _segment_edges(x.shape[-2], n)
    x = x.astype(np.promote_types(x.dtype, np.float32) if x.dtype.itemsize > 2 else np.float32, copy=False)
    return np.asarray(np.add.reduceat(x, edges[:-1], axis=-2) / np.diff(edges)[:, None].astype(x.dtype))


def _pseudo_inverses(a: Array, num_iterations: int) -> list[Array]:
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


def _add_means(found: ComposedGradients, name: str, dx: Array | None, length: int) -> None:
    """Add to `name` the gradient of the input of `_segment_means`; dx (..., n, d) is that of its result."""
    if dx is not None:
        sizes = np.diff(_segment_edges(length, dx.shape[-2]))
        found.add(name, np.repeat(dx / sizes[:, None].astype(dx.dtype), sizes, axis=-2))


def _through_inverses(a: Array, guesses: Sequence[Array], dx: Array) -> Array:
    """Gradient of a, from that of the last of `_pseudo_inverses`."""
    one, transposed = np.eye(a.shape[-1], dtype=a.dtype), a.swapaxes(-1, -2)
    da = np.zeros_like(a)
    for x in reversed(guesses[:-1]):
        # x' = x (13 I - ax second) / 4, second = 15 I - ax first, first = 7 I - ax
        ax, x_transposed = a @ x, x.swapaxes(-1, -2)
        first = 7 * one - ax
        second = 15 * one - ax @ first
        dax = np.zeros_like(ax)
        inner = -x_transposed @ dx / 4  # of ax second
        dx = dx @ (13 * one - ax @ second).swapaxes(-1, -2) / 4
        for factor in (second, first):
            dax += inner @ factor.swapaxes(-1, -2)
            inner = -ax.swapaxes(-1, -2) @ inner
        dax += inner
        da += dax @ x_transposed
        dx = dx + transposed @ dax
    # The first guess is a^T / largest, the largest sum of a column.
    sums = a.sum(axis=-2)
    largest = sums.max(axis=-1)[..., None, None]
    da += dx.swapaxes(-1, -2) / largest
    dlargest = -(dx * guesses[0]).sum(axis=(-1, -2), keepdims=True) / largest
    da += np.where(np.arange(a.shape[-1]) == sums.argmax(axis=-1)[..., None, None], dlargest, 0)
    return da


@differentiable("qk", "v", options=ScaledOptions)
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
) -> Steps[Array]:
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
    x = lsh_args(qk, v, num_buckets, chunk, num_rounds, rng, rotations, causal, options)
    out = x.args.out
    if out.size:
        calls = x.attended(options)
        shares, outs = x.shares(calls)[..., None], x.by_token(calls.args.out)
        out = np.asarray((shares * outs).sum(axis=-3), out.dtype)
    request = yield out

    found = ComposedGradients(request, options)
    lane = x.q.dtype
    if not out.size:
        for name, source in (("dqk", x.q), ("dv", x.v), ("dscale", np.zeros(()))):
            found.add(name, np.zeros(source.shape, lane))
        return found.results()
    # The gradient of a token's result in each round, and that of the round's lse, which its share depends on.
    each = shares * cotangents(x.args, request)[0].astype(lane)[..., None, :, :]
    terms = (each * outs).sum(axis=-1, keepdims=True)
    slopes = terms - shares * terms.sum(axis=-3, keepdims=True)
    uses = {"dq": ("dqk",), "dk": ("dqk",)}
    call = found.attend(calls.args, x.by_chunk(each, 0), x.by_chunk(slopes, 0)[..., 0], uses=uses)
    if call.dq is not None and call.dk is not None:
        dq, dk = (x.by_token(d).sum(axis=-3) for d in (call.dq, x.of_previous(call.dk)))
        (through,) = grad.rms_norm(dk, x.q, None, eps=EPS, need=("dx",), **how(options))
        found.add("dqk", dq + through)
    if call.dv is not None:
        found.add("dv", x.by_token(x.of_previous(call.dv)).sum(axis=-3))
    return found.results()
