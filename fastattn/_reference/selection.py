"""Keys and vectors with the largest scores, and attention to selected keys, in NumPy: twins and fallback.

Selected keys of a query are gathered, and attended as if they were all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from typing import Any

import numpy as np

from fastattn._args.grad_types import ScatterArgs
from fastattn._args.key_ranges import closed, union
from fastattn._args.quiet import quiet
from fastattn._args.types import Array, AttentionArgs, Ints, NearestArgs, SelectedArgs, SelectionArgs, Shape
from fastattn._reference.attention import TILE_SCORES, Call, Task, attention, tasks

_ONES = np.array([byte.bit_count() for byte in range(256)], np.uint8)  # bits of a byte


@quiet
def selection(args: SelectionArgs) -> None:
    """Fill args.out."""
    a = args.attention
    args.out[...] = -1
    step = max(1, TILE_SCORES // (a.heads_q // a.heads_kv * max(1, a.len_k)))
    for task in tasks(Call(a), step, Task):
        keys = task.keys()
        where: Any = (*task.batch, task.h_kv, slice(task.rows[0], task.rows[-1] + 1))
        scores = _scores(task, keys, args) if args.scores is None else args.scores[where][:, keys]
        chosen = largest(scores, task.end[0], args.top_k, args.first, args.last)
        args.out[(*where, slice(chosen.shape[-1]))] = chosen


def _scores(task: Task, keys: slice, args: SelectionArgs) -> Array:
    """Scores (rows, keys), the sums over the heads of the group."""
    products = task.products(keys)
    if args.relu:
        np.maximum(products, 0, out=products)
    if args.weights is not None:
        a = args.attention
        products *= np.broadcast_to(args.weights, (*a.batch_shape, a.heads_q, a.len_q))[task.where][..., None]
    scores: Array = products.sum(axis=0)
    return scores


def largest(scores: Array, end: Ints, count: int | Ints, first: int, last: int) -> Ints:
    """Numbers of at most `count` keys before each row's `end`, ascending, and then -1.

    The `first` and `last` ones are among them.
    """
    j, end, count = np.arange(scores.shape[-1]), end[:, None], np.reshape(count, (-1, 1))
    rank = np.where(np.isnan(scores), 1, 2)
    rank[(j < first) | (j >= end - last)] = 0
    rank[j >= end] = 3
    chosen = np.lexsort((-scores, rank), axis=-1)[:, : count.max()]  # of equal ones, the first come first
    chosen = np.where((chosen < end) & (j[: chosen.shape[-1]] < count), chosen, len(j))
    chosen.sort(axis=-1)
    return np.where(chosen < end, chosen, -1)


@quiet
def nearest(args: NearestArgs) -> None:
    """Fill args.out and args.scores."""
    lane, count = args.scores.dtype, args.top_k
    # What is the best so far, and its rows, ascending.
    scores, rows = np.empty((len(args.queries), 0), lane), np.empty((len(args.queries), 0), np.int64)
    step = min(args.run, max(1, TILE_SCORES // max(1, args.queries.size)))
    for begin in range(0, len(args.corpus), step):
        part = args.corpus[begin : begin + step]
        new = np.concatenate([scores, _compared(args, part).astype(lane)], axis=1)
        ids = np.arange(begin, begin + len(part))
        ids = np.concatenate([rows, np.broadcast_to(ids, (len(rows), len(ids)))], axis=1)
        best = np.lexsort((-new, ~np.isnan(new)), axis=-1)[:, :count]  # of equal ones, the first come first
        best.sort(axis=-1)
        scores, rows = np.take_along_axis(new, best, axis=1), np.take_along_axis(ids, best, axis=1)
    args.out[...], args.scores[...] = rows, scores


def _compared(args: NearestArgs, part: Array) -> Array:
    """Scores (queries, n) of n rows of the corpus."""
    scores: Array
    if args.kind == "bits":
        differ = args.queries.view(np.uint8)[:, None] ^ part.view(np.uint8)
        scores = -_ONES[differ].sum(axis=-1, dtype=np.int64)
        return scores
    exact = np.float64 if args.kind == "whole" else args.scores.dtype
    numbers = part.astype(exact)
    scores = args.queries.astype(exact) @ numbers.T
    if args.by_length:
        scores /= np.maximum(np.sqrt(np.einsum("ij,ij->i", numbers, numbers)), 1e-12)
    return scores


_GATHERED = 2**21  # numbers of gathered keys and values at a time: 8 MB in float32
_RANGE = 16  # keys of a block from which on it is attended as a range, and not gathered


def selected(args: SelectedArgs) -> None:
    """Fill args.out, and args.attention.lse if it is there."""
    if (call := ranged(args)) is not None:
        attention(call)
        return
    for part in gathered(args):
        attention(part.call())


def ranged(args: SelectedArgs) -> AttentionArgs | None:
    """The call with lists of ranges of keys; None where blocks are so small that ranges would be many."""
    if args.block_size < _RANGE:
        return None
    part, chosen = copy(args.attention), args.selected
    number = np.arange(math.prod(chosen.shape[:-1])).reshape(chosen.shape[:-1])
    some = chosen >= 0
    begin = chosen[some] * args.block_size
    owner = np.broadcast_to(number[..., None], chosen.shape)[some]
    if chosen.shape[-3] > 1:
        number = np.repeat(number, part.heads_q // part.heads_kv, axis=-2)
    end = np.minimum(begin + args.block_size, part.len_k)
    lists = union(number, int(number.max(initial=-1)) + 1, owner, begin, end, part.len_k)
    part.ranges, part.range_first, part.range_last = lists.ranges, lists.first, lists.last
    return part


def gathered(args: SelectedArgs) -> Iterator[Gathered]:
    """All queries, some of a batch item at a time."""
    a = args.attention
    most = args.selected.shape[-1] * args.block_size
    step = max(1, _GATHERED // max(1, a.heads_kv * most * (a.head_dim + a.head_dim_v)))
    for b in np.ndindex(a.batch_shape):
        for begin in range(0, a.len_q, step):
            yield Gathered(args, b, slice(begin, min(begin + step, a.len_q)))


class Gathered:
    """Some queries of a batch item, each with the keys that it attends as if it were an item of its own.

    `keys` (rows, heads_kv, most) are ascending, so many as `lengths` (rows, heads_kv) says; any follow.
    """

    def __init__(self, args: SelectedArgs, batch: Shape, rows: slice) -> None:
        self.args, self.batch, self.rows = args, batch, rows
        a, size = args.attention, args.block_size
        chosen = np.broadcast_to(
            args.selected, (*a.batch_shape, a.heads_kv, a.len_q, args.selected.shape[-1])
        )
        blocks = np.sort(chosen[batch][:, rows].swapaxes(0, 1))
        blocks[..., 1:][blocks[..., 1:] == blocks[..., :-1]] = -1
        keys = blocks[..., None] * size + np.arange(size)
        begin, end = (
            np.broadcast_to(x, (*a.batch_shape, 1, a.len_q))[batch][0, rows, None, None, None]
            for x in closed(a.row_begin, a.row_end, a.len_k)
        )
        attended = (blocks >= 0)[..., None] & (begin <= keys) & (keys < end)
        self.lengths: Ints = attended.sum(axis=(-2, -1))
        keys = np.sort(np.where(attended, keys, a.len_k).reshape(*blocks.shape[:-1], -1))
        self.keys: Ints = np.minimum(keys[..., : self.lengths.max(initial=0)], max(0, a.len_k - 1))

    def of_rows(self, x: Array) -> Array:
        """Rows of the queries, (rows, heads, 1, ...), in `x`, (*batch, heads, len_q, ...)."""
        rows: Array = x[self.batch][:, self.rows].swapaxes(0, 1)[:, :, None]
        return rows

    def call(self) -> AttentionArgs:
        """Attention of these queries; its results are views of the whole call's."""
        a = self.args.attention
        part = copy(a)
        part.batch_shape, part.len_q, part.len_k = (len(self.keys),), 1, self.keys.shape[-1]
        part.q = self.of_rows(np.broadcast_to(a.q, (*a.batch_shape, *a.q.shape[-3:])))
        part.out = self.of_rows(a.out)
        part.lse = None if a.lse is None else self.of_rows(a.lse)
        part.k, part.v = (self._of_keys(x, x.shape[-1]) for x in (a.k, a.v))
        if a.k_scale is not None and a.v_scale is not None:
            part.k_scale, part.v_scale = (self._of_keys(x) for x in (a.k_scale, a.v_scale))
        if a.sinks is not None:
            part.sinks = np.broadcast_to(a.sinks, (*a.batch_shape, a.heads_q))[self.batch]
        part.row_begin = None
        part.row_end = np.repeat(self.lengths, a.heads_q // a.heads_kv, axis=1)[..., None]
        return part

    def _of_keys(self, x: Array, *width: int) -> Array:
        """The keys' rows in `x`, (..., heads_kv, len_k, *width), (rows, heads_kv, most, *width)."""
        a = self.args.attention
        item = np.broadcast_to(x, (*a.batch_shape, a.heads_kv, a.len_k, *width))[self.batch]
        rows: Array = item[np.arange(a.heads_kv)[:, None], self.keys]
        return rows

    def sums(self, dx: Array, to: Array) -> Iterator[ScatterArgs]:
        """Sums that add `dx` (rows, heads_kv, most, width) to rows of `to` (heads_kv, len_k, width)."""
        attended = np.arange(self.keys.shape[-1]) < self.lengths[..., None]
        keys = np.where(attended, self.keys, to.shape[1])
        for h, table in enumerate(to):
            order = np.argsort(keys[:, h], axis=None, kind="stable")
            places, firsts = np.unique(keys[:, h].ravel()[order], return_index=True)
            if len(places) and places[-1] == len(table):  # no keys, which come last
                places = places[:-1]
            else:
                firsts = np.append(firsts, len(order))
            rows = np.ascontiguousarray(dx[:, h]).reshape(-1, dx.shape[-1])
            yield ScatterArgs(rows, order, firsts, places, table, self.args.attention.num_threads)
