"""Linear attention and its gradient in NumPy: the readable twins of the kernels, and the fallback.

They walk over the tokens in chunks, as the kernels do. Tokens of one chunk meet through scores; earlier
tokens act through the state that a chunk hands to the next. `fastattn.functional.linear_attention` defines
the result.

The gradient: first the states before each chunk, from the first chunk to the last. Then the gradients, from
the last chunk to the first, with the gradient of the state carried back. Within a chunk, with names of
`_Chunk`:

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

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np

from fastattn._args.blocks import blocks
from fastattn._args.quiet import quiet
from fastattn._args.recurrent_types import RecurrentArgs, RecurrentBackwardArgs
from fastattn._args.types import Array, lane_dtype

State = tuple[Array, Array]  # S (..., head_dim, head_dim_v) and the sum of the keys (..., head_dim)

_CHUNK = 32
_GATED_CHUNK = 16

# The arrays of a call and of its gradient: how many axes they have behind the batch; with a decay of each
# feature, those of `_DECAYS` have one more. The first have tokens, the others are states.
_OF_TOKENS = dict.fromkeys(("q", "k", "v", "erase", "out", "dout", "dq", "dk", "dv", "derase"), 3)
_OF_TOKENS |= dict.fromkeys(("log_decay", "beta", "strength", "dlog_decay", "dbeta"), 2)
_OF_STATES = dict.fromkeys(("state", "state_out", "dstate", "dstate_out"), 3)
_OF_STATES |= dict.fromkeys(("norm", "norm_out", "dnorm", "dnorm_out"), 2)
_DECAYS = ("log_decay", "dlog_decay")


@quiet
def recurrent(args: RecurrentArgs) -> None:
    """Fill args.out and args.state_out, and args.norm_out if it is there."""
    if args.begins is not None:
        for s in range(len(args.begins) - 1):
            recurrent(_sequence(args, s))
        return
    step = _chunk_of(args)
    row = max(args.head_dim * (step if args.gated else 1), args.head_dim_v)
    for items in blocks(args.batch_shape, max(args.heads, args.heads_q) * step * row):
        _chunks(args if items is ... else _only(items, args), step)


def _chunk_of(args: RecurrentArgs) -> int:
    """Tokens of a chunk."""
    return _GATED_CHUNK if args.gated else _CHUNK


def _arrays(args: RecurrentArgs | RecurrentBackwardArgs, gated: bool) -> Iterator[tuple[str, Array, int]]:
    """The arrays that are there: name, array, axes behind the batch."""
    axes = _OF_TOKENS | _OF_STATES
    for name in (field.name for field in fields(args) if field.name in axes):
        if (x := getattr(args, name)) is not None:
            yield name, x, axes[name] + (gated and name in _DECAYS)


def _of_sequence(args: RecurrentArgs | RecurrentBackwardArgs, s: int, a: RecurrentArgs) -> dict[str, Any]:
    """The arrays of sequence s, of those of `a` that lie end to end."""
    begin, end = a.begins[s : s + 2].tolist()  # type: ignore[index]
    found: dict[str, Any] = {}
    for name, x, axes in _arrays(args, a.gated):
        if name in _OF_STATES:
            found[name] = x[s]
        else:
            part = _at_tokens(x if axes == 3 else x[..., None], slice(begin, end))
            found[name] = part if axes == 3 else part[..., 0]
    return found


def _sequence(args: RecurrentArgs, s: int) -> RecurrentArgs:
    """The call of sequence s alone."""
    length = int(args.begins[s + 1] - args.begins[s])  # type: ignore[index]
    arrays = _of_sequence(args, s, args)
    return replace(args, batch_shape=(), begins=None, len_q=length, len_k=length, **arrays)


def _of_items(args: RecurrentArgs | RecurrentBackwardArgs, items: Any, a: RecurrentArgs) -> dict[str, Any]:
    """The arrays of some batch items of `a`; those that are written have the whole batch."""
    found: dict[str, Any] = {}
    for name, x, axes in _arrays(args, a.gated):
        shape = (*a.batch_shape, *x.shape[x.ndim - axes :])
        found[name] = (x if x.shape == shape else np.broadcast_to(x, shape))[items]
    return found


def _only(items: Any, args: RecurrentArgs) -> RecurrentArgs:
    """The call of some batch items."""
    arrays = _of_items(args, items, args)
    return replace(args, batch_shape=arrays["out"].shape[:-3], **arrays)


def _chunks(args: RecurrentArgs, step: int) -> None:
    """Compute `args` in chunks of `step` tokens."""
    lane = lane_dtype(args.q.dtype)
    shape = (*args.batch_shape, args.heads, args.head_dim, args.head_dim_v)
    state, norm = _state(args.state, args.norm, shape, lane)
    norm = norm[..., None]
    for i in range(0, args.len_k, step):
        tokens = slice(i, i + step)
        k = _of_heads(args.k, args.heads, tokens, lane)
        u = v = _of_heads(args.v, args.heads, tokens, lane)
        if args.strength is not None:
            u = v * _at_tokens(args.strength[..., None], tokens)
        # With a_t the decay of token t: decayed (..., i, j, 1 or head_dim) is a_{j+1} ... a_i, and carry
        # (..., i, 1 or head_dim) is a_0 ... a_i.
        decayed, carry = _decays(args, tokens, k.shape[-2], lane)
        if args.beta is not None:
            beta = _at_tokens(args.beta[..., None], tokens)
            e = _erase_keys(args, k, tokens, lane)
            writes = -beta * np.tril(_scores_of(e, k, decayed), -1)
            u = beta * (u - (carry * e) @ state)
            for row in range(1, k.shape[-2]):
                u[..., row, :] += np.einsum("...j,...jv->...v", writes[..., row, :row], u[..., :row, :])
        if args.causal:
            q = _queries(args, tokens, lane)
            scores = np.tril(_scores_of(q, k[..., None, :, :], decayed[..., None, :, :, :]))
            reached = carry[..., None, :, :] * q
            out = _lower(scores, u[..., None, :, :]) + reached @ state[..., None, :, :]
            if args.norm_out is not None:
                sums = scores.sum(-1, keepdims=True) + reached @ norm[..., None, :, :]
                out = out / (sums + lane.type(args.eps))
            if args.skip is not None:
                out = out + args.skip[:, None, None, None] * v[..., None, :, :]
            _store(args, tokens, out)
        to_end = (decayed[..., -1, :, :] * k).swapaxes(-1, -2)
        end = carry[..., -1, :, None]
        state = end * state + to_end @ u
        norm = end * norm + to_end.sum(-1, keepdims=True)
    for i in range(0, 0 if args.causal else args.len_q, step):
        tokens = slice(i, i + step)
        q = _queries(args, tokens, lane)
        out = q @ state[..., None, :, :]
        if args.norm_out is not None:
            out = out / (q @ norm[..., None, :, :] + lane.type(args.eps))
        _store(args, tokens, out)
    args.state_out[...] = state
    if args.norm_out is not None:
        args.norm_out[...] = norm[..., 0]


def _of_heads(x: Array, heads: int, tokens: slice, lane: np.dtype[np.float64]) -> Array:
    """Tokens of x as (..., heads, n, dim): each head is repeated for the states that share it."""
    return np.repeat(x[..., tokens, :].astype(lane, copy=False), heads // x.shape[-3], axis=-3)


def _erase_keys(args: RecurrentArgs, k: Array, tokens: slice, lane: np.dtype[np.float64]) -> Array:
    """Keys that the delta rule reads the state by: `k`, by which it writes, or others."""
    return k if args.erase is None else _of_heads(args.erase, args.heads, tokens, lane)


def _queries(args: RecurrentArgs, tokens: slice, lane: np.dtype[np.float64]) -> Array:
    """Tokens of scale * q as (..., heads, group, n, head_dim)."""
    group = max(1, args.heads_q // args.heads)
    q = _of_heads(args.q, max(args.heads_q, args.heads), tokens, lane) * lane.type(args.scale)
    return q.reshape(*q.shape[:-3], args.heads, group, *q.shape[-2:])


def _store(args: RecurrentArgs, tokens: slice, out: Array) -> None:
    """Write `out` (..., heads, group, n, head_dim_v) to args.out."""
    *batch, heads, group, n, dim = out.shape
    args.out[..., tokens, :] = out.reshape(*batch, heads * group, n, dim)


def _at_tokens(x: Array, tokens: slice) -> Array:
    """Tokens of x (..., heads, length or 1, dim)."""
    return x if x.shape[-2] == 1 else x[..., tokens, :]


def _decays(args: RecurrentArgs, tokens: slice, n: int, lane: np.dtype[np.float64]) -> tuple[Array, Array]:
    """`decayed` and `carry` of a chunk: products of decays.

    Sums of their logarithms would do, but for a log_decay of -inf, where a difference of such sums is NaN.
    """
    if args.log_decay is None:
        return np.ones((n, n, 1), lane), np.ones((n, 1), lane)
    gate = np.exp(_at_tokens(args.log_decay if args.gated else args.log_decay[..., None], tokens))
    gate = np.broadcast_to(gate, (*gate.shape[:-2], n, gate.shape[-1]))
    decayed = np.zeros((*gate.shape[:-1], n, gate.shape[-1]), lane)
    for i in range(n):
        decayed[..., i, :i, :] = decayed[..., i - 1, :i, :] * gate[..., i, None, :]
        decayed[..., i, i, :] = 1
    return decayed, np.cumprod(gate, axis=-2)


def _scores_of(x: Array, k: Array, decayed: Array) -> Array:
    """Scores (..., i, j): the sum over d of x_id k_jd decayed_ijd."""
    if decayed.shape[-1] == 1:
        products: Array = (x @ k.swapaxes(-1, -2)) * decayed[..., 0]
        return products
    scores: Array = np.einsum("...id,...jd,...ijd->...ij", x, k, decayed)
    return scores


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


@quiet
def recurrent_backward(args: RecurrentBackwardArgs) -> None:
    """Fill those results of `args` that are wanted."""
    a = args.forward
    if a.begins is not None:
        for s in range(len(a.begins) - 1):
            recurrent_backward(replace(args, forward=_sequence(a, s), **_of_sequence(args, s, a)))
        return
    n = _chunk_of(a)
    chunks = -(-a.len_k // n)
    state = a.head_dim * a.head_dim_v * (chunks + 1)
    of_chunk = 4 * n * max(a.head_dim * (n if a.gated else 1), a.head_dim_v)
    for items in blocks(a.batch_shape, max(a.heads, a.heads_q) * max(of_chunk, state)):
        some = args
        if items is not ...:
            some = replace(args, forward=_only(items, a), **_of_items(args, items, a))
        _gradients(some, n)


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
    k, u = _of_heads(a.k, a.heads, tokens, lane), _of_heads(a.v, a.heads, tokens, lane)
    n = k.shape[-2]
    decayed, carry = _decays(a, tokens, n, lane)
    r = beta = e = lower = u
    if a.beta is not None:
        beta = np.broadcast_to(_at_tokens(a.beta[..., None], tokens), (*a.batch_shape, a.heads, n, 1))
        e = _erase_keys(a, k, tokens, lane)
        lower = np.tril(_scores_of(e, k, decayed), -1)
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
    q = _queries(a, tokens, lane)
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
        q, dout = _queries(a, x.tokens, lane), _cotangents(args, x.tokens, lane)
        decayed, carry, k = (y[..., None, :, :] for y in (x.decayed, x.carry, x.k))
        decayed = x.decayed[..., None, :, :, :]
        scores = np.tril(_scores_of(q, k, decayed))
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
