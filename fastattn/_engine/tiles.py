"""The number of tiles that masks leave of a call, for `explain`, without looking at each tile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fastattn._args.key_ranges import closed, places, sweep
from fastattn._args.types import Array, AttentionArgs, Bools, Ints, Shape


class TileCount(NamedTuple):
    """The number of (query block, key block) pairs, and what masks leave of them."""

    total: int
    skipped: int  # no row attends any key: never touched
    full: int  # every row attends every key: nothing to compare
    edge: int  # the others: compared lane by lane


class _Runs(NamedTuple):
    """Runs of key blocks of some query blocks: of number i those at ranges[offsets[i] : offsets[i + 1]]."""

    shape: Shape  # of the query blocks; it broadcasts to (*batch, heads_kv, query blocks)
    offsets: Ints
    ranges: Ints  # (n, 2)


def count_tiles(args: AttentionArgs, block_q: int, block_k: int) -> TileCount:
    """Count tiles of `block_q` rows by `block_k` keys; a row is a (query, head in group) pair."""
    n_blocks = -(-args.len_k // block_k)
    rows = _Rows(args, block_q)
    blocks = (*args.batch_shape, args.heads_kv, rows.n_blocks)
    total = math.prod(blocks) * n_blocks
    if total == 0:
        return TileCount(0, 0, 0, 0)
    some, every = (
        _by_lists(args, rows, block_k) if args.ranges is not None else _by_ranges(args, rows, block_k)
    )
    masks = [_stored(x) for x in (args.mask, args.bias) if x is not None]
    masks = [x if x.dtype == np.bool_ else x != -np.inf for x in masks]
    touched, full = (
        _count(blocks, runs, [rows.combined(combine, _of_keys(combine, x, block_k)) for x in masks])
        for combine, runs in ((np.logical_or, some), (np.logical_and, every))
    )
    return TileCount(total, total - touched, full, touched - full)


class _Rows:
    """The rows of each query block, for arrays that may hold one value for all heads, or for all queries."""

    def __init__(self, args: AttentionArgs, block_q: int) -> None:
        self.len_q, self.heads_kv, self.block_q = args.len_q, args.heads_kv, block_q
        self.group = args.heads_q // args.heads_kv
        self.n_blocks = -(-self.len_q * self.group // block_q)

    def arranged(self, x: Array) -> Array:
        """`x` (..., heads, len_q, n) as (..., KV heads, rows, n)."""
        heads, len_q = x.shape[-3:-1]
        if heads == 1:
            return x
        if len_q == 1 and self.block_q % self.group:  # blocks differ in which heads they have
            x = np.broadcast_to(x, (*x.shape[:-2], self.len_q, x.shape[-1]))
        pairs = x.reshape(*x.shape[:-3], self.heads_kv, self.group, *x.shape[-2:]).swapaxes(-3, -2)
        return pairs.reshape(*pairs.shape[:-3], -1, x.shape[-1])

    def of_blocks(self, shape: Shape) -> tuple[Ints, Ints]:
        """Rows of an arranged array, those of each block in turn, and where each block's begin among them.

        `shape` is (..., heads, len_q) of the array; where all blocks have the same rows, there is one.
        """
        heads, len_q = shape[-2:]
        if len_q == 1 and (heads == 1 or self.block_q % self.group == 0):
            return np.arange(1 if heads == 1 else self.group), np.zeros(1, np.int64)
        n_rows = self.len_q * self.group
        first = np.arange(0, n_rows, self.block_q)
        if heads > 1:
            return np.arange(n_rows), first
        # Two blocks share a query if block_q is not a multiple of the group.
        begin, end = first // self.group, (np.minimum(first + self.block_q, n_rows) - 1) // self.group + 1
        return places(begin, end)[1], np.append(0, np.cumsum(end - begin)[:-1])

    def combined(self, combine: np.ufunc, x: Array) -> Array:
        """Combine `x` (..., heads, len_q, n) over the rows of each block: (..., KV heads, blocks, n)."""
        rows, begins = self.of_blocks(x.shape[:-1])
        return np.asarray(combine.reduceat(self.arranged(x)[..., rows, :], begins, axis=-2))


def _stored(x: Array) -> Array:
    """`x` with one element along axes that it was broadcast along."""
    return x[
        tuple(slice(None) if step or n == 0 else slice(1) for n, step in zip(x.shape, x.strides, strict=True))
    ]


def _of_keys(combine: np.ufunc, mask: Bools, block_k: int) -> Bools:
    """`mask` (..., len_k or 1) by blocks of keys, (..., blocks or 1)."""
    return np.asarray(combine.reduceat(mask, np.arange(0, mask.shape[-1], block_k), axis=-1))


def _by_ranges(args: AttentionArgs, rows: _Rows, block_k: int) -> tuple[_Runs, _Runs]:
    """Key blocks between the first and the last key of the rows' ranges, and those in all of them."""
    begin, end = (_stored(x) for x in closed(args.row_begin, args.row_end, args.len_k))
    begin, end = (x[..., None] for x in np.broadcast_arrays(begin, end))
    some = begin < end
    n_blocks = -(-args.len_k // block_k)
    first = rows.combined(np.minimum, np.where(some, begin, args.len_k)) // block_k
    last = -(-rows.combined(np.maximum, np.where(some, end, 0)) // block_k)
    full_first = -(-rows.combined(np.maximum, begin) // block_k)
    full_last = _block_end(rows.combined(np.minimum, end), args.len_k, block_k)

    def runs(first: Ints, last: Ints) -> _Runs:
        ranges = np.concatenate([first, np.maximum(first, last)], axis=-1).reshape(-1, 2)
        return _Runs(first.shape[:-1], np.arange(len(ranges) + 1), ranges)

    return runs(first, np.minimum(last, n_blocks)), runs(full_first, full_last)


def _block_end(end: Ints, len_k: int, block_k: int) -> Ints:
    """Number of blocks that end at `end` or before; the last one may be shorter."""
    return np.where(end == len_k, -(-len_k // block_k), end // block_k)


def _by_lists(args: AttentionArgs, rows: _Rows, block_k: int) -> tuple[_Runs, _Runs]:
    """Key blocks of which some row's list has a key, and those of which all lists have all keys."""
    given = (args.range_first, args.range_last, *closed(args.row_begin, args.row_end, args.len_k))
    of_rows = np.broadcast_arrays(*(_stored(x) for x in given))  # type: ignore[arg-type]
    n_blocks = -(-args.len_k // block_k)
    chosen, begins = rows.of_blocks(of_rows[0].shape)
    first, last, begin, end = (rows.arranged(x[..., None])[..., chosen, 0] for x in of_rows)
    shape = (*first.shape[:-1], len(begins))
    counts = np.diff(np.append(begins, len(chosen)))
    number = np.repeat(np.arange(math.prod(shape)), np.tile(counts, math.prod(shape[:-1])))
    row, place = places(first.ravel(), last.ravel())
    low, high = np.moveaxis(args.ranges[place], -1, 0)  # type: ignore[index]
    low, high = np.maximum(low, begin.ravel()[row]), np.minimum(high, end.ravel()[row])
    some = low < high
    owner, low, high = number[row[some]], low[some], high[some]

    def runs(low: Ints, high: Ints, least: Any) -> _Runs:
        lists = sweep(number, math.prod(shape), [(owner, low, high, 1)], least, n_blocks)
        return _Runs(shape, lists.offsets, lists.ranges)

    each = np.tile(counts, math.prod(shape[:-1]))
    return (
        runs(low // block_k, -(-high // block_k), 1),
        runs(-(-low // block_k), _block_end(high, args.len_k, block_k), each),
    )


def _count(blocks: Shape, runs: _Runs, masks: Sequence[Bools]) -> int:
    """Number of tiles in the runs of their query blocks and in all `masks`, (..., query, key blocks)."""
    shape = np.broadcast_shapes(runs.shape, *(x.shape[:-1] for x in masks))

    def numbers(own: Shape) -> Ints:
        return np.broadcast_to(np.arange(math.prod(own)).reshape(own), shape).ravel()

    number = numbers(runs.shape)
    block, place = places(runs.offsets[number], runs.offsets[number + 1])
    low, high = runs.ranges[place].T
    n = high - low
    if by_key := [x for x in masks if x.shape[-1] > 1]:
        every: Array = np.logical_and.reduce(np.broadcast_arrays(*by_key))
        sums = np.zeros((math.prod(every.shape[:-1]), every.shape[-1] + 1), np.int64)
        np.cumsum(every.reshape(len(sums), -1), axis=-1, out=sums[:, 1:])
        of_mask = numbers(every.shape[:-1])[block]
        n = sums[of_mask, high] - sums[of_mask, low]
    for x in masks:
        if x.shape[-1] == 1:
            n = n * x.ravel()[numbers(x.shape[:-1])[block]]
    return int(n.sum()) * (math.prod(blocks) // math.prod(shape))
