"""Variants with other scores or another normaliser that are compositions, against formulas in float64."""

import attention_variants as compositions
import numpy as np
import pytest
from composition_checks import B, D, H, N, V, close, drawn, each_dtype, tokens
from formulas import doubles, forgetting, rms, shaw, sigmoid, softmax, transformer_xl, unit

from fastattn import attention, masks, ops, positions
from fastattn import functional as F


def scores(q, k):
    return q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])


def causal_softmax(s):
    return softmax(np.where(np.tri(*s.shape[-2:], dtype=bool), s, -np.inf))


@each_dtype
def test_scalable_softmax(implementation, dtype):
    """A query that attends n keys has its scores times s log n."""
    q, k, v = tokens(dtype, D, D, V)
    (s,) = drawn(dtype, (H, 1, 1), seed=1)
    n = np.arange(1, N + 1)[:, None]
    out = attention(q * (s * np.log(n)).astype(q.dtype), k, v, causal=True)
    q, k, v, s = doubles(q, k, v, s)
    close(out, causal_softmax(s * np.log(n) * scores(q, k)) @ v, dtype)


@each_dtype
@pytest.mark.parametrize("first", [0, 8_150, 100_000])
def test_temperature_of_llama_4(implementation, dtype, first):
    """Queries from position `first` on, with fewer keys than a cache of that length has."""
    q, k, v = tokens(dtype, D, D, V)
    i = first + np.arange(N)[:, None]
    out = attention(q * (1 + 0.1 * np.log((i + 1) // 8192 + 1)).astype(q.dtype), k, v, causal=True)
    q, k, v = doubles(q, k, v)
    factor = [0.1 * np.log(np.floor((first + t + 1) / 8192) + 1) + 1 for t in range(N)]
    close(out, causal_softmax(np.array(factor)[:, None] * scores(q, k)) @ v, dtype)


@each_dtype
@pytest.mark.parametrize("rows", [16, 256])
def test_contextual_position_encoding(implementation, dtype, rows):
    """A place is a sum of gates, 11 at most, and off by up to 3 roundings of it.

    Logits of neighbouring places differ by up to 5, so much more is a score off.
    """
    q, k, v = tokens(dtype, D, D, V)
    (table,) = drawn(dtype, (12, D), seed=1)
    table /= 4
    out = compositions.contextual_positions(q, k, v, table, rows)
    q, k, v, table = doubles(q, k, v, table)
    s = scores(q, k)
    expected = np.empty(out.shape)
    for t in range(N):
        gates = 1 / (1 + np.exp(-s[:, :, t, : t + 1]))
        place = np.stack([gates[..., j:].sum(-1) for j in range(t + 1)], axis=-1).clip(max=len(table) - 1)
        below = np.floor(place).astype(int)
        above, share = np.ceil(place).astype(int), (place - below)[..., None]
        embedding = (1 - share) * table[below] + share * table[above]
        logits = s[:, :, t, : t + 1] + np.einsum("bhd,bhjd->bhj", q[:, :, t], embedding)
        expected[:, :, t] = np.einsum("bhj,bhjv->bhv", softmax(logits), v[:, :, : t + 1])
    assert np.abs(np.diff(q @ table.T, axis=-1)).max() < 5
    close(out, expected, dtype, factor=64 + 11 * 3 * 5)


@each_dtype
@pytest.mark.parametrize("rows", [16, 256])
def test_selective_attention(implementation, dtype, rows):
    q, k, v = tokens(dtype, D, D, V)
    out = compositions.selective(q, k, v, rows)
    q, k, v = doubles(q, k, v)
    s = scores(q, k)
    hidden, expected = np.zeros((B, N)), np.empty(out.shape)
    for t in range(N):
        p = softmax(s[:, :, t, : t + 1] - hidden[:, None, : t + 1])
        expected[:, :, t] = np.einsum("bhj,bhjv->bhv", p, v[:, :, : t + 1])
        hidden[:, 1:t] += np.maximum(s[:, 0, t, 1:t], 0)  # neither the first key nor its own
    close(out, expected, dtype)


@each_dtype
def test_cosine_attention(implementation, dtype):
    """A scale for each head, of queries, or one for all."""
    q, k, v = tokens(dtype, D, D, V)
    bias, scale = drawn(dtype, (H, N, N), seed=1)[0], np.array([0.5, 2, 10], dtype)[:, None, None]
    q1, k1 = (F.feature_maps.unit(x, eps=1e-24) for x in (q, k))
    by_head, by_call = attention(q1 * scale, k1, v, scale=1.0, bias=bias), attention(q1, k1, v, scale=3.0)
    q, k, v, bias, scale = doubles(q, k, v, bias, scale)
    cosines = unit(q) @ unit(k).swapaxes(-1, -2)
    close(by_head, softmax(scale * cosines + bias) @ v, dtype)
    close(by_call, softmax(3 * cosines) @ v, dtype)


@each_dtype
@pytest.mark.parametrize("norm", [ops.rms_norm, ops.layer_norm])
def test_qk_norm(implementation, dtype, norm):
    q, k, v = tokens(dtype, D, D, V)
    weights = drawn(dtype, D, D, seed=1)
    out = attention(norm(q, weights[0], eps=1e-6), norm(k, weights[1], eps=1e-6), v, causal=True)
    q, k, v, *weights = doubles(q, k, v, *weights)
    if norm is ops.layer_norm:
        q, k = (x - x.mean(-1, keepdims=True) for x in (q, k))
    close(out, causal_softmax(scores(rms(q) * weights[0], rms(k) * weights[1])) @ v, dtype)


@each_dtype
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [16, 128])
def test_transformer_xl(implementation, dtype, rows, causal):
    """Keys begin with the memory of the segment before."""
    (q,), (k, v) = tokens(dtype, D, length=40), tokens(dtype, D, V)
    relative, u, w = drawn(dtype, (H, 40 + N - 1, D), (H, D), (H, D), seed=1)
    out = compositions.transformer_xl(q, k, v, relative, u, w, rows, causal=causal)
    close(out, transformer_xl(q, k, v, relative, u, w, causal=causal)[0], dtype)


@each_dtype
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("clip", [1, 5, 100])
def test_shaw(implementation, dtype, clip, causal):
    (q,), (k, v) = tokens(dtype, D, length=40), tokens(dtype, D, V)
    tables = drawn(dtype, (2 * clip + 1, D), (2 * clip + 1, V), seed=1)
    out = compositions.shaw(q, k, v, *tables, rows=16, causal=causal)
    close(out, shaw(q, k, v, *tables, causal=causal)[0], dtype)


@each_dtype
@pytest.mark.parametrize("rows", [16, 512])
def test_forgetting_transformer(implementation, dtype, rows):
    """Gates whose logarithms sum to -100: a bias of all keys from the first one on would lose digits."""
    q, k, v = tokens(dtype, D, D, V)
    (logits,) = drawn(dtype, (B, H, N), seed=1)
    log_forget = -np.logaddexp(0, logits) * 2
    assert log_forget.sum(-1).max() < -60
    expected = forgetting(q, k, v, log_forget)[0]
    for last in (N, 20):  # queries, of which the last is at the last key
        out = compositions.forgetting(q[..., -last:, :], k, v, log_forget, rows)
        close(out, expected[..., -last:, :], dtype, factor=64 + 16)


@each_dtype
def test_memories(implementation, dtype):
    """Keys that all queries attend, of all sequences: in one softmax with the others, or mixed by a gate."""
    q, k, v = tokens(dtype, D, D, V)
    memory_k, memory_v, gate = drawn(dtype, (H, 5, D), (H, 5, V), H, seed=1)
    joined = compositions.memory(q, k, v, memory_k, memory_v, causal=True)
    mixed = compositions.memory(q, k, v, memory_k, memory_v, gate, causal=True)
    q, k, v, memory_k, memory_v, gate = doubles(q, k, v, memory_k, memory_v, gate)
    far, share = scores(q, memory_k), sigmoid(gate)[:, None, None]
    near = np.where(np.tri(N, dtype=bool), scores(q, k), -np.inf)
    p = softmax(np.concatenate([far, near], axis=-1))
    close(joined, p[..., :5] @ memory_v + p[..., 5:] @ v, dtype)
    close(mixed, share * (softmax(far) @ memory_v) + (1 - share) * (softmax(near) @ v), dtype)


def reflected_scores(q, k, w, beta):
    """Products of PaTH: of each query with each key, reflected by all tokens from behind the key on."""
    s = np.empty((*q.shape[:-1], k.shape[-2]))
    for j in range(k.shape[-2]):
        key = k[..., j, :]
        for i in range(j, q.shape[-2]):
            if i > j:
                along = (key * w[..., i, :]).sum(-1, keepdims=True)
                key = key - beta[..., i, None] * along * w[..., i, :]
            s[..., i, j] = (q[..., i, :] * key).sum(-1)
    return s / np.sqrt(q.shape[-1])


@each_dtype
@pytest.mark.parametrize("forgets", [False, True])
def test_path_attention(implementation, dtype, forgets):
    """Reflections, beta from 0 to 2; and their sum with the Forgetting Transformer's bias (PaTH-FoX)."""
    q, k, v, w, logits = tokens(dtype, D, D, V, D, 2)
    w = F.feature_maps.unit(w)
    beta = 2 / (1 + np.exp(-logits[..., 0]))
    log_forget = -np.logaddexp(0, -logits[..., 1]) / 8
    if forgets:
        taken = F.linear_attention(q, w, np.tril(w @ k.swapaxes(-1, -2), -1), rule="delta", beta=beta)
        c = np.cumsum(log_forget, axis=-1)
        out = attention(q, k, v, bias=c[..., :, None] - c[..., None, :] - taken, causal=True)
    else:
        out = compositions.path(q, k, v, w, beta)
    q, k, v, w, beta, log_forget = doubles(q, k, v, w, beta, log_forget)
    s = np.tril(reflected_scores(q, k, w, beta))
    if forgets:
        sums = np.cumsum(log_forget, axis=-1)
        s += np.tril(sums[..., :, None] - sums[..., None, :])
    close(out, causal_softmax(s) @ v, dtype)


@each_dtype
def test_given_scores_and_luong(implementation, dtype):
    q, k, v = tokens(dtype, D, D, V)
    weight, logits = drawn(dtype, (D, D), seed=1)[0], drawn(dtype, (B, H, N, N), seed=2)[0]
    given = compositions.given_scores(logits, v, causal=True)
    general = attention((q @ weight).astype(q.dtype), k, v, scale=1.0)
    projected = (q @ weight).astype(q.dtype)
    projected, k, v, logits = doubles(projected, k, v, logits)
    close(given, causal_softmax(logits) @ v, dtype)
    close(general, softmax(projected @ k.swapaxes(-1, -2)) @ v, dtype)


@each_dtype
@pytest.mark.parametrize(("window", "dilation"), [(0, 1), (3, 4), (2, 64), (100, 3)])
def test_dilated_windows_cost_their_keys(implementation, dtype, window, dilation):
    q, k, v = tokens(dtype, D, D, V)
    expected = attention(*doubles(q, k, v), mask=masks.dilated(window, dilation), causal=True)
    close(compositions.dilated_window(q, k, v, window, dilation, causal=True), expected, dtype)


@each_dtype
@pytest.mark.parametrize("size", [(1, 1), (3, 4), (4, 5)])
def test_multi_token_attention(implementation, dtype, size):
    """Scores of later keys count as 0 in the convolution, and are hidden after it."""
    q, k, v = tokens(dtype, D, D, V)
    (kernel,) = drawn(dtype, (H, *size), seed=1)
    out = compositions.multi_token(q, k, v, kernel)
    q, k, v, kernel = doubles(q, k, v, kernel)
    s = np.tril(scores(q, k))
    logits = np.zeros_like(s)
    for back in range(size[0]):
        for shift in range(size[1]):
            there = shift - size[1] // 2  # to the key that lies so far before
            moved = np.zeros_like(s)
            to, source = slice(max(there, 0), N + min(there, 0)), slice(max(-there, 0), N + min(-there, 0))
            moved[..., back:, to] = s[..., : N - back, source]
            logits += kernel[:, back, shift, None, None] * moved
    close(out, causal_softmax(logits) @ v, dtype)


@each_dtype
def test_relative_logits_of_hidden_states(implementation, dtype):
    """ProphetNet: T5's buckets, whose logits a matrix makes from the state of each query."""
    buckets, most, width = 8, 40, 20
    q, k, v = tokens(dtype, D, D, V)
    x, matrix = drawn(dtype, (B, 1, N, width), (H, width, buckets), seed=1)
    matrix /= 4
    bucket = positions.t5_buckets(N, N, num_buckets=buckets, max_distance=most, bidirectional=False)
    out = attention(q, k, v, bias=np.take_along_axis(x @ matrix, bucket[None, None], -1), causal=True)
    q, k, v, x, matrix = doubles(q, k, v, x, matrix)
    s = scores(q, k)
    for i in range(N):
        for j in range(i + 1):
            b, half = i - j, buckets // 2
            if b >= half:
                b = min(half + int(np.log(b / half) / np.log(most / half) * half), buckets - 1)
            s[:, :, i, j] += np.einsum("bd,hd->bh", x[:, 0, i], matrix[:, :, b])
    close(out, causal_softmax(s) @ v, dtype)


@each_dtype
@pytest.mark.parametrize("shift", [0, 500])
def test_laser(implementation, dtype, shift):
    """A result is a logarithm: errors are absolute, those of sums near 1 and of values."""
    q, k, v = tokens(dtype, D, D, V)
    v = v + dtype.type(shift)  # float32 does not have the exponential of 500
    out = compositions.laser(q, k, v, causal=True)
    q, k, v = doubles(q, k, v)
    p = causal_softmax(scores(q, k))
    most = v.max()
    close(out, most + np.log(p @ np.exp(v - most)), dtype)


@each_dtype
def test_mixture_of_softmaxes(implementation, dtype):
    mixtures = 3
    (queries,) = drawn(dtype, (mixtures, B, H, N, D))
    k, v, logits = tokens(dtype, D, V, mixtures)
    shares = softmax(logits).astype(dtype)
    out = sum(shares[..., m, None] * attention(q, k, v, causal=True) for m, q in enumerate(queries))
    queries, k, v, shares = doubles(queries, k, v, shares)
    p = sum(shares[..., m, None] * causal_softmax(scores(q, k)) for m, q in enumerate(queries))
    close(out, p @ v, dtype)


@each_dtype
def test_inverted_and_slot_attention(implementation, dtype):
    """Slots compete for each token: the softmax is over queries."""
    (slots,) = drawn(dtype, (B, H, 7, D), seed=1)
    k, v = tokens(dtype, D, V)
    sums, averages = compositions.inverted(slots, k, v)
    slots, k, v = doubles(slots, k, v)
    p = softmax(scores(k, slots)).swapaxes(-1, -2)
    close(sums, p @ v, dtype)
    close(averages, p / p.sum(-1, keepdims=True) @ v, dtype)
