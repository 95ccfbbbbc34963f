"""Random inputs of variants of attention, which `same_draws` begins anew for each test."""

import numpy as np

from fastattn._bench.cases import as_dtype

RNG = np.random.default_rng(0)


def normal(*shape, dtype="float32"):
    return RNG.standard_normal(shape).astype(as_dtype(dtype))


def qkv(len_q, len_k, dtype="float32", heads=4, heads_kv=2, dim=16, dim_v=12, batch=(2,)):
    return (
        normal(*batch, heads, len_q, dim, dtype=dtype),
        normal(*batch, heads_kv, len_k, dim, dtype=dtype),
        normal(*batch, heads_kv, len_k, dim_v, dtype=dtype),
    )


def assert_near(got, expected, dtype, atol):
    assert got.dtype == as_dtype(dtype)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got.astype(np.float64), expected, atol=atol, rtol=0)
