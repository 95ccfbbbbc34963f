"""The calls of attention that the Reformer's is: for it, and for its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fastattn._args.attention import attention_args
from fastattn._args.errors import wrong_dtype, wrong_shape
from fastattn._args.options import ScaledOptions, require_options
from fastattn._args.types import Array, AttentionArgs, Bools, Ints, lane_dtype
from fastattn._args.values import MOST_SIZE, flag, float_array, generator, integer
from fastattn._engine import dispatch

EPS = 1e-6  # of the norm that makes queries keys
_ITSELF = 1e5  # is taken from a token's score of itself, so that it has weight where there is nothing else


class Chunks(NamedTuple):
    """A call of attention whose heads are the chunks of all rounds, (..., heads, chunks, chunk, d)."""

    args: AttentionArgs  # with its results
    alone: Bools  # (..., heads, rounds, padded length): tokens that have only themselves


@dataclass(slots=True)
class Hashed:
    """Arguments of `lsh_attention`, and the order of the tokens in each round."""

    args: AttentionArgs  # of plain attention: its shapes, scale and result
    q: Array  # (..., heads, length, head_dim), lane dtype, as v
    v: Array
    rotations: Array  # (heads, rounds, head_dim, n)
    chunk: int
    causal: bool
    order: Ints  # (..., heads, rounds, padded length), and behind the tokens what fills the last chunk

    def keys(self) -> Array:
        """The queries, with a root mean square of 1."""
        square = np.mean(self.q * self.q, axis=-1, keepdims=True)
        found: Array = self.q / np.sqrt(square + self.q.dtype.type(EPS))
        return found

    def attended(self, options: ScaledOptions) -> Chunks:
        """The call of all chunks, computed.

        A token's score of itself has no large number where it has nothing else: the lse would lose its last
        digits.
        """
        length = self.q.shape[-2]
        place = self._cut(self.order[..., None])
        i, j = place, self.with_previous(place).swapaxes(-1, -2)
        hidden = (j > i) | (j >= length) if self.causal else j >= length
        itself = i == j
        alone = (hidden | itself).all(axis=-1, keepdims=True)
        bias = np.where(hidden & ~itself, -np.inf, np.where(itself & ~alone, -_ITSELF, 0))
        real = np.minimum(self.order, length - 1)[..., None]
        q, k, v = (
            self._cut(np.take_along_axis(x[..., None, :, :], real, axis=-2))
            for x in (self.q, self.keys(), self.v)
        )
        how: Any = {**options, "scale": self.args.scale, "bias": bias.astype(q.dtype)}
        args = attention_args(q, self.with_previous(k), self.with_previous(v), return_lse=True, **how)
        dispatch.run(args, options.get("backend"))
        return Chunks(args, alone.reshape(self.order.shape))

    def shares(self, calls: Chunks) -> Array:
        """Share of each round in each token's result, (..., heads, rounds, length)."""
        lse: Any = calls.args.lse
        lse = self.by_token(lse[..., None])[..., 0]
        alone = self.by_token(calls.alone[..., None])[..., 0]
        lse = lse - lse.dtype.type(_ITSELF) * (alone & ~alone.all(axis=-2, keepdims=True))
        weights = np.exp(lse - lse.max(axis=-2, keepdims=True))
        found: Array = weights / weights.sum(axis=-2, keepdims=True)
        return found

    def by_token(self, x: Array) -> Array:
        """Rows of chunks in the order of the tokens, (..., heads, rounds, length, d)."""
        x = x.reshape(*self.order.shape, x.shape[-1])
        back = np.argsort(self.order, axis=-1)[..., : self.q.shape[-2]]
        return np.take_along_axis(x, back[..., None], axis=-2)

    def by_chunk(self, x: Array, fill: float) -> Array:
        """The way back: x (..., heads, rounds, length, d) in chunks, `fill` where there is no token."""
        more = self.order.shape[-1] - x.shape[-2]
        x = np.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, more), (0, 0)], constant_values=fill)
        return self._cut(np.take_along_axis(x, self.order[..., None], axis=-2))

    def _cut(self, x: Array) -> Array:
        """x (..., heads, rounds, padded length, d) as (..., heads, chunks of all rounds, chunk, d)."""
        return x.reshape(*x.shape[:-3], -1, self.chunk, x.shape[-1])

    def with_previous(self, x: Array) -> Array:
        """Behind each chunk itself: for a round's first one, the last one of the round before."""
        return np.concatenate([np.roll(x, 1, axis=-3), x], axis=-2) if x.shape[-3] > 1 else x

    def of_previous(self, x: Array) -> Array:
        """The way back: sums over both places of a chunk."""
        if x.shape[-3] == 1:
            return x
        return np.roll(x[..., : self.chunk, :], -1, axis=-3) + x[..., self.chunk :, :]


def lsh_args(
    qk: Any,
    v: Any,
    num_buckets: int,
    chunk: int,
    num_rounds: int,
    rng: Any,
    rotations: Any,
    causal: bool,
    options: ScaledOptions,
) -> Hashed:
    """Check the arguments of the Reformer's attention, and hash."""
    require_options(options, ScaledOptions)
    queries, values = float_array("qk", qk, least_dims=3), float_array("v", v, least_dims=3)
    if queries.shape[:-1] != values.shape[:-1]:
        came = f"qk has shape {queries.shape} and v {values.shape}"
        raise ValueError(f"(): {came}; expected the same but for the last axis")
    if queries.dtype.newbyteorder("=") != values.dtype.newbyteorder("="):
        raise wrong_dtype("v", values, f"qk's, {queries.dtype}")
    names = ("qk", "qk", "v")
    args = attention_args(queries, queries, values, names=names, return_lse=True, **options)
    n = integer("num_buckets", num_buckets, 2, MOST_SIZE)
    if n % 2:
        raise ValueError(f"(): num_buckets is {n}; expected an even number")
    num_rounds = integer("num_rounds", num_rounds, 1, MOST_SIZE)
    lane, length = lane_dtype(queries.dtype), queries.shape[-2]
    shape = (args.heads_q, num_rounds, args.head_dim, n // 2)
    if rotations is None:
        r = generator("rng", rng).standard_normal(shape).astype(lane)
    else:
        r = float_array("rotations", rotations).astype(lane)
        if r.shape != shape:
            dims = "(heads, num_rounds, head_dim, num_buckets // 2)"
            raise wrong_shape("rotations", r, f"{shape}, {dims}")
    chunk = min(integer("chunk", chunk, 1), max(1, length))  # a longer one would only be padded
    causal = flag("causal", causal)
    q = queries.astype(lane)
    orders = [_hash_order(q, r[:, i], chunk) for i in range(num_rounds)] if args.out.size else []
    order = np.stack(orders, axis=-2) if orders else np.zeros(0, np.int64)
    return Hashed(args, q, values.astype(lane), r, chunk, causal, order)


def _hash_order(x: Array, rotations: Array, chunk: int) -> Ints:
    """Tokens of x (..., heads, length, d) by hash and position, and behind them what fills the last chunk."""
    length = x.shape[-2]
    rotated = x @ rotations
    buckets = np.argmax(np.concatenate([rotated, -rotated], axis=-1), axis=-1)
    order = np.argsort(buckets, axis=-1, kind="stable")
    n_more = -length % chunk
    more = np.broadcast_to(np.arange(length, length + n_more), (*order.shape[:-1], n_more))
    return np.concatenate([order, more], axis=-1)
