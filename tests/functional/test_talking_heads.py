"""Talking heads against einsum in float64, on every implementation."""

import numpy as np
import pytest
import rowwise_oracle as oracle
from rowwise_oracle import OPTIONS, check, inputs, lane, wider

import fastattn
from fastattn import masks
from fastattn._bench.cases import DTYPES, STRUCTURES, Shape, as_dtype
from fastattn.functional import talking_heads_attention


def mixing(heads, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2, heads, heads)) / heads**0.5


def expected(q, k, v, pre, post, dtype, **arguments):
    """Modifiers and masks are those of the mixed scores."""

    def mixed(q, k):
        s = q @ k
        return s if pre is None else np.einsum("...hij,hg->...gij", s, pre.astype(dtype))

    s, attend = oracle.scores(q, k, dtype, mixed, **arguments)
    with np.errstate(invalid="ignore"):
        e = np.exp(s - np.where(attend.any(-1), s.max(-1, initial=-np.inf), 0)[..., None])
        probs = np.where(attend, e / np.where(attend.any(-1), e.sum(-1), 1)[..., None], 0)
    if post is not None:
        probs = np.einsum("...gij,gf->...fij", probs, post.astype(dtype))
        attend = np.broadcast_to(attend.any(-3, keepdims=True), attend.shape)
    return oracle.weigh(probs, v, attend)


def hold(q, k, v, pre, post, got=None, **arguments):
    ref = expected(q, k, v, pre, post, wider(q.dtype), **arguments)
    plain = expected(q, k, v, pre, post, lane(q.dtype), **arguments)
    got = talking_heads_attention(q, k, v, pre, post, **arguments) if got is None else got
    check(got, ref, plain, v, q.dtype)
    return ref


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", OPTIONS)
def test_options(implementation, variant, dtype):
    q, k, v, arguments = inputs(as_dtype(dtype), variant)
    ref = hold(q, k, v, *mixing(4), **arguments)
    assert np.count_nonzero(ref) >= ref.size / 2


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (3, 1), (8, 8), (12, 4), (17, 17)], ids=str)
def test_heads(implementation, heads):
    pre, post = mixing(heads[0])
    q, k, v, _ = inputs("float32", heads=heads)
    for mixes in ((pre, post), (pre, None), (None, post), (None, None)):
        hold(q, k, v, *mixes, causal=True)
    np.testing.assert_allclose(talking_heads_attention(q, k, v), fastattn.attention(q, k, v), atol=2e-5)


@pytest.mark.parametrize("size", [(1, 1), (1, 70), (3, 5), (16, 64), (17, 63), (33, 65), (70, 200)], ids=str)
def test_sizes(implementation, size):
    for dims in ((1, 1), (33, 17)):
        q, k, v, _ = inputs("float32", len_q=size[0], len_k=size[1], dims=dims, batch=1, seed=1)
        hold(q, k, v, *mixing(4))
        hold(q, k, v, *mixing(4), causal=True)


@pytest.mark.parametrize("name", ["streaming", "mixed_documents", "block_sparse", "dilated"])
def test_structural_masks(implementation, name):
    q, k, v, _ = inputs("float32", len_q=150)
    mask = STRUCTURES[name](Shape("", 2, 4, 2, 150, 150, 24, 20), np.random.default_rng(3))
    hold(q, k, v, *mixing(4), mask=mask)


def test_a_mask_of_each_head(implementation):
    rng = np.random.default_rng(2)
    q, k, v, _ = inputs("float32")
    mask = rng.random((2, 4, 37, 150)) < 0.3
    mask[:, 1, :9], mask[..., 20, :] = False, False
    for mixes in (mixing(4), (mixing(4)[0], None)):
        hold(q, k, v, *mixes, mask=mask)
    assert (talking_heads_attention(q, k, v, *mixing(4), mask=mask)[:, :, 20] == 0).all()


def test_a_structural_mask_of_each_head(implementation):
    """In every block of keys some head attends nothing: before its ranges, between or after them."""
    q, k, v, _ = inputs("float32", len_q=40, len_k=400)
    bitmap = np.zeros((4, 1, 7), bool)
    for head, blocks in enumerate(([0, 3], [1, 4, 6], [2, 3], [5])):
        bitmap[head, 0, blocks] = True
    for mixes in (mixing(4), (None, None)):
        hold(q, k, v, *mixes, mask=masks.block_sparse(bitmap, 64), q_offset=0)


def test_what_one_head_hides_and_another_does_not(implementation):
    """Where heads do not mix after the softmax, each has its own mask; where they do, one's is all's."""
    q, k, v, _ = inputs("float32", heads=(4, 1))
    mask = np.ones((4, 37, 150), bool)
    mask[1:, :, 90] = False
    pre, post = mixing(4)
    for bad in (np.nan, np.inf):
        v[:, :, 90] = bad
        for mix in (None, pre):
            got = talking_heads_attention(q, k, v, mix, None, mask=mask)
            assert (~np.isfinite(got[:, 0])).all()
            assert np.isfinite(got[:, 1:]).all()
        assert (~np.isfinite(talking_heads_attention(q, k, v, None, post, mask=mask))).all()


def test_what_is_hidden_never_shows(implementation):
    q, k, v, _ = inputs("float32")
    mask = np.random.default_rng(5).random((37, 150)) < 0.7
    mask[:, 40:60] = False
    pre, post = mixing(4)
    ref = talking_heads_attention(q, k, v, pre, post, mask=mask)
    k[..., 40:60, :], v[..., 40:60, :] = np.nan, np.inf
    np.testing.assert_array_equal(talking_heads_attention(q, k, v, pre, post, mask=mask), ref)
    v[:, 0, 70] = np.nan  # of heads 0 and 1
    got = talking_heads_attention(q, k, v, pre, post, mask=mask)
    np.testing.assert_array_equal(np.isnan(got[:, :2]).all(-1), np.broadcast_to(mask[:, 70], (2, 2, 37)))
    np.testing.assert_array_equal(got[:, 2:], ref[:, 2:])
    np.testing.assert_array_equal(got[:, :2, ~mask[:, 70]], ref[:, :2, ~mask[:, 70]])


def test_layouts_dtypes_and_bits(implementation):
    pre, post = mixing(6)
    q, k, v, _ = inputs("float32", len_q=70, heads=(6, 3), layout="blhd")
    ref = talking_heads_attention(q, k, v, pre, post, causal=True, num_threads=1)
    hold(q, k, v, pre, post, got=ref, causal=True)
    np.testing.assert_array_equal(
        talking_heads_attention(q, k, v, pre, post, causal=True, num_threads=3), ref
    )
    np.testing.assert_array_equal(
        talking_heads_attention(q[1:], k[1:], v[1:], pre, post, causal=True), ref[1:]
    )
    q, k, v, _ = inputs("float32", heads=(6, 6), kv_dtype="float16")
    hold(q, k, v, pre, post)
    out = np.empty((2, 6, 37, 20), np.float32)
    assert talking_heads_attention(q, k, v, pre, post, out=out) is out


def test_a_result_over_the_mixing(implementation):
    """The matrices may lie in the memory of the result: they are read first."""
    q, k, v, _ = inputs("float32", batch=3)
    pre, post = (x.astype(np.float32) for x in mixing(4))
    ref, out = talking_heads_attention(q, k, v, pre, post), np.empty((3, 4, 37, 20), np.float32)
    over = out.ravel()[:32].reshape(2, 4, 4)
    over[...] = pre, post
    np.testing.assert_array_equal(talking_heads_attention(q, k, v, *over, out=out), ref)


def test_nothing_to_attend(implementation):
    q, k, v, _ = inputs("float32")
    assert (talking_heads_attention(q, k[:, :, :0], v[:, :, :0], *mixing(4)) == 0).all()
    assert talking_heads_attention(q[:, :, :0], k, v, *mixing(4)).shape == (2, 4, 0, 20)
    hold(q, k, v, *mixing(4), kv_lengths=[0, 150])
    k = np.full_like(k, -np.inf)  # every score is -inf, computed and not masked
    assert np.isnan(talking_heads_attention(abs(q) + 1, k, v, None, mixing(4)[1])).all()


def test_errors():
    q = np.ones((2, 5, 4), np.float32)
    with pytest.raises(ValueError, match=r"pre has shape \(3, 3\); expected \(2, 2\)"):
        talking_heads_attention(q, q, q, np.ones((3, 3)))
    with pytest.raises(TypeError, match=r"talking_heads_attention\(\): post has dtype int64"):
        talking_heads_attention(q, q, q, None, np.ones((2, 2), int))
    with pytest.raises(TypeError, match=r"talking_heads_attention\(\): k is"):
        talking_heads_attention(q, None, q)
