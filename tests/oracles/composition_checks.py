"""Arrays for tests of compositions, and how their results are compared with formulas in float64."""

import numpy as np
import pytest

B, H, N, D, V = 2, 3, 70, 16, 24  # more than two chunks of 32 tokens, and a part of one
DTYPES = [np.dtype(np.float32), np.dtype(np.float64)]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def drawn(dtype, *shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def tokens(dtype, *dims, heads=H, length=N):
    return drawn(dtype, *((B, heads, length, dim) for dim in dims))


def close(got, expected, dtype, factor=64):
    """`got` may be off by `factor` roundings of the largest number of its row, or by 1/16 of it of all."""
    assert got.dtype == dtype
    assert got.shape == expected.shape
    assert np.isfinite(expected).all()
    most = np.abs(expected).max(axis=-1, keepdims=True)
    bound = factor * np.finfo(dtype).eps * (most + np.abs(expected).max() / 16)
    error = np.abs(got - expected)
    assert (error <= bound).all(), f"{(error / bound).max():.3g} of the bound"


def means(weights, v):
    """Means of values by weights (..., len, len) of the tokens up to each one."""
    weights = np.tril(weights)
    return weights / weights.sum(-1, keepdims=True) @ v
