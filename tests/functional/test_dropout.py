"""Dropout of attention: the generator, the mask, and what comes of it on every implementation."""

import numpy as np
import pytest
from dropped import kept
from oracle import assert_same_bits, check, expect, garbage_behind_masks, spread_inputs

import fastattn
from fastattn._bench.cases import DTYPES, VARIANTS, Shape, combine
from fastattn._reference import philox

SEED = 0x0123456789ABCDEF
SHAPES = [
    Shape("square", batch=2, heads_q=3, heads_kv=3, len_q=67, len_k=67, head_dim=16),
    Shape("grouped", batch=2, heads_q=6, heads_kv=2, len_q=37, len_k=200, head_dim=24, head_dim_v=20),
    Shape("decode", batch=2, heads_q=6, heads_kv=2, len_q=1, len_k=1100, head_dim=40),
    Shape("few", batch=1, heads_q=4, heads_kv=4, len_q=5, len_k=131, head_dim=9),
    Shape("parts", batch=1, heads_q=1, heads_kv=1, len_q=70, len_k=4300, head_dim=8),
]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)

# Random123's kat_vectors: counter, key and the four words.
KNOWN = [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "seed", "words"), KNOWN)
def test_known_answers(counter, seed, words):
    assert tuple(map(int, philox.philox(counter, seed))) == words


@pytest.mark.parametrize("keys", [slice(0, 1), slice(3, 700), slice(64, 128), slice(127, 129)])
def test_the_twin_makes_the_mask_of_its_definition(keys):
    expected = kept((2, 3, 7, 700), 0.3, SEED)[..., keys]
    got = philox.kept(0.3, SEED, np.arange(6).reshape(2, 3, 1), np.arange(7), keys)
    np.testing.assert_array_equal(got, expected)


def mask_of(q, k, **options):
    """Find the probabilities that are not 0, through values that are one key each."""
    len_k = k.shape[-2]
    v = np.broadcast_to(np.eye(len_k).astype(k.dtype), (*k.shape[:-1], len_k))
    return fastattn.attention(q, k, v, **options) != 0


def even_inputs(shape, dtype="float32"):
    """Queries and keys whose probabilities are all far from 0."""
    q, k, v = spread_inputs(shape, dtype, np.random.default_rng(0))
    return q * q.dtype.type(0.1), k, v


@pytest.mark.parametrize("dtype", DTYPES)
@every_shape
def test_the_mask_is_that_of_the_definition(shape, dtype, implementation):
    """Queries or keys are on the lanes, in pairs of bfloat16, in splits, in parts, and in NumPy."""
    q, k, _ = even_inputs(shape, dtype)
    mask = mask_of(q, k, dropout=0.3, seed=SEED, num_threads=2)
    np.testing.assert_array_equal(mask, kept(mask.shape, 0.3, SEED))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
@every_shape
def test_with_every_option(shape, variant, dtype, implementation):
    rng = np.random.default_rng(1)
    q, k, v = spread_inputs(shape, dtype, rng)
    options = {**combine((variant,), shape, rng), "dropout": 0.2, "seed": 5}
    expected = expect(q, k, v, **options)
    check(fastattn.attention(q, k, v, **options, return_lse=True), expected, telling=False)


@every_shape
def test_int8_keys_and_values(shape, implementation):
    rng = np.random.default_rng(3)
    q, k, v = spread_inputs(shape, "float32", rng)
    k, v = (rng.integers(-127, 128, x.shape).astype(np.int8) for x in (k, v))
    scales = {name: rng.random(k.shape[:-1], np.float32) / 64 for name in ("k_scale", "v_scale")}
    widened = (x * scale[..., None] for x, scale in zip((k, v), scales.values(), strict=True))
    options = {"dropout": 0.25, "seed": 2**64 - 1}
    expected = expect(q, *widened, **options)
    check(fastattn.attention(q, k, v, **options, **scales, return_lse=True), expected, telling=False)


@pytest.mark.parametrize("dtype", DTYPES)
@every_shape
def test_threads_and_sizes_change_no_bit(shape, dtype, implementation):
    q, k, v = spread_inputs(shape, dtype, np.random.default_rng(4))
    options = {"dropout": 0.1, "seed": 7, "causal": True, "return_lse": True}
    one = fastattn.attention(q, k, v, **options, num_threads=1)
    for threads in (2, 7):
        assert_same_bits(fastattn.attention(q, k, v, **options, num_threads=threads), one)


@every_shape
def test_what_is_known_before_dropout_stays(shape, implementation):
    """lse, statistics, and with a dropout of 0 every bit of the result."""
    q, k, v = spread_inputs(shape, "float32", np.random.default_rng(5))
    stats = ("row_max", "entropy", "top_k:3", "key_sums", "mean_weights")
    plain = fastattn.attention(q, k, v, stats=stats, return_lse=True)
    assert_same_bits([fastattn.attention(q, k, v, dropout=0.0, seed=3)], [fastattn.attention(q, k, v)])
    out, lse, found = fastattn.attention(q, k, v, stats=stats, return_lse=True, dropout=0.4, seed=3)
    assert abs(out - plain[0]).max() > 0.01
    assert_same_bits([lse], [plain[1]])
    for name, x in plain[2].items():
        pair = (x, found[name]) if isinstance(x, tuple) else ((x,), (found[name],))
        assert_same_bits(*pair)


def test_the_mask_of_a_row_does_not_depend_on_how_long_arrays_are(implementation):
    """Query i and key j count from the beginning of the arrays, wherever causal attention puts them."""
    q, k, _ = even_inputs(Shape("", 1, 2, 2, 90, 150, 8))
    whole = mask_of(q, k, dropout=0.3, seed=1)
    for len_q, len_k in ((1, 150), (40, 64), (90, 17), (3, 65)):
        part = mask_of(q[:, :, :len_q], k[:, :, :len_k], dropout=0.3, seed=1)
        np.testing.assert_array_equal(part, whole[:, :, :len_q, :len_k])
    offset = mask_of(q, k, dropout=0.3, seed=1, causal=True, q_offset=150)
    np.testing.assert_array_equal(offset, whole)


def test_heads_count_over_the_batch(implementation):
    q, k, _ = even_inputs(Shape("", 6, 4, 2, 20, 70, 8))
    flat = mask_of(q, k, dropout=0.3, seed=1)
    nested = mask_of(q.reshape(2, 3, *q.shape[1:]), k.reshape(2, 3, *k.shape[1:]), dropout=0.3, seed=1)
    np.testing.assert_array_equal(nested.reshape(flat.shape), flat)
    shared = mask_of(q[:1], np.broadcast_to(k[:1], k.shape), dropout=0.3, seed=1)
    np.testing.assert_array_equal(shared, flat)
    one_head = mask_of(q[0, 0], k[0, 0], dropout=0.3, seed=1)
    np.testing.assert_array_equal(one_head, flat[0, 0])


@pytest.mark.parametrize("lengths", [[3, 0, 17, 130, 64, 1], [1, 1, 5, 1]])
def test_a_ragged_batch_has_the_masks_of_a_padded_one(implementation, lengths):
    rng = np.random.default_rng(6)
    begins, most = np.append(0, np.cumsum(lengths)), max(lengths)
    padded = np.zeros((len(lengths), most, 4, 16), np.float32)
    tokens = rng.standard_normal((begins[-1], 4, 16)).astype(np.float32)
    for i, length in enumerate(lengths):
        padded[i, :length] = tokens[begins[i] : begins[i + 1]]
    options = {"dropout": 0.4, "seed": 11}
    got = fastattn.varlen_attention(tokens, tokens, tokens, begins, begins, causal=True, **options)
    x = padded.swapaxes(1, 2)
    whole = fastattn.attention(x, x, x, kv_lengths=lengths, q_offset=0, causal=True, **options)
    for i, length in enumerate(lengths):
        rows = whole[i, :, :length].swapaxes(0, 1)
        np.testing.assert_allclose(got[begins[i] : begins[i + 1]], rows, rtol=1e-5, atol=1e-5)


def test_weights_are_what_values_are_averaged_with(implementation):
    q, k, v = spread_inputs(SHAPES[1], "float64", np.random.default_rng(7))
    options = {"dropout": 0.3, "seed": 8, "causal": True}
    weights = fastattn.attention_weights(q, k, **options)
    np.testing.assert_array_equal(weights[..., 0, :5] != 0, kept(weights.shape, 0.3, 8)[..., 0, :5])
    out = weights @ np.repeat(v, 3, axis=1)
    np.testing.assert_allclose(fastattn.attention(q, k, v, **options), out, rtol=1e-12, atol=1e-13)


def test_torch_s_name(implementation):
    q, k, v = spread_inputs(SHAPES[0], "float32", np.random.default_rng(7))
    got = fastattn.scaled_dot_product_attention(q, k, v, dropout_p=0.3, seed=8)
    assert_same_bits([got], [fastattn.attention(q, k, v, dropout=0.3, seed=8)])


@pytest.mark.parametrize("len_q", [2, 50])
@pytest.mark.parametrize("dtype", DTYPES)
def test_garbage_behind_masks(dtype, len_q, implementation):
    q, clean, (k, v), arguments = garbage_behind_masks(len_q, dtype)
    options = {**arguments, "dropout": 0.5, "seed": 4, "return_lse": True}
    with np.errstate(all="ignore"):
        got = fastattn.attention(q, k, v, **options)
    assert_same_bits(got, fastattn.attention(q, *clean, **options))
    assert (got[0][:, :, 0] == 0).all()


def test_nan_where_attended(implementation):
    """A dropped key's value is multiplied by 0, so its NaN shows, as in every row that attends it."""
    q, k, v = spread_inputs(Shape("", 1, 2, 2, 60, 60, 8), "float32", np.random.default_rng(1))
    v[:, :, 30] = np.nan
    with np.errstate(all="ignore"):
        got = fastattn.attention(q, k, v, causal=True, dropout=0.5, seed=1)
    assert np.isfinite(got[:, :, :30]).all()
    assert np.isnan(got[:, :, 30:]).all()


def test_a_row_of_which_all_is_dropped_is_0(implementation):
    q = k = v = np.ones((1, 64, 1, 8), np.float32)
    got = fastattn.attention(q, k, v, dropout=0.5, seed=2)
    some = kept((1, 64, 1, 1), 0.5, 2)[..., 0]
    assert 10 < np.count_nonzero(some) < 54
    np.testing.assert_array_equal(got, np.where(some[..., None], np.float32(2), 0) * v)


@pytest.mark.parametrize("dropout", [2.0**-33, 1e-9, 0.5, 1 - 2.0**-53])
def test_shares_near_0_and_1(dropout, implementation):
    q, k, v = even_inputs(SHAPES[1])
    options = {"dropout": dropout, "seed": 9}
    got = fastattn.attention(q, k, v, **options, return_lse=True)
    check(got, expect(q, k, v, **options), telling=False)


X = np.ones((1, 2, 3, 4), np.float32)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dropout": 1.0, "seed": 1}, ValueError, "dropout is 1.0; expected at least 0 and less than 1"),
        ({"dropout": -0.1, "seed": 1}, ValueError, "dropout is -0.1; expected at least 0 and less than 1"),
        ({"dropout": np.nan, "seed": 1}, ValueError, "dropout is nan; expected a number that is finite"),
        ({"dropout": "0.1", "seed": 1}, TypeError, "dropout is '0.1'; expected a real number"),
        ({"dropout": np.ones(2), "seed": 1}, TypeError, "dropout is an array of shape"),
        ({"dropout": True, "seed": 1}, TypeError, "dropout is True; expected a real number"),
        ({"dropout": None}, TypeError, "dropout is None; expected a real number"),
        (
            {"dropout": 0.1},
            ValueError,
            "seed is None; expected an integer, 0 to 18446744073709551615, as dropout",
        ),
        ({"dropout": 0.1, "seed": 1.5}, TypeError, "seed is 1.5; expected an integer"),
        ({"dropout": 0.1, "seed": -1}, ValueError, "seed is -1; expected at least 0"),
        ({"dropout": 0.1, "seed": 2**64}, ValueError, "seed is 18446744073709551616; expected 0 to"),
        ({"seed": "a"}, TypeError, "seed is 'a'; expected an integer"),
    ],
)
def test_errors(options, error, message):
    for function, *operands in ((fastattn.attention, X, X, X), (fastattn.attention_weights, X, X)):
        with pytest.raises(error, match=rf"^{function.__name__}\(\): {message}"):
            function(*operands, **options)
    with pytest.raises(error, match=rf"^varlen_attention\(\): {message}"):
        fastattn.varlen_attention(X[0], X[0], X[0], [0, 2], [0, 2], **options)


def test_numbers_of_numpy_are_taken():
    got = fastattn.attention(X, X, X, dropout=np.float32(0.5), seed=np.uint64(2**64 - 1))
    assert_same_bits([got], [fastattn.attention(X, X, X, dropout=0.5, seed=2**64 - 1)])
    assert fastattn.attention(X, X, X, dropout=0).shape == X.shape
    assert fastattn.explain(X, X, X, dropout=0.1, seed=1)["kernel"] in ("tile", "few_rows", "numpy")
