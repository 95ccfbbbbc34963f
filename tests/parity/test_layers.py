"""Layers and their gradients against torch's modules, on random weights that go over in the state dict."""

import numpy as np
import pytest
import torch
from torch import nn
from torch_layers import (
    BATCH,
    HEADS,
    LEN_K,
    LEN_Q,
    QUIET,
    WIDTH,
    draw,
    every_dtype,
    load,
    masks_of,
    randomized,
    t,
)

from fastattn import layers
from fastattn.grad import vjp

TOLERANCES = {"float32": 2e-5, "float64": 1e-12}

pytestmark = QUIET


@pytest.fixture(autouse=True)
def _no_fastpath(quiet_torch):
    torch.backends.mha.set_fastpath_enabled(False)  # it computes nothing for padding, and NaN for float masks
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def same(ours, theirs, dtype, name="result", share=1.0):
    """To a share of the tolerance."""
    theirs = theirs.detach().numpy()
    assert ours.shape == theirs.shape, name
    assert ours.dtype == theirs.dtype, name
    assert np.isfinite(theirs).all(), name
    tolerance = share * TOLERANCES[dtype] * max(1, abs(theirs).max(initial=0))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance, err_msg=name)


def assert_same(layer, module, dtype, inputs, theirs, ours=None, counted=True, call=None, **record):
    """Results of a call and of one that is recorded, and all gradients; `counted` rows have a meaning."""
    tensors = [t(x).requires_grad_() for x in inputs]
    given = {name: t(x) if isinstance(x, np.ndarray) else x for name, x in theirs.items() if x is not None}
    ours = {name: x for name, x in (theirs if ours is None else ours).items() if x is not None}
    expected = (call or module)(*tensors, **given)
    expected = expected[0] if isinstance(expected, tuple) else expected
    expected = torch.where(torch.as_tensor(counted), expected, 0)
    dout = draw(np.random.default_rng(3), *expected.shape, dtype=dtype)
    expected.backward(t(dout))
    before = [x.copy() for x in inputs]
    (recorded, pullback), out = vjp(layer, *inputs, **ours, **record), layer(*inputs, **ours)
    for x, share in ((recorded, 0.5), (out, 1.0)):
        same(
            np.where(counted, x[0] if isinstance(x, tuple) else x, 0),
            expected,
            dtype,
            share=share,
        )
    *found, grads = pullback(np.where(counted, dout, 0).astype(dtype))
    np.testing.assert_equal(inputs, before)
    for i, (gradient, tensor) in enumerate(zip(found, tensors, strict=True)):
        same(gradient, tensor.grad, dtype, f"input {i}", 0.5)
    for name, parameter in module.named_parameters():
        same(grads[name], parameter.grad, dtype, name, 0.5)


MASKS = [
    "none", "bool", "bool of heads", "float", "float of heads", "padding", "left padding", "float padding",
    "bool, padding", "float, padding", "float of heads, float padding",
]  # fmt: skip

MODULES = {
    "plain": {},
    "no bias": {"bias": False},
    "kdim, vdim": {"kdim": 20, "vdim": 33},
    "kdim": {"kdim": 20},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "all": {"kdim": 20, "vdim": 33, "add_bias_kv": True, "add_zero_attn": True},
}


def attention_pair(options, dtype, width=WIDTH, heads=HEADS):
    module = randomized(nn.MultiheadAttention(width, heads, batch_first=True, **options), dtype)
    return load(layers.MultiHeadAttention(width, heads, weights_dtype=dtype, **options), module), module


@every_dtype
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", MODULES)
def test_cross_attention(options, mask, dtype, implementation):
    ours, theirs = attention_pair(MODULES[options], dtype)
    rng = np.random.default_rng(0)
    query = draw(rng, BATCH, LEN_Q, WIDTH, dtype=dtype)
    key = draw(rng, BATCH, LEN_K, ours.kdim or WIDTH, dtype=dtype)
    value = draw(rng, BATCH, LEN_K, ours.vdim or WIDTH, dtype=dtype)
    attn_mask, padding = masks_of(mask, rng, LEN_Q, LEN_K, dtype)
    masks = {"attn_mask": attn_mask, "key_padding_mask": padding}
    assert_same(ours, theirs, dtype, [query, key, value], {**masks, "need_weights": False}, masks)
    for average in (True, False):
        out, weights = ours(query, key, value, need_weights=True, average_attn_weights=average, **masks)
        tensors = {name: t(x) for name, x in masks.items()}
        expected = theirs(t(query), t(key), t(value), **tensors, average_attn_weights=average)
        same(out, expected[0], dtype)
        same(weights, expected[1], dtype)
    residual = draw(rng, *out.shape, dtype=dtype)
    added, _ = ours(query, key, value, residual=residual, **masks)
    np.testing.assert_allclose(added, out + residual, atol=1e-5)


@every_dtype
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", ["plain", "no bias", "bias_kv", "zero_attn"])
def test_self_attention(options, mask, dtype, implementation):
    ours, theirs = attention_pair(MODULES[options], dtype)
    rng = np.random.default_rng(1)
    x = draw(rng, BATCH, LEN_Q, WIDTH, dtype=dtype)
    attn_mask, padding = masks_of(mask, rng, LEN_Q, LEN_Q, dtype)
    masks = {"attn_mask": attn_mask, "key_padding_mask": padding}
    assert_same(ours, theirs, dtype, [x], masks, call=lambda x, **given: theirs(x, x, x, **given))


@every_dtype
@pytest.mark.parametrize("options", ["plain", "bias_kv", "zero_attn"])
@pytest.mark.parametrize("lengths", [(LEN_Q, LEN_Q), (LEN_Q, LEN_K), (LEN_K, LEN_Q)])
def test_is_causal(lengths, options, dtype, implementation):
    """Causal counts from the first key, as in torch, with and without the mask itself."""
    ours, theirs = attention_pair(MODULES[options], dtype)
    rng = np.random.default_rng(2)
    query, key = (draw(rng, BATCH, n, WIDTH, dtype=dtype) for n in lengths)
    hidden = np.triu(np.ones(lengths, np.bool_), 1)
    expected, expected_weights = theirs(t(query), t(key), t(key), attn_mask=t(hidden))
    for attn_mask in (None, hidden):
        out, weights = ours(query, key, attn_mask=attn_mask, is_causal=True, need_weights=True)
        same(out, expected, dtype)
        same(weights, expected_weights, dtype)


def test_rows_without_any_key_are_out_projs_bias(implementation):
    """Rows are 0 where torch has NaN. All others are equal."""
    ours, theirs = attention_pair({}, "float32")
    x = draw(np.random.default_rng(5), BATCH, LEN_Q, WIDTH)
    hidden = np.zeros((LEN_Q, LEN_Q), np.bool_)
    hidden[2] = True
    out, _ = ours(x, attn_mask=hidden)
    expected = theirs(t(x), t(x).clone(), t(x).clone(), attn_mask=t(hidden))[0]
    rest = np.arange(LEN_Q) != 2
    same(out[:, rest], expected[:, rest], "float32")
    bias = ours.state_dict()["out_proj.bias"]
    np.testing.assert_array_equal(out[:, 2], np.broadcast_to(bias, (BATCH, WIDTH)))


@every_dtype
@pytest.mark.parametrize("bias", [True, False])
def test_linear_and_norms(bias, dtype, implementation):
    x = draw(np.random.default_rng(6), 2, 5, 33, dtype=dtype)
    module = randomized(nn.Linear(33, 21, bias=bias), dtype)
    same(load(layers.Linear(33, 21, bias, weights_dtype=dtype), module)(x), module(t(x)), dtype)
    module = randomized(nn.LayerNorm(33, 1e-3, bias=bias), dtype)
    same(load(layers.LayerNorm(33, 1e-3, bias, weights_dtype=dtype), module)(x), module(t(x)), dtype)
    module = randomized(nn.RMSNorm(33, 1e-3), dtype)
    same(load(layers.RMSNorm(33, 1e-3, weights_dtype=dtype), module)(x), module(t(x)), dtype)


FUNCTIONS = {
    "relu": nn.functional.relu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "silu": nn.functional.silu,
    "sigmoid": torch.sigmoid,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
GATED = {"glu": "sigmoid", "reglu": "relu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}


@every_dtype
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [*FUNCTIONS, *GATED])
def test_feed_forward(activation, bias, dtype, implementation):
    names = ("linear1", "linear2", "linear_gate") if activation in GATED else ("linear1", "linear2")
    parts = {name: nn.Linear(*((50, 24) if name == "linear2" else (24, 50)), bias=bias) for name in names}
    module = randomized(nn.ModuleDict(parts), dtype)
    ours = load(layers.FeedForward(24, 50, activation, bias, weights_dtype=dtype), module)
    x = draw(np.random.default_rng(7), 2, 5, 24, dtype=dtype)
    hidden = module["linear1"](t(x))
    if activation in GATED:
        hidden = FUNCTIONS[GATED[activation]](module["linear_gate"](t(x))) * hidden
    else:
        hidden = FUNCTIONS[activation](hidden)
    same(ours(x), module["linear2"](hidden), dtype)


LAYER_OPTIONS = {
    "post-norm": {},
    "pre-norm": {"norm_first": True},
    "gelu, no bias": {"activation": "gelu", "bias": False, "layer_norm_eps": 1e-3},
    "pre-norm, gelu": {"activation": "gelu", "norm_first": True},
}
every_layer = pytest.mark.parametrize("options", LAYER_OPTIONS.values(), ids=LAYER_OPTIONS)
some_masks = pytest.mark.parametrize("mask", ["none", "bool", "float of heads", "padding", "bool, padding"])


def layer_pair(kind, options, dtype):
    module = getattr(nn, f"Transformer{kind}Layer")(WIDTH, HEADS, 100, batch_first=True, **options)
    module = randomized(module, dtype)
    layer = getattr(layers, f"Transformer{kind}Layer")(WIDTH, HEADS, 100, weights_dtype=dtype, **options)
    return load(layer, module), module


@every_dtype
@some_masks
@every_layer
def test_encoder_layer(options, mask, dtype, implementation):
    ours, theirs = layer_pair("Encoder", options, dtype)
    rng = np.random.default_rng(8)
    x = draw(rng, BATCH, LEN_Q, WIDTH, dtype=dtype)
    attn_mask, padding = masks_of(mask, rng, LEN_Q, LEN_Q, dtype)
    counted = True if padding is None else ~padding[..., None]
    masks = {"src_mask": attn_mask, "src_key_padding_mask": padding}
    assert_same(ours, theirs, dtype, [x], masks, counted=counted)
    if mask == "none":
        same(ours(x[0]), theirs(t(x[0])), dtype)
        theirs.zero_grad()
        hidden = np.triu(np.ones((LEN_Q, LEN_Q), bool), 1)
        assert_same(ours, theirs, dtype, [x], {"src_mask": hidden}, {"is_causal": True})


@every_dtype
@pytest.mark.parametrize("memory_mask", ["none", "bool, padding", "float"])
@some_masks
@every_layer
def test_decoder_layer(options, mask, memory_mask, dtype, implementation):
    ours, theirs = layer_pair("Decoder", options, dtype)
    rng = np.random.default_rng(9)
    x, memory = draw(rng, BATCH, LEN_Q, WIDTH, dtype=dtype), draw(rng, BATCH, LEN_K, WIDTH, dtype=dtype)
    own, own_padding = masks_of(mask, rng, LEN_Q, LEN_Q, dtype)
    over, over_padding = masks_of(memory_mask, rng, LEN_Q, LEN_K, dtype)
    masks = {"tgt_mask": own, "tgt_key_padding_mask": own_padding}
    masks |= {"memory_mask": over, "memory_key_padding_mask": over_padding}
    assert_same(ours, theirs, dtype, [x, memory], masks)


@every_dtype
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("last_norm", [True, False])
def test_stacks(last_norm, norm_first, checkpoint, dtype, implementation):
    size, how = (WIDTH, HEADS, 64), {"norm_first": norm_first, "weights_dtype": dtype}
    rng = np.random.default_rng(10)
    x, y = draw(rng, BATCH, LEN_K, WIDTH, dtype=dtype), draw(rng, BATCH, LEN_Q, WIDTH, dtype=dtype)
    _, padding = masks_of("padding", rng, LEN_K, LEN_K, dtype)
    hidden = np.triu(np.ones((LEN_K, LEN_K), np.bool_), 1)
    pairs = []
    for kind in ("Encoder", "Decoder"):
        layer = getattr(nn, f"Transformer{kind}Layer")(*size, batch_first=True, norm_first=norm_first)
        module = getattr(nn, f"Transformer{kind}")(layer, 3, nn.LayerNorm(WIDTH) if last_norm else None)
        own = [getattr(layers, f"Transformer{kind}Layer")(*size, **how) for _ in range(3)]
        norm = layers.LayerNorm(WIDTH, weights_dtype=dtype) if last_norm else None
        module = randomized(module, dtype)
        pairs.append((load(getattr(layers, f"Transformer{kind}")(own, norm), module), module))
    (encoder, other), (decoder, theirs) = pairs
    masks, counted = {"src_key_padding_mask": padding}, ~padding[..., None]
    assert_same(encoder, other, dtype, [x], masks, counted=counted, checkpoint=checkpoint)
    same(encoder(x, is_causal=True), other(t(x), mask=t(hidden), is_causal=True), dtype)
    masks = {"tgt_mask": hidden[:LEN_Q, :LEN_Q], "memory_key_padding_mask": padding}
    ours = {"tgt_is_causal": True, "memory_key_padding_mask": padding}
    assert_same(decoder, theirs, dtype, [y, x], masks, ours, checkpoint=checkpoint)


@every_dtype
@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu", "bias": False}])
def test_transformer(options, dtype, implementation):
    """Masks and padding of both sides at once, and then token by token over the caches."""
    module = nn.Transformer(WIDTH, HEADS, 2, 2, 64, batch_first=True, **options)
    module = randomized(module, dtype)
    ours = load(layers.Transformer(WIDTH, HEADS, 2, 2, 64, weights_dtype=dtype, **options), module)
    rng = np.random.default_rng(11)
    src, tgt = draw(rng, BATCH, LEN_K, WIDTH, dtype=dtype), draw(rng, BATCH, LEN_Q, WIDTH, dtype=dtype)
    src_mask, src_padding = masks_of("bool, padding", rng, LEN_K, LEN_K, dtype)
    memory_mask, memory_padding = masks_of("bool, padding", rng, LEN_Q, LEN_K, dtype)
    tgt_mask = np.triu(np.ones((LEN_Q, LEN_Q), np.bool_), 1)
    tgt_padding = np.arange(LEN_Q) >= np.array([LEN_Q, LEN_Q - 1, 4])[:, None]
    arguments = {"src_mask": src_mask, "tgt_mask": tgt_mask, "memory_mask": memory_mask}
    paddings = {"src": src_padding, "tgt": tgt_padding, "memory": memory_padding}
    arguments |= {f"{name}_key_padding_mask": x for name, x in paddings.items()}
    expected = module(t(src), t(tgt), **{name: t(mask) for name, mask in arguments.items()})
    same(ours(src, tgt, **arguments), expected, dtype)

    for padding in (src_padding, np.where(src_padding, -np.inf, 0).astype(dtype)):
        padded = {"src_key_padding_mask": padding}  # the decoder attends what it hides
        expected_rows = module(t(src), t(tgt), **{name: t(mask) for name, mask in padded.items()})
        same(ours(src, tgt, **padded), expected_rows, dtype)

    odd = np.tile(np.arange(LEN_K) % 2 == 1, (BATCH, 1))
    over = [np.zeros_like(odd), odd, src_padding, src_padding | odd]  # none, some or all of the padding
    for hidden in over + [np.where(mask, -np.inf, 0).astype(dtype) for mask in over]:
        padded = {"src_key_padding_mask": src_padding, "memory_key_padding_mask": hidden}
        expected_rows = module(t(src), t(tgt), **{name: t(mask) for name, mask in padded.items()})
        same(ours(src, tgt, **padded), expected_rows, dtype)

    memory = ours.encoder(src, mask=src_mask, src_key_padding_mask=src_padding)
    cache = ours.decoder.new_cache()
    steps = [
        ours.decoder(
            tgt[:, i : i + 1], memory if i == 0 else None, cache=cache, memory_mask=memory_mask[i : i + 1],
            memory_key_padding_mask=memory_padding, tgt_key_padding_mask=tgt_padding[:, : i + 1],
        )
        for i in range(LEN_Q)
    ]  # fmt: skip
    same(np.concatenate(steps, axis=1), expected, dtype)
    assert_same(ours, module, dtype, [src, tgt], {"tgt_mask": tgt_mask}, {"tgt_is_causal": True})


DRAWN = {
    "linear": (layers.Linear, nn.Linear, (64, 96), {}),
    "attention": (layers.MultiHeadAttention, nn.MultiheadAttention, (64, 4), {"add_bias_kv": True}),
    "separate": (layers.MultiHeadAttention, nn.MultiheadAttention, (64, 4), {"kdim": 20, "vdim": 100}),
    "encoder": (layers.TransformerEncoderLayer, nn.TransformerEncoderLayer, (64, 4, 200), {}),
    "transformer": (layers.Transformer, nn.Transformer, (64, 4, 1, 1, 200), {}),
}


@pytest.mark.parametrize("layer", DRAWN)
def test_random_weights_are_spread_as_torchs(layer):
    """Each parameter has the deviation and the range of torch's, to a tenth."""
    ours, theirs, sizes, options = DRAWN[layer]
    rng = np.random.default_rng(12)
    drawn = [
        ({n: x.detach().numpy() for n, x in theirs(*sizes, **options).state_dict().items()},
         ours(*sizes, **options, rng=rng).state_dict())
        for _ in range(40)
    ]  # fmt: skip
    for name in drawn[0][0]:
        reference, sample = (np.stack([pair[i][name] for pair in drawn]) for i in (0, 1))
        assert sample.std() == pytest.approx(reference.std(), rel=0.1), name
        if name not in ("bias_k", "bias_v"):  # normal, and so without a range
            assert abs(sample).max() == pytest.approx(abs(reference).max(), rel=0.1), name
