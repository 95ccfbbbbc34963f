"""Layers: what they compute beyond torch's (tests/parity has that), and how they behave as values."""

import math
import weakref

import numpy as np
import pre_norm_encoder
import pytest
from implementations import each_isa, forced
from layer_oracle import (
    BATCH,
    FEATURES,
    HEADS,
    LENGTH,
    MASK,
    WIDTH,
    X,
    attention_layer,
    dense,
    draw,
    every_feature,
    randomized,
)
from refused import assert_refused, refused

from fastattn.grad import vjp
from fastattn.layers import (
    KVCache,
    LayerNorm,
    Linear,
    Rope,
    Transformer,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from fastattn.positions import rope_frequencies


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-6), ("float64", 1e-14)])
@pytest.mark.parametrize("causal", [False, True])
@every_feature
def test_attention_is_its_definition(options, causal, dtype, bound, implementation):
    layer = attention_layer(options, dtype)
    x = draw(BATCH, LENGTH, WIDTH, dtype=dtype)
    out, weights = layer(x, is_causal=causal, need_weights=True, average_attn_weights=False)
    expected, probs = dense(layer, x, x, causal=causal)
    assert out.dtype == weights.dtype == dtype
    np.testing.assert_allclose(out, expected, rtol=0, atol=bound * abs(expected).max())
    np.testing.assert_allclose(weights, probs, rtol=0, atol=bound)
    mean = layer(x, is_causal=causal, need_weights=True)[1]
    np.testing.assert_allclose(mean, probs.mean(axis=1), rtol=0, atol=bound)


def test_attention_is_always_a_pair():
    """Also of a batch of two, whose result could be taken apart instead."""
    layer, x = attention_layer({}), X[:2]
    out, nothing = layer(x, x, x)
    assert nothing is None
    np.testing.assert_array_equal(out, layer(x, need_weights=True)[0])
    for given in ({"cache": KVCache()}, {"residual": x}, {"keys_values": layer.project_keys_values(x)}):
        assert layer(x, **given)[1] is None
    (same, nothing), pullback = vjp(layer, x)
    assert nothing is None
    np.testing.assert_array_equal(same, out)
    assert pullback(out)[0].shape == x.shape


@every_feature
def test_attention_over_a_memory(options, implementation):
    layer = attention_layer(options)
    x, memory = draw(BATCH, 5, WIDTH), draw(BATCH, LENGTH, WIDTH, seed=1)
    hidden = np.random.default_rng(2).random((BATCH, HEADS, 5, LENGTH)) < 0.3
    hidden[..., 0] = False
    expected, _ = dense(layer, x, memory, hidden=hidden)
    out, _ = layer(x, memory, attn_mask=hidden)
    bound = 2e-6 * abs(expected).max()
    np.testing.assert_allclose(out, expected, rtol=0, atol=bound)
    np.testing.assert_array_equal(layer(x, memory, memory, attn_mask=hidden.reshape(-1, 5, LENGTH))[0], out)
    kept = layer.project_keys_values(memory)
    np.testing.assert_allclose(layer(x, keys_values=kept, attn_mask=hidden)[0], expected, rtol=0, atol=bound)


def test_pieces_of_a_layer_are_the_layer(implementation):
    """A layer is what its public parts give when they are put together by hand."""
    x = draw(BATCH, LENGTH, WIDTH)
    options = {"num_kv_heads": 2, "sinks": True}
    for norm_first in (False, True):
        layer = TransformerEncoderLayer(WIDTH, HEADS, 96, "geglu", norm_first=norm_first, attention=options)
        randomized(layer)
        if norm_first:
            y, _ = layer.self_attn(layer.norm1(x), residual=x)
            expected = y + layer.feed_forward(layer.norm2(y))
        else:
            y = layer.norm1(layer.self_attn(x)[0], residual=x)
            expected = layer.norm2(layer.feed_forward(y, residual=y))
        np.testing.assert_allclose(layer(x), expected, rtol=0, atol=1e-5)
        np.testing.assert_allclose(layer(x[1]), expected[1], rtol=0, atol=1e-5)  # (L, d) is a sequence, too


@each_isa
def test_padding_is_not_computed(isa):
    """Each sequence has the bits that it has alone, wherever its padding is; rows of padding are 0."""
    rng = np.random.default_rng(0)
    layers = [TransformerEncoderLayer(WIDTH, HEADS, 96, norm_first=bool(i), rng=rng) for i in range(2)]
    encoder, x = TransformerEncoder(layers), draw(4, 30, WIDTH)
    padding = np.arange(30) >= np.array([30, 7, 0, 12])[:, None]
    padding[3] = padding[3, ::-1]  # in front
    padding[0, 4:9] = True  # in the middle
    x[padding] = np.nan
    with forced(isa):
        y = encoder(x, src_key_padding_mask=padding)
        assert (y[padding] == 0).all()
        for i in range(4):
            if not padding[i].all():
                np.testing.assert_array_equal(y[i, ~padding[i]], encoder(x[i, ~padding[i]]))
        np.testing.assert_array_equal(encoder(x, src_key_padding_mask=padding.view(np.matrix)), y)
        alone = encoder(x[1], src_key_padding_mask=padding[1])
        np.testing.assert_array_equal(alone, y[1])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_plain_layer_is_the_layer(dtype, norm_first, norm, causal, implementation):
    """Without dense masks all kernels run in one call, with the result of such a mask."""
    x = draw(BATCH, LENGTH, WIDTH).astype(dtype)
    rope = {"rope": Rope(rope_frequencies(WIDTH // HEADS))}
    every = [{}, {"num_kv_heads": 2}, {"head_dim": 24}, rope, {"qk_norm": True}, {**rope, "qk_norm": True}]
    every += [{"window": (3, 1)}, {"window": (None, 2)}, {"softcap": 2.0, "scale": 0.4}, {"sinks": True}]
    for heads in every:
        options = {"norm_first": norm_first, "norm": norm, "attention": heads, "weights_dtype": dtype}
        layer = TransformerEncoderLayer(WIDTH, HEADS, 96, "geglu", rng=np.random.default_rng(0), **options)
        masked = layer(x, src_mask=np.triu(np.full((LENGTH, LENGTH), causal), 1))
        out = layer(x, is_causal=causal)
        np.testing.assert_allclose(out, masked, rtol=0, atol=1e-5 if dtype == "float32" else 1e-13)
        plain = heads != {"head_dim": 24} or layer.self_attn.is_plain()
        assert (layer._programs[True][1] is not None) == plain
        np.testing.assert_array_equal(layer(x[:, ::-1])[:, ::-1], layer(x[:, ::-1].copy())[:, ::-1])


@pytest.mark.parametrize("make", [lambda x: x, lambda x: TransformerEncoder([x])], ids=["layer", "stack"])
def test_a_layer_that_was_called_is_freed_at_once(make):
    layer = make(TransformerEncoderLayer(WIDTH, HEADS, 96, rng=0))
    layer(X)
    freed = weakref.ref(layer)
    del layer
    assert freed() is None


def test_a_plain_layer_notices_new_parameters():
    x = draw(BATCH, LENGTH, WIDTH)
    one, other = (TransformerEncoderLayer(WIDTH, HEADS, 96, rng=np.random.default_rng(i)) for i in (0, 1))
    expected = other(x)
    assert not np.allclose(one(x), expected)
    one.load_state_dict(other.state_dict())
    np.testing.assert_array_equal(one(x), expected)
    one.norm2 = LayerNorm(WIDTH, rng=np.random.default_rng(0))
    one.norm2.load_state_dict({"weight": np.zeros(WIDTH, "f"), "bias": np.ones(WIDTH, "f")})
    np.testing.assert_array_equal(one(x), np.ones_like(x))


def test_results_outlive_the_next_call(implementation):
    """Layers keep memory from call to call, but never that of a result, a cache or projected keys."""
    layer = randomized(TransformerEncoderLayer(WIDTH, HEADS, 256, attention={"output_gate": True}))
    x, other = draw(8, 200, WIDTH), draw(8, 200, WIDTH, seed=1)
    cache = KVCache()
    kept = (
        layer(x),
        *layer.self_attn(x[:1], need_weights=True),
        *layer.self_attn.project_keys_values(x),
        layer.feed_forward(x),
        layer.self_attn(x, cache=cache)[0],
    )
    before = [array.copy() for array in kept]
    layer(other)
    layer.self_attn(other, other.copy())
    layer.feed_forward(other)
    for array, expected in zip(kept, before, strict=True):
        np.testing.assert_array_equal(array, expected)


def test_the_example_of_another_arrangement(implementation):
    """The example pre_norm_encoder.py equals its formula in float64, and padding changes nothing."""
    layers, feed_forward = pre_norm_encoder.build(2, WIDTH, HEADS, 96, np.random.default_rng(0))
    x = draw(BATCH, LENGTH, WIDTH)
    padding = np.arange(LENGTH) >= np.array([LENGTH, 6, 1])[:, None]
    out = pre_norm_encoder.encode(x, layers, feed_forward, padding)
    changed = np.where(padding[..., None], np.float32(9), x)
    again = pre_norm_encoder.encode(changed, layers, feed_forward, padding)
    np.testing.assert_allclose(again[~padding], out[~padding], rtol=0, atol=1e-5)
    y = x.astype(np.float64)
    for _, attention, _ in layers:
        normed = normalized(y)
        y = normalized(y + dense(attention, normed, normed, hidden=padding[:, None, None, :])[0])
    state = feed_forward.state_dict()
    hidden = y @ state["linear1.weight"].T + state["linear1.bias"]
    hidden = hidden * (1 + np.vectorize(math.erf)(hidden / 2**0.5)) / 2
    y = y + hidden @ state["linear2.weight"].T + state["linear2.bias"]
    np.testing.assert_allclose(out, y, rtol=0, atol=1e-5)


def normalized(x):
    return (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)


def test_inputs_are_not_written(implementation):
    model = randomized(Transformer(WIDTH, HEADS, 1, 1, 96, attention=FEATURES["all"] | {"head_dim": 24}))
    src, tgt = draw(BATCH, 8, WIDTH), draw(BATCH, 5, WIDTH)
    src.flags.writeable = tgt.flags.writeable = False
    before = src.copy(), tgt.copy()
    model(src, tgt, tgt_is_causal=True)
    np.testing.assert_array_equal(src, before[0])
    np.testing.assert_array_equal(tgt, before[1])


@pytest.mark.parametrize("shape", [(0, 5, WIDTH), (2, 0, WIDTH), (2, 1, WIDTH), (1, WIDTH)])
def test_sizes_0_and_1(shape, implementation):
    layer = randomized(TransformerEncoderLayer(WIDTH, HEADS, 96, norm_first=True))
    x = draw(*shape)
    assert layer(x).shape == shape
    assert layer(x, is_causal=True, cache=KVCache()).shape == shape
    decoder = randomized(TransformerDecoderLayer(WIDTH, HEADS, 96))
    assert decoder(x, x, tgt_is_causal=True).shape == shape


def test_any_strides_and_byte_order(implementation):
    layer = randomized(TransformerEncoderLayer(WIDTH, HEADS, 96))
    x = draw(BATCH, LENGTH, WIDTH)
    expected = layer(x)
    wide = np.zeros((LENGTH, BATCH, 2 * WIDTH), np.float32)
    wide[..., ::2] = x.swapaxes(0, 1)
    for same in (wide[..., ::2].swapaxes(0, 1), np.asfortranarray(x), x.astype(">f4"), x.tolist()):
        array = np.asarray(same, np.float32) if isinstance(same, list) else same
        np.testing.assert_array_equal(layer(array), expected)


ERRORS = r"""
m(X[..., :-1]) -> ValueError: query has shape \(3, 11, 63\); expected \(..., 64\)
m(X[None]) -> ValueError: query has shape
m(X.astype(np.int32)) -> TypeError: query has dtype int32
m(X.astype(np.float64)) -> TypeError: query has dtype float64; expected float32
m(X, X[:2]) -> ValueError: key has shape \(2, 11, 64\); expected \(3, length, 64\)
m(X, X[..., :5]) -> ValueError: key has shape
m(X, X, X[:, :5]) -> ValueError: value has .*length
m(X, attn_mask=MASK[:5]) -> ValueError: attn_mask has shape \(5, 11\); expected
m(X, attn_mask=MASK.astype(int)) -> TypeError: attn_mask has dtype int64; expected bool
m(X, attn_mask=MASK[None]) -> ValueError: attn_mask has shape
m(X, key_padding_mask=MASK) -> ValueError: key_padding_mask has shape
m(X, is_causal=MASK) -> TypeError: is_causal is an array
m(X, residual=X[:1]) -> ValueError: residual has shape
m(X, lengths=[1, 1, 1]) -> ValueError: lengths is given without cache
m(X, X.copy(), keys_values=(X, X)) -> ValueError: keys_values is given with key
MultiHeadAttention(65, 4) -> ValueError: embed_dim is 65; expected a multiple of num_heads, 4
MultiHeadAttention(64, 4, num_kv_heads=3) -> ValueError: num_heads is 4; expected a multiple
MultiHeadAttention(64, 0) -> ValueError: num_heads is 0
MultiHeadAttention(64, 4, weights_dtype='int3') -> ValueError: weights_dtype is 'int3'
MultiHeadAttention(64, 4, rng='3') -> TypeError: rng is '3'; expected a numpy.random
FeedForward(64, 100, 'tanh') -> ValueError: activation is 'tanh'; expected one of relu
TransformerEncoderLayer(64, 4, norm='batch') -> ValueError: norm is 'batch'
TransformerEncoder([]) -> ValueError: layers is empty
m.load_state_dict({}, weights_dtype='int3') -> ValueError: weights_dtype is 'int3'
m.load_state_dict([1]) -> TypeError: state_dict is of type list
m.no_such_thing -> AttributeError: no_such_thing
"""


@refused(ERRORS)
def test_errors(code, error):
    assert_refused(code, error, m=attention_layer({}), X=X, MASK=MASK)


@pytest.mark.parametrize(
    "options", [{}, {"norm_first": True}, {"attention": {"num_kv_heads": 2, "window": (3, 1)}}]
)
@each_isa
def test_a_padded_sequence_has_the_bits_that_it_has_alone(isa, options):
    rng = np.random.default_rng(0)
    layer = TransformerEncoderLayer(48, 4, 64, rng=rng, **options)
    with forced(isa):
        for length, own in [(4, 1), (8, 3), (9, 8), (20, 5), (40, 7), (40, 31)]:
            x = rng.standard_normal((2, length, 48)).astype(np.float32)
            hidden = np.arange(length) >= np.array([[own], [length]])
            for is_causal in (False, True):
                together = layer(x, src_key_padding_mask=hidden, is_causal=is_causal)
                alone = layer(x[:1, :own], is_causal=is_causal)
                np.testing.assert_array_equal(together[:1, :own], alone)


@pytest.mark.parametrize("side", ["left", "right", "middle"])
@pytest.mark.parametrize("heads", ["rope", "qk_norm", "both"])
def test_padding_of_layers_that_place_their_heads(heads, side, implementation):
    """The bits are those of a mask that hides the same keys: its rows keep their places."""
    options = {"rope": {"rope": Rope(rope_frequencies(32))}, "qk_norm": {"qk_norm": True}}
    attention = {**options.get(heads, options["rope"]), **options.get(heads, options["qk_norm"])}
    layer = randomized(TransformerEncoderLayer(128, 4, 64, attention=attention))
    length, x = 70, draw(2, 70, 128)
    hidden = np.zeros((2, length), bool)
    hidden[0, {"left": slice(0, 20), "right": slice(50, None), "middle": slice(20, 40)}[side]] = True
    out = layer(x, src_key_padding_mask=hidden)
    mask = np.broadcast_to(hidden[:, None, None], (2, 1, length, length))
    expected = layer(x, src_mask=mask)
    np.testing.assert_allclose(out[~hidden], expected[~hidden], atol=1e-5)
    if implementation != "numpy":  # where BLAS rounds a row by how many there are
        np.testing.assert_array_equal(out[~hidden], expected[~hidden])
    assert (out[hidden] == 0).all()


def test_an_out_proj_of_its_own_kind_rounds_its_own_input(implementation):
    layer = attention_layer({})
    layer.out_proj.load_state_dict({"weight": np.eye(WIDTH), "bias": np.zeros(WIDTH)})
    heads, _ = layer(X)
    layer.out_proj = randomized(Linear(WIDTH, WIDTH, weights_dtype="int8", activations="int8"))
    np.testing.assert_array_equal(layer(X)[0], layer.out_proj(heads))
