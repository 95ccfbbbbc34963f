"""Published masks that are expressions of others: each by its definition, and as attention computes it."""

import compositions
import numpy as np
import pytest
from oracle import check, expect, spread_inputs

import fastattn
from fastattn import masks as M
from fastattn._bench.cases import DTYPES, Shape

LENGTH = 96
# Three continuations of one prefix, of lengths that no block has.
PREFIX = 19
IDS = np.repeat([0, 1, 2, 3], [PREFIX, 30, 24, 23])
GRID, TILE = (4, 6), 4  # tiles of 4 tokens each


def in_training(i, j):
    """Blocks of the noised half attend themselves, and clean blocks before; clean ones are block-causal."""
    half, n = LENGTH // 2, 8
    block_i, block_j = i % half // n, j % half // n
    own = (block_i == block_j) & ((i >= half) == (j >= half))
    past = (block_i > block_j) & (i < half) & (j >= half)
    clean = (block_i >= block_j) & (i >= half) & (j >= half)
    return own | past | clean


def near_tiles(i, j):
    """The window of 3 x 3 tiles around the query's, whose middle keeps a tile's distance from the border."""
    found = True
    for axis in (0, 1):
        tile_i, tile_j = (np.unravel_index(x // TILE, GRID)[axis] for x in (i, j))
        found = found & (abs(np.clip(tile_i, 1, GRID[axis] - 2) - tile_j) <= 1)
    return found


CASES = {
    "block diffusion": (M.causal() | M.chunked(10), lambda i, j: j // 10 <= i // 10),
    "block diffusion, training": (
        M.block_sparse(compositions.block_diffusion(8, LENGTH // 2), 8),
        in_training,
    ),
    "shared prefix": (
        M.causal() & (M.first_keys(PREFIX) | M.documents(IDS)),
        lambda i, j: (j <= i) & ((j < PREFIX) | (IDS[i] == IDS[j])),
    ),
    "sliding tiles": (M.block_sparse(M.neighborhood(GRID, 3).to_array(24), TILE), near_tiles),
    "criss-cross": (
        M.axial((8, 12), 0) | M.axial((8, 12), 1),
        lambda i, j: (i // 12 == j // 12) | (i % 12 == j % 12),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_definition(name):
    mask, attends = CASES[name]
    want = attends(*np.ogrid[:LENGTH, :LENGTH])
    assert 0 < want.mean() < 1
    np.testing.assert_array_equal(mask.to_array(LENGTH), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_attention(name, dtype, implementation):
    mask, attends = CASES[name]
    shape = Shape("", batch=2, heads_q=4, heads_kv=2, len_q=LENGTH, len_k=LENGTH, head_dim=24)
    q, k, v = spread_inputs(shape, dtype, np.random.default_rng(0))
    want = np.broadcast_to(attends(*np.ogrid[:LENGTH, :LENGTH]), (LENGTH, LENGTH))
    got = fastattn.attention(q, k, v, mask=mask, return_lse=True)
    check(got, expect(q, k, v, mask=want), telling=False)
