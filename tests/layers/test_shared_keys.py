"""Stacks whose layers attend keys and values that an earlier layer made."""

import copy
import pickle

import numpy as np
import pytest
from layer_oracle import FEATURES, HEADS, WIDTH, assert_gradients, dense, draw, randomized
from oracle import assert_same_bits
from refused import assert_refused, refused

from fastattn._engine.program import Program
from fastattn.grad import vjp
from fastattn.layers import (
    LayerNorm,
    MultiHeadAttention,
    Rope,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from fastattn.positions import rope_frequencies

BATCH, LENGTH = 2, 9
SOURCES = {  # what each layer attends, and `keys_from`, which may be left out
    "pairs": ([0, 0, 2, 2], None),
    "one for the rest": ([0, 1, 1, 1], None),
    "two kinds": ([0, 1, 0, 1, 1], [0, 1, 0, 1, 1]),
    "none of its neighbour": ([0, 1, 0], [0, 1, 0]),
}
every_pattern = pytest.mark.parametrize(("sources", "given"), SOURCES.values(), ids=SOURCES)
OPTIONS = {name: options for name, options in FEATURES.items() if "bias" not in options}  # of layers
every_feature = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
SIDES = {"encoder": TransformerEncoderLayer, "decoder": TransformerDecoderLayer}
every_side = pytest.mark.parametrize("side", SIDES)
MODERN = {"num_kv_heads": 2, "rope": Rope(rope_frequencies(16)), "qk_norm": True}


def stack(sources, given=None, options=MODERN, dtype="float64", side="encoder", **others):
    parts = [
        SIDES[side](
            WIDTH,
            HEADS,
            48,
            "gelu",
            weights_dtype=dtype,
            attention={**options, "query_only": i != j},
            **others,
        )
        for i, j in enumerate(sources)
    ]
    kind = TransformerEncoder if side == "encoder" else TransformerDecoder
    return randomized(kind(parts, LayerNorm(WIDTH, weights_dtype=dtype), given))


def called(model, x, *memory, causal=True, **options):
    name = "is_causal" if isinstance(model, TransformerEncoder) else "tgt_is_causal"
    return model(x, *memory, **{name: causal}, **options)


def memory_of(side, dtype=np.float64):
    return [] if side == "encoder" else [draw(BATCH, 5, WIDTH, seed=4, dtype=dtype)]


def with_keys(own, source):
    """An attention with the queries of `own` and the keys of `source`."""
    names = "num_kv_heads head_dim rope qk_norm output_gate sinks window softcap scale alibi_slopes bias"
    names += " add_bias_kv add_zero_attn"
    options = {name: getattr(own, name) for name in names.split()}
    whole = MultiHeadAttention(own.embed_dim, own.num_heads, weights_dtype="float64", **options)
    state, theirs = own.state_dict(), source.state_dict()
    n = len(state["q_proj_weight"])
    state["in_proj_weight"] = np.concatenate([state.pop("q_proj_weight"), theirs["in_proj_weight"][n:]])
    if own.bias:
        state["in_proj_bias"] = np.concatenate([state["in_proj_bias"], theirs["in_proj_bias"][n:]])
    if own.qk_norm:
        state["k_norm.weight"] = theirs["k_norm.weight"]
    whole.load_state_dict(state)
    return whole


def expected(model, sources, x, memory=(), causal=True, hidden=None):
    """The stack's result by its definition: dense attention, from each layer's rows to its source's."""
    attended = []
    for layer, source in zip(model.layers, sources, strict=True):
        own, first = layer.self_attn, layer.norm_first
        attended.append(layer.norm1(x) if first else x)
        if own.query_only:
            own = with_keys(own, model.layers[source].self_attn)
        x = x + dense(own, attended[-1], attended[source], causal=causal, hidden=hidden)[0]
        x = x if first else layer.norm1(x)
        for over in memory:
            x = x + dense(layer.multihead_attn, layer.norm2(x) if first else x, over)[0]
            x = x if first else layer.norm2(x)
        norm = layer.norm3 if memory else layer.norm2
        x = x + layer.feed_forward(norm(x)) if first else norm(x + layer.feed_forward(x))
    return model.norm(x)


@every_side
@every_pattern
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_results(norm_first, causal, sources, given, side, implementation):
    model = stack(sources, given, side=side, norm_first=norm_first)
    x, memory = draw(BATCH, LENGTH, WIDTH, dtype=np.float64), memory_of(side)
    out = called(model, x, *memory, causal=causal)
    np.testing.assert_allclose(out, expected(model, sources, x, memory, causal), atol=1e-11)


@every_feature
def test_results_with_options(options, implementation):
    model = stack([0, 0, 2], options=options)
    x = draw(BATCH, LENGTH, WIDTH, dtype=np.float64)
    np.testing.assert_allclose(model(x), expected(model, [0, 0, 2], x, causal=False), atol=1e-11)


@pytest.mark.parametrize("causal", [False, True])
def test_hidden_rows_are_zero_and_reach_nothing(causal, implementation):
    model = stack([0, 0, 0], dtype="float32")
    padding = np.arange(LENGTH) >= np.array([LENGTH, 4])[:, None]
    x = draw(BATCH, LENGTH, WIDTH)
    x[padding] = np.nan
    out = model(x, src_key_padding_mask=padding, is_causal=causal)
    alone = model(x[1:, :4], is_causal=causal)
    np.testing.assert_allclose(out[1:, :4], alone, atol=1e-6)
    if not causal:
        assert not out[padding].any()


@pytest.mark.parametrize("sources", [[0, 0, 2, 2] * 12, [0, 1, 2, 3]], ids=len)
@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}, MODERN], ids=len)
def test_calls_without_masks_are_one_program(options, sources, implementation, monkeypatch):
    """A plain call, its gradients, and a call whose rows are hidden, where that moves no rotation.

    Where keys are shared, buffers of keys are used again.
    """
    model = stack([i // 4 * 4 + j for i, j in enumerate(sources)], options=options, dtype="float32")
    x, padding = draw(BATCH, LENGTH, WIDTH), np.arange(LENGTH) >= np.array([LENGTH, 4])[:, None]
    runs, on = [], Program.run_on
    monkeypatch.setattr(Program, "run_on", lambda program, *args: runs.append(program) or on(program, *args))
    whole = model(x)
    vjp(model, x, checkpoint=True)[1](whole)
    hidden = model(x, src_key_padding_mask=padding)
    alone = model(x, mask=np.zeros((LENGTH, LENGTH), bool))
    np.testing.assert_allclose(whole, alone, atol=1e-5)
    assert [program is runs[0] for program in runs] == [True, True, options is not MODERN, False]
    assert not hidden[padding].any()


@every_side
@pytest.mark.parametrize("checkpoint", [False, True])
def test_no_tokens(checkpoint, side):
    x, model = draw(BATCH, 0, WIDTH, dtype=np.float64), stack([0, 0], side=side)
    out, pullback = vjp(model, x, *memory_of(side), checkpoint=checkpoint)
    assert out.shape == pullback(out)[0].shape == x.shape


@every_side
@every_pattern
@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_tokens_one_by_one(cache_dtype, sources, given, side, implementation):
    model = stack(sources, given, side=side, dtype="float32", norm_first=True)
    x, memory = draw(BATCH, LENGTH, WIDTH), memory_of(side, np.float32)
    full = called(model, x, *memory)
    for chunks in ((1,) * LENGTH, (4, 1, 4)):
        cache, steps = model.new_cache(dtype=cache_dtype), []
        for n, end in zip(chunks, np.cumsum(chunks), strict=True):
            steps.append(called(model, x[:, end - n : end], *memory, cache=cache))
        error = abs(np.concatenate(steps, axis=1) - full).max()
        assert error < (1e-5 if cache_dtype is None else 0.2)


@every_side
def test_prompts_of_different_lengths_selected_and_truncated(side):
    model, memory = stack([0, 0, 2, 2], side=side, dtype="float32"), memory_of(side, np.float32)
    x, prompts = draw(BATCH, LENGTH, WIDTH), [5, 3]
    full = called(model, x, *memory)
    cache = model.new_cache()
    called(model, x[:, :5], *memory, cache=cache, lengths=prompts)
    cache.select([1, 0])
    order, lengths = [1, 0], [3, 5]
    for step in range(3):
        if step == 2:
            cache.truncate(4)
            lengths = [4, 4]
        token = np.stack([x[b, n] for b, n in zip(order, lengths, strict=True)])[:, None]
        out = called(model, token, cache=cache)
        for row, (b, n) in enumerate(zip(order, lengths, strict=True)):
            np.testing.assert_allclose(out[row, 0], full[b, n], atol=1e-5)
        lengths = [n + 1 for n in lengths]


@every_side
def test_tokens_after_some_were_dropped_have_their_own_positions(side):
    """As a mask that hides the dropped tokens from later ones."""
    model, memory = stack([0, 0, 2, 2], side=side, dtype="float32"), memory_of(side, np.float32)
    x, kept = draw(BATCH, LENGTH, WIDTH), [0, 2, 3]
    hidden = np.triu(np.ones((LENGTH, LENGTH), bool), 1)
    hidden[5:, [1, 4]] = True
    full = model(x, *memory, **{"mask" if side == "encoder" else "tgt_mask": hidden})
    cache = model.new_cache()
    called(model, x[:, :5], *memory, cache=cache)
    for tokens in cache if side == "encoder" else (layer.tokens for layer in cache):
        if tokens.length:  # of layers with keys of their own
            tokens.keep(kept)
    for step in (slice(5, 8), slice(8, 9)):
        out = called(model, x[:, step], *memory, cache=cache)
        np.testing.assert_allclose(out, full[:, step], atol=1e-5)


def test_a_cache_holds_shared_keys_once():
    sharing, plain = stack([0, 0, 2, 2], dtype="float32"), stack([0, 1, 2, 3], dtype="float32")
    sizes = []
    for model in (sharing, plain):
        cache = model.new_cache(16)
        model(draw(BATCH, LENGTH, WIDTH), is_causal=True, cache=cache)
        sizes.append((len(cache), sum(layer.nbytes for layer in cache)))
    assert sizes == [(2, sizes[1][1] // 2), (4, sizes[1][1])]


@every_side
def test_a_failed_call_leaves_caches_as_they_were(side):
    model, memory = stack([0, 0], side=side, dtype="float32"), memory_of(side, np.float32)
    cache = model.new_cache()
    called(model, draw(BATCH, 3, WIDTH), *memory, cache=cache)
    before = cache[0].length if side == "encoder" else cache[0].tokens.length
    masks = {"mask" if side == "encoder" else "tgt_mask": np.zeros((1, 7), bool)}
    with pytest.raises(ValueError, match="mask"):
        called(model, draw(BATCH, 1, WIDTH), *memory, cache=cache, **masks)
    assert (cache[0].length if side == "encoder" else cache[0].tokens.length) == before


@every_side
@every_pattern
@pytest.mark.parametrize("causal", [False, True])
def test_gradients(causal, sources, given, side, implementation):
    model = stack(sources, given, side=side, norm_first=True)
    causal = {"is_causal" if side == "encoder" else "tgt_is_causal": causal}
    assert_gradients(model, draw(BATCH, 5, WIDTH, dtype=np.float64), *memory_of(side), **causal)


def test_gradients_where_rows_are_hidden():
    """A program, which leaves rows out, has those of layers that attend by a mask."""
    model = stack([0, 0, 2, 0, 2], [0, 0, 2, 0, 2], options={"num_kv_heads": 2}, norm_first=True)
    x, results = draw(BATCH, LENGTH, WIDTH, dtype=np.float64), []
    padding = np.arange(LENGTH) >= np.array([LENGTH, 4])[:, None]
    for mask in (None, np.zeros((LENGTH, LENGTH), bool)):
        out, pullback = vjp(model, x, mask=mask, src_key_padding_mask=padding)
        dx, gradients = pullback(draw(*out.shape, seed=1, dtype=np.float64) * ~padding[..., None])
        results.append([out[~padding], dx[~padding], *gradients.values()])
    for got, expected in zip(*results, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-12)


@every_feature
def test_gradients_with_options(options):
    assert_gradients(stack([0, 0], options=options), draw(BATCH, 5, WIDTH, dtype=np.float64))


@every_side
@pytest.mark.parametrize("dropout", [{}, {"dropout": 0.2, "seed": 3}], ids=str)
def test_checkpoints_change_nothing(dropout, side):
    model, memory = (
        stack([0, 1, 0, 1, 1], [0, 1, 0, 1, 1], side=side, dtype="float32"),
        memory_of(side, np.float32),
    )
    x, results = draw(BATCH, LENGTH, WIDTH), []
    for checkpoint in (False, True):
        out, pullback = vjp(model, x, *memory, checkpoint=checkpoint, **dropout)
        *inputs, grads = pullback(out)
        results.append([out, *inputs, *grads.values()])
    assert_same_bits(*results)


def test_parameters_are_those_of_queries_alone():
    model = stack([0, 0], options={**MODERN, "output_gate": True})
    own, keys = (model.layers[i].self_attn for i in (1, 0))
    assert {name: x.shape for name, x in own.state_dict().items()} == {
        "q_proj_weight": (WIDTH, WIDTH), "in_proj_bias": (WIDTH,), "q_norm.weight": (16,),
        "gate_proj.weight": (WIDTH, WIDTH), "gate_proj.bias": (WIDTH,),
        "out_proj.weight": (WIDTH, WIDTH), "out_proj.bias": (WIDTH,),
    }  # fmt: skip
    assert keys.state_dict()["in_proj_weight"].shape == (2 * WIDTH, WIDTH)
    x = draw(BATCH, LENGTH, WIDTH, dtype=np.float64)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert_same_bits([other(x)], [model(x)])


def test_one_attention_over_the_keys_of_another(implementation):
    one, other = (randomized(MultiHeadAttention(WIDTH, HEADS, query_only=x, **MODERN)) for x in (False, True))
    x, y = draw(BATCH, LENGTH, WIDTH), draw(BATCH, LENGTH, WIDTH, seed=1)
    out, weights = other(x, keys_values=one.project_keys_values(y), is_causal=True, need_weights=True)
    right, probs = dense(with_keys(other, one), x, y, causal=True)
    np.testing.assert_allclose(out, right, atol=1e-5)
    np.testing.assert_allclose(weights, probs.mean(axis=1), atol=1e-6)


def test_layers_that_are_replaced_are_checked_again():
    model, x = stack([0, 0]), draw(BATCH, LENGTH, WIDTH, dtype=np.float64)
    model(x)
    model.layers.append(stack([0]).layers[0])
    assert model(x).shape == x.shape
    assert len(model.new_cache()) == 2
    model.layers[1].self_attn = MultiHeadAttention(
        WIDTH, HEADS, query_only=True, weights_dtype="float64", rng=0
    )
    with pytest.raises(ValueError, match=r"layers\[1\].self_attn has num_kv_heads=4; expected 2, that of"):
        model(x)
    model = stack([0, 0], [0, 0])
    model.keys_from = None
    model.layers = [*model.layers, *stack([0]).layers]
    model.keys_from = [0, 0, 2]
    assert model(x).shape == x.shape
    with pytest.raises(ValueError, match="keys_from has shape"):
        model.keys_from = [0]
    assert model.keys_from == [0, 0, 2]
    with pytest.raises(
        ValueError, match="self_attn is set to a MultiHeadAttention of queries of 64 features"
    ):
        model.layers[0].self_attn = model.layers[1].self_attn


def layer(**options):
    return TransformerEncoderLayer(WIDTH, HEADS, 48, attention=options)


own, borrowing = layer(), layer(query_only=True)


def pair(keys_from=None, **options):
    return TransformerEncoder([own, layer(query_only=True, **options)], keys_from=keys_from)


first, alone = (
    r"layers\[0\].self_attn.query_only is True",
    "query_only is True, and there are no projected keys; expected ",
)
single = MultiHeadAttention(WIDTH, HEADS, query_only=True, rng=0)
x, y = draw(1, 3, WIDTH), draw(1, 4, WIDTH)
ERRORS = r"""
TransformerEncoder([borrowing])
    -> ValueError: layers\[0\].self_attn.query_only is True; expected False, to have keys
TransformerEncoder([own, own], keys_from=[0, 0])
    -> ValueError: TransformerEncoder\(\): layers\[1\].self_attn.query_only is False; expected True, for the
pair(keys_from=[0, 2]) -> ValueError: keys_from\[1\] is 2; expected 1, or a layer before it
TransformerEncoder([own, *(layer(query_only=True) for _ in range(2))], keys_from=[0, 0, 1])
    -> ValueError: keys_from\[2\] is 1, which attends the keys of 0; expected a layer that has keys
pair(keys_from=[0, -1]) -> ValueError: keys_from\[1\] is -1
pair(keys_from=[0]) -> ValueError: keys_from has shape \(1,\); expected \(2,\)
pair(keys_from=[0, 0.0]) -> TypeError: keys_from has dtype float64; expected integers
pair(num_kv_heads=2) -> ValueError: self_attn has num_kv_heads=2; expected 4, that of layers\[0\]
pair(head_dim=8) -> ValueError: head_dim=8; expected 16
pair(rope=MODERN['rope']) -> ValueError: rope=Rope\(8 pairs down to 0.000316 rad.*; expected None
layer(query_only=True, kdim=8) -> ValueError: kdim is 8; expected None, as query_only makes no keys
layer(query_only=1) -> TypeError: query_only is 1; expected True or False
TransformerDecoderLayer(WIDTH, HEADS, cross_attention={'query_only': True})
    -> ValueError: cross_attention has query_only; expected it in attention
Transformer(WIDTH, HEADS, attention={'query_only': True})
    -> ValueError: layers\[0\].self_attn.query_only is True
randomized(borrowing)(x) -> ValueError: query_only is True, and there are no projected keys; expected
single(x, y) -> ValueError: query_only is True, and there are no projected keys; expected keys_values
single(x, cache=KVCache())
    -> ValueError: query_only is True, and there are no projected keys; expected keys_values
single.project_keys_values(x) -> ValueError: query_only is True; expected a layer with keys
randomized(pair())(x, cache=stack([0, 1]).new_cache())
    -> ValueError: cache is for 2 layers; expected 1, as new_cache
"""


@refused(ERRORS)
def test_errors(code, error):
    assert_refused(code, error, **globals())


def test_ropes_are_alike_by_their_frequencies():
    one, same, other = (
        Rope(rope_frequencies(16)),
        Rope(rope_frequencies(16)),
        Rope(rope_frequencies(16, base=99.0)),
    )
    assert one == same != other
    assert hash(one) == hash(same)
    assert one != Rope(rope_frequencies(16), interleaved=True)
    TransformerEncoder([layer(rope=one), layer(query_only=True, rope=same)])
    with pytest.raises(
        ValueError, match=r"8 pairs down to 0.0179 radians.*expected Rope\(8 pairs down to 0.000316 rad"
    ):
        TransformerEncoder([layer(rope=one), layer(query_only=True, rope=other)])


def test_sources_may_change_and_each_layer_has_its_own_cache():
    sources = [0, 1, 0]
    model = stack(sources, sources)
    x = draw(BATCH, LENGTH, WIDTH, dtype=np.float64)
    called(model, x)
    sources[2] = 1
    expected = called(TransformerEncoder(model.layers, model.norm, keys_from=[0, 1, 1]), x)
    assert_same_bits(called(model, x), expected)
    caches = model.new_cache()
    with pytest.raises(ValueError, match="cache has one cache for several layers; expected one for each"):
        called(model, x, cache=[caches[0]] * 2)
    assert caches[0].length == 0
