"""The cache of keys and values by itself. layers/test_cache.py tests it with layers."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest
from layer_oracle import randomized
from refused import assert_refused, refused
from safetensors.numpy import save_file

import fastattn
from fastattn.layers import DecoderCache, KVCache, MultiHeadAttention, Rope
from fastattn.layers._cache import restored_on_error
from fastattn.positions import rope_frequencies

RNG = np.random.default_rng(0)


def tokens(count, batch=2, heads=3, head_dim=4, head_dim_v=5, dtype=np.float32):
    k, v = (RNG.standard_normal((batch, heads, count, d)).astype(dtype) for d in (head_dim, head_dim_v))
    return k, v


@pytest.mark.parametrize("capacity", [0, 3, 100])
def test_appended_tokens_follow_each_other(capacity):
    cache = KVCache(capacity)
    ks, vs = [], []
    for count in (1, 5, 0, 12, 40):
        k, v = tokens(count)
        ks.append(k)
        vs.append(v)
        before = cache.length
        all_k, all_v, kv_lengths, q_offset = cache.append(k, v)
        np.testing.assert_array_equal(all_k, np.concatenate(ks, axis=2))
        np.testing.assert_array_equal(all_v, np.concatenate(vs, axis=2))
        assert kv_lengths is None
        assert q_offset == before
    assert cache.length == 58
    np.testing.assert_array_equal(cache.lengths, [58, 58])


def test_a_token_costs_amortised_constant_time():
    """The cache returns views of its memory, which moves only when it doubles."""
    cache = KVCache()
    places = []
    for _ in range(1000):
        k, v, _, _ = cache.append(*tokens(1, batch=1))
        assert k.base is not None
        places.append((k.ctypes.data, v.ctypes.data))
    assert len(set(places)) <= 8  # 16, 32, ..., 1024, and 1 for luck
    assert cache.capacity == 1024
    assert cache.nbytes == 1024 * 3 * (4 + 5) * 4


def test_room_made_beforehand_is_not_moved():
    cache = KVCache(capacity=64)
    places = {cache.append(*tokens(1))[0].ctypes.data for _ in range(64)}
    assert len(places) == 1
    assert cache.capacity == 64


def test_attention_reads_it_in_place():
    cache = KVCache(capacity=10)
    cache.append(*tokens(4))
    k, v, kv_lengths, q_offset = cache.append(*tokens(1))
    q = np.ones((2, 6, 1, 4), np.float32)
    plan = fastattn.explain(q, k, v, kv_lengths=kv_lengths, q_offset=q_offset, causal=True)
    assert plan["copies"] == ()


def test_sequences_of_different_lengths():
    """Prompts are padded at their ends. In each sequence the next tokens overwrite the padding."""
    cache = KVCache()
    prompt, step, more = tokens(4), tokens(1), tokens(3)
    k, v, kv_lengths, q_offset = cache.append(*prompt, lengths=[4, 2])
    np.testing.assert_array_equal(kv_lengths, [4, 2])
    assert q_offset == 0
    assert k.shape[2] == v.shape[2] == 4
    k, v, kv_lengths, q_offset = cache.append(*step)
    np.testing.assert_array_equal(kv_lengths, [5, 3])
    np.testing.assert_array_equal(q_offset, [4, 2])
    k, v, kv_lengths, q_offset = cache.append(*more, lengths=[1, 3])
    np.testing.assert_array_equal(kv_lengths, [6, 6])
    np.testing.assert_array_equal(q_offset, [5, 3])
    for got, which in ((k, 0), (v, 1)):
        first = [prompt[which][0, :, :4], step[which][0], more[which][0, :, :1]]
        second = [prompt[which][1, :, :2], step[which][1], more[which][1]]
        np.testing.assert_array_equal(got[0], np.concatenate(first, axis=1))
        np.testing.assert_array_equal(got[1], np.concatenate(second, axis=1))
    assert cache.append(*tokens(1)).kv_lengths is None  # equal again: nothing to say
    assert cache.length == 7


def test_unequal_lengths_survive_growth():
    cache = KVCache()
    prompt = tokens(15)
    cache.append(*prompt, lengths=[15, 1])
    steps = [tokens(1) for _ in range(40)]
    for step in steps:
        k, _, kv_lengths, _ = cache.append(*step)
    np.testing.assert_array_equal(kv_lengths, [55, 41])
    np.testing.assert_array_equal(k[1, :, :1], prompt[0][1, :, :1])
    np.testing.assert_array_equal(k[1, :, 1:41], np.concatenate([step[0][1] for step in steps], axis=1))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_16_bit_cache(dtype):
    cache = KVCache(dtype=dtype)
    k, v = tokens(3)
    got = cache.append(k, v)
    assert got.k.dtype == got.v.dtype == dtype
    np.testing.assert_array_equal(got.k, k.astype(dtype))
    largest = np.full_like(v, np.finfo(np.float32).max)
    assert np.isposinf(cache.append(k, largest).v[:, :, 3:].astype(np.float32)).all()


def test_truncate_forgets_the_last_tokens():
    cache = KVCache()
    k, v = tokens(6)
    cache.append(k, v, lengths=[6, 3])
    cache.truncate(4)
    np.testing.assert_array_equal(cache.lengths, [4, 3])
    cache.truncate(2)
    np.testing.assert_array_equal(cache.lengths, [2, 2])
    new = tokens(1)
    got = cache.append(*new)
    np.testing.assert_array_equal(got.k, np.concatenate([k[:, :, :2], new[0]], axis=2))
    assert got.kv_lengths is None


@np.errstate(invalid="ignore")  # after the last token stands anything
def widened(got, name):
    return getattr(got, name).astype(np.float64) * getattr(got, f"{name}_scale").astype(np.float64)[..., None]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_a_cache_in_int8(dtype, implementation):
    """Each element errs by half of its scale at most; the largest of each row does not err."""
    cache = KVCache(dtype="int8")
    ks, vs = [], []
    for count in (5, 1, 0, 60):
        k, v = tokens(count, head_dim=67, head_dim_v=16, dtype=dtype)
        k[..., 3] *= k.dtype.type(50)
        v[:, :, :1] = 0
        ks.append(k)
        vs.append(v)
        got = cache.append(k, v)
    assert got.k.dtype == got.v.dtype == np.int8
    lane = np.float64 if dtype == np.float64 else np.float32
    assert got.k_scale.dtype == got.v_scale.dtype == lane
    assert got.k_scale.shape == got.v_scale.shape == (2, 3, 66)
    for name, parts in (("k", ks), ("v", vs)):
        x = np.concatenate(parts, axis=2).astype(np.float64)
        largest = np.abs(x).max(axis=-1)
        np.testing.assert_allclose(getattr(got, f"{name}_scale"), largest / 127, rtol=1e-6)
        error = np.abs(widened(got, name) - x)
        assert (error <= getattr(got, f"{name}_scale")[..., None] * 0.5001).all()
        assert (error.max(axis=-1) > largest / 127 / 4)[largest > 0].all()
        np.testing.assert_array_equal(np.abs(getattr(got, name)).max(axis=-1), 127 * (largest > 0))
    assert got._asdict().keys() == {"k", "v", "kv_lengths", "q_offset", "k_scale", "v_scale"}
    assert KVCache().append(k, v)._asdict().keys() == {"k", "v", "kv_lengths", "q_offset"}
    assert cache.nbytes == 2 * 3 * cache.capacity * (67 + 16 + 2 * np.dtype(lane).itemsize)


def test_what_append_returns_keeps_its_scales():
    k, v = tokens(3)
    got = KVCache(dtype="int8").append(k, v)
    assert "k_scale=array(" in repr(got)
    assert "v_scale=array(" in repr(got)
    changed = got._replace(q_offset=7, v_scale=got.k_scale)
    assert changed.q_offset == 7
    assert changed.k is got.k
    assert changed.k_scale is got.k_scale
    assert changed.v_scale is got.k_scale
    for copied in (type(got)._make(got._asdict().values()), copy.copy(got), pickle.loads(pickle.dumps(got))):
        assert type(copied) is type(got)
        np.testing.assert_array_equal(copied.v_scale, got.v_scale)
    plain = KVCache().append(k, v)
    assert "k_scale" not in repr(plain)
    assert plain._replace(k=v).k_scale is None
    with pytest.raises(ValueError, match=r"k_scale is not there; expected k, v, kv_lengths, q_offset"):
        plain._replace(k_scale=got.k_scale)


@pytest.mark.parametrize("dtype", [np.float64, ">f8"])
@pytest.mark.parametrize("name", ["k", "v"])
def test_float64_beyond_scales_in_float32_is_refused(name, dtype, implementation):
    cache = KVCache(dtype="int8")
    cache.append(*tokens(2))
    new = dict(zip("kv", tokens(3, dtype=dtype), strict=True))
    new[name][1, 2, 1, 3] = -1e300
    with pytest.raises(ValueError, match=rf"^KVCache.append\(\): {name} has -1e\+300; expected .* float32"):
        cache.append(**new)
    assert cache.length == 2
    padded = cache.append(**new, lengths=[3, 1])  # padding may hold anything
    assert np.isfinite(padded.k_scale[1, :, :3]).all()
    new[name][1, 2, 1, 3] = np.inf  # as a row that is not finite always is
    whole = cache.append(**new)
    attended = np.arange(whole.k.shape[2]) < whole.kv_lengths[:, None, None]
    assert (np.isnan(getattr(whole, f"{name}_scale")) & attended).sum() == 1
    begun = KVCache(dtype="int8")
    begun.append(*tokens(2, dtype=np.float64))
    new[name][1, 2, 1, 3] = -1e300
    assert np.isfinite(getattr(begun.append(**new), f"{name}_scale")).all()


@pytest.mark.parametrize("dtype", ["int8", "i1", np.int8, np.dtype("int8"), np.dtype("int8").newbyteorder()])
def test_int8_by_any_of_its_names(dtype):
    assert KVCache(dtype=dtype).append(*tokens(1)).k.dtype == np.int8


def test_a_decoder_cache_shows_sizes_and_no_numbers():
    cache = DecoderCache(KVCache(4))
    assert repr(cache) == "<DecoderCache: <KVCache: 0 of 4 tokens, empty>, no memory>"
    k, v = tokens(6)
    cache.keys_values, cache.memory = (k, v), np.ones((2, 6, 12))
    assert repr(cache).endswith(", memory (2, 3, 6, 4)>")


def test_rounding_to_int8_is_to_nearest_even(implementation):
    k = np.array([127, 0.5, 1.5, -2.5, 126.5, -126.5, 3.49999, -0.0]).reshape(1, 1, 1, 8)
    got = KVCache(dtype=np.int8).append(k, k.astype(">f8"))
    np.testing.assert_array_equal(got.k.ravel(), [127, 0, 2, -2, 126, -126, 3, 0])
    np.testing.assert_array_equal(got.v, got.k)
    assert got.k_scale == got.v_scale == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extremes_in_int8(dtype, implementation):
    """A number that is not finite makes its row alone NaN; the smallest numbers do not exceed 127."""
    info = np.finfo(dtype)
    k, _ = tokens(7, batch=1, heads=1, head_dim=20, dtype=dtype)
    k[0, 0, 1, 3], k[0, 0, 2, 19], k[0, 0, 3, 0] = np.nan, np.inf, -np.inf
    k[0, 0, 4], k[0, 0, 5] = info.smallest_subnormal * np.arange(171, 191), info.max
    got = KVCache(dtype="int8").append(k, -k)
    np.testing.assert_array_equal(np.isnan(got.k_scale[0, 0]), [0, 1, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(got.k[0, 0, 1:4], 0)
    np.testing.assert_array_equal(got.v, -got.k)
    k = k.astype(np.longdouble)[:, :, [0, 4, 5, 6]]
    scale = got.k_scale[:, :, [0, 4, 5, 6], None].astype(np.longdouble)
    assert (np.abs(got.k[:, :, [0, 4, 5, 6]] * scale - k) <= scale * 0.50005).all()


def test_a_cache_in_int8_moves_and_selects_scales_with_their_rows(implementation):
    cache, plain = KVCache(dtype="int8"), KVCache()
    prompt, steps = tokens(9, batch=3), [tokens(2, batch=3) for _ in range(20)]
    for one in (cache, plain):
        one.append(*prompt, lengths=[9, 4, 7])
        for step in steps[:10]:
            one.append(*step, lengths=[2, 1, 0])
        one.select([2, 0, 0])
        one.truncate(20)
        for step in steps[10:]:
            got = one.append(*step, lengths=[1, 2, 2])
        if one is cache:
            rounded = got
    np.testing.assert_array_equal(rounded.kv_lengths, got.kv_lengths)
    for b, length in enumerate(got.kv_lengths):
        for name in "kv":
            x, y = widened(rounded, name)[b, :, :length], getattr(got, name)[b, :, :length]
            assert (np.abs(x - y) <= getattr(rounded, f"{name}_scale")[b, :, :length, None] * 0.5001).all()


def test_select_reorders_sequences():
    cache = KVCache()
    k, v = tokens(4, batch=3)
    cache.append(k, v, lengths=[4, 2, 3])
    cache.select([2, 0, 0, 1])
    np.testing.assert_array_equal(cache.lengths, [3, 4, 4, 2])
    got = cache.append(*tokens(0, batch=4))
    np.testing.assert_array_equal(got.v[1], v[0])
    np.testing.assert_array_equal(got.k[3, :, :2], k[1, :, :2])


def test_select_forgets_the_longest():
    """After a selection the cache is as long as the longest sequence that it kept."""
    cache = KVCache()
    k, v = tokens(4, batch=3)
    cache.append(k, v, lengths=[4, 2, 2])
    cache.select([2, 1])
    assert cache.length == 2
    got = cache.append(*tokens(1))
    assert (got.k.shape[2], got.kv_lengths, got.q_offset) == (3, None, 2)
    np.testing.assert_array_equal(got.k[:, :, :2], k[[2, 1], :, :2])


def fail_behind(*steps):
    for step in steps:
        step()
    raise MemoryError


@pytest.mark.parametrize("dtype", [None, "float16", "int8"])
def test_keep_holds_what_each_head_keeps(dtype):
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 3, 2, 9, 8)).astype(np.float32)
    cache = KVCache(dtype=dtype)
    whole = cache.append(k, v, lengths=[9, 4, 6])._asdict()
    before = {name: np.array(x) for name, x in whole.items()}
    kept = np.array([[[0, 3, 8], [1, 2, 7]], [[0, 3, -1], [2, 3, -1]], [[-1, -1, -1]] * 2])
    cache.keep(kept)
    assert (cache.length, cache.lengths.tolist(), cache.offset.tolist()) == (3, [3, 2, 0], [9, 4, 6])
    with pytest.raises(ValueError, match=r"^KVCache.keep\(\): indices has tokens that are not held"):
        cache.keep([2])
    new = rng.standard_normal((2, 3, 2, 2, 8)).astype(np.float32)
    cached = cache.append(*new)
    assert cached.q_offset.tolist() == [3, 2, 0]  # masks count what is held
    assert cache.offset.tolist() == [11, 6, 8]
    held = cached._asdict()
    for name in held.keys() & {"k", "v", "k_scale", "v_scale"}:
        np.testing.assert_array_equal(whole[name], before[name])  # views of before
        for b, h in np.ndindex(3, 2):
            rows = [n for n in kept[b, h] if n >= 0]
            np.testing.assert_array_equal(held[name][b, h, : len(rows)], before[name][b, h, rows])
    q = rng.standard_normal((3, 4, 2, 8)).astype(np.float32)
    out = fastattn.attention(q, **held, causal=True)
    for b in range(3):
        n = held["kv_lengths"][b]
        one = {name: x[b, :, :n] for name, x in held.items() if name not in ("kv_lengths", "q_offset")}
        np.testing.assert_allclose(out[b], fastattn.attention(q[b], **one, causal=True), atol=1e-6)


def test_keep_of_what_was_kept_selected_saved_and_cut(tmp_path):
    x = np.arange(2 * 7.0).reshape(2, 1, 7, 1)
    cache = KVCache()
    cache.append(x, x)
    cache.keep([0, 2, 3, 5])
    cache.keep([1, 3])
    assert (cache.length, cache.offset.tolist()) == (2, [7, 7])
    cache.append(x[:, :, :2], x[:, :, :2], lengths=[1, 2])
    cache.select([1, 0])
    cache.save(tmp_path / "cache.safetensors")
    for each in (cache, KVCache.load(tmp_path / "cache.safetensors"), copy.copy(cache)):
        assert each.offset.tolist() == [9, 8]
        each.truncate(3)
        assert (each.lengths.tolist(), each.offset.tolist()) == ([3, 3], [8, 8])
        k, *_ = each.append(x[:, :, :1], x[:, :, :1])
        assert k[..., 0].tolist() == [[[9, 12, 7, 0]], [[2, 5, 0, 7]]]
    cache.keep(np.zeros(0, int))
    assert (cache.length, cache.offset.tolist()) == (0, [9, 9])


@pytest.mark.parametrize("tokens_of_step", [1, 4])
def test_layers_turn_tokens_after_keep_by_their_own_positions(tokens_of_step):
    """As a mask that hides the dropped tokens, whose positions are counted all the same."""
    layer = randomized(MultiHeadAttention(32, 4, rope=Rope(rope_frequencies(8))))
    x = RNG.standard_normal((2, 12, 32)).astype(np.float32)
    kept = [0, 3, 4, 7]
    hidden = np.triu(np.ones((12, 12), bool), 1)
    hidden[8:, np.setdiff1d(np.arange(8), kept)] = True
    expected = layer(x, attn_mask=hidden)[0][:, 8:]
    cache = KVCache()
    layer(x[:, :8], is_causal=True, cache=cache)
    cache.keep(kept)
    steps = np.split(x[:, 8:], 4 // tokens_of_step, axis=1)
    found = [layer(step, is_causal=True, cache=cache)[0] for step in steps]
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, atol=1e-5)


def test_restored_on_error():
    cache = KVCache(capacity=3)
    with pytest.raises(MemoryError), restored_on_error((cache, None)):
        fail_behind(lambda: cache.append(*tokens(5)))
    assert (cache.length, cache.capacity, cache.nbytes, cache.batch) == (0, 3, 0, None)
    cache.append(*tokens(2, heads=1, dtype=np.float64))  # of another shape and type
    kept = cache.append(*tokens(0, heads=1, dtype=np.float64))
    with pytest.raises(MemoryError), restored_on_error([DecoderCache(cache)]):
        fail_behind(lambda: cache.append(*tokens(30, heads=1, dtype=np.float64)), lambda: cache.select([1]))
    np.testing.assert_array_equal(cache.append(*tokens(0, heads=1, dtype=np.float64)).v, kept.v)


@pytest.mark.parametrize("before", [0, 3])
def test_an_interrupted_append_counts_nothing(before, monkeypatch):
    cache, rng = KVCache(dtype="int8"), np.random.default_rng(0)
    k = rng.standard_normal((1, 2, 3, 4)).astype(np.float32)
    if before:
        held = cache.append(k, k)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("fastattn._engine.rounding.dispatch.run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.append(k, k)
    assert cache.length == before
    again = cache.append(k, k)
    assert again.k.shape[2] == before + 3
    assert np.isfinite(again.k_scale).all()
    if before:
        np.testing.assert_array_equal(again.k[:, :, :before], held.k)


def test_what_it_holds_cannot_be_set():
    """Kernels take from these numbers where tokens go."""
    cache = KVCache()
    ends = cache.append(*tokens(2), lengths=[1, 2]).kv_lengths
    for name in ("length", "capacity", "lengths", "batch", "offset"):
        with pytest.raises(AttributeError, match=name):
            setattr(cache, name, 99)
    for seen in (ends, cache.offset):
        with pytest.raises(ValueError, match="read-only"):
            seen[0] = 99
    cache.lengths[0] = 99  # a copy
    assert cache.lengths.tolist() == [1, 2]


def test_lists_and_foreign_byte_order():
    cache = KVCache()
    k, v = tokens(2, dtype=np.float64)
    cache.append(k.astype(">f8"), v.astype(">f8"))
    cache.append(k[:, :, :0].astype(">f8"), v[:, :, :0])
    got = cache.append(k.tolist(), v.tolist())
    assert got.k.dtype == np.dtype(np.float64).newbyteorder("=")
    np.testing.assert_array_equal(got.k, np.concatenate([k, k], axis=2))
    np.testing.assert_array_equal(got.v, np.concatenate([v, v], axis=2))


ERRORS = r"""
c.append(*tokens(1, batch=3)) -> ValueError: k has shape \(3, 3, 1, 4\); expected \(2, 3,
c.append(*tokens(1, heads=2)) -> ValueError: k has shape
c.append(*tokens(1, head_dim_v=6)) -> ValueError: v has shape
c.append(*tokens(1, dtype=np.float64)) -> TypeError: k has dtype float64; expected float32
c.append(tokens(1)[0], tokens(2)[1]) -> ValueError: k and v have shapes
c.append(*tokens(2), lengths=[3, 1]) -> ValueError: lengths has 3; expected 0 to 2
c.append(*tokens(2), lengths=[1, 1, 1]) -> ValueError: lengths has shape
c.append(*tokens(2), lengths=[1.0, 1.0]) -> TypeError: lengths has dtype float64
c.truncate(6) -> ValueError: length is 6; expected 0 to 5
KVCache().keep([0]) -> ValueError: the cache is empty
c.keep([5]) -> ValueError: indices has 5; expected -1 to 4
c.keep([0.0]) -> TypeError: indices has dtype float64; expected integers
c.keep([[0], [1]]) -> ValueError: indices has shape \(2, 1\); expected one that fits \(batch, heads_kv, n\)
c.keep([0, 0]) -> ValueError: indices has tokens out of order
c.keep([3, 1]) -> ValueError: indices has tokens out of order
c.keep([-1, 1]) -> ValueError: indices has tokens out of order
c.keep([[[0, 1], [0, 1], [0, -1]]] * 2) -> ValueError: indices has tokens in other numbers by head
c.select([2]) -> ValueError: sequences has 2; expected 0 to 1
c.select(0) -> ValueError: sequences has shape \(\)
KVCache().select([0]) -> ValueError: the cache is empty
KVCache(-1) -> ValueError: capacity is -1
KVCache(dtype=np.int16) -> TypeError: dtype is .*int16.*float16, bfloat16, int8 or int4
DecoderCache(True) -> TypeError: tokens is of type bool; expected a KVCache
KVCache(dtype='fp16') -> TypeError: dtype is 'fp16'; expected float32
c.append(tokens(1)[0], tokens(1, dtype=np.float64)[1])
    -> TypeError: v has dtype float64; expected k's, float32
c.append(*(x.astype(int) for x in tokens(1))) -> TypeError: k has dtype int64; expected
c.append(tokens(1)[0], None) -> TypeError: append\(\): v is None; expected an array
"""


@refused(ERRORS)
def test_errors_change_nothing(code, error):
    cache = KVCache()
    k, _, _, _ = cache.append(*tokens(5))
    before = k.copy()
    assert_refused(code, error, c=cache, tokens=tokens)
    np.testing.assert_array_equal(cache.append(*tokens(0)).k, before)
    assert "5 of 16 tokens" in repr(cache)


@pytest.mark.parametrize("dtype", [None, np.float64, np.float16, ml_dtypes.bfloat16, np.int8])
@pytest.mark.parametrize("lengths", [None, [4, 2]])
def test_a_file_holds_a_cache(dtype, lengths, tmp_path):
    cache = KVCache(capacity=30, dtype=dtype)
    cache.append(*tokens(4), lengths=lengths)
    file = tmp_path / ("cache.bin" if lengths else "cache")  # whatever its name looks like
    cache.save(file)
    read, step = KVCache.load(file), tokens(1)
    if lengths:  # the file has nothing of what lies past a sequence's end
        assert not read.append(*tokens(0)).k[1, :, 2:].any()
    np.testing.assert_array_equal(read.lengths, cache.lengths)
    got, expected = read.append(*step)._asdict(), cache.append(*step)._asdict()
    assert got.keys() == expected.keys()
    np.testing.assert_array_equal(got.pop("q_offset"), expected.pop("q_offset"))
    np.testing.assert_array_equal(got.pop("kv_lengths", 0), expected.pop("kv_lengths", 0))
    for name, x in expected.items():
        assert got[name].dtype == x.dtype
        for b, length in enumerate(read.lengths):
            np.testing.assert_array_equal(got[name][b, :, :length], x[b, :, :length])


def test_files_that_hold_no_cache(tmp_path):
    file = tmp_path / "cache"
    with pytest.raises(ValueError, match=r"^KVCache.save\(\): the cache is empty"):
        KVCache().save(file)
    with pytest.raises(FileNotFoundError, match=r"^KVCache.load\(\): .* is missing"):
        KVCache.load(file)
    with pytest.raises(TypeError, match=r"^KVCache.load\(\): path is of type int"):
        KVCache.load(3)
    file.write_bytes(b"no file of tensors")
    with pytest.raises(ValueError, match="is not a sound safetensors file"):
        KVCache.load(file)
    save_file({"k": np.ones((1, 2, 3, 4), np.float32)}, file)
    with pytest.raises(ValueError, match="holds no cache; expected a file that save"):
        KVCache.load(file)
    save_file({"k": np.ones((1, 2, 3, 4), np.float32)}, file, {"fastattn.cache": '{"format": 1}'})
    with pytest.raises(ValueError, match="has the arrays k; expected"):
        KVCache.load(file)
    whole = {name: np.ones((1, 2, 3, 4), np.float32) for name in "kv"} | {"lengths": np.array([3])}
    for dropped, message in (
        (np.array([-1]), "negative number in dropped"),
        (np.ones(2, int), "dropped .2,."),
    ):
        save_file(
            {**whole, "dropped": dropped, "kept": np.array([2])}, file, {"fastattn.cache": '{"format": 1}'}
        )
        with pytest.raises(ValueError, match=message):
            KVCache.load(file)
    save_file({"k": np.ones((1, 2, 3, 4), np.float32)}, file, {"fastattn.cache": '{"format": 2}'})
    with pytest.raises(ValueError, match=r"the format of the cache in .* is 2; expected 1"):
        KVCache.load(file)


def test_truncating_after_eviction():
    """Tokens after the kept ones go, or all; kept ones alone cannot, as their positions are not known."""
    cache = KVCache()
    cache.append(*tokens(10))
    cache.keep([0, 5, 9])
    cache.append(*tokens(2))
    cache.truncate(4)
    assert (cache.length, cache.offset.tolist()) == (4, [11, 11])
    with pytest.raises(ValueError, match=r"KVCache.truncate\(\): length is 2; expected 0, or at least 3"):
        cache.truncate(2)
    cache.truncate(0)
    assert (cache.length, cache.offset) == (0, 0)
