"""Variants of attention that are compositions, against their papers' formulas in float64."""

import attention_variants as compositions
import numpy as np
import pytest
from composition_checks import B, D, H, N, V, close, drawn, each_dtype, means, tokens
from formulas import doubles, sigmoid, softmax

from fastattn import attention, ops, positions
from fastattn import functional as F


def logarithms(dtype, size):
    """A factor for weights that were logarithms of this size: they are float64, so float32 loses nothing."""
    return 64 * max(1, size / 8) if dtype == np.float64 else 64


def states(k, v, decay):
    """Yield ``S = diag(decay) S + k v^T`` (..., dim_k, dim_v) after each token."""
    s = np.zeros((*k.shape[:-2], k.shape[-1], v.shape[-1]))
    for t in range(k.shape[-2]):
        s = decay[..., t, :, None] * s + k[..., t, :, None] * v[..., t, None, :]
        yield s


@each_dtype
def test_lightning_attention(implementation, dtype):
    q, k, v = tokens(dtype, D, D, V)
    slopes = positions.alibi_slopes(H)
    out = F.linear_attention(q, k, v, rule="decay", log_decay=-slopes, scale=1.0)
    q, k, v, rates = doubles(q, k, v, slopes)
    behind = np.arange(N)[:, None] - np.arange(N)
    decay = np.tril(np.exp(-rates[:, None, None] * np.maximum(behind, 0)))
    close(out, (q @ k.swapaxes(-1, -2) * decay) @ v, dtype)


@each_dtype
def test_hgrn2(implementation, dtype):
    """Keys are tied to the gates, as in gated linear attention with ``k = 1 - a``."""
    q, gates, v = tokens(dtype, D, D, V)
    f = 0.3 + 0.7 * sigmoid(gates)  # never below the bound of its layer
    out = F.linear_attention(q, 1 - f, v, rule="gated", log_decay=np.log(f), scale=1.0)
    q, f, v = doubles(q, f, v)
    expected = [np.einsum("bhk,bhkv->bhv", q[:, :, t], s) for t, s in enumerate(states(1 - f, v, f))]
    close(out, np.stack(expected, axis=-2), dtype)


@each_dtype
def test_based(implementation, dtype):
    q, k, v = tokens(dtype, D, D, V)
    phi = F.feature_maps.taylor
    out = F.linear_attention(phi(q), phi(k), v, rule="linear", normalize=True, eps=0.0)
    q, k, v = doubles(q, k, v)
    s = q @ k.swapaxes(-1, -2) / np.sqrt(D)
    close(out, means(1 + s + s * s / 2, v), dtype)


def test_random_directions_are_orthogonal_and_as_long_as_normal_vectors():
    directions = compositions.random_directions(24, 60, np.random.default_rng(1))
    assert directions.shape == (60, 24)
    for first in (0, 24, 48):
        block = F.feature_maps.unit(directions[first : first + 24], eps=0.0)
        np.testing.assert_allclose(block @ block.T, np.eye(len(block)), atol=1e-12)
    many = compositions.random_directions(24, 6000, np.random.default_rng(2))
    np.testing.assert_allclose(np.square(many).sum(1).mean(), 24, rtol=0.02)
    np.testing.assert_allclose(many.mean(0), 0, atol=0.05)


@each_dtype
@pytest.mark.parametrize("size", [0.5, 100.0])
def test_performer(implementation, dtype, size):
    """Features of the formula, but for factors that cancel, and keep them from overflow."""
    q, k, v = tokens(dtype, D, D, V)
    w = compositions.random_directions(D, 4096 if size < 1 else 8, np.random.default_rng(3)).astype(dtype)
    q, k = q * dtype.type(size), k * dtype.type(size)
    phi_q, phi_k = compositions.favor(q, w, -1), compositions.favor(k, w, (-1, -2))
    assert phi_q.max() <= 1
    assert phi_k.max() <= 1
    if size > 1:
        return
    out = F.linear_attention(phi_q, phi_k, v, rule="linear", normalize=True, eps=0.0)
    q, k, v, w = doubles(q, k, v, w)
    features = [np.exp(x / 2 @ w.T - np.square(x / 2).sum(-1, keepdims=True) / 2) for x in (q, k)]
    close(out, means(features[0] @ features[1].swapaxes(-1, -2), v), dtype)
    exact = means(np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(D)), v)
    assert np.abs(out - exact).mean() < 0.02  # of the estimate


@each_dtype
def test_rebased(implementation, dtype):
    q, k, v = tokens(dtype, D, D, V)
    gamma_q, beta_q, gamma_k, beta_k = drawn(dtype, D, D, D, D, seed=1)
    features = compositions.rebased_features
    phi_q, phi_k = features(q, gamma_q, beta_q), features(k, gamma_k, beta_k)
    out = F.linear_attention(phi_q, phi_k, v, rule="linear", normalize=True, eps=0.0)
    squares = [ops.layer_norm(x, *w) ** 2 for x, w in ((q, (gamma_q, beta_q)), (k, (gamma_k, beta_k)))]
    own = F.linear_attention(*squares, v, rule="linear", normalize=True, eps=0.0)

    q, k, v, *weights = doubles(q, k, v, gamma_q, beta_q, gamma_k, beta_k)
    normal = [(x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) for x in (q, k)]
    q, k = normal[0] * weights[0] + weights[1], normal[1] * weights[2] + weights[3]
    s = q @ k.swapaxes(-1, -2)
    close(out, means(s * s, v), dtype)
    close(own, means(q**2 @ (k**2).swapaxes(-1, -2), v), dtype)


@each_dtype
@pytest.mark.parametrize("causal", [False, True])
def test_cosformer(implementation, dtype, causal):
    q, k, v = tokens(dtype, D, D, V)
    phi_q, phi_k = compositions.turned(q, 2 * N), compositions.turned(k, 2 * N)
    options = {"rule": "linear", "normalize": True, "eps": 0.0, "causal": causal}
    out = F.linear_attention(phi_q, phi_k, v, **options)
    q, k, v = doubles(q, k, v)
    behind = np.arange(N)[:, None] - np.arange(N)
    s = np.maximum(q, 0) @ np.maximum(k, 0).swapaxes(-1, -2) * np.cos(np.pi / 2 * behind / (2 * N))
    close(out, means(s, v) if causal else s / s.sum(-1, keepdims=True) @ v, dtype)


@each_dtype
@pytest.mark.parametrize("length", [1, 64, N])
def test_log_linear_attention(implementation, dtype, length):
    """Buckets by the paper's rule: each begins where the lowest bit of the one after it is cleared."""
    levels = (length - 1).bit_length() + 1
    q, k, v, gates, shares = tokens(dtype, D, D, V, 1, levels, length=length)
    log_decay, shares = -np.logaddexp(0, gates[..., 0]) / 8, np.logaddexp(0, shares)
    out = compositions.log_linear(q, k, v, log_decay, shares)
    q, k, v, log_decay, shares = doubles(q, k, v, log_decay, shares)
    weights = np.zeros((B, H, length, length))
    sums = np.cumsum(log_decay, axis=-1)
    for t in range(length):
        weights[..., t, t] = shares[..., t, 0]
        end = t
        while end > 0:
            lowest = end & -end
            bucket = slice(end - lowest, end)
            decay = np.exp(sums[..., t, None] - sums[..., bucket])
            weights[..., t, bucket] = shares[..., t, lowest.bit_length(), None] * decay
            end -= lowest
    close(out, (q @ k.swapaxes(-1, -2) / np.sqrt(D) * weights) @ v, dtype)


@each_dtype
def test_gated_slot_attention(implementation, dtype):
    slots = 8
    q, k, v, logits = tokens(dtype, D, D, V, slots)
    log_decay = (-np.logaddexp(0, -logits) / 8).astype(dtype)
    write = -np.expm1(log_decay)
    out = compositions.gated_slots(q, k, v, write, log_decay)
    by_heads = compositions.gated_slots(q, k, v, write, log_decay, compositions.slot_scores_by_heads)
    q, k, v, write, decay = doubles(q, k, v, write, np.exp(log_decay.astype(np.float64)))
    expected = []
    pairs = zip(states(write, k, decay), states(write, v, decay), strict=True)
    for t, (keys, values) in enumerate(pairs):
        p = softmax(np.einsum("bhmd,bhd->bhm", keys, q[:, :, t]))
        expected.append(np.einsum("bhmv,bhm->bhv", values, p))
    close(out, np.stack(expected, axis=-2), dtype)
    close(by_heads, np.stack(expected, axis=-2), dtype)


@each_dtype
def test_bounded_memory_control(implementation, dtype):
    slots = 8
    q, k, v, control = tokens(dtype, D, D, V, slots)
    for shift in (0, 400):  # float32 does not have the exponential of 400
        moved = control + dtype.type(shift)
        out = compositions.bounded_memory(q, k, v, moved)
        expected = bounded_memory_by_softmax(*doubles(q, k, v, moved))
        close(out, expected, dtype, factor=logarithms(dtype, shift))


def bounded_memory_by_softmax(q, k, v, control):
    expected = np.empty((*q.shape[:-1], v.shape[-1]))
    for t in range(q.shape[-2]):
        weights = softmax(control[..., : t + 1, :].swapaxes(-1, -2))  # (..., slots, t + 1)
        keys, values = weights @ k[..., : t + 1, :], weights @ v[..., : t + 1, :]
        p = softmax(np.einsum("bhmd,bhd->bhm", keys, q[..., t, :]))
        expected[..., t, :] = np.einsum("bhm,bhmv->bhv", p, values)
    return expected


@each_dtype
@pytest.mark.parametrize("size", [1.0, 200.0])
def test_rwkv4(implementation, dtype, size):
    """Keys of a size of 200 are logarithms of weights that float32 does not have."""
    channels = 12
    k, v = drawn(dtype, (B, N, channels), (B, N, channels))
    w, u = drawn(dtype, channels, channels, seed=1)
    k, w = k * dtype.type(size), np.exp(w)
    out = compositions.rwkv4(k, v, w, u)
    k, v, w, u = doubles(k, v, w, u)
    expected = np.empty(v.shape)
    for t in range(N):
        logits = k[:, : t + 1] - (t - 1 - np.arange(t + 1))[:, None] * w
        logits[:, t] = u + k[:, t]
        weights = softmax(logits.swapaxes(-1, -2))
        expected[:, t] = np.einsum("bct,btc->bc", weights, v[:, : t + 1])
    close(out, expected, dtype, factor=logarithms(dtype, size))


@each_dtype
@pytest.mark.parametrize("fixed", [False, True], ids=["rwkv6", "rwkv5"])
def test_rwkv6(implementation, dtype, fixed):
    r, k, v, decays = tokens(dtype, D, D, V, D)
    (u,) = drawn(dtype, (H, D), seed=1)
    log_w = -np.exp(decays[0, :, :1] if fixed else decays)
    out = compositions.rwkv6(r, k, v, log_w, u)
    r, k, v, log_w, u = doubles(r, k, v, log_w, u)
    w = np.broadcast_to(np.exp(log_w), k.shape)
    before, expected = np.zeros((B, H, D, V)), []
    for t, s in enumerate(states(k, v, w)):
        own = k[:, :, t, :, None] * v[:, :, t, None, :]
        expected.append(np.einsum("bhk,bhkv->bhv", r[:, :, t], before + u[..., None] * own))
        before = s
    close(out, np.stack(expected, axis=-2), dtype)


# The delta rules of papers, of one head: s is (head_dim, head_dim_v). Each yields the results of tokens.


def paper_gdn2(q, k, v, log_decay, erase_gate, write_gate, s):
    for t in range(len(q)):
        d = np.exp(log_decay[t])[:, None] * s
        s = d + np.outer(k[t], write_gate[t] * v[t] - d.T @ (erase_gate[t] * k[t]))
        yield s.T @ q[t]


def paper_comba(q, k, v, log_decay, beta, erase_strength, correction, s):
    w = s.T  # as the paper has it
    for t in range(len(q)):
        a = np.exp(log_decay[t]) * np.eye(len(k[t])) - erase_strength[t] * np.outer(k[t], k[t])
        w = w @ a + beta[t] * np.outer(v[t], k[t])
        yield w @ (q[t] - correction[t] * k[t])


def paper_delta_product(q, k, v, beta, log_decay, s):
    w = s.T
    for t in range(len(q)):
        w = np.exp(log_decay[t]) * w
        for key, value, b in zip(k[t], v[t], beta[t], strict=True):
            w = w @ (np.eye(len(key)) - b * np.outer(key, key)) + b * np.outer(value, key)
        yield w @ q[t]


def paper_rwkv7(r, log_w, k, v, a, b, s):
    w = s.T
    for t in range(len(r)):
        w = w @ (np.diag(np.exp(log_w[t])) + np.outer(a[t], b[t])) + np.outer(v[t], k[t])
        yield w @ r[t]


def delta_arrays(name, dtype, length, rng):
    """The arrays of a call in order, with the first state last."""

    def uniform(low, high, *more):
        return rng.uniform(low, high, (H, length, *more)).astype(dtype)

    q, k, v, s = drawn(dtype, (H, length, D), (H, length, D), (H, length, V), (H, D, V))
    if name == "gated_delta_net2":
        return [q, k, v, uniform(-1, 0, D), uniform(0, 1, D), uniform(0, 1, V), s]
    if name == "comba":
        decays = uniform(-2, 0)
        decays[:, ::3] = -10  # division by the least one costs no digits
        return [q, k, v, decays, uniform(0, 1), uniform(0, 0.5), uniform(-1, 1), s]
    if name == "delta_product":
        k, v = drawn(dtype, (H, length, 3, D), (H, length, 3, V), seed=1)
        return [q, k, v, uniform(0, 2, 3), uniform(-1, 0), s]
    kappa = F.feature_maps.unit(k)
    decays = uniform(-0.6, 0, D)
    decays[:, ::3] = -10
    return [q, decays, uniform(-1, 1, D), v, -kappa, kappa * uniform(0, 1, D), s]


PAPERS = {
    "gated_delta_net2": paper_gdn2,
    "comba": paper_comba,
    "delta_product": paper_delta_product,
    "rwkv7": paper_rwkv7,
}


@each_dtype
@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.parametrize("length", [1, 5, N])
def test_delta_rules(implementation, dtype, name, length):
    *arrays, state = delta_arrays(name, dtype, length, np.random.default_rng(2))
    more = {} if name == "rwkv7" else {"scale": 1.0}
    out = getattr(compositions, name)(*arrays, state=state, **more)
    again, _ = getattr(compositions, name)(*arrays, state=state, **more, return_state=True)
    np.testing.assert_array_equal(again, out)
    arrays = doubles(*arrays, state)
    if name != "rwkv7":
        arrays[:2] = (x / np.sqrt(np.square(x).sum(-1, keepdims=True) + 1e-6) for x in arrays[:2])
    expected = [list(PAPERS[name](*(x[h] for x in arrays))) for h in range(H)]
    close(out, np.reshape(expected, (H, length, V)), dtype)


@each_dtype
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("full", [False, True], ids=["simple", "full"])
def test_attention_free_transformer(implementation, dtype, full, causal):
    """Each channel is a head with a head_dim of 1, and the pairs' biases are those of attention."""
    channels = 12
    q, k, v = drawn(dtype, *[(B, channels, N, 1)] * 3)
    (bias,) = drawn(dtype, (N, N), seed=1) if full else (None,)
    out = F.gated_attention(np.ones_like(k), k, v, q, bias=bias, scale=1.0, causal=causal)
    q, k, v = (x[..., 0].swapaxes(-1, -2) for x in doubles(q, k, v))  # (B, N, channels)
    expected = np.empty(v.shape)
    for t in range(N):
        last = t + 1 if causal else N
        weights = np.exp(k[:, :last] + (0 if bias is None else bias.astype(np.float64)[t, :last, None]))
        expected[:, t] = sigmoid(q[:, t]) * (weights * v[:, :last]).sum(1) / weights.sum(1)
    close(out[..., 0].swapaxes(-1, -2), expected, dtype)


@each_dtype
def test_modern_hopfield_network(implementation, dtype):
    stored, noise = tokens(dtype, 32, 32, heads=1, length=20)
    beta = 2.0
    state = stored + noise / 4
    out = compositions.hopfield(state, stored, beta, 3)
    x, expected = doubles(stored, state)
    for _ in range(3):
        expected = softmax(beta * expected @ x.swapaxes(-1, -2)) @ x
    close(out, expected, dtype)
    np.testing.assert_allclose(out, stored, atol=1e-3)  # each pattern is found again
    np.testing.assert_allclose(compositions.hopfield(out, stored, beta, 1), out, atol=1e-5)


@each_dtype
def test_tensor_product_attention(implementation, dtype):
    ranks = {"q": 6, "k": 2, "v": 2}
    factors = {name: drawn(dtype, (B, N, r, H), (B, N, r, D), seed=r) for name, r in ranks.items()}
    q, k, v = (np.einsum("btrh,btrd->bhtd", *factors[name]) / dtype.type(r) for name, r in ranks.items())
    out = attention(q, k, v, causal=True)
    made = []
    for name, rank in ranks.items():
        a, b = doubles(*factors[name])
        sums = np.zeros((B, N, H, D))
        for r in range(rank):
            sums += a[:, :, r, :, None] * b[:, :, r, None, :]  # an outer product a token
        made.append(sums.swapaxes(1, 2) / rank)
    q, k, v = made
    close(out, means(np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(D)), v), dtype)


@each_dtype
@pytest.mark.parametrize("absorbed", [False, True])
def test_grouped_latent_attention(implementation, dtype, absorbed):
    groups, of_group, rank, rope, value = 2, 3, 20, 8, 12
    (q,) = drawn(dtype, (B, groups, of_group, N, D + rope))
    shared, *own = drawn(dtype, (B, N, rope), *[(B, N, rank)] * groups, seed=1)
    caches = [np.concatenate([x, shared], axis=-1) for x in own]  # all share the rotated key
    keys, values = drawn(dtype, (groups, of_group, D, rank), (groups, of_group, value, rank), seed=2)
    keys, values = keys / dtype.type(rank**0.5), values / dtype.type(rank**0.5)
    out = compositions.grouped_latent(q, caches, keys, values, causal=True, absorbed=absorbed)
    expected = np.empty(out.shape)
    for h in range(groups * of_group):
        g, i = divmod(h, of_group)
        latents, w, u, rotated = doubles(own[g], keys[g, i], values[g, i], shared)
        k = np.concatenate([latents @ w.T, rotated], axis=-1)
        s = q[:, g, i].astype(np.float64) @ k.swapaxes(-1, -2) / np.sqrt(D + rope)
        expected[:, h] = means(np.exp(s), latents @ u.T)
    close(out, expected, dtype)


@each_dtype
def test_grouped_tied_attention(implementation, dtype):
    groups, of_group = 2, 3
    (q,) = drawn(dtype, (B, groups * of_group, N, D))
    tied, rotated = drawn(dtype, (B, groups, N, D), (B, 1, N, D // 2), seed=1)
    k = np.concatenate([tied[..., : D // 2], np.repeat(rotated, groups, axis=1)], axis=-1)
    out = attention(q, k, tied, causal=True)
    expected = np.empty(out.shape)
    for h in range(groups * of_group):
        kv, shared = doubles(tied[:, h // of_group], rotated[:, 0])
        left, right = np.split(q[:, h].astype(np.float64), 2, axis=-1)
        s = left @ kv[..., : D // 2].swapaxes(-1, -2) + right @ shared.swapaxes(-1, -2)
        expected[:, h] = means(np.exp(s / np.sqrt(D)), kv)
    close(out, expected, dtype)
