"""Differential, gated, latent and disentangled attention, against their formulas in float64."""

import attention_variants as compositions
import naive
import numpy as np
import pytest
from formulas import behind, deberta, differential, doubles, latent, sigmoid
from inputs_of_variants import RNG, assert_near, normal, qkv

import fastattn
from fastattn import functional as F

DTYPES = {"float32": 2e-5, "float64": 1e-12, "float16": 1e-2, "bfloat16": 8e-2}
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
# Lengths on both sides of the runs of queries that get their bias at a time, and of DeBERTa's tables.
each_length = pytest.mark.parametrize("lengths", [(67, 67), (1, 130), (300, 300), (130, 400), (3, 0), (0, 5)])


def close(got, expected, dtype="float32", factor=1):
    assert_near(got, expected, dtype, factor * DTYPES[dtype])


@each_dtype
@each_length
def test_differential(lengths, dtype, implementation):
    q, k, v = qkv(*lengths, dtype, heads=8, heads_kv=4)
    v = v[:, :2]
    weights = np.float32([0.2, 0.4, 0.6, 0.8])[:, None, None]
    expected = differential(q, k, v, weights, causal=True)
    close(compositions.differential(q, k, v, weights, causal=True), expected, dtype, 0.6)

    if dtype in ("float32", "float64"):  # RMSNorm enlarges what two roundings leave of a difference
        norm = normal(12)
        normed = 0.4 * expected / np.sqrt((expected**2).mean(-1, keepdims=True) + 1e-5) * norm
        out = compositions.differential(q, k, v, weights, 0.6, causal=True)
        np.testing.assert_allclose(out * norm, normed, atol=50 * DTYPES[dtype])


@each_dtype
@each_length
def test_gated(lengths, dtype, implementation):
    q, k, v = qkv(*lengths, dtype)
    expected = naive.attention(*doubles(q, k, v))[0]
    for n in (12, 1):
        gate = normal(2, 4, lengths[0], n, dtype=dtype)
        close(F.gated_attention(q, k, v, gate), expected * sigmoid(gate.astype(float)), dtype, 0.6)
    out = np.empty(expected.shape, q.dtype)
    assert F.gated_attention(q, k, v, gate, out=out) is out
    one = F.gated_attention(q[0, 0], k[0, 0], v[0, 0], gate[0, 0])
    close(one, expected[0, 0] * sigmoid(gate[0, 0].astype(float)), dtype, 0.6)


def test_off_by_one(implementation):
    q, k, v = qkv(40, 50)
    scores = doubles(q)[0] @ np.repeat(doubles(k)[0], 2, 1).swapaxes(-1, -2) / 4
    weights = np.exp(scores) / (1 + np.exp(scores).sum(-1, keepdims=True))
    close(fastattn.attention(q, k, v, sinks=0.0), weights @ np.repeat(doubles(v)[0], 2, 1))


@each_dtype
@pytest.mark.parametrize("lengths", [(70, 70), (1, 150), (3, 0), (0, 4)])
def test_latent(lengths, dtype, implementation):
    len_q, len_k = lengths
    heads, nope, rope, rank, value = 6, 16, 8, 40, 20
    q, cache = normal(2, heads, len_q, nope + rope, dtype=dtype), normal(2, len_k, rank + rope, dtype=dtype)
    w, u = normal(heads, nope, rank, dtype=dtype) / 8, normal(heads, value, rank, dtype=dtype) / 8
    options = {"causal": True, "bias": normal(len_q, len_k)}
    expected, _ = latent(q, cache, w, u, **options)
    for absorbed in (True, False):
        how = {"absorbed": absorbed, **options}
        close(compositions.latent(q, cache, w, u, **how), expected, dtype)
    close(compositions.latent(q[0], cache[0], w, u, **options), expected[0], dtype)


def test_latent_attends_to_the_cache_itself(implementation):
    """A step of decoding, from a cache of sequences of different lengths with room after them."""
    q, room = normal(2, 6, 1, 24), normal(2, 500, 48)
    w, u, lengths = normal(6, 16, 40), normal(6, 20, 40), np.array([300, 77])
    cache = room[:, :400]
    room[0, 300:], room[1, 77:] = np.nan, np.nan
    out = compositions.latent(q, cache, w, u, absorbed=True, kv_lengths=lengths)
    for b, n in enumerate(lengths):
        plain = compositions.latent(q[b], cache[b, :n], w, u)
        np.testing.assert_allclose(out[b], plain, atol=1e-4)


@each_dtype
@each_length
def test_disentangled(lengths, dtype, implementation):
    q, k, v = qkv(*lengths, dtype)
    span = 20
    bucket = np.clip(behind(*lengths) + span, 0, 2 * span - 1)
    kr, qr = normal(4, 2 * span, 16) / 2, normal(4, 2 * span, 16) / 2
    for tables in ((kr, qr), (kr, None), (None, qr)):
        expected, lse = deberta(q, k, v, *tables, bucket)
        out, got = F.disentangled_attention(q, k, v, *tables, return_lse=True)
        close(out, expected, dtype)
        np.testing.assert_allclose(got, lse, atol=2 * DTYPES[dtype])


def test_disentangled_with_options(implementation):
    q, k, v = qkv(150, 150)
    kr, qr, mask = normal(4, 12, 16), normal(4, 12, 16), RNG.random((2, 1, 1, 150)) < 0.8
    bucket = np.clip(behind(150, 150) + 6, 0, 11)
    out = F.disentangled_attention(q, k, v, kr, qr, mask=mask, causal=True)
    close(out, deberta(q, k, v, kr, qr, bucket, mask=mask, causal=True)[0])


Q, K, V = qkv(6, 6)
TABLE = normal(4, 8, 16)


@pytest.mark.parametrize(("function", "args", "options", "error", "message"), [
    (F.gated_attention, (Q, K, V, np.ones(4)), {}, TypeError, "gate has dtype float64; expected q's"),
    (F.gated_attention, (Q, K, V, np.ones((3, 1), "f")), {}, ValueError, r"gate has shape \(3, 1\)"),
    (F.disentangled_attention, (Q, K, V), {}, ValueError, ".* are None; expected at least one"),
    (F.disentangled_attention, (Q, K, V, TABLE[:, :3]), {}, ValueError, "position_keys has 3 rows"),
    (F.disentangled_attention, (Q, K, V, TABLE[:2]), {}, ValueError, "position_keys has shape"),
    (F.disentangled_attention, (Q, K, V, TABLE), {"max_distance": 3}, ValueError,
        "max_distance is 3; expected at least 4"),
    (F.disentangled_attention, (Q, K, V, TABLE[:, :2]), {"max_distance": 5}, ValueError,
        "max_distance is given, and position_keys"),
    (F.disentangled_attention, (Q, K, V, TABLE), {"softcap": 3.0}, TypeError, "softcap is not an"),
    (F.disentangled_attention, (Q, K, V, TABLE), {"kv_lengths": 5}, ValueError,
        "kv_lengths is given without q_offset"),
    (F.disentangled_attention, (Q, K, V, TABLE), {"q_offset": [1, 2]}, TypeError, "q_offset is"),
])  # fmt: skip
def test_errors(function, args, options, error, message):
    with pytest.raises(error, match=rf"^{function.__name__}\(\): {message}"):
        function(*args, **options)
