"""Which keys are selected, against scores in float64 and a sort of each row, on every implementation."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastattn import functional
from fastattn._bench.cases import DTYPES, as_dtype
from fastattn.functional import _selection, select_keys
from fastattn.grad import vjp

EPS = {"float64": 2.0**-52}


def inputs(heads_q, heads_kv, len_q, blocks, dim, dtype="float32", seed=0, batch=(2,), whole=False):
    """Queries, keys and weights; `whole` numbers have exact scores, many of which are equal."""
    rng = np.random.default_rng(seed)
    shapes = (*batch, heads_q, len_q, dim), (*batch, heads_kv, blocks, dim), (*batch, heads_q, len_q)
    if whole:
        arrays = [rng.integers(-2, 3, shape) for shape in shapes]
    else:
        arrays = [rng.standard_normal(shape) for shape in shapes]
    return [x.astype(as_dtype(dtype)) for x in arrays]


def scores_of(q, k, weights=None, activation=None, magnitude=False):
    """Scores in float64 from their definition, (..., heads_kv, len_q, blocks); or the sums of magnitudes."""
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    grouped = q.reshape(*q.shape[:-3], k.shape[-3], -1, *q.shape[-2:])
    if magnitude:
        grouped, k = abs(grouped), abs(k)
    products = np.einsum("...hgid,...hjd->...hgij", grouped, k)
    if activation == "relu":
        products = np.maximum(products, 0)
    if weights is not None:
        shaped = np.broadcast_to(np.asarray(weights, np.float64), q.shape[:-1]).reshape(grouped.shape[:-1])
        products = products * (abs(shaped) if magnitude else shaped)[..., None]
    return products.sum(axis=-3)


def ends(len_q, blocks, causal=False, q_offset=None, kv_lengths=None, block_size=1):
    """How many blocks each query of a sequence may select, key by key."""
    length = blocks * block_size if kv_lengths is None else kv_lengths
    offset = length - len_q if q_offset is None else q_offset
    keys = [(j, j * block_size) for j in range(blocks) if j * block_size < length]
    return [sum(1 for _, key in keys if not causal or key <= offset + i) for i in range(len_q)]


def best(scores, end, top_k, first=0, last=0):
    """Row numbers that one query selects of its `scores`."""
    if end <= top_k:
        return [*range(end), *[-1] * (top_k - end)]
    always = [*range(first), *range(end - last, end)]
    others = [j for j in range(end) if j not in always]
    others.sort(key=lambda j: (0, 0, j) if np.isnan(scores[j]) else (1, -scores[j], j))
    return sorted(always + others[: top_k - len(always)])


def expected(scores, end, top_k, first=0, last=0):
    """Choices of all rows; `end` broadcasts to them."""
    end = np.broadcast_to(end, scores.shape[:-1])
    rows = [best(scores[row], end[row], top_k, first, last) for row in np.ndindex(scores.shape[:-1])]
    return np.reshape(np.array(rows, np.int64), (*scores.shape[:-1], top_k))


def hold(selected, scores, bound, end, top_k, first=0, last=0):
    """No key that was left is better than one that was selected, by more than two errors."""
    end = np.broadcast_to(end, scores.shape[:-1])
    assert selected.shape == (*scores.shape[:-1], top_k)
    assert selected.dtype == np.int64
    for row in np.ndindex(scores.shape[:-1]):
        count = min(end[row], top_k)
        chosen = selected[row][:count]
        assert (selected[row][count:] == -1).all()
        assert (np.diff(chosen) > 0).all()
        assert ((chosen >= 0) & (chosen < end[row])).all()
        if end[row] <= top_k:
            continue
        always = {*range(first), *range(end[row] - last, end[row])}
        assert always <= {*chosen}
        picked = np.array(sorted({*chosen} - always), int)
        left = np.setdiff1d(np.arange(end[row]), chosen)
        if picked.size and left.size:
            assert scores[row][picked].min() >= scores[row][left].max() - 2 * bound[row]


def bound_of(q, k, weights, dtype, k_scale=None):
    """How far scores in the lane type may be off, (..., heads_kv, len_q)."""
    k = k if k_scale is None else np.asarray(k, np.float64) * k_scale[..., None]
    terms = q.shape[-1] + q.shape[-3] // k.shape[-3] + 2
    return terms * EPS.get(dtype, 2.0**-23) * scores_of(q, k, weights, magnitude=True).max(axis=-1)


# Heads of one query and of many, queries around vectors (4 to 16) and tiles (8 to 32), blocks around 64 keys.
SHAPES = [
    (4, 4, 37, 130, 33),
    (8, 2, 1, 200, 64),
    (6, 1, 5, 65, 17),
    (64, 1, 3, 150, 32),
    (64, 1, 33, 129, 16),
    (3, 3, 20, 70, 128),
    (10, 2, 15, 64, 300),
    (2, 1, 70, 63, 1),
    (1, 1, 1, 1, 8),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores(shape, dtype, implementation):
    q, k, weights = inputs(*shape, dtype)
    end = {causal: ends(*shape[2:4], causal, q_offset=shape[3] - shape[2]) for causal in (False, True)}
    for given_weights in (None, weights):
        for activation in (None, "relu"):
            scores = scores_of(q, k, given_weights, activation)
            bound = bound_of(q, k, given_weights, dtype)
            for causal in (False, True):
                chosen = select_keys(
                    q, k, 9, weights=given_weights, activation=activation, causal=causal,
                    q_offset=shape[3] - shape[2],
                )  # fmt: skip
                hold(chosen, scores, bound, end[causal], 9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_of_equal_scores_the_first(shape, dtype, implementation):
    """Whole numbers: all sums are exact, and ReLU leaves many zeros."""
    q, k, weights = inputs(*shape, dtype, whole=True)
    scores = scores_of(q, k, weights, "relu")
    end = ends(*shape[2:4])
    for top_k in (1, 2, 17, shape[3] - 1, shape[3], shape[3] + 3):
        if top_k > 0:
            chosen = select_keys(q, k, top_k, weights=weights, activation="relu")
            np.testing.assert_array_equal(chosen, expected(scores, end, top_k))


PLACES = [
    {"causal": True},
    {"causal": True, "block_size": 16, "last": 1},
    {"causal": True, "block_size": 16, "q_offset": 40, "first": 1, "last": 2},
    {"causal": True, "block_size": 7, "q_offset": -20},
    {"causal": True, "q_offset": 1000, "block_size": 3, "first": 2},
    {"kv_lengths": 101, "block_size": 2, "first": 3, "last": 3},
    {"causal": True, "kv_lengths": 395, "block_size": 5, "last": 1},
    {"first": 6},
    {"last": 6},
    {"first": 2, "last": 3, "causal": True},
]


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("shape", [(4, 2, 40, 90, 8), (6, 2, 3, 90, 8)], ids=str)
def test_places(shape, place, implementation):
    q, k, _ = inputs(*shape, whole=True)
    scores = scores_of(q, k)
    kept = {name: place[name] for name in ("first", "last") if name in place}
    others = {name: x for name, x in place.items() if name not in kept}
    chosen = select_keys(q, k, 6, **place)
    np.testing.assert_array_equal(chosen, expected(scores, ends(*shape[2:4], **others), 6, **kept))


@pytest.mark.parametrize("block_size", [1, 4])
def test_sequences_of_different_lengths(block_size, implementation):
    q, k, _ = inputs(4, 2, 9, 80, 8, batch=(4,), whole=True)
    lengths = np.array([80 * block_size, 0, 33 * block_size - (block_size > 1), 9])
    q_offset = np.array([3, 0, 100, -4])
    place = {"kv_lengths": lengths, "q_offset": q_offset, "block_size": block_size}
    chosen = select_keys(q, k, 12, causal=True, last=1, **place)
    for b in range(4):
        end = ends(9, 80, True, q_offset[b], lengths[b], block_size)
        np.testing.assert_array_equal(chosen[b], expected(scores_of(q[b], k[b]), end, 12, last=1))
        alone = select_keys(
            q[b], k[b], 12, causal=True, last=1, block_size=block_size,
            q_offset=int(q_offset[b]), kv_lengths=int(lengths[b]),
        )  # fmt: skip
        np.testing.assert_array_equal(chosen[b], alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 4), (8, 1)])
def test_nan_counts_as_larger_than_all(heads, dtype, implementation):
    for len_q in (3, 40):
        q, k, _ = inputs(*heads, len_q, 100, 16, dtype, whole=True)
        k[:, :, 5::30, 3] = np.nan
        k[:, :, 7::30, 2] = np.inf
        with np.errstate(invalid="ignore"):
            scores = scores_of(q, k)
        for top_k in (2, 5, 30):
            np.testing.assert_array_equal(
                select_keys(q, k, top_k, first=1), expected(scores, 100, top_k, first=1)
            )


def test_minus_zero_is_zero(implementation):
    q, k = np.array([[1.0]], np.float32), np.array([[-0.0], [0.0], [-1.0], [-0.0], [0.0]], np.float32)
    np.testing.assert_array_equal(select_keys(q, k, 3), [[0, 1, 3]])
    weights = np.array([-1], np.float32)
    np.testing.assert_array_equal(select_keys(q, k, 3, weights=weights, activation="relu"), [[0, 1, 2]])


def test_what_no_query_may_select_is_not_read(implementation):
    for len_q in (5, 60):
        q, k, _ = inputs(8, 2, len_q, 200, 32, batch=(2,))
        lengths = np.array([90, 150])
        options = {"causal": True, "kv_lengths": lengths, "first": 1}
        before = select_keys(q, k, 20, **options)
        k[0, :, 90:], k[1, :, 150:] = np.nan, np.nan
        np.testing.assert_array_equal(select_keys(q, k, 20, **options), before)


@pytest.mark.parametrize("spread", [0, 1e-30, 1, 1e30])
def test_scores_of_any_size(spread, implementation):
    """Bisection ends for scores that are all equal, tiny, huge or infinite."""
    rng = np.random.default_rng(4)
    k = (spread * rng.standard_normal((300, 1))).astype(np.float32)
    k[::50] = np.inf
    k[1::50] = -np.inf
    for top_k in (1, 6, 7, 200, 297):
        chosen = select_keys(np.ones((2, 1), np.float32), k, top_k)
        np.testing.assert_array_equal(chosen, expected(np.stack([k[:, 0]] * 2), 300, top_k))


@pytest.mark.parametrize("q_dtype", ["float32", "float64", "bfloat16"])
def test_int8(q_dtype, implementation):
    rng = np.random.default_rng(0)
    for len_q in (2, 35):
        q, _, weights = inputs(8, 2, len_q, 120, 24, q_dtype)
        k = rng.integers(-127, 128, (2, 2, 120, 24)).astype(np.int8)
        k_scale = rng.uniform(0.5, 2, (2, 2, 120)).astype(np.float64 if q_dtype == "float64" else np.float32)
        scores = scores_of(q, k * k_scale[..., None].astype(np.float64), weights, "relu")
        chosen = select_keys(q, k, 11, weights=weights, activation="relu", k_scale=k_scale)
        hold(chosen, scores, bound_of(q, k, weights, q_dtype, k_scale), 120, 11)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_keys_of_float32_queries(dtype, implementation):
    q, _, _ = inputs(4, 2, 20, 90, 40)
    _, k, _ = inputs(4, 2, 20, 90, 40, dtype)
    hold(select_keys(q, k, 5), scores_of(q, k), bound_of(q, k, None, "float32"), 90, 5)


def strided(x):
    """Copy numbers to every other row of memory."""
    room = np.full((*x.shape[:-2], 2 * x.shape[-2], x.shape[-1] + 3), np.nan, x.dtype)
    room[..., ::2, : x.shape[-1]] = x
    return room[..., ::2, : x.shape[-1]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_and_broadcasting_change_nothing(dtype, implementation):
    for len_q in (3, 37):
        q, k, weights = inputs(8, 2, len_q, 100, 32, dtype, batch=(1, 2), whole=True)
        plain = select_keys(q, k, 13, weights=weights, activation="relu", causal=True)
        for same in (strided(q), q[..., ::-1][..., ::-1], np.asfortranarray(q)):
            got = select_keys(same, strided(k), 13, weights=strided(weights), activation="relu", causal=True)
            np.testing.assert_array_equal(got, plain)
        many = select_keys(q.repeat(3, 0), k, 13, weights=weights, activation="relu", causal=True)
        np.testing.assert_array_equal(many, plain.repeat(3, 0))
        one_head = select_keys(q[0, 0, 0], k[0, 0, 0], 13, weights=weights[0, 0, 0])
        np.testing.assert_array_equal(
            one_head, select_keys(q[:, :, :1], k[:, :, :1], 13, weights=weights[:, :, :1])[0, 0, 0]
        )
        shared = select_keys(q, k, 13, weights=weights[0, 0, 0])
        np.testing.assert_array_equal(
            shared, select_keys(q, k, 13, weights=np.broadcast_to(weights[0, 0, 0], weights.shape))
        )


@pytest.mark.parametrize(("len_q", "blocks"), [(0, 5), (4, 0), (0, 0)])
def test_empty(len_q, blocks, implementation):
    q, k, _ = inputs(4, 2, len_q, blocks, 8)
    for causal in (False, True):
        chosen = select_keys(q, k, 3, causal=causal, q_offset=0)
        assert chosen.shape == (2, 2, len_q, 3)
        assert (chosen == -1).all() or blocks
    assert select_keys(np.ones((0, 4, 7, 8)), np.ones((0, 2, 9, 8)), 3).shape == (0, 2, 7, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 1, 1, 5000, 32), (16, 2, 9, 3000, 64), (2, 2, 100, 2000, 16)], ids=str)
def test_threads_change_nothing(shape, dtype, implementation):
    """Few queries have their keys cut among threads; scores of 16 bits are often nearly equal."""
    q, k, weights = inputs(*shape, dtype)
    options = {"weights": weights, "activation": "relu", "causal": True, "first": 1}
    one = select_keys(q, k, 50, num_threads=1, **options)
    for num_threads in (2, 3, 16):
        np.testing.assert_array_equal(select_keys(q, k, 50, num_threads=num_threads, **options), one)
    if implementation != "numpy":
        for b in range(2):
            alone = select_keys(q[b], k[b], 50, num_threads=16, **{**options, "weights": weights[b]})
            np.testing.assert_array_equal(alone, one[b])


def test_given_scores(implementation, monkeypatch):
    """A function of the queries, block by block: of Quest, a bound of the products of a page."""
    q, k, _ = inputs(4, 2, 50, 40, 8, whole=True)
    low, high = k.reshape(2, 2, 10, 4, 8).min(axis=3), k.reshape(2, 2, 10, 4, 8).max(axis=3)
    begins = []

    def score(rows, begin):
        begins.append(begin)
        np.testing.assert_array_equal(rows, q[:, :, begin : begin + rows.shape[2]])
        grouped = rows.reshape(2, 2, 2, -1, 1, 8)
        bounds = np.maximum(grouped * low[:, :, None, None], grouped * high[:, :, None, None])
        return bounds.sum(axis=-1).sum(axis=2)

    monkeypatch.setattr(_selection, "SCORES", 1000)
    chosen = select_keys(q, low, 3, score=score, causal=True, q_offset=0, block_size=4, last=1)
    whole = score(q, 0)
    end = ends(50, 10, True, 0, None, 4)
    np.testing.assert_array_equal(chosen, expected(whole, end, 3, last=1))
    assert begins[:3] == [0, 25, 0]
    constant = select_keys(q[0, 0], low[0, 0], 3, score=lambda rows, begin: np.zeros((), np.float32))
    np.testing.assert_array_equal(constant, np.broadcast_to([0, 1, 2], (50, 3)))
    for returned, error, message in (
        (
            np.zeros((3, 3), np.float32),
            ValueError,
            r"what score returns has shape \(3, 3\); expected one that",
        ),
        (np.zeros(10, int), TypeError, "what score returns has dtype int64; expected float32"),
    ):
        with pytest.raises(error, match=rf"^select_keys\(\): {message}"):
            select_keys(q, low, 3, score=lambda rows, begin, x=returned: x)


@given(
    shape=st.tuples(st.sampled_from([(1, 1), (4, 2), (5, 1)]), st.integers(1, 40), st.integers(1, 150)),
    top_k=st.integers(1, 160), block_size=st.integers(1, 20), q_offset=st.integers(-50, 400),
    share=st.tuples(st.floats(0, 1), st.floats(0, 1)), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_any_call(shape, top_k, block_size, q_offset, share, seed, implementation):
    heads, len_q, blocks = shape
    q, k, weights = inputs(*heads, len_q, blocks, 4, seed=seed, whole=True, batch=())
    first = int(share[0] * top_k)
    last = int(share[1] * (top_k - first))
    length = int(np.random.default_rng(seed).integers(0, blocks * block_size + 1))
    place = {"causal": True, "q_offset": q_offset, "kv_lengths": length, "block_size": block_size}
    chosen = select_keys(q, k, top_k, weights=weights, activation="relu", first=first, last=last, **place)
    end = ends(len_q, blocks, **place)
    wanted = expected(scores_of(q, k, weights, "relu"), end, top_k, first, last)
    np.testing.assert_array_equal(chosen, wanted)


Q, K = np.ones((2, 4, 6, 8), np.float32), np.ones((2, 2, 10, 8), np.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": K[..., :4]}, r"k has a head_dim of 4, shape .*; expected a head_dim of 8, as q has"),
        ({"k": K[:, :0]}, "k has 0 heads"),
        ({"q": Q[:, :3]}, "q has 3 heads, shape .*; expected a multiple of k's 2 heads"),
        ({"k": np.ones((3, 2, 10, 8), np.float32)}, "q, k and k have batch dimensions|batch dimensions"),
        ({"k": K[0]}, r"k has shape \(2, 10, 8\); expected as many axes as q, .* where it has several heads"),
        ({"top_k": 0}, "top_k is 0; expected at least 1"),
        ({"first": -1}, "first is -1; expected at least 0"),
        ({"last": -1}, "last is -1; expected at least 0"),
        ({"first": 2, "last": 2}, "first is 2 and last is 2; expected no more than top_k, 3, together"),
        ({"block_size": 0}, "block_size is 0; expected at least 1"),
        ({"block_size": 2**60}, "block_size is .*; expected 1 to"),
        ({"kv_lengths": 21, "block_size": 2}, "kv_lengths has 21; expected 0 to 20"),
        ({"kv_lengths": [1, 2, 3]}, r"kv_lengths has shape \(3,\); expected one number, or one for each"),
        ({"causal": True, "kv_lengths": 3}, "kv_lengths has 3 for 6 queries, and without q_offset"),
        ({"q_offset": [1, 2, 3]}, r"q_offset has shape \(3,\); expected one number, or one for each"),
        ({"activation": "gelu"}, "activation is 'gelu'; expected relu"),
        ({"weights": np.ones((4, 5))}, r"weights has shape \(4, 5\); expected one that fits"),
        (
            {"k": K.astype(np.int8), "k_scale": np.ones(3)},
            r"k_scale has shape \(3,\); expected one that fits",
        ),
        ({"score": max, "weights": np.ones(6)}, "weights is given with score; expected one of them"),
        ({"score": max, "activation": "relu"}, "activation is given with score; expected one of them"),
        ({"score": max, "k_scale": np.ones(10)}, "k_scale is given with score; expected one of them"),
    ],
)
def test_errors_of_values(arguments, message):
    with pytest.raises(ValueError, match=rf"^select_keys\(\): .*({message})"):
        select_keys(**{"q": Q, "k": K, "top_k": 3, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": Q.astype(int)}, "q has dtype int64; expected float32"),
        ({"k": K.astype(np.int8)}, r"k has dtype int8; expected .*k_scale"),
        ({"k": K, "k_scale": np.ones(10)}, "k has dtype float32; expected int8, as k_scale is given"),
        ({"k": K.astype(np.float64)}, "q, k and k have dtypes|have dtypes"),
        ({"top_k": 2.5}, "top_k is 2.5; expected an integer"),
        ({"first": True}, "first is True; expected an integer"),
        ({"block_size": "2"}, "block_size is '2'; expected an integer"),
        ({"causal": 1}, "causal is 1; expected True or False"),
        ({"kv_lengths": 2.0}, "kv_lengths has dtype float64; expected integers"),
        ({"weights": "x"}, "weights"),
        ({"score": 3}, "score is of type int; expected a function"),
        ({"is_causal": True}, "is_causal is not an argument; expected causal"),
        ({"mask": None}, "mask is not an argument; expected one of q, k, top_k, weights"),
    ],
)
def test_errors_of_types(arguments, message):
    with pytest.raises(TypeError, match=rf"^select_keys\(\): .*({message})"):
        select_keys(**{"q": Q, "k": K, "top_k": 3, **arguments})


def test_a_selection_has_no_gradient():
    with pytest.raises(TypeError, match=r"^vjp\(\): function is select_keys"):
        vjp(functional.select_keys, Q, K, 3)


def test_memory_does_not_hold_all_scores(implementation):
    """In float32 they would be 40 MB."""
    q, k = inputs(1, 1, 1000, 10_000, 4, batch=())[:2]
    tracemalloc.start()
    chosen = select_keys(q, k, 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert chosen.shape == (1, 1000, 2)
    assert peak < 20e6
