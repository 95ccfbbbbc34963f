"""Sigmoid attention against its formula, sigmoid(scores + bias) @ v, in float64."""

from math import log

import naive
import numpy as np
import pytest
from oracle import assert_close, assert_same_bits, eps, garbage_behind_masks, spread_inputs, with_array
from shapes import EDGES

from fastattn import functional
from fastattn._bench.cases import DTYPES, STRUCTURES, VARIANTS, Shape, combine

SHAPES = {**EDGES, "many rows and keys": Shape("", 1, 2, 1, 40, 9000, 4, 4)}

RNG = np.random.default_rng(0)
WITHOUT_SINKS = [name for name, make in VARIANTS.items() if "sinks" not in make(SHAPES["self"], RNG)]


@np.errstate(all="ignore")
def by_definition(q, k, v, sigmoid_bias, dtype, **arguments):
    """The reference in float64 or wider. In a narrower dtype scores, weights and output are rounded to it."""
    scores, attend = naive.masked_scores(q, k, **arguments, dtype=dtype)
    weights = 1 / (1 + np.exp(-(scores + scores.dtype.type(sigmoid_bias))))
    weights = weights.astype(dtype).astype(scores.dtype)
    weights = np.where(attend, weights, 0)
    return naive.average(weights, v, attend).astype(dtype), weights


def check(got, q, k, v, sigmoid_bias, **arguments):
    """The bound: max|out - ref| <= 2 max|plain - ref| + 4 eps max|v| sum of weights."""
    arguments = with_array(arguments, q, k)
    wide = np.longdouble if q.dtype == np.float64 else np.float64
    ref, weights = by_definition(q, k, v, sigmoid_bias, wide, **arguments)
    plain, _ = by_definition(q, k, v, sigmoid_bias, q.dtype, **arguments)
    finite = np.isfinite(ref)
    error = abs(np.where(finite, plain.astype(wide), 0) - np.where(finite, ref, 0)).max(initial=0)
    largest = abs(v.astype(wide)).max(initial=0, where=np.isfinite(v))
    unit = eps(q.dtype) * largest * np.maximum(1, weights.sum(-1, keepdims=True))
    assert (got.dtype, got.shape) == (q.dtype, ref.shape)
    assert_close(got, ref, 2 * error + 4 * unit + 0 * np.where(finite, ref, 0))


def call(shape, variant, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = spread_inputs(shape, dtype, rng)
    arguments = combine((variant,), shape, rng)
    return q, k, v, arguments


@pytest.mark.parametrize("variant", WITHOUT_SINKS)
@pytest.mark.parametrize("name", SHAPES)
def test_variants(name, variant, implementation):
    q, k, v, arguments = call(SHAPES[name], variant)
    check(functional.sigmoid_attention(q, k, v, **arguments), q, k, v, -log(k.shape[-2]), **arguments)


@pytest.mark.parametrize("sigmoid_bias", [None, 0, -20.0, 60.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_dtypes(name, dtype, sigmoid_bias, implementation):
    q, k, v, arguments = call(SHAPES[name], "causal", dtype)
    got = functional.sigmoid_attention(q, k, v, sigmoid_bias=sigmoid_bias, **arguments)
    check(got, q, k, v, -log(k.shape[-2]) if sigmoid_bias is None else sigmoid_bias, **arguments)


@pytest.mark.parametrize("structure", ["streaming", "strided", "mixed_documents"])
@pytest.mark.parametrize("name", SHAPES)
def test_structures(name, structure, implementation):
    shape, rng = SHAPES[name], np.random.default_rng(4)
    q, k, v = spread_inputs(shape, "float32", rng)
    mask = STRUCTURES[structure](shape, rng)
    check(functional.sigmoid_attention(q, k, v, mask=mask), q, k, v, -log(shape.len_k), mask=mask)


def test_large_scores(implementation):
    """Huge scores give weights of exactly 0 and 1, and nothing overflows."""
    q = np.array([[[[1e3], [-1e3], [3e38], [-3e38], [0.0]]]], np.float32)
    k = np.array([[[[1.0], [3e38], [0.5], [0.0]]]], np.float32)
    with np.errstate(all="ignore"):
        got = functional.sigmoid_attention(q, k, np.ones_like(k), sigmoid_bias=0.0, scale=1.0)
        check(got, q, k, np.ones_like(k), 0.0, scale=1.0)
    np.testing.assert_array_equal(got[0, 0, :, 0], [3.5, 0.5, 3.5, 0.5, 2.0])


@pytest.mark.parametrize("len_q", [2, 50])
@pytest.mark.parametrize("dtype", DTYPES)
def test_garbage_behind_masks(dtype, len_q, implementation):
    q, clean, (k, v), arguments = garbage_behind_masks(len_q, dtype)
    with np.errstate(all="ignore"):
        got = functional.sigmoid_attention(q, k, v, **arguments)
    assert_same_bits([got], [functional.sigmoid_attention(q, *clean, **arguments)])
    check(got, q, *clean, -log(90), **arguments)
    assert (got[:, :, 0] == 0).all()


def test_nan_where_attended(implementation):
    """NaN in keys and values shows in the rows that attend them, and in no others."""
    q, k, v = spread_inputs(Shape("", 1, 2, 2, 60, 60, 8), "float32", np.random.default_rng(1))
    k[:, :, 40] = np.nan
    v[:, :, 30] = np.nan
    with np.errstate(all="ignore"):
        got = functional.sigmoid_attention(q, k, v, causal=True)
    assert np.isfinite(got[:, :, :30]).all()
    assert np.isnan(got[:, :, 30:]).all()


@pytest.mark.parametrize("name", SHAPES)
def test_same_bits(name, implementation):
    shape = SHAPES[name]._replace(batch=3)
    q, k, v, arguments = call(shape, "causal")
    one = functional.sigmoid_attention(q, k, v, num_threads=1, **arguments)
    for threads in (2, 7):
        assert_same_bits([functional.sigmoid_attention(q, k, v, num_threads=threads, **arguments)], [one])
    alone = functional.sigmoid_attention(q[1:2], k[1:2], v[1:2], **arguments)
    assert_same_bits([alone], [one[1:2]])
    lengths = shape.len_k - shape.len_k // 3
    padded = functional.sigmoid_attention(q, k, v, kv_lengths=lengths, sigmoid_bias=-1.0)
    short = functional.sigmoid_attention(q, k[:, :, :lengths], v[:, :, :lengths], sigmoid_bias=-1.0)
    assert_same_bits([padded], [short])


@pytest.mark.parametrize(("len_q", "len_k"), [(0, 5), (4, 0), (40, 0), (1, 1), (40, 1)])
def test_lengths_of_0_and_1(len_q, len_k, implementation):
    q, k, v = spread_inputs(Shape("", 2, 4, 2, len_q, len_k, 8), "float32", np.random.default_rng(0))
    check(functional.sigmoid_attention(q, k, v), q, k, v, -log(max(1, len_k)))


def test_out_and_one_head(implementation):
    q, k, v = (np.random.default_rng(i).standard_normal((n, 8)) for i, n in enumerate((6, 9, 9)))
    out = np.empty((6, 8))
    assert functional.sigmoid_attention(q, k, v, out=out) is out
    check(out[None], q[None], k[None], v[None], -log(9))


def test_errors():
    x = np.ones((1, 2, 3, 4), np.float32)
    with pytest.raises(ValueError, match=r"sigmoid_attention\(\): sigmoid_bias is inf; expected a number"):
        functional.sigmoid_attention(x, x, x, sigmoid_bias=np.inf)
    with pytest.raises(TypeError, match=r"sigmoid_attention\(\): sigmoid_bias is"):
        functional.sigmoid_attention(x, x, x, sigmoid_bias=np.ones(2))
    with pytest.raises(ValueError, match=r"sigmoid_attention\(\): k has a head_dim of 4"):
        functional.sigmoid_attention(np.ones((1, 2, 3, 5), np.float32), x, x)
