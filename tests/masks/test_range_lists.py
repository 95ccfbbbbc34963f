"""Lists of ranges in the kernels and their twin, against the definition with the same dense mask."""

import numpy as np
import pytest
from oracle import check, eps, expect, spread_inputs

import fastattn
from fastattn import masks
from fastattn._bench.cases import DTYPES, Shape, as_dtype, make_inputs

# Few rows per KV head (the dot kernel) and many, one row block and several, one split or part and several.
SHAPES = {
    "one query": Shape("", 2, 4, 2, 1, 700, 24, 17),
    "few rows": Shape("", 1, 4, 2, 3, 1200, 9),
    "one row block": Shape("", 2, 2, 1, 9, 1100, 16),
    "self": Shape("", 1, 4, 2, 131, 131, 33, 20),
    "cross": Shape("", 2, 2, 2, 70, 300, 8, 8),
    "many keys": Shape("", 1, 2, 1, 40, 9000, 4, 4),
}


def pattern(kind, shape, rng):
    """An array (1 or heads, len_q, len_k) that says who attends whom."""
    heads, len_q, len_k = shape.heads_q, shape.len_q, shape.len_k
    if kind == "runs":  # of any length, with gaps of any length
        steps = np.minimum(rng.geometric(0.1, (heads, len_q, 1 + len_k // 2)) * rng.integers(1, 30), len_k)
        edges = np.cumsum(steps, axis=-1)
        j = np.arange(len_k)
        inside = np.array([[np.searchsorted(e, j, side="right") % 2 for e in of_head] for of_head in edges])
        return inside.astype(bool)
    if kind == "blocks":  # which rows share; most are empty
        bitmap = rng.random((1, len_q // 16 + 1, len_k // 64 + 1)) < 0.4
        return bitmap.repeat(16, 1).repeat(64, 2)[:, :len_q, :len_k]
    if kind == "few":  # with rows that attend nothing
        return rng.random((1, len_q, len_k)) < 3 / len_k * rng.integers(0, 2, (1, len_q, 1))
    i, j = np.arange(len_q)[:, None] + len_k - len_q, np.arange(len_k)
    return ((i - j) % 5 == 0)[None] & (np.arange(heads)[:, None, None] != 1)


KINDS = ("runs", "blocks", "few", "strided")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_lists(name, kind, dtype, implementation):
    shape, rng = SHAPES[name], np.random.default_rng([KINDS.index(kind), 1])
    q, k, v = spread_inputs(shape, dtype, rng, layout=("bhld", "blhd")[kind == "few"])
    attend = pattern(kind, shape, rng)
    expected = expect(q, k, v, mask=attend)
    check(
        fastattn.attention(q, k, v, mask=masks.dense(attend), return_lse=True),
        expected,
        telling=kind != "few",
    )


@pytest.mark.parametrize(
    "more", ["causal", "window", "kv_lengths", "row_ranges", "bias", "alibi", "softcap", "sinks"]
)
@pytest.mark.parametrize("name", SHAPES)
def test_with_other_options(name, more, implementation):
    shape, rng = SHAPES[name], np.random.default_rng(2)
    q, k, v = make_inputs(shape, "float32", rng)
    attend = pattern("runs", shape, rng)
    options = {
        "causal": {"causal": True, "q_offset": shape.len_k // 2},
        "window": {"window": (shape.len_k, shape.len_k // 3)},
        "kv_lengths": {"kv_lengths": [shape.len_k - 1, shape.len_k // 2][: shape.batch], "q_offset": 0},
        "row_ranges": {"row_ranges": (rng.integers(0, shape.len_k, shape.len_q), shape.len_k - 3)},
        "bias": {
            "bias": np.where(rng.random((shape.len_q, shape.len_k)) < 0.3, -np.inf, 1).astype(np.float32)
        },
        "alibi": {"alibi_slopes": np.full(shape.heads_q, 0.01, np.float32)},
        "softcap": {"softcap": 3.0},
        "sinks": {"sinks": np.ones(shape.heads_q, np.float32)},
    }[more]
    expected = expect(q, k, v, mask=attend, **options)
    check(fastattn.attention(q, k, v, mask=masks.dense(attend), return_lse=True, **options), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_what_is_hidden_never_shows(name, kind, dtype, implementation):
    """NaN and Inf in keys and values that nobody attends, and in values that some rows do not attend."""
    shape, rng = SHAPES[name], np.random.default_rng([KINDS.index(kind), 3])
    shape = shape._replace(heads_kv=shape.heads_q)
    q, k, v = make_inputs(shape, dtype, rng)
    attend = pattern(kind, shape, rng)
    clean = fastattn.attention(q, k, v, mask=masks.dense(attend))
    seen = np.broadcast_to(attend.any(1), (shape.heads_q, shape.len_k))
    hidden = np.broadcast_to(~seen, k.shape[:3])
    k[hidden], v[hidden] = np.nan, np.inf
    np.testing.assert_array_equal(fastattn.attention(q, k, v, mask=masks.dense(attend)), clean)
    key = int(rng.integers(shape.len_k))
    v[:, :, key] = np.nan
    out = fastattn.attention(q, k, v, mask=masks.dense(attend))
    attends = np.broadcast_to(attend[..., key], out.shape[1:3])
    assert np.isnan(out[:, attends]).all()
    tolerance = 8 * eps(q.dtype) * np.abs(clean.astype(float)).max(initial=0)
    np.testing.assert_allclose(
        out[:, ~attends].astype(float), clean[:, ~attends].astype(float), atol=tolerance
    )


@pytest.mark.parametrize("name", SHAPES)
def test_threads_and_neighbours_change_no_bit(name, implementation):
    shape, rng = SHAPES[name]._replace(batch=3), np.random.default_rng(4)
    q, k, v = make_inputs(shape, "float32", rng)
    mask = masks.dense(pattern("runs", shape, rng))
    one = fastattn.attention(q, k, v, mask=mask, num_threads=1)
    np.testing.assert_array_equal(fastattn.attention(q, k, v, mask=mask, num_threads=5), one)
    np.testing.assert_array_equal(fastattn.attention(q[1:2], k[1:2], v[1:2], mask=mask), one[1:2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_range_a_row_is_the_same_computation(dtype, implementation):
    """A mask with one range in each row gives the bits of the same ranges in other words."""
    rng = np.random.default_rng(5)
    q, k, v = make_inputs(SHAPES["self"], dtype, rng)
    want = fastattn.attention(q, k, v, causal=True, window=(40, 0))
    np.testing.assert_array_equal(
        fastattn.attention(q, k, v, mask=masks.causal() & masks.window(40, 9)), want
    )
    mask = ~(~masks.causal() | ~masks.window(40, 9))
    np.testing.assert_array_equal(fastattn.attention(q, k, v, mask=mask), want)


def test_weights(implementation):
    shape, rng = SHAPES["self"], np.random.default_rng(6)
    q, k, _ = make_inputs(shape, "float32", rng)
    attend = pattern("runs", shape, rng)
    np.testing.assert_array_equal(
        fastattn.attention_weights(q, k, mask=masks.dense(attend)),
        fastattn.attention_weights(q, k, mask=attend),
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_explain_counts_as_of_the_array(name, kind, causal, implementation):
    shape, rng = SHAPES[name], np.random.default_rng(7)
    q, k, v = make_inputs(shape, "float32", rng)
    attend = pattern(kind, shape, rng)
    of_lists = fastattn.explain(q, k, v, mask=masks.dense(attend), causal=causal)
    attend = attend & np.tri(shape.len_q, shape.len_k, shape.len_k - shape.len_q, bool) if causal else attend
    of_array = fastattn.explain(q, k, v, mask=attend)
    assert of_lists == of_array


def test_lists_take_no_memory_of_the_scores():
    """A mask of a million queries and keys takes only the memory of its ranges."""
    n = 2**20
    mask = masks.window(3) | masks.first_keys(2)
    begin = masks.compile(mask, (1, n, n)).resolved.lists
    assert begin.ranges.shape[0] < 2 * n + 4
    q = np.ones((1, 64, 4), as_dtype("float32"))
    k = np.ones((1, n, 4), as_dtype("float32"))
    out = fastattn.attention(q, k, k, mask=mask, num_threads=1)
    np.testing.assert_array_equal(out, q)
