"""The dtypes of kernels and their roundings."""

import ml_dtypes
import numpy as np
import pytest

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), BF16]
EPS = {np.dtype(np.float32): 2**-23, np.dtype(np.float64): 2**-52, np.dtype(np.float16): 2**-10, BF16: 2**-7}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def lane(dtype):
    """The dtype in which kernels compute."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)
