"""Gradients of layers and models against torch's autograd, on the same random weights."""

import numpy as np
import pytest
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

TOLERANCES = {"float32": 1e-5, "float64": 1e-12}

pytestmark = QUIET


def same(ours, theirs, dtype, name):
    assert ours.shape == theirs.shape, name
    assert ours.dtype == theirs.dtype, name
    np.testing.assert_allclose(
        ours, theirs, rtol=0, atol=TOLERANCES[dtype] * max(1, np.abs(theirs).max()), err_msg=name
    )


def assert_same(layer, module, dtype, inputs, theirs, ours, counted=True):
    """The gradients of both; `counted` are the rows of the result that have a meaning."""
    tensors = [t(x).requires_grad_() for x in inputs]
    expected = module(
        *tensors, **{name: t(x) if isinstance(x, np.ndarray) else x for name, x in theirs.items()}
    )
    expected = expected[0] if isinstance(expected, tuple) else expected
    dout = np.where(counted, draw(np.random.default_rng(3), *expected.shape, dtype=dtype), 0).astype(dtype)
    expected.backward(t(dout))
    out, pullback = vjp(layer, *inputs, **ours)
    out = out[0] if isinstance(out, tuple) else out
    *found, grads = pullback(dout)
    same(np.where(counted, out, 0), np.where(counted, expected.detach().numpy(), 0), dtype, "result")
    for i, (gradient, tensor) in enumerate(zip(found, tensors, strict=True)):
        same(gradient, tensor.grad.numpy(), dtype, f"input {i}")
    for name, parameter in module.named_parameters():
        same(grads[name], parameter.grad.numpy(), dtype, name)


@every_dtype
@pytest.mark.parametrize("mask", ["none", "bool", "float of heads", "padding", "float, padding"])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"kdim": 20, "vdim": 33}, {"add_bias_kv": True}, {"add_zero_attn": True}],
    ids=str,
)
def test_attention(options, mask, dtype, implementation):
    module = randomized(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options), dtype)
    layer = load(layers.MultiHeadAttention(WIDTH, HEADS, weights_dtype=dtype, **options), module)
    rng = np.random.default_rng(0)
    query = draw(rng, BATCH, LEN_Q, WIDTH, dtype=dtype)
    key = draw(rng, BATCH, LEN_K, layer.kdim or WIDTH, dtype=dtype)
    value = draw(rng, BATCH, LEN_K, layer.vdim or WIDTH, dtype=dtype)
    attn_mask, padding = masks_of(mask, rng, LEN_Q, LEN_K, dtype)
    masks = {"attn_mask": attn_mask, "key_padding_mask": padding}
    masks = {name: mask for name, mask in masks.items() if mask is not None}
    assert_same(layer, module, dtype, [query, key, value], {**masks, "need_weights": False}, masks)


@every_dtype
@pytest.mark.parametrize("mask", ["none", "causal", "padding", "bool, padding"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layer(norm_first, activation, mask, dtype, implementation):
    options = {"norm_first": norm_first, "activation": activation}
    module = randomized(nn.TransformerEncoderLayer(WIDTH, HEADS, 100, batch_first=True, **options), dtype)
    layer = load(layers.TransformerEncoderLayer(WIDTH, HEADS, 100, weights_dtype=dtype, **options), module)
    rng = np.random.default_rng(1)
    x = draw(rng, BATCH, LEN_Q, WIDTH, dtype=dtype)
    if mask == "causal":
        hidden = np.triu(np.ones((LEN_Q, LEN_Q), bool), 1)
        assert_same(layer, module, dtype, [x], {"src_mask": hidden}, {"is_causal": True})
        return
    src_mask, padding = masks_of(mask, rng, LEN_Q, LEN_Q, dtype)
    masks = {"src_mask": src_mask, "src_key_padding_mask": padding}
    masks = {name: mask for name, mask in masks.items() if mask is not None}
    counted = True if padding is None else ~padding[..., None]
    assert_same(layer, module, dtype, [x], masks, masks, counted)


@every_dtype
@pytest.mark.parametrize("checkpoint", [False, True])
def test_stacks(checkpoint, dtype, implementation):
    size, how = (WIDTH, HEADS, 64), {"weights_dtype": dtype}
    module = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(*size, batch_first=True), 2, nn.LayerNorm(WIDTH)
    )
    module = randomized(module, dtype)
    encoder = layers.TransformerEncoder(
        [layers.TransformerEncoderLayer(*size, **how) for _ in range(2)], layers.LayerNorm(WIDTH, **how)
    )
    rng = np.random.default_rng(3)
    x, y = (draw(rng, BATCH, n, WIDTH, dtype=dtype) for n in (LEN_K, LEN_Q))
    assert_same(load(encoder, module), module, dtype, [x], {}, {"checkpoint": checkpoint})

    module = randomized(nn.TransformerDecoder(nn.TransformerDecoderLayer(*size, batch_first=True), 2), dtype)
    decoder = layers.TransformerDecoder([layers.TransformerDecoderLayer(*size, **how) for _ in range(2)])
    assert_same(load(decoder, module), module, dtype, [y, x], {}, {"checkpoint": checkpoint})

    module = randomized(nn.Transformer(WIDTH, HEADS, 1, 1, 64, batch_first=True), dtype)
    both = layers.Transformer(WIDTH, HEADS, 1, 1, 64, **how)
    assert_same(load(both, module), module, dtype, [x, y], {}, {"checkpoint": checkpoint})
