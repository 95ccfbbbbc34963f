"""Linear attention in NumPy: the readable twin of the kernel, and the fallback.

It walks over the tokens in chunks, as the kernel does. Tokens of one chunk meet through scores; earlier
tokens act through the state that a chunk hands to the next. `fastattn.functional.linear_attention` defines
the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from fastattn._args.blocks import blocks
from fastattn._args.recurrent_types import RecurrentArgs
from fastattn._args.types import Array, lane_dtype

_CHUNK = 32
_GATED_CHUNK = 16


@np.errstate(all="ignore")
def recurrent(args: RecurrentArgs) -> None:
    """Fill args.out and args.state_out, and args.norm_out if it is there."""
    if args.begins is not None:
        for _, _, part in sequences(args):
            recurrent(part)
        return
    step = chunk_of(args)
    row = max(args.head_dim * (step if args.gated else 1), args.head_dim_v)
    for items in blocks(args.batch_shape, max(args.heads, args.heads_q) * step * row):
        _chunks(args if items is ... else only(items, args), step)


def chunk_of(args: RecurrentArgs) -> int:
    """Tokens of a chunk."""
    return _GATED_CHUNK if args.gated else _CHUNK


def sequences(args: RecurrentArgs) -> Iterator[tuple[int, slice, RecurrentArgs]]:
    """Sequences that lie end to end: the number of each, its tokens, and the call of it alone."""
    assert args.begins is not None
    names = ("q", "k", "v", "out", "erase", "log_decay", "beta", "strength")
    arrays = {name: getattr(args, name) for name in names}
    states = {name: getattr(args, name) for name in ("state", "state_out", "norm", "norm_out")}
    for s, (begin, end) in enumerate(pairwise(args.begins.tolist())):
        tokens = slice(begin, end)
        part: dict[str, Any] = {name: None if x is None else x[s] for name, x in states.items()}
        for name, x in arrays.items():
            of_rows = name in names[:5] or (name == "log_decay" and args.gated)
            if x is not None:
                x = at_tokens(x, tokens) if of_rows else at_tokens(x[..., None], tokens)[..., 0]
            part[name] = x
        length = end - begin
        yield s, tokens, replace(args, batch_shape=(), begins=None, len_q=length, len_k=length, **part)


def only(items: Any, args: RecurrentArgs) -> RecurrentArgs:
    """Select some batch items of the call."""

    def some(x: Array | None, core: int) -> Any:
        return None if x is None else np.broadcast_to(x, (*args.batch_shape, *x.shape[-core:]))[items]

    results = {"out": args.out[items], "state_out": args.state_out[items]}
    if args.norm_out is not None:
        results["norm_out"] = args.norm_out[items]
    cores = {
        "q": 3,
        "k": 3,
        "v": 3,
        "log_decay": 2 + args.gated,
        "beta": 2,
        "erase": 3,
        "strength": 2,
        "state": 3,
        "norm": 2,
    }
    inputs = {name: some(getattr(args, name), core) for name, core in cores.items()}
    return replace(args, batch_shape=results["out"].shape[:-3], **inputs, **results)


def _chunks(args: RecurrentArgs, step: int) -> None:
    """Compute `args` in chunks of `step` tokens."""
    lane = lane_dtype(args.q.dtype)
    batch_heads = (*args.batch_shape, args.heads)
    state = np.zeros((*batch_heads, args.head_dim, args.head_dim_v), lane)
    norm = np.zeros((*batch_heads, args.head_dim, 1), lane)
    if args.state is not None:
        state[...] = args.state
    if args.norm is not None:
        norm[..., 0] = args.norm
    for i in range(0, args.len_k, step):
        tokens = slice(i, i + step)
        k = of_heads(args.k, args.heads, tokens, lane)
        u = v = of_heads(args.v, args.heads, tokens, lane)
        if args.strength is not None:
            u = v * at_tokens(args.strength[..., None], tokens)
        # With a_t the decay of token t: decayed (..., i, j, 1 or head_dim) is a_{j+1} ... a_i, and carry
        # (..., i, 1 or head_dim) is a_0 ... a_i.
        decayed, carry = decays(args, tokens, k.shape[-2], lane)
        if args.beta is not None:
            beta = at_tokens(args.beta[..., None], tokens)
            e = erase_keys(args, k, tokens, lane)
            writes = -beta * np.tril(scores_of(e, k, decayed), -1)
            u = beta * (u - (carry * e) @ state)
            for row in range(1, k.shape[-2]):
                u[..., row, :] += np.einsum("...j,...jv->...v", writes[..., row, :row], u[..., :row, :])
        if args.causal:
            q = queries(args, tokens, lane)
            scores = np.tril(scores_of(q, k[..., None, :, :], decayed[..., None, :, :, :]))
            reached = carry[..., None, :, :] * q
            out = _matmul_lower(scores, u[..., None, :, :]) + reached @ state[..., None, :, :]
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
        q = queries(args, tokens, lane)
        out = q @ state[..., None, :, :]
        if args.norm_out is not None:
            out = out / (q @ norm[..., None, :, :] + lane.type(args.eps))
        _store(args, tokens, out)
    args.state_out[...] = state
    if args.norm_out is not None:
        args.norm_out[...] = norm[..., 0]


def of_heads(x: Array, heads: int, tokens: slice, lane: np.dtype[np.float64]) -> Array:
    """Tokens of x as (..., heads, n, dim): each head is repeated for the states that share it."""
    return np.repeat(x[..., tokens, :].astype(lane, copy=False), heads // x.shape[-3], axis=-3)


def erase_keys(args: RecurrentArgs, k: Array, tokens: slice, lane: np.dtype[np.float64]) -> Array:
    """Keys that the delta rule reads the state by: `k`, by which it writes, or others."""
    return k if args.erase is None else of_heads(args.erase, args.heads, tokens, lane)


def queries(args: RecurrentArgs, tokens: slice, lane: np.dtype[np.float64]) -> Array:
    """Tokens of scale * q as (..., heads, group, n, head_dim)."""
    group = max(1, args.heads_q // args.heads)
    q = of_heads(args.q, max(args.heads_q, args.heads), tokens, lane) * lane.type(args.scale)
    return q.reshape(*q.shape[:-3], args.heads, group, *q.shape[-2:])


def _store(args: RecurrentArgs, tokens: slice, out: Array) -> None:
    """Write `out` (..., heads, group, n, head_dim_v) to args.out."""
    *batch, heads, group, n, dim = out.shape
    args.out[..., tokens, :] = out.reshape(*batch, heads * group, n, dim)


def at_tokens(x: Array, tokens: slice) -> Array:
    """Tokens of x (..., heads, length or 1, dim)."""
    return x if x.shape[-2] == 1 else x[..., tokens, :]


def decays(args: RecurrentArgs, tokens: slice, n: int, lane: np.dtype[np.float64]) -> tuple[Array, Array]:
    """`decayed` and `carry` of a chunk: products of decays.

    Sums of their logarithms would do, but for a log_decay of -inf, where a difference of such sums is NaN.
    """
    if args.log_decay is None:
        return np.ones((n, n, 1), lane), np.ones((n, 1), lane)
    gate = np.exp(at_tokens(args.log_decay if args.gated else args.log_decay[..., None], tokens))
    gate = np.broadcast_to(gate, (*gate.shape[:-2], n, gate.shape[-1]))
    decayed = np.zeros((*gate.shape[:-1], n, gate.shape[-1]), lane)
    for i in range(n):
        decayed[..., i, :i, :] = decayed[..., i - 1, :i, :] * gate[..., i, None, :]
        decayed[..., i, i, :] = 1
    return decayed, np.cumprod(gate, axis=-2)


def scores_of(x: Array, k: Array, decayed: Array) -> Array:
    """Scores (..., i, j): the sum over d of x_id k_jd decayed_ijd."""
    if decayed.shape[-1] == 1:
        products: Array = (x @ k.swapaxes(-1, -2)) * decayed[..., 0]
        return products
    scores: Array = np.einsum("...id,...jd,...ijd->...ij", x, k, decayed)
    return scores


def _matmul_lower(scores: Array, u: Array) -> Array:
    """scores @ u, where scores are 0 above the diagonal.

    0 does not hide a u that is not finite: if there is one, each row multiplies only the u up to its own.
    """
    if np.isfinite(u).all():
        product: Array = scores @ u
        return product
    rows = [scores[..., i : i + 1, : i + 1] @ u[..., : i + 1, :] for i in range(u.shape[-2])]
    return np.concatenate(rows, axis=-2)
