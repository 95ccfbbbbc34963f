"""Fields of layers: parts that fit can replace others, and nothing else can be changed."""

import copy
import pickle

import numpy as np
import pytest
from implementations import each_isa, forced

from fastattn import ops
from fastattn._args.packed import PackedLinear
from fastattn.layers import (
    FeedForward,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    RMSNorm,
    Transformer,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

PARTS = ("self_attn", "self_attn.out_proj", "feed_forward", "norm1", "norm2")
CALLS = {  # by the program of a plain layer, and part by part
    "plain": {},
    "masked": {"src_mask": np.zeros((9, 9), bool)},
    "causal": {"is_causal": True},
}


def rng():
    return np.random.default_rng(0)


def encoder(weights_dtype="float32", **options):
    return TransformerEncoderLayer(64, 4, 128, weights_dtype=weights_dtype, rng=rng(), **options)


def inputs(dtype=np.float32):
    return rng().standard_normal((2, 9, 64)).astype(dtype)


def part_of(layer, path):
    for name in path.split("."):
        layer = getattr(layer, name)
    return layer


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("path", PARTS)
@pytest.mark.parametrize(
    ("whole", "other"), [("float32", "float64"), ("float64", "float32"), ("int8", "float64")]
)
def test_a_part_that_computes_in_another_type(whole, other, path, options, implementation):
    layer, x = encoder(whole), inputs(np.float64 if whole == "float64" else np.float32)
    before = layer(x, **options)
    part = part_of(layer, path)
    held = part.state_dict()
    part.load_state_dict(held, weights_dtype=other)
    prefix = path.replace("feed_forward", "")
    with pytest.raises(TypeError, match=rf"its part {prefix}.*in {other}; expected"):
        layer(x, **options)
    part.load_state_dict(held, weights_dtype=whole)
    if whole != "int8":  # which rounds what has been rounded
        np.testing.assert_array_equal(layer(x, **options), before)


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_a_part_in_smaller_weights_of_the_same_arithmetic(options, implementation):
    layer, x = encoder(), inputs()
    before = layer(x, **options)
    layer.feed_forward.load_state_dict(layer.feed_forward.state_dict(), weights_dtype="bfloat16")
    error = np.abs(layer(x, **options) - before).max()
    assert 0 < error < 0.05


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: FeedForward(64, 128, rng=rng()), "dim_feedforward"),
        (lambda: FeedForward(64, 128, rng=rng()), "bias1"),
        (lambda: FeedForward(64, 128, rng=rng()), "weight1"),
        (lambda: FeedForward(64, 128), "weight1"),
        (lambda: LayerNorm(64), "weight_vector"),
        (lambda: LayerNorm(64), "features"),
        (lambda: RMSNorm(64), "eps"),
        (lambda: Linear(64, 64, rng=rng()), "packed_weight"),
        (lambda: Linear(64, 64, rng=rng()), "weights_dtype"),
        (lambda: MultiHeadAttention(64, 4, rng=rng()), "num_heads"),
        (lambda: MultiHeadAttention(64, 4, rng=rng()), "all_maps"),
        (lambda: MultiHeadAttention(64, 4, rng=rng()), "window"),
        (encoder, "norm_first"),
        (encoder, "d_model"),
        (lambda: Transformer(8, 2, 1, 1, 8, rng=rng()), "d_model"),
        (encoder, "no_such_field"),
    ],
)
def test_fields_cannot_be_set(make, name):
    layer = make()
    for subject in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with pytest.raises(AttributeError, match=rf"{type(layer).__name__}\.{name} cannot be set"):
            setattr(subject, name, np.ones(4))
        with pytest.raises(AttributeError, match=rf"{type(layer).__name__}\.{name} cannot be deleted"):
            delattr(subject, name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("feed_forward", lambda: FeedForward(4096, 64, rng=rng())),
        ("feed_forward", lambda: LayerNorm(64)),
        ("norm1", lambda: LayerNorm(1)),
        ("norm2", lambda: np.ones(64)),
        ("self_attn", lambda: MultiHeadAttention(32, 4, rng=rng())),
        ("self_attn", lambda: MultiHeadAttention(64, 4, kdim=32, rng=rng())),
        ("self_attn", lambda: None),
    ],
)
@pytest.mark.parametrize("kind", [TransformerEncoderLayer, TransformerDecoderLayer])
def test_parts_that_do_not_fit(kind, name, value):
    layer = kind(64, 4, 128, rng=rng())
    held = getattr(layer, name)
    with pytest.raises(ValueError, match=rf"{kind.__name__}\.{name} is set to .*; expected a "):
        setattr(layer, name, value())
    assert getattr(layer, name) is held


@pytest.mark.parametrize("norm_first", [False, True])
def test_parts_that_fit(norm_first, implementation):
    """New parts keep their own sizes and options, whatever the layer was built with."""
    layer, x = encoder(norm_first=norm_first), inputs()
    layer(x)
    replaced = TransformerEncoderLayer(
        64, 8, 300, "swiglu", norm="rms_norm", norm_first=norm_first, layer_norm_eps=1e-3, rng=rng()
    )
    for name in ("self_attn", "feed_forward", "norm1", "norm2"):
        setattr(layer, name, getattr(replaced, name))
    for options in CALLS.values():
        np.testing.assert_array_equal(layer(x, **options), replaced(x, **options))
    layer.self_attn = MultiHeadAttention(64, 4, window=(2, 0), rng=rng())
    windowed = TransformerEncoderLayer(64, 4, attention={"window": (2, 0)}, rng=rng())
    np.testing.assert_array_equal(layer.self_attn(x)[0], windowed.self_attn(x)[0])


def test_a_layer_of_a_stack_and_its_norm(implementation):
    first, second, third = encoder(), encoder(norm_first=True), encoder(activation="gelu")
    stack, x = TransformerEncoder([first, second]), inputs()
    stack.layers[1] = third
    stack.norm = LayerNorm(64)
    np.testing.assert_array_equal(stack(x), LayerNorm(64)(third(first(x))))
    stack.norm = None
    stack.layers = (second,)
    np.testing.assert_array_equal(stack(x), second(x))
    with pytest.raises(ValueError, match=r"TransformerEncoder\(\): norm.features is 3; expected 64"):
        stack.norm = LayerNorm(3)
    assert stack.norm is None
    stack.layers.append(LayerNorm(64))
    with pytest.raises(TypeError, match=r"layers\[1\] is of type LayerNorm; expected"):
        stack(x)


def test_norms_of_heads_cannot_be_changed_in_place():
    """Programs have them once for each head: a change would reach some calls only."""
    layer = MultiHeadAttention(64, 4, num_kv_heads=2, qk_norm=True, rng=rng())
    state = {name: rng().standard_normal(x.shape) for name, x in layer.state_dict().items()}
    layer.load_state_dict(state)
    for subject in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        for norm, name in ((subject.q_norm, "q_norm.weight"), (subject.k_norm, "k_norm.weight")):
            with pytest.raises(ValueError, match="read-only"):
                norm *= 3
            np.testing.assert_array_equal(norm, state[name].astype(np.float32))
            assert np.shares_memory(norm, subject.head_norms)


@each_isa
@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    "field", ["norm1.weight_vector", "feed_forward.bias1", "self_attn.out_proj.bias_vector"]
)
def test_arrays_that_shrink_in_place(isa, field, options):
    """NumPy can be made to resize an array that is in use."""
    layer, x = encoder(), inputs()
    with forced(isa):
        layer(x, **options)
        part_of(layer, field).resize(3, refcheck=False)
        with pytest.raises(ValueError, match=r"has shape \(3,\)"):
            layer(x, **options)


SIZES = {"in_features": 40, "out_features": 50, "gated": False, "dtype": "float32", "scales": None}


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"in_features": 1000}, ValueError, r"panels has shape \(2, 40, 32\).*expected \(2, 1000, 32\)"),
        ({"out_features": 65}, ValueError, "panels has shape"),
        ({"out_features": 2**62}, ValueError, "panels has shape"),
        ({"gated": True}, ValueError, "panels has shape"),
        ({"gated": np.array([1, 2])}, TypeError, "gated is an array"),
        ({"in_features": -1}, ValueError, "in_features is -1; expected at least 0"),
        ({"in_features": 40.0}, TypeError, "in_features is 40.0; expected an integer"),
        ({"dtype": "float64"}, ValueError, "panels has shape"),
        ({"dtype": "bfloat16"}, ValueError, "panels has shape"),
        (
            {"dtype": "int8", "panels": np.ones((2, 10, 32, 4), np.int8)},
            TypeError,
            "scales is of type NoneType",
        ),
        ({"dtype": np.array(["int8", "int8"])}, ValueError, "dtype is an array"),
        ({"scales": np.ones((2, 32), np.float32)}, ValueError, "scales are given; expected None for float32"),
        ({"sums": np.ones((2, 32), np.float32)}, ValueError, "sums are given; expected None for float32"),
        ({"panels": np.ones((2, 40, 32))}, ValueError, "dtype float64; expected .*float32"),
        ({"panels": np.ones((2, 32, 40), np.float32).swapaxes(1, 2)}, ValueError, "C-contiguous"),
        ({"panels": [1.0]}, TypeError, "panels is of type list"),
        ({"panels": np.ma.ones((2, 40, 32), np.float32)}, TypeError, "panels is of type MaskedArray"),
    ],
)
def test_packed_weights_made_by_hand(changes, error, match):
    panels = ops.pack(np.ones((50, 40), np.float32)).panels
    PackedLinear(**SIZES, panels=panels)
    with pytest.raises(error, match=rf"PackedLinear\(\): .*{match}"):
        PackedLinear(**{**SIZES, "panels": panels, **changes})


def test_sizes_of_packed_weights_are_plain_integers():
    panels = ops.pack(np.ones((50, 40), np.float32)).panels
    made = PackedLinear(np.int8(40), np.int8(50), np.False_, "float32", panels, None)
    assert [type(x) for x in (made.in_features, made.out_features, made.gated)] == [int, int, bool]
    np.testing.assert_array_equal(made.unpack(), np.ones((50, 40)))


def test_scales_that_are_no_numbers():
    weight = ops.pack(np.eye(3, dtype=np.float32), dtype="int8")
    scales = np.where(np.arange(32) == 1, np.inf, weight.scales).astype(np.float32)
    made = PackedLinear(3, 3, False, "int8", weight.panels, scales, weight.sums)
    np.testing.assert_array_equal(made.unpack(), [[1, 0, 0], [np.nan, np.inf, np.nan], [0, 0, 1]])


@each_isa
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int8"])
@pytest.mark.parametrize("name", ["panels", "scales", "sums"])
def test_packed_weights_whose_arrays_are_cut(isa, name, dtype):
    weight = ops.pack(np.ones((50, 40), np.float64 if dtype == "float64" else np.float32), dtype=dtype)
    if getattr(weight, name) is None:
        return
    object.__setattr__(weight, name, getattr(weight, name)[:1])
    x = np.ones((3, 40), np.float64 if dtype == "float64" else np.float32)
    with forced(isa), pytest.raises(ValueError, match=rf"{name} has shape .*; expected"):
        ops.linear(x, weight)
