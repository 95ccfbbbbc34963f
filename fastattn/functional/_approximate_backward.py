"""The gradients of the Nyströmformer's and the Reformer's attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn import grad
from fastattn._args.attention import attention_args
from fastattn._args.backward import like_result, summed_to
from fastattn._args.options import ScaledOptions
from fastattn._args.variants import how
from fastattn._engine import dispatch
from fastattn.functional._approximate import nystrom_args, pseudo_inverses, segment_edges, segment_means
from fastattn.functional._chain import NEED, Chain
from fastattn.functional._hashed import EPS, lsh_args

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.types import Array, AttentionArgs


@np.errstate(all="ignore")  # as in the kernels
def nystrom_attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    num_landmarks: int = 64,
    num_iterations: int = 6,
    need: Sequence[str] = NEED,
    **options: Unpack[ScaledOptions],
) -> tuple[Any, ...]:
    """Gradients of `nystrom_attention`, back through the iteration of the pseudo-inverse.

    Parameters
    ----------
    dout : array_like, (..., heads, len_q, head_dim_v)
        The gradient of a scalar with respect to the result, in q's dtype.
    q, k, v, num_landmarks, num_iterations, **options
        As they were given to `nystrom_attention`.
    need : tuple of str, default ("dq", "dk", "dv")
        Which gradients to compute, and in which order to return them: these, and ``"dscale"``.

    Returns
    -------
    tuple
        A gradient for each name in `need`, with the shape and dtype of what it is the gradient of.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    Everything is computed again; then three calls of `attention_backward`, and the iteration's products of
    matrices (num_landmarks, num_landmarks) twice more, of which one a step is kept. The first guess divides
    by the largest sum of a column: where two are largest, this is the gradient of one side.
    """
    func = "nystrom_attention_backward"
    chain = Chain(func, need, {"q": q, "k": k, "v": v}, options, ScaledOptions)
    args, n = nystrom_args(func, q, k, v, num_landmarks, num_iterations, options)
    cotangent = like_result(func, "dout", dout, args, np.shape(args.result[0]), [])

    def run(call: AttentionArgs) -> Array:
        dispatch.run(call, options.get("backend"))
        return call.out

    if n >= min(args.len_q, args.len_k):
        run(args)
        call = chain.attend(args, cotangent)
        for name in NEED:
            chain.add(name, getattr(call, name))
        return chain.results()
    q_mean, k_mean = segment_means(args.q, n), segment_means(args.k, n)
    lane = q_mean.dtype

    def call_of(q: Array, k: Array, v: Array) -> AttentionArgs:
        wide: Any = dict(zip("qkv", (x.astype(lane, copy=False) for x in (q, k, v)), strict=True))
        return attention_args(func, **wide, scale=args.scale, return_lse=True, **how(options))

    # weights = softmax(q_mean k_mean^T), which is attention to the identity matrix
    one = np.broadcast_to(np.eye(n, dtype=lane), (args.heads_kv, n, n))
    landmarks, summary = call_of(q_mean, k_mean, one), call_of(q_mean, args.k, args.v)
    weights, values = run(landmarks), run(summary)
    guesses = pseudo_inverses(weights, num_iterations)
    inverse = guesses[-1]
    last = call_of(args.q, k_mean, inverse @ values)
    run(last)

    call = chain.attend(last, cotangent, uses={"dv": ("dq", "dk", "dv", "dscale")})
    chain.add("dq", call.dq)
    if call.dv is None:
        return chain.results()
    _add_means(chain, "dk", call.dk, args.len_k)
    of_values = summed_to(values.shape, inverse.swapaxes(-1, -2) @ call.dv)
    of_inverse = summed_to(inverse.shape, call.dv @ values.swapaxes(-1, -2))
    call = chain.attend(summary, of_values)
    _add_means(chain, "dq", call.dq, args.len_q)
    chain.add("dk", call.dk)
    chain.add("dv", call.dv)
    if chain.wants("dq", "dk", "dscale"):
        of_weights = _through_inverses(weights, guesses, of_inverse)
        call = chain.attend(landmarks, of_weights, uses={"dv": ()})
        _add_means(chain, "dq", call.dq, args.len_q)
        _add_means(chain, "dk", call.dk, args.len_k)
    return chain.results()


def _add_means(chain: Chain, name: str, dx: Array | None, length: int) -> None:
    """Add to `name` what the gradient of `segment_means` makes of dx (..., n, d)."""
    if dx is not None:
        sizes = np.diff(segment_edges(length, dx.shape[-2]))
        chain.add(name, np.repeat(dx / sizes[:, None].astype(dx.dtype), sizes, axis=-2))


def _through_inverses(a: Array, guesses: Sequence[Array], dx: Array) -> Array:
    """From the gradient of the last of `pseudo_inverses` to that of a."""
    one, turned = np.eye(a.shape[-1], dtype=a.dtype), a.swapaxes(-1, -2)
    da = np.zeros_like(a)
    for x in reversed(guesses[:-1]):
        # x' = x (13 I - ax second) / 4, second = 15 I - ax first, first = 7 I - ax
        ax, x_turned = a @ x, x.swapaxes(-1, -2)
        first = 7 * one - ax
        second = 15 * one - ax @ first
        dax = np.zeros_like(ax)
        inner = -x_turned @ dx / 4  # of ax second
        dx = dx @ (13 * one - ax @ second).swapaxes(-1, -2) / 4
        for factor in (second, first):
            dax += inner @ factor.swapaxes(-1, -2)
            inner = -ax.swapaxes(-1, -2) @ inner
        dax += inner
        da += dax @ x_turned
        dx = dx + turned @ dax
    # The first guess is a^T / largest, the largest sum of a column.
    sums = a.sum(axis=-2)
    largest = sums.max(axis=-1)[..., None, None]
    da += dx.swapaxes(-1, -2) / largest
    dlargest = -(dx * guesses[0]).sum(axis=(-1, -2), keepdims=True) / largest
    da += np.where(np.arange(a.shape[-1]) == sums.argmax(axis=-1)[..., None, None], dlargest, 0)
    return da


@np.errstate(all="ignore")  # as in the kernels
def lsh_attention_backward(
    dout: ArrayLike,
    qk: ArrayLike,
    v: ArrayLike,
    *,
    num_buckets: int,
    chunk: int = 64,
    num_rounds: int = 1,
    rng: np.random.Generator | int | None = 0,
    rotations: ArrayLike | None = None,
    causal: bool = False,
    need: Sequence[str] = ("dqk", "dv"),
    **options: Unpack[ScaledOptions],
) -> tuple[Any, ...]:
    """Gradients of `lsh_attention`: who is hashed to whom is held fixed.

    Parameters
    ----------
    dout : array_like, (..., heads, len, head_dim_v)
        The gradient of a scalar with respect to the result, in qk's dtype.
    qk, v, num_buckets, chunk, num_rounds, rotations, causal, **options
        As they were given to `lsh_attention`.
    rng : Generator or int, default 0
        As it was given: a generator in the state that it had then. None could not draw the same hashes.
    need : tuple of str, default ("dqk", "dv")
        Which gradients to compute, and in which order to return them: these, and ``"dscale"``.

    Returns
    -------
    tuple
        A gradient for each name in `need`, with the shape and dtype of what it is the gradient of.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    The results of all rounds are computed again; then one `attention_backward` of all their chunks, with the
    forward pass's bias. The gradient of qk is that of queries and, through their norm, that of keys.
    """
    func = "lsh_attention_backward"
    if rng is None and rotations is None:
        raise ValueError(f"{func}(): rng is None; expected the seed of the forward pass, or rotations")
    chain = Chain(func, need, {"qk": qk, "v": v}, options, ScaledOptions)
    x = lsh_args(func, qk, v, num_buckets, chunk, num_rounds, rng, rotations, causal, options)
    cotangent = like_result(func, "dout", dout, x.args, np.shape(x.args.result[0]), [])
    lane = x.q.dtype
    if not x.args.out.size:
        for name, source in (("dqk", x.q), ("dv", x.v), ("dscale", np.zeros(()))):
            chain.add(name, np.zeros(source.shape, lane))
        return chain.results()
    calls = x.attended(options)
    shares = x.shares(calls)[..., None]
    # Of a token, dout times its round's share; and what the share depends on, the round's lse.
    each = shares * cotangent.astype(lane)[..., None, :, :]
    terms = (each * x.by_token(calls.args.out)).sum(axis=-1, keepdims=True)
    slopes = terms - shares * terms.sum(axis=-3, keepdims=True)
    call = chain.attend(
        calls.args,
        x.by_chunk(each, 0),
        x.by_chunk(slopes, 0)[..., 0],
        uses={"dq": ("dqk",), "dk": ("dqk",)},
    )
    if call.dq is not None and call.dk is not None:
        dq, dk = (x.by_token(d).sum(axis=-3) for d in (call.dq, x.of_previous(call.dk)))
        (through,) = grad.rms_norm(dk, x.q, None, eps=EPS, need=("dx",), **how(options))
        chain.add("dqk", dq + through)
    if call.dv is not None:
        chain.add("dv", x.by_token(x.of_previous(call.dv)).sum(axis=-3))
    return chain.results()
