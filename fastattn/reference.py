"""Attention in NumPy, blocked over queries and keys: the readable twin of the C kernels, and the fallback.

It reads the same arguments (`_check.AttentionArgs`), keeps the same contract and needs O(length) memory. Scores are
natural logarithms here and binary ones in the kernels; nothing else differs but speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from fastattn._check import AttentionArgs

# Rows of a tile, and scores of a tile: one MB in float32, which stays in L2 between the passes over it.
_BLOCK_ROWS = 512
_TILE_SCORES = 2**18


def block_sizes(args: AttentionArgs) -> tuple[int, int]:
    """Queries and keys of a tile: a function of the shapes of q and k's heads alone, so that bits depend on no more."""
    group = args.heads_q // args.heads_kv
    block_q = max(1, min(args.len_q, _BLOCK_ROWS // group))
    block_k = max(_BLOCK_ROWS, _TILE_SCORES // (group * block_q))
    return block_q, block_k


@np.errstate(all="ignore")
def attention(args: AttentionArgs) -> None:
    """Fill args.out and args.lse; q is (*batch, heads_q, len_q, head_dim)."""
    block_q, block_k = block_sizes(args)
    for task in _tasks(args, block_q):
        out, lse = task.attend(block_k)
        args.out[task.where] = out
        if args.lse is not None:
            args.lse[task.where] = lse


@np.errstate(all="ignore")
def weights(args: AttentionArgs) -> NDArray[Any]:
    """Probabilities (*batch, heads_q, len_q, len_k) in q's dtype."""
    probs = np.zeros((*args.batch_shape, args.heads_q, args.len_q, args.len_k), args.q.dtype)
    block_q = max(1, _TILE_SCORES // max(1, args.len_k * args.heads_q // args.heads_kv))
    for task in _tasks(args, block_q):
        _, lse = task.attend(args.len_k or 1)
        keys = task.keys()
        allowed = task.allowed(keys)
        if keys.start < keys.stop and allowed is not False:
            probs[(*task.where, keys)] = _exp(task.scores(keys, allowed), lse)
    return probs


@np.errstate(all="ignore")
def merge_states(outs: Sequence[NDArray[Any]], lses: Sequence[NDArray[Any]], out: NDArray[Any], lse: NDArray[Any]) -> None:
    """Merge partial results over disjoint keys; out is (..., head_dim_v), lse (...)."""
    # total  = log(sum(exp(lse_i)))
    # out    = sum(exp(lse_i - total) * out_i)
    peak = np.maximum.reduce(lses)
    total = peak + np.log(sum(_exp(part, peak, axes=0) for part in lses))
    total = np.where(peak == -np.inf, peak, total)
    acc = np.zeros(out.shape, lse.dtype)
    for part, part_lse in zip(outs, lses, strict=True):
        weight = _exp(part_lse, total, axes=0)[..., None]
        acc += np.where(part_lse[..., None] == -np.inf, 0, weight * part.astype(lse.dtype))
    out[...] = acc
    lse[...] = total


def _tasks(args: AttentionArgs, block_q: int) -> Iterator[_Task]:
    """One task a batch item, KV head and block of queries: no sum ever crosses a batch item."""
    full = _Broadcast(args)
    for b in np.ndindex(args.batch_shape):
        for h in range(args.heads_kv):
            for i in range(0, args.len_q, block_q):
                yield _Task(full, b, h, slice(i, min(i + block_q, args.len_q)))


class _Broadcast:
    """The arrays of a call, every batch dimension and head there (with stride 0), so that a task is plain indexing."""

    def __init__(self, args: AttentionArgs) -> None:
        self.args = args
        self.group = args.heads_q // args.heads_kv
        self.dtype = np.dtype(np.float64 if args.q.dtype == np.float64 else np.float32)
        heads = (*args.batch_shape, args.heads_q)
        rows = (*heads, args.len_q)

        def to(array: NDArray[Any] | None, shape: tuple[int, ...]) -> NDArray[Any] | None:
            return None if array is None else np.broadcast_to(array, shape)

        self.k = np.broadcast_to(args.k, (*args.batch_shape, *args.k.shape[-3:]))
        self.v = np.broadcast_to(args.v, (*args.batch_shape, *args.v.shape[-3:]))
        self.q = np.broadcast_to(args.q, (*args.batch_shape, *args.q.shape[-3:]))
        self.mask, self.bias = (to(x, (*rows, args.len_k)) for x in (args.mask, args.bias))
        self.ranged = args.row_begin is not None or args.row_end is not None
        self.row_begin = np.broadcast_to(0 if args.row_begin is None else args.row_begin, rows)
        self.row_end = np.broadcast_to(args.len_k if args.row_end is None else args.row_end, rows)
        self.alibi_slopes, self.sinks = (to(x, heads) for x in (args.alibi_slopes, args.sinks))
        self.q_position = to(args.q_position, args.batch_shape)


class _Task:
    """Some query rows of one KV head of one batch item: all arrays are (group, rows, ...)."""

    def __init__(self, full: _Broadcast, b: tuple[int, ...], h: int, rows: slice) -> None:
        args, group = full.args, full.group
        self.where = where = (*b, slice(h * group, (h + 1) * group), rows)
        self.dtype, self.len_k, self.softcap = full.dtype, args.len_k, args.softcap
        self.q = full.q[where].astype(full.dtype) * full.dtype.type(args.scale)
        self.k, self.v = full.k[(*b, h)], full.v[(*b, h)]
        self.mask = None if full.mask is None else full.mask[where]
        self.bias = None if full.bias is None else full.bias[where]
        self.ranged, self.begin, self.end = full.ranged, full.row_begin[where], full.row_end[where]
        self.sinks = None if full.sinks is None else full.sinks[where[:-1]]
        self.slopes = None if full.alibi_slopes is None else full.alibi_slopes[where[:-1]]
        if self.slopes is not None:
            self.position = full.q_position[b] + np.arange(rows.start, rows.stop)

    def keys(self) -> slice:
        """The keys from the first that any row may attend to the last; nothing outside is ever read."""
        if not self.ranged:
            return slice(0, self.len_k)
        some = self.begin < self.end
        begin = np.min(self.begin, where=some, initial=self.len_k)
        return slice(int(begin), int(np.max(self.end, where=some, initial=begin)))

    def allowed(self, keys: slice) -> NDArray[np.bool_] | bool:
        """Who attends whom, bool (group, rows, keys); True where everybody does, False where nobody."""
        allowed: Any = True
        j = np.arange(keys.start, keys.stop)
        if self.ranged and (np.any(self.begin > keys.start) or np.any(self.end < keys.stop)):
            allowed = (self.begin[..., None] <= j) & (j < self.end[..., None])
        if self.mask is not None and not np.all(mask := self.mask[..., keys]):
            allowed = allowed & mask
        if self.bias is not None and np.any(out := self.bias[..., keys] == -np.inf):
            allowed = allowed & ~out
        return allowed if allowed is True or np.any(allowed) else False

    def scores(self, keys: slice, allowed: NDArray[np.bool_] | bool) -> NDArray[Any]:
        """Scores (group, rows, keys): scale, softcap, bias, ALiBi, masks, in this order."""
        group, rows, head_dim = self.q.shape
        k = np.ascontiguousarray(self.k[keys], dtype=self.dtype)
        scores = (self.q.reshape(group * rows, head_dim) @ k.T).reshape(group, rows, -1)
        if self.softcap:
            scores /= self.softcap
            np.tanh(scores, out=scores)
            scores *= self.softcap
        if self.bias is not None:
            scores += self.bias[..., keys].astype(self.dtype)
        if self.slopes is not None:
            distance = np.abs(self.position[:, None] - np.arange(keys.start, keys.stop))
            scores -= self.slopes[:, None, None] * distance.astype(self.dtype)
        np.maximum(scores, np.finfo(self.dtype).min, out=scores)  # no finite bias is a mask; NaN stays NaN
        if allowed is not True:
            np.copyto(scores, -np.inf, where=~allowed)
        return scores

    def attend(self, block_k: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Result (group, rows, head_dim_v) and lse (group, rows)."""
        # for each block of keys that some row attends:
        #     scores  = masked(scale * q @ k.T)
        #     new_max = max(row_max, scores)
        #     probs   = exp(scores - new_max)
        #     row_sum = row_sum * exp(row_max - new_max) + sum(probs)
        #     acc     = acc     * exp(row_max - new_max) + probs @ v
        # out = acc / row_sum;  lse = row_max + log(row_sum)
        group, rows, _ = self.q.shape
        row_max = np.full((group, rows), -np.inf, self.dtype)
        row_sum = np.zeros((group, rows), self.dtype)
        if self.sinks is not None:  # a sink is a key without a value, and the first one
            row_max[:] = self.sinks[:, None]
            row_sum[row_max != -np.inf] = 1
        acc = np.zeros((group, rows, self.v.shape[-1]), self.dtype)
        every = self.keys()
        for begin in range(every.start - every.start % block_k, every.stop, block_k):
            keys = slice(max(begin, every.start), min(begin + block_k, every.stop))
            allowed = self.allowed(keys)
            if allowed is False:
                continue
            scores = self.scores(keys, allowed)
            new_max = np.maximum(row_max, scores.max(axis=-1))
            probs = _exp(scores, new_max)
            shrink = _exp(row_max, new_max, axes=0)
            row_sum = row_sum * shrink + probs.sum(axis=-1)
            acc *= shrink[..., None]
            acc += self.weighted_values(probs, keys, allowed)
            row_max = new_max
        np.divide(acc, row_sum[..., None], out=acc, where=row_sum[..., None] != 0)
        return acc, row_max + np.log(row_sum)

    def weighted_values(self, probs: NDArray[Any], keys: slice, allowed: NDArray[np.bool_] | bool) -> NDArray[Any]:
        """probs @ v, (group, rows, head_dim_v), in which no row meets a value that it does not attend."""
        v = np.ascontiguousarray(self.v[keys], dtype=self.dtype)
        finite = True if allowed is True else np.isfinite(v).all(axis=-1)
        if np.all(finite):
            return (probs.reshape(-1, probs.shape[-1]) @ v).reshape(*probs.shape[:-1], -1)
        acc = (probs.reshape(-1, probs.shape[-1]) @ np.where(finite[:, None], v, 0)).reshape(*probs.shape[:-1], -1)
        for j in np.flatnonzero(~finite & allowed.any(axis=(0, 1))):  # a probability of 0 does not shield 0 x NaN
            acc += np.where(allowed[..., j, None], probs[..., j, None] * v[j], 0)
        return acc


def _exp(scores: NDArray[Any], row_max: NDArray[Any], axes: int = 1) -> NDArray[Any]:
    """exp(scores - row_max), `axes` the axes that scores has more; a maximum of -inf, nothing but masks, gives 0."""
    row_max = np.where(row_max == -np.inf, 0, row_max)
    scores = scores - (row_max[..., None] if axes else row_max)
    return np.exp(scores, out=scores)
