"""Rotary positions, against their formulas in Python's float64, element by element."""

import math

import ml_dtypes
import numpy as np
import pytest

from fastattn.positions import RopeFrequencies, apply_rope, rope_frequencies, rope_tables

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
LAYOUTS = [False, True]


def random(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def tables(length, rotary_dim, dtype=np.float32, offset=0):
    return rope_tables(np.arange(offset, offset + length), rope_frequencies(rotary_dim), dtype)


def rotate(x, rotary_dim, interleaved, position, base=10000.0):
    """The definition for one vector, in float64."""
    result = [float(value) for value in x]
    for k in range(rotary_dim // 2):
        i, j = (2 * k, 2 * k + 1) if interleaved else (k, k + rotary_dim // 2)
        angle = position / base ** (2 * k / rotary_dim)
        result[i] = float(x[i]) * math.cos(angle) - float(x[j]) * math.sin(angle)
        result[j] = float(x[j]) * math.cos(angle) + float(x[i]) * math.sin(angle)
    return result


# The rotation


@pytest.mark.parametrize("interleaved", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(2, 2), (8, 8), (9, 6), (64, 16)])
def test_rope_is_its_formula(implementation, dtype, interleaved, head_dim, rotary_dim):
    x = random(2, 3, 5, head_dim, dtype=dtype)
    lane = np.float64 if dtype == np.float64 else np.float32
    got = apply_rope(x, *tables(5, rotary_dim, lane, offset=1000), interleaved=interleaved)
    assert got.dtype == dtype
    assert got.shape == x.shape
    eps = float(ml_dtypes.finfo(dtype).eps)
    for b, h, t in np.ndindex(2, 3, 5):
        expected = rotate(x[b, h, t], rotary_dim, interleaved, 1000 + t)
        # One rounding to x's dtype and three in float32, of values of up to sqrt(2) times the largest.
        bound = 2 * max(eps, 1e-12) * max(map(abs, expected))
        np.testing.assert_allclose(got[b, h, t].astype(float), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("interleaved", LAYOUTS)
def test_partial_rotation_leaves_the_rest_alone(implementation, interleaved):
    x, (cos, sin) = random(3, 7, 12), tables(7, 8)
    x[..., 8:] = np.nan
    got = apply_rope(x, cos, sin, interleaved=interleaved)
    np.testing.assert_array_equal(got[..., 8:], x[..., 8:])
    np.testing.assert_array_equal(got[..., :8], apply_rope(x[..., :8], cos, sin, interleaved=interleaved))


def test_position_0_and_no_dimensions_change_nothing(implementation):
    x = random(2, 1, 6)
    np.testing.assert_array_equal(apply_rope(x, *tables(1, 6)), x)
    np.testing.assert_array_equal(apply_rope(x, np.ones((1, 0)), np.ones((1, 0))), x)


@pytest.mark.parametrize("interleaved", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_equals_out_of_place(implementation, dtype, interleaved):
    qkv, (cos, sin) = random(2, 3, 5, 24, dtype=dtype), tables(5, 6)
    before = qkv.copy()
    expected = apply_rope(qkv[..., :8], cos, sin, interleaved=interleaved)
    np.testing.assert_array_equal(qkv, before)
    out = np.empty_like(expected)
    assert apply_rope(qkv[..., :8], cos, sin, interleaved=interleaved, out=out) is out
    np.testing.assert_array_equal(out, expected)
    apply_rope(qkv[..., :8], cos, sin, interleaved=interleaved, out=qkv[..., :8])
    np.testing.assert_array_equal(qkv[..., :8], expected)
    np.testing.assert_array_equal(qkv[..., 8:], before[..., 8:])


def test_any_strides_and_byte_order(implementation):
    x, (cos, sin) = random(2, 5, 3, 8), tables(5, 8)
    expected = apply_rope(np.ascontiguousarray(x.swapaxes(1, 2)), cos, sin)
    for view in (x.swapaxes(1, 2), x.swapaxes(1, 2).astype(">f4"), np.asfortranarray(x.swapaxes(1, 2))):
        view.flags.writeable = False
        got = apply_rope(view, cos, sin)
        assert got.dtype.isnative
        np.testing.assert_array_equal(got, expected)
    got = apply_rope(x[:, ::-1].swapaxes(1, 2), cos[::-1], sin[::-1])
    np.testing.assert_array_equal(got, expected[:, :, ::-1])
    unaligned = np.zeros((2, cos.nbytes + 1), np.uint8)[:, 1:].view(cos.dtype).reshape(2, *cos.shape)
    unaligned[...] = cos, sin
    np.testing.assert_array_equal(apply_rope(x.swapaxes(1, 2), *unaligned), expected)


def test_tables_for_each_sequence(implementation):
    x, frequencies = random(2, 3, 5, 8), rope_frequencies(8)
    positions = np.array([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]])
    cos, sin = rope_tables(positions, frequencies)
    got = apply_rope(x, cos, sin)
    for b in range(2):
        np.testing.assert_array_equal(got[b], apply_rope(x[b], *rope_tables(positions[b], frequencies)))
    np.testing.assert_array_equal(got[:1], apply_rope(x[:1], cos[:1], sin[:1]))
    np.testing.assert_array_equal(apply_rope(x[0, 0], cos[0], sin[0]), got[0, 0])


def test_infinities_and_overflow_are_values(implementation):
    x = np.array([[np.inf, 1.0], [60000.0, 60000.0]], np.float16)
    got = apply_rope(x, np.full((2, 1), 0.8), np.full((2, 1), -0.6))
    np.testing.assert_array_equal(got, np.array([[np.inf, -np.inf], [np.inf, 12000.0]], np.float16))
    assert np.isnan(apply_rope(np.full((1, 2), np.inf), np.ones((1, 1)), np.ones((1, 1)))).any()


# The tables


@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_are_rounded_once(dtype):
    cos, sin = rope_tables([[-5], [3_000_000]], RopeFrequencies(np.array([1.0, 0.3]), 1.25), dtype)
    for table, f in ((cos, math.cos), (sin, math.sin)):
        assert table.dtype == dtype
        expected = [[[1.25 * f(p * w) for w in (1.0, 0.3)]] for p in (-5, 3_000_000)]
        np.testing.assert_allclose(table.astype(float), expected, rtol=float(ml_dtypes.finfo(dtype).eps))


def test_no_positions():
    cos, _ = tables(0, 8)
    assert cos.shape == (0, 4)
    assert apply_rope(random(3, 0, 8), cos, cos).shape == (3, 0, 8)


# Errors

X, COS = np.ones((2, 3, 5, 8), np.float32), np.ones((5, 4), np.float32)
F8 = rope_frequencies(8)


@pytest.mark.parametrize(
    ("error", "message", "args"),
    [
        (TypeError, "positions has dtype float64; expected integers", ([0.0, 1.0], F8)),
        (ValueError, r"positions has shape \(\); expected \(length,\)", (3, F8)),
        (TypeError, "frequencies is of type ndarray; expected RopeFrequencies", ([0, 1], F8.inv_freq)),
        (TypeError, "dtype is 'int32'; expected float32", ([0, 1], F8, "int32")),
    ],
)
def test_errors_of_tables(error, message, args):
    with pytest.raises(error, match=rf"^rope_tables\(\): {message}"):
        rope_tables(*args)


BAD_ROTATIONS = [
    (TypeError, "x has dtype int64; expected float32", {"x": X.astype(int)}),
    (ValueError, r"x has shape \(8,\); expected \(..., heads, length, head_dim\)", {"x": X[0, 0, 0]}),
    (TypeError, "cos has dtype int64; expected float32", {"cos": COS.astype(int)}),
    (ValueError, r"cos has shape \(4,\); expected \(..., length, rotary_dim / 2\)", {"cos": COS[0]}),
    (ValueError, r"sin has shape \(5, 3\); expected \(5, 4\) as cos", {"sin": COS[:, :3]}),
    (ValueError, r"cos has shape \(1, 4\), length 1; expected length 5 as in x, shape \(2, 3, 5, 8\)",
        {"cos": COS[:1], "sin": COS[:1]}),
    (ValueError, r"cos has shape \(5, 5\), which rotates 10 dimensions; expected at most the 8 of x",
        {"cos": np.ones((5, 5)), "sin": np.ones((5, 5))}),
    (ValueError, r"cos has shape \(3, 5, 4\); expected one that fits .* = \(2, 5, 4\)",
        {"cos": np.ones((3, 5, 4)), "sin": np.ones((3, 5, 4))}),
    (TypeError, "interleaved is 1; expected True or False", {"interleaved": 1}),
    (TypeError, "out is of type list; expected an ndarray", {"out": []}),
    (TypeError, "out has dtype float64; expected x's, float32", {"out": np.empty(X.shape)}),
    (ValueError, r"out has shape \(2, 3, 5, 4\); expected \(2, 3, 5, 8\)", {"out": X[..., :4]}),
    (ValueError, "out shares memory with x", {"x": X[..., ::2], "cos": COS[:, :2], "sin": COS[:, :2],
        "out": X[..., :4]}),
    (ValueError, "out shares memory with x", {"x": X[..., :4], "cos": COS[:, :2], "sin": COS[:, :2],
        "out": X[..., 2:6]}),
    (ValueError, "out shares memory with cos", {"x": X[0, 0, :, :4], "cos": COS[:, :2], "sin": COS[:, :2],
        "out": COS}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "options"), BAD_ROTATIONS)
def test_errors_of_the_rotation(error, message, options):
    with pytest.raises(error, match=rf"^apply_rope\(\): {message}"):
        apply_rope(**{"x": X, "cos": COS, "sin": COS, **options})
    assert (X == 1).all()


def test_a_read_only_array_is_not_rotated_in_place():
    x = X.copy()
    x.flags.writeable = False
    with pytest.raises(ValueError, match=r"^apply_rope\(\): out is read-only"):
        apply_rope(x, COS, COS, out=x)
