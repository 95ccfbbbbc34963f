"""Relative positions: Shaw, Transformer-XL and DeBERTa in float64, with arrays of all scores."""

import numpy as np
import pytest
from formulas import behind, deberta, shaw, transformer_xl
from inputs_of_variants import RNG, assert_near, normal, qkv

from fastattn import functional, masks

DTYPES = {"float32": 2e-5, "float64": 1e-11, "float16": 1e-2, "bfloat16": 8e-2}
# Lengths on both sides of the runs of queries that get their bias at a time, and of the tables.
LENGTHS = [(67, 67), (1, 130), (300, 300), (130, 400), (3, 0), (0, 5)]


def close(got, expected, dtype="float32"):
    assert_near(got, expected, dtype, DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_shaw(lengths, dtype, implementation):
    q, k, v = qkv(*lengths, dtype)
    for clip in (1, 16, 200):
        tables = normal(2 * clip + 1, 16) / 2, normal(2 * clip + 1, 12)
        expected, lse = shaw(q, k, v, *tables)
        out, got = functional.shaw_attention(q, k, v, *tables, return_lse=True)
        close(out, expected, dtype)
        np.testing.assert_allclose(got, lse, atol=2 * DTYPES[dtype])
        alone = functional.shaw_attention(q, k, v, tables[0], causal=True)
        close(alone, shaw(q, k, v, tables[0], 0 * tables[1], causal=True)[0], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_in_any_strides(dtype, implementation):
    """Keys and values may have any strides: the bits do not change."""
    q, k, v = qkv(9, 9, dtype)
    tables, relative, u = (normal(5, 16) / 2, normal(5, 12)), normal(17, 16), normal(4, 16)
    shaw_plain = functional.shaw_attention(q, k, v, *tables)
    xl_plain = functional.transformer_xl_attention(q, k, v, relative, u, u)
    for turn in ((0, 1, 3, 2), (3, 2, 1, 0), (1, 3, 0, 2)):
        back = np.argsort(turn)
        apart = [np.ascontiguousarray(x.transpose(turn)).transpose(back) for x in (q, k, v)]
        np.testing.assert_array_equal(functional.shaw_attention(*apart, *tables), shaw_plain)
        np.testing.assert_array_equal(functional.transformer_xl_attention(*apart, relative, u, u), xl_plain)
    same = [np.broadcast_to(x[:1], x.shape) for x in (q, k, v)]
    for got, plain in (
        (functional.shaw_attention(*same, *tables), shaw_plain),
        (functional.transformer_xl_attention(*same, relative, u, u), xl_plain),
    ):
        np.testing.assert_array_equal(got, np.broadcast_to(plain[:1], plain.shape))


def test_shaw_with_options(implementation):
    q, k, v = qkv(150, 260)
    tables = normal(11, 16), normal(11, 12)
    mask, bias, sinks = RNG.random((150, 260)) < 0.7, normal(2, 1, 150, 260), normal(4)
    ids = RNG.integers(0, 3, 260)
    same = ids[np.clip(behind(150, 260) + np.arange(260), 0, 259)] == ids
    for options, dense in (
        ({"mask": mask, "bias": bias, "sinks": sinks}, {}),
        ({"mask": masks.documents(ids) & masks.causal()}, {"mask": same & (behind(150, 260) >= 0)}),
        ({"window": (40, 3), "scale": 0.25, "q_offset": 7}, {}),
        ({"kv_lengths": np.array([260, 90]), "q_offset": 0, "causal": True}, {}),
    ):
        expected, lse = shaw(q, k, v, *tables, **{**options, **dense})
        out, got = functional.shaw_attention(q, k, v, *tables, return_lse=True, **options)
        close(out, expected)
        np.testing.assert_allclose(got, lse, atol=2e-5)
    k[..., 200:, :], v[..., 200:, :] = np.nan, np.inf
    out = functional.shaw_attention(q, k, v, *tables, kv_lengths=200, q_offset=0)
    assert np.isfinite(out).all()
    one = functional.shaw_attention(q[0, 0], k[0, 0, :200], v[0, 0, :200], *tables, q_offset=0)
    np.testing.assert_allclose(one, out[0, 0], atol=1e-6)


@pytest.mark.parametrize("value", [np.inf, np.float32(3e38)])
@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_shaw_of_infinite_and_large_queries(dim, value, implementation):
    """They give no warning of NumPy's products."""
    q, k, v = (normal(2, dim) for _ in range(3))
    out = functional.shaw_attention(q, k, v, normal(5, dim), normal(5, dim))
    q[0, 0] = value
    got = functional.shaw_attention(q, k, v, normal(5, dim), normal(5, dim))
    assert got.shape == out.shape
    assert np.isfinite(got[1]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_transformer_xl(lengths, dtype, implementation):
    len_q, len_k = lengths
    q, k, v = qkv(*lengths, dtype)
    relative, u, w = normal(4, max(len_q + len_k - 1, 0), 16) / 2, normal(4, 16), normal(4, 16)
    expected, lse = transformer_xl(q, k, v, relative, u, w)
    out, got = functional.transformer_xl_attention(q, k, v, relative, u, w, return_lse=True)
    close(out, expected, dtype)
    np.testing.assert_allclose(got, lse, atol=2 * DTYPES[dtype])
    fewer = relative[:, :len_k]  # what the paper has
    out = functional.transformer_xl_attention(q, k, v, fewer, u, w, causal=True)
    close(out, transformer_xl(q, k, v, fewer, u, w, causal=True)[0], dtype)


@pytest.mark.parametrize("offset", [-3, 0, 9, 12, 13, 30])
def test_transformer_xl_at_any_offset(offset, implementation):
    """The table of all distances will do with any offset; causal, the distances from 0 up are enough."""
    len_q, len_k = 4, 12
    q, k, v = qkv(len_q, len_k)
    full, u, w = normal(4, len_q + len_k - 1, 16) / 2, normal(4, 16), normal(4, 16)
    options = {"causal": True, "q_offset": offset}
    expected, _ = transformer_xl(q, k, v, full, u, w, **options)
    needed = min(max(len_q + offset, 1), len_q + len_k - 1)
    for table in (full, full[:, :needed]):
        close(functional.transformer_xl_attention(q, k, v, table, u, w, **options), expected)
    with pytest.raises(ValueError, match=f"has {needed - 1} rows; expected {needed}, one a distance"):
        functional.transformer_xl_attention(q, k, v, full[:, : needed - 1], u, w, **options)
    expected, _ = transformer_xl(q, k, v, full, u, w, q_offset=offset)
    close(functional.transformer_xl_attention(q, k, v, full, u, w, q_offset=offset), expected)


def test_transformer_xl_in_many_pieces(implementation):
    q, k, v = qkv(200, 9000, heads=2, heads_kv=1, batch=(1,))
    relative, u, w = normal(9199, 16) / 4, normal(2, 16), normal(2, 16)
    options = {"sinks": normal(2), "bias": normal(200, 9000), "scale": 0.2}
    expected, _ = transformer_xl(q, k, v, np.broadcast_to(relative, (2, 9199, 16)), u, w, **options)
    close(functional.transformer_xl_attention(q, k, v, relative, u, w, **options), expected)
    # Rows are the same, whatever else is in the batch.
    more = [np.concatenate([x, normal(2, *x.shape[1:])]) for x in (q, k, v)]
    out = functional.transformer_xl_attention(*more, relative, u, w, causal=True)
    alone = functional.transformer_xl_attention(q, k, v, relative, u, w, causal=True)
    assert out[:1].tobytes() == alone.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_disentangled(lengths, dtype, implementation):
    q, k, v = qkv(*lengths, dtype)
    span = 20
    bucket = np.clip(behind(*lengths) + span, 0, 2 * span - 1)
    kr, qr = normal(4, 2 * span, 16) / 2, normal(4, 2 * span, 16) / 2
    for tables in ((kr, qr), (kr, None), (None, qr)):
        expected, lse = deberta(q, k, v, *tables, bucket)
        out, got = functional.disentangled_attention(q, k, v, *tables, return_lse=True)
        close(out, expected, dtype)
        np.testing.assert_allclose(got, lse, atol=2 * DTYPES[dtype])


def test_disentangled_with_options(implementation):
    q, k, v = qkv(150, 150)
    kr, qr, mask = normal(4, 12, 16), normal(4, 12, 16), RNG.random((2, 1, 1, 150)) < 0.8
    bucket = np.clip(behind(150, 150) + 6, 0, 11)
    out = functional.disentangled_attention(q, k, v, kr, qr, mask=mask, causal=True)
    close(out, deberta(q, k, v, kr, qr, bucket, mask=mask, causal=True)[0])


Q, K, V = qkv(5, 6)
TABLE = normal(4, 8, 16)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: functional.shaw_attention(Q, K, V, TABLE[0]),
            ValueError,
            "key_table has 8 rows; expected an odd",
        ),
        (
            lambda: functional.shaw_attention(Q, K, V, TABLE[0, :5, :3]),
            ValueError,
            r"key_table has shape \(5, 3\)",
        ),
        (
            lambda: functional.shaw_attention(Q, K, V, TABLE[0, :5], TABLE[0, :5]),
            ValueError,
            r"value_table has shape \(5, 16\); expected one that fits .* = \(5, 12\)",
        ),
        (
            lambda: functional.shaw_attention(Q, K, V, TABLE[0, :5], softcap=3.0),
            TypeError,
            "softcap is not an",
        ),
        (
            lambda: functional.shaw_attention(Q, K, V, TABLE[0, :5], kv_lengths=5),
            ValueError,
            "without q_offset",
        ),
        (lambda: functional.shaw_attention(Q, K, V, TABLE[0, :5], q_offset=[1, 2]), TypeError, "q_offset is"),
        (
            lambda: functional.transformer_xl_attention(Q, K, V, TABLE),
            ValueError,
            "8 rows; expected 10, one a",
        ),
        (
            lambda: functional.transformer_xl_attention(Q, K, V, normal(4, 10, 16), normal(3, 16)),
            ValueError,
            "content_bias has shape",
        ),
        (lambda: functional.disentangled_attention(Q, K, V), ValueError, "are None; expected at least one"),
        (
            lambda: functional.disentangled_attention(Q, K, V, TABLE[:, :3]),
            ValueError,
            "position_keys has 3 rows",
        ),
        (
            lambda: functional.disentangled_attention(Q, K, V, TABLE[:2]),
            ValueError,
            "position_keys has shape",
        ),
        (
            lambda: functional.disentangled_attention(Q, K, V, TABLE, max_distance=3),
            ValueError,
            "max_distance is 3; expected at least 4",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_logarithmic_buckets_need_a_span_of_two():
    x = np.ones((2, 6, 4), np.float32)
    with pytest.raises(
        ValueError, match=r"^disentangled_attention\(\): max_distance is given, and position_keys"
    ):
        functional.disentangled_attention(x, x, x, np.ones((2, 2, 4), np.float32), max_distance=5)
