"""Probabilities that dropout keeps, by its definition: one Philox4x32-10 for each of them."""

import numpy as np


def philox(counter, seed):
    """Four words of a counter of four words: arrays that broadcast to each other."""
    c = [np.asarray(word).astype(np.uint64) for word in counter]
    for i in range(10):
        keys = (seed + i * 0x9E3779B9) % 2**32, ((seed >> 32) + i * 0xBB67AE85) % 2**32
        key0, key1 = map(np.uint64, keys)
        high0, low0 = divmod(c[0] * np.uint64(0xD2511F53), np.uint64(2**32))
        high1, low1 = divmod(c[2] * np.uint64(0xCD9E8D57), np.uint64(2**32))
        c = [high1 ^ c[1] ^ key0, low1, high0 ^ c[3] ^ key1, low0]
    return c


def kept(shape, dropout, seed):
    """Shape is (..., heads_q, len_q, len_k); heads are counted over all axes before them."""
    *heads, len_q, len_k = shape
    i, j = np.arange(len_q)[:, None], np.arange(len_k)
    head = np.arange(np.prod(heads, dtype=int)).reshape(*heads, 1, 1)
    words = philox((i, j // 64 * 16 + j % 16, head, 0), seed)
    word = np.choose(j // 16 % 4, np.broadcast_arrays(*words))
    return word >= np.uint64(np.floor(dropout * 2**32))
