"""Step by step with a decoder over a memory, and with whole stacks: what caches hold, select and refuse."""

import numpy as np
import pytest
from layer_oracle import (
    BATCH,
    HEADS,
    LENGTH,
    SLOPES,
    WIDTH,
    X,
    attention_layer,
    draw,
    errors_of_cache,
    every_stack,
    randomized,
)
from refused import assert_refused, refused

from fastattn import layers
from fastattn.layers import Caches, DecoderCache, KVCache
from fastattn.positions import rope_frequencies

MEMORY = draw(BATCH, 8, WIDTH, seed=3)
PADDING = np.arange(8) >= np.array([8, 5, 1])[:, None]

CROSS = {
    "rope": {"rope": layers.Rope(rope_frequencies(16))},
    "window": {"window": (3, 2)},
    "alibi": {"alibi_slopes": SLOPES},
    "all": {
        "rope": layers.Rope(rope_frequencies(16)),
        "window": (6, 9),
        "alibi_slopes": SLOPES,
        "add_zero_attn": True,
    },
}


def decoder(**options):
    parts = [layers.TransformerDecoderLayer(WIDTH, HEADS, 96, **options) for _ in range(2)]
    return randomized(layers.TransformerDecoder(parts))


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", CROSS.values(), ids=CROSS)
def test_cached_steps_over_a_memory_with_positions(options, causal, implementation):
    """Queries over the memory have their positions in the target, and keys of the memory count from 0."""
    model = decoder(cross_attention=options)
    full = model(X, MEMORY, tgt_is_causal=True, memory_is_causal=causal)
    for chunks in ((1,) * LENGTH, (4, 1, 6)):
        cache, steps = model.new_cache(), []
        for n, end in zip(chunks, np.cumsum(chunks), strict=True):
            steps.append(model(X[:, end - n : end], MEMORY, memory_is_causal=causal, cache=cache))
        close(np.concatenate(steps, axis=1), full)


@pytest.mark.parametrize("options", CROSS.values(), ids=CROSS)
def test_prompts_of_different_lengths_over_a_memory(options):
    model = decoder(cross_attention=options, attention={"rope": CROSS["rope"]["rope"]})
    full = model(X, MEMORY, tgt_is_causal=True)
    cache, prompts = model.new_cache(), [5, 2, 4]
    model(X[:, :5], MEMORY, cache=cache, lengths=prompts)
    for step in range(3):
        token = np.stack([X[b, n + step] for b, n in enumerate(prompts)])[:, None]
        out = model(token, cache=cache)
        for b, n in enumerate(prompts):
            close(out[b, 0], full[b, n + step])


@pytest.mark.parametrize("sequences", [[0], [2, 0, 0, 1], [1, 2, 0]])
def test_select_takes_the_memory_along(sequences):
    model = decoder()
    full = model(X, MEMORY, tgt_is_causal=True, memory_key_padding_mask=PADDING)
    cache = model.new_cache()
    model(X[:, :4], MEMORY, memory_key_padding_mask=PADDING, cache=cache)
    cache.select(sequences)
    close(model(X[sequences, 4:], cache=cache), full[sequences, 4:])
    cache.truncate(7)
    close(model(X[sequences, 7:], cache=cache), full[sequences, 7:])
    with pytest.raises(ValueError, match="memory is not that of the first call"):
        model(X[sequences, :1], MEMORY, cache=cache)


@every_stack
def test_a_stack_selects_and_truncates_in_all_layers(options):
    stack = randomized(
        layers.TransformerEncoder([layers.TransformerEncoderLayer(WIDTH, HEADS, 96, **options)] * 2)
    )
    full = stack(X, is_causal=True)
    cache = stack.new_cache()
    stack(X[:, :7], is_causal=True, cache=cache)
    cache.truncate(5)
    cache.select([2, 0])
    close(stack(X[[2, 0], 5:], is_causal=True, cache=cache), full[[2, 0], 5:])
    before = [one.lengths for one in cache]
    cache[1].truncate(3)  # so that the second layer fails where the first has truncated
    with pytest.raises(ValueError, match="length is 9; expected 0 to 3"):
        cache.truncate(9)
    np.testing.assert_array_equal(cache[0].lengths, before[0])
    with pytest.raises(ValueError, match="sequences has 2; expected 0 to 1"):
        cache.select([2])


def test_a_batch_that_the_memory_has_not():
    model = decoder()
    for cache in (None, model.new_cache()):
        with pytest.raises(ValueError, match=r"memory has shape \(3, 8, 64\); expected \(1, length, 64\)"):
            model(X[:1], MEMORY, cache=cache)
    cache = model.new_cache()
    model(X[:, :4], MEMORY, cache=cache)
    for one in cache:
        one.tokens.select([0])
    with pytest.raises(ValueError, match="tgt has a batch of 1; expected 3, that of the memory in the cache"):
        model(X[:1, :1], cache=cache)


def test_the_memory_keeps_its_padding():
    model = decoder()
    full = model(X, MEMORY, tgt_is_causal=True, memory_key_padding_mask=PADDING)
    cache, mask = model.new_cache(), PADDING.copy()
    steps = [model(X[:, :4], MEMORY, memory_key_padding_mask=mask, cache=cache)]
    mask[:] = True  # the caller's own
    steps.append(model(X[:, 4:6], cache=cache))
    steps.append(model(X[:, 6:], MEMORY, memory_key_padding_mask=PADDING.tolist(), cache=cache))
    close(np.concatenate(steps, axis=1), full)
    with pytest.raises(ValueError, match="memory_key_padding_mask is not that of the first call"):
        model(X[:, :1], memory_key_padding_mask=~PADDING, cache=cache)
    cache = model.new_cache()
    model(X[:, :4], MEMORY, cache=cache)
    with pytest.raises(ValueError, match="memory_key_padding_mask is not that of the first call"):
        model(X[:, :1], memory_key_padding_mask=PADDING, cache=cache)


def test_one_sequence_without_its_batch_axis():
    model = decoder()
    full = model(X[:1], MEMORY[:1], tgt_is_causal=True, memory_key_padding_mask=PADDING[1:2])[0]
    cache = model.new_cache()
    steps = [model(X[0, :4], MEMORY[0], memory_key_padding_mask=PADDING[1], cache=cache)]
    steps.append(model(X[0, 4:], cache=cache))
    close(np.concatenate(steps), full)


def test_a_failed_first_call_leaves_nothing():
    """A failed first call leaves no shape, dtype or memory in the cache. The next call is its first."""
    layer, cache = attention_layer({}), KVCache(capacity=4)
    with pytest.raises(ValueError, match="key_padding_mask has shape"):
        layer(X, cache=cache, key_padding_mask=np.zeros((BATCH, 5), np.bool_))
    assert (cache.nbytes, cache.capacity, cache.batch) == (0, 4, None)
    close(
        layer(X[:1].astype(np.float16), is_causal=True, cache=cache)[0],
        layer(X[:1].astype(np.float16), is_causal=True)[0],
    )

    model = decoder()
    cache = model.new_cache()
    with pytest.raises(ValueError, match="tgt_key_padding_mask has shape"):
        model(X, MEMORY, tgt_key_padding_mask=PADDING, memory_key_padding_mask=PADDING, cache=cache)
    for one in cache:
        assert one.memory is one.keys_values is one.key_padding_mask is None
    close(model(X[:2], MEMORY[:2], cache=cache), model(X[:2], MEMORY[:2], tgt_is_causal=True))


def test_without_memory_for_more_tokens_nothing_is_lost(monkeypatch):
    cache = KVCache()
    k, v, _, _ = cache.append(X[:, None], X[:, None])

    def no_memory(*shape):
        raise MemoryError

    monkeypatch.setattr(np, "empty", no_memory)
    for _ in range(2):  # the second time, too, it has to make room
        with pytest.raises(MemoryError):
            cache.append(X[:, None], X[:, None])
    monkeypatch.undo()
    more = cache.append(X[:, None], X[:, None])
    np.testing.assert_array_equal(more.k, np.concatenate([k, X[:, None]], axis=2))
    np.testing.assert_array_equal(more.v, np.concatenate([v, X[:, None]], axis=2))


@pytest.mark.parametrize(
    "options", [{}, {"rope": CROSS["rope"]["rope"]}, {"window": (4, 0)}, {"add_zero_attn": True}], ids=str
)
def test_a_cache_in_int8(options, implementation):
    """Results and weights stay close to an exact cache's, for sequences of different lengths."""
    out, weights = errors_of_cache(attention_layer(options), X, "int8")
    assert 1e-4 < out < 0.02
    assert 1e-6 < weights < 0.02


@pytest.mark.parametrize("options", [{}, {"rope": CROSS["rope"]["rope"]}])
def test_a_token_without_its_length(options):
    """An array (n, width) is one sequence of n tokens, while the cache has n sequences."""
    layer, cache = attention_layer(options), KVCache()
    layer(X, cache=cache, lengths=[5, 2, 4])
    with pytest.raises(ValueError, match=r"query has shape \(1, 3, 64\); expected \(3, length, 64\)"):
        layer(X[:, 0], cache=cache)
    stack = randomized(
        layers.TransformerEncoder([layers.TransformerEncoderLayer(WIDTH, HEADS, 96, attention=options)])
    )
    with pytest.raises(ValueError, match=r"TransformerEncoder\(\): src has shape \(1, 3, 64\)"):
        stack(X[:, 0], cache=Caches([cache]))


@pytest.mark.parametrize("cache", [{}, True, [KVCache()], DecoderCache(KVCache())], ids=repr)
def test_what_is_no_cache(cache):
    layer, one = attention_layer({}), randomized(layers.TransformerEncoderLayer(WIDTH, HEADS, 96))
    for call in (layer, one):
        with pytest.raises(TypeError, match=r"cache is of type \w+; expected a KVCache"):
            call(X, cache=cache)
    with pytest.raises(TypeError, match=r"cache is of type \w+; expected a DecoderCache"):
        decoder().layers[0](X, MEMORY, cache=KVCache())
    for wrong in (KVCache(), True, {}, [True, True]):
        with pytest.raises(
            TypeError, match=r"cache is of type \w+; expected a list of KVCache, of new_cache"
        ):
            layers.TransformerEncoder([one, one])(X, cache=wrong)
        with pytest.raises(
            TypeError, match=r"cache is of type \w+; expected a list of DecoderCache, of new_"
        ):
            decoder()(X, MEMORY, cache=wrong)


K = np.ascontiguousarray(X.reshape(BATCH, LENGTH, HEADS, -1).swapaxes(1, 2))


KEPT = r"""
layer(X, keys_values=X) -> TypeError: keys_values is of type ndarray; expected a pair
layer(X, keys_values=(K,)) -> TypeError: keys_values is of type tuple; expected a pair
layer(X, keys_values=(K, None)) -> TypeError: keys_values\[1\] is None
layer(X, keys_values=(X, X))
    -> ValueError: keys_values have shapes \(3, 11, 64\) and .*expected \(3, 4, length, 16\) for both
layer(X, keys_values=(K[:1], K[:1])) -> ValueError: keys_values have shapes \(1, 4, 11, 16\)
layer(X, keys_values=(K[:, :2], K[:, :2])) -> ValueError: keys_values have shapes \(3, 2, 11, 16\)
layer(X, keys_values=(K, K[..., :5])) -> ValueError: keys_values have shapes .* and \(3, 4, 11, 5\)
layer(X, keys_values=(K, K[:, :, :5])) -> ValueError: keys_values have shapes .* and \(3, 4, 5, 16\)
layer(X, keys_values=(K[0], K[0])) -> ValueError: keys_values have shapes \(4, 11, 16\)
layer(X, keys_values=(K.astype(float),) * 2) -> TypeError: keys_values have dtypes float64 and float64
layer(X, keys_values=(K, K.astype(np.float16)))
    -> TypeError: keys_values have dtypes float32 and float16; expected float32
layer(X, keys_values=(K.astype(int), K)) -> TypeError: keys_values\[0\] has dtype int64
"""


@refused(KEPT)
def test_keys_values_are_checked(code, error):
    assert_refused(code, error, layer=attention_layer({}), X=X, K=K)


def test_keys_values_of_16_bits():
    layer = attention_layer({})
    kept = layer.project_keys_values(MEMORY)
    out, _ = layer(X, keys_values=[x.astype(np.float16) for x in kept])
    np.testing.assert_allclose(out, layer(X, MEMORY)[0], rtol=0, atol=0.02)
