"""Variants that choose by content who attends whom, as compositions, against formulas in float64."""

import attention_variants as compositions
import numpy as np
import pytest
import selected as by_definition
from composition_checks import B, D, H, N, V, close, drawn, each_dtype, tokens
from formulas import doubles, linformer, nystrom, reformer, set_attention, softmax

from fastattn import attention, layers
from fastattn import functional as F


@each_dtype
def test_sinkhorn_attention(implementation, dtype):
    blocks, size, iterations = 6, 11, 5
    q, k, v = tokens(dtype, D, D, V, length=blocks * size)
    (logits,) = drawn(dtype, (B, H, blocks, blocks), seed=1)
    out = compositions.sinkhorn(q, k, v, logits, iterations)
    q, k, v, logits = doubles(q, k, v, logits)
    r = np.exp(logits)
    for _ in range(iterations):
        r /= r.sum(-1, keepdims=True)
        r /= r.sum(-2, keepdims=True)
    expected = np.empty(out.shape)
    for i in range(blocks * size):
        block = i // size
        own = slice(block * size, (block + 1) * size)
        pairs = []
        for x in (k, v):
            mixed = sum(
                r[:, :, block, b, None, None] * x[:, :, b * size : (b + 1) * size] for b in range(blocks)
            )
            pairs.append(np.concatenate([x[:, :, own], mixed], axis=-2))
        p = softmax(np.einsum("bhd,bhjd->bhj", q[:, :, i], pairs[0]) / np.sqrt(D))
        expected[:, :, i] = np.einsum("bhj,bhjv->bhv", p, pairs[1])
    close(out, expected, dtype)


@each_dtype
def test_routing_attention(implementation, dtype):
    clusters = 5
    x, v = tokens(dtype, D, V)
    (centroids,) = drawn(dtype, (H, clusters, D), seed=1)
    x, centroids = F.feature_maps.unit(x), F.feature_maps.unit(centroids)
    out = compositions.routing(x, v, centroids)
    x, v, centroids = doubles(x, v, centroids)
    nearest = np.argmin(((x[..., None, :] - centroids[:, None]) ** 2).sum(-1), axis=-1)
    same = nearest[..., :, None] == nearest[..., None, :]
    assert 0.1 < same.mean() < 0.9
    s = x @ x.swapaxes(-1, -2) / np.sqrt(D)
    close(out, softmax(np.where(np.tril(same), s, -np.inf)) @ v, dtype)


@each_dtype
@pytest.mark.parametrize("bits", [1, 7])
def test_hyper_attention(implementation, dtype, bits):
    """Keys of the query's own block once, and drawn ones of other blocks as often as drawn, times n / m."""
    block, length, m = 8, 64, 12
    q, k, v = tokens(dtype, D, D, V, length=length)
    (rotations,) = drawn(dtype, (D, bits), seed=1)
    sample = np.random.default_rng(2).integers(0, length, m)
    out = compositions.hyper(q, k, v, rotations, block, sample)
    q, k, v, rotations = doubles(q, k, v, rotations)
    codes = gray_codes(bits)
    for b, h in np.ndindex(B, H):
        ranks = [[codes.index(tuple(row @ rotations > 0)) for row in x[b, h]] for x in (q, k)]
        by_query, by_key = (np.argsort(rank, kind="stable") for rank in ranks)
        s = q[b, h] @ k[b, h].T / np.sqrt(D)
        expected = np.empty((length, V))
        for place, i in enumerate(by_query):
            first = place // block * block
            times = np.zeros(length)
            times[by_key[first : first + block]] = 1
            for drawn_place in sample:
                if not first <= drawn_place < first + block:
                    times[by_key[drawn_place]] += length / m
            weights = times * np.exp(s[i])
            expected[i] = weights @ v[b, h] / weights.sum()
        close(out[b, h], expected, dtype)


LENGTHS = [(100, 100), (1, 75), (20, 64), (40, 40)]
SELECTING = {"moba": (16, 3), "quest": (8, 4), "native_sparse": (8, 4, 16, 4, 20)}


@pytest.mark.parametrize("name", SELECTING)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=str)
@pytest.mark.parametrize(("len_q", "len_k"), LENGTHS)
def test_selected_blocks(implementation, name, heads, len_q, len_k):
    shapes = (heads[0], len_q, D), (heads[1], len_k, D), (heads[1], len_k, V)
    arrays = drawn(np.float64, *((B, *shape) for shape in shapes), seed=1)
    if name == "native_sparse":
        arrays += drawn(np.float64, (B, heads[0], len_q, 3))
    got, expected = (getattr(of, name)(*arrays, *SELECTING[name]) for of in (compositions, by_definition))
    close(got, expected, np.float64)


@pytest.mark.parametrize(("len_q", "len_k"), LENGTHS)
@pytest.mark.parametrize("heads", [1, 4])
def test_deepseek_sparse_attention(implementation, heads, len_q, len_k):
    latent = (B, heads, len_q, 12 + 4), (B, len_k, 10 + 4), (heads, 12, 10), (heads, 9, 10)
    index = (B, 3, len_q, 8), (B, len_k, 8), (B, 3, len_q)
    call = drawn(np.float64, *latent, *index)
    close(compositions.deepseek_sparse(*call, 9), by_definition.deepseek_sparse(*call, 9), np.float64)
    every = compositions.deepseek_sparse(*call, len_k)
    close(every, compositions.latent(*doubles(*call[:4]), causal=True), np.float64)


def gray_codes(bits):
    """All rows of bits, in an order in which neighbours differ by one bit."""
    codes = [()]
    for _ in range(bits):
        codes = [(False, *code) for code in codes] + [(True, *code) for code in reversed(codes)]
    return codes


@each_dtype
@pytest.mark.parametrize("shape", [(11, N), (H, 11, N)])
def test_linformer(implementation, dtype, shape):
    q, k, v = tokens(dtype, D, D, V)
    e, f = drawn(dtype, shape, shape, seed=1)
    e, f = e / 8, f / 8
    close(attention(q, e @ k, f @ v), linformer(*doubles(q, k, v, e, f)), dtype)


@each_dtype
@pytest.mark.parametrize("length", [96, 101])
def test_nystromformer(implementation, dtype, length):
    """Iterations of the inverse amplify roundings."""
    q, k, v = tokens(dtype, D, D, V, length=length)
    out = compositions.nystrom(q, k, v, 12)
    close(out, nystrom(*doubles(q, k, v), 12, 6, D**-0.5), dtype, factor=4000)


@each_dtype
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 35])
def test_reformer(implementation, dtype, chunk, causal, rounds):
    x, v = tokens(dtype, D, V)
    (rotations,) = drawn(dtype, (H, rounds, D, 3), seed=1)
    out = compositions.reformer(x, v, rotations, chunk, causal, scale=0.7)
    assert out.dtype == dtype
    for b, h in np.ndindex(B, H):
        expected = reformer(*doubles(x[b, h], v[b, h], rotations[h]), chunk, causal, 0.7)
        close(out[b, h], expected, dtype, factor=200)


def set_layer(weights_dtype, **options):
    layer = layers.TransformerEncoderLayer(24, 4, 40, rng=1, weights_dtype=weights_dtype, **options)
    state = layer.state_dict()
    moved = drawn(weights_dtype, *(x.shape for x in state.values()), seed=2)
    layer.load_state_dict({name: x + d / 10 for (name, x), d in zip(state.items(), moved, strict=True)})
    return layer


@pytest.mark.parametrize("norm_first", [False, True])
def test_blocks_of_sets(implementation, norm_first):
    """MAB, and ISAB and PMA, which are made of it; Perceiver's, whose layer has its norms first."""
    layer = set_layer("float32", norm_first=norm_first)
    x, y, few = drawn(np.float32, (3, 50, 24), (3, 70, 24), (6, 24))
    hidden = np.arange(70) >= np.array([70, 20, 1])[:, None]
    points = np.broadcast_to(few, (3, 6, 24))
    out = compositions.set_block(layer, x, y, key_padding_mask=hidden)
    np.testing.assert_allclose(out, set_attention(layer, x, y, hidden), atol=2e-5)
    induced = compositions.set_block(layer, x, compositions.set_block(layer, points, x))
    np.testing.assert_allclose(induced, set_attention(layer, x, set_attention(layer, few, x)), atol=2e-5)
    if not norm_first:
        np.testing.assert_allclose(compositions.set_block(layer, x, x), layer(x), atol=2e-6)
