"""Formats of GGUF's blocks that are written: errors beside those of plain rounding, and odd numbers."""

import gguf
import numpy as np
import pytest

from fastattn._formats import FORMATS, feedback_of

WRITTEN = {name: x for name, x in FORMATS.items() if x.writer is not None}
each = pytest.mark.parametrize("name", WRITTEN)
ROWS, FEATURES = 24, 1024


def numbers(seed=0, kind="normal"):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((ROWS, FEATURES)) * rng.uniform(0.001, 10, (ROWS, 1))
    if kind == "outliers":
        x[:, ::100] *= 50
    if kind == "uniform":
        x = rng.uniform(-3, 1, x.shape)
    return x.astype(np.float32)


def decoded(block, blocks):
    return block.decoded(blocks.reshape(-1).view(np.uint8)).reshape(len(blocks), -1)


def again(name, x):
    return decoded(WRITTEN[name], WRITTEN[name].encoded(x))


def weighted(name, x, weights):
    """The numbers of blocks in which squares of errors have weights."""
    block = WRITTEN[name]
    parts, w = (np.ascontiguousarray(each, np.float32).reshape(-1, block.features) for each in (x, weights))
    blocks = block.fitted(parts, w, np.zeros(len(parts), block.fields))
    block.put(parts, blocks)
    return decoded(block, blocks.reshape(len(x), -1))


def half(x):
    return x.astype(np.float16).astype(np.float64)


def divided(a, b):
    return np.where(b == 0, 0, a / np.where(b == 0, 1, b))


def plain(name, x):
    """Numbers after plain rounding: a scale fits the ends of a group, and then all is rounded to nearest."""
    size = 16 if name == "Q6_K" else 32
    groups = x.astype(np.float64).reshape(len(x), -1, 256 // size if name.endswith("K") else 1, size)
    outermost = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)[..., 0]
    low, high = groups.min(-1), groups.max(-1)
    if name == "Q4_1":
        scale, minimum = half((high - low) / 15), half(low)
    elif name == "Q4_K":
        scale, minimum = (high - np.minimum(low, 0)) / 15, -np.minimum(low, 0)
        (scale, minimum) = (
            half(d) * np.rint(divided(y, half(d)))
            for y, d in ((y, y.max(-1, keepdims=True) / 63) for y in (scale, minimum))
        )
        minimum = -minimum
    else:
        scale, minimum = outermost / {"Q4_0": -8, "Q8_0": 127, "Q6_K": -32}[name], np.zeros(low.shape)
        if name == "Q6_K":
            d = half(np.abs(scale).max(-1, keepdims=True) / 127)
            scale = d * np.rint(divided(scale, d))
        else:
            scale = half(scale)
    codes = np.rint(divided(groups - minimum[..., None], scale[..., None]))
    codes = np.clip(codes, *{"Q4_0": (-8, 7), "Q8_0": (-127, 127), "Q6_K": (-32, 31)}.get(name, (0, 15)))
    return (scale[..., None] * codes + minimum[..., None]).reshape(x.shape)


def errors(x, y, size, importance=1.0):
    """Weighted sums of squares of blocks."""
    return (importance * (x.astype(float) - y) ** 2).reshape(-1, size).sum(axis=1)


@each
@pytest.mark.parametrize("kind", ["normal", "outliers", "uniform"])
def test_errors_are_below_those_of_plain_rounding(name, kind):
    x, size = numbers(kind=kind), WRITTEN[name].features
    got, expected = errors(x, again(name, x), size), errors(x, plain(name, x), size)
    assert (got <= expected * (1 + 1e-6)).all()
    assert got.sum() < (0.995 if name == "Q8_0" else 0.97) * expected.sum()


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_plain_rounding_is_that_of_gguf(name):
    """Plain rounding above is no straw man."""
    x, kind = numbers(), gguf.GGMLQuantizationType[name]
    expected = gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)
    got = plain(name, x)
    assert (np.abs(got - expected) < 1e-6 * np.abs(x).max()).mean() > 0.99


@each
def test_weights_move_errors_to_what_matters_less(name):
    x, size = numbers(), WRITTEN[name].features
    weights = np.tile(np.random.default_rng(1).exponential(size=FEATURES) ** 3, (ROWS, 1))
    with_weights, without = weighted(name, x, weights), again(name, x)
    assert errors(x, with_weights, size).sum() > errors(x, without, size).sum()
    got, plainly = (errors(x, y, size, weights).sum() for y in (with_weights, without))
    assert got < (0.999 if name == "Q8_0" else 0.97) * plainly


def representable(name, rng):
    """Blocks whose groups have their lowest and highest code, and whose scales have the highest."""
    block = WRITTEN[name]
    blocks = np.zeros(40, block.fields)
    blocks["d"] = rng.uniform(1e-4, 1, 40)
    low, high = block.writer.codes
    codes = rng.integers(low, high + 1, (40, block.features)).astype(np.int8)
    size = {"Q6_K": 16}.get(name, 32)
    codes[:, ::size], codes[:, 1::size] = low, high
    if name == "Q4_1":
        blocks["m"] = -7.5 * blocks["d"]
    if name == "Q4_K":
        blocks["dmin"] = blocks["d"]
        blocks["scales"] = rng.integers(128, 256, (40, 12))
        blocks["scales"][:, [0, 4]] = 255
    if name == "Q6_K":
        blocks["scales"] = rng.integers(20, 128, (40, 16))
        blocks["scales"][:, 3] = -128
    block.writer.put(blocks, codes)
    np.testing.assert_array_equal(block.parts(blocks).codes, codes)
    return decoded(block, blocks[:, None])


@each
def test_numbers_of_a_block_come_back(name):
    x = representable(name, np.random.default_rng(0))
    np.testing.assert_array_equal(again(name, x), x)


@each
def test_what_was_rounded_once_hardly_changes(name):
    """It may where a group has no code 0: minima have steps of their own."""
    x = numbers()
    once = again(name, x)
    assert np.mean(again(name, once) != once) < 0.02


@each
def test_odd_numbers(name):
    block = WRITTEN[name]
    zeros = np.zeros((2, block.features), np.float32)
    np.testing.assert_array_equal(again(name, zeros), zeros)
    for value in (1.0, -3.0, 0.3):
        got = again(name, np.full_like(zeros, value))
        np.testing.assert_allclose(got, value, rtol=2e-3 if name != "Q4_K" else 2e-2)
    one = zeros.copy()
    one[:, 7] = -5
    np.testing.assert_allclose(again(name, one), one, atol=5e-3)
    for tiny in (1e-45, 1e-40, 1e-30, 1e-9):
        got = again(name, tiny * numbers()[:, : block.features])
        assert np.isfinite(got).all()
        assert np.abs(got).max() <= max(10 * 40 * tiny, 1e-6)
    mixed = numbers()[:2, : block.features]
    mixed[:, 32:] *= 1e-30
    assert np.isfinite(again(name, mixed)).all()
    assert block.encoded(np.zeros((0, 512), np.float32)).shape == (0, 512 // block.features)


@each
def test_numbers_that_are_refused(name):
    block, x = WRITTEN[name], numbers()[:1, : WRITTEN[name].features]
    for value in (np.inf, -np.inf, np.nan, 1e30):
        with pytest.raises(ValueError, match=rf"values that are not finite as {name}; expected finite ones"):
            block.encoded(np.where(np.arange(x.size) == 3, value, x).astype(np.float32))
    with pytest.raises(ValueError, match=rf"rows of {block.features - 1} in {name}; expected multiples of"):
        block.encoded(x[:, 1:])


@each
def test_the_package_gguf_reads_the_same(name):
    x = numbers(seed=3)
    blocks = WRITTEN[name].encoded(x)
    kind = gguf.GGMLQuantizationType[name]
    data = np.ascontiguousarray(blocks).view(np.uint8).reshape(len(x), -1)
    np.testing.assert_array_equal(gguf.quants.dequantize(data, kind), decoded(WRITTEN[name], blocks))


@each
def test_pieces_do_not_change_blocks(name, monkeypatch):
    """Nor types and strides of the numbers."""
    x = numbers()
    expected = WRITTEN[name].encoded(x)
    monkeypatch.setattr("fastattn._formats._PIECE", 5 * WRITTEN[name].features)
    np.testing.assert_array_equal(WRITTEN[name].encoded(x), expected)
    wide = np.asfortranarray(x.astype(np.float64))
    np.testing.assert_array_equal(WRITTEN[name].encoded(wide), expected)


def correlated(seed=4, n=400):
    """Inputs (n, 512), in which neighbours are alike and a few features are large."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 512)).cumsum(axis=1) * 0.1 + rng.standard_normal((n, 512))
    return x * np.where(np.arange(512) % 50, 1, 10)


def test_feedback_is_a_root_of_the_inverse():
    x = correlated()
    moments = x.T @ x
    u = feedback_of(moments).astype(float)
    damped = moments / np.diag(moments).mean() + 0.01 * np.eye(512)
    np.testing.assert_allclose(u.T @ u @ damped, np.eye(512), atol=2e-3)
    np.testing.assert_array_equal(u, np.triu(u))
    assert np.isfinite(feedback_of(np.zeros((4, 4)))).all()


@each
def test_columns_make_up_for_the_errors_of_those_before_them(name):
    """Products with other inputs of the same kind err less, though weights err more."""
    block, rows, x = WRITTEN[name], numbers()[:, :512], correlated()
    got = decoded(block, block.compensated(rows, feedback_of(x.T @ x))).astype(float)
    plainly = again(name, rows).astype(float)
    for inputs, bound in ((x, 0.5), (correlated(5), 0.6)):
        errors = [((inputs @ (y - rows).T) ** 2).sum() for y in (got, plainly)]
        assert errors[0] < bound * errors[1]
    assert ((got - rows) ** 2).sum() > ((plainly - rows) ** 2).sum()
    with pytest.raises(ValueError, match="not finite"):
        block.compensated(np.full((1, 512), np.nan), feedback_of(x.T @ x))


@each
def test_inputs_that_do_not_correlate_need_no_feedback(name):
    rows = numbers()[:, :512]
    got = decoded(WRITTEN[name], WRITTEN[name].compensated(rows, feedback_of(np.eye(512))))
    expected = errors(rows, again(name, rows), 512)
    np.testing.assert_allclose(errors(rows, got, 512), expected, rtol=0.02)
    np.testing.assert_allclose(errors(rows, got, 512).sum(), expected.sum(), rtol=1e-3)
