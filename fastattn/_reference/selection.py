"""The keys with the largest scores in NumPy: the readable twin of the kernel, and the fallback."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._args.types import Array, Ints, SelectionArgs
from fastattn._reference.attention import TILE_SCORES, Call, Task, tasks


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
