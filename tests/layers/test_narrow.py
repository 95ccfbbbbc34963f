"""Layers with weights in int8 and in 4 bits, and with inputs rounded to int8: every road to a product."""

import copy
import pickle

import numpy as np
import pytest
from layer_oracle import draw, randomized

import fastattn
from fastattn import ops
from fastattn.layers import (
    FeedForward,
    Linear,
    MultiHeadAttention,
    Transformer,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

KINDS = ["int8", "q8", "int4", "uint4", "nf4"]
WIDTH, HEADS = 64, 4
MORE = {"num_kv_heads": 2, "qk_norm": True, "output_gate": True, "sinks": True}
# Each layer: how it is made with more options, and how it is called.
LAYERS = {
    "Linear": (lambda **o: Linear(WIDTH, 33, **o), lambda m, x: m(x)),
    "FeedForward": (lambda **o: FeedForward(WIDTH, 90, "swiglu", **o), lambda m, x: m(x)),
    "MultiHeadAttention": (lambda **o: MultiHeadAttention(WIDTH, HEADS, **o), lambda m, x: m(x)[0]),
    "MultiHeadAttention with more": (
        lambda **o: MultiHeadAttention(WIDTH, HEADS, **MORE, **o),
        lambda m, x: m(x, is_causal=True)[0],
    ),
    "MultiHeadAttention over others": (
        lambda **o: MultiHeadAttention(WIDTH, HEADS, kdim=WIDTH, vdim=32, **o),
        lambda m, x: m(x, x[:, :5], x[:, :5, :32])[0],
    ),
    "TransformerEncoderLayer": (
        lambda **o: TransformerEncoderLayer(WIDTH, HEADS, 96, **o),
        lambda m, x: m(x),
    ),
    "TransformerEncoderLayer, masked": (
        lambda **o: TransformerEncoderLayer(WIDTH, HEADS, 96, "geglu", norm="rms_norm", norm_first=True, **o),
        lambda m, x: m(x, is_causal=True),
    ),
    "TransformerDecoderLayer": (
        lambda **o: TransformerDecoderLayer(WIDTH, HEADS, 96, **o),
        lambda m, x: m(x, x[:, ::2]),
    ),
    "Transformer": (lambda **o: Transformer(WIDTH, HEADS, 1, 1, 96, **o), lambda m, x: m(x, x[:, :4])),
}


def relative(x, exact):
    return np.linalg.norm(x - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", KINDS)
def test_results(implementation, kind, name):
    """Rounding changes what it should, and not much; a copy gives the same bits."""
    make, call = LAYERS[name]
    x = draw(2, 9, WIDTH)
    exact = randomized(make())
    state = exact.state_dict()
    narrow, rounded = make(weights_dtype=kind), make(weights_dtype=kind, activations="int8")
    narrow.load_state_dict(state)
    rounded.load_state_dict(state)
    expected, near, nearer = call(exact, x), call(narrow, x), call(rounded, x)
    assert relative(near, expected) < {"int8": 0.03}.get(kind, 0.4)
    assert 1e-5 < relative(nearer, near) < 0.15
    for again in (copy.deepcopy(rounded), pickle.loads(pickle.dumps(rounded))):
        np.testing.assert_array_equal(call(again, x), nearer)


@pytest.mark.parametrize("kind", KINDS)
def test_each_product_is_that_of_ops(implementation, kind):
    x, how = draw(3, 9, WIDTH), {"weights_dtype": kind, "activations": "int8"}
    linear = randomized(Linear(WIDTH, 33, **how))
    expected = ops.linear(x, linear.packed_weight, linear.bias_vector, activations="int8")
    np.testing.assert_array_equal(linear(x), expected)
    forward = randomized(FeedForward(WIDTH, 90, "swiglu", **how))
    hidden = ops.linear(x, forward.weight1, forward.bias1, activation="silu", activations="int8")
    expected = ops.linear(hidden, forward.weight2, forward.bias2, activations="int8")
    np.testing.assert_array_equal(forward(x), expected)
    np.testing.assert_array_equal(forward(x, residual=np.zeros_like(x)), expected)
    attention = randomized(MultiHeadAttention(WIDTH, HEADS, **how))
    maps = attention.all_maps
    product = ops.linear(x, maps.weight, maps.bias, activations="int8")
    q, k, v = (y.reshape(3, 9, HEADS, -1).transpose(0, 2, 1, 3) for y in np.split(product, 3, axis=-1))
    for made, expected in zip(attention.project_keys_values(x), (k, v), strict=True):
        np.testing.assert_array_equal(made, expected)
    mixed = fastattn.attention(q, k, v).transpose(0, 2, 1, 3).reshape(x.shape)
    np.testing.assert_array_equal(attention(x)[0], attention.out_proj(mixed))
    assert attention.out_proj.activations == "int8"


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_has_the_same_products(implementation, kind):
    """A plain layer is a program; with a mask, its attention runs product by product."""
    layer = randomized(
        TransformerEncoderLayer(WIDTH, HEADS, 96, "geglu", weights_dtype=kind, activations="int8")
    )
    x = draw(2, 9, WIDTH)
    plain, masked = layer(x), layer(x, src_mask=np.zeros((9, 9), bool))
    assert layer._programs[True][1] is not None
    np.testing.assert_allclose(plain, masked, rtol=0, atol=0.05)  # a near tie may go either way


def test_parts_may_differ(implementation):
    """A part keeps its own rounding in a layer of another one."""
    layer = randomized(TransformerEncoderLayer(WIDTH, HEADS, 96, weights_dtype="int8"))
    x = draw(2, 9, WIDTH)
    exact = layer(x)
    rounded = FeedForward(WIDTH, 96, weights_dtype="int8", activations="int8")
    rounded.load_state_dict(layer.feed_forward.state_dict())
    layer.feed_forward = rounded
    for options in ({}, {"src_mask": np.zeros((9, 9), bool)}):
        assert 1e-5 < relative(layer(x, **options), exact) < 0.1


def test_weights_that_activations_do_not_fit():
    """Refused before anything is loaded, by the layer's own name."""
    layer = randomized(TransformerEncoderLayer(WIDTH, HEADS, 96, weights_dtype="int8", activations="int8"))
    stack, x = TransformerEncoder([layer]), draw(2, 9, WIDTH)
    before = stack(x)
    for dtype in ("float32", "bfloat16", "float64"):
        message = (
            rf"TransformerEncoder.load_state_dict\(\): activations is 'int8' for weights in {dtype}; expected"
        )
        with pytest.raises(ValueError, match=message):
            stack.load_state_dict(stack.state_dict(), weights_dtype=dtype)
        with pytest.raises(ValueError, match=rf"^Linear\(\): activations is 'int8' for weights in {dtype}"):
            Linear(3, 4, weights_dtype=dtype, activations="int8")
    np.testing.assert_array_equal(stack(x), before)
    stack.load_state_dict(stack.state_dict(), weights_dtype="int4")
    assert layer.self_attn.out_proj.weights_dtype == "int4"
    with pytest.raises(ValueError, match=r"^FeedForward\(\): the weight has 200000 input features; expected"):
        FeedForward(8, 200_000, weights_dtype="int8", activations="int8")
    with pytest.raises(AttributeError, match="activations cannot be set"):
        layer.activations = None
