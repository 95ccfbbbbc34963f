"""Linformer, Nyströmformer and Reformer by their formulas in float64."""

import numpy as np
import pytest
from formulas import doubles, linformer, nystrom, reformer

import fastattn
from fastattn import functional
from fastattn._bench.cases import DTYPES, as_dtype
from fastattn.grad import vjp


def normal(*shape, seed=0, dtype="float32"):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(as_dtype(dtype))


def tolerance(dtype):
    return {"float64": 1e-11, "float32": 3e-5, "float16": 1e-2, "bfloat16": 6e-2}[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_linformer(implementation, dtype):
    q, v = normal(2, 4, 90, 16, dtype=dtype), normal(2, 2, 70, 9, dtype=dtype)
    k = normal(2, 2, 70, 16, seed=1, dtype=dtype)
    for shape in ((11, 70), (2, 11, 70), (1, 1, 11, 70)):
        e, f = normal(*shape) / 8, normal(*shape, seed=1) / 8
        for second in (f, None):
            got = functional.linformer_attention(q, k, v, e, second)
            ref = linformer(*doubles(q, k, v), e, e if second is None else f)
            assert got.dtype == q.dtype
            np.testing.assert_allclose(got.astype(np.float64), ref, atol=tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nystrom(implementation, dtype):
    q, k, v = (normal(2, 3, 96, d, seed=d, dtype=dtype) for d in (16, 16, 9))
    got = functional.nystrom_attention(q, k, v, num_landmarks=12, scale=0.5)
    assert got.dtype == q.dtype
    ref = nystrom(*doubles(q, k, v), 12, 6, 0.5)
    np.testing.assert_allclose(got.astype(np.float64), ref, atol=tolerance(dtype) * abs(ref).max())


def test_nystrom_of_other_lengths(implementation):
    q, k, v = normal(3, 101, 16), normal(3, 77, 16), normal(3, 77, 8)
    assert np.isfinite(functional.nystrom_attention(q, k, v, num_landmarks=10)).all()
    exact = fastattn.attention(q, k, v)
    for n in (77, 100):
        np.testing.assert_array_equal(functional.nystrom_attention(q, k, v, num_landmarks=n), exact)
    # Ten queries, and ten keys, each many times: the estimate is exact, where the inverse converges.
    q, k = (np.repeat(4 * np.eye(10), n, axis=0) for n in (7, 5))
    v = normal(50, 8, dtype="float64")
    got = functional.nystrom_attention(q, k, v, num_landmarks=10, num_iterations=12, scale=1.0)
    np.testing.assert_allclose(got, fastattn.attention(q, k, v, scale=1.0), atol=1e-10)


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "chunk"), [(1, 4), (5, 8), (64, 16), (75, 16), (40, 39)])
def test_reformer(implementation, n, chunk, causal, rounds):
    qk, v, rotations = normal(2, 2, n, 12), normal(2, 2, n, 7), normal(2, rounds, 12, 3)
    got = functional.lsh_attention(
        qk, v, num_buckets=6, chunk=chunk, num_rounds=rounds, rotations=rotations, causal=causal, scale=0.7
    )
    for b, h in np.ndindex(2, 2):
        ref = reformer(*doubles(qk[b, h], v[b, h], rotations[h]), chunk, causal, 0.7)
        np.testing.assert_allclose(got[b, h], ref, atol=3e-5)


def test_reformer_finds_what_is_near():
    """With one chunk it is attention to all other tokens. The seed decides the hashes. Dtypes are kept."""
    qk, v = normal(2, 50, 16), normal(2, 50, 7)
    k = qk / np.sqrt((qk * qk).mean(-1, keepdims=True) + np.float32(1e-6))
    others = fastattn.attention(qk, k, v, mask=~np.eye(50, dtype=bool))
    np.testing.assert_allclose(functional.lsh_attention(qk, v, num_buckets=2, chunk=50), others, atol=1e-5)
    first, again, other = (functional.lsh_attention(qk, v, num_buckets=8, chunk=8, rng=s) for s in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    qk, v = qk.astype(np.float16), v.astype(np.float16)
    half = functional.lsh_attention(qk, v, num_buckets=8, chunk=8, rng=1)
    assert half.dtype == np.float16
    none = functional.lsh_attention(qk[:, :0], v[:, :0], num_buckets=8)
    assert (none.shape, none.dtype) == ((2, 0, 7), np.float16)


def test_a_chunk_longer_than_the_sequence(implementation):
    """A chunk that is longer than the sequence is cut to it, and takes no more memory."""
    qk, v = normal(2, 11, 16), normal(2, 11, 7)
    for rounds in (1, 3):
        got, ref = (
            functional.lsh_attention(qk, v, num_buckets=4, chunk=chunk, num_rounds=rounds)
            for chunk in (10**13, 11)
        )
        np.testing.assert_array_equal(got, ref)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e20])
def test_what_is_not_finite_warns_of_nothing(bad, implementation):
    """There is no warning, as in the kernels: here warnings are errors."""
    x = normal(2, 200, 16)
    x[0, 7] = bad
    functional.lsh_attention(x, x, num_buckets=4, chunk=16)
    functional.nystrom_attention(x, x, x, num_landmarks=8)
    functional.linformer_attention(x, x, x, np.ones((5, 200)))
    half = np.clip(20000 * x, -6e4, 6e4).astype(np.float16)
    functional.linformer_attention(half, half, half, np.ones((5, 200)))
    functional.nystrom_attention(half, half, half, num_landmarks=8)


def test_errors():
    q = np.ones((2, 50, 4), np.float32)
    with pytest.raises(ValueError, match=r"linformer_attention\(\): key_projection has shape \(5, 9\)"):
        functional.linformer_attention(q, q, q, np.ones((5, 9)))
    with pytest.raises(ValueError, match=r"linformer_.*: value_projection has shape \(3, 5, 50\)"):
        functional.linformer_attention(q, q, q, np.ones((5, 50)), np.ones((3, 5, 50)))
    with pytest.raises(
        ValueError,
        match=r"linformer_attention\(\): key_projection has shape \(4, 2, 5, 50\); expected one that fits",
    ):
        functional.linformer_attention(q, q, q, np.ones((4, 2, 5, 50)))
    with pytest.raises(
        ValueError,
        match=r"linformer_attention\(\): value_projection has shape \(4, 50\); expected .* key_projection's",
    ):
        functional.linformer_attention(q, q, q, np.ones((5, 50)), np.ones((4, 50)))
    with pytest.raises(TypeError, match=r"linformer_attention\(\): scale is 'a'"):
        functional.linformer_attention(q, q, q, np.ones((5, 50)), scale="a")
    with pytest.raises(TypeError, match=r"linformer_attention\(\): out has dtype float64"):
        functional.linformer_attention(q, q, q, np.ones((5, 50)), out=np.ones((2, 50, 4)))
    with pytest.raises(ValueError, match=r"nystrom_attention\(\): num_iterations is .*; expected 0 to 1000"):
        functional.nystrom_attention(
            *np.ones((3, 1, 8, 4), np.float32), num_landmarks=2, num_iterations=2**40
        )
    with pytest.raises(ValueError, match=r"nystrom_attention\(\): num_landmarks is 0"):
        functional.nystrom_attention(q, q, q, num_landmarks=0)
    with pytest.raises(ValueError, match=r"nystrom_attention\(\): q has 2 heads and k 1"):
        functional.nystrom_attention(q, q[:1], q[:1])
    with pytest.raises(ValueError, match=r"lsh_attention\(\): num_buckets is 3; expected an even number"):
        functional.lsh_attention(q, q, num_buckets=3)
    with pytest.raises(ValueError, match=r"lsh_attention\(\): rotations has shape \(2,\)"):
        functional.lsh_attention(q, q, num_buckets=2, rotations=np.ones(2))
    with pytest.raises(ValueError, match=r"lsh_attention\(\): qk has shape"):
        functional.lsh_attention(q[None], np.stack([q, q]), num_buckets=2)
    with pytest.raises(ValueError, match=r"lsh_attention\(\): qk has shape"):
        functional.lsh_attention(q, q[:1], num_buckets=2)
    with pytest.raises(ValueError, match=r"lsh_attention\(\): qk has a head_dim of 0, shape \(2, 50, 0\)"):
        functional.lsh_attention(q[..., :0], q, num_buckets=2)
    with pytest.raises(TypeError, match=r"lsh_attention\(\): v has dtype float64; expected qk's"):
        functional.lsh_attention(q.astype(np.float32), q.astype(np.float64), num_buckets=2)


def test_gradients_of_tokens_that_have_only_themselves():
    """A score that is moved far away would lose its last digits, in float32."""
    qk, v, dout = normal(2, 70, 16), normal(2, 70, 7), normal(2, 70, 7, seed=1)
    options = {
        "num_buckets": 16,
        "chunk": 2,
        "num_rounds": 3,
        "causal": True,
        "rotations": normal(2, 3, 16, 8),
    }
    got, wide = (
        vjp(functional.lsh_attention, qk.astype(kind), v.astype(kind), **options)[1](dout.astype(kind))
        for kind in (qk.dtype, float)
    )
    for x, y in zip(got, wide, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6 * abs(y).max())
    out = functional.lsh_attention(qk, v, **options)
    np.testing.assert_allclose(out[:, 0], v[:, 0], rtol=1e-6)


def test_gradients_of_nothing():
    q = np.ones((2, 0, 4), np.float32)
    for x in vjp(functional.lsh_attention, q, q, num_buckets=2)[1](q):
        assert (x.shape, x.dtype) == (q.shape, q.dtype)
    k = np.ones((2, 5, 4), np.float32)
    for x, y in zip(vjp(functional.nystrom_attention, q, k, k)[1](q), (q, k, k), strict=True):
        np.testing.assert_array_equal(x, 0 * y)


def test_gradients_have_the_hashes_of_the_result():
    """Hashes are kept where nobody can draw them again."""
    rng = np.random.default_rng(1)
    q, v = rng.standard_normal((2, 2, 50, 4))
    out, pullback = vjp(functional.lsh_attention, q, v, num_buckets=4, chunk=8, rng=None)
    (dv,) = pullback(out, need=("dv",))
    # The result is linear in v: its product with dout is that of v with its gradient.
    np.testing.assert_allclose((out * out).sum(), (dv * v).sum(), rtol=1e-12)
