"""The number of tiles that masks leave of a call, for `explain`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fastattn._args.key_ranges import closed, places

if TYPE_CHECKING:
    from fastattn._args.types import Array, AttentionArgs, Bools


class TileCount(NamedTuple):
    """The number of (query block, key block) pairs, and what masks leave of them."""

    total: int
    skipped: int  # no row attends any key: never touched
    full: int  # every row attends every key: nothing to compare
    edge: int  # the others: compared lane by lane


def count_tiles(args: AttentionArgs, block_q: int, block_k: int) -> TileCount:
    """Count tiles of `block_q` rows by `block_k` keys; a row is a (query, head in group) pair."""
    group, len_q = args.heads_q // args.heads_kv, args.len_q
    n_rows = len_q * group
    grid = (*args.batch_shape, args.heads_kv, -(-n_rows // block_q), -(-args.len_k // block_k))
    total = math.prod(grid)
    if total == 0:
        return TileCount(0, 0, 0, 0)
    rows = np.arange(0, n_rows, block_q)
    keys = np.arange(0, args.len_k, block_k)
    stops = np.minimum(keys + block_k, args.len_k)
    # The queries of each block: begin, end, begin, end ... Two blocks share a query if block_q is not a
    # multiple of the group.
    last_rows = np.minimum(rows + block_q, n_rows) - 1
    queries = np.stack([rows // group, last_rows // group + 1], axis=-1).ravel()

    def per_block(combine: np.ufunc, x: Array) -> Array:
        """Combine `x` (..., heads, len_q, n) over the rows of each block."""
        *batch, heads, _, n = x.shape
        if heads == 1:  # repeat the last query, as reduceat needs an element at each end
            x = np.concatenate([x, x[..., -1:, :]], axis=-2)
            return np.asarray(combine.reduceat(x, queries, axis=-2)[..., ::2, :])
        pairs = x.reshape(*batch, heads // group, group, len_q, n).swapaxes(-3, -2)
        return np.asarray(combine.reduceat(pairs.reshape(*batch, -1, n_rows, n), rows, axis=-2))

    touched: Bools = np.ones(grid, np.bool_)
    full = touched
    if args.row_begin is not None or args.row_end is not None:
        begin, end = closed(args.row_begin, args.row_end, args.len_k)
        shape = np.broadcast_shapes(begin.shape, end.shape, (args.len_q,))
        begin, end = (np.broadcast_to(x, shape)[..., None] for x in (begin, end))
        some = begin < end
        touched = touched & (per_block(np.minimum, np.where(some, begin, args.len_k)) < stops)
        touched = touched & (per_block(np.maximum, np.where(some, end, 0)) > keys)
        full = full & (per_block(np.maximum, begin) <= keys) & (per_block(np.minimum, end) >= stops)
    if args.ranges is not None:
        some, every = _blocks_of_lists(args, block_k)
        touched = touched & per_block(np.logical_or, some)
        full = full & per_block(np.logical_and, every)
    for mask in (args.mask, None if args.bias is None else args.bias != -np.inf):
        if mask is None:
            continue
        mask = np.broadcast_to(mask, (*mask.shape[:-2], args.len_q, args.len_k))
        touched = touched & np.logical_or.reduceat(per_block(np.logical_or, mask), keys, axis=-1)
        full = full & np.logical_and.reduceat(per_block(np.logical_and, mask), keys, axis=-1)
    n_touched, n_full = int(np.count_nonzero(touched)), int(np.count_nonzero(full & touched))
    return TileCount(total, total - n_touched, n_full, n_touched - n_full)


def _blocks_of_lists(args: AttentionArgs, block_k: int) -> tuple[Bools, Bools]:
    """Blocks of keys of which each row's list holds some key, and blocks of which it holds all keys.

    Both are (*batch, heads, len_q, blocks).
    """
    begin, end = closed(args.row_begin, args.row_end, args.len_k)
    rows = (args.range_first, args.range_last, begin, end)
    shape = np.broadcast_shapes((1, args.len_q), *(x.shape for x in rows if x is not None))
    first, last, begin, end = (np.broadcast_to(x, shape).ravel() for x in rows)  # type: ignore[arg-type]
    row, place = places(first, last)
    low, high = np.moveaxis(args.ranges[place], -1, 0)  # type: ignore[index]
    low, high = np.maximum(low, begin[row]), np.minimum(high, end[row])
    n_blocks = -(-args.len_k // block_k)

    def covered(low: Array, high: Array) -> Bools:
        """Blocks that are in low .. high - 1 of some range of the row."""
        depth = np.zeros((len(first), n_blocks + 1), np.int64)
        np.add.at(depth, (row[low < high], low[low < high]), 1)
        np.add.at(depth, (row[low < high], high[low < high]), -1)
        inside: Bools = depth[:, :-1].cumsum(axis=1) > 0
        return inside.reshape(*shape, n_blocks)

    last_of_all = np.where(high == args.len_k, n_blocks, high // block_k)  # the last block may be shorter
    some = covered(low // block_k, np.where(low < high, -(-high // block_k), 0))
    return some, covered(-(-low // block_k), last_of_all)
