"""Latent attention, against their formulas in float64."""

import numpy as np
import pytest
from formulas import latent
from inputs_of_variants import assert_near, normal, qkv

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


def test_dtypes_are_named():
    q = normal(2, 4, 3, 16)
    weight = np.ones((4, 8, 8), np.float32)
    with pytest.raises(TypeError, match=r"^latent_attention\(\): q and cache have dtypes"):
        functional.latent_attention(q, np.ones((2, 5, 16)), weight, weight)
