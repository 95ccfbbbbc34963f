"""scaled_dot_product_attention: torch's semantics, computed here by the formula of its documentation."""

import numpy as np
import pytest
from oracle import assert_close, eps, spread_inputs

import fastattn
from fastattn._bench.cases import DTYPES, Shape

SHAPE = Shape("sdpa", batch=2, heads_q=3, heads_kv=3, len_q=9, len_k=14, head_dim=8, head_dim_v=6)

sdpa = fastattn.scaled_dot_product_attention


def torch_documents(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """The pseudo-code of torch.nn.functional.scaled_dot_product_attention's documentation, in float64."""
    query, key, value = (x.astype(np.float64) for x in (query, key, value))
    len_q, len_k = query.shape[-2], key.shape[-2]
    scale_factor = 1 / np.sqrt(query.shape[-1]) if scale is None else scale
    attn_bias = np.zeros((len_q, len_k))
    if is_causal:
        attn_bias = np.where(np.tri(len_q, len_k, dtype=bool), attn_bias, -np.inf)
    if attn_mask is not None:
        attn_bias = np.where(attn_mask, 0, -np.inf) if attn_mask.dtype == bool else attn_mask + attn_bias
    if enable_gqa:
        key = np.repeat(key, query.shape[-3] // key.shape[-3], -3)
        value = np.repeat(value, query.shape[-3] // value.shape[-3], -3)
    attn_weight = query @ key.swapaxes(-2, -1) * scale_factor + attn_bias
    attn_weight = np.exp(attn_weight - attn_weight.max(-1, keepdims=True))
    return attn_weight / attn_weight.sum(-1, keepdims=True) @ value


def inputs(dtype="float32", shape=SHAPE):
    return spread_inputs(shape, dtype, np.random.default_rng(0))


def check(got, query, key, value, **arguments):
    expected = torch_documents(query, key, value, **arguments)
    assert got.dtype == query.dtype
    assert np.isfinite(expected).all()
    assert np.median(abs(expected)) > 0
    assert_close(got, expected, 8 * eps(query.dtype) * abs(value.astype(float)).max() + 0 * expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain(dtype, implementation):
    q, k, v = inputs(dtype)
    check(sdpa(q, k, v), q, k, v)
    check(sdpa(q, k, v, scale=0.1), q, k, v, scale=0.1)
    check(sdpa(query=q, key=k, value=v, attn_mask=None, dropout_p=0.0, is_causal=False), q, k, v)


@pytest.mark.parametrize(("len_q", "len_k"), [(9, 9), (9, 14), (14, 9), (1, 14)])
def test_causal_is_top_left(len_q, len_k, implementation):
    """attention() aligns the last query with the last key; torch the first with the first."""
    q, k, v = inputs(shape=SHAPE._replace(len_q=len_q, len_k=len_k))
    out = sdpa(q, k, v, is_causal=True)
    check(out, q, k, v, is_causal=True)
    np.testing.assert_array_equal(out, fastattn.attention(q, k, v, causal=True, q_offset=0))
    np.testing.assert_allclose(out[..., 0, :], v[..., 0, :], rtol=1e-6)


MASK_SHAPES = [(9, 14), (14,), (1, 14), (9, 1), (3, 1, 14), (2, 1, 1, 14), (2, 3, 9, 14)]


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_masks(shape, implementation):
    q, k, v = inputs()
    rng = np.random.default_rng(1)
    mask = rng.random(shape) < 0.7
    mask[..., 0] = True  # torch gives NaN for rows that attend nothing
    check(sdpa(q, k, v, mask), q, k, v, attn_mask=mask)
    mask = rng.standard_normal(shape).astype(np.float32)
    check(sdpa(q, k, v, attn_mask=mask), q, k, v, attn_mask=mask)
    mask[..., -1] = -np.inf if shape[-1] > 1 else 0
    check(sdpa(q, k, v, attn_mask=mask), q, k, v, attn_mask=mask)


def test_a_mask_of_the_dtype_of_the_query(implementation):
    for dtype in DTYPES:
        q, k, v = inputs(dtype)
        mask = np.random.default_rng(1).standard_normal((9, 14)).astype(q.dtype)
        check(sdpa(q, k, v, attn_mask=mask), q, k, v, attn_mask=mask.astype(float))


@pytest.mark.parametrize("group", [1, 2, 4])
def test_grouped_heads(group, implementation):
    q, k, v = inputs(shape=SHAPE._replace(heads_q=3 * group))
    check(sdpa(q, k, v, enable_gqa=True), q, k, v, enable_gqa=True)


def test_batches_and_heads_broadcast(implementation):
    rng = np.random.default_rng(0)
    for q_shape, k_shape, v_shape in [
        ((5, 8), (7, 8), (7, 6)),
        ((4, 5, 8), (4, 7, 8), (4, 7, 6)),
        ((4, 5, 8), (1, 7, 8), (1, 7, 6)),
        ((4, 5, 8), (4, 7, 8), (1, 7, 6)),
        ((1, 5, 8), (4, 7, 8), (4, 7, 6)),
        ((2, 4, 5, 8), (4, 7, 8), (7, 6)),
        ((2, 1, 4, 5, 8), (3, 1, 7, 8), (1, 1, 4, 7, 6)),
    ]:
        q, k, v = (rng.standard_normal(shape, np.float32) for shape in (q_shape, k_shape, v_shape))
        check(sdpa(q, k, v), q, k, v)
