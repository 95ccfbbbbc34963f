"""Attention to selected keys by its definition: a mask of all queries and keys, in float64."""

import numpy as np


def attended(selected, block_size, len_k):
    """Keys that lists of blocks name, (..., len_k) of bool."""
    count = -(-len_k // block_size)
    mask = np.zeros((*selected.shape[:-1], count + 1), bool)
    np.put_along_axis(
        mask, np.where(selected < 0, count, selected), True, axis=-1
    )  # -1 has a column of its own
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


def best(scores, allowed, top_k, kept):
    """Lists of the `top_k` largest of `scores` that are `allowed`, those `kept` first of all, as a mask."""
    order = np.where(kept & allowed, np.inf, np.where(allowed, scores, -np.inf))
    places = np.argsort(-order, axis=-1, kind="stable")[..., :top_k]
    chosen = np.zeros(scores.shape, bool)
    np.put_along_axis(chosen, places, True, axis=-1)
    return chosen & allowed


def attend(q, k, v, mask, scale=None):
    """Attention with a mask (..., heads_q, len_q, len_k), and its probabilities."""
    k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    scores = np.where(
        mask, q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale), -np.inf
    )
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    e = np.exp(scores - np.where(top == -np.inf, 0, top))
    total = e.sum(axis=-1, keepdims=True)
    probs = e / np.where(total == 0, 1, total)
    return probs @ v, probs


def _doubles(*arrays):
    return [np.asarray(x, float) for x in arrays]


def _spread(blocks, size, len_k):
    return np.repeat(blocks, size, axis=-1)[..., :len_k]


def moba(q, k, v, block_size, top_k):
    q, k, v = _doubles(q, k, v)
    len_q, len_k = q.shape[-2], k.shape[-2]
    position, first = len_k - len_q + np.arange(len_q)[:, None], np.arange(0, len_k, block_size)
    means = np.stack([k[..., i : i + block_size, :].mean(axis=-2) for i in first], axis=-2)
    gate = q @ np.repeat(means, q.shape[-3] // k.shape[-3], axis=-3).swapaxes(-1, -2)
    own = first // block_size == position // block_size
    chosen = best(gate, np.broadcast_to(first <= position, gate.shape), top_k, own)
    return attend(q, k, v, _spread(chosen, block_size, len_k) & (np.arange(len_k) <= position))[0]


def quest(q, k, v, page_size, top_k):
    q, k, v = _doubles(q, k, v)
    len_q, len_k = q.shape[-2], k.shape[-2]
    position, first = len_k - len_q + np.arange(len_q)[:, None], np.arange(0, len_k, page_size)
    pages = [np.repeat(k, q.shape[-3] // k.shape[-3], axis=-3)[..., i : i + page_size, :] for i in first]
    bounds = [np.maximum(q * p.min(-2, keepdims=True), q * p.max(-2, keepdims=True)).sum(-1) for p in pages]
    bounds = np.stack(bounds, axis=-1)
    own = first // page_size == position // page_size
    chosen = best(bounds, np.broadcast_to(first <= position, bounds.shape), top_k, own)
    return attend(q, k, v, _spread(chosen, page_size, len_k) & (np.arange(len_k) <= position))[0]


def native_sparse(q, k, v, gates, width, stride, block_size, top_k, window):
    q, k, v, gates = _doubles(q, k, v, gates)
    len_q, len_k, group = q.shape[-2], k.shape[-2], q.shape[-3] // k.shape[-3]
    position, key = len_k - len_q + np.arange(len_q)[:, None], np.arange(len_k)
    begins = np.arange(0, max(0, len_k - width + 1), stride)
    compressed = [np.stack([x[..., i : i + width, :].mean(-2) for i in begins], axis=-2) for x in (k, v)]
    seen = np.broadcast_to(begins + width - 1 <= position, (*q.shape[:-1], len(begins)))
    near, probs = attend(q, *compressed, seen)
    probs = probs.reshape(*probs.shape[:-3], k.shape[-3], group, *probs.shape[-2:]).sum(axis=-3)
    blocks = np.arange(0, len_k, block_size)
    scores = np.zeros((*probs.shape[:-1], len(blocks)))
    for i, begin in enumerate(begins):
        for chunk in range(begin, begin + width, stride):
            scores[..., chunk // block_size] += probs[..., i]
    own = position // block_size
    kept = (blocks < block_size) | (blocks // block_size > own - 2)  # the first one, and the last two
    chosen = best(scores, np.broadcast_to(blocks <= position, scores.shape), top_k, kept)
    mask = np.repeat(_spread(chosen, block_size, len_k), group, axis=-3) & (key <= position)
    far = attend(q, k, v, mask)[0]
    local = attend(q, k, v, np.broadcast_to((key <= position) & (key > position - window), mask.shape))[0]
    return gates[..., :1] * near + gates[..., 1:2] * far + gates[..., 2:] * local


def deepseek_sparse(q, cache, key_weight, value_weight, index_q, index_k, index_weights, top_k):
    q, cache, w, u, iq, ik, iw = _doubles(q, cache, key_weight, value_weight, index_q, index_k, index_weights)
    len_q, len_k, rank, nope = q.shape[-2], cache.shape[-2], w.shape[-1], w.shape[1]
    position = len_k - len_q + np.arange(len_q)[:, None]
    scores = (iw[..., None] * np.maximum(0, iq @ ik[..., None, :, :].swapaxes(-1, -2))).sum(axis=-3)
    causal = np.broadcast_to(np.arange(len_k) <= position, scores.shape)
    chosen = best(scores, causal, top_k, np.zeros((), bool))
    latent, rope = cache[..., None, :, :rank], cache[..., None, :, rank:]
    k = np.concatenate([latent @ w.swapaxes(-1, -2), np.repeat(rope, len(w), axis=-3)], axis=-1)
    return attend(
        q, k, latent @ u.swapaxes(-1, -2), chosen[..., None, :, :], (nope + rope.shape[-1]) ** -0.5
    )[0]
