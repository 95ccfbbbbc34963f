"""Rotary positions, against their formulas in Python's float64, element by element."""

import math

import ml_dtypes
import numpy as np
import pytest

from fastattn.rope import apply_rope, rope_tables
from fastattn.rope_scaling import RopeFrequencies, rope_frequencies

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
LAYOUTS = [False, True]

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1, 2, 4, 8],
            "original_max_position_embeddings": 4096}  # fmt: skip


def random(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def tables(length, rotary_dim, dtype=np.float32, offset=0, **options):
    return rope_tables(np.arange(offset, offset + length), rope_frequencies(rotary_dim, **options), dtype)


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
def test_rope_is_its_formula(dtype, interleaved, head_dim, rotary_dim):
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
def test_norms_are_kept_and_products_depend_on_distance_alone(interleaved):
    q, k = random(16, dtype=np.float64), random(16, dtype=np.float64, seed=1)
    rotated_q, rotated_k = (
        apply_rope(np.tile(x, (50, 1)), *tables(50, 16, np.float64), interleaved=interleaved) for x in (q, k)
    )
    np.testing.assert_allclose(np.linalg.norm(rotated_q, axis=-1), np.linalg.norm(q), rtol=1e-12)
    products = rotated_q @ rotated_k.T
    for distance in (-20, 0, 7):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=0, atol=1e-12)
    assert np.ptp(products) > 1


def test_interleaved_is_half_rotated_after_a_permutation():
    x, (cos, sin) = random(3, 7, 12), tables(7, 12)
    order = [*range(0, 12, 2), *range(1, 12, 2)]
    half = apply_rope(x[..., order], cos, sin)
    np.testing.assert_array_equal(apply_rope(x, cos, sin, interleaved=True)[..., order], half)


@pytest.mark.parametrize("interleaved", LAYOUTS)
def test_partial_rotation_leaves_the_rest_alone(interleaved):
    x, (cos, sin) = random(3, 7, 12), tables(7, 8)
    x[..., 8:] = np.nan
    got = apply_rope(x, cos, sin, interleaved=interleaved)
    np.testing.assert_array_equal(got[..., 8:], x[..., 8:])
    np.testing.assert_array_equal(got[..., :8], apply_rope(x[..., :8], cos, sin, interleaved=interleaved))


def test_position_0_and_no_dimensions_change_nothing():
    x = random(2, 1, 6)
    np.testing.assert_array_equal(apply_rope(x, *tables(1, 6)), x)
    np.testing.assert_array_equal(apply_rope(x, np.ones((1, 0)), np.ones((1, 0))), x)


@pytest.mark.parametrize("interleaved", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_equals_out_of_place(dtype, interleaved):
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


def test_any_strides_and_byte_order():
    x, (cos, sin) = random(2, 5, 3, 8), tables(5, 8)
    expected = apply_rope(np.ascontiguousarray(x.swapaxes(1, 2)), cos, sin)
    for view in (x.swapaxes(1, 2), x.swapaxes(1, 2).astype(">f4"), np.asfortranarray(x.swapaxes(1, 2))):
        view.flags.writeable = False
        got = apply_rope(view, cos, sin)
        assert got.dtype.isnative
        np.testing.assert_array_equal(got, expected)
    got = apply_rope(x[:, ::-1].swapaxes(1, 2), cos[::-1], sin[::-1])
    np.testing.assert_array_equal(got, expected[:, :, ::-1])


def test_tables_for_each_sequence():
    x, frequencies = random(2, 3, 5, 8), rope_frequencies(8)
    positions = np.array([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]])
    cos, sin = rope_tables(positions, frequencies)
    got = apply_rope(x, cos, sin)
    for b in range(2):
        np.testing.assert_array_equal(got[b], apply_rope(x[b], *rope_tables(positions[b], frequencies)))
    np.testing.assert_array_equal(got[:1], apply_rope(x[:1], cos[:1], sin[:1]))
    np.testing.assert_array_equal(apply_rope(x[0, 0], cos[0], sin[0]), got[0, 0])


def test_infinities_and_overflow_are_values():
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


# The frequencies


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}, {"type": None}])
def test_default_frequencies(scaling):
    inv_freq, attention_factor = rope_frequencies(6, base=500.0, scaling=scaling)
    assert inv_freq.dtype == np.float64
    assert attention_factor == 1.0
    np.testing.assert_allclose(inv_freq, [1.0, 500 ** (-1 / 3), 500 ** (-2 / 3)], rtol=1e-15)


def test_base_is_taken_from_the_config():
    expected = rope_frequencies(8, base=5e5).inv_freq
    for options in ({}, {"base": 5e5}):
        got = rope_frequencies(8, scaling={"rope_theta": 5e5, "partial_rotary_factor": 0.5}, **options)
        np.testing.assert_array_equal(got.inv_freq, expected)
    np.testing.assert_array_equal(rope_frequencies(8).inv_freq, rope_frequencies(8, base=10000).inv_freq)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_linear_divides_positions(key):
    scaled = rope_frequencies(8, scaling={key: "linear", "factor": 4})
    np.testing.assert_allclose(rope_tables([8], scaled)[0], tables(1, 8, offset=2)[0], rtol=1e-6)


@pytest.mark.parametrize("dim", [2, 4, 64])
def test_ntk_changes_the_base(dim):
    base = 10000.0 * 4 ** (dim / (dim - 2)) if dim > 2 else 10000.0
    got = rope_frequencies(dim, scaling={"rope_type": "ntk", "factor": 4.0}).inv_freq
    np.testing.assert_allclose(got, [base ** (-2 * k / dim) for k in range(dim // 2)], rtol=1e-13)


@pytest.mark.parametrize(("seq_len", "factor"), [(1, 1), (2048, 1), (4096, 3), (8192, 7)])
def test_dynamic_grows_with_the_sequence(seq_len, factor):
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    got = rope_frequencies(64, scaling=scaling, max_position_embeddings=2048, seq_len=seq_len)
    expected = rope_frequencies(64, scaling={"rope_type": "ntk", "factor": factor})
    np.testing.assert_allclose(got.inv_freq, expected.inv_freq, rtol=1e-13)


@pytest.mark.parametrize("length", [100, 2048, 2**50])  # 100: the ramp begins before the first pair
@pytest.mark.parametrize("more", [{}, {"truncate": False}, {"beta_fast": 40, "beta_slow": 3}])
def test_yarn_is_its_formula(more, length):
    got = rope_frequencies(64, scaling={**YARN, **more, "original_max_position_embeddings": length})
    fast, slow = more.get("beta_fast", 32), more.get("beta_slow", 1)
    low, high = (32 * math.log(length / (2 * math.pi * n)) / math.log(10000) for n in (fast, slow))
    if more.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 63)
    for k in range(32):
        ramp = min(max((k - low) / (high - low), 0), 1)
        plain = 10000 ** (-k / 32)
        assert got.inv_freq[k] == pytest.approx((1 - ramp) * plain + ramp * plain / 4, rel=1e-12)
    assert got.attention_factor == pytest.approx(0.1 * math.log(4) + 1, rel=1e-15)


def test_yarn_attention_factors():
    def factor(**more):
        options = {"max_position_embeddings": 8192} if more.get("factor", 1) is None else {}
        return rope_frequencies(64, scaling={**YARN, **more}, **options).attention_factor

    weighted = (0.0707 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    assert factor(mscale=0.707, mscale_all_dim=0.5) == pytest.approx(weighted, rel=1e-12)
    assert factor(mscale=0.707, mscale_all_dim=0) == factor() == factor(factor=None)
    assert factor(attention_factor=1.5, mscale=0.707, mscale_all_dim=0.5) == 1.5
    assert factor(factor=0.5) == 1.0


def test_yarn_where_the_ramp_is_a_step():
    # In 6 positions the fastest pair turns not quite once: both ends of the ramp are rounded to 0.
    got = rope_frequencies(64, scaling={**YARN, "original_max_position_embeddings": 6}).inv_freq
    plain = rope_frequencies(64).inv_freq
    np.testing.assert_allclose(got, [plain[0], *plain[1:] / 4], rtol=1e-12)


def test_llama3_is_its_formula():
    got = rope_frequencies(128, base=500000.0, scaling={"type": "llama3", **LLAMA3})
    for k in range(64):
        plain = 500000.0 ** (-k / 64)
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4.0:
            expected = plain
        elif wavelength > 8192 / 1.0:
            expected = plain / 8
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected = (1 - smooth) * plain / 8 + smooth * plain
        assert got.inv_freq[k] == pytest.approx(expected, rel=1e-12)
    assert got.attention_factor == 1.0


@pytest.mark.parametrize(("seq_len", "factors"), [(4096, [1.0, 1.1, 1.2, 1.3]), (4097, [1, 2, 4, 8])])
def test_longrope_chooses_by_length(seq_len, factors):
    got = rope_frequencies(8, scaling=LONGROPE, max_position_embeddings=131072, seq_len=seq_len)
    np.testing.assert_allclose(got.inv_freq, [10 ** -k / f for k, f in enumerate(factors)], rtol=1e-14)
    assert got.attention_factor == pytest.approx(math.sqrt(1 + 5 / 12), rel=1e-15)
    got = rope_frequencies(8, scaling={**LONGROPE, "attention_factor": 1.5}, seq_len=seq_len)
    assert got.attention_factor == 1.5
    assert rope_frequencies(8, scaling={**LONGROPE, "factor": 0.5}, seq_len=seq_len).attention_factor == 1.0


def test_proportional_stops_the_rest():
    scaling = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0}
    got = rope_frequencies(8, scaling=scaling).inv_freq
    np.testing.assert_allclose(got, [0.5, 0.05, 0, 0], rtol=1e-15)


# Errors

X, COS = np.ones((2, 3, 5, 8), np.float32), np.ones((5, 4), np.float32)
F8 = rope_frequencies(8)


def without(scaling, key):
    return {k: x for k, x in scaling.items() if k != key}


BAD_FREQUENCIES = [
    (ValueError, "rotary_dim is 7; expected an even number", {"rotary_dim": 7}),
    (ValueError, "rotary_dim is 0; expected at least 2", {"rotary_dim": 0}),
    (TypeError, "rotary_dim is 8.0; expected an integer", {"rotary_dim": 8.0}),
    (ValueError, "base is 1.0; expected a number above 1", {"base": 1.0}),
    (TypeError, "base is '1e4'; expected a real number", {"base": "1e4"}),
    (ValueError, "base is 100.0 and scaling.'rope_theta'. 200.0; expected one",
        {"base": 100.0, "scaling": {"rope_theta": 200.0}}),
    (ValueError, "scaling.'rope_theta'. is -1.0; expected a number above 0",
        {"scaling": {"rope_theta": -1.0}}),
    (TypeError, "scaling is of type str; expected a dict or None", {"scaling": "yarn"}),
    (ValueError, "scaling has type 'yarm'; expected one of default, linear, ntk, dynamic, yarn, llama3",
        {"scaling": {"type": "yarm"}}),
    (ValueError, "scaling has type ..; expected one of", {"scaling": {"type": []}}),
    (ValueError, "scaling of type linear has no factor; expected factor", {"scaling": {"type": "linear"}}),
    (ValueError, "scaling of type llama3 has no low_freq_factor, high_freq_factor; expected factor, low_freq",
        {"scaling": without(without(LLAMA3, "low_freq_factor"), "high_freq_factor")}),
    (ValueError, "scaling of type yarn has beta, which it does not use; expected original_max",
        {"scaling": {**YARN, "beta": 3}}),
    (ValueError, "scaling of type default has factor, which it does not use; expected nothing else",
        {"scaling": {"factor": 3.0}}),
    (TypeError, "scaling.'factor'. is '8'; expected a real number", {"scaling": {**YARN, "factor": "8"}}),
    (ValueError, "scaling.'factor'. is 0.0; expected a number above 0", {"scaling": {**YARN, "factor": 0}}),
    (TypeError, "scaling.'truncate'. is 0; expected True or False", {"scaling": {**YARN, "truncate": 0}}),
    (TypeError, "scaling.'original_max_position_embeddings'. is 4096.5; expected an integer",
        {"scaling": {**YARN, "original_max_position_embeddings": 4096.5}}),
    (ValueError, "scaling.'beta_fast'. is 1.0; expected more than 2.0, scaling.'beta_slow'",
        {"scaling": {**YARN, "beta_fast": 1, "beta_slow": 2}}),
    (ValueError, "scaling.'high_freq_factor'. is 1.0; expected more than 1.0, scaling.'low_freq_factor'",
        {"scaling": {**LLAMA3, "high_freq_factor": 1}}),
    (ValueError, "max_position_embeddings is None; expected an integer, on which type yarn without f",
        {"scaling": without(YARN, "factor")}),
    (ValueError, "max_position_embeddings is None; expected an integer, on which type longrope without f",
        {"scaling": LONGROPE, "seq_len": 3}),
    (ValueError, "seq_len is None; expected an integer, on which type longrope depends",
        {"scaling": LONGROPE}),
    (ValueError, "seq_len is None; expected an integer, on which type dynamic depends",
        {"scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 2048}),
    (ValueError, "max_position_embeddings is None; expected an integer, on which type dynamic depends",
        {"scaling": {"type": "dynamic", "factor": 2.0}, "seq_len": 2048}),
    (ValueError, "max_position_embeddings is 0; expected at least 1", {"max_position_embeddings": 0}),
    (ValueError, "seq_len is -1; expected at least 0", {"seq_len": -1}),
    (ValueError, r"scaling.'long_factor'. has shape \(3,\); expected \(4,\), rotary_dim / 2",
        {"scaling": {**LONGROPE, "long_factor": [1, 2, 3]}}),
    (ValueError, r"scaling.'short_factor'. has 0.0; expected finite numbers above 0",
        {"scaling": {**LONGROPE, "short_factor": [1.0, 0.0, 1.0, 1.0]}}),
    (ValueError, r"scaling.'long_factor'. has inf; expected finite numbers above 0",
        {"scaling": {**LONGROPE, "long_factor": [1.0, 2.0, 3.0, np.inf]}}),
    (TypeError, r"scaling.'short_factor'. has dtype <U1; expected numbers",
        {"scaling": {**LONGROPE, "short_factor": ["1"] * 4}}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "options"), BAD_FREQUENCIES)
def test_errors_of_frequencies(error, message, options):
    with pytest.raises(error, match=rf"^rope_frequencies\(\): {message}"):
        rope_frequencies(**{"rotary_dim": 8, **options})


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
    (TypeError, "out has dtype <f8", {"out": np.empty(X.shape)}),
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
