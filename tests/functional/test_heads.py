"""Variants of the product and of what comes out of a head, against their formulas in float64."""

import naive
import numpy as np
import pytest
from formulas import differential, doubles, forgetting, rms, sigmoid, unit
from inputs_of_variants import assert_near, normal, qkv

import fastattn
from fastattn import functional

DTYPES = {"float32": 2e-5, "float64": 1e-12, "float16": 6e-3, "bfloat16": 5e-2}
LENGTHS = [(67, 67), (1, 130), (40, 200), (3, 0), (0, 5)]


def close(got, expected, dtype="float32"):
    assert_near(got, expected, dtype, DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_cosine(lengths, dtype, implementation):
    q, k, v = qkv(*lengths, dtype)
    q64, k64, v64 = doubles(q, k, v)
    bias = normal(4, *lengths)
    per_head = np.float32([0.5, 2, 5, 10])
    scaled = unit(q64) * per_head[:, None, None]
    expected, lse, *_ = naive.attention(scaled, unit(k64), v64, scale=1.0, bias=bias)
    out, got = functional.cosine_attention(q, k, v, scale=per_head, bias=bias, return_lse=True)
    close(out, expected, dtype)
    np.testing.assert_allclose(got, lse, atol=1e3 * DTYPES[dtype] / 20)
    expected = naive.attention(unit(q64), unit(k64), v64, scale=3.0)[0]
    close(functional.cosine_attention(q, k, v, scale=3), expected, dtype)


def test_cosine_of_zeros_and_of_large_numbers(implementation):
    q, k, v = qkv(5, 7)
    mean = np.broadcast_to(np.repeat(doubles(v)[0].mean(-2, keepdims=True), 2, 1), (2, 4, 5, 12))
    close(functional.cosine_attention(q, 0 * k, v), mean)
    close(functional.cosine_attention(1e6 * q, k, v), doubles(functional.cosine_attention(q, k, v))[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_qk_norm(norm, dtype, implementation):
    q, k, v = qkv(50, 70, dtype)
    weights = normal(16), normal(16)

    def normed(x, weight):
        (x,) = doubles(x)
        if norm == "layer_norm":
            x = x - x.mean(-1, keepdims=True)
        return rms(x) * weight

    expected = naive.attention(normed(q, weights[0]), normed(k, weights[1]), doubles(v)[0], causal=True)[0]
    out = functional.qk_norm_attention(q, k, v, *weights, norm=norm, causal=True)
    np.testing.assert_allclose(out.astype(float), expected, atol=4 * DTYPES[dtype])
    one = functional.qk_norm_attention(q[0, 0], k[0, 0], v[0, 0])
    close(one, naive.attention(*map(rms, doubles(q[0, 0], k[0, 0])), *doubles(v[0, 0]))[0][0], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_differential(lengths, dtype, implementation):
    q, k, v = qkv(*lengths, dtype, heads=8, heads_kv=4)
    v = v[:, :2]
    weights = np.float32([0.2, 0.4, 0.6, 0.8])[:, None, None]
    expected = differential(q, k, v, weights, causal=True)
    close(functional.differential_attention(q, k, v, weights.ravel(), causal=True), expected, dtype)

    if dtype in ("float32", "float64"):  # RMSNorm enlarges what two roundings leave of a difference
        norm = normal(12)
        normed = 0.4 * expected / np.sqrt((expected**2).mean(-1, keepdims=True) + 1e-5) * norm
        out = functional.differential_attention(
            q, k, v, weights.ravel(), causal=True, lambda_init=0.6, norm_weight=norm
        )
        np.testing.assert_allclose(out, normed, atol=50 * DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_gated(lengths, dtype, implementation):
    q, k, v = qkv(*lengths, dtype)
    expected = naive.attention(*doubles(q, k, v))[0]
    for n in (12, 1):
        gate = normal(2, 4, lengths[0], n, dtype=dtype)
        close(functional.gated_attention(q, k, v, gate), expected * sigmoid(gate.astype(float)), dtype)
    out = np.empty(expected.shape, q.dtype)
    assert functional.gated_attention(q, k, v, gate, out=out) is out
    one = functional.gated_attention(q[0, 0], k[0, 0], v[0, 0], gate[0, 0])
    close(one, expected[0, 0] * sigmoid(gate[0, 0].astype(float)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [*LENGTHS, (700, 900)])
def test_forgetting(lengths, dtype, implementation):
    len_q, len_k = lengths
    q, k, v = qkv(len_q, len_k, dtype)
    log_forget = -np.abs(normal(2, 4, len_k)) / 4
    expected, lse = forgetting(q, k, v, log_forget)
    out, got = functional.forgetting_attention(q, k, v, log_forget, return_lse=True)
    close(out, expected, dtype)
    np.testing.assert_allclose(got, lse, atol=1e-4)


def test_forgetting_in_a_cache_and_far_away(implementation):
    q, k, v = qkv(1, 3000, heads=2, heads_kv=1)
    log_forget = np.full((2, 1), -3, np.float32) * np.ones(3000, np.float32)
    lengths = np.array([2900, 3000])
    sums = np.cumsum(log_forget.astype(float), -1)
    bias = sums[:, lengths - 1].T[:, :, None, None] - sums[:, None]
    expected = naive.attention(*doubles(q, k, v), bias=bias, causal=True, kv_lengths=lengths)[0]
    extra = 0.5 * normal(3000)
    close(functional.forgetting_attention(q, k, v, log_forget, kv_lengths=lengths), expected)
    expected = naive.attention(*doubles(q, k, v), bias=bias + extra, causal=True, kv_lengths=lengths)[0]
    out = functional.forgetting_attention(q, k, v, log_forget, kv_lengths=lengths, bias=extra)
    close(out, expected)


def test_off_by_one(implementation):
    q, k, v = qkv(40, 50)
    scores = doubles(q)[0] @ np.repeat(doubles(k)[0], 2, 1).swapaxes(-1, -2) / 4
    weights = np.exp(scores) / (1 + np.exp(scores).sum(-1, keepdims=True))
    close(fastattn.attention(q, k, v, sinks=0.0), weights @ np.repeat(doubles(v)[0], 2, 1))


Q, K, V = qkv(5, 6)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: functional.cosine_attention(Q, K, V, scale=[1.0, 2.0]),
            ValueError,
            r"^cosine_attention\(\): scale",
        ),
        (
            lambda: functional.cosine_attention(Q, K, V, eps=0),
            ValueError,
            "eps is 0.0; expected a number above 0",
        ),
        (
            lambda: functional.cosine_attention(Q, K[..., :3], V),
            ValueError,
            r"^cosine_attention\(\): k has a head_dim",
        ),
        (
            lambda: functional.cosine_attention(Q, K, V, dropout=1),
            TypeError,
            "dropout is not an argument; expected",
        ),
        (lambda: functional.qk_norm_attention(Q, K, V, norm="l2"), ValueError, r"norm is 'l2'; expected"),
        (lambda: functional.qk_norm_attention(Q, K, V, norm=K), ValueError, "norm is an array of shape"),
        (lambda: functional.qk_norm_attention(Q, K, V, np.ones(3)), ValueError, r"q_weight has shape \(3,\)"),
        (
            lambda: functional.differential_attention(Q[:, :3], K, V, 0.1),
            ValueError,
            r"q has shape .* 2 \* heads",
        ),
        (
            lambda: functional.differential_attention(Q, K, V, 0.1),
            ValueError,
            r"^differential_attention\(\): v has shape .*; expected 1 heads, half as many as k has",
        ),
        (
            lambda: functional.differential_attention(Q, K, V[:, :1], [[1.0] * 3]),
            ValueError,
            "lambda_ has shape",
        ),
        (
            lambda: functional.differential_attention(Q, K, V[:, :1], 0.1, norm_weight=np.ones(12)),
            ValueError,
            "norm_weight is given without lambda_init",
        ),
        (
            lambda: functional.differential_attention(Q, K, V[:, :1], 0.1, return_lse=True),
            TypeError,
            "return_lse is",
        ),
        (
            lambda: functional.gated_attention(Q, K, V, np.ones(4)),
            TypeError,
            "gate has dtype float64; expected q's",
        ),
        (
            lambda: functional.gated_attention(Q, K, V, np.ones((3, 1), "f")),
            ValueError,
            r"gate has shape \(3, 1\)",
        ),
        (
            lambda: functional.forgetting_attention(Q, K, V, np.ones(6)),
            ValueError,
            "log_forget is above 0 or not",
        ),
        (
            lambda: functional.forgetting_attention(Q, K, V, [-np.inf] * 6),
            ValueError,
            "expected finite numbers",
        ),
        (
            lambda: functional.forgetting_attention(Q, K, V, [-1.0] * 5),
            ValueError,
            r"log_forget has shape \(5,\)",
        ),
        (
            lambda: functional.forgetting_attention(Q, K, V, -np.ones(6), sinks=1.0),
            TypeError,
            "sinks is not an",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_integers_for_each_head():
    for scale in ([1, 2, 3, 4][: Q.shape[-3]], np.arange(1, Q.shape[-3] + 1)):
        expected = functional.cosine_attention(Q, K, V, scale=np.asarray(scale, np.float64))
        np.testing.assert_array_equal(functional.cosine_attention(Q, K, V, scale=scale), expected)
