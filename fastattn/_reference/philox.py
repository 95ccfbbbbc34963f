"""Philox4x32-10, which decides what dropout drops: the twin of src/philox.inc.h.

It is a function of a counter and a key, without a state: J. K. Salmon et al., "Parallel Random Numbers: As
Easy as 1, 2, 3", 2011. So a mask does not depend on the order in which it is made.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._args.types import Array, Bools

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_WORD = 2**32
_ROUNDS = 10
# Keys of one block of counters: four words decide about one key each, 16 keys apart.
_BLOCK, _APART = 64, 16


def philox(counter: tuple[Any, Any, Any, Any], seed: int) -> tuple[Array, Array, Array, Array]:
    """Four random words, below 2**32, of a counter of four words; its arrays broadcast to each other."""
    low, high = np.uint64(_WORD - 1), np.uint64(32)
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) & low for word in counter)
    keys = seed % _WORD, seed // _WORD
    for i in range(_ROUNDS):
        k0, k1 = (np.uint64((k + i * step) % _WORD) for k, step in zip(keys, _KEY_STEPS, strict=True))
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1 = second >> high ^ c1 ^ k0, second & low
        c2, c3 = first >> high ^ c3 ^ k1, first & low
    return c0, c1, c2, c3


def threshold(dropout: float) -> int:
    """The least word that keeps: as good as `dropout` of all words are below it."""
    return int(dropout * _WORD)


def kept(dropout: float, seed: int, heads: Any, queries: Any, keys: slice) -> Bools:
    """Whether dropout keeps the probabilities of `keys`, (..., keys).

    `heads`, numbers of heads counted over the batch, and `queries` broadcast to each other.
    """
    # Of query i and key j, the word j % 64 // 16 of the counter (i, j // 64 * 16 + j % 16, head, 0).
    heads, queries = (np.asarray(x)[..., None, None] for x in (heads, queries))
    block = np.arange(keys.start // _BLOCK, -(-keys.stop // _BLOCK))[:, None]
    words = philox((queries, block * _APART + np.arange(_APART), heads, 0), seed)
    least, begin = np.uint64(threshold(dropout)), keys.start % _BLOCK
    every = np.stack(np.broadcast_arrays(*(word >= least for word in words)), axis=-2)
    flat: Bools = every.reshape(*every.shape[:-3], len(block) * _BLOCK)
    return flat[..., begin : begin + keys.stop - keys.start]
