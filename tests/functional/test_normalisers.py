"""sparsemax, entmax-1.5 and the k largest, against sorting in float64, on every implementation."""

import numpy as np
import pytest
import rowwise_oracle as oracle
from rowwise_oracle import OPTIONS, check, inputs, lane, wider

import fastattn
from fastattn import functional
from fastattn._bench.cases import DTYPES, STRUCTURES, Shape, as_dtype

KINDS = ["sparsemax", "entmax15", "top_k"]
# Around vectors (4 to 16), tiles (8 to 32 rows), blocks (64 keys).
SIZES = [(1, 1), (1, 70), (3, 5), (16, 64), (17, 63), (33, 65), (37, 200), (70, 129)]


def run(kind, q, k, v, top_k=7, **arguments):
    if kind == "top_k":
        return functional.top_k_attention(q, k, v, top_k=top_k, **arguments)
    return {
        "sparsemax": functional.sparsemax_attention,
        "entmax15": functional.entmax15_attention,
    }[kind](q, k, v, **arguments)


def expected(kind, q, k, v, dtype=None, top_k=7, **arguments):
    dtype = dtype or wider(q.dtype)
    normalise = oracle.top_k(top_k) if kind == "top_k" else getattr(oracle, kind)
    return oracle.rowwise(normalise, q, k, v, dtype, **arguments)


def hold(kind, q, k, v, got=None, **arguments):
    ref, largest = expected(kind, q, k, v, **arguments)
    plain, _ = expected(kind, q, k, v, lane(q.dtype), **arguments)
    check(run(kind, q, k, v, **arguments) if got is None else got, ref, plain, v, q.dtype, largest)
    return ref


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_options(implementation, kind, variant, dtype):
    q, k, v, arguments = inputs(as_dtype(dtype), variant)
    ref = hold(kind, q, k, v, **arguments)
    assert np.count_nonzero(ref) >= ref.size / 2


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_sizes(implementation, kind, size, dtype):
    for dims in ((1, 1), (33, 17)):
        q, k, v, _ = inputs(dtype, len_q=size[0], len_k=size[1], dims=dims, batch=1, seed=1)
        hold(kind, q, k, v)
        hold(kind, q, k, v, causal=True)


@pytest.mark.parametrize("spread", [0, 1e-3, 1, 30, 1e4])
@pytest.mark.parametrize("kind", KINDS)
def test_from_uniform_to_one(implementation, kind, spread):
    """The support is all of thousands of keys, one of them, or in between."""
    for dtype in ("float32", "float64"):
        q, k, v, _ = inputs(dtype, len_q=9, len_k=3000, batch=1, heads=(1, 1), spread=spread, seed=2)
        hold(kind, q, k, v)


@pytest.mark.parametrize("name", ["streaming", "mixed_documents", "block_sparse", "dilated"])
@pytest.mark.parametrize("kind", KINDS)
def test_structural_masks(implementation, kind, name):
    shape = Shape("", 2, 4, 2, 150, 150, 24, 20)
    q, k, v, _ = inputs("float32", len_q=150)
    hold(kind, q, k, v, mask=STRUCTURES[name](shape, np.random.default_rng(3)))


@pytest.mark.parametrize("top_k", [1, 2, 63, 64, 65, 149, 150, 10**6])
def test_how_many(implementation, top_k):
    q, k, v, _ = inputs("float32")
    hold("top_k", q, k, v, top_k=top_k)
    hold("top_k", q, k, v, top_k=top_k, causal=True)
    if top_k >= 150:
        np.testing.assert_allclose(run("top_k", q, k, v, top_k), fastattn.attention(q, k, v), atol=1e-5)


@pytest.mark.parametrize("top_k", [1, 3, 10, 70])
def test_of_equal_scores_the_first(implementation, top_k):
    """Exactly k keys count where many scores are equal integers, zeros of both signs among them."""
    rng = np.random.default_rng(4)
    q, k = (rng.integers(-1, 2, (2, n, 2)).astype(np.float32) for n in (40, 130))
    q = np.where(q == 0, np.float32(-0.0), q)
    v = np.broadcast_to(np.eye(130, dtype=np.float32), (2, 130, 130))
    out = run("top_k", q, k, v, top_k, scale=0.5)
    assert (np.count_nonzero(out, axis=-1) == top_k).all()
    hold("top_k", q, k, v, top_k=top_k, scale=0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_strides_and_layouts(implementation, kind, dtype):
    q, k, v, _ = inputs(as_dtype(dtype), layout="blhd")
    hold(kind, q, k, v)
    hold(kind, q[:, :, ::-1], k[:, :, ::2], v[:, :, ::2])
    hold(kind, q[..., ::2], k[..., ::2], v[..., ::-1])
    q, k, v, _ = inputs("float32", kv_dtype="bfloat16")
    hold(kind, q, k, v)


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_hidden_never_shows(implementation, kind):
    """Garbage never shows, in masked keys and values and in values whose probability is 0."""
    rng = np.random.default_rng(5)
    q, k, v, _ = inputs("float32")
    mask = rng.random((37, 150)) < 0.7
    mask[:, 40:60] = False
    ref = run(kind, q, k, v, mask=mask)
    k[..., 40:60, :], v[..., 40:60, :] = np.nan, np.inf
    np.testing.assert_array_equal(run(kind, q, k, v, mask=mask), ref)
    v[..., 70, :] = [[np.nan], [np.inf]]
    got = run(kind, q, k, v, mask=mask)
    k[..., 40:60, :] = 0
    want, _ = expected(kind, q, k, v, mask=mask)
    assert 0 < np.isfinite(got).all(-1).mean() < 1
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    np.testing.assert_allclose(got[np.isfinite(got)], want[np.isfinite(want)], atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits(implementation, kind):
    """Bits do not depend on the number of threads or on the rest of the batch."""
    q, k, v, _ = inputs("float32", len_q=150, heads=(6, 3))
    ref = run(kind, q, k, v, causal=True, num_threads=1)
    for threads in (2, 5):
        np.testing.assert_array_equal(run(kind, q, k, v, causal=True, num_threads=threads), ref)
    np.testing.assert_array_equal(run(kind, q[1:], k[1:], v[1:], causal=True), ref[1:])


def test_broadcast_out_and_one_head(implementation):
    q, k, v, _ = inputs("float32")
    out = np.empty((2, 4, 37, 20), np.float32)
    assert run("sparsemax", q, k[:1], v[:1], out=out) is out
    hold("sparsemax", q, k[:1], v[:1], got=out)
    assert run("entmax15", q[0, 0], k[0, 0], v[0, 0]).shape == (37, 20)


def test_errors():
    q = np.ones((2, 5, 4), np.float32)
    for kind in KINDS:
        with pytest.raises(TypeError, match=rf"{kind}_attention\(\): q has dtype int64"):
            run(kind, q.astype(int), q, q)
        with pytest.raises(TypeError, match=rf"{kind}_attention\(\): sinks is not an argument"):
            run(kind, q, q, q, sinks=1)
    for top_k in (0, -1, 1.5, None, True):
        with pytest.raises((TypeError, ValueError), match=r"top_k_attention\(\): top_k is"):
            run("top_k", q, q, q, top_k=top_k)
    with pytest.raises(ValueError, match=r"sparsemax_attention\(\): backend is 'cuda'"):
        run("sparsemax", q, q, q, backend="cuda")
