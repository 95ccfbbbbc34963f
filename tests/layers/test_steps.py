"""Layers token by token over caches: the same as in one call, whatever came before."""

import copy

import ml_dtypes
import numpy as np
import pytest
from layer_oracle import (
    BATCH,
    HEADS,
    LENGTH,
    WIDTH,
    X,
    attention_layer,
    draw,
    every_feature,
    every_stack,
    randomized,
)

from fastattn.layers import (
    KVCache,
    LayerNorm,
    MultiHeadAttention,
    Rope,
    Transformer,
    TransformerDecoder,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from fastattn.positions import rope_frequencies


@pytest.mark.parametrize("chunks", [(1,) * LENGTH, (4, 1, 1, 5), (LENGTH,)])
@every_feature
def test_cached_steps_are_the_full_pass(options, chunks, implementation):
    layer = attention_layer(options)
    x = draw(BATCH, LENGTH, WIDTH)
    full, _ = layer(x, is_causal=True)
    cache = KVCache()
    ends = np.cumsum(chunks)
    steps = [
        layer(x[:, end - n : end], is_causal=True, cache=cache)[0]
        for n, end in zip(chunks, ends, strict=True)
    ]
    np.testing.assert_allclose(np.concatenate(steps, axis=1), full, rtol=0, atol=1e-5)
    assert cache.length == LENGTH


@every_feature
def test_cached_steps_of_prompts_of_different_lengths(options, implementation):
    """Each sequence goes on after its own prompt. The padding held NaN, which never shows."""
    layer = attention_layer(options)
    x = draw(BATCH, LENGTH, WIDTH)
    full, _ = layer(x, is_causal=True)
    prompts = [5, 2, 4]
    padded = x[:, :5].copy()
    for b, n in enumerate(prompts):
        padded[b, n:] = np.nan
    cache = KVCache(capacity=7)
    with np.errstate(all="ignore"):
        out, _ = layer(padded, is_causal=True, cache=cache, lengths=prompts)
    for b, n in enumerate(prompts):
        np.testing.assert_allclose(out[b, :n], full[b, :n], rtol=0, atol=1e-5)
    for step in range(LENGTH - max(prompts)):
        token = np.stack([x[b, n + step] for b, n in enumerate(prompts)])[:, None]
        out, _ = layer(token, is_causal=True, cache=cache)
        for b, n in enumerate(prompts):
            np.testing.assert_allclose(out[b, 0], full[b, n + step], rtol=0, atol=1e-5)


def test_left_padded_prompts_over_a_cache(implementation):
    """Padding in front is hidden by a key_padding_mask as long as the cache."""
    layer = attention_layer({})
    x = draw(1, 6, WIDTH)
    full, _ = layer(x, is_causal=True)
    padded = np.concatenate([np.full((1, 3, WIDTH), 7, np.float32), x], axis=1)
    hidden = np.arange(9)[None] < 3
    cache = KVCache()
    outs = [layer(padded[:, :7], is_causal=True, cache=cache, key_padding_mask=hidden[:, :7])[0]]
    outs += [layer(padded[:, i : i + 1], cache=cache, key_padding_mask=hidden[:, : i + 1])[0] for i in (7, 8)]
    np.testing.assert_allclose(np.concatenate(outs, axis=1)[:, 3:], full, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_16_bit_cache(dtype, implementation):
    layer = attention_layer({"num_kv_heads": 2})
    x = draw(BATCH, LENGTH, WIDTH)
    full, _ = layer(x, is_causal=True)
    cache = KVCache(dtype=dtype)
    steps = [layer(x[:, i : i + 1], is_causal=True, cache=cache)[0] for i in range(LENGTH)]
    error = abs(np.concatenate(steps, axis=1) - full).max()
    assert 0 < error < 4 * float(ml_dtypes.finfo(dtype).eps) * abs(full).max()


@every_stack
def test_a_decoder_only_stack_step_by_step(options, implementation):
    layers = [TransformerEncoderLayer(WIDTH, HEADS, 96, **options) for _ in range(3)]
    stack = randomized(TransformerEncoder(layers, LayerNorm(WIDTH)))
    x = draw(BATCH, LENGTH, WIDTH)
    full = stack(x, is_causal=True)
    cache = stack.new_cache(capacity=4)
    prompts = [5, 2, 4]
    out = stack(x[:, :5], is_causal=True, cache=cache, lengths=prompts)
    for b, n in enumerate(prompts):
        np.testing.assert_allclose(out[b, :n], full[b, :n], rtol=0, atol=1e-5)
    for step in range(5):
        token = np.stack([x[b, n + step] for b, n in enumerate(prompts)])[:, None]
        out = stack(token, is_causal=True, cache=cache)
        for b, n in enumerate(prompts):
            np.testing.assert_allclose(out[b, 0], full[b, n + step], rtol=0, atol=1e-5)


@pytest.mark.parametrize("lengths", [None, [5, 2, 4]])
@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_step_of_a_stack_is_one_program(shared, dtype, lengths, implementation, monkeypatch):
    """Where its layers' caches go together; else, as with a mask, its attentions run by themselves."""
    own = {"num_kv_heads": 2, "window": (6, 0), "rope": Rope(rope_frequencies(WIDTH // HEADS))}
    layers = [
        TransformerEncoderLayer(WIDTH, HEADS, 96, attention={**own, "query_only": shared and i == 1})
        for i in range(6)
    ]
    stack = randomized(TransformerEncoder(layers, LayerNorm(WIDTH)))
    plain, masked, apart = (stack.new_cache(dtype=dtype) for _ in range(3))
    calls, attend = [], MultiHeadAttention._attend
    monkeypatch.setattr(
        MultiHeadAttention, "_attend", lambda *args, **how: calls.append(0) or attend(*args, **how)
    )
    mask, options = np.zeros((1, 1, 5, 5), bool), {"is_causal": True, "lengths": lengths}
    for x, own_mask in ((X[:, :5], mask), (X[:, 5:6], mask[:, :, :1, :1])):
        one, other = stack(x, cache=plain, **options), stack(x, own_mask, cache=masked, **options)
        for b, n in enumerate(options.pop("lengths", None) or [x.shape[1]] * BATCH):
            np.testing.assert_allclose(one[b, :n], other[b, :n], rtol=0, atol=1e-5)
    assert len(calls) == 2 * len(layers)
    stack(X[:, :5], cache=apart, is_causal=True)
    apart[-1].truncate(3)
    expected, caches = X[:, 5:6], iter(copy.deepcopy(apart))
    if not shared:
        for layer in layers:
            expected = layer(expected, cache=next(caches), is_causal=True)
        np.testing.assert_allclose(
            stack(X[:, 5:6], cache=apart, is_causal=True), stack.norm(expected), rtol=0, atol=1e-5
        )


@every_stack
def test_a_decoder_over_memory_step_by_step(options, implementation):
    model = randomized(Transformer(WIDTH, HEADS, 2, 2, 96, **options))
    src, tgt = draw(BATCH, 8, WIDTH), draw(BATCH, LENGTH, WIDTH, seed=1)
    padding = np.arange(8) >= np.array([8, 5, 1])[:, None]
    full = model(src, tgt, tgt_is_causal=True, src_key_padding_mask=padding, memory_key_padding_mask=padding)
    memory = model.encoder(src, src_key_padding_mask=padding)
    cache = model.decoder.new_cache()
    steps = []
    for i in range(LENGTH):
        first = memory if i == 0 else None
        steps.append(model.decoder(tgt[:, i : i + 1], first, memory_key_padding_mask=padding, cache=cache))
    np.testing.assert_allclose(np.concatenate(steps, axis=1), full, rtol=0, atol=1e-5)


def test_an_error_leaves_caches_as_they_were():
    """Earlier layers of a stack may have appended before a later one raises."""
    layer = attention_layer({})
    cache = KVCache()
    layer(X, cache=cache)
    with pytest.raises(ValueError, match="key_padding_mask has shape"):
        layer(X, cache=cache, key_padding_mask=np.zeros((BATCH, LENGTH), np.bool_))
    assert cache.length == LENGTH

    model = randomized(Transformer(WIDTH, HEADS, 1, 2, 96))
    caches = model.decoder.new_cache()
    with pytest.raises(ValueError, match="memory is None; expected an array"):
        model.decoder(X, cache=caches)
    model.decoder(X, X, cache=caches)
    norm = model.decoder.layers[1].norm3
    norm.load_state_dict(norm.state_dict(), weights_dtype="float64")
    with pytest.raises(TypeError, match=r"its part layers\.1\.norm3"):
        model.decoder(X, cache=caches)
    norm.load_state_dict(norm.state_dict(), weights_dtype="float32")

    def fails(*_, **__):
        assert caches[0].tokens.length == 2 * LENGTH
        raise MemoryError

    model.decoder.layers[1].multihead_attn._attend = fails
    with pytest.raises(MemoryError):
        model.decoder(X, cache=caches)
    with pytest.raises(ValueError, match="memory is not that of the first call"):
        model.decoder(X, X.copy(), cache=caches)
    with pytest.raises(ValueError, match="cache is for 1 layers; expected 2"):
        model.decoder(X, cache=caches[:1])
    assert [one.tokens.length for one in caches] == [LENGTH, LENGTH]
    with pytest.raises(ValueError, match="memory is None"):
        TransformerDecoder(model.decoder.layers)(X)


def test_a_cache_of_another_model_is_refused():
    one, other = attention_layer({}), attention_layer({"num_kv_heads": 2})
    cache = KVCache()
    one(X, cache=cache)
    with pytest.raises(ValueError, match=r"KVCache.append\(\): k has shape"):
        other(X, cache=cache)
