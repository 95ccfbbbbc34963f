"""Attention to selected keys against a mask of all of them, in float64, on every implementation."""

import numpy as np
import pytest
import selected as oracle
from hypothesis import given
from hypothesis import strategies as st
from implementations import COMPILED
from precisions import BF16, EPS, lane

import fastattn
from fastattn._engine import settings
from fastattn.functional import selected_attention
from fastattn.grad import vjp

# Few rows of a key head and many, a tile's and more: (heads_q, heads_kv).
HEADS = [(1, 1), (4, 4), (6, 2), (16, 1), (40, 1), (300, 1)]
# How alike the lists of neighbouring queries are: 0 is not at all. Alike ones are joined.
ALIKE = [0.0, 0.9, 1.0]


def lists(rng, shape, blocks, alike):
    """Lists of numbers of blocks, some -1, some twice; of neighbours, the share `alike` is the same."""
    own = rng.integers(-1, blocks, shape)
    common = np.broadcast_to(rng.integers(-1, blocks, (*shape[:-2], 1, shape[-1])), shape)
    return np.where(rng.random(shape) < alike, common, own)


def problem(heads, len_q, len_k, number, block_size=1, alike=0.0, dtype=np.float32, seed=0, batch=(2,)):
    rng = np.random.default_rng(seed)
    shapes = (heads[0], len_q, 24), (heads[1], len_k, 24), (heads[1], len_k, 17)
    q, k, v = (rng.standard_normal((*batch, *shape)).astype(dtype) for shape in shapes)
    blocks = -(-len_k // block_size)
    return q, k, v, lists(rng, (*batch, heads[1], len_q, number), blocks, alike)


def check(q, k, v, selected, **options):
    got, lse = selected_attention(q, k, v, selected, return_lse=True, **options)
    expected, expected_lse = oracle.selected_attention(q, k, v, selected, **options)
    work = lane(q.dtype)
    assert (got.dtype, lse.dtype) == (q.dtype, work)
    # The dot product of pairs rounds probabilities to bfloat16, too.
    rounded = (EPS[q.dtype] if q.dtype != work else 0) * np.abs(np.nan_to_num(v.astype(float))).max(initial=1)
    bound = 2 * rounded + 64 * EPS[work] * np.abs(v.astype(float)).max(initial=1, where=np.isfinite(v))
    assert (np.abs(got.astype(float) - expected) <= bound).all()
    finite = np.isfinite(expected_lse)
    np.testing.assert_array_equal(np.isfinite(lse), finite)
    lse_bound = 64 * EPS[work] * np.maximum(1, np.abs(expected_lse[finite]))
    assert (np.abs(lse[finite] - expected_lse[finite]) <= lse_bound).all()


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("len_q", [1, 5, 70])
@pytest.mark.parametrize(
    ("number", "block_size"), [(0, 1), (1, 1), (30, 1), (200, 1), (5, 8), (3, 64), (2, 100)]
)
@pytest.mark.parametrize("alike", ALIKE)
def test_sizes(implementation, heads, len_q, number, block_size, alike):
    check(*problem(heads, len_q, 333, number, block_size, alike), block_size=block_size)


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("alike", ALIKE)
@pytest.mark.parametrize("block_size", [1, 64])
def test_dtypes(implementation, dtype, heads, alike, block_size):
    check(
        *problem(heads, 40, 300, 20 if block_size == 1 else 3, block_size, alike, dtype),
        block_size=block_size,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": True, "q_offset": 0},
        {"window": (40, 3)},
        {"causal": True, "window": (70, 0), "softcap": 2.0},
        {"kv_lengths": np.array([150, 77]), "q_offset": np.array([30, 0]), "causal": True},
        {"sinks": np.linspace(-1, 1, 6), "scale": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("alike", ALIKE)
@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_options(implementation, options, alike, block_size):
    """Blocks are attended in part where a window, a position or a length ends within them."""
    call = problem((6, 2), 50, 200, 40 // block_size + 2, block_size, alike)
    check(*call, block_size=block_size, **options)


def test_many_keys_in_parts(implementation):
    """More keys than a state adds up at once."""
    check(*problem((3, 1), 3, 9000, 3000, 2, 0.9, batch=()), block_size=2)
    check(*problem((40, 1), 2, 9000, 7000, 1, 0.0, batch=()))


def test_order_and_repetition_change_no_bit(implementation):
    q, k, v, selected = problem((6, 2), 40, 200, 30, 2, 0.5)
    before, rng = selected.copy(), np.random.default_rng(1)
    again = rng.permuted(np.concatenate([selected, selected[..., :9]], axis=-1), axis=-1)
    got = selected_attention(q, k, v, selected, block_size=2)
    np.testing.assert_array_equal(selected_attention(q, k, v, again, block_size=2), got)
    np.testing.assert_array_equal(selected_attention(q, k, v, selected.astype(np.int16), block_size=2), got)
    np.testing.assert_array_equal(selected, before)


@pytest.mark.parametrize("alike", ALIKE)
def test_threads_and_company_change_no_bit(implementation, alike):
    q, k, v, selected = problem((6, 2), 300, 2000, 100, 1, alike)
    got = selected_attention(q, k, v, selected, num_threads=1)
    np.testing.assert_array_equal(selected_attention(q, k, v, selected, num_threads=3), got)
    np.testing.assert_array_equal(selected_attention(q[1], k[1], v[1], selected[1]), got[1])
    one = selected_attention(q[:, :3], k[:, :1], v[:, :1], selected[:, :1])
    np.testing.assert_array_equal(one, got[:, :3])


def test_lists_are_made_of_some_queries_at_a_time(implementation):
    """Lists of more than LIST_BYTES give the bits of parts that begin at whole tasks."""
    q, k, v, selected = problem((1, 1), 1024, 3000, 2000, 1, 1.0, batch=())
    whole = selected_attention(q, k, v, selected)
    rows = slice(512, 1024)
    np.testing.assert_array_equal(selected_attention(q[:, rows], k, v, selected[:, rows]), whole[:, rows])


@pytest.mark.parametrize("alike", ALIKE)
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
def test_what_is_not_selected_is_not_read(implementation, alike, dtype):
    """NaN in keys and values that no query of the call, or only its neighbour, selects."""
    q, k, v, selected = problem((6, 2), 40, 200, 30, 1, alike, dtype)
    poisoned = np.arange(0, 200, 3)
    selected[np.isin(selected, poisoned)] = -1
    selected[:, :, 7] = np.arange(30) * 3  # these queries alone attend poison
    want = selected_attention(q, k, v, selected)
    for x in (k, v):
        x[..., poisoned, :] = np.nan
    got = selected_attention(q, k, v, selected)
    others = np.arange(40) != 7
    np.testing.assert_array_equal(got[:, :, others], want[:, :, others])
    assert np.isnan(got[:, :, 7].astype(float)).all()


def test_infinite_values_of_selected_keys(implementation):
    q, k, v, selected = problem((4, 4), 20, 100, 10, 1, 0.9)
    v[..., 11, 3] = np.inf
    selected[selected == 11] = -1
    selected[:, :, 5, 0] = 11
    got = selected_attention(q, k, v, selected)
    assert np.isposinf(got[:, :, 5, 3]).all()
    assert np.isfinite(np.delete(got, 5, axis=2)).all()


def test_int8_keys_and_values(implementation):
    rng = np.random.default_rng(0)
    for heads, len_q in (((6, 2), 1), ((40, 1), 3)):
        q = rng.standard_normal((heads[0], len_q, 32)).astype(np.float32)
        k, v = (rng.integers(-127, 128, (heads[1], 100, 32)).astype(np.int8) for _ in range(2))
        scales = [rng.random((heads[1], 100)).astype(np.float32) / 64 for _ in range(2)]
        selected = rng.integers(-1, 100, (heads[1], len_q, 40))
        got = selected_attention(q, k, v, selected, k_scale=scales[0], v_scale=scales[1])
        wide = (x * scale[..., None] for x, scale in zip((k, v), scales, strict=True))
        expected, _ = oracle.selected_attention(q, *wide, selected)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


def test_strides_and_broadcasting(implementation):
    """Arrays of a cache with room, of another order of axes, one list for all heads, one batch of keys."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((3, 20, 6, 24)).astype(np.float32).swapaxes(1, 2)
    k, v = (rng.standard_normal((2, 90, 24)).astype(np.float32)[:, :70] for _ in range(2))
    selected = rng.integers(-1, 70, (1, 40, 24))[:, ::2, ::2]
    out = np.empty((3, 20, 6, 24), np.float32).swapaxes(1, 2)
    got = selected_attention(q, k, v, selected, out=out)
    assert got is out
    expected, _ = oracle.selected_attention(q, k[None], v[None], np.broadcast_to(selected, (3, 2, 20, 12)))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("block_size", [1, 5, 20])
def test_one_list_for_all_queries(implementation, block_size):
    q, k, v, lists = problem((6, 2), 13, 70, 4, block_size)
    every = np.broadcast_to(lists[:, :, :1], lists.shape)
    got, pull = vjp(selected_attention, q, k, v, lists[:, :, :1], block_size=block_size)
    expected, other = vjp(selected_attention, q, k, v, every, block_size=block_size)
    np.testing.assert_array_equal(got, expected)
    for x, y in zip(pull(got), other(got), strict=True):
        np.testing.assert_array_equal(x, y)


def test_one_head_without_its_axis(implementation):
    q, k, v, selected = (x[0, 0] for x in problem((1, 1), 9, 50, 8))
    got, lse = selected_attention(q, k, v, selected, return_lse=True)
    assert (got.shape, lse.shape) == ((9, 17), (9,))
    np.testing.assert_allclose(
        got, oracle.selected_attention(q[None], k[None], v[None], selected[None])[0][0], rtol=0, atol=1e-5
    )


def test_nothing_to_attend(implementation):
    q, k, v, _ = problem((4, 2), 5, 30, 1)
    for selected in (np.full((2, 2, 5, 3), -1), np.zeros((2, 2, 5, 0), int)):
        out, lse = selected_attention(q, k, v, selected, return_lse=True)
        assert not out.any()
        assert np.isneginf(lse).all()
    out = selected_attention(q, k[:, :, :0], v[:, :, :0], np.full((1, 1, 5, 2), -1))
    assert not out.any()
    assert selected_attention(q[:, :, :0], k, v, np.zeros((2, 2, 0, 4), int)).shape == (2, 4, 0, 17)


@given(st.data())
@pytest.mark.parametrize("backend", ["compiled", "numpy"] if COMPILED else ["numpy"])
def test_any_call(backend, data):
    draw = data.draw
    group, heads_kv = draw(st.sampled_from([1, 2, 5, 33])), draw(st.integers(1, 3))
    len_q, len_k, number = draw(st.integers(1, 40)), draw(st.integers(1, 150)), draw(st.integers(0, 40))
    block_size = draw(st.integers(1, 70))
    options = {"causal": True, "q_offset": draw(st.integers(-5, 150))} if draw(st.booleans()) else {}
    call = problem(
        (group * heads_kv, heads_kv), len_q, len_k, number, block_size, draw(st.floats(0, 1)),
        seed=draw(st.integers(0, 99)), batch=draw(st.sampled_from([(), (2,), (1, 2)])),
    )  # fmt: skip
    with settings.forced(backend=backend):
        check(*call, block_size=block_size, **options)


@pytest.mark.parametrize("block_size", [1, 5, 16, 23, 1000])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (16, 1)], ids=str)
def test_gradients(implementation, heads, block_size):
    """Against those of attention with the mask of what is selected, in float64."""
    q, k, v, selected = problem(heads, 13, 60, 9, block_size, 0.5, np.float64)
    options = {"causal": True, "softcap": 3.0, "sinks": np.linspace(-1, 1, heads[0]), "return_lse": True}
    mask = np.repeat(oracle.attended(selected, block_size, 60), heads[0] // heads[1], axis=1)
    (out, lse), pull = vjp(selected_attention, q, k, v, selected, block_size=block_size, **options)
    _, expected = vjp(fastattn.attention, q, k, v, mask=mask, **options)
    rng = np.random.default_rng(3)
    douts = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    need = ("dq", "dk", "dv", "dsinks", "dscale", "dsoftcap")
    for got, want in zip(pull(*douts, need=need), expected(*douts, need=need), strict=True):
        assert np.shape(got) == np.shape(want)
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11)


def test_gradients_of_keys_that_nobody_selects(implementation):
    q, k, v, selected = problem((6, 2), 10, 50, 5)
    selected[selected == 7] = -1
    k[:, :, 7] = v[:, :, 7] = np.nan
    out, pull = vjp(selected_attention, q, k, v, selected)
    dq, dk, dv = pull(np.ones_like(out))
    assert np.isfinite(dq).all()
    assert not dk[:, :, 7].any()
    assert not dv[:, :, 7].any()
    assert np.isfinite(dk).all()


Q = np.zeros((2, 4, 3, 8), np.float32)
K = np.zeros((2, 2, 50, 8), np.float32)
LISTS = np.zeros((2, 2, 3, 5), int)
BAD = {
    r"selected has 50; expected 0 to 49, as k has 50 keys, or -1": {"selected": LISTS + 50},
    r"selected has 7; expected 0 to 6, as k has 7 blocks of 8 keys": {"selected": LISTS + 7, "block_size": 8},
    r"selected has -2; expected 0 to 49": {"selected": LISTS - 2},
    r"selected has dtype float64; expected integers": {"selected": LISTS + 0.5},
    r"selected has dtype bool": {"selected": LISTS == 0},
    r"selected has shape \(2, 3, 3, 5\)": {"selected": np.zeros((2, 3, 3, 5), int)},
    r"selected has shape \(3, 5\); expected \(\.\.\., heads_kv, len_q, any number\)": {
        "selected": LISTS[0, 0]
    },
    r"block_size is 0; expected": {"block_size": 0},
    r"block_size is 1.5; expected an integer": {"block_size": 1.5},
    r"mask": {"mask": np.ones((3, 50), bool)},
    r"dropout": {"dropout": 0.5},
    r"k has a head_dim of 7": {"k": K[..., :7]},
}


@pytest.mark.parametrize(("message", "changed"), BAD.items(), ids=BAD)
def test_errors(message, changed):
    call = {"q": Q, "k": K, "v": K, "selected": LISTS} | changed
    with pytest.raises((TypeError, ValueError), match=r"selected_attention\(\): .*" + message):
        selected_attention(call.pop("q"), call.pop("k"), call.pop("v"), call.pop("selected"), **call)
