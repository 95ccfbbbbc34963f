"""Structural masks as ranges of keys: each query row attends one range, or a sorted list of ranges.

A range is a pair (begin, end) of int64 arrays that broadcast to (*batch, heads, len_q): row i attends the
keys begin[i] <= j < end[i]. begin or end is None where that side is open. Masks of one range combine by
intersection, in O(rows). Lists of ranges combine by a sweep over their begins and ends, in the time of
sorting them. The kernels read ranges and lists tile by tile, as their twin `_reference/attention.py` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from fastattn._args.types import Array, Bools, Ints, Shape

Range = tuple[Ints | None, Ints | None]

# Larger than any sequence, and small enough that adding a position, which is below 2**53, fits in int64.
UNBOUNDED = 2**60


def positions(q_offset: Ints, len_q: int) -> Ints:
    """Positions of the query rows, (*batch, 1, len_q), where the first is q_offset (*batch,)."""
    return q_offset[..., None, None] + np.arange(len_q)


def causal(position: Ints) -> Range:
    """Keys up to the query's own position."""
    return None, position + 1


def window(position: Ints, left: int | None, right: int | None) -> Range:
    """Keys from `position - left` to `position + right`; None is unbounded."""
    begin = None if left is None else position - min(left, UNBOUNDED)
    end = None if right is None else position + min(right, UNBOUNDED) + 1
    return begin, end


def lengths(kv_lengths: Ints) -> Range:
    """The first kv_lengths keys of each sequence; kv_lengths is (*batch,)."""
    return None, kv_lengths[..., None, None]


def intersect(ranges: Iterable[Range], len_k: int | Ints) -> Range:
    """Intersection of `ranges`, clipped to [0, len_k]; its arrays have at least two axes, (heads, len_q).

    `len_k` may differ by row.
    """
    begins, ends = [], []
    for begin, end in ranges:
        begins += [] if begin is None else [begin]
        ends += [] if end is None else [end]
    return _joined(np.maximum, begins, len_k), _joined(np.minimum, ends, len_k)


def _joined(innermost: np.ufunc, bounds: list[Ints], len_k: int | Ints) -> Ints | None:
    """The innermost of `bounds`, clipped to [0, len_k]; None if `bounds` is empty."""
    if not bounds:
        return None
    bound = np.minimum(
        np.maximum(reduce(innermost, bounds), 0), len_k
    )  # np.clip takes four times as long on short rows
    return bound if bound.ndim >= 2 else bound.reshape(1, -1)


class RangeLists(NamedTuple):
    """Lists of ranges, and the list of each query row. List n is ``ranges[offsets[n] : offsets[n + 1]]``."""

    number: Ints  # number of each row's list; broadcasts to (*batch, heads, len_q), with ndim >= 2
    offsets: Ints  # (lists + 1,)
    ranges: Ints  # (n, 2), begins and ends: in each list sorted, not empty, and not touching

    @property
    def first(self) -> Ints:
        """Index of the first range of each row."""
        return self.offsets[self.number]

    @property
    def last(self) -> Ints:
        """Index behind the last range of each row."""
        return self.offsets[self.number + 1]


def places(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """List the numbers first[r] .. last[r] - 1 of every r, both (m,): the r of each, and the number."""
    counts = last - first
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) + (last - np.cumsum(counts))[row]


class Resolved(NamedTuple):
    """A mask for a given shape: a row attends the keys in [begin, end) that are also in its list."""

    begin: Ints | None = None
    end: Ints | None = None
    lists: RangeLists | None = None


def union(number: Ints, n_lists: int, owner: Array, begin: Array, end: Array, len_k: int) -> RangeLists:
    """Make lists of any ranges: [begin, end) belongs to list `owner`; the three arrays broadcast."""
    owner, begin, end = (x.ravel() for x in np.broadcast_arrays(owner, begin, end))
    return sweep(number, n_lists, [(owner, begin, end, 1)], 1, len_k)


def of_sorted(number: Ints, counts: Ints, begin: Ints, end: Ints, len_k: int) -> RangeLists:
    """Make lists of ranges that are sorted, not empty and within the keys; list n has counts[n] of them."""
    if (begin[1:] == end[:-1]).any():  # ranges may touch, unless they belong to two lists: join them
        return union(number, len(counts), np.repeat(np.arange(len(counts)), counts), begin, end, len_k)
    ranges = np.empty((len(begin), 2), np.int64)
    ranges[:, 0], ranges[:, 1] = begin, end
    return RangeLists(number, np.append(0, np.cumsum(counts)), ranges)


def sweep(
    number: Ints, n_lists: int, parts: Sequence[tuple[Ints, Ints, Ints, int]], least: int | Ints, len_k: int
) -> RangeLists:
    """Lists of the keys that lie in ranges of total weight `least` or more, which may differ by list.

    A part is (owner, begin, end, weight): its ranges [begin, end) belong to the lists `owner`.
    """
    # A key of a list is the number owner * step + key. A begin adds the range's weight, an end subtracts it.
    step = len_k + 1
    events, changes = [], []
    for owner, begin, end, weight in parts:
        begin, end = np.maximum(begin, 0), np.minimum(end, len_k)
        some = begin < end
        events += [(owner * step + begin)[some], (owner * step + end)[some]]
        changes += [np.full(len(events[-1]), weight), np.full(len(events[-1]), -weight)]
    event, change = np.concatenate(events), np.concatenate(changes)
    order = np.argsort(event, kind="stable")
    event = event[order]
    inside = np.cumsum(change[order]) >= (least if np.ndim(least) == 0 else np.asarray(least)[event // step])
    last = np.append(event[1:] != event[:-1], True)[: len(event)]  # the sum behind all events at one key
    event, inside = event[last], inside[last]
    before = np.concatenate([[False], inside])[: len(inside)]
    begins, ends = event[inside & ~before], event[~inside & before]
    offsets = np.searchsorted(begins, np.arange(n_lists + 1) * step)
    return RangeLists(number, offsets, np.stack([begins % step, ends % step], axis=-1))


def closed(begin: Ints | None, end: Ints | None, len_k: int) -> tuple[Ints, Ints]:
    """`begin` and `end`, with the first and the last key in place of an open side."""
    return (
        np.zeros((1, 1), np.int64) if begin is None else begin,
        np.full((1, 1), len_k) if end is None else end,
    )


def as_lists(x: Resolved, len_q: int, len_k: int) -> RangeLists:
    """Turn `x` into lists alone."""
    if x.lists is not None and x.begin is None and x.end is None:
        return x.lists
    begin, end = closed(x.begin, x.end, len_k)
    numbers = np.zeros((1, 1), np.int64) if x.lists is None else x.lists.number
    shape = np.broadcast_shapes(begin.shape, end.shape, (1, len_q), numbers.shape)
    begin, end = (np.broadcast_to(y, shape).ravel() for y in (begin, end))
    index = np.arange(len(begin)).reshape(shape)
    if x.lists is None:
        return union(index, len(begin), np.arange(len(begin)), begin, end, len_k)
    numbers = np.broadcast_to(numbers, shape).ravel()
    owner, place = places(x.lists.offsets[numbers], x.lists.offsets[numbers + 1])
    low, high = x.lists.ranges[place].T
    return union(index, len(begin), owner, np.maximum(low, begin[owner]), np.minimum(high, end[owner]), len_k)


def combined(operands: Sequence[RangeLists], weights: Sequence[int], least: int, len_k: int) -> RangeLists:
    """Lists of the keys where the weights of the operands that hold them sum to `least` or more.

    Rows whose lists are the same in all operands share one list.
    """
    shape = np.broadcast_shapes(*(x.number.shape for x in operands))
    code = np.zeros(shape, np.int64)
    for x in operands:
        code = code * len(x.offsets) + x.number
    distinct, index = np.unique(code, return_inverse=True)
    parts, rest = [], distinct
    for x, weight in zip(reversed(operands), reversed(weights), strict=True):
        rest, numbers = np.divmod(rest, len(x.offsets))
        owner, place = places(x.offsets[numbers], x.offsets[numbers + 1])
        parts.append((owner, *x.ranges[place].T, weight))
    return sweep(index.reshape(shape), len(distinct), parts, least, len_k)


def simplified(lists: RangeLists) -> Resolved:
    """Turn lists into one range for each row, if no list has more."""
    counts = np.diff(lists.offsets)
    if (counts > 1).any():
        return Resolved(lists=lists)
    bounds = np.zeros((len(counts), 2), np.int64)
    bounds[counts > 0] = lists.ranges
    return Resolved(*np.moveaxis(bounds[lists.number], -1, 0))


def as_array(x: Resolved, shape: Shape) -> Bools:
    """Turn `x` into a dense array (*batch, heads, len_q, len_k), True where a row attends a key."""
    *rows, len_k = shape
    if 0 in shape:
        return np.zeros(shape, np.bool_)
    lists = as_lists(x, rows[-1], len_k)
    count = len(lists.offsets) - 1
    first = np.repeat(np.arange(0, count * len_k, len_k), np.diff(lists.offsets))  # key of each range's list
    places = (first[:, None] + lists.ranges).ravel()
    runs = np.diff(places, prepend=0, append=count * len_k)  # of False and of True, in turn
    array = np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(count, len_k)
    return array[np.broadcast_to(lists.number, rows)]
