"""Gradients of layers against finite differences in float64, and what holds of them besides."""

import ml_dtypes
import numpy as np
import pytest
from implementations import COMPILED, forced, has_pairs
from layer_oracle import HEADS, WIDTH, assert_gradients, every_feature, randomized
from oracle import assert_same_bits
from refused import assert_refused, refused

from fastattn.grad import vjp
from fastattn.layers import (
    FeedForward,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    RMSNorm,
    Rope,
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from fastattn.positions import rope_frequencies


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def test_gradients_of_bfloat16_weights_round_where_there_are_pairs(implementation):
    layer = Linear(40, 50, weights_dtype="bfloat16", rng=3)
    x, dout = (normal(70, n).astype(ml_dtypes.bfloat16).astype(np.float32) for n in (40, 50))
    more = np.float32(1 + 2.0**-10)  # which rounding takes away
    (dx, grads), (other, others) = (vjp(layer, x * m)[1](dout * m) for m in (np.float32(1), more))
    assert np.array_equal(grads["weight"], others["weight"]) == has_pairs(implementation)
    assert np.array_equal(dx, other) == (implementation == "amx")


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias, activation, implementation):
    layer = randomized(Linear(WIDTH, 21, bias, weights_dtype="float64"))
    assert_gradients(layer, normal(2, 3, WIDTH), activation=activation)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_norms(kind, implementation):
    assert_gradients(randomized(kind(WIDTH, weights_dtype="float64")), normal(2, 3, WIDTH))


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_norms_of_another_type_than_their_parameters(kind, implementation):
    """As in a plain call: the input decides in which type they are computed."""
    for weights_dtype, dtype in (("float32", np.float64), ("float64", np.float32)):
        layer, same = kind(16, weights_dtype=weights_dtype), kind(16, weights_dtype=np.dtype(dtype).name)
        for norm in (layer, same):
            norm.load_state_dict({name: normal(16, seed=2).astype("f4") for name in norm.state_dict()})
        x, dout = normal(5, 16).astype(dtype), normal(5, 16, seed=1).astype(dtype)
        (out, pullback), (_, expected) = vjp(layer, x), vjp(same, x)
        np.testing.assert_array_equal(out, layer(x))
        (dx, grads), (same_dx, same_grads) = pullback(dout), expected(dout)
        assert_same_bits([dx], [same_dx])
        for name, gradient in grads.items():
            assert_same_bits([gradient], [same_grads[name].astype(weights_dtype)])


@pytest.mark.parametrize("inner", [32, 33])  # with panels that are full, and not
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "glu", "reglu", "geglu", "geglu_tanh", "swiglu"])
def test_feed_forward(activation, bias, inner, implementation):
    layer = randomized(FeedForward(WIDTH, inner, activation, bias, weights_dtype="float64"))
    assert_gradients(layer, normal(2, 3, WIDTH))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("others", [0, 1, 2])
@every_feature
def test_attention(options, others, causal, implementation):
    layer = randomized(MultiHeadAttention(WIDTH, HEADS, weights_dtype="float64", **options))
    memory = [normal(2, 4, WIDTH, seed=i) for i in (1, 2)][:others]
    assert_gradients(layer, normal(2, 5, WIDTH), *memory, is_causal=causal)


@pytest.mark.parametrize("widths", [{"kdim": 20}, {"vdim": 33}, {"kdim": 20, "vdim": 33}], ids=str)
def test_attention_of_other_widths(widths, implementation):
    layer = randomized(MultiHeadAttention(WIDTH, HEADS, weights_dtype="float64", **widths))
    memory = [normal(2, 4, widths.get(name, WIDTH), seed=i) for i, name in enumerate(("kdim", "vdim"))]
    assert_gradients(layer, normal(2, 5, WIDTH), *memory)


MASKS = {
    "bool": {"attn_mask": np.triu(np.ones((5, 5), bool), 1)},
    "float": {"attn_mask": normal(5, 5)},
    "of heads": {"attn_mask": normal(2, HEADS, 5, 5)},
    "padding": {"key_padding_mask": np.array([[0, 0, 0, 0, 1], [0, 1, 0, 1, 1]], bool)},
    "both": {
        "attn_mask": np.where(np.triu(np.ones((5, 5)), 3) > 0, -np.inf, 0.5),
        "key_padding_mask": np.array([[0, 0, 0, 0, 1], [0, 1, 0, 1, 1]], bool),
    },
}


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "sinks": True}], ids=str)
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_masks(masks, options, implementation):
    layer = randomized(MultiHeadAttention(WIDTH, HEADS, weights_dtype="float64", **options))
    assert_gradients(layer, normal(2, 5, WIDTH), **masks)


def test_an_array_that_is_passed_twice(implementation):
    layer = randomized(MultiHeadAttention(WIDTH, HEADS, weights_dtype="float64"))
    x = normal(2, 5, WIDTH)
    (out, _), pullback = vjp(layer, x)
    (same, _), again = vjp(layer, x, x, x)
    np.testing.assert_array_equal(out, same)
    np.testing.assert_array_equal(pullback(out)[0], again(out)[0])
    assert_gradients(layer, x[0])


LAYERS = {
    "post-norm": {},
    "pre-norm": {"norm_first": True},
    "rms_norm, gated": {"norm": "rms_norm", "activation": "swiglu", "bias": False, "norm_first": True},
    "post-norm, grouped": {"activation": "gelu", "attention": {"num_kv_heads": 2, "qk_norm": True}},
    "head_dim": {"attention": {"head_dim": 5}, "norm_first": True},
}
every_layer = pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"src_mask": normal(5, 5)},
    "padding": {"src_key_padding_mask": np.array([[0, 0, 0, 0, 1], [0, 1, 0, 1, 1]], bool)},
    "padding, causal": {
        "src_key_padding_mask": np.array([[0, 0, 0, 0, 1], [0, 1, 0, 1, 1]], bool),
        "is_causal": True,
    },
}


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@every_layer
def test_encoder_layer(options, call, checkpoint, implementation):
    layer = randomized(TransformerEncoderLayer(WIDTH, HEADS, 40, weights_dtype="float64", **options))
    plain = lambda x: layer(x, **call)  # noqa: E731
    assert_gradients(layer, normal(2, 5, WIDTH), call=plain, checkpoint=checkpoint, **call)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@every_layer
def test_decoder_layer(options, causal, checkpoint, implementation):
    how = {"weights_dtype": "float64", "cross_attention": {"sinks": True}, **options}
    layer = randomized(TransformerDecoderLayer(WIDTH, HEADS, 40, **how))
    masks = {"tgt_is_causal": causal, "memory_mask": normal(5, 4)}
    plain = lambda *inputs: layer(*inputs, **masks)  # noqa: E731
    inputs = normal(2, 5, WIDTH), normal(2, 4, WIDTH, seed=1)
    assert_gradients(layer, *inputs, call=plain, checkpoint=checkpoint, **masks)


def stacks():
    how, smooth = {"weights_dtype": "float64"}, "gelu"  # no step of a difference crosses a kink
    encoder = [TransformerEncoderLayer(WIDTH, HEADS, 40, smooth, norm_first=True, **how) for _ in range(2)]
    decoder = [TransformerDecoderLayer(WIDTH, HEADS, 40, smooth, **how) for _ in range(2)]
    return {
        "encoder": TransformerEncoder(encoder, LayerNorm(WIDTH, **how)),
        "decoder": TransformerDecoder(decoder),
        "both": Transformer(WIDTH, HEADS, 1, 2, 40, smooth, **how),
    }


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("ndim", [2, 3])
@pytest.mark.parametrize("kind", ["encoder", "decoder", "both"])
def test_stacks(kind, ndim, checkpoint, implementation):
    stack = randomized(stacks()[kind])
    inputs = [normal(2, 5, WIDTH), normal(2, 4, WIDTH, seed=1)][: 1 if kind == "encoder" else 2]
    inputs = [x if ndim == 3 else x[0] for x in inputs]
    assert_gradients(stack, *inputs, call=lambda *inputs: stack(*inputs), checkpoint=checkpoint)


def single(layer_kind=TransformerEncoderLayer, **options):
    layer = randomized(layer_kind(64, 4, 128, "gelu", **options))
    rng = np.random.default_rng(0)
    return layer, rng.standard_normal((6, 40, 64), np.float32), rng.standard_normal((6, 40, 64), np.float32)


def gradients_of(layer, x, dout, **options):
    out, pullback = vjp(layer, x, **options)
    dx, grads = pullback(dout)
    return {"out": out, "dx": dx, **grads}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, gradient in one.items():
        np.testing.assert_array_equal(gradient, other[name], err_msg=name)


@pytest.mark.parametrize("call", ["plain", "causal"])
@pytest.mark.parametrize("options", [{}, {"attention": {"window": (9, 9), "qk_norm": True}}], ids=str)
def test_bits_depend_on_neither_checkpoints_nor_threads(options, call, implementation):
    layer, x, dout = single(**options)
    expected = gradients_of(layer, x, dout, **CALLS[call])
    assert_same(gradients_of(layer, x, dout, checkpoint=True, **CALLS[call]), expected)
    for threads in (1, 2, 5):
        with forced(implementation, num_threads=threads):
            assert_same(gradients_of(layer, x, dout, **CALLS[call]), expected)


@pytest.mark.skipif(not COMPILED, reason="NumPy's products round by their shapes")
def test_a_sequence_has_the_bits_it_has_alone(implementation):
    if implementation == "numpy":
        pytest.skip("its products round by their shapes")
    layer, x, dout = single()
    lengths = np.array([40, 1, 17, 0, 39, 5])
    padding = np.arange(40) >= lengths[:, None]
    dx = gradients_of(layer, x, dout, src_key_padding_mask=padding)["dx"]
    for b, n in enumerate(lengths):
        if n:
            alone = gradients_of(layer, x[b : b + 1, :n], dout[b : b + 1, :n])["dx"]
            np.testing.assert_array_equal(dx[b, :n], alone[0])
        assert not dx[b, n:].any()


PADDING = np.arange(5) >= np.array([[3], [0], [5], [1]])  # one sequence is hidden, one is not
PADDING[2, 1:3] = True
PADDED = {
    "a program": (64, {}),
    "narrow": (8, {}),
    "qk_norm": (64, {"attention": {"qk_norm": True}, "norm_first": True}),
    "sinks": (64, {"attention": {"sinks": True}}),
    "window": (64, {"attention": {"window": (1, 1)}, "norm": "rms_norm"}),
    "rope": (64, {"attention": {"rope": Rope(rope_frequencies(16))}, "norm_first": True}),
    "extra keys": (64, {"attention": {"add_bias_kv": True}}),
}


@pytest.mark.parametrize("kind", ["layer", "stack", "stack with a norm"])
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize(("width", "options"), PADDED.values(), ids=PADDED)
def test_what_padding_hides_shows_nowhere(width, options, checkpoint, kind, implementation):
    layers = [TransformerEncoderLayer(width, 4, 24, **options) for _ in range(2)]
    stack = TransformerEncoder(layers, LayerNorm(width) if kind == "stack with a norm" else None)
    layer = randomized(layers[0] if kind == "layer" else stack)
    x, dout = (normal(4, 5, width, seed=i).astype(np.float32) for i in (0, 1))
    how = {"src_key_padding_mask": PADDING, "checkpoint": checkpoint}
    expected = gradients_of(layer, x, dout, **how)
    assert all(np.isfinite(a).all() for a in expected.values())
    assert not expected["out"][PADDING].any()
    assert not expected["dx"][PADDING].any()
    for value in (np.nan, np.inf):
        x[PADDING] = dout[PADDING] = value
        given = x.copy(), dout.copy()
        assert_same(gradients_of(layer, x, dout, **how), expected)
        for mask in (PADDING, PADDING.tolist()):
            np.testing.assert_array_equal(layer(x, src_key_padding_mask=mask), expected["out"])
        np.testing.assert_array_equal((x, dout), given)
    alone = layer(x[0], src_key_padding_mask=PADDING[0])
    assert np.isfinite(alone).all()
    assert not alone[PADDING[0]].any()
    nothing = gradients_of(layer, x, dout, src_key_padding_mask=np.ones_like(PADDING))
    assert not any(a.any() for a in nothing.values())


@pytest.mark.parametrize("checkpoint", [False, True])
def test_what_padding_hides_from_a_transformer_shows_nowhere(checkpoint, implementation):
    model = randomized(Transformer(8, 2, 2, 1, 24))
    src, tgt = (normal(4, 5, 8, seed=i).astype(np.float32) for i in (0, 1))
    how = {"src_key_padding_mask": PADDING, "memory_key_padding_mask": PADDING, "checkpoint": checkpoint}
    found = []
    for value in (0, np.nan):
        src[PADDING] = value
        out, pullback = vjp(model, src, tgt, **how)
        dsrc, dtgt, grads = pullback(out)
        assert not dsrc[PADDING].any()
        found.append({"out": out, "dsrc": dsrc, "dtgt": dtgt, **grads})
    assert_same(*found)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_inputs(dtype, implementation):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    layer, x, dout = single()
    x, dout = x.astype(kind), dout.astype(kind)
    got = gradients_of(layer, x, dout)
    expected = gradients_of(layer, x.astype(np.float32), dout.astype(np.float32))
    assert got["dx"].dtype == kind
    bound = 8 * (2.0**-11 if dtype == "float16" else 2.0**-8)
    for name, gradient in expected.items():
        error = np.abs(got[name].astype(np.float64) - gradient).max()
        assert error <= bound * np.abs(gradient).max(), name
        if name not in ("out", "dx"):
            assert got[name].dtype == np.float32


@pytest.mark.parametrize("activations", [None, "int8"])
@pytest.mark.parametrize("weights", ["int8", "q8", "int4", "uint4", "nf4"])
def test_frozen_weights(weights, activations, implementation):
    layer, x, dout = single(weights_dtype=weights, activations=activations)
    got = gradients_of(layer, x, dout)
    plain, _, _ = single()
    plain.load_state_dict(layer.state_dict())
    expected = gradients_of(plain, x, dout)
    assert set(got) == {"out", "dx", *(n for n in expected if n.endswith("bias") or n.startswith("norm"))}
    bound = 1e-5 if activations is None else 0.1
    np.testing.assert_allclose(got["dx"], expected["dx"], atol=bound * np.abs(expected["dx"]).max())


def test_bfloat16_weights_are_trained(implementation):
    layer, x, dout = single(weights_dtype="bfloat16")
    got, state = gradients_of(layer, x, dout), layer.state_dict()
    assert [n for n in got if n not in ("out", "dx")] == list(state)
    plain, _, _ = single()
    plain.load_state_dict(state)
    for name, gradient in gradients_of(plain, x, dout).items():
        np.testing.assert_allclose(got[name], gradient, atol=0.05 * np.abs(gradient).max(), err_msg=name)


@pytest.mark.parametrize("shape", [(0, 5, 64), (3, 0, 64), (1, 1, 64)])
def test_few_rows(shape, implementation):
    layer, _, _ = single()
    for call in ({}, {"is_causal": True}):
        got = gradients_of(layer, np.ones(shape, np.float32), np.ones(shape, np.float32), **call)
        assert got["dx"].shape == shape
        assert all(np.isfinite(gradient).all() for gradient in got.values())
        if not np.prod(shape):
            assert not any(gradient.any() for gradient in got.values())


def test_a_layer_that_is_there_twice(implementation):
    layer = randomized(TransformerEncoderLayer(WIDTH, HEADS, 40, weights_dtype="float64"))
    stack = TransformerEncoder([layer, layer])
    x, dout = normal(2, 5, WIDTH), normal(2, 5, WIDTH, seed=1)
    got = gradients_of(stack, x, dout)
    one = TransformerEncoder(
        [layer, randomized(TransformerEncoderLayer(WIDTH, HEADS, 40, weights_dtype="float64"))]
    )
    one.layers[1].load_state_dict(layer.state_dict())
    apart = gradients_of(one, x, dout)
    for name in layer.state_dict():
        both = apart[f"layers.0.{name}"] + apart[f"layers.1.{name}"]
        np.testing.assert_allclose(got[f"layers.0.{name}"], both, atol=1e-12 * max(1, np.abs(both).max()))


DROPOUT = {"dropout": 0.3, "seed": 7}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@every_layer
def test_dropout_of_an_encoder_layer(options, call, implementation):
    layer = randomized(TransformerEncoderLayer(WIDTH, HEADS, 40, weights_dtype="float64", **options))
    dropped = lambda x: vjp(layer, x, **DROPOUT, **call)[0]  # noqa: E731
    x = normal(2, 5, WIDTH)
    assert_gradients(layer, x, call=dropped, **DROPOUT, **call)
    once, again = dropped(x), vjp(layer, x, dropout=0.3, seed=8, **call)[0]
    assert not np.array_equal(once, layer(x, **call))
    assert not np.array_equal(once, again)
    np.testing.assert_array_equal(vjp(layer, x, dropout=0.0, **call)[0], layer(x, **call))


@pytest.mark.parametrize("kind", ["encoder", "decoder", "both"])
def test_dropout_of_stacks(kind, implementation):
    stack = randomized(stacks()[kind])
    inputs = [normal(2, 5, WIDTH), normal(2, 4, WIDTH, seed=1)][: 1 if kind == "encoder" else 2]
    dropped = lambda *inputs: vjp(stack, *inputs, **DROPOUT)[0]  # noqa: E731
    assert_gradients(stack, *inputs, call=dropped, **DROPOUT)
    out, pullback = vjp(stack, *inputs, **DROPOUT)
    same, again = vjp(stack, *inputs, checkpoint=True, **DROPOUT)
    np.testing.assert_array_equal(out, same)
    (*found, grads), (*others, gradients) = pullback(out), again(out)
    for one, other in zip(found, others, strict=True):
        np.testing.assert_array_equal(one, other)
    assert_same(grads, gradients)


def test_what_is_dropped(implementation):
    """A feed-forward adds ones here: that share of them becomes 0, and the rest is larger."""
    layer = TransformerEncoderLayer(64, 4, 128, norm_first=True, rng=0)
    state = {name: np.zeros_like(x) for name, x in layer.state_dict().items()}
    state["linear2.bias"][:] = 1
    layer.load_state_dict(state)
    x = np.zeros((16, 40, 64), np.float32)
    out = vjp(layer, x, dropout=0.25, seed=3)[0]
    assert set(np.unique(out)) == {0, np.float32(1 / 0.75)}
    assert abs(np.mean(out == 0) - 0.25) < 0.01
    two = vjp(TransformerEncoder([layer, layer]), x, dropout=0.25, seed=3)[0] - out
    assert 0.05 < np.mean((two == 0) & (out == 0)) < 0.075  # each layer drops others


REFUSED = r"""
back(dout[0]) -> ValueError: dout has shape
back(dout.astype(float)) -> TypeError: dout
back(None) -> TypeError: dout is None
vjp(layer, x, checkpoint=1) -> TypeError: checkpoint
vjp(layer, x, dropout=1.0, seed=0) -> ValueError: dropout is 1
vjp(layer, x, dropout=0.1) -> ValueError: seed is None
vjp(layer, x[..., :3]) -> ValueError: src has shape
vjp(TransformerEncoderLayer(64, 4), x) -> ParametersMissing: has no parameters yet
vjp(heads, x, cache=KVCache()) -> ValueError: cache is given
vjp(heads, x, average_attn_weights=True) -> ValueError: average_attn_weights is given; expected none
vjp(layer, x, cache=x) -> ValueError: ^TransformerEncoderLayer\(\): cache is given; expected none
vjp(layer, x, lengths=x) -> ValueError: ^TransformerEncoderLayer\(\): lengths is given; expected none
vjp(heads, x, keys_values=x) -> ValueError: ^MultiHeadAttention\(\): keys_values is given; expected none
vjp(heads, x, residual=x) -> ValueError: ^MultiHeadAttention\(\): residual is given; expected None
vjp(heads, x, causal=True) -> TypeError: causal
vjp(heads, x, is_causal=1) -> TypeError: is_causal
vjp(decoder, x, x, lengths=np.ones(6, int)) -> ValueError: lengths is given
vjp(decoder, x, x[:2]) -> ValueError: tgt's batch
"""


@refused(REFUSED)
def test_errors(code, error):
    layer, x, dout = single()
    decoder, back = randomized(TransformerDecoderLayer(64, 4, 128)), vjp(layer, x)[1]
    assert_refused(
        code, error, layer=layer, heads=layer.self_attn, decoder=decoder, back=back, x=x, dout=dout
    )
