"""The statistics of `attention(stats=...)` in NumPy: a second pass over the keys, with the known softmax."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fastattn._args.types import Array, AttentionArgs


def collect(
    args: AttentionArgs, task: Any, base: Array, row_sum: Array, blocks: Iterator[tuple[slice, Any]]
) -> None:
    """Fill args.statistics for the rows of `task`, a `Task`, whose `attend` returned base and row_sum.

    `blocks` are the blocks of keys that some row attends, each with its `allowed`. A row whose sum is NaN has
    NaN statistics. Sums over rows become NaN only at keys that such a row attends.
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
    for keys, allowed in blocks:
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
