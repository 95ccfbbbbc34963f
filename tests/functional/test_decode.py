"""Short queries against long caches: what a language model does for each new token."""

import numpy as np
import pytest
from oracle import case, check, expect, spread_inputs

import fastattn
from fastattn._bench.cases import DTYPES, Shape, combine

GROUPS = (1, 4, 8, 32)

every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def attention(q, k, v, **arguments):
    return fastattn.attention(q, k, v, **arguments, return_lse=True)


def check_case(shape, variants, dtype, **how):
    this = case(shape, variants, dtype, **how)
    check(attention(this.q, this.k, this.v, **this.arguments), this.expected)


def shape_of(group, len_q=1, len_k=700, batch=2, heads_kv=2, head_dim=32):
    return Shape("", batch, heads_kv * group, heads_kv, len_q, len_k, head_dim)


@pytest.mark.parametrize("len_k", [511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049, 4097, 9000])
@pytest.mark.parametrize("group", [1, 8, 32])
def test_long_caches(group, len_k, implementation):
    """Lengths around every place where a long cache may be split."""
    check_case(shape_of(group, len_k=len_k, batch=1), ("plain",), "float32")


@every_dtype
@pytest.mark.parametrize("group", [1, 8])
def test_a_very_long_cache(group, dtype, implementation):
    check_case(shape_of(group, len_k=20011, batch=1, heads_kv=1), ("sinks",), dtype)


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("len_q", [1, 3, 33])
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("variant", ["plain", "kv_lengths", "bias"])
def test_a_16_bit_cache_of_float32_queries(variant, group, len_q, kv_dtype, implementation):
    check_case(shape_of(group, len_q), (variant,), "float32", kv_dtype=kv_dtype)


@pytest.mark.parametrize("variant", ["causal", "window", "alibi", "sinks", "mask", "bias_heads", "softcap"])
@pytest.mark.parametrize("group", GROUPS)
def test_a_cache_that_is_not_full(group, variant, implementation):
    """Each sequence has its own length, and its last query stands at its own last key."""
    shape = shape_of(group, len_q=3)
    rng = np.random.default_rng(0)
    q, k, v = spread_inputs(shape, "float32", rng)
    arguments = {**combine((variant,), shape, rng), "kv_lengths": np.array([3, 400])}
    k[0, :, 3:], v[0, :, 3:] = np.nan, np.inf
    k[1, :, 400:], v[1, :, 400:] = np.nan, np.inf
    check(attention(q, k, v, **arguments), expect(q, k, v, **arguments))


@every_dtype
def test_token_by_token_is_causal_attention(dtype, implementation):
    """A cache that grows by a token a step gives, row for row, what one causal call gives."""
    shape = Shape("", batch=2, heads_q=4, heads_kv=2, len_q=40, len_k=40, head_dim=16)
    q, k, v = spread_inputs(shape, dtype, np.random.default_rng(0))
    expected = expect(q, k, v, causal=True)
    check(attention(q, k, v, causal=True), expected)
    steps = [attention(q[:, :, t : t + 1], k, v, causal=True, kv_lengths=t + 1) for t in range(40)]
    check([np.concatenate(parts, axis=2) for parts in zip(*steps, strict=True)], expected)


@every_dtype
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("len_q", range(1, 34))
def test_groups_and_rows_sweep(len_q, group, dtype, implementation):
    check_case(shape_of(group, len_q, len_k=130, batch=1), ("causal",), dtype)


def test_rows_that_end_before_others(implementation):
    """The splits of a cache that few rows attend are those of the row that ends last, wherever it is."""
    this = case(shape_of(2, len_q=4, len_k=2100), ("plain",), "float32")
    for ends in ([2100, 30, 700, 5], [5, 2100, 0, 600]):
        ranges = {"row_ranges": (0, np.array(ends))}
        check(attention(this.q, this.k, this.v, **ranges), expect(this.q, this.k, this.v, **ranges))
