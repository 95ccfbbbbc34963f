"""Latent attention and memories, against their formulas in float64."""

import naive
import numpy as np
import pytest
from formulas import doubles, latent, sigmoid
from inputs_of_variants import assert_near, normal, qkv

import fastattn
from fastattn import functional

DTYPES = {"float32": 2e-5, "float64": 1e-11, "float16": 1e-2, "bfloat16": 8e-2}


def close(got, expected, dtype="float32"):
    assert_near(got, expected, dtype, DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(70, 70), (1, 150), (3, 0), (0, 4)])
def test_latent(lengths, dtype, implementation):
    len_q, len_k = lengths
    heads, nope, rope, rank, value = 6, 16, 8, 40, 20
    q, cache = normal(2, heads, len_q, nope + rope, dtype=dtype), normal(2, len_k, rank + rope, dtype=dtype)
    w, u = normal(heads, nope, rank, dtype=dtype) / 8, normal(heads, value, rank, dtype=dtype) / 8
    bias = normal(len_q, len_k)
    expected, lse = latent(q, cache, w, u, causal=True, bias=bias)
    for absorbed in (True, False, None):
        out, got = functional.latent_attention(
            q, cache, w, u, absorbed=absorbed, causal=True, bias=bias, return_lse=True
        )
        close(out, expected, dtype)
        np.testing.assert_allclose(got, lse, atol=2 * DTYPES[dtype])
    one = functional.latent_attention(q[0], cache[0], w, u, causal=True, bias=bias)
    close(one, expected[0], dtype)


def test_latent_attends_to_the_cache_itself(implementation):
    """A step of decoding, from a cache of sequences of different lengths with room after them."""
    q, room = normal(2, 6, 1, 24), normal(2, 500, 48)
    w, u, lengths = normal(6, 16, 40), normal(6, 20, 40), np.array([300, 77])
    cache = room[:, :400]
    room[0, 300:], room[1, 77:] = np.nan, np.nan
    out = functional.latent_attention(q, cache, w, u, kv_lengths=lengths)
    for b, n in enumerate(lengths):
        plain = functional.latent_attention(q[b], cache[b, :n], w, u, absorbed=False)
        np.testing.assert_allclose(out[b], plain, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(70, 70, 5), (1, 150, 40), (3, 0, 2), (30, 60, 0), (0, 4, 4)])
def test_memory(lengths, dtype, implementation):
    len_q, len_k, len_m = lengths
    q, k, v = qkv(len_q, len_k, dtype)
    memory_k, memory_v = normal(2, len_m, 16, dtype=dtype), normal(2, len_m, 12, dtype=dtype)
    sinks = normal(4)
    position = len_k - len_q + np.arange(len_q)
    mask = np.ones((len_q, len_m + len_k), bool)
    mask[:, len_m:] = np.arange(len_k) <= position[:, None]
    kept = [np.broadcast_to(x, (2, *x.shape)) for x in (memory_k, memory_v)]
    every = [np.concatenate(pair, -2) for pair in zip(kept, (k, v), strict=True)]
    expected, lse, *_ = naive.attention(*doubles(q, *every), mask=mask, sinks=sinks, softcap=5.0)
    out, got = functional.memory_attention(
        q, k, v, memory_k, memory_v, causal=True, sinks=sinks, softcap=5.0, return_lse=True
    )
    close(out, expected, dtype)
    np.testing.assert_allclose(got, lse, atol=2 * DTYPES[dtype])

    gate = normal(4)
    share = sigmoid(gate.astype(float))[:, None, None]
    memory = naive.attention(*doubles(q, *kept))[0]
    local = naive.attention(*doubles(q, k, v), causal=True)[0]
    mixed = functional.memory_attention(q, k, v, memory_k, memory_v, gate=gate, causal=True)
    close(mixed, share * memory + (1 - share) * local, dtype)


Q, K, V = qkv(6, 6)
CACHE, W, U = normal(2, 6, 24), normal(4, 8, 16), normal(4, 12, 16)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: functional.latent_attention(Q, CACHE[..., :3], W, U),
            ValueError,
            r"cache has shape \(2, 6, 3\)",
        ),
        (
            lambda: functional.latent_attention(Q, CACHE, W[:3], U),
            ValueError,
            "key_weight and value_weight have shapes",
        ),
        (
            lambda: functional.latent_attention(Q, CACHE, W, U[..., :3]),
            ValueError,
            "key_weight and value_weight have shapes",
        ),
        (
            lambda: functional.latent_attention(Q, CACHE, W, U, absorbed=1),
            TypeError,
            "absorbed is 1; expected True",
        ),
        (
            lambda: functional.latent_attention(Q, np.stack([CACHE[0]] * 5), W, U),
            ValueError,
            r"^latent_attention\(\): q and cache have batch dimensions .*; expected ones that broadcast",
        ),
        (lambda: functional.latent_attention(Q[0, 0], CACHE, W, U), ValueError, r"q has shape \(6, 16\)"),
        (
            lambda: functional.latent_attention(Q, CACHE[:, None], W, U),
            ValueError,
            "cache has shape .*without heads",
        ),
        (lambda: functional.memory_attention(Q, K, V, K[..., :3], V), ValueError, "memory_k has shape"),
        (lambda: functional.memory_attention(Q, K, V, K, V[..., :3]), ValueError, "memory_v has shape"),
        (lambda: functional.memory_attention(Q, K, V, K, V, gate=[1.0] * 3), ValueError, "gate has shape"),
        (
            lambda: functional.memory_attention(Q, K, V, K, V, gate=1, return_lse=True),
            ValueError,
            "return_lse is True; expected False with gate",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("absorbed", [True, False])
def test_latent_scale_of_none_is_the_default(absorbed):
    args = normal(2, 5, 12), normal(7, 12), normal(2, 4, 4), normal(2, 6, 4)
    expected = functional.latent_attention(*args, absorbed=absorbed)
    got = functional.latent_attention(*args, absorbed=absorbed, scale=None)
    np.testing.assert_array_equal(got, expected)


def test_a_memory_of_weight_0_is_left_out():
    gate = np.array([-np.inf, 0, -np.inf, np.inf], np.float32)
    got = functional.memory_attention(Q, K, V, K, np.full_like(V, np.inf), gate=gate)
    np.testing.assert_array_equal(got[:, ::2], fastattn.attention(Q, K, V)[:, ::2])
    assert np.isinf(got[:, 1::2]).all()


@pytest.mark.parametrize("gate", [None, 0.5])
@pytest.mark.parametrize("heads", [2, 1])
def test_memory_of_queries_that_broadcast(heads, gate, implementation):
    q, k, v = normal(heads, 5, 8), normal(3, heads, 7, 8), normal(3, heads, 7, 6)
    memory_k, memory_v = (normal(4, n) if heads == 1 else normal(heads, 4, n) for n in (8, 6))
    whole = np.broadcast_to(q, (3, *q.shape))
    out = functional.memory_attention(q, k, v, memory_k, memory_v, gate=gate)
    lead = (slice(None),) if heads > 1 else (None,)
    expected = functional.memory_attention(whole, k, v, memory_k[lead], memory_v[lead], gate=gate)
    np.testing.assert_array_equal(out, expected)


def test_dtypes_are_named():
    q, k, v = qkv(3, 4, dim_v=16)
    with pytest.raises(TypeError, match=r"^memory_attention\(\): q, memory_k and memory_v have dtypes"):
        functional.memory_attention(q, k, v, np.ones(k.shape), v)
    weight = np.ones((4, 8, 8), np.float32)
    with pytest.raises(TypeError, match=r"^latent_attention\(\): q and cache have dtypes"):
        functional.latent_attention(q, np.ones((2, 5, 16)), weight, weight)
