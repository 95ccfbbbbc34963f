"""Relative positions: Shaw, Transformer-XL and DeBERTa in float64, with arrays of all scores."""

import numpy as np
import pytest
from formulas import behind, deberta
from inputs_of_variants import RNG, assert_near, normal, qkv

from fastattn import functional

DTYPES = {"float32": 2e-5, "float64": 1e-11, "float16": 1e-2, "bfloat16": 8e-2}
# Lengths on both sides of the runs of queries that get their bias at a time, and of the tables.
LENGTHS = [(67, 67), (1, 130), (300, 300), (130, 400), (3, 0), (0, 5)]


def close(got, expected, dtype="float32"):
    assert_near(got, expected, dtype, DTYPES[dtype])


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
