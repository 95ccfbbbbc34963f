"""Products with the weight, not its transpose, from the same panels: against float64, and their promises."""

import math

import numpy as np
import pytest
from precisions import BF16

from fastattn import ops
from fastattn._args.weight_types import WEIGHT_DTYPES

ROUNDING = {np.dtype(np.float32): 2**-24, np.dtype(np.float64): 2**-53, BF16: 2**-8}
# Rows, output and input features of the weight: around passes (12), panels (16, 32), and parts (256, 1024).
SHAPES = [(1, 1, 1), (3, 33, 31), (13, 257, 64), (65, 31, 100), (2, 1100, 70), (130, 300, 40)]


def problem(shape, weight_dtype, gated, dtype=None):
    """x, the packed weight, and what they give in float64 with the sum of the terms' magnitudes."""
    m, n, k = shape
    rng = np.random.default_rng(m)
    lane = np.float64 if weight_dtype == "float64" else np.float32
    weight, gate = rng.standard_normal((2, n, k)).astype(lane)
    packed = ops.pack(weight, gate=gate if gated else None, dtype=weight_dtype)
    x = rng.standard_normal((m, 2, n) if gated else (m, n)).astype(dtype or lane)
    maps = 1 + gated
    flat, rows = x.reshape(m, maps * n).astype(float), packed.unpack().astype(float).reshape(maps * n, k)
    return x, packed, flat @ rows, np.abs(flat) @ np.abs(rows)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_by_definition(implementation, shape, weight_dtype, gated):
    x, packed, expected, terms = problem(shape, weight_dtype, gated)
    result = ops.linear(x, packed, transposed=True)
    assert result.shape == expected.shape
    assert result.dtype == x.dtype
    unit = ROUNDING[x.dtype]  # one accumulator sums 256 products, whose roundings are a random walk
    bound = unit * (2 + math.sqrt(256)) * terms
    if weight_dtype == "bfloat16" and implementation == "amx":  # whose tiles take x in bfloat16
        bound += ROUNDING[BF16] * terms
    assert (np.abs(result - expected) <= bound).all()


@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16", "int4"])
def test_x_in_bfloat16_is_not_rounded_again(implementation, weight_dtype):
    x, packed, expected, terms = problem((7, 90, 40), weight_dtype, False, BF16)
    result = ops.linear(x, packed, transposed=True).astype(float)
    assert (np.abs(result - expected) <= ROUNDING[BF16] * np.abs(expected) + 2**-20 * terms).all()


@pytest.mark.parametrize("gated", [False, True])
def test_epilogue_and_leading_dimensions(implementation, gated):
    x, packed, expected, _ = problem((6, 70, 45), "int8", gated)
    rng = np.random.default_rng(2)
    bias, residual = (
        rng.standard_normal(45).astype(np.float32),
        rng.standard_normal((2, 3, 45)).astype(np.float32),
    )
    apart = np.repeat(x.reshape(2, 3, *x.shape[1:]), 2, axis=-1)[..., ::2]  # its last axis is not contiguous
    out = np.empty((2, 3, 45), np.float32)
    result = ops.linear(apart, packed, bias, activation="relu", residual=residual, transposed=True, out=out)
    assert result is out
    expected = np.maximum(expected + bias, 0).reshape(2, 3, 45) + residual
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
def test_bits_depend_on_the_row_alone(implementation, weight_dtype):
    x, packed, _, _ = problem((150, 1105, 70), weight_dtype, True)
    whole = ops.linear(x, packed, transposed=True, num_threads=1)
    np.testing.assert_array_equal(ops.linear(x, packed, transposed=True, num_threads=3), whole)
    if implementation != "numpy":  # whose BLAS chooses by shape
        for size in (1, 5, 70):
            rows = slice(7, 7 + size)
            np.testing.assert_array_equal(ops.linear(x[rows], packed, transposed=True), whole[rows])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_empty(implementation, shape, gated):
    x, packed, expected, _ = problem(shape, "float32", gated)
    np.testing.assert_array_equal(ops.linear(x, packed, transposed=True), expected)


def test_one_feature_of_each_map(implementation):
    """Both may lie apart, as a view of more features has them."""
    packed = ops.pack(np.ones((1, 4), np.float32), gate=np.full((1, 4), 2, np.float32))
    x = np.arange(30, dtype=np.float32).reshape(5, 2, 3)[:, :, :1]
    expected = 2 * x[:, 0] + x[:, 1]
    np.testing.assert_array_equal(ops.linear(x, packed, transposed=True), np.broadcast_to(expected, (5, 4)))


def test_errors():
    packed = ops.pack(np.ones((3, 4), np.float32))
    pair = ops.pack(np.ones((3, 4)), gate=np.ones((3, 4)), dtype="int8")
    x = np.ones((2, 3), np.float32)
    with pytest.raises(
        ValueError, match=r"linear\(\): x has shape \(2, 4\); expected \(\.\.\., 3\) for this"
    ):
        ops.linear(np.ones((2, 4), np.float32), packed, transposed=True)
    with pytest.raises(ValueError, match=r"x has shape \(1, 3\); expected \(\.\.\., 2, 3\) for this weight"):
        ops.linear(x[:1], pair, transposed=True)
    with pytest.raises(ValueError, match=r"bias has shape \(3,\); expected \(4,\)"):
        ops.linear(x, packed, np.ones(3, np.float32), transposed=True)
    with pytest.raises(ValueError, match="activations is 'int8'; expected None for a transposed product"):
        ops.linear(x[:, None].repeat(2, 1), pair, activations="int8", transposed=True)
    with pytest.raises(TypeError, match="transposed is 1; expected True or False"):
        ops.linear(x, packed, transposed=1)
