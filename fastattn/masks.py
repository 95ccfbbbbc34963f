"""Masks as key segments: every structural mask is a half-open range of keys for each query row.

A range is a pair (begin, end) of int64 arrays that broadcast to (*batch, heads, len_q), either of them None
where that side is open: row i attends the keys begin[i] <= j < end[i]. Ranges intersect, so masks combine.
All of this is O(L); what the kernels make of it, tile by tile, is in `scores.inc.h` and its twin in
`reference.py`. A new structural mask is one more function here, and one more line in `_check.py`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastattn._args import Array, AttentionArgs, Bools, Ints

    Range = tuple[Ints | None, Ints | None]

# Wider than any sequence, and small enough that positions, below 2**53, can be added to it in int64.
_UNBOUNDED = 2**60


def positions(q_offset: Ints, len_q: int) -> Ints:
    """Position of every query row; q_offset is (*batch,), the result (*batch, 1, len_q)."""
    return q_offset[..., None, None] + np.arange(len_q)


def causal(position: Ints) -> Range:
    """Keys up to the query's own position."""
    return None, position + 1


def window(position: Ints, left: int | None, right: int | None) -> Range:
    """Keys from `position - left` to `position + right`; None is unbounded."""
    begin = None if left is None else position - min(left, _UNBOUNDED)
    end = None if right is None else position + min(right, _UNBOUNDED) + 1
    return begin, end


def lengths(kv_lengths: Ints) -> Range:
    """The first kv_lengths keys of each sequence; kv_lengths is (*batch,)."""
    return None, kv_lengths[..., None, None]


def intersect(ranges: Iterable[Range], len_k: int) -> Range:
    """Range of the keys in all `ranges`, clipped to [0, len_k]; with two axes, (heads, len_q), or more."""
    begins, ends = [], []
    for begin, end in ranges:
        begins += [] if begin is None else [begin]
        ends += [] if end is None else [end]
    return _joined(np.maximum, begins, len_k), _joined(np.minimum, ends, len_k)


def _joined(innermost: np.ufunc, bounds: list[Ints], len_k: int) -> Ints | None:
    """The innermost of `bounds`, clipped; None if there are none."""
    if not bounds:
        return None
    bound = bounds[0]
    for other in bounds[1:]:
        bound = innermost(bound, other)
    bound = np.minimum(np.maximum(bound, 0), len_k)  # np.clip takes four times as long on short rows
    return bound if bound.ndim >= 2 else bound.reshape(1, -1)


class TileCount(NamedTuple):
    """How many (query block, key block) pairs there are, and what masks leave of them."""

    total: int
    skipped: int  # no row attends any key: never touched
    full: int  # every row attends every key: nothing to test
    edge: int  # the rest: compared lane by lane


def count_tiles(args: AttentionArgs, block_q: int, block_k: int) -> TileCount:
    """Count tiles of `block_q` rows, (query, head in group) pairs, by `block_k` keys."""
    group, len_q = args.heads_q // args.heads_kv, args.len_q
    n_rows = len_q * group
    grid = (*args.batch_shape, args.heads_kv, -(-n_rows // block_q), -(-args.len_k // block_k))
    total = math.prod(grid)
    if total == 0:
        return TileCount(0, 0, 0, 0)
    rows = np.arange(0, n_rows, block_q)
    keys = np.arange(0, args.len_k, block_k)
    stops = np.minimum(keys + block_k, args.len_k)
    # Blocks cut through the heads of a query where the group does not divide block_q.
    last_rows = np.minimum(rows + block_q, n_rows) - 1
    queries = np.stack([rows // group, last_rows // group + 1], axis=-1).ravel()  # begin, end, begin, end

    def per_block(combine: np.ufunc, x: Array) -> Array:
        """`x`, (..., heads, len_q, n), combined over the rows of each block."""
        *batch, heads, _, n = x.shape
        if heads == 1:  # reduceat wants an element at each end, also at the last
            x = np.concatenate([x, x[..., -1:, :]], axis=-2)
            return np.asarray(combine.reduceat(x, queries, axis=-2)[..., ::2, :])
        pairs = x.reshape(*batch, heads // group, group, len_q, n).swapaxes(-3, -2)
        return np.asarray(combine.reduceat(pairs.reshape(*batch, -1, n_rows, n), rows, axis=-2))

    touched: Bools = np.ones(grid, np.bool_)
    full = touched
    if args.row_begin is not None or args.row_end is not None:
        begin = np.zeros((1, 1), np.int64) if args.row_begin is None else args.row_begin
        end = np.full((1, 1), args.len_k) if args.row_end is None else args.row_end
        shape = np.broadcast_shapes(begin.shape, end.shape, (args.len_q,))
        begin, end = (np.broadcast_to(x, shape)[..., None] for x in (begin, end))
        some = begin < end
        touched = touched & (per_block(np.minimum, np.where(some, begin, args.len_k)) < stops)
        touched = touched & (per_block(np.maximum, np.where(some, end, 0)) > keys)
        full = full & (per_block(np.maximum, begin) <= keys) & (per_block(np.minimum, end) >= stops)
    for mask in (args.mask, None if args.bias is None else args.bias != -np.inf):
        if mask is None:
            continue
        mask = np.broadcast_to(mask, (*mask.shape[:-2], args.len_q, args.len_k))
        touched = touched & np.logical_or.reduceat(per_block(np.logical_or, mask), keys, axis=-1)
        full = full & np.logical_and.reduceat(per_block(np.logical_and, mask), keys, axis=-1)
    n_touched, n_full = int(np.count_nonzero(touched)), int(np.count_nonzero(full & touched))
    return TileCount(total, total - n_touched, n_full, n_touched - n_full)
