"""Masks as key segments: every structural mask is a range of keys for each query row, or a list of ranges.

A range is a pair (begin, end) of int64 arrays that broadcast to (*batch, heads, len_q), either of them None
where that side is open: row i attends the keys begin[i] <= j < end[i]. Ranges intersect, so masks combine, in
O(rows). What is no single range in each row is a list of them; lists are combined by one sweep over their
begins and ends, in the time of sorting these. What the kernels make of it, tile by tile, is in
`scores.inc.h` and its twin in `_reference/attention.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fastattn._args.types import Array, Bools, Ints, Shape

    Range = tuple[Ints | None, Ints | None]

# Wider than any sequence, and small enough that positions, below 2**53, can be added to it in int64.
UNBOUNDED = 2**60


def positions(q_offset: Ints, len_q: int) -> Ints:
    """Position of every query row; q_offset is (*batch,), the result (*batch, 1, len_q)."""
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


class RangeLists(NamedTuple):
    """Lists of ranges, and which of them each query row has: n is ``ranges[offsets[n] : offsets[n + 1]]``."""

    number: Ints  # (*batch, heads, len_q), ndim >= 2, axes of length 1 broadcast: which list the row has
    offsets: Ints  # (lists + 1,)
    ranges: Ints  # (n, 2), begin and end: of a list not empty, sorted, none touching the next

    @property
    def first(self) -> Ints:
        """Index of each row's first range."""
        return self.offsets[self.number]

    @property
    def last(self) -> Ints:
        """That behind its last one."""
        return self.offsets[self.number + 1]


def places(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """What lies in ranges first[r] .. last[r] - 1 of all r, both (m,): the r of each, and its place."""
    counts = last - first
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) + (last - np.cumsum(counts))[row]


class Resolved(NamedTuple):
    """What a mask is for a given shape: the keys within [begin, end) that are in the row's list, too."""

    begin: Ints | None = None
    end: Ints | None = None
    lists: RangeLists | None = None


def union(number: Ints, n_lists: int, owner: Array, begin: Array, end: Array, len_k: int) -> RangeLists:
    """Lists made of any ranges: [begin, end) belongs to list `owner`; all three broadcast."""
    owner, begin, end = (x.ravel() for x in np.broadcast_arrays(owner, begin, end))
    return _sweep(number, n_lists, [(owner, begin, end, 1)], 1, len_k)


def of_sorted(number: Ints, counts: Ints, begin: Ints, end: Ints, len_k: int) -> RangeLists:
    """Lists of ranges that are in order already, counts (lists,) of each, none empty, within the keys."""
    if (begin[1:] == end[:-1]).any():  # those that touch, or seem to at the border of two lists, are joined
        return union(number, len(counts), np.repeat(np.arange(len(counts)), counts), begin, end, len_k)
    ranges = np.empty((len(begin), 2), np.int64)
    ranges[:, 0], ranges[:, 1] = begin, end
    return RangeLists(number, np.append(0, np.cumsum(counts)), ranges)


def _sweep(
    number: Ints, n_lists: int, parts: Sequence[tuple[Ints, Ints, Ints, int]], least: int, len_k: int
) -> RangeLists:
    """Lists of the keys that lie in at least `least` ranges; a part is (owner, begin, end, weight)."""
    # A key of a list is one number, owner * step + key: begins add the range's weight, ends take it away.
    step = len_k + 1
    events, changes = [], []
    for owner, begin, end, weight in parts:
        begin, end = np.maximum(begin, 0), np.minimum(end, len_k)
        some = begin < end
        events += [(owner * step + begin)[some], (owner * step + end)[some]]
        changes += [np.full(len(events[-1]), weight), np.full(len(events[-1]), -weight)]
    event, change = np.concatenate(events), np.concatenate(changes)
    order = np.argsort(event, kind="stable")
    event, inside = event[order], np.cumsum(change[order]) >= least
    last = np.append(event[1:] != event[:-1], True)[: len(event)]  # what all events at one key amount to
    event, inside = event[last], inside[last]
    before = np.concatenate([[False], inside])[: len(inside)]
    begins, ends = event[inside & ~before], event[~inside & before]
    offsets = np.searchsorted(begins, np.arange(n_lists + 1) * step)
    return RangeLists(number, offsets, np.stack([begins % step, ends % step], axis=-1))


def as_lists(x: Resolved, len_q: int, len_k: int) -> RangeLists:
    """The same as lists alone."""
    if x.lists is not None and x.begin is None and x.end is None:
        return x.lists
    begin = np.zeros((1, 1), np.int64) if x.begin is None else x.begin
    end = np.full((1, 1), len_k) if x.end is None else x.end
    shapes = [begin.shape, end.shape, (1, len_q)]
    if x.lists is not None:
        shapes.append(x.lists.number.shape)
    shape = np.broadcast_shapes(*shapes)
    begin, end = (np.broadcast_to(y, shape).ravel() for y in (begin, end))
    index = np.arange(len(begin)).reshape(shape)
    if x.lists is None:
        return union(index, len(begin), np.arange(len(begin)), begin, end, len_k)
    numbers = np.broadcast_to(x.lists.number, shape).ravel()
    owner, place = places(x.lists.offsets[numbers], x.lists.offsets[numbers + 1])
    low, high = x.lists.ranges[place].T
    return union(index, len(begin), owner, np.maximum(low, begin[owner]), np.minimum(high, end[owner]), len_k)


def combined(operands: Sequence[RangeLists], weights: Sequence[int], least: int, len_k: int) -> RangeLists:
    """Lists of the keys at which the operands' weights sum up to `least` or more; shared as theirs are."""
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
    return _sweep(index.reshape(shape), len(distinct), parts, least, len_k)


def simplified(lists: RangeLists) -> Resolved:
    """The same as one range in each row, where that is enough."""
    counts = np.diff(lists.offsets)
    if (counts > 1).any():
        return Resolved(lists=lists)
    bounds = np.zeros((len(counts), 2), np.int64)
    bounds[counts > 0] = lists.ranges
    return Resolved(*np.moveaxis(bounds[lists.number], -1, 0))


def as_array(x: Resolved, shape: Shape) -> Bools:
    """Who attends whom, (*batch, heads, len_q, len_k)."""
    *rows, len_k = shape
    if 0 in shape:
        return np.zeros(shape, np.bool_)
    lists = as_lists(x, rows[-1], len_k)
    array = np.zeros((len(lists.offsets) - 1, len_k), np.bool_)
    for number, (first, last) in enumerate(zip(lists.offsets[:-1], lists.offsets[1:], strict=True)):
        for begin, end in lists.ranges[first:last]:
            array[number, begin:end] = True
    return array[np.broadcast_to(lists.number, rows)]
