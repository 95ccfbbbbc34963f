"""Products of int8: attention whose queries and probabilities are rounded, within the bound of that."""

import re

import naive
import numpy as np
import pytest
from int8_inputs import arguments_of, inputs, rounded, widened
from oracle import assert_same_bits, check, expect, spread_inputs, with_array

import fastattn
from fastattn._bench.cases import STRUCTURES, VARIANTS, Shape, as_dtype
from fastattn.grad import vjp

SHAPES = [
    Shape("tiles", batch=2, heads_q=4, heads_kv=2, len_q=45, len_k=203, head_dim=40),
    Shape("one_vector", batch=2, heads_q=3, heads_kv=1, len_q=5, len_k=131, head_dim=17),
    Shape("splits", batch=1, heads_q=2, heads_kv=2, len_q=12, len_k=1101, head_dim=64),
]
TILES = SHAPES[0]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
BLOCK = 64  # keys whose probabilities have one scale
# Instruction sets with dot products of bytes; on the others products="int8" changes nothing.
INTEGERS = ("amx", "avx512bf16", "avx512vnni", "avxvnni", "neonbf16", "neoni8mm", "neondot")


def most_of(implementation):
    """The largest byte that a probability becomes."""
    return 127 if implementation.startswith("neon") else 255


def bound(q, int8, most, *, sinks=None, **arguments):
    """How far a result (..., len_q, head_dim_v) may be from exact attention to the same int8 arrays."""
    k, v = (widened(int8[x], int8[f"{x}_scale"]).astype(float) for x in "kv")
    arguments, group = with_array(arguments, q, k), q.shape[-3] // k.shape[-3]
    k, v, codes, v_scale = (np.repeat(x.astype(float), group, 1) for x in (k, v, int8["v"], int8["v_scale"]))
    q = q.astype(float)
    scores, attend = naive.masked_scores(q, k, **arguments)
    lse = naive.attention(q, k, v, sinks=sinks, **arguments)[1][..., None]
    # A query is off by at most a half of its scale in each dimension, and so a score by at most e.
    step = np.abs(q).max(-1, keepdims=True) / 254
    sums = np.where(attend, np.abs(k).sum(-1)[..., None, :], 0).max(-1, keepdims=True)
    e = arguments.get("scale", q.shape[-1] ** -0.5) * step * sums
    v_of = np.where(attend[..., None], v[..., None, :, :], np.nan)
    v_of = np.where(attend.any(-1)[..., None, None], v_of, 0)
    low, high = np.nanmin(v_of, axis=-2), np.nanmax(v_of, axis=-2)
    if sinks is not None:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
    error = np.tanh(e / 2) * (high - low)
    # A probability times its v_scale is off by at most a half of the largest of the block / most.
    for begin in range(0, k.shape[-2], BLOCK):
        keys = slice(begin, begin + BLOCK)
        here = attend[..., keys]
        top = np.where(here, scores[..., keys], -np.inf).max(-1, keepdims=True)
        largest = np.where(top > -np.inf, np.exp(np.minimum(top + 2 * e - lse, 0)), 0)
        scale = np.where(here, v_scale[..., None, keys], 0).max(-1, keepdims=True)
        error += largest * scale * 0.5 / most * (here.astype(float) @ np.abs(codes[..., keys, :]))
    return error + 1e-3 * np.maximum(np.abs(low), np.abs(high))  # the exponential function, and float32


def check_rounded(out, q, int8, implementation, **arguments):
    k, v = (widened(int8[x], int8[f"{x}_scale"]) for x in "kv")
    exact = expect(q, k, v, **arguments).out
    allowed = bound(q, int8, most_of(implementation), **arguments)
    allowed += 0.01 * np.abs(exact) * (out.dtype.itemsize == 2)
    assert (np.abs(out.astype(float) - exact) <= allowed).all()


def attention(q, int8, **arguments):
    return fastattn.attention(q, **int8, **arguments, products="int8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("variant", [*VARIANTS, *STRUCTURES])
@every_shape
def test_the_definition(shape, variant, dtype, implementation):
    arguments = arguments_of(variant, shape)
    q, int8, _, _ = inputs(shape, dtype)
    out, lse = attention(q, int8, **arguments, return_lse=True)
    if implementation not in INTEGERS:
        assert_same_bits((out, lse), fastattn.attention(q, **int8, **arguments, return_lse=True))
        return
    check_rounded(out, q, int8, implementation, **arguments)
    exact = fastattn.attention(q, **int8, **arguments, return_lse=True)[1]
    np.testing.assert_allclose(lse, exact, rtol=1e-3, atol=0.1)


@pytest.mark.parametrize("head_dim", [1, 3, 15, 16, 17, 63, 65, 128, 1030])
@pytest.mark.parametrize("len_k", [1, 2, 3, 5, 63, 64, 65, 67, 129, 513])
def test_sizes(len_k, head_dim, implementation):
    q, int8, _, _ = inputs(Shape("", 1, 2, 1, 33, len_k, head_dim), "float32")
    int8["v"] = int8["v"][..., : head_dim // 2 + 1]
    check_rounded(attention(q, int8), q, int8, implementation)


@pytest.mark.parametrize("outlier", [1, 30])
@pytest.mark.parametrize("head_dim", [64, 65, 72, 80, 96, 257])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_floats_are_rounded_here(dtype, head_dim, outlier, implementation):
    """Cosines with the exact result: docs/attention.md. Some dimensions stand out."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 4, n, head_dim)).astype(np.float32) for n in (64, 300, 300))
    q[..., 3] *= outlier**0.5
    k[..., [3, 17]] *= outlier
    exact = fastattn.attention(*(x.astype(np.float64) for x in (q, k, v)))
    q, k, v = (x.astype(as_dtype(dtype)) for x in (q, k, v))
    out = fastattn.attention(q, k, v, products="int8").astype(float)
    cosines = (out * exact).sum(-1) / np.sqrt((out**2).sum(-1) * (exact**2).sum(-1))
    assert cosines.mean() > (0.99 if outlier > 1 and implementation in INTEGERS else 0.9995)


def test_the_matrix_helps(implementation):
    """Without it, a dimension that stands out takes the digits of all others."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, n, 64)).astype(np.float32) for n in (64, 300, 300))
    k[..., 3] *= 20
    exact = fastattn.attention(*(x.astype(np.float64) for x in (q, k, v)), return_lse=True)[1]
    (k8, k_scale), (v8, v_scale) = rounded(k), rounded(v)
    int8 = {"k": k8, "v": v8, "k_scale": k_scale, "v_scale": v_scale}
    plain = attention(q, int8, return_lse=True)[1]
    turned = fastattn.attention(q, k, v, products="int8", return_lse=True)[1]
    better = np.abs(turned - exact).mean() < 0.7 * np.abs(plain - exact).mean()
    assert better or implementation not in INTEGERS


GARBAGE = [np.nan, np.inf, -0.5, 0, 1e-38, 1e30]


@pytest.mark.parametrize("garbage", GARBAGE)
@every_shape
def test_hidden_keys_change_no_bit(shape, garbage, implementation):
    q, int8, _, _ = inputs(shape, "float32")
    mask = np.random.default_rng(3).random((shape.len_q, shape.len_k)) < 0.7
    mask[:, [2, 64, 70]] = False
    mask[1::2, 5] = False  # hidden from some
    for arguments in ({"mask": mask}, {"kv_lengths": shape.len_k - 30}, {"causal": True, "q_offset": 20}):
        there = {name: x.copy() for name, x in int8.items()}
        before = attention(q, int8, **arguments, return_lse=True)
        hidden = ~mask.any(axis=0) if "mask" in arguments else np.arange(shape.len_k) >= shape.len_k - 30
        if "causal" in arguments:
            hidden = np.arange(shape.len_k) >= 20 + shape.len_q
        there["k_scale"][..., hidden] = there["v_scale"][..., hidden] = garbage
        there["v"][..., hidden, :] = 127
        assert_same_bits(attention(q, there, **arguments, return_lse=True), before)
    there = {name: x.copy() for name, x in int8.items()}
    there["v_scale"][..., 5] = garbage
    rows = ~mask[:, 5]
    before, after = (attention(q, x, mask=mask) for x in (int8, there))
    np.testing.assert_array_equal(after[..., rows, :], before[..., rows, :])


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 0, -0.01, 1e-45, 1e-38, 2e36])
@pytest.mark.parametrize("masked", [False, True])
@every_shape
def test_odd_scales_of_values_mean_what_they_say(shape, masked, odd, implementation):
    q, int8, _, _ = inputs(shape, "float32")
    int8["v_scale"][..., 5] = odd
    mask = np.random.default_rng(3).random((shape.heads_q, shape.len_q, shape.len_k)) < 0.8
    arguments = {"mask": mask} if masked else {}
    got, expected = attention(q, int8, **arguments), fastattn.attention(q, **int8, **arguments)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(got), finite)
    most = np.abs(expected[finite]).max(initial=1)
    np.testing.assert_allclose(got[finite], expected[finite], rtol=0.1, atol=0.05 * most)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows_where_it_is_attended(bad, implementation):
    q, k, v = spread_inputs(TILES, "float32", np.random.default_rng(0))
    mask = np.ones((TILES.len_q, TILES.len_k), bool)
    mask[3:, [1, 100]] = False
    q[0, 0, 2, 0] = bad
    k[..., 1, 0] = v[..., 100, 0] = bad
    out = fastattn.attention(q, k, v, mask=mask, products="int8")
    rows = np.isfinite(out).all(axis=-1)
    assert rows[..., 3:].all()
    assert not rows[..., :3].any()


def test_zeros(implementation):
    q, k, v = (np.zeros((1, 2, n, 16), np.float32) for n in (20, 70, 70))
    out, lse = fastattn.attention(q, k, v, products="int8", return_lse=True)
    assert not out.any()
    np.testing.assert_allclose(lse, np.log(70), rtol=1e-3)
    v[..., 3, :] = 1
    np.testing.assert_allclose(fastattn.attention(q, k, v, products="int8"), 1 / 70, rtol=0.01)


def test_roundings_depend_on_what_is_attended_alone(implementation):
    """Near a half, another order of the same factors rounds otherwise: of a million numbers, some do."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 8, n, 32)).astype(np.float32) for n in (1024, 100, 100))
    (k8, k_scale), (v8, v_scale) = rounded(k), rounded(v)
    int8 = {"k": k8, "v": v8, "k_scale": k_scale, "v_scale": v_scale}
    assert_same_bits((attention(q, int8),), (attention(q, int8, stats=("entropy",))[0],))
    cut = {name: x[:, :, :61] for name, x in int8.items()}
    assert_same_bits((attention(q, int8, kv_lengths=61),), (attention(q, cut),))
    mask = np.arange(100) < 40
    before = attention(q, int8, mask=mask)
    end = np.where(np.arange(1024) // 32 % 2, 64, 32)
    tiles = attention(q, int8, row_ranges=(0, end))
    spoiled = {name: x.copy() for name, x in int8.items()}
    spoiled["v_scale"][..., 41:] = np.nan
    assert_same_bits((attention(q, spoiled, mask=mask),), (before,))
    spoiled["v_scale"] = np.where(np.arange(100) == 40, -v_scale, v_scale)
    one, many = (attention(q, spoiled, row_ranges=(0, end), num_threads=n) for n in (1, 64))
    assert_same_bits((one,), (many,))
    rows = end == 32
    np.testing.assert_array_equal(one[..., rows, :], tiles[..., rows, :])


def test_scales_may_be_extreme(implementation):
    q, int8, _, _ = inputs(TILES, "float32")
    plain = attention(q, int8)
    for factor in (1e-36, 1e36):
        there = {**int8, "k_scale": int8["k_scale"] / np.float32(factor)}
        np.testing.assert_allclose(attention(q * np.float32(factor), there), plain, rtol=0.1, atol=0.1)


def test_statistics(implementation):
    q, int8, k, v = inputs(TILES, "float32")
    names = ("row_max", "entropy", "top_k:3", "key_sums", "mean_weights")
    out, got = attention(q, int8, stats=names)
    assert_same_bits((out,), (attention(q, int8),))
    _, exact = fastattn.attention(*(x.astype(np.float64) for x in (q, k, v)), stats=names)
    got["top_k"], exact["top_k"] = got["top_k"][0], exact["top_k"][0]
    for name, x in exact.items():
        np.testing.assert_allclose(got[name], x, rtol=0.05, atol=0.05, err_msg=name)


@every_shape
def test_bits_depend_on_nothing_else(shape, implementation):
    q, int8, _, _ = inputs(shape, "float32")
    together = attention(q, int8, return_lse=True, num_threads=1)
    for num_threads in (2, 5):
        assert_same_bits(attention(q, int8, return_lse=True, num_threads=num_threads), together)
    for b in range(shape.batch):
        one = {name: x[b : b + 1] for name, x in int8.items()}
        alone = attention(q[b : b + 1], one, return_lse=True)
        assert_same_bits(alone, tuple(x[b : b + 1] for x in together))
    floats = [widened(int8[x], int8[f"{x}_scale"]) for x in "kv"]
    once, again = (fastattn.attention(q, *floats, products="int8", num_threads=n) for n in (1, 3))
    assert_same_bits((once,), (again,))


def test_pages(implementation):
    q, int8, _, _ = inputs(Shape("", 1, 4, 2, 40, 160, 24), "float32")
    expected = attention(q, int8, causal=True)
    for page in (16, 80):
        pages = {name: np.stack(np.split(x[0], 160 // page, axis=1)) for name, x in int8.items()}
        table = np.arange(160 // page)[::-1][None]
        pages = {name: x[::-1].copy() for name, x in pages.items()}
        assert_same_bits((attention(q, pages, causal=True, block_table=table),), (expected,))


# Their numbers of queries and keys. All queries of "few" fit the kernel of few rows; its first sequence
# takes the other one.
SEQUENCES = {"any": [(3, 90), (50, 70), (0, 5), (70, 200)], "few": [(3, 3), (1, 100)]}


@pytest.mark.parametrize("sequences", SEQUENCES)
def test_ragged(sequences, implementation):
    """Few queries, many, and none: the bits of separate calls."""
    rng, lengths = np.random.default_rng(0), SEQUENCES[sequences]
    begins = [np.cumsum([0, *(n[i] for n in lengths)]) for i in (0, 1)]
    q, k, v = (rng.standard_normal((begins[i][-1], 2, 32)).astype(np.float32) for i in (0, 1, 1))
    (k8, k_scale), (v8, v_scale) = rounded(k), rounded(v)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    of_int8 = fastattn.varlen_attention(q, k8, v8, *begins, causal=True, products="int8", **scales)
    for i in range(len(lengths)):
        rows, keys = (slice(begin[i], begin[i + 1]) for begin in begins)
        one = [x.swapaxes(0, 1) for x in (q[rows], k8[keys], v8[keys])]
        own = {name: x[keys].T for name, x in scales.items()}
        alone = fastattn.attention(*one, causal=True, products="int8", **own)
        np.testing.assert_array_equal(of_int8[rows].swapaxes(0, 1), alone)
    with pytest.raises(ValueError, match=r"^varlen_attention\(\): k has dtype float32; expected int8, with"):
        fastattn.varlen_attention(q, k, v, *begins, products="int8")


def test_few_queries_multiply_floats(implementation):
    q, int8, k, v = inputs(Shape("", 1, 4, 2, 2, 300, 64), "float32")
    assert not fastattn.explain(q, **int8, products="int8")["int8_products"]
    check(attention(q, int8, return_lse=True), expect(q, k, v))
    check(fastattn.attention(q, k, v, products="int8", return_lse=True), expect(q, k, v))


def test_explain(implementation):
    q, int8, k, v = inputs(TILES, "float32")
    found = fastattn.explain(q, **int8, products="int8")
    assert found["int8_products"] == (implementation in INTEGERS)
    wide = np.zeros((20, 65537), np.int8)
    far = fastattn.explain(wide.astype(np.float32), wide, wide, k_scale=1, v_scale=1, products="int8")
    assert not far["int8_products"]
    if implementation in INTEGERS:
        assert found["conversions"] == ("q rounded, tile by tile: float32 to int8",)
        found = fastattn.explain(q, k, v, products="int8")["conversions"]
        assert re.match(r"k rounded, 0.0\d+ MB: float32 to int8", found[1])
    assert not fastattn.explain(q, **int8)["int8_products"]
    wide = {name: x.astype(float) if "scale" in name else x for name, x in int8.items()}
    assert not fastattn.explain(q.astype(float), **wide, products="int8")["int8_products"]


Q, K, V = spread_inputs(Shape("", 1, 4, 2, 12, 20, 8), "float32", np.random.default_rng(0))
PAGES = {"k": K[0][None], "v": V[0][None], "block_table": [[0]]}
BAD = [
    (ValueError, "products is 'int4'; expected int8", {"products": "int4"}),
    (ValueError, "products is True; expected int8", {"products": True}),
    (ValueError, "dropout is 0.5; expected 0 with products", {"dropout": 0.5, "seed": 1}),
    (
        ValueError,
        "k has pages of float32; expected int8, with k_scale and v_scale, for products",
        PAGES,
    ),
]


@pytest.mark.parametrize(("error", "message", "changes"), BAD, ids=lambda x: "")
def test_errors(error, message, changes):
    with pytest.raises(error, match=rf"^attention\(\): {message}"):
        fastattn.attention(Q, **{"k": K, "v": V, "products": "int8", **changes})


def test_no_gradients():
    with pytest.raises(ValueError, match=r"products is given; expected none: int8 has no gradients$"):
        vjp(fastattn.attention, Q, K, V, products="int8")
