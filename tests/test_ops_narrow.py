"""Products with weights in int8 and in blocks, by floats and by int8: against float64, by the definition."""

import copy
import math
import pickle

import ml_dtypes
import numpy as np
import pytest
from precisions import BF16

from fastattn import ops
from fastattn._args.packed import PackArgs, PackedLinear
from fastattn._reference.pack import put_codes

KINDS = ["int8", "q8", "int4", "uint4", "nf4", "iq4", "fp4"]
# Sizes around the kernels' passes (6, 12, 96), steps (4, 8), blocks (32), panels (32) and depth (1024, 4096).
SHAPES = [
    (1, 1, 1),
    (3, 5, 33),
    (5, 31, 3),
    (6, 64, 32),
    (7, 65, 17),
    (13, 257, 96),
    (70, 1027, 40),
    (97, 513, 40),
    (2, 4100, 65),
]
_NF4 = (
    "-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635"
    " -0.18477343022833234 -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725"
    " 0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0"
)
TABLES = {
    "nf4": np.array(_NF4.split(), np.float32),
    "iq4": np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32),
    "fp4": np.array([-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12], np.float32),
}
# What the number of largest magnitude of a block becomes, and how many scales another is off at most: between
# two numbers of the table half of their distance, at the other end of iq4 all that lies behind it.
EXTREMES = {"q8": 127, "int4": -8, "nf4": 1, "iq4": -127, "fp4": -12}
ERRORS = {"q8": 0.5, "nf4": 0.152 + 0.5 / 127, "iq4": 14.1, "fp4": 2}


def normal(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def with_outliers(x):
    """`x` with one channel 50 times as large as the others."""
    x = x.copy()
    x[..., x.shape[-1] // 3] *= 50
    return x


def divided(x, scales):
    return np.divide(x, scales, out=np.zeros_like(x), where=scales != 0)


def stored(weight, kind):
    """Round a float32 weight (n, k) as `pack` documents it.

    In float64: the numbers that are stored, those that multiply int8, and how far the latter may be off.
    """
    n, k = weight.shape
    if kind == "int8":
        scales = np.abs(weight).max(axis=1, initial=0, keepdims=True) / np.float32(127)
        values = np.clip(np.rint(divided(weight, scales)), -127, 127) * scales.astype(float)
        return values, values, np.broadcast_to(scales / 2, weight.shape).astype(float)
    blocks = np.zeros((n, -(-k // 32), 32), np.float32)
    blocks.reshape(n, blocks.shape[1] * 32)[:, :k] = weight
    if kind == "uint4":
        minima = blocks.min(axis=2, keepdims=True).astype(np.float16).astype(np.float32)
        above = blocks - minima
        largest = np.take_along_axis(above, np.abs(above).argmax(axis=2)[..., None], axis=2)
        scales = (largest / np.float32(15)).astype(np.float16).astype(np.float32)
        codes = np.clip(np.rint(divided(above, scales)), 0, 15)
        values = codes * scales.astype(float) + minima
        errors = np.abs(scales) / 2 + np.abs(minima) * 2.0**-11 + np.zeros_like(values)
        return [x.reshape(n, blocks.shape[1] * 32)[:, :k] for x in (values, values, errors)]
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2)[..., None], axis=2)
    largest = np.abs(largest) if EXTREMES[kind] > 0 else largest
    scales = (largest / np.float32(EXTREMES[kind])).astype(np.float16).astype(np.float32)
    each = divided(blocks, scales)
    if kind == "int4":
        codes = np.clip(np.rint(each), -8, 7)
        # The largest of a block is -8 scales; what is nearly as large on the other side becomes 7.
        errors = np.where(each > 7, 1, 0.5) * np.abs(scales)
        multiplied = codes
    else:
        if kind == "q8":
            codes = np.clip(np.rint(each), -127, 127)
        else:
            codes = TABLES[kind][np.abs(each[..., None] - TABLES[kind]).argmin(axis=-1)].astype(float)
        errors = np.broadcast_to(ERRORS[kind] * np.abs(scales), blocks.shape)
        multiplied = np.rint(codes * 127) / 127 if kind == "nf4" else codes
    results = (codes * scales.astype(float), multiplied * scales.astype(float), errors.astype(float))
    return [x.reshape(n, blocks.shape[1] * 32)[:, :k] for x in results]


def rounded(x):
    """Rows of float64 x in int8, as `linear` documents it: scales times integers, middles, and the scales.

    Also where a number is so nearly in the middle of two that float32 may take either.
    """
    low, high = (least(x, axis=-1, keepdims=True).astype(np.float32) for least in (np.min, np.max))
    middles = (low / 2 + high / 2).astype(float)  # rounded to float32
    scales = np.maximum(np.maximum(high - middles, middles - low), 2.0**-100) / 127
    each = (x - middles) / scales
    near = np.abs(np.abs(each - np.floor(each)) - 0.5) < 1e-4
    return np.rint(each) * scales, middles, scales, near


def products(x, weight, kind, activations):
    """The product in float64 by definition, and how far float32 may be off."""
    exact, multiplied, _ = stored(weight, kind)
    x = x.astype(float)
    sums = multiplied.sum(axis=1)
    roundings = 2.0**-24 * (8 + 2 * math.sqrt(x.shape[1]))
    if kind == "uint4":  # whose minima and what is above them may be larger than their sums
        roundings *= 4
    slack = roundings * (np.abs(x) @ np.abs(exact).T)
    if activations is None:
        return x @ exact.T, slack
    values, middles, scales, near = rounded(x)
    slack = slack + roundings * (np.abs(values) @ np.abs(multiplied).T) + 2.0**-22 * np.abs(middles * sums)
    return values @ multiplied.T + middles * sums, slack + (near * scales) @ np.abs(multiplied).T


def close(actual, expected, allowed):
    dtype = actual.dtype
    allowed = allowed + np.abs(expected) * float(ml_dtypes.finfo(dtype).eps)
    allowed = allowed + float(ml_dtypes.finfo(dtype).smallest_subnormal)
    error = np.abs(actual.astype(float) - expected)
    assert (error <= allowed).all(), f"{(error / allowed).max():.3g} of the bound"


@pytest.mark.parametrize("activations", [None, "int8"])
@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float16), BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_by_definition(implementation, shape, dtype, kind, outliers, activations):
    rows, k, n = shape
    rng = np.random.default_rng(k)
    x, weight = normal(rng, rows, k), normal(rng, n, k)
    if outliers:
        x, weight = with_outliers(x), with_outliers(weight)
    x = x.astype(dtype)
    got = ops.linear(x, ops.pack(weight, dtype=kind), activations=activations)
    assert got.dtype == dtype
    close(got, *products(x, weight, kind, activations))


@pytest.mark.parametrize("offset", [0, 3, -1000])
@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_stated_bounds(implementation, kind, outliers, offset):
    """The unrounded product keeps the bound that the documentation of `linear` states."""
    rng = np.random.default_rng(0)
    x, weight = normal(rng, 40, 300), normal(rng, 50, 300)
    if outliers:
        x, weight = with_outliers(x), with_outliers(weight)
    if offset:
        x += np.float32(offset)
    _, _, errors = stored(weight, kind)
    dx = np.ptp(x, axis=1, keepdims=True) / 254
    x, weight = x.astype(float), weight.astype(float)
    slack = 2.0**-20 * (np.abs(x) @ np.abs(weight).T)
    packed = ops.pack(weight, dtype=kind)
    bound = np.abs(x) @ errors.T
    close(ops.linear(x.astype(np.float32), packed), x @ weight.T, bound + slack)
    bound = bound + (dx / 2) * (np.abs(weight) + errors).sum(axis=1)
    close(ops.linear(x.astype(np.float32), packed, activations="int8"), x @ weight.T, bound + slack)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (33, 7), (40, 32), (3, 95), (65, 320), (0, 4), (3, 0)], ids=str)
def test_what_pack_stores(shape, kind):
    rng = np.random.default_rng(2)
    for weight in (normal(rng, *shape), with_outliers(normal(rng, *shape)) if shape[1] else None):
        if weight is None:
            continue
        gate = normal(rng, *shape)
        gate[: len(gate) // 2] = 0  # such rows have a scale of 0
        packed = ops.pack(weight, gate=gate, dtype=kind)
        back = packed.unpack()
        for actual, given in zip(back, (gate, weight), strict=True):
            exact, _, errors = stored(given, kind)
            np.testing.assert_allclose(actual, exact, rtol=2**-23, atol=0)
            assert (np.abs(exact - given) <= errors * 1.001).all()  # a scale in float16 rounds, too


@pytest.mark.parametrize("kind", KINDS[1:])
def test_pack_in_blocks_of_tiny_and_large_numbers(kind):
    for size in (1e-9, 1e-7, 2e-7, 7e-7, 1e-6, 1e-4, 6e4):
        weight = size * np.random.default_rng(3).uniform(-1, 1, (5, 64)).astype(np.float32)
        exact, _, errors = stored(weight, kind)
        back = ops.pack(weight, dtype=kind).unpack()
        np.testing.assert_allclose(back, exact, rtol=2**-23, atol=0)
        # A scale that is denormal in float16, times the largest code, and a minimum.
        coarse = (15 + 1 if kind == "uint4" else abs(EXTREMES[kind])) * 2.0**-25
        assert (np.abs(back - weight) <= np.abs(errors) * 1.005 + coarse).all()


@pytest.mark.parametrize("activations", [None, "int8"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float16), BF16], ids=str)
def test_epilogue(implementation, dtype, gated, kind, activations):
    rng = np.random.default_rng(4)
    x, weight, gate = normal(rng, 14, 71, dtype=dtype), normal(rng, 45, 71), normal(rng, 45, 71)
    bias, residual = normal(rng, 1 + gated, 45), normal(rng, 14, 45, dtype=dtype)
    first, bound = products(x, gate if gated else weight, kind, activations)
    first = first + bias[0]
    expected = first * (0.5 + 0.5 * np.tanh(first / 2))  # silu, whose slope is below 1.1
    bound = 1.1 * bound + 1e-6
    if gated:
        second, its_bound = products(x, weight, kind, activations)
        second = second + bias[1]
        bound = bound * (np.abs(second) + its_bound) + its_bound * np.abs(expected)
        expected = expected * second
    packed = ops.pack(weight, gate=gate if gated else None, dtype=kind)
    options = {"activation": "silu", "activations": activations}
    given = residual.copy()
    got = ops.linear(x, packed, bias if gated else bias[0], residual=given, out=given, **options)
    assert got is given
    bound = bound + 2.0**-22 * (np.abs(expected) + np.abs(residual.astype(float)))
    close(got, expected + residual.astype(float), bound)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_not_numbers(implementation, kind):
    """Such a row is NaN, and the others keep their bits; so does a row of zeros, and one of denormals."""
    rng = np.random.default_rng(5)
    for n, rows in ((40, 9), (200, 100)):
        x, packed = normal(rng, rows, 77), ops.pack(normal(rng, n, 77), dtype=kind)
        clean = ops.linear(x, packed, activations="int8")
        for wrong in (np.nan, np.inf, -np.inf):
            bad = x.copy()
            bad[2, 76], bad[5] = wrong, 0
            got = ops.linear(bad, packed, activations="int8")
            assert np.isnan(got[2]).all()
            assert not got[5].any()
            others = np.setdiff1d(np.arange(rows), [2, 5])
            np.testing.assert_array_equal(got[others], clean[others])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_one_value_or_two_are_exact(implementation, kind):
    """The middle is then the value, or the two are the ends: rounding x loses nothing."""
    rng = np.random.default_rng(12)
    weight, bias = normal(rng, 40, 77), normal(rng, 40)
    ones, values = np.ones(77, np.float32), np.array([0.3, -1e-41, 3e5, -7, 1e-30], np.float32)
    packed = ops.pack(weight, dtype=kind)
    multiplied = stored(weight, kind)[1]
    sums = multiplied.sum(axis=1)
    got = ops.linear(values[:, None] * ones, packed, bias, activations="int8")
    expected = values[:, None].astype(float) * sums
    close(got, expected + bias, 2.0**-22 * (np.abs(expected) + np.abs(bias)) + 2.0**-100)
    np.testing.assert_array_equal(ops.linear(0 * ones, packed, bias, activations="int8"), bias)
    np.testing.assert_array_equal(ops.linear(-0.0 * ones, packed, bias, activations="int8"), bias)
    for low, high in ((0, 1), (-3, 7), (1000, np.nextafter(np.float32(1000), np.float32(2000)))):
        x = np.where(rng.random((6, 77)) < 0.5, low, high).astype(np.float32)
        _, middles, _, _ = rounded(x)
        expected = (x - middles) @ multiplied.T + middles * sums
        parts = np.abs(x - middles) @ np.abs(multiplied).T + np.abs(middles * sums)
        close(ops.linear(x, packed, activations="int8"), expected, 2.0**-20 * parts)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 9, 17, 35])
@pytest.mark.parametrize("sign", [1, -1])
def test_ranges_of_short_rows(implementation, k, sign):
    """Nothing beside a row is in its range, of lanes that it does not fill either; nor is 0."""
    rng = np.random.default_rng(k)
    x = sign * rng.uniform(1000, 1001, (4, k)).astype(np.float32)
    weight = rng.uniform(-1, 1, (33, k)).astype(np.float32)
    packed = ops.pack(weight, dtype="int8")
    exact = x.astype(float) @ packed.unpack().T.astype(float)
    bound = 0.5 / 254 * np.abs(weight).sum(axis=1) + 2.0**-22 * 1001 * np.abs(weight).sum(axis=1)
    close(ops.linear(x, packed, activations="int8"), exact, 1.01 * bound)


@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-37, 1e-31, 1e-29, 3e38])
@pytest.mark.parametrize("kind", KINDS)
def test_tiny_and_huge_rows(implementation, kind, size):
    rng = np.random.default_rng(6)
    with np.errstate(under="ignore"):
        x = (size * rng.uniform(-1, 1, (5, 33))).astype(np.float32)
    x[1] = normal(rng, 33)
    weight = rng.uniform(-0.03, 0.03, (20, 33)).astype(np.float32)
    got = ops.linear(x, ops.pack(weight, dtype=kind), activations="int8")
    close(got, *products(x, weight, kind, "int8"))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_copies(implementation, kind, gated):
    rng = np.random.default_rng(9)
    x, weight = normal(rng, 3, 70), normal(rng, 50, 70)
    packed = ops.pack(weight, gate=weight[::-1] if gated else None, dtype=kind)
    expected = ops.linear(x, packed, activations="int8")
    for made in (copy.copy(packed), copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert repr(made) == repr(packed)
        assert made.nbytes == packed.nbytes
        assert not made.panels.flags.writeable
        np.testing.assert_array_equal(made.unpack(), packed.unpack())
        np.testing.assert_array_equal(ops.linear(x, made, activations="int8"), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_memory(kind):
    """4 bits and a scale, in uint4 a minimum, of 16 bits for 32 numbers; 8 bits and 32 for an output feature.

    Each has a sum of 32 bits for an output feature, too; q8 has 8 bits and the scales of 4.
    """
    packed, bits = ops.pack(np.ones((64, 96), np.float32), dtype=kind), {"uint4": 5, "q8": 8.5}.get(kind, 4.5)
    assert packed.nbytes == 64 * 4 + (64 * 96 + 64 * 4 if kind == "int8" else 64 * 96 * bits / 8)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_table(kind):
    packed = ops.pack(normal(np.random.default_rng(10), 70, 50), dtype=kind)
    ids = np.array([0, 69, 31, 32, 31])
    np.testing.assert_array_equal(packed.rows(ids), packed.unpack()[ids])
    assert packed.rows(ids[:0]).shape == (0, 50)


X = np.ones((2, 4), np.float32)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_activations_need_narrow_weights(kind):
    message = (
        rf"^linear\(\): activations is 'int8' for weights in {kind}; expected weights in int8, q8, int4,"
    )
    with pytest.raises(ValueError, match=message):
        ops.linear(X, ops.pack(np.ones((3, 4), np.float32), dtype=kind), activations="int8")


@pytest.mark.parametrize(
    "wrong", ["int4", "float32", "", 8, np.int8, ["int8"], (0, 1), np.array(["int8", "int8"])]
)
def test_activations_that_are_not_known(wrong):
    with pytest.raises((TypeError, ValueError), match=r"^linear\(\): activations is .*; expected"):
        ops.linear(X, ops.pack(np.ones((3, 4), np.float32), dtype="int8"), activations=wrong)


def test_more_features_than_integers_can_sum():
    """So many products of 127 and -128 fit 32 bits, and not one more; blocks of 4 bits always do."""
    most = math.floor((2**31 - 1) / (127 * 128))
    x = np.ones((1, most + 1), np.float32)
    with pytest.raises(ValueError, match=f"weight has {most + 1} input features; expected at most {most}"):
        ops.linear(x, ops.pack(x, dtype="int8"), activations="int8")
    got = ops.linear(x, ops.pack(x, dtype="nf4"), activations="int8")
    np.testing.assert_allclose(got, [[most + 1]], rtol=1e-4)


def test_the_most_features(implementation):
    most = math.floor((2**31 - 1) / (127 * 128))
    x = np.ones((2, most), np.float32) * np.array([[1], [-1]], np.float32)
    for kind in ("int8", "nf4"):
        got = ops.linear(x, ops.pack(x[:1], dtype=kind), activations="int8")
        np.testing.assert_allclose(got, [[most], [-most]], rtol=1e-4)
    packed = ops.pack(x[:1], dtype="int8")
    lowest, scales = np.full_like(packed.panels, -128), np.ones_like(packed.scales)
    sums = np.full_like(scales, -128.0 * most)
    made = PackedLinear(most, 1, False, "int8", lowest, scales, sums)  # pack() makes no -128
    got = ops.linear(x, made, activations="int8")
    np.testing.assert_allclose(got, [[-128.0 * most], [128.0 * most]], rtol=1e-4)


@pytest.mark.parametrize("activations", [None, "int8"])
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("minima", [False, True])
@pytest.mark.parametrize("kind", ["q8", "int4", "uint4", "iq4"])
def test_blocks_of_files(implementation, kind, minima, block, activations):
    """Blocks of 16 that have scales, and minima where the type can have them, as files have them."""
    rows, k, n, rng = 15, 544, 96, np.random.default_rng(block)
    has_minima = minima if kind == "q8" else kind == "uint4"
    args = PackArgs([], k, n // 2, 2, kind, 1)
    args.set_blocks(block, has_minima)
    numbers = {"q8": np.arange(-128, 128), "int4": np.arange(-8, 8), "uint4": np.arange(16), **TABLES}[kind]
    weights = []
    for map_ in range(2):
        codes = rng.integers(0, len(numbers), (64, k))
        scales, lowest = (rng.uniform(-0.1, 0.1, (64, k // block)).astype(np.float16) for _ in range(2))
        given = lowest if has_minima else np.zeros_like(lowest)
        put_codes(args, map_, numbers[codes].astype(np.int8), scales, given)
        wide = numbers[codes] * np.repeat(scales, block, axis=1).astype(float)
        wide += np.repeat(lowest, block, axis=1) if has_minima else 0
        weights.append(wide[: n // 2])
    packed, x = args.packed(), normal(rng, rows, k)
    assert packed.block == block
    np.testing.assert_allclose(packed.unpack(), weights, rtol=2**-23, atol=2**-22)
    for weight, sums in zip(weights, packed.sums.reshape(-1, 2, 32).swapaxes(0, 1), strict=True):
        np.testing.assert_allclose(sums.ravel()[: n // 2], weight.sum(axis=1), rtol=1e-5, atol=1e-5)
    values = x.astype(float)
    if activations:
        by_eights, middles, _, _ = rounded(x)
        values = by_eights + middles
    up, gate = values @ weights[1].T, values @ weights[0].T
    expected, size = gate / (1 + np.exp(-gate)) * up, np.abs(values) @ np.abs(weights).swapaxes(1, 2)
    got = ops.linear(x, packed, activation="silu", activations=activations)
    slack = 2.0**-21 * (np.abs(up) * size[0] * 1.1 + (np.abs(gate) + size[0] * 2.0**-21) * size[1])
    near = rounded(x)[3] * np.abs(values).max() / 60 if activations else np.zeros_like(values)
    slack += (near @ np.abs(weights[0]).T) * np.abs(up) * 1.1 + (near @ np.abs(weights[1]).T) * np.abs(gate)
    close(got, expected, slack)
    for each in (1, 5):
        same = ops.linear(x[:each], packed, activation="silu", activations=activations)
        if implementation != "numpy":  # whose products are BLAS's
            np.testing.assert_array_equal(same, got[:each])
    dy = normal(rng, rows, 2, n // 2)
    turned = ops.linear(dy, packed, transposed=True)
    exact = dy[:, 0] @ weights[0] + dy[:, 1] @ weights[1]
    close(turned, exact, 2.0**-20 * np.einsum("rmn,mnk->rk", np.abs(dy), np.abs(weights)))
    again = pickle.loads(pickle.dumps(packed))
    np.testing.assert_array_equal(again.unpack(), packed.unpack())


@pytest.mark.parametrize("kind", ["int4", "uint4", "nf4"])
def test_packed_weights_made_by_hand(kind):
    packed = ops.pack(np.ones((50, 40), np.float32), dtype=kind)
    sizes = {"in_features": 40, "out_features": 50, "gated": False, "dtype": kind}
    sizes |= {"sums": packed.sums, "minima": packed.minima}
    made = PackedLinear(**sizes, panels=packed.panels, scales=packed.scales)
    np.testing.assert_array_equal(made.unpack(), packed.unpack())
    with pytest.raises(ValueError, match=r"panels has shape \(2, 8, 32, 4\).*expected \(2, 12, 32, 4\)"):
        PackedLinear(**{**sizes, "in_features": 65}, panels=packed.panels, scales=packed.scales)
    with pytest.raises(
        ValueError, match=r"scales has shape \(2, 2, 32\) and dtype float32; expected .*float16"
    ):
        PackedLinear(**sizes, panels=packed.panels, scales=packed.scales.astype(np.float32))
    with pytest.raises(TypeError, match="scales is of type NoneType"):
        PackedLinear(**sizes, panels=packed.panels, scales=None)
    with pytest.raises(TypeError, match="sums is of type NoneType"):
        PackedLinear(**{**sizes, "sums": None}, panels=packed.panels, scales=packed.scales)
    with pytest.raises(ValueError, match=r"sums has shape \(1, 32\) and dtype float32; expected \(2, 32\)"):
        PackedLinear(**{**sizes, "sums": packed.sums[:1]}, panels=packed.panels, scales=packed.scales)
