"""Masks as key segments: every structural mask is a half-open range of keys for each query row.

A range is a pair (begin, end) of int64 arrays that broadcast to (*batch, heads, len_q), either of them None where that
side is open: row i attends the keys begin[i] <= j < end[i]. Ranges intersect, so masks combine. All of this is O(L);
what the kernels then make of it, tile by tile, is in `scores.inc.h` and its twin in `reference.py`. A new structural
mask is one more function here and one more line in `_check.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    Bound = NDArray[np.int64] | None
    Range = tuple[Bound, Bound]

# Wider than any sequence, and small enough that positions (below 2**53) can be added to it in int64.
UNBOUNDED = 2**60


def positions(q_offset: NDArray[np.int64], len_q: int) -> NDArray[np.int64]:
    """Position of every query row; q_offset is (*batch,), the result (*batch, 1, len_q)."""
    return q_offset[..., None, None] + np.arange(len_q)


def causal(position: NDArray[np.int64]) -> Range:
    """Keys up to the query's own position."""
    return None, position + 1


def window(position: NDArray[np.int64], left: int | None, right: int | None) -> Range:
    """Keys from `position - left` to `position + right`; None is unbounded."""
    begin = None if left is None else position - min(left, UNBOUNDED)
    end = None if right is None else position + min(right, UNBOUNDED) + 1
    return begin, end


def lengths(kv_lengths: NDArray[np.int64]) -> Range:
    """The first kv_lengths keys of each sequence; kv_lengths is (*batch,)."""
    return None, kv_lengths[..., None, None]


def intersect(ranges: Iterable[Range], len_k: int) -> Range:
    """What is in all of `ranges`, clipped to [0, len_k]; at least two axes, (heads, len_q), each."""
    begin, end = None, None
    for other_begin, other_end in ranges:
        begin = other_begin if begin is None else begin if other_begin is None else np.maximum(begin, other_begin)
        end = other_end if end is None else end if other_end is None else np.minimum(end, other_end)
    return _clipped(begin, len_k), _clipped(end, len_k)


def _clipped(bound: Bound, len_k: int) -> Bound:
    if bound is None:
        return None
    return np.array(np.clip(bound, 0, len_k), ndmin=2)


class TileCount(NamedTuple):
    """How many (query block, key block) pairs there are, and what masks leave of them."""

    total: int
    skipped: int  # no row attends any key: never touched
    full: int  # every row attends every key: no test inside
    edge: int  # the rest: compared lane by lane


def count_tiles(args: Any, queries: int, keys: int) -> TileCount:
    """Count the tiles of `queries` x `keys` that row ranges and the dense mask of `args` leave.

    O(tiles + L) memory, and one pass over the mask.
    """
    shape = (*args.batch_shape, args.heads_q)
    rows, cols = np.arange(0, args.len_q, queries), np.arange(0, args.len_k, keys)
    total = int(np.prod(shape, dtype=np.int64)) * rows.size * cols.size
    if total == 0:
        return TileCount(0, 0, 0, 0)
    touched = full = np.True_
    if args.row_begin is not None or args.row_end is not None:
        begin = np.asarray(0 if args.row_begin is None else args.row_begin)
        end = np.asarray(args.len_k if args.row_end is None else args.row_end)
        begin, end = (np.broadcast_to(x, np.broadcast_shapes(begin.shape, end.shape, (args.len_q,))) for x in (begin, end))
        empty = begin >= end
        first = np.minimum.reduceat(np.where(empty, args.len_k, begin), rows, axis=-1)[..., None]
        last = np.maximum.reduceat(np.where(empty, 0, end), rows, axis=-1)[..., None]
        touched = (first < np.minimum(cols + keys, args.len_k)) & (last > cols)
        inner = np.maximum.reduceat(begin, rows, axis=-1)[..., None], np.minimum.reduceat(end, rows, axis=-1)[..., None]
        full = (inner[0] <= cols) & (inner[1] >= np.minimum(cols + keys, args.len_k))
    if args.mask is not None:
        mask = np.broadcast_to(args.mask, (*args.mask.shape[:-2], args.len_q, args.len_k))
        any_row = np.logical_or.reduceat(mask, rows, axis=-2)
        all_rows = np.logical_and.reduceat(mask, rows, axis=-2)
        touched = touched & np.logical_or.reduceat(any_row, cols, axis=-1)
        full = full & np.logical_and.reduceat(all_rows, cols, axis=-1)
    grid = (*shape, rows.size, cols.size)
    n_touched = int(np.count_nonzero(np.broadcast_to(touched, grid)))
    n_full = int(np.count_nonzero(np.broadcast_to(full & touched, grid)))
    return TileCount(total, total - n_touched, n_full, n_touched - n_full)
