"""Layers: what they compute beyond torch's (tests/parity has that), step by step, and how they are loaded."""

import math
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
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
    every_stack,
    randomized,
)
from safetensors.numpy import save_file

import fastattn
from fastattn._engine import dispatch, settings
from fastattn.cache import KVCache
from fastattn.layers import (
    FeedForward,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    RMSNorm,
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)


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


@every_feature
def test_attention_over_a_memory(options, implementation):
    layer = attention_layer(options)
    x, memory = draw(BATCH, 5, WIDTH), draw(BATCH, LENGTH, WIDTH, seed=1)
    hidden = np.random.default_rng(2).random((BATCH, HEADS, 5, LENGTH)) < 0.3
    hidden[..., 0] = False
    expected, _ = dense(layer, x, memory, hidden=hidden)
    out = layer(x, memory, attn_mask=hidden)
    bound = 2e-6 * abs(expected).max()
    np.testing.assert_allclose(out, expected, rtol=0, atol=bound)
    np.testing.assert_array_equal(layer(x, memory, memory, attn_mask=hidden.reshape(-1, 5, LENGTH)), out)
    kept = layer.project_keys_values(memory)
    np.testing.assert_allclose(layer(x, keys_values=kept, attn_mask=hidden), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("chunks", [(1,) * LENGTH, (4, 1, 1, 5), (LENGTH,)])
@every_feature
def test_cached_steps_are_the_full_pass(options, chunks, implementation):
    layer = attention_layer(options)
    x = draw(BATCH, LENGTH, WIDTH)
    full = layer(x, is_causal=True)
    cache = KVCache()
    ends = np.cumsum(chunks)
    steps = [
        layer(x[:, end - n : end], is_causal=True, cache=cache) for n, end in zip(chunks, ends, strict=True)
    ]
    np.testing.assert_allclose(np.concatenate(steps, axis=1), full, rtol=0, atol=1e-5)
    assert cache.length == LENGTH


@every_feature
def test_cached_steps_of_prompts_of_different_lengths(options, implementation):
    """Each sequence goes on behind its own prompt. The padding held NaN, which never shows."""
    layer = attention_layer(options)
    x = draw(BATCH, LENGTH, WIDTH)
    full = layer(x, is_causal=True)
    prompts = [5, 2, 4]
    padded = x[:, :5].copy()
    for b, n in enumerate(prompts):
        padded[b, n:] = np.nan
    cache = KVCache(capacity=7)
    with np.errstate(all="ignore"):
        out = layer(padded, is_causal=True, cache=cache, lengths=prompts)
    for b, n in enumerate(prompts):
        np.testing.assert_allclose(out[b, :n], full[b, :n], rtol=0, atol=1e-5)
    for step in range(LENGTH - max(prompts)):
        token = np.stack([x[b, n + step] for b, n in enumerate(prompts)])[:, None]
        out = layer(token, is_causal=True, cache=cache)
        for b, n in enumerate(prompts):
            np.testing.assert_allclose(out[b, 0], full[b, n + step], rtol=0, atol=1e-5)


def test_left_padded_prompts_over_a_cache(implementation):
    """Padding in front is hidden by a key_padding_mask as long as the cache."""
    layer = attention_layer({})
    x = draw(1, 6, WIDTH)
    full = layer(x, is_causal=True)
    padded = np.concatenate([np.full((1, 3, WIDTH), 7, np.float32), x], axis=1)
    hidden = np.arange(9)[None] < 3
    cache = KVCache()
    outs = [layer(padded[:, :7], is_causal=True, cache=cache, key_padding_mask=hidden[:, :7])]
    outs += [layer(padded[:, i : i + 1], cache=cache, key_padding_mask=hidden[:, : i + 1]) for i in (7, 8)]
    np.testing.assert_allclose(np.concatenate(outs, axis=1)[:, 3:], full, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_16_bit_cache(dtype, implementation):
    layer = attention_layer({"num_kv_heads": 2})
    x = draw(BATCH, LENGTH, WIDTH)
    full = layer(x, is_causal=True)
    cache = KVCache(dtype=dtype)
    steps = [layer(x[:, i : i + 1], is_causal=True, cache=cache) for i in range(LENGTH)]
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


def test_pieces_of_a_layer_are_the_layer(implementation):
    """A layer is what its public parts give when they are put together by hand."""
    x = draw(BATCH, LENGTH, WIDTH)
    options = {"num_kv_heads": 2, "sinks": True}
    for norm_first in (False, True):
        layer = TransformerEncoderLayer(WIDTH, HEADS, 96, "geglu", norm_first=norm_first, attention=options)
        randomized(layer)
        if norm_first:
            y = layer.self_attn(layer.norm1(x), residual=x)
            expected = y + layer.feed_forward(layer.norm2(y))
        else:
            y = layer.norm1(layer.self_attn(x), residual=x)
            expected = layer.norm2(layer.feed_forward(y, residual=y))
        np.testing.assert_allclose(layer(x), expected, rtol=0, atol=1e-5)
        np.testing.assert_allclose(layer(x[1]), expected[1], rtol=0, atol=1e-5)  # (L, d) is a sequence, too


def test_an_encoder_layer_is_seven_kernels(monkeypatch):
    """Queries, keys and values are one linear; residuals and activations are part of it; heads are views."""
    ran = []
    run = dispatch.run

    def noted(args, backend=None):
        ran.append(args.copies if args.kernel == "attention" else args.kernel)
        run(args, backend)

    monkeypatch.setattr(dispatch, "run", noted)
    x, nothing = draw(BATCH, LENGTH, WIDTH), np.zeros((BATCH, LENGTH), bool)
    layer = TransformerEncoderLayer(WIDTH, HEADS, 96, "swiglu", rng=np.random.default_rng(0))
    layer(x, src_key_padding_mask=nothing)
    assert ran == ["linear", (), "linear", "rows", "linear", "linear", "rows"]
    layer(x)
    assert [step.op for step in layer._plain.program.steps] == [
        "linear", "attend", "linear", "norm", "linear", "linear", "norm",
    ]  # fmt: skip


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_plain_layer_is_the_layer(dtype, norm_first, norm, implementation):
    """Without masks all kernels run in one call, with the result of a mask that hides nothing."""
    x = draw(BATCH, LENGTH, WIDTH).astype(dtype)
    for heads in ({}, {"num_kv_heads": 2}, {"head_dim": 24}):
        options = {"norm_first": norm_first, "norm": norm, "attention": heads, "weights_dtype": dtype}
        layer = TransformerEncoderLayer(WIDTH, HEADS, 96, "geglu", rng=np.random.default_rng(0), **options)
        masked = layer(x, src_mask=np.zeros((LENGTH, LENGTH), bool))
        np.testing.assert_allclose(layer(x), masked, rtol=0, atol=1e-5 if dtype == "float32" else 1e-13)
        assert (layer._plain.program is not None) == (heads != {"head_dim": 24} or layer.self_attn.is_plain())
        np.testing.assert_array_equal(layer(x[:, ::-1])[:, ::-1], layer(x[:, ::-1].copy())[:, ::-1])


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


def every_layer(dtype="float32"):
    heads = {"num_kv_heads": 2, "qk_norm": True, "output_gate": True, "sinks": True, "add_bias_kv": True}
    return [
        Linear(20, 33, weights_dtype=dtype),
        LayerNorm(20, weights_dtype=dtype),
        RMSNorm(20, weights_dtype=dtype),
        FeedForward(20, 45, weights_dtype=dtype),
        FeedForward(20, 45, "swiglu", bias=False, weights_dtype=dtype),
        MultiHeadAttention(36, 4, weights_dtype=dtype, **heads),
        MultiHeadAttention(36, 4, kdim=20, vdim=7, bias=False, weights_dtype=dtype),
        TransformerEncoderLayer(36, 4, 40, "geglu", norm="rms_norm", weights_dtype=dtype, attention=heads),
        Transformer(36, 4, 1, 2, 40, weights_dtype=dtype),
    ]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int8"])
@pytest.mark.parametrize("which", range(9))
def test_a_state_dict_goes_round(which, dtype):
    """A saved state is the loaded one, up to the rounding of the stored type, and loads to the same."""
    layer, other = every_layer(dtype)[which], every_layer(dtype)[which]
    lane = np.float64 if dtype == "float64" else np.float32
    state = {
        name: draw(*p.shape, seed=i, dtype=lane) for i, (name, p) in enumerate(layer.parameters().items())
    }
    layer.load_state_dict(state)
    saved = layer.state_dict()
    assert list(saved) == list(state)
    for name, x in state.items():
        assert saved[name].dtype == lane
        assert saved[name].shape == x.shape
        bound = {"bfloat16": 2**-8, "int8": 0.5001 / 127}.get(dtype, 0) * abs(x).max(axis=-1, keepdims=True)
        assert (abs(saved[name] - x) <= bound).all(), name
        saved[name].fill(0)  # a copy: the layer keeps its own
    other.load_state_dict(layer.state_dict())
    for name, x in layer.state_dict().items():
        np.testing.assert_allclose(other.state_dict()[name], x, rtol=1e-6 if dtype == "int8" else 0)
        assert x.any()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_weights_of_few_bits_are_those_weights(dtype, implementation):
    """A layer of rounded weights computes what a float32 layer of the same values does."""
    layer = randomized(TransformerEncoderLayer(WIDTH, HEADS, 96, weights_dtype=dtype))
    same = TransformerEncoderLayer(WIDTH, HEADS, 96)
    same.load_state_dict(layer.state_dict())
    x = draw(BATCH, LENGTH, WIDTH)
    # With a dot product of bfloat16 pairs, what a weight meets is rounded to bfloat16, too.
    bound = 0.05 if dtype == "bfloat16" else 1e-4
    np.testing.assert_allclose(layer(x), same(x), rtol=0, atol=bound)
    assert layer.self_attn.all_maps.weight.nbytes < same.self_attn.all_maps.weight.nbytes * 0.6


def test_weights_dtype_of_a_load_is_for_all_parts():
    layer = TransformerEncoderLayer(WIDTH, HEADS, 96)
    state = randomized(layer).state_dict()
    layer.load_state_dict(state, weights_dtype="float64")
    x = draw(BATCH, LENGTH, WIDTH, dtype=np.float64)
    assert layer(x).dtype == np.float64
    with pytest.raises(TypeError, match="src has dtype float32; expected float64, for weights in float64"):
        layer(x.astype(np.float32))
    layer.load_state_dict(state, weights_dtype="int8")
    assert layer.feed_forward.weight1.dtype == layer.self_attn.out_proj.packed_weight.dtype == "int8"


def test_weights_are_read_only_panels():
    layer = randomized(MultiHeadAttention(36, 4))
    for packed in (layer.all_maps.weight, layer.query_maps.weight, layer.out_proj.packed_weight):
        with pytest.raises(ValueError, match="read-only"):
            packed.panels[...] = 0
    # Parts of it are slices, not copies: projections of 36 outputs begin at panels of their own.
    for part in (layer.query_maps, layer.key_map, layer.value_map, layer.key_value_maps):
        assert np.shares_memory(part.weight.panels, layer.all_maps.weight.panels)


def test_one_error_lists_all_and_changes_nothing():
    layer = randomized(TransformerEncoderLayer(36, 4, 40))
    before = layer.state_dict()
    state = {name: x + 1 for name, x in before.items()}
    del state["linear1.bias"], state["norm2.weight"]
    state |= {
        "self_attn.in_proj_weight": np.zeros((36, 108)),
        "linear2.weight": np.zeros((36, 40), np.int64),
        "linear2.bias": np.array(["a"] * 36),
        "norm3.weight": np.ones(36),
    }
    with pytest.raises(ValueError, match="nothing was loaded") as error:
        layer.load_state_dict(state)
    assert str(error.value).splitlines() == [
        "TransformerEncoderLayer.load_state_dict(): nothing was loaded:",
        "  missing: linear1.bias (40,)",
        "  missing: norm2.weight (36,)",
        "  not known: norm3.weight",
        "  self_attn.in_proj_weight: shape (36, 108), expected (108, 36)",
        "  linear2.weight: dtype int64, expected a floating type",
        "  linear2.bias: dtype <U1, expected a floating type",
    ]
    for name, x in layer.state_dict().items():
        np.testing.assert_array_equal(x, before[name])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
def test_a_safetensors_file(dtype, tmp_path):
    layer = randomized(TransformerEncoderLayer(36, 4, 40))
    state = {name: x.astype(dtype) for name, x in layer.state_dict().items()}
    save_file(
        {f"model.{name}": x for name, x in state.items()} | {"head": np.ones(3)}, tmp_path / "x.safetensors"
    )
    other = TransformerEncoderLayer(36, 4, 40)
    other.load_state_dict(tmp_path / "x.safetensors", prefix="model.")
    for name, x in other.state_dict().items():
        np.testing.assert_array_equal(x, state[name].astype(np.float32))
    with pytest.raises(ValueError, match=r"(?s)missing: norm1.weight \(36,\).*not known: head"):
        other.load_state_dict(str(tmp_path / "x.safetensors"))


def test_a_file_that_is_not_sound(tmp_path, monkeypatch):
    layer = Linear(3, 4)
    path = tmp_path / "x.safetensors"
    save_file({"weight": np.ones((4, 3), np.float32), "bias": np.ones(4, np.float32)}, path)
    for size in (0, 5, 40, path.stat().st_size - 1):
        (tmp_path / "short").write_bytes(path.read_bytes()[:size])
        with pytest.raises(ValueError, match="is not a sound safetensors file"):
            layer.load_state_dict(tmp_path / "short")
    with pytest.raises(FileNotFoundError, match=r"load_state_dict\(\): .* is missing"):
        layer.load_state_dict(tmp_path / "none")
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        layer.load_state_dict(path)
    with pytest.raises(ValueError, match="Linear has no parameters yet"):
        layer(np.ones(3, np.float32))


@pytest.mark.parametrize("which", range(9))
def test_a_generator_draws_the_same_again(which):
    """The same seed gives the same parameters. Without a generator there are none, and a call says so."""
    layer = every_layer()[which]
    kind = type(layer)
    names = layer.__dataclass_fields__
    options = {n: getattr(layer, n) for n in names if names[n].init and n not in ("rng", "_")}
    one, two, other = (kind(**options, rng=np.random.default_rng(seed)).state_dict() for seed in (1, 1, 2))
    for name, x in one.items():
        np.testing.assert_array_equal(two[name], x)
        if "weight" in name and x.ndim == 2:
            assert (other[name] != x).mean() > 0.9
            assert np.isfinite(x).all()
    if kind not in (LayerNorm, RMSNorm):
        for what in (layer.state_dict, lambda: layer(np.ones((1, 2, 36), np.float32), np.ones((1, 2, 36)))):
            with pytest.raises((ValueError, TypeError), match=r"has no parameters yet|positional"):
                what()


@pytest.mark.parametrize("options", [{}, {"norm": "rms_norm", "activation": "swiglu", "norm_first": True}])
def test_same_bits_for_any_threads_and_batch(options, implementation):
    layer = randomized(TransformerEncoderLayer(WIDTH, HEADS, 96, **options))
    x = draw(4, 70, WIDTH)
    with settings.forced(num_threads=1):
        expected = layer(x, is_causal=True)
    for num_threads in (2, 3, 8):
        with settings.forced(num_threads=num_threads):
            np.testing.assert_array_equal(layer(x, is_causal=True), expected)
    if implementation != "numpy":  # whose matmul is BLAS's
        np.testing.assert_array_equal(layer(x[2:3], is_causal=True), expected[2:3])
        np.testing.assert_array_equal(layer(x[2], is_causal=True), expected[2])


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
        layer.self_attn(x, cache=cache),
    )
    before = [array.copy() for array in kept]
    layer(other)
    layer.self_attn(other, other.copy())
    layer.feed_forward(other)
    for array, expected in zip(kept, before, strict=True):
        np.testing.assert_array_equal(array, expected)


def test_several_python_threads_at_once():
    layer = randomized(TransformerEncoderLayer(WIDTH, HEADS, 256))
    inputs = [draw(4, 200, WIDTH, seed=i) for i in range(8)]
    expected = [layer(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for out, wanted in zip(pool.map(layer, inputs), expected, strict=True):
                np.testing.assert_array_equal(out, wanted)


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


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bit_activations(dtype, implementation):
    layer = randomized(TransformerEncoderLayer(WIDTH, HEADS, 96, attention={"num_kv_heads": 2}))
    x = draw(BATCH, LENGTH, WIDTH).astype(dtype)
    out = layer(x)
    assert out.dtype == dtype
    bound = 16 * float(ml_dtypes.finfo(dtype).eps)
    expected = layer(x.astype(np.float32))
    np.testing.assert_allclose(out.astype(np.float32), expected, rtol=0, atol=bound * abs(expected).max())


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


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m(X[..., :-1]), ValueError, r"query has shape \(3, 11, 63\); expected \(..., 64\)"),
        (lambda m: m(X[None]), ValueError, "query has shape"),
        (lambda m: m(X.astype(np.int32)), TypeError, "query has dtype int32"),
        (lambda m: m(X.astype(np.float64)), TypeError, "query has dtype float64; expected float32"),
        (lambda m: m(X, X[:2]), ValueError, r"key has shape \(2, 11, 64\); expected \(3, length, 64\)"),
        (lambda m: m(X, X[..., :5]), ValueError, "key has shape"),
        (lambda m: m(X, X, X[:, :5]), ValueError, "value has .*length"),
        (lambda m: m(X, attn_mask=MASK[:5]), ValueError, r"attn_mask has shape \(5, 11\); expected"),
        (lambda m: m(X, attn_mask=MASK.astype(int)), TypeError, "attn_mask has dtype int64; expected bool"),
        (lambda m: m(X, attn_mask=MASK[None]), ValueError, "attn_mask has shape"),
        (lambda m: m(X, key_padding_mask=MASK), ValueError, "key_padding_mask has shape"),
        (lambda m: m(X, is_causal=MASK), TypeError, "is_causal is an array"),
        (lambda m: m(X, residual=X[:1]), ValueError, "residual has shape"),
        (lambda m: m(X, lengths=[1, 1, 1]), ValueError, "lengths is given without cache"),
        (lambda m: m(X, X.copy(), keys_values=(X, X)), ValueError, "keys_values is given with key"),
        (
            lambda m: MultiHeadAttention(65, 4),
            ValueError,
            "embed_dim is 65; expected a multiple of num_heads, 4",
        ),
        (
            lambda m: MultiHeadAttention(64, 4, num_kv_heads=3),
            ValueError,
            "num_heads is 4; expected a multiple",
        ),
        (lambda m: MultiHeadAttention(64, 0), ValueError, "num_heads is 0"),
        (lambda m: MultiHeadAttention(64, 4, weights_dtype="int4"), ValueError, "weights_dtype is 'int4'"),
        (lambda m: MultiHeadAttention(64, 4, rng=3), TypeError, "rng is of type int"),
        (lambda m: FeedForward(64, 100, "tanh"), ValueError, "activation is 'tanh'; expected one of relu"),
        (lambda m: TransformerEncoderLayer(64, 4, norm="batch"), ValueError, "norm is 'batch'"),
        (lambda m: TransformerEncoder([]), ValueError, "layers is empty"),
        (lambda m: m.load_state_dict({}, weights_dtype="int4"), ValueError, "weights_dtype is 'int4'"),
        (lambda m: m.load_state_dict([1]), TypeError, "state is of type list"),
        (lambda m: m.no_such_thing, AttributeError, "no_such_thing"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(attention_layer({}))


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


def test_an_error_leaves_caches_as_they_were():
    """Also in a stack, where earlier layers have appended before a later one raises."""
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
    with pytest.raises(TypeError, match="its part norm3"):
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


def test_documented_names():
    for layer in every_layer():
        assert type(layer).__doc__
        assert repr(layer).startswith(type(layer).__name__)
    assert fastattn.layers is not None
