"""Numbers at the edges: huge logits, denormals, large and small values, a maximum that moves."""

import ml_dtypes
import numpy as np
import pytest
from implementations import each_isa, forced
from oracle import check, eps, expect, spread_inputs
from shapes import by_case, by_shape, every_dtype

import fastattn
from fastattn import functional
from fastattn._bench.cases import Shape

PREFILL = Shape("prefill", batch=1, heads_q=4, heads_kv=2, len_q=35, len_k=300, head_dim=32)
DECODE = Shape("decode", batch=1, heads_q=3, heads_kv=3, len_q=1, len_k=1500, head_dim=32)
DOTS_PAIRS = ("amx", "avx512bf16", "neonbf16")  # instruction sets whose products of bfloat16 flush denormals
every_shape, every_case = by_shape(PREFILL, DECODE), by_case(PREFILL, DECODE)


def attention(q, k, v, **arguments):
    return fastattn.attention(q, k, v, **arguments, return_lse=True)


def inputs(shape, dtype):
    return spread_inputs(shape, dtype, np.random.default_rng(0))


def with_scores(scores, shape, dtype):
    """q, k, v: with a scale of 1 every query has exactly the score scores[j] with key j."""
    q, k, v = inputs(shape, dtype)
    q[...] = k[...] = 0
    q[..., 0] = 1
    k[..., 0] = scores
    assert (k[..., 0].astype(float) == scores).all(), "these scores are not exact in this dtype"
    return q, k, v


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@every_shape
def test_logits_of_ten_thousand(shape, dtype, implementation):
    """Keys are so near each other that they compete all the same: rounding shows in every row."""
    q, k, v = inputs(shape._replace(batch=3), dtype)
    k[...] = k[..., :1, :] + k * k.dtype.type(3e-4)
    scale = 1e4 / float(abs(q[:, :: shape.heads_q // shape.heads_kv] @ k.swapaxes(-1, -2)).max())
    expected = expect(q, k, v, scale=scale)
    assert abs(expected.lse).max() > 9e3
    check(attention(q, k, v, scale=scale), expected)


@every_case
def test_logits_of_ten_thousand_that_are_exact(shape, dtype, implementation):
    scores = 64.0 * np.random.default_rng(1).permutation(np.arange(shape.len_k) % 313 - 156)
    q, k, v = with_scores(scores, shape, dtype)
    got = attention(q, k, v, scale=1)
    check(got, expect(q, k, v, scale=1))
    ties = np.count_nonzero(scores == scores.max())
    np.testing.assert_allclose(got[1], scores.max() + np.log(ties), rtol=1e-6)


@pytest.mark.parametrize("order", ["rising", "falling", "last", "first", "zigzag"])
@every_case
def test_the_maximum_moves(shape, order, dtype, implementation):
    """Every block raises the running maximum, or none does, or the last key alone."""
    n = shape.len_k
    rising = np.arange(n) * 64 // n
    scores = {
        "rising": rising,
        "falling": rising[::-1],
        "last": np.where(np.arange(n) == n - 1, 200, rising % 3),
        "first": np.where(np.arange(n) == 0, 200, rising % 3),
        "zigzag": np.where(np.arange(n) % 2, rising, -rising),
    }[order].astype(float)
    q, k, v = with_scores(scores, shape, dtype)
    check(attention(q, k, v, scale=1), expect(q, k, v, scale=1))


@every_shape
def test_float16_scores_beyond_its_range(shape, implementation):
    """The plain computation in float16 overflows here, and the bound becomes 8 eps alone."""
    q, k, v = with_scores(32.0 * np.random.default_rng(0).permutation(shape.len_k), shape, "float16")
    expected = expect(q, k, v, scale=64)
    assert np.unique(expected.out_tolerance).size == 1
    check(attention(q, k, v, scale=64), expected)


@pytest.mark.parametrize("factor", [1e-30, 1e30])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@every_shape
def test_values_of_any_size(shape, dtype, factor, implementation):
    q, k, v = inputs(shape, dtype)
    v = (v.astype(float) * factor).astype(v.dtype)
    check(attention(q, k, v), expect(q, k, v))


# Tiles of queries, one row, and a group that is less than a tile; many blocks of keys.
LONG = [
    Shape(name, batch=1, heads_q=group, heads_kv=1, len_q=len_q, len_k=len_k, head_dim=8)
    for len_k in (2048, 8192)
    for name, group, len_q in (("tiles", 1, 40), ("row", 1, 1), ("group", 12, 1))
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", LONG, ids=lambda shape: f"{shape.name}-{shape.len_k}")
def test_values_of_one_sign(shape, dtype, implementation):
    """Sums over keys grow with their number, and so would rounding. A mean of 0 would hide both."""
    for seed, low in enumerate((0, 0.9, -1)):
        q, k, v = spread_inputs(shape, dtype, np.random.default_rng(seed))
        v[...] = np.random.default_rng(seed).uniform(low, low + 1, v.shape)
        check(attention(q, k, v), expect(q, k, v))
        check(attention(q * q.dtype.type(1e-3), k, v), expect(q * q.dtype.type(1e-3), k, v))


@pytest.mark.parametrize("len_q", [1, 16, 33])
def test_the_mean_of_a_million_values(len_q, implementation):
    """A sum of ones in one float32 accumulator would stop at 2^24."""
    n = 2**20 + 5
    q, k, v = (np.zeros((rows, 1), np.float32) for rows in (len_q, n, n))
    v[:, 0] = np.random.default_rng(0).random(n)
    out, lse = attention(q, k, v)
    np.testing.assert_allclose(out, np.full(q.shape, v.mean(dtype=float)), rtol=2 * eps(np.float32))
    np.testing.assert_allclose(lse, np.full(len_q, np.log(n)), rtol=2 * eps(np.float32))


@pytest.mark.parametrize("len_k", [4095, 4097, 9000])
def test_many_keys_in_parts(len_k, implementation):
    """Ranges begin and end in different parts of the keys, values are infinite, and the maximum moves."""
    shape = Shape("", batch=1, heads_q=2, heads_kv=1, len_q=70, len_k=len_k, head_dim=8)
    rng = np.random.default_rng(len_k)
    q, k, v = spread_inputs(shape, "float32", rng)
    begin = rng.integers(0, len_k, shape.len_q)
    end = begin + rng.integers(0, len_k, shape.len_q)
    arguments = {"row_ranges": (begin, end), "sinks": np.float32([1, -1])}
    check(attention(q, k, v, **arguments), expect(q, k, v, **arguments))
    check(attention(q, k, v, causal=True, q_offset=4070), expect(q, k, v, causal=True, q_offset=4070))
    v[..., 100, 0], v[..., 4090, 1], v[..., 3, 2], v[..., 4000, 2] = np.inf, -np.inf, np.inf, -np.inf
    k[..., 4094, :] *= 8
    check(attention(q * q.dtype.type(0.1), k, v), expect(q * q.dtype.type(0.1), k, v))
    check(attention(q, k, v, **arguments), expect(q, k, v, **arguments))


@pytest.mark.parametrize("factor", [1e-15, 1e15])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@every_shape
def test_queries_and_keys_of_any_size(shape, dtype, factor, implementation):
    q, k, v = inputs(shape, dtype)
    q, k = ((x.astype(float) * factor).astype(x.dtype) for x in (q, k))
    scale = float(factor**-2 / np.sqrt(shape.head_dim))
    check(attention(q, k, v, scale=scale), expect(q, k, v, scale=scale))


@pytest.mark.parametrize("scale", [100.0, -100.0])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@every_shape
def test_a_scale_that_overflows_queries_but_not_scores(shape, dtype, scale, implementation):
    q, k, v = inputs(shape, dtype)
    largest = float(ml_dtypes.finfo(q.dtype).max)
    q, k = (q.astype(float) * (largest / 32)).astype(q.dtype), (k.astype(float) / largest).astype(k.dtype)
    q[..., 0], k[..., 0] = 0, k.dtype.type(4e-38 if dtype != "float64" else 4e-308)
    k[..., 1] = 0
    got = attention(q, k, v, scale=scale)
    assert np.isfinite(got[0].astype(float)).all()
    if dtype == "bfloat16" and implementation in DOTS_PAIRS:  # may flush these keys
        return
    check(got, expect(q, k, v, scale=scale))


@pytest.mark.parametrize("softcap", [2e-38, 1e-20, 1e20, 1e38])
@every_shape
def test_a_softcap_at_the_ends_of_the_range(shape, softcap, implementation):
    q, k, v = inputs(shape, "float32")
    q[..., 0, :] = 0
    check(attention(q * 100, k, v, softcap=softcap), expect(q * 100, k, v, softcap=softcap))


@pytest.mark.parametrize("scale", [-3.0, -0.3, 0.0, 1e-30, 1.0, 5.0])
@every_dtype
def test_any_scale(scale, dtype, implementation):
    q, k, v = inputs(PREFILL, dtype)
    q = (q.astype(float) * 0.3).astype(q.dtype)
    check(attention(q, k, v, scale=scale), expect(q, k, v, scale=scale), telling=scale not in (0.0, 1e-30))


def smallest_normal(dtype):
    return float(ml_dtypes.finfo(dtype).smallest_normal)


@every_case
def test_denormal_values(shape, dtype, implementation):
    q, k, v = inputs(shape, dtype)
    v = (np.clip(v.astype(float), -3, 3) * smallest_normal(v.dtype) / 4).astype(v.dtype)
    assert np.count_nonzero(v) > v.size / 2
    got = attention(q, k, v)
    if dtype == "bfloat16" and implementation in DOTS_PAIRS:  # may flush them
        assert (abs(got[0].astype(float)) <= abs(v.astype(float)).max()).all()
    else:
        check(got, expect(q, k, v), telling=dtype != "bfloat16")


@pytest.mark.parametrize("head_dim", [32, 33])
@every_dtype
@each_isa
def test_denormal_results_do_not_depend_on_the_batch(isa, dtype, head_dim):
    """Beside a sequence of several splits of keys, and alone with one: rows are rounded in the same way."""
    shape = Shape("padded", batch=2, heads_q=2, heads_kv=2, len_q=12, len_k=600, head_dim=head_dim)
    q, k, v = inputs(shape, dtype)
    v = (np.clip(v.astype(float), -3, 3) * smallest_normal(v.dtype)).astype(v.dtype)
    with forced(isa):
        padded = fastattn.attention(q, k, v, kv_lengths=[20, 600])
        alone = fastattn.attention(q[:1], k[:1, :, :20], v[:1, :, :20])
    assert padded[:1].tobytes() == alone.tobytes()


@every_case
def test_denormal_queries_and_keys(shape, dtype, implementation):
    q, k, v = inputs(shape, dtype)
    q, k = ((x.astype(float) * smallest_normal(x.dtype) / 4).astype(x.dtype) for x in (q, k))
    assert min(np.count_nonzero(q), np.count_nonzero(k)) > 0
    check(attention(q, k, v), expect(q, k, v), telling=False)
    out, lse = attention(q, k, v)
    np.testing.assert_allclose(lse, np.log(shape.len_k), rtol=1e-6)
    assert (out != 0).all()


def test_denormals_of_the_caller_survive(implementation):
    """Denormals survive: -ffast-math would flush them to zero in the whole process."""
    tiny = np.full(1000, 1e-40, np.float32)
    fastattn.attention(*(np.ones((4, 200, 64), np.float32) for _ in range(3)))
    assert (tiny * np.float32(0.5) != 0).all()


@every_dtype
def test_sinks_of_any_size(dtype, implementation):
    q, k, v = inputs(PREFILL, dtype)
    for sinks in ([-1e4, -5, 0, 8], [3, 4, 5, 6]):
        sinks = np.array(sinks, np.float32)
        check(attention(q, k, v, sinks=sinks), expect(q, k, v, sinks=sinks))
    out, lse = attention(q, k, v, sinks=np.full(4, 1e4, np.float32))
    assert (abs(out.astype(float)) < 1e-30).all()
    assert (lse == 1e4).all()


def test_large_alibi_slopes_and_distances(implementation):
    shape = PREFILL._replace(len_k=64)
    q, k, v = inputs(shape, "float32")
    arguments = {"alibi_slopes": np.array([0.0, 1e-3, 10.0, -0.1], np.float32), "q_offset": 2**20}
    check(attention(q, k, v, **arguments), expect(q, k, v, **arguments))


@each_isa
@pytest.mark.parametrize("len_q", [1, 40])
@pytest.mark.parametrize(("dtype", "bits"), [("float32", 100), ("float64", 996)])
def test_probabilities_below_2_to_that_power_are_0(dtype, bits, len_q, isa):
    """Every kernel drops tiny probabilities: their products would be denormal, and x86 is slow with those."""
    q, k, v = np.zeros((1, 2, len_q, 1), dtype), np.zeros((1, 2, 3, 1), dtype), np.zeros((1, 2, 3, 1), dtype)
    v[:, :, 1], mix = 1, np.eye(2)
    for below, is_0 in ((bits * np.log(2) - 0.1, False), (bits * np.log(2) + 0.1, True)):
        k[:, :, 1:] = -below
        with forced(isa):
            outs = [
                fastattn.attention(q + 1, k, v, scale=1.0),
                functional.talking_heads_attention(q + 1, k, v, mix, mix, scale=1.0),
                functional.top_k_attention(q + 1, k, v, top_k=2, scale=1.0),
                # tangents of 1, -1 and -1
                functional.additive_attention(q, np.sign(k + 1) * 30, v, np.ones(1), scale=below / 2),
                functional.sigmoid_attention(q, k, v, sigmoid_bias=-below),
            ]
        assert [bool((out == 0).all()) for out in outs] == [is_0] * len(outs)
