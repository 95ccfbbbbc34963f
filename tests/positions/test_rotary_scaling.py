"""Frequencies of rotary positions, against the formulas of their papers in Python's float64."""

import math

import numpy as np
import pytest

from fastattn.positions import rope_frequencies, rope_tables

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1, 2, 4, 8],
            "original_max_position_embeddings": 4096}  # fmt: skip


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
    # Older configs have it beside the dict, where it is easily forgotten.
    for scaling in ({"type": "linear", "factor": 2.0}, {"rope_type": "default"}, YARN):
        with pytest.raises(ValueError, match=r"base is None and scaling has no rope_theta; expected one"):
            rope_frequencies(8, scaling=scaling)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_linear_divides_positions(key):
    scaled = rope_frequencies(8, base=10000.0, scaling={key: "linear", "factor": 4})
    np.testing.assert_allclose(rope_tables([8], scaled), rope_tables([2], rope_frequencies(8)), rtol=1e-6)


@pytest.mark.parametrize("dim", [2, 4, 64])
def test_ntk_changes_the_base(dim):
    base = 10000.0 * 4 ** (dim / (dim - 2)) if dim > 2 else 10000.0
    got = rope_frequencies(dim, base=10000.0, scaling={"rope_type": "ntk", "factor": 4.0}).inv_freq
    np.testing.assert_allclose(got, [base ** (-2 * k / dim) for k in range(dim // 2)], rtol=1e-13)


@pytest.mark.parametrize(("seq_len", "factor"), [(1, 1), (2048, 1), (4096, 3), (8192, 7)])
def test_dynamic_grows_with_the_sequence(seq_len, factor):
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    got = rope_frequencies(64, base=10000.0, scaling=scaling, max_position_embeddings=2048, seq_len=seq_len)
    expected = rope_frequencies(64, base=10000.0, scaling={"rope_type": "ntk", "factor": factor})
    np.testing.assert_allclose(got.inv_freq, expected.inv_freq, rtol=1e-13)


@pytest.mark.parametrize("length", [100, 2048, 2**50])  # 100: the ramp begins before the first pair
@pytest.mark.parametrize("more", [{}, {"truncate": False}, {"beta_fast": 40, "beta_slow": 3}])
def test_yarn_is_its_formula(more, length):
    scaling = {**YARN, **more, "original_max_position_embeddings": length}
    got = rope_frequencies(64, base=10000.0, scaling=scaling)
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
        return rope_frequencies(64, base=10000.0, scaling={**YARN, **more}, **options).attention_factor

    weighted = (0.0707 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    assert factor(mscale=0.707, mscale_all_dim=0.5) == pytest.approx(weighted, rel=1e-12)
    assert factor(mscale=0.707, mscale_all_dim=0) == factor() == factor(factor=None)
    assert factor(attention_factor=1.5, mscale=0.707, mscale_all_dim=0.5) == 1.5
    assert factor(factor=0.5) == 1.0


def test_yarn_where_the_ramp_is_a_step():
    # In 6 positions the fastest pair turns not quite once: both ends of the ramp are rounded to 0.
    got = rope_frequencies(64, base=10000.0, scaling={**YARN, "original_max_position_embeddings": 6}).inv_freq
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
    got = rope_frequencies(8, base=10000.0, scaling=LONGROPE, max_position_embeddings=131072, seq_len=seq_len)
    np.testing.assert_allclose(got.inv_freq, [10**-k / f for k, f in enumerate(factors)], rtol=1e-14)
    assert got.attention_factor == pytest.approx(math.sqrt(1 + 5 / 12), rel=1e-15)
    got = rope_frequencies(8, base=10000.0, scaling={**LONGROPE, "attention_factor": 1.5}, seq_len=seq_len)
    assert got.attention_factor == 1.5
    got = rope_frequencies(8, base=10000.0, scaling={**LONGROPE, "factor": 0.5}, seq_len=seq_len)
    assert got.attention_factor == 1.0


def test_proportional_stops_the_rest():
    scaling = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0}
    got = rope_frequencies(8, base=10000.0, scaling=scaling).inv_freq
    np.testing.assert_allclose(got, [0.5, 0.05, 0, 0], rtol=1e-15)


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
    (ValueError, "the type of scaling is 'yarm'; expected one of default, linear, ntk, dynamic, yarn, llama3",
        {"scaling": {"type": "yarm"}}),
    (ValueError, "the type of scaling is ..; expected one of", {"scaling": {"type": []}}),
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
        rope_frequencies(**{"rotary_dim": 8, "base": 10000.0, **options})
