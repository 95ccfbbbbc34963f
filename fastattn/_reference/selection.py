"""The keys, and the vectors, with the largest scores in NumPy: the readable twins, and the fallback."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._args.types import Array, Ints, NearestArgs, SelectionArgs
from fastattn._reference.attention import TILE_SCORES, Call, Task, tasks

_ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(
    axis=1, dtype=np.uint8
)  # bits of a byte


@np.errstate(all="ignore")
def selection(args: SelectionArgs) -> None:
    """Fill args.out."""
    a = args.attention
    args.out[...] = -1
    step = max(1, TILE_SCORES // (a.heads_q // a.heads_kv * max(1, a.len_k)))
    for task in tasks(Call(a), step, Task):
        keys = task.keys()
        where: Any = (*task.batch, task.h_kv, slice(task.rows[0], task.rows[-1] + 1))
        scores = _scores(task, keys, args) if args.scores is None else args.scores[where][:, keys]
        chosen = _largest(scores, task.end[0], args)
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


def _largest(scores: Array, end: Ints, args: SelectionArgs) -> Ints:
    """Numbers of at most top_k keys before each row's `end`, ascending, and then -1."""
    j, end = np.arange(scores.shape[-1]), end[:, None]
    rank = np.where(np.isnan(scores), 1, 2)
    rank[(j < args.first) | (j >= end - args.last)] = 0
    rank[j >= end] = 3
    chosen = np.lexsort((-scores, rank), axis=-1)[:, : args.top_k]  # of equal ones, the first come first
    chosen = np.sort(np.where(chosen < end, chosen, len(j)), axis=-1)
    return np.where(chosen < end, chosen, -1)


@np.errstate(all="ignore")
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
