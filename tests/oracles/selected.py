"""Attention to selected keys by its definition: a mask of all queries and keys, in float64."""

import numpy as np


def attended(selected, block_size, len_k):
    """Keys that lists of blocks name, (..., len_k) of bool."""
    count = -(-len_k // block_size)
    mask = np.zeros((*selected.shape[:-1], count + 1), bool)
    np.put_along_axis(mask, np.where(selected < 0, count, selected), True, axis=-1)  # -1 has a column of its own
    return np.repeat(mask[..., :count], block_size, axis=-1)[..., :len_k]


def selected_attention(
    q, k, v, selected, block_size=1, causal=False, window=None, sinks=None, softcap=None, scale=None,
    kv_lengths=None, q_offset=None,
):  # fmt: skip
    """Result and lse."""
    q, k, v = (np.asarray(x, float) for x in (q, k, v))
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q, k, v = (np.broadcast_to(x, (*batch, *x.shape[-3:])) for x in (q, k, v))
    group, (heads, len_k), len_q = q.shape[-3] // k.shape[-3], k.shape[-3:-1], q.shape[-2]
    chosen = np.broadcast_to(selected, (*batch, heads, len_q, selected.shape[-1]))
    mask = attended(chosen, block_size, len_k)
    lengths = np.broadcast_to(len_k if kv_lengths is None else kv_lengths, batch)[..., None, None, None]
    offset = lengths - len_q if q_offset is None else np.reshape(q_offset, (*np.shape(q_offset), 1, 1, 1))
    i, j = np.arange(len_q)[:, None] + offset, np.arange(len_k)
    mask = mask & (j < lengths)
    if causal:
        mask = mask & (j <= i)
    if window is not None:
        mask = mask & (j >= i - window[0]) & (j <= i + window[1])
    mask, k, v = (np.repeat(x, group, axis=-3) for x in (mask, k, v))
    scores = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(mask, scores, -np.inf)
    sink = -np.inf if sinks is None else np.asarray(sinks, float)[..., None, None]
    top = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    base = np.where(top == -np.inf, 0, top)
    e = np.exp(scores - base)
    total = e.sum(axis=-1, keepdims=True) + np.exp(sink - base)
    with np.errstate(divide="ignore"):
        lse = base + np.log(total)
    probs = e / np.where(total == 0, 1, total)
    return np.where(mask.any(axis=-1, keepdims=True), probs @ np.where(np.isfinite(v), v, 0), 0), lse[..., 0]
