"""The dtypes of kernels and their roundings."""

import ml_dtypes
import numpy as np
import pytest

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), BF16]
EPS = {np.dtype(np.float32): 2**-23, np.dtype(np.float64): 2**-52, np.dtype(np.float16): 2**-10, BF16: 2**-7}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def close(got, expected, error, dtype):
    """`got` is off by at most `error`, and by a rounding to its dtype."""
    assert got.dtype == dtype
    assert got.shape == expected.shape
    smallest = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    allowed = error + EPS[np.dtype(dtype)] * np.abs(expected) + smallest
    off = np.abs(got.astype(np.float64) - expected)
    assert (off <= allowed).all(), f"{np.max(off / allowed):.3g} of the bound"


def lane(dtype):
    """The dtype in which kernels compute."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)
