"""Selection of blocks of keys for blocks of queries, by estimates of their probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from fastattn._args.attention import attention_args
from fastattn._args.errors import named
from fastattn._args.quiet import quiet
from fastattn._args.selection import returned
from fastattn._args.types import FLOAT64, Array, ArrayLike, AttentionArgs, Ints, NDArray, lane_dtype
from fastattn._args.values import MAX_POSITION, choice, flag, integer, number
from fastattn._reference.selection import largest
from fastattn.ops import softmax

Rule = Callable[[Array, int], ArrayLike]
SCORES = 2**19  # that are estimated at a time, about
STRIDES = {"antidiagonal": 4, "mean": 16}


@named("select_blocks")
def select_blocks(
    q: ArrayLike,
    k: ArrayLike,
    *,
    keep: float,
    rule: Literal["antidiagonal", "mean"] | Rule = "antidiagonal",
    stride: int | None = None,
    block_size: int = 64,
    causal: bool = False,
    q_offset: int | None = None,
    scale: float | None = None,
    first: int = 1,
    last: int = 2,
) -> NDArray[np.int64]:
    """Blocks of keys that matter to blocks of queries, estimated: lists for `selected_attention`.

    Attention to these lists is an approximation: what is not selected is lost.

    Parameters
    ----------
    q : array_like, (..., heads_q, len_q, head_dim)
        Queries, as in `attention`, of a prompt or a part of it.
    k : array_like, (..., heads_kv, len_k, head_dim)
        Keys.
    keep : float
        Share of the blocks that a query may attend, above 0, at most 1. It is rounded up to whole blocks.
    rule : {"antidiagonal", "mean"} or callable, default "antidiagonal"
        How blocks are scored. "antidiagonal": probabilities of `stride` keys for `stride` queries, by the sum
        of the products of the first query with the last key, the second with the last but one, ... "mean":
        probabilities of all keys for means of `stride` queries. A function ``rule(q_rows, begin)`` returns
        the scores of ``q_rows = q[..., begin:begin + rows, :]``, whole blocks of queries but for the last
        one, as an array that broadcasts to (..., heads_kv, blocks of queries, blocks of keys).
    stride : int, optional
        Default 4 for "antidiagonal" and 16 for "mean". It divides `block_size`.
    block_size : int, default 64
        Queries of a block, and keys.
    causal : bool, default False
        Let queries select only blocks whose first key is not after the last query of their block.
    q_offset : int, optional
        Position of the first query. By default the last query has the position of the last key.
    scale : float, optional
        As in `attention`.
    first, last : int, default 1 and 2
        How many of the first, and of the last, blocks that a query may select are always selected, also where
        that is more than `keep`. With `causal`, the last one has the queries themselves.

    Returns
    -------
    selected : ndarray of int64, (..., heads_kv, len_q, n)
        Numbers of blocks, ascending, padded with -1. All queries of a block have the same. Scores of all
        query heads of a key head are added.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    ``1 / stride`` of the FLOP of all scores, half of that with `causal`. Computed in NumPy, in float32, or
    float64 for float64; half a million scores are in memory at a time. Equal scores select the first block;
    NaN counts as the largest.

    docs/howto/long.md has the losses. "antidiagonal" divides sums by ``stride**0.5``, as their spread
    grows; its source divides by `stride`. Sources: R. Xu et al., "XAttention: Block Sparse Attention with
    Antidiagonal Scoring", 2025, arXiv:2503.16428; X. Lai et al., "FlexPrefill: A Context-Aware Sparse
    Attention Mechanism for Efficient Long-Sequence Inference", 2025, arXiv:2502.20766, which takes means of
    keys, too: these hide a single key that matters.

    Examples
    --------
    >>> import fastattn, numpy as np
    >>> F = fastattn.functional
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 1024, 32), np.float32)
    >>> selected = F.select_blocks(q, k, keep=0.25, causal=True)
    >>> selected[0, -1]
    array([ 0,  7, 14, 15])
    >>> out = F.selected_attention(q, k, v, selected, block_size=64, causal=True)
    """
    a = attention_args(q, k, k, scale=scale, names=("q", "k", "k"))
    one_head = a.result.ndim == 2
    share = number("keep", keep, FLOAT64)
    if not 0 < share <= 1:
        raise ValueError(f"(): keep is {share}; expected above 0 and at most 1")
    size = integer("block_size", block_size, 1, MAX_POSITION)
    first, last = integer("first", first, 0), integer("last", last, 0)
    causal = flag("causal", causal)
    offset = a.len_k - a.len_q
    if q_offset is not None:
        offset = integer("q_offset", q_offset, -MAX_POSITION, MAX_POSITION)
    estimate: _Estimate | _Given
    if callable(rule):
        if stride is not None:
            raise ValueError("(): stride is given with a rule that is a function; expected one of them")
        estimate = _Given(a, rule, size, one_head)
    else:
        name = choice("rule", rule, tuple(STRIDES))
        step = integer("stride", STRIDES[name] if stride is None else stride, 1, size)
        if size % step:
            raise ValueError(f"(): stride is {step}; expected a divisor of block_size, {size}")
        estimate = _Estimate(a, name == "antidiagonal", step, size, offset if causal else None)

    end = _ends(a, size, size, offset if causal else None)
    count = np.minimum(end, np.maximum(np.ceil(share * end - 1e-9).astype(np.int64), first + last))
    chosen = np.full((*a.batch_shape, a.heads_kv, len(end), count.max(initial=0)), -1)
    begin = 0
    while begin < len(end) and chosen.size:
        stop = min(begin + estimate.blocks_at_once, len(end))
        scores = estimate.scores(begin, stop)
        for head in np.ndindex(chosen.shape[:-2]):
            found = largest(scores[head], end[begin:stop], count[begin:stop], first, last)
            chosen[head][begin:stop, : found.shape[-1]] = found
        begin = stop
    selected = np.repeat(chosen, size, axis=-2)[..., : a.len_q, :]
    return selected[0] if one_head else selected


class _Given:
    """Scores that a function returns."""

    def __init__(self, a: AttentionArgs, rule: Rule, size: int, one_head: bool):
        self.a, self.rule, self.size = a, rule, size
        self.queries = a.q[0] if one_head else a.q
        self.n_keys = -(-a.len_k // size)
        heads = int(np.prod(a.batch_shape)) * a.heads_kv
        self.blocks_at_once = max(1, SCORES // max(1, heads * self.n_keys))

    def scores(self, begin: int, stop: int) -> Array:
        """Scores (..., heads_kv, blocks, blocks of keys)."""
        rows = self.queries[..., begin * self.size : stop * self.size, :]
        shape = (*self.a.batch_shape, self.a.heads_kv, stop - begin, self.n_keys)
        dims = "(..., heads_kv, blocks of queries, blocks of keys)"
        return returned("rule", self.rule(rows, begin * self.size), shape, dims)


class _Estimate:
    """Sums of probabilities of rows that stand for `step` queries, over blocks of keys.

    A row is the mean of the queries, against each key; or, with `whole`, all of them, the last one first,
    against as many keys side by side. Under a causal mask `offset` is the position of the first query.
    """

    def __init__(self, a: AttentionArgs, whole: bool, step: int, size: int, offset: int | None):
        self.a, self.whole, self.step, self.size = a, whole, step, size
        self.lane = lane_dtype(a.q.dtype)
        self.unit = step if whole else 1  # keys of a row of `keys`
        self.end = _ends(a, step, self.unit, offset)
        # Sums of `step` products vary as much as one, times this.
        self.scale = a.scale * step**-0.5 if whole else a.scale
        self.keys = _side_by_side(a.k, step) if whole else a.k
        self.keys = np.broadcast_to(self.keys, (*a.batch_shape, *self.keys.shape[-3:]))
        self.queries = np.broadcast_to(a.q, (*a.batch_shape, *a.q.shape[-3:]))
        self.held = np.empty((2, 0), self.lane)
        pairs = a.heads_q // a.heads_kv * (size // step) * self.keys.shape[-2]
        self.blocks_at_once = max(1, SCORES // max(1, pairs))

    def scores(self, begin: int, stop: int) -> Array:
        """Scores (..., heads_kv, blocks, blocks of keys)."""
        a, group = self.a, self.a.heads_q // self.a.heads_kv
        out = np.zeros((*a.batch_shape, a.heads_kv, stop - begin, -(-a.len_k // self.size)), self.lane)
        queries = self.queries[..., begin * self.size : stop * self.size, :]
        rows = _side_by_side(queries, self.step, backwards=True) if self.whole else _means(queries, self.step)
        end = self.end[begin * self.size // self.step :][: rows.shape[-2]]
        if not end.any():
            return out
        per_block = np.arange(0, end[-1], self.size // self.unit)
        for item in np.ndindex(a.batch_shape):
            for head in range(a.heads_kv):
                of_group = rows[item][head * group : (head + 1) * group].astype(self.lane, copy=False)
                keys = self.keys[item][head][: end[-1]].astype(self.lane, copy=False)
                sums = np.add.reduceat(self._probabilities(of_group, keys, end), per_block, axis=-1)
                per_rows = np.arange(0, len(end), self.size // self.step)
                out[item][head, :, : len(per_block)] = np.add.reduceat(sums, per_rows, axis=1).sum(axis=0)
        return out

    @quiet
    def _probabilities(self, rows: Array, keys: Array, end: Ints) -> Array:
        """Probabilities (heads, rows, keys) of the keys before each row's end, in memory of the next call."""
        flat = (rows * self.lane.type(self.scale)).reshape(-1, rows.shape[-1])
        size = len(flat) * len(keys)
        if self.held.shape[-1] < size:
            self.held = np.empty((2, size), self.lane)
        scores, probs = self.held[:, :size].reshape(2, *rows.shape[:-1], len(keys))
        np.matmul(flat, keys.T, out=scores.reshape(len(flat), -1))
        low = end[0]
        scores[..., low:][:, np.arange(low, len(keys)) >= end[:, None]] = -np.inf
        return softmax(scores, out=probs)


def _ends(a: AttentionArgs, step: int, unit: int, offset: int | None) -> Ints:
    """How many units of keys each `step` queries see: all, or up to the last query, the first at `offset`."""
    last, count = np.minimum(np.arange(step, a.len_q + step, step), a.len_q) - 1, -(-a.len_k // unit)
    return np.full(len(last), count) if offset is None else np.clip((offset + last) // unit + 1, 0, count)


def _means(x: Array, step: int) -> Array:
    """Means of each `step` rows; the last one may be of fewer."""
    starts = np.arange(0, x.shape[-2], step)
    sums = np.add.reduceat(x, starts, axis=-2, dtype=lane_dtype(x.dtype))
    means: Array = sums / np.minimum(step, x.shape[-2] - starts)[:, None].astype(sums.dtype)
    return means


def _side_by_side(x: Array, step: int, backwards: bool = False) -> Array:
    """Each `step` rows in one, the last one completed with 0; `backwards`: the last row first."""
    *batch, n, width = x.shape
    if missing := -n % step:
        x = np.concatenate((x, np.zeros((*batch, missing, width), x.dtype)), axis=-2)
    x = x.reshape(*batch, -1, step, width)
    return (x[..., ::-1, :] if backwards else x).reshape(*batch, x.shape[-3], step * width)
