"""Positions that are added, against their formulas in Python's float64, element by element."""

import math

import ml_dtypes
import numpy as np
import pytest
from naive import attention as naive_attention

import fastattn
from fastattn.positions import alibi_slopes, sinusoidal, t5_bias, t5_buckets

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]


@pytest.mark.parametrize("d_model", [1, 2, 7, 16])
@pytest.mark.parametrize("offset", [0, 100_000, -3])
def test_sinusoidal_is_its_formula(d_model, offset):
    vectors = sinusoidal(5, d_model, offset=offset, dtype=np.float64, base=500.0)
    for t in range(5):
        for i in range(d_model):
            angle = (offset + t) / 500.0 ** ((i - i % 2) / d_model)
            expected = math.cos(angle) if i % 2 else math.sin(angle)
            assert vectors[t, i] == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinusoidal_is_rounded_once(dtype):
    vectors = sinusoidal(40, 9, offset=70_000, dtype=dtype)
    assert vectors.dtype == dtype
    np.testing.assert_array_equal(vectors, sinusoidal(40, 9, offset=70_000, dtype=np.float64).astype(dtype))


def test_sinusoidal_defaults_and_no_positions():
    assert sinusoidal(3, 4).dtype == np.float32
    assert sinusoidal(0, 4).shape == (0, 4)
    np.testing.assert_array_equal(sinusoidal(9, 4)[4:], sinusoidal(5, 4, offset=4))


@pytest.mark.parametrize("num_heads", [1, 2, 3, 7, 8, 12, 16, 25, 40, 71, 112])
def test_alibi_slopes_as_the_authors_code_has_them(num_heads):
    def power_of_two(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    n = 2 ** math.floor(math.log2(num_heads))
    expected = power_of_two(n) + power_of_two(2 * n)[0::2][: num_heads - n]
    slopes = alibi_slopes(num_heads)
    assert slopes.dtype == np.float32
    np.testing.assert_allclose(slopes, expected, rtol=1e-7)


def bucket(relative, num_buckets, max_distance, bidirectional):
    """The definition in integers, without a logarithm that could be rounded."""
    result, distance = 0, max(-relative, 0)
    if bidirectional:
        num_buckets //= 2
        result, distance = num_buckets * (relative > 0), abs(relative)
    exact = num_buckets // 2
    if distance < exact:
        return result + distance
    steps = num_buckets - exact
    # Bucket exact + s begins at the distance exact * (max_distance / exact) ** (s / steps).
    reached = [s for s in range(steps) if distance**steps * exact**s >= max_distance**s * exact**steps]
    return result + exact + reached[-1]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (4, 3), (5, 20), (18, 128), (48, 256)])
def test_t5_buckets_are_their_definition(num_buckets, max_distance, bidirectional):
    options = {"num_buckets": num_buckets, "max_distance": max_distance, "bidirectional": bidirectional}
    got = t5_buckets(3, 300, q_offset=150, **options)
    for i in range(3):
        for j in range(300):
            assert got[i, j] == bucket(j - (150 + i), **options), (i, j)


@pytest.mark.parametrize(("len_q", "len_k"), [(0, 0), (0, 3), (3, 0), (1, 1), (1, 6), (6, 1), (4, 4), (9, 5)])
def test_t5_default_offset_is_that_of_attention(len_q, len_k):
    got = t5_buckets(len_q, len_k)
    assert got.shape == (len_q, len_k)
    assert got.dtype == np.int64
    np.testing.assert_array_equal(got, t5_buckets(len_q, len_k, q_offset=len_k - len_q))


@pytest.mark.parametrize("dtype", [*DTYPES, ">f4"])
def test_t5_bias_is_a_view_of_its_diagonals(dtype):
    table = np.random.default_rng(0).standard_normal((32, 6)).astype(dtype)
    bias = t5_bias(table, 50, 70, q_offset=20)
    assert bias.dtype == np.dtype(dtype).newbyteorder("=")
    assert not bias.flags.writeable
    assert bias.strides == ((50 + 70 - 1) * bias.itemsize, -bias.itemsize, bias.itemsize)
    np.testing.assert_array_equal(bias, np.moveaxis(table[t5_buckets(50, 70, q_offset=20)], -1, 0))


@pytest.mark.parametrize(("len_q", "len_k"), [(33, 70), (1, 70), (70, 70)])
def test_attention_reads_t5_bias_in_place(implementation, len_q, len_k):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, 4, n, 16), np.float32) for n in (len_q, len_k, len_k))
    bias = t5_bias(rng.standard_normal((32, 4), np.float32), len_q, len_k)
    assert fastattn.explain(q, k, v, bias=bias, scale=1.0)["copies"] == ()
    got = fastattn.attention(q, k, v, bias=bias, scale=1.0)
    np.testing.assert_array_equal(got, fastattn.attention(q, k, v, bias=bias.copy(), scale=1.0))
    np.testing.assert_allclose(got, naive_attention(q, k, v, bias=bias, scale=1.0)[0], atol=2e-5)


BAD_CALLS = [
    (sinusoidal, (-1, 4), {}, ValueError, "length is -1; expected at least 0"),
    (sinusoidal, (3.0, 4), {}, TypeError, "length is 3.0; expected an integer"),
    (sinusoidal, (3, 0), {}, ValueError, "d_model is 0; expected at least 1"),
    (sinusoidal, (3, 4), {"offset": 0.5}, TypeError, "offset is 0.5; expected an integer"),
    (sinusoidal, (3, 4), {"offset": 2**60}, ValueError, "offset is 1152921504606846976; expected"),
    (sinusoidal, (3, 4), {"dtype": int}, TypeError, "dtype is <class 'int'>; expected float32, float64"),
    (sinusoidal, (3, 4), {"dtype": "floaty"}, TypeError, "dtype is 'floaty'; expected float32"),
    (sinusoidal, (3, 4), {"base": 0.0}, ValueError, "base is 0.0; expected a number above 0"),
    (sinusoidal, (3, 4), {"base": "e"}, TypeError, "base is 'e'; expected a real number"),
    (alibi_slopes, (0,), {}, ValueError, "num_heads is 0; expected at least 1"),
    (alibi_slopes, (True,), {}, TypeError, "num_heads is True; expected an integer"),
    (t5_buckets, (-1, 4), {}, ValueError, "len_q is -1; expected at least 0"),
    (t5_buckets, (4, 4.5), {}, TypeError, "len_k is 4.5; expected an integer"),
    (t5_buckets, (4, 4), {"num_buckets": 3}, ValueError,
        "num_buckets is 3; expected at least 4 with bidirectional=True"),
    (t5_buckets, (4, 4), {"num_buckets": 1, "bidirectional": False}, ValueError,
        "num_buckets is 1; expected at least 2 with bidirectional=False"),
    (t5_buckets, (4, 4), {"num_buckets": "32"}, TypeError, "num_buckets is '32'; expected an integer"),
    (t5_buckets, (4, 4), {"max_distance": 8}, ValueError, "max_distance is 8; expected at least 9"),
    (t5_buckets, (4, 4), {"bidirectional": 1}, TypeError, "bidirectional is 1; expected True or False"),
    (t5_buckets, (4, 4), {"q_offset": 1.0}, TypeError, "q_offset is 1.0; expected an integer"),
    (t5_bias, (np.ones((32, 4), int), 4, 4), {}, TypeError, "table has dtype int64; expected float32"),
    (t5_bias, (np.ones(32), 4, 4), {}, ValueError, r"table has shape \(32,\); expected \(num_buckets, h"),
    (t5_bias, (np.ones((2, 4)), 4, 4), {}, ValueError, "num_buckets is 2; expected at least 4"),
    (t5_bias, (np.ones((32, 4)), 4, -4), {}, ValueError, "len_k is -4; expected at least 0"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "args", "options", "error", "message"), BAD_CALLS)
def test_errors(function, args, options, error, message):
    with pytest.raises(error, match=rf"^{function.__name__}\(\): {message}"):
        function(*args, **options)
