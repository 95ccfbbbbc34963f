"""The cache of keys and values in pages: what it holds, by one `KVCache` for each sequence."""

import numpy as np
import pytest

import fastattn
from fastattn.layers import KVCache, PagedKVCache


def tokens(rng, batch, count, dtype=np.float32):
    return rng.standard_normal((2, batch, 2, count, 8)).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_sequences_come_grow_fork_and_go(dtype):
    """Random steps, after each of which attention has the bits of a cache for every sequence alone."""
    rng = np.random.default_rng(0)
    cache, alone = PagedKVCache(40, 4, 2, 8, dtype), {}
    for _ in range(120):
        known = list(alone)
        choice = rng.integers(6)
        if choice == 0 and len(known) < 6:
            alone[cache.allocate()] = []
        elif choice == 1 and known:
            gone = known[rng.integers(len(known))]
            cache.free(gone)
            del alone[gone]
        elif choice == 2 and known and len(known) < 6 and cache.free_pages:
            parent = known[rng.integers(len(known))]
            alone[cache.fork(parent)] = list(alone[parent])
        elif known:
            chosen = [known[i] for i in rng.permutation(len(known))[: 1 + rng.integers(len(known))]]
            count = int(rng.integers(1, 7))
            lengths = rng.integers(0, count + 1, len(chosen))
            k, v = tokens(rng, len(chosen), count)
            try:
                arguments = cache.append(chosen, k, v, lengths)
            except MemoryError:
                continue
            q = rng.standard_normal((len(chosen), 4, count, 8), np.float32)
            out = fastattn.attention(q, **arguments, causal=True)
            for i, (number, length) in enumerate(zip(chosen, lengths, strict=True)):
                alone[number].append((k[i : i + 1, :, :length], v[i : i + 1, :, :length]))
                own = KVCache(dtype=dtype)
                for part in alone[number]:
                    cached = own.append(*part)
                assert cache.length(number) == own.length
                expected = fastattn.attention(
                    q[i : i + 1, :, :length],
                    **cached._asdict() | {"q_offset": own.length - length},
                    causal=True,
                )
                np.testing.assert_allclose(out[i, :, :length], expected[0], rtol=1e-5, atol=1e-5)
        assert cache.free_pages == 40 - len({page for pages in cache._pages.values() for page in pages})
    for number in list(alone):
        cache.free(number)
    assert cache.free_pages == 40


def test_too_few_pages_change_nothing():
    cache = PagedKVCache(3, 4, 2, 8)
    rng = np.random.default_rng(1)
    first, second = cache.allocate(), cache.allocate()
    cache.append([first, second], *tokens(rng, 2, 3))
    before = [x.copy() for x in cache._held]
    with pytest.raises(MemoryError, match=r"PagedKVCache.append\(\): 1 pages are free; expected at least 2"):
        cache.append([first, second], *tokens(rng, 2, 3))
    assert (cache.length(first), cache.length(second), cache.free_pages) == (3, 3, 1)
    for x, y in zip(before, cache._held, strict=True):
        np.testing.assert_array_equal(x, y)
    cache.fork(first)
    with pytest.raises(MemoryError, match=r"PagedKVCache.fork\(\): 0 pages are free"):
        cache.fork(first)


def test_a_fork_shares_full_pages_and_nothing_else():
    cache, rng = PagedKVCache(8, 4, 2, 8), np.random.default_rng(2)
    parent = cache.allocate()
    cache.append([parent], *tokens(rng, 1, 10))
    child = cache.fork(parent)
    assert cache.free_pages == 8 - 4
    grown = cache.append([parent, child], *tokens(rng, 2, 1))["block_table"]
    np.testing.assert_array_equal(grown[0, :2], grown[1, :2])
    assert grown[0, 2] != grown[1, 2]
    cache.free(parent)
    assert cache.free_pages == 8 - 3
