"""Other normalisers and scores, which take a row at a time, against their formulas in float64."""

import numpy as np
import pytest
import rowwise_oracle as oracle
from rowwise_oracle import OPTIONS, check, inputs, lane, wider

import fastattn
from fastattn import functional, masks
from fastattn._bench.cases import DTYPES, STRUCTURES, Shape, as_dtype

SPARSE = ["sparsemax", "entmax15", "top_k"]  # by sorting
KINDS = [*SPARSE, "additive", "talking_heads"]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_sparse_kind = pytest.mark.parametrize("kind", SPARSE)
# Around vectors (4 to 16), tiles (8 to 32 rows), blocks (64 keys).
SIZES = [(1, 1), (1, 70), (3, 5), (16, 64), (17, 63), (33, 65), (37, 200), (70, 129)]


def weight(heads=4, head_dim=24):
    return np.random.default_rng(9).standard_normal((heads, head_dim))


def mixing(heads, seed=0):
    rng = np.random.default_rng(seed)
    return dict(zip(("pre", "post"), rng.standard_normal((2, heads, heads)) / heads**0.5, strict=True))


def with_own(kind, q, arguments):
    """`arguments`, and those that a kind has beside the options, where they are not among them."""
    heads, dim = q.shape[-3] if q.ndim > 2 else 1, q.shape[-1]
    own = {"top_k": {"top_k": 7}, "additive": {"weight": weight(heads, dim)}, "talking_heads": mixing(heads)}
    return {**own.get(kind, {}), **arguments}


def run(kind, q, k, v, **arguments):
    return getattr(functional, f"{kind}_attention")(q, k, v, **with_own(kind, q, arguments))


def expected(kind, q, k, v, dtype=None, **arguments):
    """The result, and the largest score, where probabilities move as much as it does."""
    arguments, dtype = with_own(kind, q, arguments), dtype or wider(q.dtype)
    if kind == "talking_heads":
        return mixed(q, k, v, dtype, **arguments), 0
    if kind == "additive":
        return added(q, k, v, dtype, **arguments), 0
    normalise = oracle.top_k(arguments.pop("top_k")) if kind == "top_k" else getattr(oracle, kind)
    return oracle.rowwise(normalise, q, k, v, dtype, **arguments)


def added(q, k, v, dtype, weight, **arguments):
    """Scores of w . tanh(q + k), for every pair."""

    def score(q, k):  # k is (..., d, len_k)
        return np.einsum("...hijd,hd->...hij", np.tanh(q[..., None, :] + k.swapaxes(-1, -2)[..., None, :, :]),
                         np.broadcast_to(weight, (q.shape[-3], q.shape[-1])).astype(dtype))  # fmt: skip

    arguments = {"scale": 1.0, **arguments}
    return oracle.rowwise(oracle.softmax, q, k, v, dtype, score, sparse=False, **arguments)[0]


def mixed(q, k, v, dtype, pre=None, post=None, **arguments):
    """Talking heads; modifiers and masks are those of the mixed scores."""

    def product(q, k):
        s = q @ k
        return s if pre is None else np.einsum("...hij,hg->...gij", s, pre.astype(dtype))

    s, attend = oracle.scores(q, k, dtype, product, **arguments)
    with np.errstate(invalid="ignore"):
        e = np.exp(s - np.where(attend.any(-1), s.max(-1, initial=-np.inf), 0)[..., None])
        probs = np.where(attend, e / np.where(attend.any(-1), e.sum(-1), 1)[..., None], 0)
    if post is not None:
        probs = np.einsum("...gij,gf->...fij", probs, post.astype(dtype))
        attend = np.broadcast_to(attend.any(-3, keepdims=True), attend.shape)
    return oracle.weigh(probs, v, attend)


def hold(kind, q, k, v, got=None, **arguments):
    ref, largest = expected(kind, q, k, v, **arguments)
    plain, _ = expected(kind, q, k, v, lane(q.dtype), **arguments)
    check(run(kind, q, k, v, **arguments) if got is None else got, ref, plain, v, q.dtype, largest)
    return ref


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", OPTIONS)
@every_kind
def test_options(implementation, kind, variant, dtype):
    q, k, v, arguments = inputs(as_dtype(dtype), variant, spread=1 if kind == "additive" else 3)
    ref = hold(kind, q, k, v, **arguments)
    assert np.count_nonzero(ref) >= ref.size / 2


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@every_kind
def test_sizes(implementation, kind, size, dtype):
    for dims in ((1, 1), (33, 17)):
        q, k, v, _ = inputs(dtype, len_q=size[0], len_k=size[1], dims=dims, batch=1, seed=1)
        hold(kind, q, k, v)
        hold(kind, q, k, v, causal=True)
        if kind == "additive":
            hold(kind, q, k, v, causal=True, scale=3.0, weight=weight(4, dims[0])[0])


@pytest.mark.parametrize("name", ["streaming", "mixed_documents", "block_sparse", "dilated"])
@every_kind
def test_structural_masks(implementation, kind, name):
    shape = Shape("", 2, 4, 2, 150, 150, 24, 20)
    q, k, v, _ = inputs("float32", len_q=150)
    hold(kind, q, k, v, mask=STRUCTURES[name](shape, np.random.default_rng(3)))


@pytest.mark.parametrize("dtype", DTYPES)
@every_kind
def test_strides_and_layouts(implementation, kind, dtype):
    spread = 1 if kind == "additive" else 3
    q, k, v, _ = inputs(as_dtype(dtype), layout="blhd", spread=spread)
    hold(kind, q, k, v)
    hold(kind, q[:, :, ::-1], k[:, :, ::2], v[:, :, ::2])
    hold(kind, q[..., ::2], k[..., ::2], v[..., ::-1])
    for kv_dtype in ("bfloat16", "float16"):
        q, k, v, _ = inputs("float32", kv_dtype=kv_dtype, spread=spread)
        hold(kind, q, k, v)


@every_kind
def test_nothing_to_attend(implementation, kind):
    q, k, v, _ = inputs("float32")
    assert (run(kind, q, k[:, :, :0], v[:, :, :0]) == 0).all()
    assert run(kind, q[:, :, :0], k, v).shape == (2, 4, 0, 20)
    assert run(kind, q[:0], k[:0], v[:0]).shape == (0, 4, 37, 20)
    out = run(kind, q, k, v, kv_lengths=[0, 150])
    assert (out[0] == 0).all()
    hold(kind, q, k, v, kv_lengths=[0, 150])
    out = run(kind, q, k, v, bias=np.full((37, 150), -np.inf, np.float32))
    assert (out == 0).all()


@every_kind
def test_what_is_hidden_never_shows(implementation, kind):
    """Garbage never shows, in masked keys and values; in a value that counts it does, where attended."""
    q, k, v, _ = inputs("float32")
    mask = np.random.default_rng(5).random((37, 150)) < 0.7
    mask[:, 40:60] = False
    ref = run(kind, q, k, v, mask=mask)
    k[..., 40:60, :], v[..., 40:60, :] = np.nan, np.inf
    np.testing.assert_array_equal(run(kind, q, k, v, mask=mask), ref)
    v[:, 0, 70:80] = np.nan  # of heads 0 and 1
    got = run(kind, q, k, v, mask=mask)
    seen = np.isnan(got).all(-1)
    if kind in SPARSE:  # where its probability is not 0
        assert 0 < seen[:, :2].mean() < 0.9
        k[..., 40:60, :] = 0
        want, _ = expected(kind, q, k, v, mask=mask)
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    else:
        np.testing.assert_array_equal(seen[:, :2], np.broadcast_to(mask[:, 70:80].any(1), (2, 2, 37)))
    np.testing.assert_array_equal(got[~seen], ref[~seen])
    assert not seen[:, 2:].any()


@every_kind
def test_same_bits(implementation, kind):
    """Bits do not depend on the number of threads or on the rest of the batch."""
    q, k, v, _ = inputs("float32", len_q=150, heads=(6, 3))
    ref = run(kind, q, k, v, causal=True, num_threads=1)
    for threads in (2, 5):
        np.testing.assert_array_equal(run(kind, q, k, v, causal=True, num_threads=threads), ref)
    np.testing.assert_array_equal(run(kind, q[1:], k[1:], v[1:], causal=True), ref[1:])


@every_kind
def test_broadcast_out_and_one_head(implementation, kind):
    q, k, v, _ = inputs("float32")
    out = np.empty((2, 4, 37, 20), np.float32)
    assert run(kind, q, k[:1], v[:1], out=out) is out
    hold(kind, q, k[:1], v[:1], got=out)
    assert run(kind, q[0, 0], k[0, 0], v[0, 0]).shape == (37, 20)


@pytest.mark.parametrize("spread", [0, 1e-3, 1, 30, 1e4])
@every_sparse_kind
def test_from_uniform_to_one(implementation, kind, spread):
    """The support is all of thousands of keys, one of them, or in between."""
    for dtype in ("float32", "float64"):
        q, k, v, _ = inputs(dtype, len_q=9, len_k=3000, batch=1, heads=(1, 1), spread=spread, seed=2)
        hold(kind, q, k, v)


@every_sparse_kind
def test_nan_stays_in_its_rows(implementation, kind):
    q, k, v, _ = inputs("float32")
    ref = run(kind, q, k, v, causal=True)
    q[:, 1, 3], k[:, 0, 140, 5] = np.nan, np.inf
    got = run(kind, q, k, v, causal=True)
    assert np.isnan(got[:, 1, 3]).all()
    np.testing.assert_array_equal(got[:, 2:], ref[:, 2:])
    np.testing.assert_allclose(got[:, 0, :27], ref[:, 0, :27], atol=1e-6)  # query 26 stands at key 139
    k[:, 0] = -np.inf
    assert np.isnan(run(kind, abs(q), k, v)[:, 0]).all()  # every score is -inf, computed and not masked


@pytest.mark.parametrize("top_k", [1, 2, 63, 64, 65, 149, 150, 10**6])
def test_how_many(implementation, top_k):
    q, k, v, _ = inputs("float32")
    hold("top_k", q, k, v, top_k=top_k)
    hold("top_k", q, k, v, top_k=top_k, causal=True)
    if top_k >= 150:
        out = run("top_k", q, k, v, top_k=top_k)
        np.testing.assert_allclose(out, fastattn.attention(q, k, v), atol=1e-5)


@pytest.mark.parametrize("top_k", [1, 3, 10, 70])
def test_of_equal_scores_the_first(implementation, top_k):
    """Exactly k keys count where many scores are equal integers, zeros of both signs among them."""
    rng = np.random.default_rng(4)
    q, k = (rng.integers(-1, 2, (2, n, 2)).astype(np.float32) for n in (40, 130))
    q = np.where(q == 0, np.float32(-0.0), q)
    v = np.broadcast_to(np.eye(130, dtype=np.float32), (2, 130, 130))
    out = run("top_k", q, k, v, top_k=top_k, scale=0.5)
    assert (np.count_nonzero(out, axis=-1) == top_k).all()
    hold("top_k", q, k, v, top_k=top_k, scale=0.5)


def test_large_and_small_tangents(implementation):
    """Arguments of tanh where it is 1, and where it is x."""
    for spread in (1e-4, 1e4):
        q, k, v, _ = inputs("float32", spread=spread)
        hold("additive", q, k * np.float32(spread), v)
    q, k, v, _ = inputs("float32", spread=1)
    k[:, 0, 70, 3], q[0, 3, 9, 5] = 30, -20  # some blocks of keys, and of queries
    hold("additive", q, k, v)


@pytest.mark.parametrize("spread", [1e-4, 1e-3, 0.05])
def test_small_tangents_of_large_weight(implementation, spread):
    """Scores of about 1 from small tangents, of which e^2q e^2k - 1 would lose most digits."""
    for dtype in ("float32", "float64"):
        q, k, v, _ = inputs(dtype, spread=spread)
        k *= k.dtype.type(spread)
        hold("additive", q, k, v, weight=weight() / spread)
        k[:, :, 70] = 3 * spread  # of some keys and no others
        k[:, :, 71] = 2
        hold("additive", q, k, v, weight=weight() / spread)


@pytest.mark.parametrize("spread", [1e-3, 0.1, 0.3, 1])
@pytest.mark.parametrize("head_dim", [64, 65, 256, 1000])
def test_sums_of_tangents_over_many_dimensions(implementation, head_dim, spread):
    for seed in range(3):
        q, k, v, _ = inputs(
            "float32", dims=(head_dim, 8), spread=spread, batch=1, len_q=9, len_k=70, seed=seed
        )
        w = 3 * weight(4, head_dim) / (spread * head_dim**0.5)
        hold("additive", q, k * np.float32(spread), v, weight=w)


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (3, 1), (8, 8), (12, 4), (17, 17)], ids=str)
def test_mixed_heads(implementation, heads):
    q, k, v, _ = inputs("float32", heads=heads)
    both = mixing(heads[0])
    for left_out in ({}, {"post": None}, {"pre": None}, dict.fromkeys(both)):
        hold("talking_heads", q, k, v, causal=True, **both | left_out)
    plain = functional.talking_heads_attention(q, k, v)
    np.testing.assert_allclose(plain, fastattn.attention(q, k, v), atol=2e-5)


def test_a_mask_of_each_head(implementation):
    q, k, v, _ = inputs("float32")
    mask = np.random.default_rng(2).random((2, 4, 37, 150)) < 0.3
    mask[:, 1, :9], mask[..., 20, :] = False, False
    for more in ({}, {"post": None}):
        hold("talking_heads", q, k, v, mask=mask, **more)
    assert (run("talking_heads", q, k, v, mask=mask)[:, :, 20] == 0).all()


def test_a_structural_mask_of_each_head(implementation):
    """In every block of keys some head attends nothing: before its ranges, between or after them."""
    q, k, v, _ = inputs("float32", len_q=40, len_k=400)
    bitmap = np.zeros((4, 1, 7), bool)
    for head, blocks in enumerate(([0, 3], [1, 4, 6], [2, 3], [5])):
        bitmap[head, 0, blocks] = True
    for more in ({}, {"pre": None, "post": None}):
        hold("talking_heads", q, k, v, mask=masks.block_sparse(bitmap, 64), q_offset=0, **more)


def test_what_one_head_hides_and_another_does_not(implementation):
    """Where heads do not mix after the softmax, each has its own mask; where they do, one's is all's."""
    q, k, v, _ = inputs("float32", heads=(4, 1))
    mask = np.ones((4, 37, 150), bool)
    mask[1:, :, 90] = False
    for bad in (np.nan, np.inf):
        v[:, :, 90] = bad
        for more in ({"post": None}, {"pre": None, "post": None}):
            got = run("talking_heads", q, k, v, mask=mask, **more)
            assert (~np.isfinite(got[:, 0])).all()
            assert np.isfinite(got[:, 1:]).all()
        assert (~np.isfinite(run("talking_heads", q, k, v, mask=mask, pre=None))).all()


def test_computed_scores_of_minus_infinity_are_no_mask(implementation):
    q, k, v, _ = inputs("float32")
    k = np.full_like(k, -np.inf)
    assert np.isnan(run("talking_heads", abs(q) + 1, k, v, pre=None)).all()


def test_a_result_over_the_mixing(implementation):
    """The matrices may lie in the memory of the result: they are read first."""
    q, k, v, _ = inputs("float32", batch=3)
    pre, post = (x.astype(np.float32) for x in mixing(4).values())
    ref = run("talking_heads", q, k, v, pre=pre, post=post)
    out = np.empty((3, 4, 37, 20), np.float32)
    over = out.ravel()[:32].reshape(2, 4, 4)
    over[...] = pre, post
    np.testing.assert_array_equal(run("talking_heads", q, k, v, pre=over[0], post=over[1], out=out), ref)


def test_errors():
    q = np.ones((2, 5, 4), np.float32)
    for kind in KINDS:
        name = rf"^{kind}_attention\(\): "
        for error, message, wrong in (
            (TypeError, "q has dtype int64", {"q": q.astype(int)}),
            (TypeError, "k is None", {"k": None}),
            (TypeError, "sinks is not an argument", {"sinks": 1}),
            (ValueError, "backend is 'cuda'", {"backend": "cuda"}),
        ):
            with pytest.raises(error, match=name + message):
                run(kind, **{"q": q, "k": q, "v": q, **wrong})
    for top_k in (0, -1, 1.5, None, True):
        with pytest.raises((TypeError, ValueError), match=r"top_k_attention\(\): top_k is"):
            run("top_k", q, q, q, top_k=top_k)
    for kind, error, message, wrong in (
        ("additive", ValueError, r"weight has shape \(3,\)", {"weight": np.ones(3)}),
        ("additive", TypeError, "weight has dtype int64", {"weight": np.ones(4, int)}),
        ("talking_heads", ValueError, r"pre has shape \(3, 3\); expected \(2, 2\)", {"pre": np.ones((3, 3))}),
        ("talking_heads", TypeError, "post has dtype int64", {"post": np.ones((2, 2), int)}),
    ):
        with pytest.raises(error, match=rf"^{kind}_attention\(\): {message}"):
            run(kind, q, q, q, **wrong)
