"""Attention in NumPy, blocked over queries and keys: the readable twin of the C kernels, and the fallback.

It reads the same arguments, keeps the same contract, and needs O(length) memory.

Words: a task is a block of query rows of one KV head of one batch item. Its group is the query heads that
share the KV head. `allowed` says who attends whom: a bool array (group, rows, keys), or True where all rows
attend all keys, or False where no row attends any key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from fastattn._args.blocks import BLOCK, blocks
from fastattn._args.key_ranges import closed, places
from fastattn._args.quiet import quiet
from fastattn._args.types import ARRAYS_OF_HEADS, AXES, INT4, Array, AttentionArgs, lane_dtype
from fastattn._reference import int4, philox
from fastattn._reference.modifiers import Scores

# Scores of a tile: 1 MB in float32, which stays in the second-level cache between the passes over it.
TILE_SCORES = 2**18
_BLOCK_ROWS = 512
# Some BLAS libraries sum over all keys of a block in order. With 8192 keys, errors exceeded the tests' bound.
_MAX_BLOCK_K = 4096
_MERGED = 16  # states are merged in blocks of 256 KB in float32, which stay in a CPU's own cache


def block_sizes(args: AttentionArgs) -> tuple[int, int]:
    """Queries and keys of a tile.

    They depend only on len_q and on the heads in a group, so that results do not depend on anything else.
    """
    group = args.heads_q // args.heads_kv
    block_q = max(1, min(args.len_q, _BLOCK_ROWS // group))
    block_k = min(max(_BLOCK_ROWS, TILE_SCORES // (group * block_q)), _MAX_BLOCK_K)
    return block_q, block_k


@quiet
def attention(args: AttentionArgs, score_mod: Callable[..., Array] | None = None) -> None:
    """Fill args.out, and args.lse and args.statistics if they are there; see flex_attention for score_mod."""
    args = in_one_piece(args)
    if args.begins is not None:
        for sequence in sequences(args):
            attention(sequence)
        return
    block_q, block_k = block_sizes(args)
    for task in tasks(Call(args, score_mod), block_q, Task):
        if args.sigmoid_bias is not None:
            args.out[task.where] = task.attend_by_sigmoid(block_k, args.sigmoid_bias)
            continue
        out, base, row_sum = task.attend(block_k)
        args.out[task.where] = out
        if args.lse is not None:
            args.lse[task.where] = (base + np.log(row_sum))[..., 0]
        if args.statistics is not None:
            _collect(args, task, block_k, base, row_sum)


@quiet
def weights(args: AttentionArgs) -> Array:
    """Probabilities (*batch, heads_q, len_q, len_k) in q's dtype."""
    result = np.zeros((*args.batch_shape, args.heads_q, args.len_q, args.len_k), args.q.dtype)
    if not result.size:
        return result
    group = args.heads_q // args.heads_kv
    for task in tasks(Call(args), max(1, TILE_SCORES // (group * max(1, args.len_k))), Task):
        keys = task.keys()
        allowed = task.allowed(keys)
        if allowed is not False:
            probs = task.weights(task.scores(keys, allowed), allowed)
            result[(*task.where, keys)] = task.dropped(probs, keys)
    return result


@quiet
def merge_states(outs: Sequence[Array], lses: Sequence[Array], out: Array, lse: Array) -> None:
    """Merge results over disjoint sets of keys into out (..., head_dim_v) and lse (...)."""
    # lse = log(sum over parts of exp(part_lse))
    # out = sum over parts of exp(part_lse - lse) * part_out
    width = out.shape[-1]
    # Used by all blocks: fresh pages cost more than the sums.
    memory = np.empty((2, max(width, BLOCK // _MERGED)), lse.dtype)
    for rows in blocks(lse.shape, _MERGED * width):
        row_lses = [part_lse[rows] for part_lse in lses]
        row_max = np.maximum.reduce(row_lses)
        merged = row_max + np.log(sum(exp_below(part_lse, row_max) for part_lse in row_lses))
        acc, term = (x[: merged.size * width].reshape(*merged.shape, width) for x in memory)
        acc[...] = 0
        for part, part_lse in zip(outs, row_lses, strict=True):
            weight = exp_below(part_lse, merged)[..., None]
            np.multiply(weight, part[rows].astype(lse.dtype, copy=False), out=term)
            term[part_lse == -np.inf] = 0
            acc += term
        out[rows], lse[rows] = acc, merged


def in_one_piece(args: AttentionArgs) -> AttentionArgs:
    """The same call with the keys and values that its table of pages names copied to one array."""
    if args.block_table is None:
        return args
    part = copy(args)
    part.block_table, axis = None, args.block_table.ndim
    for name in ("k", "v", "k_scale", "v_scale"):
        if (x := getattr(args, name)) is None:
            continue
        pages = x[args.block_table].swapaxes(axis - 1, axis)  # (*batch, heads, pages, page, ...)
        rows = pages.reshape(*pages.shape[:axis], -1, *x.shape[3:])
        if args.begins is not None:
            lengths = np.diff(args.begins[1]).tolist()
            rows = np.concatenate([each[:, :n] for each, n in zip(rows, lengths, strict=True)], axis=1)
        setattr(part, name, rows)
    return part


def sequences(args: AttentionArgs) -> Iterator[AttentionArgs]:
    """A separate call for each sequence of a ragged call."""
    assert args.begins is not None
    bounds = list(zip(*(pairwise(begins.tolist()) for begins in args.begins), strict=True))
    of_heads = {
        name: np.broadcast_to(x, (len(bounds), x.shape[-1]))
        for name in ARRAYS_OF_HEADS
        if (x := getattr(args, name)) is not None
    }
    for i, ((q0, q1), (k0, k1)) in enumerate(bounds):
        part = args.cut(len_q=slice(q0, q1), len_k=slice(k0, k1))
        part.first_item, part.begins, part.batch_shape = args.first_item + i, None, ()
        part.bias = None if args.bias is None else args.bias[:, : part.len_q, : part.len_k]
        for name, x in of_heads.items():
            setattr(part, name, x[i])
        part.q_position = None if args.q_position is None else args.q_position[i]
        yield part


class Call:
    """Values that the tasks of a call share; arrays are broadcast to all batch dimensions and heads."""

    def __init__(
        self,
        args: AttentionArgs,
        score_mod: Callable[..., Array] | None = None,
        score_mod_backward: Callable[..., Array] | None = None,
    ) -> None:
        self.args, self.score_mod, self.score_mod_backward = args, score_mod, score_mod_backward
        self.group, self.dtype = args.heads_q // args.heads_kv, lane_dtype(args.q.dtype)
        self.ranged = args.row_begin is not None or args.row_end is not None
        begin, end = closed(args.row_begin, args.row_end, args.len_k)
        given = {name: getattr(args, name) for name in AXES} | {"row_begin": begin, "row_end": end}
        given |= {name: int4.lanes(x, self.dtype) for name in "kv" if (x := given[name]).dtype == INT4}
        self.arrays = {
            name: np.broadcast_to(x, (*args.batch_shape, *(getattr(args, axis) for axis in AXES[name])))
            for name, x in given.items()
            if x is not None and name not in ("out", "lse")
        }


class Task(Scores):
    """A block of query rows of one KV head of one batch item; its arrays are (group, rows, ...)."""

    call: Call

    def __init__(self, call: Call, b: tuple[int, ...], h: int, rows: slice) -> None:
        self.call = call
        self.batch, self.h_kv = b, h
        self.where = (*b, slice(h * call.group, (h + 1) * call.group), rows)
        self.rows = np.arange(rows.start, rows.stop)
        self.q = np.ascontiguousarray(self.part("q"), dtype=call.dtype)
        self.k, self.v = self.part("k"), self.part("v")
        scales = self.part("k_scale"), self.part("v_scale")
        self.k_scale, self.v_scale = (None if x is None else x[:, None] for x in scales)
        self.begin, self.end = self.part("row_begin"), self.part("row_end")
        self.first, self.last = self.part("range_first"), self.part("range_last")
        self.mask, self.bias = self.part("mask"), self.part("bias")
        sinks, position = self.part("sinks"), self.part("q_position")
        # -inf, which weighs nothing, without sinks
        self.sinks = np.full(self.q.shape[:2], -np.inf, call.dtype)
        if sinks is not None:
            self.sinks[:] = sinks[:, None]
        if position is not None:
            self.position = position + self.rows[:, None]

    def keys(self) -> slice:
        """The keys from the first that some row may attend to the last; keys outside are never read."""
        if not self.call.ranged:
            return slice(0, self.call.args.len_k)
        some = self.begin < self.end
        if not some.any():
            return slice(0, 0)
        return slice(int(self.begin[some].min()), int(self.end[some].max()))

    def allowed(self, keys: slice) -> Any:
        """Pairs of a row and one of `keys` that attend: an array (group, rows, keys), True or False."""
        allowed: Any = keys.start < keys.stop
        if self.call.ranged and ((self.begin > keys.start).any() or (self.end < keys.stop).any()):
            j = np.arange(keys.start, keys.stop)
            allowed = (self.begin[..., None] <= j) & (j < self.end[..., None])
        if self.call.args.ranges is not None:
            allowed = allowed & self.listed(keys)
        if self.mask is not None and not (mask := self.mask[..., keys]).all():
            allowed = allowed & mask
        if self.bias is not None and not (finite := self.bias[..., keys] != -np.inf).all():
            allowed = allowed & finite
        return allowed if np.any(allowed) else False

    def listed(self, keys: slice) -> Array:
        """Members of `keys` in the rows' lists of ranges, (group, rows, keys)."""
        first, last = self.first.ravel(), self.last.ravel()
        row, place = places(first, last)
        begin, end = self.call.args.ranges[place].T  # type: ignore[index]
        some = (begin < keys.stop) & (keys.start < end)
        row, begin, end = row[some], np.maximum(begin[some], keys.start), np.minimum(end[some], keys.stop)
        inside = np.zeros((len(first), keys.stop - keys.start + 1), np.int8)
        inside[row, begin - keys.start] += 1  # ranges of one list do not touch: all places differ
        inside[row, end - keys.start] -= 1
        return (np.cumsum(inside[:, :-1], axis=1, dtype=np.int8) > 0).reshape(*self.q.shape[:2], -1)

    def lanes(self, x: Array, scale: Array | None, keys: slice) -> Any:
        """Keys or values x, (keys, head_dim), in the dtype that is computed in; int8 times its scales."""
        rows = np.ascontiguousarray(x[keys], dtype=self.call.dtype)
        return rows if scale is None else rows * scale[keys]

    def products(self, keys: slice) -> Array:
        """q @ k.T, (group, rows, keys)."""
        group, rows, head_dim = self.q.shape
        k = self.lanes(self.k, self.k_scale, keys)
        products: Array = (self.q.reshape(group * rows, head_dim) @ k.T).reshape(group, rows, len(k))
        return products

    def blocks(self, block_k: int) -> Iterator[tuple[slice, Any]]:
        """Blocks of keys that some row attends, each with its `allowed`."""
        every = self.keys()
        for begin in range(every.start - every.start % block_k, every.stop, block_k):
            keys = slice(max(begin, every.start), min(begin + block_k, every.stop))
            if (allowed := self.allowed(keys)) is not False:
                yield keys, allowed

    def attend(self, block_k: int) -> tuple[Array, Array, Array]:
        """Result (group, rows, head_dim_v), then base and row_sum (group, rows, 1).

        The lse is ``base + log(row_sum)``.
        """
        # for each block of keys that some row attends:
        #     scores  = masked(scale * q @ k.T)
        #     new_max = max(row_max, scores)
        #     probs   = exp(scores - new_max)
        #     row_sum = row_sum * exp(row_max - new_max) + sum(probs)
        #     acc     = acc     * exp(row_max - new_max) + probs @ v
        # out = acc / row_sum;  lse = row_max + log(row_sum)
        row_max = self.sinks[..., None]  # a sink is a first key without a value
        row_sum = (row_max != -np.inf).astype(row_max.dtype)
        acc: Array = np.zeros((*self.q.shape[:2], self.v.shape[-1]), row_max.dtype)
        attends = np.zeros_like(row_sum, dtype=bool)
        for keys, allowed in self.blocks(block_k):
            scores = self.scores(keys, allowed)
            if self.call.score_mod is not None:  # a result of -inf masks, as a bias of -inf does
                allowed = allowed & (scores != -np.inf)
            attends |= attending(allowed)
            new_max = np.maximum(row_max, scores.max(axis=-1, keepdims=True))
            probs = exp_below(scores, new_max)
            shrink = exp_below(row_max, new_max)
            row_sum = row_sum * shrink + probs.sum(axis=-1, keepdims=True)
            acc *= shrink
            acc += self.weighted_values(self.dropped(probs, keys), keys, allowed)
            row_max = new_max
        return normalised(acc, row_sum, attends), row_max, row_sum

    def dropped(self, probs: Array, keys: slice) -> Array:
        """Return `probs` (group, rows, keys) after dropout."""
        args = self.call.args
        if not args.dropout:
            return probs
        kept = philox.kept(args.dropout, args.seed, self.head_numbers(), self.rows, keys)
        return np.where(kept, probs * probs.dtype.type(1 / (1 - args.dropout)), 0)

    def head_numbers(self) -> Array:
        """The task's heads, counted over the batch, (group, 1)."""
        args = self.call.args
        b = int(np.ravel_multi_index(self.batch, args.batch_shape)) if self.batch else 0
        first = (args.first_item + b) * args.heads_q + self.h_kv * self.call.group
        return first + np.arange(self.call.group)[:, None]

    def weights(self, scores: Array, allowed: Any) -> Array:
        """Probabilities (group, rows, keys) of the scores of all keys that the rows attend."""
        row_max = np.maximum(scores.max(axis=-1, keepdims=True), self.sinks[..., None])
        probs = exp_below(scores, row_max)
        row_sum = probs.sum(axis=-1, keepdims=True) + exp_below(self.sinks[..., None], row_max)
        probs = normalised(probs, row_sum, attending(allowed))
        return probs if allowed is True else np.where(allowed, probs, 0)

    def attend_by_sigmoid(self, block_k: int, bias: float) -> Array:
        """Result (group, rows, head_dim_v) of sigmoid attention."""
        # out = sum over blocks of sigmoid(masked(scale * q @ k.T) + bias) @ v
        acc: Array = np.zeros((*self.q.shape[:2], self.v.shape[-1]), self.call.dtype)
        for keys, allowed in self.blocks(block_k):
            scores = self.scores(keys, allowed) + self.call.dtype.type(bias)
            small = np.exp(-abs(scores))
            probs = np.where(scores < 0, small, 1) / (1 + small)
            acc += self.weighted_values(probs, keys, allowed)
        return acc

    def weighted_values(self, probs: Array, keys: slice, allowed: Any) -> Array:
        """probs @ v, (group, rows, head_dim_v); no row touches a value that it does not attend."""
        group, rows, n_keys = probs.shape
        v = self.lanes(self.v, self.v_scale, keys)

        def product(v: Array) -> Array:
            return np.asarray(probs.reshape(group * rows, n_keys) @ v).reshape(group, rows, v.shape[-1])

        if allowed is True or (finite := np.isfinite(v).all(axis=-1)).all():
            return product(v)
        # A probability of 0 does not hide a NaN, as 0 * NaN is NaN: add rows of v that are not finite last.
        acc = product(np.where(finite[:, None], v, 0))
        for j in np.flatnonzero(~finite & allowed.any(axis=(0, 1))):
            acc += np.where(allowed[..., j, None], probs[..., j, None] * v[j], 0)
        return acc


OneTask = TypeVar("OneTask", bound=Task)


def tasks(call: Call, block_q: int, kind: type[OneTask]) -> Iterator[OneTask]:
    """One task a batch item, KV head and block of queries; tasks share no arithmetic."""
    args = call.args
    for b in np.ndindex(args.batch_shape):
        for h in range(args.heads_kv):
            for i in range(0, args.len_q, block_q):
                yield kind(call, b, h, slice(i, min(i + block_q, args.len_q)))


def exp_below(scores: Array, row_max: Array) -> Array:
    """exp(scores - row_max); 0 where row_max is -inf, as all keys are masked."""
    scores = scores - np.where(row_max == -np.inf, 0, row_max)
    np.exp(scores, out=scores)
    return scores


def attending(allowed: Any) -> Any:
    """Rows that attend some key, (group, rows, 1), or True."""
    return allowed if allowed is True else allowed.any(axis=-1, keepdims=True)


def normalised(x: Array, row_sum: Array, attends: Any) -> Array:
    """Divide x by row_sum, in place; 0 where no key is attended.

    A row that attends keys can have a sum of 0: then all its scores were computed to be -inf, and it is NaN.
    """
    row_sum[attends & (row_sum == 0)] = np.nan
    return np.divide(x, row_sum, out=x, where=row_sum != 0)


def _collect(args: AttentionArgs, task: Task, block_k: int, base: Array, row_sum: Array) -> None:
    """Fill args.statistics for the rows of `task`, whose `attend` returned base and row_sum: a second pass.

    A row whose sum is NaN has NaN statistics. Sums over rows become NaN only at keys that such a row attends.
    """
    # With large scores the lse has no digits left for the probabilities, so base is subtracted first:
    # for each block of keys:
    #     probs    = exp(scores - base) / row_sum
    #     entropy  = entropy + sum(probs * (log(row_sum) - (scores - base)))      where 0 log 0 = 0
    #     row_max  = max(row_max, scores)
    #     top      = the k largest of top and scores
    #     key_sums and mean_weights += probs summed over rows, and averaged over heads
    stats: Any = args.statistics
    wanted = 0 if stats.top_keys is None else stats.top_keys.shape[-1]
    base = np.where(base == -np.inf, 0, base)
    row_max = np.full(base.shape[:-1], -np.inf, base.dtype)
    entropy = np.zeros_like(row_max)
    top = np.full((*row_max.shape, wanted), -np.inf, base.dtype)
    top_keys = np.full(top.shape, -1, np.int64)
    *batch, heads, rows = task.where
    for keys, allowed in task.blocks(block_k):
        scores = task.scores(keys, allowed)
        below = scores - base
        probs = np.where(allowed, np.exp(below) / row_sum, 0)
        row_max = np.maximum(row_max, scores.max(axis=-1))
        entropy += (probs * np.where(probs > 0, np.log(row_sum) - below, 0)).sum(axis=-1)
        if wanted:
            number = np.broadcast_to(np.arange(keys.start, keys.stop), scores.shape)
            top = np.concatenate([top, scores], axis=-1)
            top_keys = np.concatenate([top_keys, np.where(scores > -np.inf, number, -1)], axis=-1)
            best = np.argsort(-top, axis=-1, kind="stable")[..., :wanted]  # of equals the first
            top, top_keys = (np.take_along_axis(x, best, axis=-1) for x in (top, top_keys))
        if stats.key_sums is not None:
            stats.key_sums[(*batch, heads, keys)] += probs.sum(axis=1)
        if stats.mean_weights is not None:
            stats.mean_weights[(*batch, 0, rows, keys)] += probs.sum(axis=0) / args.heads_q
    undefined = np.isnan(row_sum[..., 0])
    if stats.row_max is not None:
        stats.row_max[task.where] = np.where(undefined, np.nan, row_max)
    if stats.entropy is not None:
        stats.entropy[task.where] = np.where(undefined, np.nan, np.maximum(entropy, 0))
    if wanted:
        weights = np.where(top_keys < 0, 0, np.exp(top - base) / row_sum)
        stats.top_weights[task.where] = np.where(undefined[..., None], np.nan, weights)
        stats.top_keys[task.where] = np.where(undefined[..., None], -1, top_keys)
