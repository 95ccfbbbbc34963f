"""Variants of the product and of what comes out of a head, against their formulas in float64."""

import naive
import numpy as np
import pytest
from formulas import differential, doubles, sigmoid
from inputs_of_variants import assert_near, normal, qkv

import fastattn
from fastattn import functional

DTYPES = {"float32": 2e-5, "float64": 1e-12, "float16": 6e-3, "bfloat16": 5e-2}
LENGTHS = [(67, 67), (1, 130), (40, 200), (3, 0), (0, 5)]


def close(got, expected, dtype="float32"):
    assert_near(got, expected, dtype, DTYPES[dtype])


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
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
