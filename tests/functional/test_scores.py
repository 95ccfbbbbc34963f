"""Additive attention and given scores, against the formulas in float64, on every implementation."""

import numpy as np
import pytest
import rowwise_oracle as oracle
from rowwise_oracle import OPTIONS, check, inputs, lane, wider

from fastattn._bench.cases import DTYPES, STRUCTURES, Shape, as_dtype
from fastattn.functional import additive_attention


def weight(heads=4, head_dim=24):
    return np.random.default_rng(9).standard_normal((heads, head_dim))


def expected(q, k, v, w, dtype, **arguments):
    """w . tanh(q + k), for every pair."""

    def score(q, k):  # k is (..., d, len_k)
        return np.einsum("...hijd,hd->...hij", np.tanh(q[..., None, :] + k.swapaxes(-1, -2)[..., None, :, :]),
                         np.broadcast_to(w, (q.shape[-3], q.shape[-1])).astype(dtype))  # fmt: skip

    arguments.setdefault("scale", 1.0)
    return oracle.rowwise(oracle.softmax, q, k, v, dtype, score, sparse=False, **arguments)[0]


def hold(q, k, v, w, got=None, **arguments):
    ref = expected(q, k, v, w, wider(q.dtype), **arguments)
    plain = expected(q, k, v, w, lane(q.dtype), **arguments)
    got = additive_attention(q, k, v, w, **arguments) if got is None else got
    check(got, ref, plain, v, q.dtype)
    return ref


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", OPTIONS)
def test_options(implementation, variant, dtype):
    q, k, v, arguments = inputs(as_dtype(dtype), variant, spread=1)
    ref = hold(q, k, v, weight(), **arguments)
    assert np.count_nonzero(ref) >= ref.size / 2


@pytest.mark.parametrize("size", [(1, 1), (1, 70), (3, 5), (17, 63), (33, 65), (40, 130)], ids=str)
def test_sizes(implementation, size):
    for dims in ((1, 1), (33, 17)):
        q, k, v, _ = inputs("float32", len_q=size[0], len_k=size[1], dims=dims, batch=1, seed=1)
        w = weight(4, dims[0])
        hold(q, k, v, w)
        hold(q, k, v, w, causal=True, scale=3.0)
        hold(q, k, v, w[0])


def test_large_and_small(implementation):
    """Large and small arguments of tanh, where it is 1 and where it is x."""
    for spread in (1e-4, 1e4):
        q, k, v, _ = inputs("float32", spread=spread)
        hold(q, k * np.float32(spread), v, weight())
    q, k, v, _ = inputs("float32", spread=1)
    k[:, 0, 70, 3], q[0, 3, 9, 5] = 30, -20  # some blocks of keys, and of queries
    hold(q, k, v, weight())


@pytest.mark.parametrize("spread", [1e-4, 1e-3, 0.05])
def test_small_tangents_of_large_weight(implementation, spread):
    """Scores of about 1 from small tangents, of which e^2q e^2k - 1 would lose most digits."""
    for dtype in ("float32", "float64"):
        q, k, v, _ = inputs(dtype, spread=spread)
        k *= k.dtype.type(spread)
        hold(q, k, v, weight() / spread)
        k[:, :, 70] = 3 * spread  # of some keys and no others
        k[:, :, 71] = 2
        hold(q, k, v, weight() / spread)


@pytest.mark.parametrize("spread", [1e-3, 0.1, 0.3, 1])
@pytest.mark.parametrize("head_dim", [64, 65, 256, 1000])
def test_sums_over_many_dimensions(implementation, head_dim, spread):
    for seed in range(3):
        q, k, v, _ = inputs(
            "float32", dims=(head_dim, 8), spread=spread, batch=1, len_q=9, len_k=70, seed=seed
        )
        w = 3 * weight(4, head_dim) / (spread * head_dim**0.5)
        hold(q, k * np.float32(spread), v, w)


@pytest.mark.parametrize("name", ["streaming", "block_sparse"])
def test_structural_masks(implementation, name):
    q, k, v, _ = inputs("float32", len_q=150)
    mask = STRUCTURES[name](Shape("", 2, 4, 2, 150, 150, 24, 20), np.random.default_rng(3))
    hold(q, k, v, weight(), mask=mask)


def test_what_is_hidden_never_shows(implementation):
    q, k, v, _ = inputs("float32")
    mask = np.random.default_rng(5).random((37, 150)) < 0.7
    mask[:, 40:60] = False
    ref = additive_attention(q, k, v, weight(), mask=mask)
    k[..., 40:60, :], v[..., 40:60, :] = np.nan, np.inf
    np.testing.assert_array_equal(additive_attention(q, k, v, weight(), mask=mask), ref)
    v[..., 70, :] = np.nan
    got = additive_attention(q, k, v, weight(), mask=mask)
    np.testing.assert_array_equal(np.isnan(got).all(-1), np.broadcast_to(mask[:, 70], (2, 4, 37)))
    np.testing.assert_array_equal(got[:, :, ~mask[:, 70]], ref[:, :, ~mask[:, 70]])


def test_layouts_bits_and_nothing(implementation):
    q, k, v, _ = inputs("float32", len_q=70, layout="blhd")
    ref = additive_attention(q, k, v, weight(), causal=True, num_threads=1)
    hold(q, k, v, weight(), got=ref, causal=True)
    np.testing.assert_array_equal(additive_attention(q, k, v, weight(), causal=True, num_threads=3), ref)
    np.testing.assert_array_equal(additive_attention(q[1:], k[1:], v[1:], weight(), causal=True), ref[1:])
    q, k, v, _ = inputs("float32", kv_dtype="bfloat16")
    hold(q, k, v, weight())
    hold(q, k, v, weight(), kv_lengths=[0, 150])
    assert (additive_attention(q, k[:, :, :0], v[:, :, :0], weight()) == 0).all()


def test_errors():
    q = np.ones((2, 5, 4), np.float32)
    with pytest.raises(ValueError, match=r"additive_attention\(\): weight has shape \(3,\)"):
        additive_attention(q, q, q, np.ones(3))
    with pytest.raises(TypeError, match=r"additive_attention\(\): weight has dtype int64"):
        additive_attention(q, q, q, np.ones(4, int))
