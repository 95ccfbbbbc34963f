"""stats= of attention(), against what the definition's probabilities give."""

import naive
import numpy as np
import pytest
from oracle import assert_close, assert_same_bits, eps, poison, spread_inputs, with_array
from precisions import lane
from shapes import EDGES

import fastattn
from fastattn._bench.cases import DTYPES, Shape, combine

ALL = ("row_max", "entropy", "top_k:5", "key_sums", "mean_weights")

SHAPES = {**EDGES, "many rows and keys": Shape("", 1, 2, 1, 150, 5000, 4, 4)}
VARIANTS = [
    ("plain",),
    ("causal",),
    ("kv_lengths", "sinks"),
    ("mask", "softcap"),
    ("bias_masking", "alibi"),
    ("documents",),
    ("window", "bias_heads"),
]


def measured(q, k, v, dtype, **arguments):
    """Statistics by definition, of probabilities in `dtype`."""
    probs = naive.attention(q, k, v, **arguments, dtype=dtype)[2]
    arguments.pop("sinks", None)
    scores, _ = naive.masked_scores(q, k, **arguments, dtype=dtype)
    with np.errstate(all="ignore"):
        terms = np.where(probs > 0, probs * np.log(probs), 0)
    return {
        "row_max": scores.max(-1, initial=-np.inf),
        "entropy": -terms.sum(-1),
        "top_k": -np.sort(-probs, -1),
        "key_sums": probs.sum(-2),
        "mean_weights": probs.mean(-3),
    }, probs


def check(stats, q, k, v, k_top=5, **arguments):
    """`stats`, everything of ALL, against the definition: within twice the error of the plain computation."""
    work = lane(q.dtype)
    arguments = with_array(arguments, q, k)
    ref, probs = measured(q, k, v, np.longdouble if work == np.float64 else np.float64, **arguments)
    plain, _ = measured(q, k, v, work, **arguments)
    weights, keys = stats["top_k"]
    ref["top_k"], plain["top_k"] = (
        np.pad(x["top_k"], [(0, 0)] * 3 + [(0, k_top)])[..., :k_top] for x in (ref, plain)
    )
    for name, wanted in ref.items():
        got = weights if name == "top_k" else stats[name]
        assert got.dtype == work
        finite = np.isfinite(wanted)
        error = abs(np.where(finite, plain[name], 0) - np.where(finite, wanted, 0)).max(initial=0)
        unit = eps(work) * np.maximum(1, abs(wanted))
        assert_close(got, wanted, 2 * error + 8 * unit)
    # The keys: distinct, of those weights, in that order; none where there is no weight.
    assert keys.dtype == np.int64
    assert (np.diff(weights, axis=-1) <= 0).all()
    assert ((keys >= 0) == (ref["top_k"] > 0)).all()
    ordered = np.sort(keys, -1)
    assert ((np.diff(ordered, axis=-1) > 0) | (ordered[..., 1:] < 0)).all()
    if probs.shape[-1]:
        at_keys = np.where(keys < 0, 0, np.take_along_axis(probs, np.maximum(keys, 0), -1))
        error = abs(plain["top_k"] - ref["top_k"]).max(initial=0)
        assert_close(weights, at_keys, np.full(keys.shape, 2 * error + 8 * eps(work)))


def flat(stats):
    """The arrays in a fixed order."""
    return [x for _, entry in sorted(stats.items()) for x in (entry if isinstance(entry, tuple) else [entry])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variants", VARIANTS, ids="+".join)
@pytest.mark.parametrize("name", SHAPES)
def test_statistics(name, variants, dtype, implementation):
    shape, rng = SHAPES[name], np.random.default_rng(7)
    q, k, v = spread_inputs(shape, dtype, rng, layout=("bhld", "blhd")["causal" in variants])
    arguments = combine(variants, shape, rng)
    out, lse, stats = fastattn.attention(q, k, v, return_lse=True, stats=ALL, **arguments)
    check(stats, q, k, v, **arguments)
    assert_same_bits((out, lse), fastattn.attention(q, k, v, return_lse=True, **arguments))


@pytest.mark.parametrize("name", SHAPES)
def test_each_alone_any_threads_any_neighbours(name, implementation):
    shape = SHAPES[name]._replace(batch=3)
    q, k, v = spread_inputs(shape, "float32", np.random.default_rng(0))
    _, stats = fastattn.attention(q, k, v, causal=True, stats=ALL, num_threads=1)
    for threads in (2, 7):
        _, again = fastattn.attention(q, k, v, causal=True, stats=ALL, num_threads=threads)
        assert_same_bits(flat(again), flat(stats))
    for one in ALL:
        key = one.partition(":")[0]
        _, alone = fastattn.attention(q, k, v, causal=True, stats=[one], num_threads=3)
        assert list(alone) == [key]
        assert_same_bits(flat(alone), flat({key: stats[key]}))
        _, row = fastattn.attention(q[1:2], k[1:2], v[1:2], causal=True, stats=[one], num_threads=2)
        assert_same_bits(flat(row), [x[1:2] for x in flat(alone)])


def test_one_head(implementation):
    q, k, v = (np.random.default_rng(i).standard_normal((n, 8)) for i, n in enumerate((6, 9, 9)))
    out, lse, stats = fastattn.attention(q, k, v, return_lse=True, stats=ALL)
    assert (out.shape, lse.shape) == ((6, 8), (6,))
    _, with_head = fastattn.attention(q[None], k[None], v[None], stats=ALL)
    assert [x.shape for x in flat(stats)] == [(6,), (9,), (6, 9), (6,), (6, 5), (6, 5)]
    for one, other in zip(flat(stats), flat(with_head), strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(("len_q", "len_k"), [(0, 5), (4, 0), (0, 0), (40, 0), (1, 1), (40, 1)])
def test_lengths_of_0_and_1(len_q, len_k, implementation):
    q, k, v = spread_inputs(Shape("", 2, 4, 2, len_q, len_k, 8), "float32", np.random.default_rng(0))
    _, stats = fastattn.attention(q, k, v, stats=ALL)
    check(stats, q, k, v)
    if len_q and not len_k:
        assert (stats["row_max"] == -np.inf).all()
        assert (stats["top_k"].keys == -1).all()


@pytest.mark.parametrize("len_q", [2, 50])
def test_rows_without_keys_and_nan(len_q, implementation):
    """Row 0 attends nothing and row 1 attends a NaN. What is masked never shows."""
    rng = np.random.default_rng(1)
    q, k, v = spread_inputs(Shape("", 1, 2, 2, len_q, 90, 8), "float32", rng)
    mask = np.arange(90) % 3 > 0
    poison(k, ~mask, rng)
    end = np.full(len_q, 77)
    end[0] = 0
    q[:, :, 1, 3] = np.nan
    arguments = {"mask": mask, "row_ranges": (0, end)}
    with np.errstate(all="ignore"):
        out, lse, stats = fastattn.attention(q, k, v, return_lse=True, stats=ALL, **arguments)
    assert (out[:, :, 0] == 0).all()
    assert np.isnan(lse[:, :, 1]).all()
    assert (stats["row_max"][:, :, 0] == -np.inf).all()
    assert (stats["entropy"][:, :, 0] == 0).all()
    assert (stats["top_k"].weights[:, :, 0] == 0).all()
    assert (stats["top_k"].keys[:, :, :2] == -1).all()
    assert np.isnan(stats["row_max"][:, :, 1]).all()
    assert np.isnan(stats["entropy"][:, :, 1]).all()
    assert np.isnan(stats["top_k"].weights[:, :, 1]).all()
    attended = mask & (np.arange(90) < 77)
    assert (np.isnan(stats["key_sums"]) == attended).all()
    assert (stats["key_sums"][..., ~attended] == 0).all()
    mean = stats["mean_weights"]
    assert (np.isnan(mean[:, 1]) == attended).all()
    assert (mean[:, 0] == 0).all()
    assert (mean[..., ~attended] == 0).all()
    assert np.isfinite(mean[:, 2:]).all()
    assert np.isfinite(stats["entropy"][:, :, 2:]).all()


@pytest.mark.parametrize("len_q", [1, 40])
def test_scores_of_minus_infinity(len_q, implementation):
    """Computed scores of -inf are no mask: they give NaN, and with a sink a weight of 0."""
    q = np.full((1, 1, len_q, 4), 1e30, np.float32)
    k = np.full((1, 1, 9, 4), -1e30, np.float32)
    with np.errstate(all="ignore"):
        _, stats = fastattn.attention(q, k, k, stats=ALL)
        _, sunk = fastattn.attention(q, k, k, stats=ALL, sinks=np.zeros(1, np.float32))
    assert np.isnan(stats["row_max"]).all()
    assert np.isnan(stats["entropy"]).all()
    assert (stats["top_k"].keys == -1).all()
    assert np.isnan(stats["key_sums"]).all()
    assert (sunk["row_max"] == -np.inf).all()
    assert (sunk["entropy"] == 0).all()
    assert (sunk["top_k"].keys == -1).all()
    assert (sunk["key_sums"] == 0).all()


@pytest.mark.parametrize("len_q", [1, 40])
@pytest.mark.parametrize("largest", [1e4, 1e6, 1e8])
def test_large_scores(largest, len_q, implementation):
    """Two scores of 1e8 have a weight of 1/2 each, though their lse in float32 has no digits for it."""
    q = np.full((1, 1, len_q, 1), largest, np.float32)
    k = np.array([1, 0.5, 1, 1 - 2**-24], np.float32).reshape(1, 1, 4, 1)
    _, stats = fastattn.attention(q, k, k, scale=1.0, stats=ALL)
    scores = (q * k.swapaxes(-1, -2)).astype(np.float64)  # as rounded to float32, where the next is 8 away
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    entropy = -np.where(probs > 0, probs * np.log(np.where(probs > 0, probs, 1)), 0).sum(-1)
    order = np.argsort(-scores[0, 0, 0], kind="stable")
    np.testing.assert_allclose(stats["entropy"], entropy, rtol=1e-5)
    np.testing.assert_allclose(stats["key_sums"], probs.sum(-2), rtol=1e-5)
    np.testing.assert_allclose(stats["mean_weights"], probs[0], rtol=1e-5)
    np.testing.assert_allclose(stats["top_k"].weights[..., :4], probs[..., order], rtol=1e-5)


def test_a_sink_that_outweighs_every_key(implementation):
    q, k, v = spread_inputs(Shape("", 1, 2, 2, 20, 30, 8), "float32", np.random.default_rng(0))
    for sink in (50.0, 200.0, -200.0):
        sinks = np.full(2, sink, np.float32)
        _, stats = fastattn.attention(q, k, v, stats=("row_max", "entropy"), sinks=sinks)
        ref, _ = measured(q, k, v, np.float64, sinks=sinks)
        np.testing.assert_allclose(stats["entropy"], ref["entropy"], rtol=1e-4, atol=1e-37)
        np.testing.assert_allclose(stats["row_max"], ref["row_max"], rtol=1e-5)


@pytest.mark.parametrize("len_q", [1, 9, 40])
@pytest.mark.parametrize("len_k", [7, 64, 700, 9000])
def test_top_of_equal_scores_is_the_first(len_q, len_k, implementation):
    """Scores are exactly 0, 1 or 2, in any order. Where there are fewer keys than k, all are listed."""
    rng = np.random.default_rng(len_k)
    q = np.ones((1, 2, len_q, 1), np.float32)
    k = rng.integers(0, 3, (1, 2, len_k, 1)).astype(np.float32)
    for k_top in (1, 8, 100):
        _, stats = fastattn.attention(q, k, k, scale=1.0, stats=[f"top_k:{k_top}"])
        order = np.argsort(-k[0, :, :, 0], axis=-1, kind="stable")[:, None, :k_top]
        keys = np.full((1, 2, len_q, k_top), -1)
        keys[..., : order.shape[-1]] = order
        np.testing.assert_array_equal(stats["top_k"].keys, keys)
        assert ((stats["top_k"].weights > 0) == (keys >= 0)).all()


@pytest.mark.parametrize("len_q", [1, 40])
def test_top_of_growing_scores(len_q, implementation):
    """Every key enters the list, and no two parts of the keys share one."""
    q, k = np.ones((1, 1, len_q, 1), np.float32), np.linspace(0, 9, 9000, dtype=np.float32)
    k = k.reshape(1, 1, -1, 1)
    _, stats = fastattn.attention(q, k, k, scale=1.0, stats=["top_k:3"])
    assert (stats["top_k"].keys == [8999, 8998, 8997]).all()


@pytest.mark.parametrize(
    ("stats", "error", "message"),
    [
        ("entropy", TypeError, r"attention\(\): stats is 'entropy'; expected a tuple of row_max, e"),
        (3, TypeError, r"stats is 3; expected a tuple"),
        ((3,), TypeError, r"an entry of stats is 3; expected one of"),
        (("max",), ValueError, r"an entry of stats is 'max'; expected one of row_max"),
        (("entropy:2",), ValueError, r"'entropy:2'"),
        (("top_k",), ValueError, r"'top_k'; expected top_k:k with k from 1 to 999999999, as top_k:8"),
        (("top_k:0",), ValueError, r"'top_k:0'"),
        (("top_k:-1",), ValueError, r"'top_k:-1'"),
        (("top_k:" + "9" * 5000,), ValueError, r"an entry of stats is 'top_k:9{29}\.\.\.'; expected"),
        (("top_k:2", "top_k:3"), ValueError, r"stats has top_k twice"),
    ],
)
def test_errors(stats, error, message):
    x = np.ones((1, 2, 3, 4), np.float32)
    with pytest.raises(error, match=message):
        fastattn.attention(x, x, x, stats=stats)


def test_explain():
    x = np.ones((1, 2, 3, 4), np.float32)
    assert not fastattn.explain(x, x, x, stats=ALL[:3])["second_pass"]
    assert fastattn.explain(x, x, x, stats=["key_sums"])["second_pass"]


@pytest.mark.parametrize("heads", [2, 6])
def test_sums_of_few_rows_with_ranges_do_not_depend_on_threads(heads, implementation):
    """Where a row's range ends within a block, how much of the block is looked at depends on the task."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        q, k, v = (
            x.astype(np.float32) for x in spread_inputs(Shape("", 2, heads, 2, 1, 1100, 8), "float32", rng)
        )
        begin = rng.integers(0, 900, (heads, 1))
        arguments = {"row_ranges": (begin, begin + rng.integers(1, 200, (heads, 1))), "stats": ("key_sums",)}
        one, many = (fastattn.attention(q, k, v, **arguments, num_threads=n)[1]["key_sums"] for n in (1, 8))
        np.testing.assert_array_equal(many, one)


def test_nothing_asked_for():
    x = np.ones((1, 2, 3, 4), np.float32)
    assert fastattn.attention(x, x, x, stats=())[1] == {}
