"""int8 keys and values: attention of k * k_scale and v * v_scale, and how far from what was rounded."""

import inspect
import re

import numpy as np
import pytest
from implementations import each_isa, forced, has_pairs
from int8_inputs import arguments_of, inputs, widened
from oracle import assert_same_bits, check, expect

import fastattn
from fastattn import functional
from fastattn._args import options
from fastattn._bench.cases import DTYPES, STRUCTURES, VARIANTS, Shape
from fastattn.grad import vjp
from fastattn.layers import KVCache

# Both kernels, several blocks, splits and tasks; sizes that are no multiples of anything.
SHAPES = [
    Shape("tile", batch=2, heads_q=4, heads_kv=2, len_q=45, len_k=200, head_dim=40),
    Shape("one_tile", batch=2, heads_q=3, heads_kv=1, len_q=5, len_k=131, head_dim=17),
    Shape("dot", batch=2, heads_q=4, heads_kv=2, len_q=1, len_k=1100, head_dim=64),
    Shape("grouped_dot", batch=1, heads_q=7, heads_kv=1, len_q=1, len_k=77, head_dim=33),
    Shape("large_groups", batch=1, heads_q=32, heads_kv=2, len_q=1, len_k=300, head_dim=16),
]
DECODE, PREFILL = SHAPES[2], SHAPES[0]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def attention(q, int8, **arguments):
    return fastattn.attention(q, **int8, **arguments, return_lse=True)


@every_dtype
@pytest.mark.parametrize("variant", [*VARIANTS, *STRUCTURES])
@every_shape
def test_the_definition(shape, variant, dtype, implementation):
    arguments = arguments_of(variant, shape)
    q, int8, k, v = inputs(shape, dtype)
    check(attention(q, int8, **arguments), expect(q, k, v, **arguments), telling=variant == "plain")


@pytest.mark.parametrize("head_dim", [1, 3, 15, 16, 17, 63, 65, 128, 260])
@pytest.mark.parametrize("len_k", [1, 2, 63, 64, 65, 129, 513])
@pytest.mark.parametrize("len_q", [1, 3, 33])
def test_sizes(len_q, len_k, head_dim, implementation):
    q, int8, k, v = inputs(Shape("", 1, 2, 1, len_q, len_k, head_dim), "float32")
    v, int8["v"] = v[..., : head_dim // 2 + 1], int8["v"][..., : head_dim // 2 + 1]
    check(attention(q, int8), expect(q, k, v), telling=False)


@every_dtype
@every_shape
def test_any_layout(shape, dtype, implementation):
    q, int8, k, v = inputs(shape, dtype)
    plain = attention(q, int8)
    for name, x in int8.items():
        if x.ndim == 4:  # rows of one head apart, from the last to the first, with room between them
            x = np.concatenate([x, x], axis=-1)[..., ::-1, : x.shape[-1]].transpose(0, 2, 1, 3)
            int8[name] = np.ascontiguousarray(x)[:, ::-1].transpose(0, 2, 1, 3)
        else:
            int8[name] = np.ascontiguousarray(x.T[::-1].repeat(3, axis=0)[::3])[::-1].T
    assert_same_bits(attention(q, int8), plain)
    check(plain, expect(q, k, v))


@every_shape
def test_scales_broadcast(shape, implementation):
    """One scale for each head, or for all keys of a batch."""
    q, int8, _, _ = inputs(shape, "float32")
    int8["k_scale"] = np.float32(0.01) * np.arange(1, shape.heads_kv + 1, dtype=np.float32)[:, None]
    int8["v_scale"] = np.float32(0.02)
    k = int8["k"] * int8["k_scale"][..., None]
    check(attention(q, int8), expect(q, k, int8["v"] * np.float32(0.02)))


@every_shape
def test_scales_may_be_integers(shape, implementation):
    q, int8, _, _ = inputs(shape, "float32")
    ones, twos = (np.full(int8["k_scale"].shape, n, np.float32) for n in (1, 2))
    expected = attention(q * np.float32(0.01), int8 | {"k_scale": ones, "v_scale": twos})
    for scales in ({"k_scale": 1, "v_scale": 2}, {"k_scale": ones.astype(np.int8), "v_scale": twos.tolist()}):
        assert_same_bits(attention(q * np.float32(0.01), int8 | scales), expected)


def test_one_head(implementation):
    q, int8, k, v = inputs(DECODE, "float32")
    int8 = {name: x[0, 0] for name, x in int8.items()}
    check(attention(q[0, 0], int8), expect(q[0, 0], k[0, 0], v[0, 0]))


# Scales that no rounding makes, but that have a meaning.
ODD = [np.nan, np.inf, -np.inf, 0, -0.01, 1e-45, 1e-38, 2e36, 3e38]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@every_shape
def test_odd_scales_where_hidden_never_show(shape, dtype, name, odd, implementation):
    q, int8, k, v = inputs(shape, dtype)
    hidden = np.random.default_rng(3).random((shape.len_q, shape.len_k)) < 0.3
    hidden[:, [2, 64, 70]] = True
    expected = expect(q, k, v, mask=~hidden)
    int8[name][..., hidden.all(axis=0)] = odd
    check(attention(q, int8, mask=~hidden), expected)
    lengths = shape.len_k - 30
    expected = expect(q, k, v, kv_lengths=lengths)
    int8["k_scale"][..., lengths:] = int8["v_scale"][..., lengths:] = odd
    int8[name] = np.where(hidden.all(axis=0), np.float32(0.01), int8[name])
    k, v = (widened(int8[x], int8[f"{x}_scale"]) for x in "kv")
    expected = expect(q, k, v, kv_lengths=lengths)
    assert np.isfinite(expected.out).all()
    check(attention(q, int8, kv_lengths=lengths), expected)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@every_shape
def test_odd_scales_where_attended_mean_what_they_say(shape, dtype, masked, name, odd, implementation):
    q, int8, _, _ = inputs(shape, dtype)
    q = (q * (1e-3 if abs(odd) > 1 else 1)).astype(q.dtype)
    int8[name][..., 5] = odd
    k, v = (widened(int8[x], int8[f"{x}_scale"]) for x in "kv")
    mask = np.random.default_rng(3).random((shape.heads_q, shape.len_q, shape.len_k)) < 0.8
    arguments = {"mask": mask} if masked else {}
    got = [x.astype(np.float32) for x in attention(q, int8, **arguments)]
    expected = attention(q.astype(np.float32), {"k": k, "v": v}, **arguments)
    for x, y in zip(got, expected, strict=True):
        if dtype == "float32":
            bounds = {"rtol": 1e-4, "atol": 1e-6 * np.abs(y[np.isfinite(y)]).max(initial=0)}
        else:  # probabilities and values are rounded, too
            bounds = {"rtol": 2e-2, "atol": 2**-9 * np.abs(v[np.isfinite(v) & (np.abs(v) < 1e30)]).max()}
        np.testing.assert_allclose(x, y, **bounds)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_queries_do_not_overflow_before_scores_do(dtype, implementation):
    """q @ k would, in integers; q @ (k * k_scale) does not."""
    for shape in (DECODE, PREFILL):
        q, int8, _, _ = inputs(shape, dtype)
        q = (q.astype(np.float32) / np.abs(q).max() * np.float32(2e37)).astype(q.dtype)
        int8["k_scale"] = int8["k_scale"] * np.float32(1e-37)
        k, v = (widened(int8[x], int8[f"{x}_scale"]) for x in "kv")
        check(attention(q, int8), expect(q, k, v), telling=dtype == "float32")


@every_shape
def test_statistics(shape, implementation):
    q, int8, k, v = inputs(shape, "float32")
    names = ("row_max", "entropy", "top_k:5", "key_sums", "mean_weights")
    _, got = fastattn.attention(q, **int8, stats=names)
    _, expected = fastattn.attention(*(x.astype(np.float64) for x in (q, k, v)), stats=names)
    np.testing.assert_array_equal(got["top_k"][1], expected["top_k"][1])
    got["top_k"], expected["top_k"] = got["top_k"][0], expected["top_k"][0]
    for name, x in expected.items():
        np.testing.assert_allclose(got[name], x, rtol=1e-5, atol=1e-5, err_msg=name)


@every_shape
def test_sigmoid_and_weights(shape, implementation):
    q, int8, k, v = inputs(shape, "float32")
    wide = [x.astype(np.float64) for x in (q, k, v)]
    got = functional.sigmoid_attention(q, **int8, causal=True)
    np.testing.assert_allclose(got, functional.sigmoid_attention(*wide, causal=True), rtol=1e-5, atol=1e-6)
    got = fastattn.attention_weights(q, int8["k"], k_scale=int8["k_scale"])
    np.testing.assert_allclose(got, fastattn.attention_weights(*wide[:2]), rtol=1e-5, atol=1e-6)


@every_dtype
@every_shape
def test_bits_depend_on_nothing_else(shape, dtype, implementation):
    q, int8, _, _ = inputs(shape, dtype)
    together = attention(q, int8, num_threads=1)
    for num_threads in (2, 5):
        assert_same_bits(attention(q, int8, num_threads=num_threads), together)
    for b in range(shape.batch):
        alone = attention(q[b : b + 1], {name: x[b : b + 1] for name, x in int8.items()})
        assert_same_bits(alone, tuple(x[b : b + 1] for x in together))


def test_explain():
    q, int8, _, _ = inputs(DECODE, "float16")
    found = fastattn.explain(q, **int8)
    assert "k widened and scaled, block by block: int8 to float32" in found["conversions"]
    assert "v widened and scaled, block by block: int8 to float32" in found["conversions"]
    assert found["copies"] == ()
    strange = {"k": int8["k"].astype("i1")[..., ::-1], "k_scale": int8["k_scale"].astype(">f8")}
    copies = " ".join(fastattn.explain(q, **{**int8, **strange})["copies"])
    assert "k copied: the head dimension not contiguous" in copies
    assert "k_scale converted: >f8 to float32" in copies or "k_scale converted: float64 to float32" in copies


@each_isa
def test_queries_in_bfloat16_take_products_of_pairs_as_bfloat16_keys_do(isa):
    q, int8, _, _ = inputs(PREFILL, "bfloat16")
    wide = "bfloat16" if has_pairs(isa) else "float32"
    with forced(isa):
        found = fastattn.explain(q, **int8)
    assert found["bf16_dot"] == has_pairs(isa)
    assert f"k widened and scaled, block by block: int8 to {wide}" in found["conversions"]


Q, INT8, K, V = inputs(Shape("", 2, 4, 2, 3, 5, 8), "float32")
F64 = Q.astype(np.float64)
BAD = [
    (TypeError, r"k has dtype int8; expected float32, .* or bfloat16, or int8 with k_scale and v_scale$",
     {"k_scale": None, "v_scale": None}),
    (TypeError, r"v has dtype int16; expected float32, .*, or int8 with k_scale and v_scale$",
     {"k": K, "v": INT8["v"].astype(np.int16), "k_scale": None, "v_scale": None}),
    (TypeError, r"q, k and v have dtypes .*, or int8 for all others with k_scale and v_scale$",
     {"k": K.astype(np.float64), "v": V, "k_scale": None, "v_scale": None}),
    (ValueError, "k_scale is given without v_scale; expected both, or neither", {"v_scale": None}),
    (ValueError, "v_scale is given without k_scale; expected both, or neither", {"k_scale": None}),
    (TypeError, "k has dtype float32; expected int8, as k_scale is given", {"k": K}),
    (TypeError, "v has dtype float32; expected int8, as v_scale is given", {"v": V}),
    (TypeError, "k has dtype uint8; expected int8", {"k": INT8["k"].astype(np.uint8)}),
    (TypeError, "k_scale has dtype bool; expected float32, .* or integers", {"k_scale": np.ones(5, bool)}),
    (TypeError, "v_scale is a masked array", {"v_scale": np.ma.masked_array(INT8["v_scale"])}),
    (ValueError, r"k_scale has shape \(2, 2, 4\); expected .*heads_kv, len_k\) = \(2, 2, 5\)",
     {"k_scale": INT8["k_scale"][..., :4]}),
    (ValueError, r"v_scale has shape \(2, 2, 5, 1\); expected one that fits",
     {"v_scale": INT8["v_scale"][..., None]}),
    (ValueError, r"k has shape \(8,\); expected", {"k": INT8["k"][0, 0, 0]}),
    (ValueError, "v has a length of 4", {"v": INT8["v"][:, :, :4]}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "changes"), BAD, ids=lambda x: "")
def test_errors(error, message, changes):
    with pytest.raises(error, match=rf"^attention\(\): {message}"):
        fastattn.attention(Q, **{**INT8, **changes})


def test_out_may_not_be_a_scale():
    memory = np.ones((2, 4, 3, 8), np.float32)
    with pytest.raises(ValueError, match="k_scale"):
        fastattn.attention(Q, **{**INT8, "k_scale": memory[0, 0, 0, :5]}, out=memory)


def test_other_functions_say_who_takes_int8():
    with pytest.raises(TypeError, match="attention takes int8 with k_scale and v_scale"):
        functional.gated_attention(Q, INT8["k"], INT8["v"], Q)
    with pytest.raises(TypeError, match=r"key has dtype int8; .* \(attention takes int8 with k_scale and"):
        fastattn.scaled_dot_product_attention(Q, INT8["k"], INT8["v"], enable_gqa=True)
    with pytest.raises(TypeError, match=r"k has dtype int8; .* or bfloat16, or int8 with k_scale$"):
        fastattn.attention_weights(Q, INT8["k"])
    with pytest.raises(TypeError, match=r"k has dtype int8; .*, or int8 with k_scale and v_scale$"):
        functional.sigmoid_attention(Q, INT8["k"], INT8["v"])
    with pytest.raises(TypeError, match=r"k has dtype int8; .* \(KVCache rounds to int8 and int4\)$"):
        KVCache(dtype="int8").append(INT8["k"], INT8["v"])


def takes_scales(function):
    """Whether a public function has the argument k_scale."""
    parameters = inspect.signature(function).parameters
    unpacked = [re.findall(r"^Unpack\[(\w+)\]$", str(p.annotation)) for p in parameters.values()]
    named = [getattr(options, name).__annotations__ for names in unpacked for name in names]
    return any("k_scale" in names for names in [parameters, *named])


ALL = [fastattn.attention, fastattn.varlen_attention, *(getattr(functional, n) for n in functional.__all__)]
DIFFERENTIABLE = [function for function in ALL if hasattr(function, "_vjp") and takes_scales(function)]


@pytest.mark.parametrize("function", DIFFERENTIABLE, ids=lambda x: x.__name__)
def test_int8_has_no_gradients(function):
    more = {
        fastattn.varlen_attention: ([0, 2, 3], [0, 2, 5]),
        functional.selected_attention: ([[[0]]],),
    }.get(function, ())
    q, k, v, *scales = Q, INT8["k"], INT8["v"], INT8["k_scale"], INT8["v_scale"]
    if function is fastattn.varlen_attention:
        q, k, v = (x[0].swapaxes(0, 1) for x in (q, k, v))
        scales = [x[0].swapaxes(0, 1) for x in scales]
    given = dict(zip(("k_scale", "v_scale"), scales, strict=True))
    function(q, k, v, *more, **given)
    for name in given:
        for chosen in (given, {name: given[name]}):
            message = r": [kv]_scale is given; expected none: int8 has no gradients$"
            with pytest.raises(ValueError, match=rf"^{function.__name__}\(\){message}"):
                vjp(function, q, k, v, *more, **chosen)
    none = dict.fromkeys(given)
    floats = (q, k.astype(np.float32), v.astype(np.float32), *more)
    assert len(vjp(function, *floats, **none)[1](function(*floats))) == 3
