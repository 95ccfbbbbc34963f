"""No size is special: lengths and head dimensions around every vector and tile edge, down to 0 and 1."""

from itertools import product

import numpy as np
import pytest
from oracle import case, check, eps

import fastattn
from fastattn import ops
from fastattn._bench.cases import DTYPES, Shape, as_dtype

LENGTHS = (0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 127, 128, 129, 1000)
HEAD_DIMS = (1, 3, 8, 32, 40, 64, 72, 80, 96, 128, 192, 256, 576, 1024)
CAUSAL = (False, True)
# Keys and values are read by loops of their own: each size of the one beside three of the other.
HEAD_DIM_PAIRS = [(a, HEAD_DIMS[i - shift]) for i, a in enumerate(HEAD_DIMS) for shift in (0, 3, 8)]

every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def check_size(len_q, len_k, head_dim, head_dim_v, dtype, causal=False, heads=(2, 1)):
    # With more queries than keys, those before the first key would attend nothing: align the first instead.
    variants = ("plain",) if not causal else ("causal",) if len_q <= len_k else ("causal", "q_offset")
    telling = len_q > 0 and len_k > 0
    this = case(Shape("", 1, *heads, len_q, len_k, head_dim, head_dim_v), variants, dtype, telling=telling)
    got = fastattn.attention(this.q, this.k, this.v, **this.arguments, return_lse=True)
    check(got, this.expected, telling=telling)


@every_dtype
@pytest.mark.parametrize("len_q", [1, 35])
@pytest.mark.parametrize("len_k", LENGTHS[1:])
def test_every_key_counts_once(len_k, len_q, dtype, implementation):
    """Equal scores and an identity for V: each key's share is 1/n to the last bit but one, in every dtype."""
    q, k = np.zeros((len_q, 5), as_dtype(dtype)), np.ones((len_k, 5), as_dtype(dtype))
    out, lse = fastattn.attention(q, k, np.eye(len_k).astype(as_dtype(dtype)), return_lse=True)
    np.testing.assert_allclose(out.astype(float), 1 / len_k, rtol=eps(dtype))
    unit = np.finfo(lse.dtype).eps
    np.testing.assert_allclose(lse, np.log(len_k), rtol=4 * unit, atol=4 * unit)


@every_dtype
def test_every_causal_key_counts_once(dtype, implementation):
    n = 131
    q, k = np.zeros((n, 5), as_dtype(dtype)), np.ones((n, 5), as_dtype(dtype))
    out = fastattn.attention(q, k, np.eye(n).astype(as_dtype(dtype)), causal=True)
    np.testing.assert_allclose(out.astype(float), np.tri(n) / np.arange(1, n + 1)[:, None], rtol=eps(dtype))


@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 3), (2, 1, 2), (0,), (2, 0)], ids=str)
def test_leading_dimensions(batch, implementation):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((*batch, 2, n, 8), np.float32) for n in (9, 11, 11))
    out, lse = fastattn.attention(q, k, v, return_lse=True)
    assert out.shape == (*batch, 2, 9, 8)
    assert lse.shape == (*batch, 2, 9)
    for index in np.ndindex(batch):
        np.testing.assert_array_equal(out[index], fastattn.attention(q[index], k[index], v[index]))


def test_two_dimensional_arrays_are_one_head(implementation):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 8), np.float32) for n in (9, 11, 11))
    out, lse = fastattn.attention(q, k, v, return_lse=True)
    assert (out.shape, lse.shape) == ((9, 8), (9,))
    np.testing.assert_array_equal(out, fastattn.attention(q[None], k[None], v[None])[0])


@pytest.mark.parametrize(("dtype", "causal"), [*((dtype, False) for dtype in DTYPES),
                                               ("float32", True), ("bfloat16", True)])  # fmt: skip
@pytest.mark.parametrize(("len_q", "len_k"), list(product(LENGTHS, LENGTHS)))
def test_lengths_sweep(len_q, len_k, causal, dtype, implementation):
    check_size(len_q, len_k, 12, 16, dtype, causal)


@every_dtype
@pytest.mark.parametrize("len_q", [1, 3, 33])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIM_PAIRS)
def test_head_dims_sweep(head_dim, head_dim_v, len_q, dtype, implementation):
    check_size(len_q, 37, head_dim, head_dim_v, dtype, heads=(6, 3))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", range(1, 132))
def test_all_small_head_dims_sweep(head_dim, dtype, implementation):
    check_size(19, 21, head_dim, head_dim, dtype)


def test_more_empty_items_than_memory(implementation):
    """2**59 batch items of no row: nothing is allocated for them, and nothing walks through them."""
    q, k = np.empty((2**59, 1, 0, 1), np.float32), np.ones((1, 1, 3, 1), np.float32)
    out, lse = fastattn.attention(q, k, k, return_lse=True)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])
    assert fastattn.explain(q, k, k)["tiles"] == 0
    assert fastattn.attention_weights(q, k).shape == (2**59, 1, 0, 3)
    for shape in ((2**59, 0), (0, 2**59)):
        x = np.empty(shape, np.float32)
        for call in (ops.layer_norm, ops.rms_norm, ops.softmax, lambda x: ops.activate(x, "silu")):
            assert call(x).shape == shape
    nothing = ops.pack(np.empty((0, 1), np.float32))
    x = np.broadcast_to(np.ones((1, 1), np.float32), (2**59, 1))
    assert ops.linear(x, nothing).shape == (2**59, 0)
