"""Masks: what is masked never shows, rows that attend nothing give 0, and every spelling means the same."""

import ml_dtypes
import numpy as np
import pytest
from oracle import assert_close, assert_same_bits, check, expect, poison, spread_inputs
from shapes import by_case, by_shape, every_dtype

import fastattn
from fastattn._bench.cases import DTYPES, Shape, as_dtype

# Many query rows a head, and one; keys over several blocks.
PREFILL = Shape("prefill", batch=2, heads_q=4, heads_kv=2, len_q=45, len_k=200, head_dim=24)
DECODE = Shape("decode", batch=2, heads_q=2, heads_kv=2, len_q=1, len_k=1500, head_dim=24)
every_shape, every_case = by_shape(PREFILL, DECODE), by_case(PREFILL, DECODE)


def attention(q, k, v, **arguments):
    return fastattn.attention(q, k, v, **arguments, return_lse=True)


def inputs(shape, dtype="float32", seed=0):
    return spread_inputs(shape, dtype, np.random.default_rng(seed))


def ways_to_hide(hidden, shape):
    """Every way to say that no query attends `hidden`, the last keys."""
    visible = int(np.flatnonzero(hidden)[0])
    last = {"q_offset": visible - shape.len_q}  # the last query stands at the last visible key
    return {
        "mask": {"mask": ~hidden},
        "bias": {"bias": np.where(hidden, -np.inf, np.float32(0)).astype(np.float32)},
        "kv_lengths": {"kv_lengths": visible},
        "row_ranges": {"row_ranges": (0, visible)},
        "causal": {"causal": True, **last},
        "window": {"window": (None, 0), **last},
    }


@pytest.mark.parametrize("way", ["mask", "bias", "kv_lengths", "row_ranges", "causal", "window"])
@every_case
def test_garbage_in_hidden_keys_never_shows(shape, way, dtype, implementation):
    q, k, v = inputs(shape, dtype)
    hidden = np.arange(shape.len_k) >= shape.len_k - 77
    arguments = ways_to_hide(hidden, shape)[way]
    expected = expect(q, k, v, **arguments)
    poison(k, hidden, np.random.default_rng(1))
    poison(v, hidden, np.random.default_rng(2))
    check(attention(q, k, v, **arguments), expected)


@pytest.mark.parametrize("with_mask", [False, True], ids=["bias", "bias_and_mask"])
@every_case
def test_garbage_in_tiles_that_a_bias_hides_never_shows(shape, with_mask, dtype, implementation):
    """Tiles of nothing but -inf are skipped, others are not. A mask may hide what the bias leaves."""
    q, k, v = inputs(shape, dtype)
    hidden = np.random.default_rng(0).random(-(-shape.len_k // 16)).repeat(16)[: shape.len_k] < 0.5
    hidden[64:320] = True
    bias = np.where(hidden, -np.inf, np.random.default_rng(1).random((shape.len_q, 1))).astype(np.float32)
    arguments = {"bias": bias}
    if with_mask:
        arguments["mask"] = (np.arange(shape.len_k) < shape.len_k // 2) | (np.arange(shape.len_k) % 3 == 0)
        hidden |= ~arguments["mask"]
    expected = expect(q, k, v, **arguments)
    poison(k, hidden, np.random.default_rng(1))
    poison(v, hidden, np.random.default_rng(2))
    check(attention(q, k, v, **arguments), expected)


@every_dtype
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_garbage_beyond_the_causal_edge_shows_to_later_rows_only(garbage, dtype, implementation):
    q, k, v = (x[..., :70, :] for x in inputs(PREFILL._replace(len_q=70, len_k=70), dtype))
    clean = expect(q, k, v, causal=True)
    v[0, 1, 50] = garbage
    v[1, 0, 3, 7] = garbage
    expected = expect(q, k, v, causal=True)
    assert np.isfinite(expected.out[0, 2:, :50]).all()
    assert not np.isfinite(expected.out[0, 2:, 50:]).any()
    out, lse = attention(q, k, v, causal=True)
    check((out, lse), expected)
    check((out[:, :, :3], lse[:, :, :3]), type(clean)(*(x[:, :, :3] for x in clean)))


@every_case
def test_garbage_for_some_rows_only(shape, dtype, implementation):
    """Lanes of one tile attend different keys: a row that does not attend a NaN does not see it."""
    q, k, v = inputs(shape._replace(len_q=max(shape.len_q, 2)), dtype)
    mask = np.random.default_rng(5).random((*q.shape[:-1], shape.len_k)) < 0.8
    bad = [3, 64, 130]
    mask[..., ::2, bad] = False
    v[..., bad, :] = [[np.nan], [np.inf], [-np.inf]]
    k[..., bad[0], :] = np.nan
    expected = expect(q, k, v, mask=mask)
    assert np.isfinite(expected.out[..., ::2, :]).all()
    assert np.isnan(expected.out[..., 1::2, :]).any()
    check(attention(q, k, v, mask=mask), expected)


@pytest.mark.parametrize("where", ["q", "k", "v"])
@every_case
def test_nan_where_attended_propagates(shape, dtype, where, implementation):
    arrays = dict(zip("qkv", inputs(shape, dtype), strict=True))
    arrays[where][1, 1, -1, 5] = np.nan
    expected = expect(**arrays)
    assert 0 < np.isnan(expected.out).sum() <= expected.out.size / 2
    check(attention(**arrays), expected)


@every_dtype
def test_nan_in_the_bias_where_attended_propagates(dtype, implementation):
    q, k, v = inputs(PREFILL, dtype)
    bias = np.zeros((45, 200), np.float32)
    bias[7, 199] = np.nan
    out, lse = attention(q, k, v, bias=bias)
    assert np.isnan(out[:, :, 7]).all()
    assert np.isnan(lse[:, :, 7]).all()
    assert np.isfinite(np.delete(out, 7, axis=2)).all()
    assert np.isfinite(attention(q, k, v, bias=bias, mask=~np.isnan(bias))[0]).all()


@every_case
@pytest.mark.parametrize("masked", ["mask", "bias", "kv_lengths", "row_ranges", "causal", "window"])
def test_nothing_to_attend_gives_zero(masked, shape, dtype, implementation):
    q, k, v = inputs(shape, dtype)
    poison(k, slice(None), np.random.default_rng(1))
    poison(v, slice(None), np.random.default_rng(2))
    arguments = {
        "mask": {"mask": np.zeros((shape.len_q, shape.len_k), bool)},
        "bias": {"bias": np.full((1, shape.len_k), -np.inf, np.float32)},
        "kv_lengths": {"kv_lengths": 0},
        "row_ranges": {"row_ranges": (70, 70)},
        "causal": {"causal": True, "q_offset": -shape.len_q},
        "window": {"window": (5, 5), "q_offset": 10 * shape.len_k},
    }[masked]
    out, lse = attention(q, k, v, **arguments)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


@every_case
def test_nothing_but_a_sink(shape, dtype, implementation):
    q, k, v = inputs(shape, dtype)
    sinks = np.linspace(-3, 90, shape.heads_q, dtype=np.float32)
    out, lse = attention(q, k, v, sinks=sinks, kv_lengths=0)
    assert (out == 0).all()
    np.testing.assert_allclose(lse, sinks[:, None] + np.zeros(lse.shape), rtol=4 * np.finfo(lse.dtype).eps)


@every_dtype
def test_a_sink_of_minus_infinity_is_none(dtype, implementation):
    q, k, v = inputs(PREFILL, dtype)
    mask = np.random.default_rng(0).random((45, 200)) < 0.5
    mask[10] = False
    sinks = np.full(4, -np.inf, np.float32)
    check(attention(q, k, v, sinks=sinks, mask=mask), expect(q, k, v, mask=mask))


@pytest.mark.parametrize("bias_dtype", ["float32", "q's"])
@every_case
def test_the_smallest_finite_bias_is_not_a_mask(shape, dtype, bias_dtype, implementation):
    """Hugging Face pads by adding finfo.min. A row of nothing else equals the plain computation."""
    q, k, v = inputs(shape._replace(len_q=3), dtype)
    bias_dtype = np.dtype(np.float32) if bias_dtype == "float32" else q.dtype
    bias = np.zeros((3, shape.len_k), bias_dtype)
    bias[0] = bias[1, shape.len_k // 2 :] = ml_dtypes.finfo(bias_dtype).min
    out, lse = attention(q, k, v, bias=bias)
    # Beside such a bias nothing is left of a score: the first row is a mean, and has a bound of its own.
    for rows in (slice(0, 1), slice(1, 3)):
        expected = expect(q[:, :, rows], k, v, bias=bias[rows])
        check((out[:, :, rows], lse[:, :, rows]), expected, telling=rows.start > 0)
    assert (out[:, :, 0] != 0).all()


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@every_shape
def test_a_finite_bias_never_becomes_a_mask(shape, dtype, implementation):
    """The smallest finite bias masks nothing, even if its sum with a score overflows: a mean comes out."""
    q, k, v = inputs(shape, dtype)
    bias_dtype = np.float64 if dtype == "float64" else np.float32
    q[...], k[...] = 1, -(float(np.finfo(bias_dtype).max) / 1e3 / shape.head_dim)
    bias = np.full((1, shape.len_k), np.finfo(bias_dtype).min)
    expected = expect(q, k, v, bias=bias, scale=1)
    assert_close(fastattn.attention(q, k, v, bias=bias, scale=1), expected.out, expected.out_tolerance)
    assert (expected.out != 0).all()


def test_a_mask_and_a_bias_of_every_broadcast_shape(implementation):
    q, k, v = inputs(PREFILL)
    rng = np.random.default_rng(0)
    batch, heads, len_q, len_k = 2, 4, 45, 200
    for shape in [
        (),
        (len_k,),
        (1, len_k),
        (len_q, 1),
        (len_q, len_k),
        (heads, 1, 1),
        (heads, len_q, len_k),
        (1, heads, 1, len_k),
        (batch, 1, 1, len_k),
        (batch, heads, len_q, len_k),
    ]:
        mask = rng.random(shape) < 0.8 if shape else np.True_
        bias = rng.standard_normal(shape).astype(np.float32)
        check(attention(q, k, v, mask=mask), expect(q, k, v, mask=np.asarray(mask)))
        check(attention(q, k, v, bias=bias), expect(q, k, v, bias=np.asarray(bias)))


@pytest.mark.parametrize("offset", [None, 0, 30, -10, (5, 150)], ids=str)
def test_causal_and_window_are_row_ranges(offset, implementation):
    q, k, v = inputs(PREFILL)
    start = np.asarray(155 if offset is None else offset)[..., None, None] + np.arange(45)
    expected = expect(q, k, v, mask=np.arange(200) <= start[..., None])
    check(attention(q, k, v, causal=True, q_offset=offset), expected)
    check(attention(q, k, v, window=(None, 0), q_offset=offset), expected)
    check(attention(q, k, v, row_ranges=(0, start + 1)), expected)
    near = (np.arange(200) >= start[..., None] - 40) & (np.arange(200) <= start[..., None] + 7)
    expected = expect(q, k, v, mask=near)
    check(attention(q, k, v, window=(40, 7), q_offset=offset), expected)
    check(attention(q, k, v, window=np.array([40, 7]), q_offset=offset), expected)
    check(attention(q, k, v, row_ranges=(start - 40, start + 8)), expected)


def test_the_last_query_stands_at_the_last_key_of_its_sequence(implementation):
    q, k, v = inputs(PREFILL)
    lengths = np.array([60, 199])
    default = attention(q, k, v, causal=True, kv_lengths=lengths)
    assert_same_bits(default, attention(q, k, v, causal=True, kv_lengths=lengths, q_offset=lengths - 45))
    check(default, expect(q, k, v, causal=True, kv_lengths=lengths))


def test_empty_ranges_may_be_anything(implementation):
    """begin >= end is empty, wherever; ranges are clipped to the keys."""
    q, k, v = inputs(PREFILL)
    begin = np.where(np.arange(45) % 5 == 0, 150, -(2**40))
    end = np.where(np.arange(45) % 5 == 0, 3, 2**40)
    expected = expect(q, k, v, mask=(np.arange(45) % 5 != 0)[:, None])
    check(attention(q, k, v, row_ranges=(begin, end)), expected)


@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@every_case
def test_a_score_of_minus_infinity_is_no_mask(shape, dtype, masked, implementation):
    """A score of -inf is a probability of 0, which does not shield an attended NaN in V."""
    q, k, v = inputs(shape._replace(len_q=3), dtype)
    q[..., 0], k[..., 0] = 1, 0
    k[:, :, 7, 0] = k[:, :, 21, 0] = -np.inf
    v[:, 1, 21, 5] = np.nan
    arguments = {"mask": np.arange(shape.len_k) % 5 > 0} if masked else {}
    expected = expect(q, k, v, **arguments)
    assert np.isnan(expected.out).sum() == expected.out[:, ::2, :, 5].size
    check(attention(q, k, v, **arguments), expected)


@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@every_case
def test_scores_of_nothing_but_minus_infinity(shape, dtype, masked, implementation):
    """A row whose scores are all -inf attends keys, so it is NaN by the definition of softmax."""
    q, k, v = inputs(shape._replace(len_q=3), dtype)
    q[..., 0], k[..., 0] = 1, 0
    k[:, 0, :, 0] = -np.inf
    arguments = {"mask": np.arange(shape.len_k) % 5 > 0} if masked else {}
    expected = expect(q, k, v, **arguments)
    assert np.isnan(expected.out).sum() == expected.out.size / 2
    check(attention(q, k, v, **arguments), expected)


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("way", ["mask", "bias", "row_ranges"])
@by_case(PREFILL, DECODE, more=[(DECODE._replace(len_k=4500, len_q=40), "float32")])
def test_rows_without_keys_beside_rows_without_finite_scores(shape, dtype, way, with_sinks, implementation):
    """Rows without keys give 0, and rows whose scores are all -inf NaN, wherever their only key lies."""
    shape = shape._replace(len_q=max(shape.len_q, 8))
    q, k, v = inputs(shape, dtype)
    q[..., 0], k[..., 0] = 1, 0
    kind, n = np.arange(shape.len_q) % 8, shape.len_k
    # Rows of kinds 0 .. 4 attend one of these keys each, of kind 5 none, of kinds 6 and 7 all.
    infinite = (0, 40, 100, n - 60, n - 1)
    k[:, :, infinite, 0] = -np.inf
    begin = np.array([*infinite, 7, 0, 0])[kind]
    end = np.where(kind < 5, begin + 1, np.where(kind == 5, begin, n))
    mask = (begin[:, None] <= np.arange(n)) & (np.arange(n) < end[:, None])
    arguments = {
        "mask": {"mask": mask},
        "bias": {"bias": np.where(mask, 0, -np.inf).astype(np.float32)},
        "row_ranges": {"row_ranges": (begin, end)},
    }[way]
    if with_sinks:
        arguments["sinks"] = np.linspace(-3, 3, shape.heads_q).astype(np.float32)
    expected = expect(q, k, v, **arguments)
    assert np.isnan(expected.out[..., kind < 5, :]).all() != with_sinks
    got = attention(q, k, v, **arguments)
    assert (got[0][..., kind == 5, :] == 0).all()
    check(got, expected, telling=False)


def test_a_mask_need_not_be_contiguous(implementation):
    q, k, v = inputs(PREFILL)
    mask = np.random.default_rng(0).random((200, 90)) < 0.6
    check(attention(q, k, v, mask=mask.T[::2]), expect(q, k, v, mask=mask.T[::2]))
    check(attention(q, k, v, mask=mask.T[::-2]), expect(q, k, v, mask=mask.T[::-2]))
    bias = np.random.default_rng(0).standard_normal((200, 90)).astype(np.float32)
    check(attention(q, k, v, bias=bias.T[::-2, ::-1]), expect(q, k, v, bias=bias.T[::-2, ::-1]))


def test_dtypes_of_a_bias(implementation):
    for dtype in DTYPES:
        q, k, v = inputs(PREFILL, dtype)
        bias = np.random.default_rng(0).standard_normal((45, 200))
        for bias_dtype in {"float32", dtype}:
            this = bias.astype(as_dtype(bias_dtype))
            check(attention(q, k, v, bias=this), expect(q, k, v, bias=this))
