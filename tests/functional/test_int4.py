"""Keys and values in 4 bits: what they stand for, attention to that, and how far from what was rounded."""

import ml_dtypes
import numpy as np
import pytest
from implementations import COMPILED, each_isa, forced
from int8_inputs import arguments_of
from layer_oracle import errors_of_cache, randomized
from oracle import assert_same_bits, check, expect, spread_inputs
from refused import assert_refused, refused

import fastattn
from fastattn import functional
from fastattn._bench.cases import DTYPES, STRUCTURES, VARIANTS, Shape
from fastattn.grad import vjp
from fastattn.layers import KVCache, MultiHeadAttention, PagedKVCache, Rope
from fastattn.positions import rope_frequencies

# Both kernels, several blocks, splits and tasks; head dimensions of one matrix and of several.
SHAPES = [
    Shape("tile", batch=2, heads_q=4, heads_kv=2, len_q=45, len_k=200, head_dim=96),
    Shape("one_tile", batch=2, heads_q=3, heads_kv=1, len_q=5, len_k=131, head_dim=32),
    Shape("few_rows", batch=2, heads_q=4, heads_kv=2, len_q=1, len_k=1100, head_dim=64),
    Shape("group", batch=1, heads_q=7, heads_kv=1, len_q=1, len_k=77, head_dim=160),
    Shape("wide", batch=1, heads_q=2, heads_kv=2, len_q=1, len_k=70, head_dim=288),
]
PREFILL, FEW = SHAPES[0], SHAPES[2]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def matrix(n):
    """The Hadamard matrices of the largest powers of two that fit into n, at most 256, along the diagonal."""
    whole, first = np.zeros((n, n)), 0
    while first < n:
        part = np.ones((1, 1))
        while 2 * len(part) <= min(n - first, 256):
            part = np.block([[part, part], [part, -part]]) / np.sqrt(2)
        whole[first : first + len(part), first : first + len(part)] = part
        first += len(part)
    return whole


def parts(rows):
    """(scales, codes) of rows (..., bytes): (..., blocks) and (..., blocks, 32)."""
    data = np.ascontiguousarray(rows).view(np.uint8)
    blocks = data.shape[-1] // 18
    halves = data[..., 2 * blocks :].reshape(*data.shape[:-1], blocks, 16)
    codes = np.concatenate((halves & 15, halves >> 4), axis=-1)
    return data[..., : 2 * blocks].copy().view("<f2").astype(float), codes


def numbers(rows, turned=True):
    """What rows (..., bytes) stand for, (..., head_dim)."""
    scales, codes = parts(rows)
    found = ((codes - 8.0) * scales[..., None]).reshape(*rows.shape[:-1], -1)
    return found @ matrix(found.shape[-1]) if turned else found


def held(k, v):
    cached = KVCache(dtype="int4").append(k, v)
    return {"k": cached.k, "v": cached.v}


def inputs(shape, dtype):
    """q, the arguments in blocks, and k and v as these mean them."""
    q, k, v = spread_inputs(shape, dtype, np.random.default_rng(0))
    blocks = held(k, v)
    lane = np.float64 if dtype == "float64" else np.float32
    return q, blocks, *(numbers(blocks[x]).astype(lane) for x in "kv")


def in_few_rows(q, blocks):
    """Whether queries are rounded, too."""
    return q.dtype != np.float64 and fastattn.explain(q, **blocks)["kernel"] == "few_rows"


def as_rounded(q):
    """q as the kernel of few rows has it: turned, and each 32 elements rounded to bytes."""
    turn = matrix(q.shape[-1])
    parts = (q.astype(float) @ turn).reshape(*q.shape[:-1], -1, 32)
    scale = np.abs(parts).max(axis=-1, keepdims=True) / 127
    codes = np.rint(np.divide(parts, scale, out=np.zeros_like(parts), where=scale > 0))
    return (codes * scale).reshape(q.shape) @ turn


@every_dtype
@pytest.mark.parametrize("variant", [*VARIANTS, *STRUCTURES])
@every_shape
def test_the_definition(shape, variant, dtype, implementation):
    arguments = arguments_of(variant, shape)
    q, blocks, k, v = inputs(shape, dtype)
    got = fastattn.attention(q, **blocks, **arguments, return_lse=True)
    if not in_few_rows(q, blocks):
        check(got, expect(q, k, v, **arguments), telling=variant == "plain")
        return
    expected = fastattn.attention(
        as_rounded(q), k.astype(float), v.astype(float), **arguments, return_lse=True
    )
    # A weight errs by 2**-16 of the largest of 64, times a scale, and a code may be the next one.
    bound = 2e-3 + {"bfloat16": 2**-8, "float16": 2**-10}.get(dtype, 0)
    np.testing.assert_allclose(got[0].astype(float), expected[0], rtol=0, atol=bound * np.abs(v).max())
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-5, atol=5e-3)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256, 320])
@pytest.mark.parametrize("len_k", [1, 2, 3, 63, 64, 65, 129, 513])
@pytest.mark.parametrize("len_q", [1, 2, 4, 7, 33])
def test_sizes(len_q, len_k, head_dim, implementation):
    q, k, v = spread_inputs(
        Shape("", 1, 2, 2, len_q, len_k, head_dim), "float32", np.random.default_rng(len_k)
    )
    blocks = held(k, v[..., :32])
    k, v = (numbers(blocks[x]) for x in "kv")
    exact = q if not in_few_rows(q, blocks) else as_rounded(q)
    got, expected = fastattn.attention(q, **blocks), fastattn.attention(exact.astype(float), k, v)
    np.testing.assert_allclose(got, expected, rtol=0, atol=(1e-5 if exact is q else 1e-3) * np.abs(v).max())


@every_dtype
def test_blocks_hold_what_was_rounded(dtype, implementation):
    """The largest of 32 is exact but for its scale's digits; others err by half a scale."""
    shape = Shape("", 2, 3, 3, 1, 50, 96)
    _, k, _ = spread_inputs(shape, dtype, np.random.default_rng(1))
    k[..., 5] *= k.dtype.type(30)
    k[:, :, 3] = 0
    blocks = held(k, k)["k"]
    assert blocks.shape == (2, 3, 50, 54)
    turned = (k.astype(float) @ matrix(96)).reshape(2, 3, 50, 3, 32)
    scale = np.abs(parts(blocks)[0])
    np.testing.assert_allclose(scale, np.abs(turned).max(axis=-1) / 8, rtol=2**-10, atol=2**-24)
    error = np.abs(numbers(blocks, turned=False).reshape(turned.shape) - turned)
    largest = 8 * scale[..., None]
    assert (
        error <= np.maximum(scale[..., None] * 0.51, np.abs(turned) + 2**-11 * largest - 7 * scale[..., None])
    ).all()
    assert (parts(blocks)[1][:, :, 3] == 8).all()
    mean = np.square(numbers(blocks) - k.astype(float)).mean() / np.square(k.astype(float)).mean()
    assert 0.003 < mean < 0.01


@pytest.mark.skipif(not COMPILED, reason="compares the kernels with NumPy, and there are none")
@each_isa
def test_rounding_is_as_in_numpy(isa):
    _, k, v = spread_inputs(Shape("", 2, 3, 3, 1, 200, 160), "float64", np.random.default_rng(2))
    k *= 10.0 ** np.arange(-9, 6)[np.arange(200) % 15, None]
    k[:, :, 5], k[:, :, 6] = 0, 65519.999999999
    with forced(isa):
        got = held(k, v)
    with forced("numpy"):
        expected = held(k, v)
    for name in "kv":
        assert_same_bits(got[name].view(np.uint8), expected[name].view(np.uint8))


def test_extremes(implementation):
    """A row becomes NaN as a whole where an element is not finite, or a scale in float16 would not be."""
    rng = np.random.default_rng(3)
    k = rng.standard_normal((1, 1, 9, 64)).astype(np.float32)
    k[0, 0, 1, 3], k[0, 0, 2, 63], k[0, 0, 3, 0] = np.nan, np.inf, -np.inf
    k[0, 0, 4], k[0, 0, 5], k[0, 0, 6], k[0, 0, 7] = 1e-45, 65519, 65521, 3e38
    blocks = held(k, k)["k"]
    scales, codes = parts(blocks[0, 0])
    assert np.isnan(scales).tolist() == [[x, x] for x in (0, 1, 1, 1, 0, 0, 1, 1, 0)]
    assert (codes[1:4] == 8).all()
    np.testing.assert_allclose(numbers(blocks[0, 0, 5]), 65519, rtol=1e-3)
    out = fastattn.attention(k[:, :, :1], blocks, blocks)
    assert np.isnan(out).all()
    hidden = np.array([0, 1, 1, 1, 0, 0, 1, 1, 0], bool)
    for rows in (1, 40):
        q = np.repeat(k[:, :, :1], rows, axis=2) / 100
        got = fastattn.attention(q, blocks, blocks, mask=~hidden)
        few = blocks[:, :, ~hidden]
        np.testing.assert_allclose(got, fastattn.attention(q, few, few), rtol=1e-3)


@every_shape
def test_a_query_that_is_not_finite_gives_nan_alone(shape, implementation):
    q, blocks, _, _ = inputs(shape, "float32")
    expected = fastattn.attention(q, **blocks)
    q[0, 1, 0, 7], q[-1, 0, 0, 1] = np.inf, np.nan
    got = fastattn.attention(q, **blocks)
    assert np.isnan(got[0, 1, 0]).all()
    assert np.isnan(got[-1, 0, 0]).all()
    got[0, 1, 0], got[-1, 0, 0] = expected[0, 1, 0], expected[-1, 0, 0]
    assert_same_bits(got, expected)


@every_shape
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layouts_pages_and_threads_change_no_bits(dtype, shape, implementation):
    q, blocks, _, _ = inputs(shape, dtype)
    expected = fastattn.attention(q, **blocks, num_threads=1)
    assert_same_bits(fastattn.attention(q, **blocks, num_threads=3), expected)
    apart = {name: np.concatenate((x, x), axis=-1)[..., : x.shape[-1]] for name, x in blocks.items()}
    apart = {
        name: np.ascontiguousarray(x[:, ::-1].swapaxes(1, 2)).swapaxes(1, 2)[:, ::-1]
        for name, x in apart.items()
    }
    assert_same_bits(fastattn.attention(q, **apart), expected)
    rng = np.random.default_rng(4)
    for page in (1, 5, 16, 64):
        count = -(-shape.len_k // page)
        table = rng.permutation(shape.batch * count + 2)[: shape.batch * count].reshape(shape.batch, count)
        pages = {}
        for name, x in blocks.items():
            pages[name] = np.zeros((table.max() + 1, shape.heads_kv, page, x.shape[-1]), x.dtype)
            pages[name].view(np.uint8)[...] = 0x7E  # scales of NaN
            for (b, i), number in np.ndenumerate(table):
                part = x[b, :, i * page : (i + 1) * page]
                pages[name][number, :, : part.shape[1]] = part
        got = fastattn.attention(q, **pages, block_table=table, kv_lengths=shape.len_k)
        if shape.len_k % page and implementation == "numpy":  # its products round by their shapes
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
        else:
            assert_same_bits(got, expected)


@pytest.mark.skipif(not COMPILED, reason="NumPy's products round by their shapes")
@each_isa
@pytest.mark.parametrize("heads", [4, 20])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_bits_do_not_depend_on_the_batch(dtype, heads, isa):
    """Sequences of one split and of several, and prompts of one part and of several, alone and together."""
    rng = np.random.default_rng(11)
    for len_q, lengths in ((1, [600, 100, 512]), (3, [100, 700, 3]), (20, [4200, 300, 20])):
        q, k, v = (rng.standard_normal((3, h, n, 64)).astype(dtype) for h, n in
                   ((heads, len_q), (1, max(lengths)), (1, max(lengths))))  # fmt: skip
        with forced(isa):
            blocks = held(k, v)
            for causal in (False, True):
                together = fastattn.attention(q, **blocks, kv_lengths=lengths, causal=causal)
                for b, n in enumerate(lengths):
                    own = {name: x[b : b + 1, :, :n] for name, x in blocks.items()}
                    alone = fastattn.attention(q[b : b + 1], **own, causal=causal)
                    assert_same_bits(alone, together[b : b + 1])


def test_one_bad_scale_makes_all_of_a_row_nan(implementation):
    q, blocks, _, _ = inputs(Shape("", 1, 2, 2, 40, 70, 320), "float32")
    blocks["v"].view(np.uint8)[0, 0, 7, :2] = 0x7E
    for rows in (1, 40):
        for options in ({}, {"mask": np.arange(70) != 3}):
            out = fastattn.attention(q[:, :, :rows], **blocks, **options)
            assert np.isnan(out[:, 0]).all()
            assert not np.isnan(out[:, 1]).any()
            hidden = fastattn.attention(q[:, :, :rows], **blocks, mask=np.arange(70) != 7)
            assert not np.isnan(hidden).any()


def test_explain_says_what_is_rounded():
    q, blocks, _, _ = inputs(FEW, "float32")
    if COMPILED:
        shown = fastattn.explain(q, **blocks)
        assert shown["kernel"] == "few_rows"
        assert shown["conversions"] == ("q rounded, 32 numbers at a time: float32 to int8",)
    for dtype in ("float32", "bfloat16"):
        q, blocks, _, _ = inputs(PREFILL, dtype)
        shown = fastattn.explain(q, **blocks)
        wide = "bfloat16" if shown.get("bf16_dot") else "float32"
        assert {f"{x} widened, block by block: int4 to {wide}" for x in "kv"} <= set(shown["conversions"])
        assert wide == "float32" or dtype == "bfloat16"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_functions_that_take_them(dtype, implementation):
    q, blocks, k, v = inputs(PREFILL, dtype)
    wide, exact = q.astype(np.float32), dtype == "float32"

    def near(got, expected, error, most=1.0):
        bound = error if exact else 2e-2 * most  # queries, keys and values in bfloat16, or results alone
        np.testing.assert_allclose(got.astype(np.float32), expected, rtol=0, atol=bound)

    for options in ({"causal": True}, {}):
        near(fastattn.attention_weights(q, blocks["k"], **options),
             fastattn.attention_weights(wide, k, **options), 1e-5)  # fmt: skip
        expected = functional.sigmoid_attention(wide, k, v, **options)
        near(functional.sigmoid_attention(q, **blocks, **options), expected, 1e-4, np.abs(expected).max())
    chosen = np.random.default_rng(5).integers(-1, PREFILL.len_k, (2, 1, PREFILL.len_q, 20))
    got = functional.selected_attention(q, **blocks, selected=chosen)
    of_few = wide if implementation == "numpy" else as_rounded(q).astype(np.float32)  # it rounds queries
    largest = np.abs(v).max()
    near(got, functional.selected_attention(of_few, k, v, chosen), 2e-3 * largest, largest)
    ragged = {name: x[0].swapaxes(0, 1) for name, x in {"q": q, **blocks}.items()}
    begins = {"cu_seqlens_q": [0, 20, 45], "cu_seqlens_k": [0, 150, 200]}
    whole = {name: x[0].swapaxes(0, 1) for name, x in {"q": q, "k": k, "v": v}.items()}
    whole["q"] = whole["q"].astype(np.float32)
    got, expected = (fastattn.varlen_attention(**x, **begins, causal=True) for x in (ragged, whole))
    near(got, expected, 1e-5, largest)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_statistics(dtype, implementation):
    q, blocks, k, v = inputs(PREFILL, dtype)
    stats = ("row_max", "entropy", "top_k:3", "key_sums", "mean_weights")
    _, got = fastattn.attention(q, **blocks, stats=stats)
    _, expected = fastattn.attention(q.astype(np.float32), k, v, stats=stats)
    for name in ("row_max", "entropy", "key_sums", "mean_weights"):
        bound = 1e-4 if dtype == "float32" else 2e-2 * max(1, np.abs(expected[name]).max())
        np.testing.assert_allclose(got[name], expected[name], rtol=0, atol=bound)
    if dtype == "float32":
        np.testing.assert_array_equal(got["top_k"][1], expected["top_k"][1])


@pytest.mark.parametrize("dtype", ["int4", ml_dtypes.int4])
def test_caches(dtype, implementation, tmp_path):
    """In steps, selected, kept, cut, saved and read: the bits of one append of what is left."""
    rng = np.random.default_rng(6)
    k, v = rng.standard_normal((2, 3, 2, 30, 64)).astype(np.float32)
    cache = KVCache(dtype=dtype)
    assert cache.append(k[:, :, :0], v[:, :, :0]).k.shape == (3, 2, 0, 36)
    for begin, end in ((0, 7), (7, 8), (8, 30)):
        cached = cache.append(k[:, :, begin:end], v[:, :, begin:end])
    assert_same_bits(cached.k.view(np.uint8), held(k, v)["k"].view(np.uint8))
    assert cached._asdict().keys() == {"k", "v", "kv_lengths", "q_offset"}
    assert cache.nbytes == 2 * 3 * 2 * cache.capacity * 36
    assert "int4" in repr(cache)
    cache.truncate(29)
    cache.select([2, 0])
    cache.keep([0, 4, 28])
    cache.save(tmp_path / "cache")
    for each in (cache, KVCache.load(tmp_path / "cache")):
        cached = each.append(k[:2, :, :1], v[:2, :, :1])
        left = [np.concatenate((x[[2, 0]][:, :, [0, 4, 28]], x[:2, :, :1]), axis=2) for x in (k, v)]
        for name, x in held(*left).items():
            assert_same_bits(getattr(cached, name).view(np.uint8), x.view(np.uint8))
    with pytest.raises(
        ValueError, match=r"append\(\): k has shape \(2, 2, 1, 32\); expected \(2, 2, tokens, 64\)"
    ):
        cache.append(k[:2, :, :1, :32], v[:2, :, :1])


def test_a_cache_in_pages(implementation):
    rng = np.random.default_rng(7)
    q, k, v = rng.standard_normal((3, 2, 2, 21, 64)).astype(np.float32)
    pages = PagedKVCache(pages=20, page_size=4, num_kv_heads=2, head_dim=64, dtype="int4")
    numbers = [pages.allocate(), pages.allocate()]
    pages.append(numbers, k[:, :, :9], v[:, :, :9])
    got = fastattn.attention(q, **pages.append(numbers, k[:, :, 9:], v[:, :, 9:]), causal=True)
    expected = fastattn.attention(q, **held(k, v), causal=True, q_offset=9)
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"window": (4, 0)}, {"add_zero_attn": True}, {"num_kv_heads": 1}], ids=str
)
def test_a_layer_with_a_cache(options, implementation):
    """Results and weights stay close to an exact cache's, for sequences of different lengths."""
    layer = randomized(MultiHeadAttention(64, 2, rope=Rope(rope_frequencies(32)), **options))
    x = np.random.default_rng(9).standard_normal((3, 9, 64)).astype(np.float32)
    out, weights = errors_of_cache(layer, x, "int4")
    assert 1e-3 < out < 0.25
    assert 1e-3 < weights < 0.1


ERRORS = r"""
KVCache(dtype="int4").append(K40, K40)
    -> ValueError: append\(\): k has a head_dim of 40; expected a multiple of 32 in int4
KVCache(dtype="int4").append(K, K40) -> ValueError: v has a head_dim of 40
PagedKVCache(4, 4, 1, 40, "int4") -> ValueError: head_dim is 40; expected a multiple of 32 in int4
attention(Q, BLOCKS, K) -> TypeError: k has dtype .*int4.* and v float32; expected both in int4, or neither
attention(Q, K, BLOCKS) -> TypeError: k has dtype float32 and v .*int4.*; expected both in int4, or neither
attention(BLOCKS, BLOCKS, BLOCKS) -> TypeError: q has dtype
attention(K40, BLOCKS, BLOCKS)
    -> ValueError: k has a head_dim of 64, shape \(1, 2, 5, 64\); expected a head_dim of 40
attention(Q, BLOCKS, BLOCKS, k_scale=1, v_scale=1) -> TypeError: k has dtype .* expected int8, as k_scale is
attention(Q, BLOCKS, BLOCKS, products="int8") -> ValueError: k is in int4; expected int8, with k_scale and
attention(Q, BLOCKS[:, :1], BLOCKS) -> ValueError: v has 2 heads
functional.additive_attention(Q, BLOCKS, BLOCKS, np.ones((2, 64))) -> TypeError: k has dtype
vjp(attention, Q, BLOCKS, BLOCKS) -> TypeError: attention\(\): k is in int4, which has no gradients
vjp(attention, Q, k=BLOCKS, v=BLOCKS) -> TypeError: attention\(\): k is in int4, which has no gradients
vjp(functional.sigmoid_attention, Q, k=BLOCKS, v=BLOCKS) -> TypeError: k is in int4, which has no gradients
vjp(functional.selected_attention, Q, k=BLOCKS, v=BLOCKS, selected=KEYS) -> TypeError: k is in int4, which has
vjp(fastattn.varlen_attention, q=R, k=RB, v=RB, cu_seqlens_q=[0, 5], cu_seqlens_k=[0, 5])
    -> TypeError: k is in int4, which has no gradients
functional.attention_backward(Q, Q, BLOCKS, BLOCKS, Q, Q[..., 0]) -> TypeError: k has dtype .*int4
functional.varlen_attention_backward(R, R, RB, RB, R, LSE, [0, 5], [0, 5])
    -> TypeError: k is in int4, which has no gradients
attention(Q, BLOCKS[..., :35], BLOCKS) -> ValueError: k has shape \(1, 2, 5, 35\); expected a last axis of
functional.select_keys(Q, BLOCKS, top_k=1) -> TypeError: k has dtype .*int4
KVCache(dtype="int4").append(BLOCKS, BLOCKS) -> TypeError: k has dtype .*int4
"""


@refused(ERRORS)
def test_errors(code, error):
    ones = np.ones((1, 2, 5, 64), np.float32)
    names = {"attention": fastattn.attention, "functional": functional, "fastattn": fastattn, "vjp": vjp}
    names |= {"KVCache": KVCache, "PagedKVCache": PagedKVCache, "np": np, "Q": ones, "K": ones}
    blocks = held(ones, ones)["k"]
    ragged, rows = blocks[0].swapaxes(0, 1), ones[0].swapaxes(0, 1)
    names |= {"LSE": np.zeros((2, 5), np.float32), "KEYS": np.zeros((1, 2, 5, 1), int)}
    names |= {"RB": ragged, "R": rows}
    assert_refused(code, error, K40=ones[..., :40], BLOCKS=blocks, **names)


@each_isa
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_near_what_was_rounded(dtype, isa):
    """Of normal numbers, and of keys of which two dimensions are larger, which the matrices spread."""
    rng = np.random.default_rng(8)
    q, k, v = (rng.standard_normal((1, 8, n, 64)).astype(dtype) for n in (4, 1000, 1000))
    with forced(isa):
        for large in (1, 10):
            k[..., [3, 40]] *= k.dtype.type(large)
            exact = fastattn.attention(*(x.astype(float) for x in (q, k, v))).reshape(-1, 64)
            got = fastattn.attention(q, **held(k, v)).astype(float).reshape(-1, 64)
            cosine = (got * exact).sum(-1) / np.linalg.norm(got, axis=-1) / np.linalg.norm(exact, axis=-1)
            assert cosine.mean() > (0.99 if large == 1 else 0.9)
