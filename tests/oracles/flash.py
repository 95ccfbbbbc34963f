"""flash-attn's functions by definition, on arrays with the heads inside; imports nothing of fastattn."""

import numpy as np


def options_of(len_q, len_k, *, causal=False, window_size=(-1, -1), softcap=0.0, alibi=None, scale=None):
    """Its options as `naive.attention` has them: the last query is at the last key."""
    window = tuple(None if side < 0 else side for side in window_size)
    given = {
        "window": (window[0], 0) if causal else window,
        "softcap": softcap or None,
        "alibi_slopes": alibi,
        "scale": scale,
        "q_offset": len_k - len_q,
    }
    return {name: x for name, x in given.items() if x is not None}


def turned(x, cos, sin, interleaved):
    """Rows x (..., head_dim), each pair turned by its angle."""
    pairs = cos.shape[-1]
    x, first = np.array(x, np.float64), np.arange(pairs)
    a, b = (2 * first, 2 * first + 1) if interleaved else (first, first + pairs)
    x[..., a], x[..., b] = x[..., a] * cos - x[..., b] * sin, x[..., b] * cos + x[..., a] * sin
    return x


def turned_rows(x, positions, cos, sin, interleaved):
    """x (batch, length, heads, head_dim), token (b, i) turned by row positions[b, i] of the tables."""
    result = np.empty(x.shape, np.float64)
    for b, i in np.ndindex(x.shape[:2]):
        result[b, i] = turned(x[b, i], cos[positions[b][i]], sin[positions[b][i]], interleaved)
    return result.astype(x.dtype)


def place(b, row, page, block_table=None, batch_idx=None):
    """Where row `row` of sequence b is in a cache: its first two indices."""
    if block_table is not None:
        return int(block_table[b, row // page]), row % page
    return (b if batch_idx is None else int(batch_idx[b])), row


def keys_of(cache, b, first, end, **where):
    """Rows first <= row < end of sequence b."""
    rows = [cache[place(b, row, cache.shape[1], **where)] for row in range(first, end)]
    return np.array(rows, cache.dtype).reshape(-1, *cache.shape[2:])
