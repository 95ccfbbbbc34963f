"""Packing: the kernel gives the bits of its NumPy twin, and reads rows however they lie."""

import ml_dtypes
import numpy as np
import pytest

from fastattn import ops
from fastattn._args.packed import WEIGHT_DTYPES

BF16 = ml_dtypes.bfloat16
SOURCES = [np.float32, np.float64, np.float16, BF16]
SHAPES = [(1, 1), (33, 7), (64, 64), (70, 95), (40, 1025), (3, 2050), (35, 8195), (5, 9000), (0, 4), (3, 0)]


def weights(shape, source, seed=0):
    """Numbers of all magnitudes, with ties, zeros and a row of denormal ones."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    x[::3] = np.rint(x[::3] * 4) / 4  # ties between magnitudes of either sign, and halfway to the next code
    x[1::5] *= 2.0 ** rng.integers(-20, 4, x[1::5].shape)
    x[2::7, : shape[1] // 2] = -0.0
    x[4:5] *= 2.0**-145
    return x.astype(source)


def layouts(x):
    """The same numbers in different strides."""
    yield x
    yield np.asfortranarray(x)
    yield np.repeat(np.repeat(x, 2, axis=0), 3, axis=1)[::2, ::3]
    yield np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1]
    wide = np.zeros((x.shape[0], x.shape[1] + 5), x.dtype)
    wide[:, 3:-2] = x
    yield wide[:, 3:-2]
    yield x.astype(x.dtype.newbyteorder())
    unaligned = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    unaligned[...] = x
    yield unaligned


def assert_same(a, b):
    np.testing.assert_array_equal(a.panels.view(np.uint8), b.panels.view(np.uint8))
    assert (a.scales is None) == (b.scales is None)
    if a.scales is not None:
        np.testing.assert_array_equal(a.scales.view(np.uint8), b.scales.view(np.uint8))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("source", SOURCES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_bits_are_those_of_the_twin(dtype, source, shape, implementation):
    x, gate = weights(shape, source), weights(shape, source, 1)
    expected = ops.pack(x, dtype=dtype, backend="numpy")
    for array in layouts(x):
        assert_same(ops.pack(array, dtype=dtype), expected)
    gated = ops.pack(x, gate=gate, dtype=dtype)
    assert_same(gated, ops.pack(x, gate=gate, dtype=dtype, backend="numpy"))
    assert gated.panels[1::2].tobytes() == expected.panels.tobytes()
    for threads in (1, 2, 5):
        assert_same(ops.pack(x, dtype=dtype, num_threads=threads), expected)
