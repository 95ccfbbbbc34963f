"""flash_attn_with_kvcache on arrays: what it writes and computes, and that errors come before both."""

import flash
import ml_dtypes
import numpy as np
import pytest
from oracle import assert_same_bits, check, expect
from refused import assert_refused, refused

import fastattn.flash_attn as fa

GARBAGE = np.nan  # in rows that nobody may read


def drawn(seed, dtype=np.float32):
    """A call, drawn from all that combines: arguments by name, and what the oracle knows of the rows."""
    rng = np.random.default_rng(seed)

    def one_of(*values):
        return values[rng.integers(len(values))]

    batch, (heads_q, heads_kv), head_dim = one_of(1, 2, 3), one_of((6, 6), (6, 2), (6, 1)), one_of(16, 59, 64)
    len_q, new = one_of(1, 1, 3, 64, 70), one_of(None, 0, 1, 1, 3, 64)
    paged, page, rows = one_of(True, False), one_of(1, 7, 16, 64, 256), one_of(130, 339)
    where = {}
    if paged:
        count = -(-rows // page)
        where["block_table"] = rng.permutation(batch * count + 2)[: batch * count].reshape(batch, count)
        where["block_table"] = where["block_table"].astype(
            one_of(np.int32, np.int64, np.uint8 if page > 8 else np.int32)
        )
        shape, rows = (batch * count + 2, page), count * page
    elif one_of(True, False):
        where["batch_idx"], shape = rng.permutation(batch + 2)[:batch], (batch + 2, rows)
    else:
        shape = (batch + one_of(0, 1), rows)
    lengths = rng.integers(0, rows - (new or 0) + 1, batch).astype(np.int32)
    if one_of(True, False):
        lengths[:] = lengths[0]
    total = lengths + (new or 0)
    leftpad = rng.integers(0, np.maximum(lengths, 0) + 1) if one_of(True, False) else np.zeros(batch, int)
    caches = [np.full((*shape, heads_kv, head_dim), GARBAGE, dtype) for _ in range(2)]
    for b in range(batch):
        for row in range(leftpad[b], lengths[b]):
            for cache in caches:
                place = flash.place(b, row, shape[1], **where)
                cache[place] = rng.standard_normal((heads_kv, head_dim)).astype(dtype)
    q = rng.standard_normal((batch, len_q, heads_q, head_dim)).astype(dtype)
    call = {"q": q, "k_cache": caches[0], "v_cache": caches[1]}
    if new is not None:
        call |= {x: rng.standard_normal((batch, new, heads_kv, head_dim)).astype(dtype) for x in "kv"}
        if one_of(True, False):
            pairs = one_of(head_dim // 4, head_dim // 2)
            angle = rng.random((rows + 70, pairs)) * 7
            call |= {"rotary_cos": np.cos(angle).astype(dtype), "rotary_sin": np.sin(angle).astype(dtype)}
            call["rotary_interleaved"] = one_of(True, False)
    call["cache_seqlens"] = (
        int(lengths[0]) if (lengths == lengths[0]).all() and one_of(True, False) else lengths
    )
    call |= {"cache_batch_idx" if name == "batch_idx" else name: x for name, x in where.items()}
    if leftpad.any():
        call["cache_leftpad"] = leftpad
    options = one_of(
        {}, {"causal": True}, {"causal": True, "window_size": (20, 0)}, {"window_size": (9, 13)},
        {"softcap": 3.0}, {"alibi": np.linspace(0.1, 1, 6)},
        {"alibi": np.linspace(0.1, 1, 6 * batch).reshape(batch, 6), "causal": True},
        {"scale": 0.4, "causal": True},
    )  # fmt: skip
    names = {"alibi": "alibi_slopes", "scale": "softmax_scale"}
    call |= {names.get(name, name): x for name, x in options.items()}
    return call, where, options, lengths, leftpad, total


def hold(call, where, options, lengths, leftpad, total, bound):
    """Run a call: its cache and its result are those of the definition."""
    before = call["k_cache"].copy(), call["v_cache"].copy()
    out, lse = fa.flash_attn_with_kvcache(**call, return_softmax_lse=True)
    q, k, v, page = call["q"], call.get("k"), call.get("v"), before[0].shape[1]
    len_q = q.shape[1]
    if "rotary_cos" in call:
        tables = call["rotary_cos"], call["rotary_sin"], call["rotary_interleaved"]
        own = options.get("causal", False) or options.get("window_size", (-1, -1)) != (-1, -1)
        steps = np.arange(len_q) if own else np.zeros(len_q, int)
        q = flash.turned_rows(q, [n + steps for n in lengths], *tables)
        k = flash.turned_rows(k, [n + np.arange(k.shape[1]) for n in lengths], *tables)
    for cache, old, rows in zip((call["k_cache"], call["v_cache"]), before, (k, v), strict=True):
        if rows is not None:
            for b, i in np.ndindex(rows.shape[:2]):
                place = flash.place(b, lengths[b] + i, page, **where)
                np.testing.assert_allclose(*(np.float64(x) for x in (cache[place], rows[b, i])), atol=bound)
                old[place] = cache[place]
        np.testing.assert_array_equal(np.float64(cache), np.float64(old))  # and nothing else was written
    for b in range(len(q)):
        keys = [
            flash.keys_of(x, b, leftpad[b], total[b], **where) for x in (call["k_cache"], call["v_cache"])
        ]
        slopes = options.get("alibi")
        more = {} if slopes is None else {"alibi": slopes[b] if slopes.ndim == 2 else slopes}
        arguments = flash.options_of(len_q, total[b] - leftpad[b], **options | more)
        by_head = [x.swapaxes(-3, -2)[None] for x in (q[b], *keys)]
        expected = expect(*by_head, **arguments)
        if "rotary_cos" in call:  # the queries that were attended are rounded otherwise than these
            np.testing.assert_allclose(out[b], expected.out[0].swapaxes(0, 1), atol=20 * bound)
        else:
            check((out[b : b + 1].swapaxes(1, 2), lse[b : b + 1]), expected, telling=False)


@pytest.mark.parametrize("seed", range(150))
def test_the_definition(implementation, seed):
    hold(*drawn(seed), bound=2e-6)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("dtype", "bound"), [(np.float64, 1e-14), (np.float16, 4e-3), (ml_dtypes.bfloat16, 4e-2)]
)
def test_types(implementation, dtype, bound, seed):
    hold(*drawn(1000 + seed, dtype), bound=bound)


def cache_of(batch=2, rows=64):
    rng = np.random.default_rng(0)
    shapes = (
        (batch, 1, 4, 16),
        (batch, rows, 2, 16),
        (batch, rows, 2, 16),
        (batch, 1, 2, 16),
        (batch, 1, 2, 16),
    )
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def test_no_lengths_are_all_rows():
    q, k_cache, v_cache, *_ = cache_of()
    found = fa.flash_attn_with_kvcache(q, k_cache, v_cache)
    assert_same_bits([found], [fa.flash_attn_func(q, k_cache, v_cache)])


def test_step_by_step_is_all_at_once():
    """In a cache of 16 bits under queries of 32, too: new rows are rounded to it."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 40, heads, 32)).astype(np.float32) for heads in (4, 2, 2))
    k_cache, v_cache = np.zeros((2, 2, 64, 2, 32), np.float16)
    outs = [
        fa.flash_attn_with_kvcache(
            q[:, [i]], k_cache, v_cache, k[:, [i]], v[:, [i]], cache_seqlens=np.full(2, i), causal=True
        )
        for i in range(40)
    ]
    whole = fa.flash_attn_func(q, k.astype(np.float16), v.astype(np.float16), causal=True)
    np.testing.assert_allclose(np.concatenate(outs, 1), whole, atol=1e-5)
    np.testing.assert_array_equal(k_cache[:, :40], k.astype(np.float16))


def test_values_of_another_head_dim_and_any_strides():
    q, k_cache, _, k, _ = cache_of()
    k_cache = k_cache.swapaxes(1, 2).copy().swapaxes(1, 2)  # (batch, heads, rows, head_dim) in memory
    v_cache, v = k_cache[..., :9].copy(), k[..., :9]
    out = fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=[5, 7])
    assert out.shape == (2, 1, 4, 9)
    np.testing.assert_array_equal(k_cache[[0, 1], [5, 7]], k[:, 0])
    np.testing.assert_array_equal(v_cache[[0, 1], [5, 7]], v[:, 0])


def test_nothing_is_something_to_write():
    """No sequence, no query, no new key."""
    q, k_cache, v_cache, k, v = cache_of()
    out = fa.flash_attn_with_kvcache(
        q[:0], k_cache[:0], v_cache[:0], k[:0], v[:0], cache_seqlens=np.zeros(0, int)
    )
    assert out.shape == (0, 1, 4, 16)
    out = fa.flash_attn_with_kvcache(q[:, :0], k_cache, v_cache, k, v, cache_seqlens=[1, 2], causal=True)
    assert out.shape == (2, 0, 4, 16)
    np.testing.assert_array_equal(k_cache[[0, 1], [1, 2]], k[:, 0])
    out = fa.flash_attn_with_kvcache(q, k_cache[:, :0], v_cache[:, :0], k[:, :0], v[:, :0], cache_seqlens=0)
    assert not out.any()


def test_caches_in_one_array_that_are_apart():
    q, k_cache, v_cache, k, v = cache_of()
    both = np.stack([k_cache, v_cache], 2)
    expected = fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=[5, 7])
    found = fa.flash_attn_with_kvcache(q, both[:, :, 0], both[:, :, 1], k, v, cache_seqlens=[5, 7])
    assert_same_bits([found], [expected])
    np.testing.assert_array_equal(both, np.stack([k_cache, v_cache], 2))


@pytest.mark.parametrize("lengths", [3, [3, 3], [3, 4]], ids=str)
def test_views_of_the_cache_are_read_before_it_is_written(lengths):
    _, k_cache, v_cache, *_ = cache_of()
    for turn in (1, -1):
        results = []
        for own in (True, False):
            caches = k_cache.copy(), v_cache.copy()
            for a, b in (caches, caches[::-1]):
                given = a[:, 3:5], a[:, 2:4][:, ::turn], a[:, 4:6]
                q, k, v = (x.copy() if own else x for x in given)
                results.append([fa.flash_attn_with_kvcache(q, a, b, k, v, cache_seqlens=lengths)])
            results[-1] += caches
        assert_same_bits(results[0] + results[1], results[2] + results[3])


NAMES = dict(zip(["q", "kc", "vc", "k", "v"], cache_of(), strict=True))
NAMES |= {"w": fa.flash_attn_with_kvcache, "np": np, "t": np.ones((64, 8), np.float32)}
NAMES |= {"pk": NAMES["kc"].reshape(8, 16, 2, 16), "pv": NAMES["vc"].reshape(8, 16, 2, 16)}
READ_ONLY = NAMES["kc"].copy()
READ_ONLY.flags.writeable = False
NAMES["k20"] = NAMES["k"].repeat(20, 1)
NAMES |= {"fixed": READ_ONLY, "one": np.broadcast_to(NAMES["kc"][:1], NAMES["kc"].shape).copy()}
NAMES["one"] = np.lib.stride_tricks.as_strided(NAMES["one"], strides=(0, *NAMES["one"].strides[1:]))

# Rows, and pages, that begin in the middle of the one before.
NAMES["over"] = np.lib.stride_tricks.as_strided(NAMES["kc"].copy(), (2, 64, 2, 16), (4096, 64, 64, 4))
NAMES["pover"] = np.lib.stride_tricks.as_strided(NAMES["vc"].copy(), (8, 16, 2, 16), (1024, 128, 64, 4))


@refused(r"""
w(q, kc, vc, k, v)
    -> ValueError: ^flash_attn_with_kvcache\(\): cache_seqlens is None; expected where the new keys go
w(q, kc, vc, k, cache_seqlens=3) -> ValueError: ^flash_attn_with_kvcache\(\): k is given without v
w(q, kc, vc, k, v, cache_seqlens=64)
    -> ValueError: cache_seqlens has 64 and k 1 new keys; .*the 64 rows of a sequence
w(q, kc, vc, k, v, cache_seqlens=[3, 64]) -> ValueError: cache_seqlens has 64 and k 1 new keys
w(q, kc, vc, cache_seqlens=65)
    -> ValueError: cache_seqlens has 65; expected at least 0, and at most the 64 rows
w(q, kc, vc, cache_seqlens=[3, -1]) -> ValueError: cache_seqlens has -1; expected at least 0
w(q, kc, vc, cache_seqlens=[3.0, 1.0]) -> TypeError: cache_seqlens has dtype float64; expected integers
w(q, kc, vc, cache_seqlens=[3, 1, 2])
    -> ValueError: cache_seqlens has shape \(3,\); expected \(2,\), or one number
w(q, kc, vc, k[:1], v[:1], cache_seqlens=3)
    -> ValueError: k has shape \(1, 1, 2, 16\); expected \(2, 1, 2, 16\), as q
w(q, kc, vc, k, v[..., :9], cache_seqlens=3)
    -> ValueError: v has shape \(2, 1, 2, 9\); expected .* as k and v_cache
w(q, kc, vc, k.astype(int), v, cache_seqlens=3) -> TypeError: k has dtype int64
w(q, kc[:1], vc[:1])
    -> ValueError: k_cache has shape \(1, 64, 2, 16\); expected at least 2 sequences, as q has
w(q, kc, vc[:1], k, v, cache_seqlens=3) -> ValueError: v_cache has shape .*; expected 2 in
w(q[:1], kc[:1], vc) -> ValueError: v_cache has shape .*; expected 1 in the first axis, as k_cache
w(q, kc, kc[::-1], k, v, cache_seqlens=3) -> ValueError: v_cache shares memory with k_cache
w(q, over, vc, k, v, cache_seqlens=3) -> ValueError: k_cache cannot be written in place: .*overlaps itself
w(q, pk, pover, k, v, block_table=[[0], [1]], cache_seqlens=3)
    -> ValueError: v_cache cannot be written in place: .*overlaps itself
w(q, kc, vc, rotary_interleaved="no") -> TypeError: rotary_interleaved is 'no'
w(q, kc, vc, num_splits="x") -> TypeError: num_splits is 'x'; expected an integer
w(q, kc, vc, num_splits=-1) -> ValueError: num_splits is -1; expected at least 0
w(q, kc[0], vc) -> ValueError: k_cache has shape \(64, 2, 16\); expected \(batch, length, heads, head_dim\)
w(q, kc, vc[:, 1:]) -> ValueError: v_cache has a length of 63
w(q.astype(np.float64), kc, vc) -> TypeError: q, k_cache and v_cache have dtypes float64
w(q, fixed, vc, k, v, cache_seqlens=3) -> ValueError: k_cache cannot be written in place: it is read-only
w(q, kc, one, k, v, cache_seqlens=3) -> ValueError: v_cache cannot be written in place: .*overlaps itself
w(q, kc, kc[..., ::-1], k, v, cache_seqlens=3) -> ValueError: v_cache cannot be written in place
w(q, kc.tolist(), vc, k, v, cache_seqlens=3) -> TypeError: k_cache is of type list; expected an ndarray
w(q, kc, vc, k, v, t, cache_seqlens=3)
    -> ValueError: rotary_sin is None; expected rotary_cos, rotary_sin, k and v
w(q, kc, vc, rotary_cos=t, rotary_sin=t, cache_seqlens=3) -> ValueError: k is None; expected rotary_cos
w(q, kc, vc, k, v, t[:9], t[:9], cache_seqlens=9)
    -> ValueError: rotary_cos has 9 positions; expected at least 10
w(q, kc, vc, k, v, t, t[:, :3], cache_seqlens=9)
    -> ValueError: rotary_sin has shape \(64, 3\); expected \(64, 8\)
w(q, kc, vc, k, v, t[0], t[0], cache_seqlens=9) -> ValueError: rotary_cos has shape \(8,\)
w(q, kc, vc, k, v, t.repeat(2, 1), t.repeat(2, 1), cache_seqlens=9) -> ValueError: half of a head_dim of 16
w(q, kc, vc, k, v, t, t, 9, rotary_interleaved=1) -> TypeError: rotary_interleaved is 1
w(q, kc, vc, cache_batch_idx=[0, 2]) -> ValueError: cache_batch_idx has 2; expected 0 to 1
w(q, kc, vc, cache_batch_idx=[0, -1]) -> ValueError: cache_batch_idx has -1; expected 0 to 1
w(q, kc, vc, cache_batch_idx=[0]) -> ValueError: cache_batch_idx has shape \(1,\); expected \(2,\)
w(q, kc, vc, k, v, cache_seqlens=3, cache_batch_idx=[1, 1])
    -> ValueError: cache_batch_idx has 1 for two new keys
w(q, kc, vc, cache_batch_idx=[1, 1], block_table=[[0], [1]])
    -> ValueError: cache_batch_idx and block_table are given
w(q, kc, vc, cache_leftpad=[1]) -> ValueError: cache_leftpad has shape \(1,\); expected \(2,\)
w(q, kc, kc, k, v, cache_seqlens=3) -> ValueError: v_cache shares memory with k_cache
w(q, kc, vc[:1], k, v, cache_seqlens=3) -> ValueError: v_cache has shape .*; expected . in the first axis
w(q, kc, vc, cache_leftpad=[1, -1]) -> ValueError: cache_leftpad has -1
w(q, pk, pv, block_table=[[0.0], [1.0]])
    -> TypeError: ^flash_attn_with_kvcache\(\): block_table has dtype float64
w(q, pk, pv, block_table=[0, 1])
    -> ValueError: block_table has shape \(2,\); expected \(2, pages of a sequence\)
w(q, pk, pv, block_table=[[0, 8], [1, 2]], cache_seqlens=[20, 3])
    -> ValueError: block_table\[0, 1\] is 8; expected 0 to 7, the pages of k_cache$
w(q, pk, pv, block_table=[[0, -1], [1, 2]], cache_seqlens=[20, 3]) -> ValueError: block_table\[0, 1\] is -1
w(q, pk, pv, k, v, block_table=[[0, 9], [1, 2]], cache_seqlens=16)
    -> ValueError: block_table.* 9; expected 0 to 7
w(q, pk, pv, k, v, block_table=[[0, 3], [1, 3]], cache_seqlens=16)
    -> ValueError: block_table has row 0 of page 3 for two
w(q, pk, pv, k20, k20, None, None, 2, block_table=[[-1, 0], [1, 2]], window_size=(3, 0))
    -> ValueError: block_table has -1; expected 0 to 7, the pages of k_cache
w(q, pk, pv, k20, k20, None, None, 2, block_table=[[8, 0], [1, 2]], window_size=(3, 0))
    -> ValueError: block_table has 8
w(q, pk, pv, k, v, block_table=[[0], [1]], cache_seqlens=16)
    -> ValueError: cache_seqlens has 16 and k 1 new keys
w(q, kc, vc, window_size=(-2, 0)) -> ValueError: window_size\[0\] is -2
w(q, kc, vc, causal=None) -> TypeError: causal is None
w(q, kc, vc, return_softmax_lse=1) -> TypeError: return_softmax_lse is 1
""")
def test_errors_come_before_anything_is_written(code, error):
    before = NAMES["kc"].tobytes(), NAMES["vc"].tobytes()
    assert_refused(code, error, **NAMES)
    assert (NAMES["kc"].tobytes(), NAMES["vc"].tobytes()) == before
