"""The gradient of linear attention in NumPy: the readable twin of the kernel, and the fallback.

First the states before each chunk, from the first chunk to the last. Then the gradients, from the last chunk
to the first, with the gradient of the state carried back. Within a chunk, with names of `_Chunk`:

    what was computed                     what its gradient is
    scores = q k^T decayed, j <= i        dscores = dout u^T, j <= i
    out = scores u + carry q S            du = scores^T dout + fade k dS
    S = end S + (fade k)^T u              dS = end dS + (carry q)^T dout
    lower = e k^T decayed, j < i          dlower = -y u^T, j < i
    r = v - carry e S - lower u           y = b (du - lower^T y), dv = y, dS -= (carry e)^T y
    u = b r                               db = r (du - lower^T y)

So the delta rule reads the state once more: with e for q and -y for dout. Without it u = v and dv = du. Where
the call has no keys to erase by, e is k, and dk has the gradients of both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._args.blocks import blocks
from fastattn._args.recurrent_types import RecurrentArgs, RecurrentBackwardArgs
from fastattn._args.types import Array, lane_dtype
from fastattn._reference.recurrent import (
    at_tokens,
    chunk_of,
    decays,
    erase_keys,
    of_heads,
    only,
    queries,
    scores_of,
    sequences,
)

if TYPE_CHECKING:
    State = tuple[Array, Array]  # S (..., head_dim, head_dim_v) and the sum of the keys (..., head_dim)

_RESULTS = ("dq", "dk", "dv", "dlog_decay", "dbeta", "derase", "dstate", "dnorm")
_OF_STATES = ("dstate", "dnorm", "dstate_out", "dnorm_out")


class _Chunk(NamedTuple):
    """Values that a chunk of n tokens writes, all (..., heads, n, dim)."""

    tokens: slice
    k: Array
    u: Array
    r: Array  # of the delta rule, as the next three
    beta: Array
    e: Array
    lower: Array  # (..., n, n)
    decayed: Array  # (..., i, j, 1 or head_dim): what is left at token i of key j
    carry: Array  # (..., n, 1 or head_dim): and of the state before
    fade: Array  # the same: of a key at the chunk's end


@np.errstate(all="ignore")
def recurrent_backward(args: RecurrentBackwardArgs) -> None:
    """Fill those results of `args` that are wanted."""
    a = args.forward
    if a.begins is not None:
        for s, tokens, part in sequences(a):
            recurrent_backward(_of_sequence(args, s, tokens, part))
        return
    n = chunk_of(a)
    chunks = -(-a.len_k // n)
    state = a.head_dim * a.head_dim_v * (chunks + 1)
    of_chunk = 4 * n * max(a.head_dim * (n if a.gated else 1), a.head_dim_v)
    for items in blocks(a.batch_shape, max(a.heads, a.heads_q) * max(of_chunk, state)):
        _gradients(args if items is ... else _only(items, args), n)


def _of_sequence(
    args: RecurrentBackwardArgs, s: int, tokens: slice, part: RecurrentArgs
) -> RecurrentBackwardArgs:
    """The call of sequence s alone."""
    found: dict[str, Any] = {"forward": part, "dout": args.dout[..., tokens, :]}
    for name in (*_RESULTS, "dstate_out", "dnorm_out"):
        x = getattr(args, name)
        if x is not None and name in _OF_STATES:
            x = x[s]
        elif x is not None:
            by_token = name == "dbeta" or (name == "dlog_decay" and not part.gated)
            x = x[..., tokens] if by_token else x[..., tokens, :]
        found[name] = x
    return replace(args, **found)


def _only(items: Any, args: RecurrentBackwardArgs) -> RecurrentBackwardArgs:
    """Select some batch items of the call."""
    shape = args.forward.batch_shape
    dout = np.broadcast_to(args.dout, (*shape, *args.dout.shape[-3:]))[items]
    given = {name: getattr(args, name) for name in (*_RESULTS, "dstate_out", "dnorm_out")}
    some: dict[str, Any] = {name: None if x is None else x[items] for name, x in given.items()}
    return replace(args, forward=only(items, args.forward), dout=dout, **some)


def _gradients(args: RecurrentBackwardArgs, n: int) -> None:
    """Compute `args` in chunks of n tokens."""
    a, lane = args.forward, lane_dtype(args.dout.dtype)
    shape = (*a.batch_shape, a.heads, a.head_dim, a.head_dim_v)
    state, dstate = _state(a.state, a.norm, shape, lane), _state(args.dstate_out, args.dnorm_out, shape, lane)
    before, firsts = [], range(0, a.len_k, n)
    for i in firsts:
        chunk = _chunk(a, slice(i, min(i + n, a.len_k)), state, lane)
        before.append(state)
        state = _after(chunk, state)
    if not a.causal:
        for i in range(0, a.len_q, n):
            dstate = _read_last(args, slice(i, i + n), state, dstate, lane)
    for i, state in zip(reversed(firsts), reversed(before), strict=True):
        chunk = _chunk(a, slice(i, min(i + n, a.len_k)), state, lane)
        dstate = _chunk_gradients(args, chunk, state, dstate, lane)
    if args.dstate is not None:
        args.dstate[...] = dstate[0]
    if args.dnorm is not None:
        args.dnorm[...] = dstate[1]


def _state(state: Array | None, norm: Array | None, shape: tuple[int, ...], lane: np.dtype[Any]) -> State:
    """A state and a sum of keys, or zeros for what is None."""
    whole = np.zeros(shape, lane) if state is None else state.astype(lane)
    return whole, np.zeros(shape[:-1], lane) if norm is None else norm.astype(lane)


def _chunk(a: RecurrentArgs, tokens: slice, state: State, lane: np.dtype[Any]) -> _Chunk:
    """Values that `tokens` write to `state`."""
    k, u = of_heads(a.k, a.heads, tokens, lane), of_heads(a.v, a.heads, tokens, lane)
    n = k.shape[-2]
    decayed, carry = decays(a, tokens, n, lane)
    r = beta = e = lower = u
    if a.beta is not None:
        beta = np.broadcast_to(at_tokens(a.beta[..., None], tokens), (*a.batch_shape, a.heads, n, 1))
        e = erase_keys(a, k, tokens, lane)
        lower = np.tril(scores_of(e, k, decayed), -1)
        r = u - (carry * e) @ state[0]
        for i in range(1, n):
            r[..., i, :] -= np.einsum("...j,...jv->...v", lower[..., i, :i], (beta * r)[..., :i, :])
        u = beta * r
    return _Chunk(tokens, k, u, r, beta, e, lower, decayed, carry, decayed[..., -1, :, :])


def _after(x: _Chunk, state: State) -> State:
    """The state behind a chunk."""
    end, faded = x.carry[..., -1, :], x.fade * x.k
    return end[..., None] * state[0] + faded.swapaxes(-1, -2) @ x.u, end * state[1] + faded.sum(-2)


def _read_last(
    args: RecurrentBackwardArgs, tokens: slice, state: State, dstate: State, lane: np.dtype[Any]
) -> State:
    """Gradients of queries that all read the last state."""
    a = args.forward
    q = queries(a, tokens, lane)
    dout = _cotangents(args, tokens, lane)
    s, z = (x[..., None, :, :] for x in (state[0], state[1][..., None]))
    dsums = np.zeros((*dout.shape[:-1], 1), lane)
    if a.norm_out is not None:
        dout = dout / (q @ z + lane.type(a.eps))
        dsums = -(dout * (q @ s) / (q @ z + lane.type(a.eps))).sum(-1, keepdims=True)
    _store_queries(args, tokens, dout @ s.swapaxes(-1, -2) + dsums * z.swapaxes(-1, -2), lane)
    turned = q.swapaxes(-1, -2)
    return dstate[0] + (turned @ dout).sum(-3), dstate[1] + (turned @ dsums)[..., 0].sum(-2)


def _chunk_gradients(
    args: RecurrentBackwardArgs, x: _Chunk, state: State, dstate: State, lane: np.dtype[Any]
) -> State:
    """Gradients of a chunk; `dstate` is that of the state behind it, the result that of `state` before it."""
    a, (s, z), (ds, dz) = args.forward, state, dstate
    scalar = not a.gated
    # What acts beyond the chunk's end: u through dS, and what is left of S through all of the chunk.
    dk = x.fade * (x.u @ ds.swapaxes(-1, -2) + dz[..., None, :])
    du = (x.fade * x.k) @ ds
    end = x.carry[..., -1, :]
    later = _summed(x.k * dk, scalar)  # (..., n, 1 or head_dim): what each key adds to decays of later tokens
    through = end * _summed((ds * s).sum(-1) + dz * z, scalar)
    earlier, between = np.zeros_like(later), np.zeros_like(later)
    ds, dz = end[..., None] * ds, end * dz

    if a.causal:
        q, dout = queries(a, x.tokens, lane), _cotangents(args, x.tokens, lane)
        decayed, carry, k = (y[..., None, :, :] for y in (x.decayed, x.carry, x.k))
        decayed = x.decayed[..., None, :, :, :]
        scores = np.tril(scores_of(q, k, decayed))
        if a.norm_out is not None:
            divisor = scores.sum(-1, keepdims=True) + (carry * q) @ z[..., None, :, None] + lane.type(a.eps)
            dout = dout / divisor
        dscores = dout @ x.u[..., None, :, :].swapaxes(-1, -2)
        dq = carry * (dout @ s[..., None, :, :].swapaxes(-1, -2))
        if a.norm_out is not None:
            result = np.where(_ones(scores), scores * dscores, 0).sum(-1, keepdims=True)
            dsums = -(result + (q * dq).sum(-1, keepdims=True)) / divisor
            dscores, dq = dscores + dsums, dq + carry * dsums * z[..., None, None, :]
            dz = dz + (carry * q * dsums).sum((-2, -3))
        du = du + _upper(scores, dout).sum(-3)
        earlier = earlier + _summed(q * dq, scalar).sum(-3)
        ds = ds + ((carry * q).swapaxes(-1, -2) @ dout).sum(-3)
        more_dq, more_dk, more = _of_scores(q, k, decayed, np.where(_ones(dscores), dscores, 0), 0)
        dk, between = dk + more_dk.sum(-3), between + more.sum(-3)
        _store_queries(args, x.tokens, dq + more_dq, lane)
    if a.beta is not None:
        y = np.empty_like(du)
        dr = du.copy()
        for i in reversed(range(du.shape[-2])):
            y[..., i, :] = x.beta[..., i, :] * dr[..., i, :]
            dr[..., :i, :] -= x.lower[..., i, :i, None] * y[..., i, None, :]
        read = -x.carry * (y @ s.swapaxes(-1, -2))
        earlier = earlier + _summed(x.e * read, scalar)
        ds = ds - (x.carry * x.e).swapaxes(-1, -2) @ y
        dlower = np.where(_ones(x.lower, -1), -y @ x.u.swapaxes(-1, -2), 0)
        as_query, as_key, more = _of_scores(x.e, x.k, x.decayed, dlower, -1)
        if a.erase is None:
            dk = dk + read + as_query
        elif args.derase is not None:
            args.derase[..., x.tokens, :] = read + as_query
        dk, between, du = dk + as_key, between + more, y
        if args.dbeta is not None:
            args.dbeta[..., x.tokens] = (x.r * dr).sum(-1)
    if args.dk is not None:
        args.dk[..., x.tokens, :] = dk
    if args.dv is not None:
        args.dv[..., x.tokens, :] = du
    if args.dlog_decay is not None:
        before = np.zeros_like(later)
        np.cumsum(later[..., :-1, :], axis=-2, out=before[..., 1:, :])
        after = np.cumsum(earlier[..., ::-1, :], axis=-2)[..., ::-1, :]
        total = before + after + through[..., None, :] + between
        if a.gated:
            args.dlog_decay[..., x.tokens, :] = total
        else:
            args.dlog_decay[..., x.tokens] = total[..., 0]
    return ds, dz


def _cotangents(args: RecurrentBackwardArgs, tokens: slice, lane: np.dtype[Any]) -> Array:
    """Tokens of dout as (..., heads, group, n, head_dim_v)."""
    a = args.forward
    dout = args.dout[..., tokens, :].astype(lane)
    return dout.reshape(*dout.shape[:-3], a.heads, max(1, a.heads_q // a.heads), *dout.shape[-2:])


def _store_queries(args: RecurrentBackwardArgs, tokens: slice, dq: Array, lane: np.dtype[Any]) -> None:
    """Write `dq` (..., heads, group, n, head_dim), of queries times the scale, to args.dq."""
    if args.dq is not None:
        *batch, heads, group, n, dim = dq.shape
        args.dq[..., tokens, :] = lane.type(args.dq_factor) * dq.reshape(*batch, heads * group, n, dim)


def _ones(scores: Array, diagonal: int = 0) -> Array:
    """Mask of pairs (i, j) with j <= i + diagonal."""
    n: int = scores.shape[-1]
    mask: Array = np.tri(n, n, diagonal, dtype=np.bool_)
    return mask


def _summed(x: Array, wanted: bool) -> Array:
    """The sum over the last axis, which stays, if `wanted`: of a decay that all dimensions share."""
    return x.sum(-1, keepdims=True) if wanted else x


def _of_scores(
    q: Array, k: Array, decayed: Array, dscores: Array, diagonal: int
) -> tuple[Array, Array, Array]:
    """Gradients of q, of k and of the logarithms of decays, from those of scores with j <= i + diagonal.

    A decay of token t acts on the scores with j < t <= i: these are counted one by one.
    """
    mask = _ones(dscores, diagonal)[..., None]
    if decayed.shape[-1] == 1:
        dproducts = dscores * decayed[..., 0]
        terms = np.where(mask[..., 0], dproducts * (q @ k.swapaxes(-1, -2)), 0)[..., None]
        dq, dk = _lower(dproducts, k), _upper(dproducts, q)
    else:
        of_k = np.where(mask, decayed * k[..., None, :, :], 0)  # (..., i, j, head_dim)
        of_q = np.where(mask, decayed * q[..., :, None, :], 0)
        dq = np.einsum("...ij,...ijd->...id", dscores, of_k)
        dk = np.einsum("...ij,...ijd->...jd", dscores, of_q)
        terms = dscores[..., None] * of_k * q[..., :, None, :]
        terms = np.where(mask, terms, 0)
    before = np.zeros_like(terms)  # (..., i, t, 1 or head_dim): the sum over j < t
    np.cumsum(terms[..., :-1, :], axis=-2, out=before[..., 1:, :])
    return dq, dk, np.where(mask | np.eye(len(mask), dtype=bool)[..., None], before, 0).sum(-3)


def _lower(scores: Array, x: Array) -> Array:
    """scores @ x, where scores are 0 above the diagonal; 0 does not hide an x that is not finite."""
    if np.isfinite(x).all():
        product: Array = scores @ x
        return product
    rows = [scores[..., i : i + 1, : i + 1] @ x[..., : i + 1, :] for i in range(x.shape[-2])]
    return np.concatenate(rows, axis=-2)


def _upper(scores: Array, x: Array) -> Array:
    """scores^T @ x, where scores are 0 above the diagonal; 0 does not hide an x that is not finite."""
    turned = scores.swapaxes(-1, -2)
    if np.isfinite(x).all():
        product: Array = turned @ x
        return product
    rows = [turned[..., i : i + 1, i:] @ x[..., i:, :] for i in range(x.shape[-2])]
    return np.concatenate(rows, axis=-2)
