"""Arguments that layers refuse when they are called and loaded, and near misses that they take."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest
from layer_oracle import BATCH, FEATURES, HEADS, LENGTH, MASK, WIDTH, X, attention_layer, draw, randomized
from refused import assert_refused, refused

from fastattn import positions
from fastattn.grad import vjp
from fastattn.layers import (
    Linear,
    MultiHeadAttention,
    Rope,
    Transformer,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

ROPE = Rope(positions.rope_frequencies(8))
TRIANGLE = np.triu(np.full((LENGTH, LENGTH), -np.inf), 1)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ">f8"], ids=str)
@pytest.mark.parametrize("x", [X, X.astype(np.float16), X.astype(np.float64)], ids=lambda x: str(x.dtype))
def test_float_masks_of_any_type(x, dtype, implementation):
    """A float64 array such as np.full returns is taken, whatever the layer computes in."""
    layer = attention_layer({}, "float64" if x.dtype == np.float64 else "float32")
    expected, _ = layer(x, is_causal=True)
    np.testing.assert_allclose(layer(x, attn_mask=TRIANGLE.astype(dtype))[0], expected, rtol=0, atol=2e-3)
    padding = np.where(np.arange(LENGTH) < 6, 0, -np.inf) * np.ones((BATCH, 1))
    both, _ = layer(x, attn_mask=TRIANGLE.astype(dtype), key_padding_mask=padding.astype(dtype))
    hidden, _ = layer(x, is_causal=True, key_padding_mask=padding < 0)
    np.testing.assert_allclose(both, hidden, rtol=0, atol=2e-3)


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"vdim": 5}])
def test_values_as_long_as_keys(options, implementation):
    layer = attention_layer(options)
    key, value = X[:, :4], X[:, :5, : layer.vdim or WIDTH]
    for call in (lambda: layer(X, key, value), lambda: layer.project_keys_values(key, value)):
        with pytest.raises(ValueError, match=r"MultiHeadAttention\(\): value has .*length of 4, as key"):
            call()


@pytest.mark.parametrize("options", [{}, {"add_zero_attn": True}], ids=str)
def test_a_window_may_be_an_array(options):
    layers = (attention_layer({**options, "window": window}) for window in ((2, 1), np.array([2, 1])))
    expected, got = (layer(X)[0] for layer in layers)
    np.testing.assert_array_equal(got, expected)


def test_masks_of_encoders_in_torchs_order():
    layer = randomized(TransformerEncoderLayer(WIDTH, HEADS, 96))
    masks = {"src_key_padding_mask": np.arange(LENGTH) > np.full((BATCH, 1), 6), "is_causal": True}
    for call, name in ((layer, "src_mask"), (TransformerEncoder([layer]), "mask")):
        expected = call(X, **{name: TRIANGLE[::-1].T}, **masks)
        np.testing.assert_array_equal(call(X, TRIANGLE[::-1].T, *masks.values()), expected)
        np.testing.assert_array_equal(vjp(call, X, TRIANGLE[::-1].T, *masks.values())[0], expected)


def test_a_finite_mask_stays_finite():
    """If all keys have the smallest number, all are attended alike. With -inf they would be hidden."""
    layer = attention_layer({})
    least, wide = np.finfo(np.float32).min, np.finfo(np.float64).min
    expected, _ = layer(X, attn_mask=np.full((LENGTH, LENGTH), least))
    assert abs(expected - layer.out_proj.bias_vector).max() > 0.1
    np.testing.assert_array_equal(layer(X, attn_mask=np.full((LENGTH, LENGTH), wide))[0], expected)
    mask, padding = np.full((LENGTH, LENGTH), least), np.full((BATCH, LENGTH), least)
    np.testing.assert_array_equal(layer(X, attn_mask=mask, key_padding_mask=padding)[0], expected)


CALLS = r"""
e(X, src_mask=MASK[:5]) -> ValueError: TransformerEncoderLayer\(\): src_mask has shape
e(X, src_mask=MASK.astype(int))
    -> TypeError: src_mask has dtype int64; expected bool \(True hides; src_mask == 0, where 1 attends\) or
e(X.tolist())
    -> TypeError: src has dtype float64; .*, for weights in float32 \(.* list: np.array\(src, np.float32\)\)$
e(X.astype(float))
    -> TypeError: src has dtype float64; expected float32, .* for weights in float32: src.astype\(np.fl
e(X.astype(int)) -> TypeError: src has dtype int64; .*: src.astype\(np.float32\)$
e.feed_forward(X.astype(float))
    -> TypeError: FeedForward\(\): x has dtype float64; .*: x.astype\(np.float32\)$
e.self_attn.out_proj(X.astype(float))
    -> TypeError: Linear\(\): x has dtype float64; .*: x.astype\(np.float32\)$
e(X.reshape(BATCH, LENGTH, HEADS, -1))
    -> ValueError: src has shape \(3, 11, 4, 16\); expected \(..., 64\), heads side by side$
d(X, X, MASK) -> TypeError: but 4 .*; tgt_mask and memory_mask are passed by name$
d.self_attn(X, X, X, MASK)
    -> TypeError: arguments but 5 .*; key_padding_mask and attn_mask are passed by name$
e.load_state_dict(e) -> TypeError: is of type .*Layer; expected its state_dict\(\)$
e(X, src_key_padding_mask=MASK) -> ValueError: src_key_padding_mask has shape
e(X, is_causal=1) -> TypeError: TransformerEncoderLayer\(\): is_causal is 1
e(X, lengths=[1] * 3) -> ValueError: TransformerEncoderLayer\(\): lengths is given without
d(X, X, tgt_mask=MASK[:5]) -> ValueError: TransformerDecoderLayer\(\): tgt_mask has shape
d(X, X, memory_mask=MASK[:5]) -> ValueError: memory_mask has shape
d(X, X, memory_key_padding_mask=MASK) -> ValueError: memory_key_padding_mask has shape
d(X, X[..., :5]) -> ValueError: memory has shape \(3, 11, 5\); expected \(..., 64\)
d(X, X.astype(int)) -> TypeError: memory has dtype int64
d(X) -> ValueError: memory is None; expected an array
"""


@refused(CALLS)
def test_errors_name_the_arguments_of_their_layer(code, error):
    kinds = TransformerEncoderLayer, TransformerDecoderLayer
    e, d = (randomized(kind(WIDTH, HEADS, 96)) for kind in kinds)
    assert_refused(code, error, e=e, d=d, X=X, MASK=MASK, BATCH=BATCH, LENGTH=LENGTH, HEADS=HEADS)


@pytest.mark.parametrize("options", [{}, {"vdim": 7}, {"kdim": 5, "vdim": 7}, {"num_kv_heads": 2}], ids=str)
@pytest.mark.parametrize(("batch", "length"), [(2, 0), (0, 3), (0, 0)])
def test_nothing_to_attend_from(batch, length, options, implementation):
    layer = attention_layer(options)
    x = np.ones((batch, length, WIDTH), np.float32)
    key, value = (np.ones((batch, length, options.get(name, WIDTH)), np.float32) for name in ("kdim", "vdim"))
    assert layer(x, key, value)[0].shape == x.shape
    if "kdim" not in options:
        assert layer(x, value=value)[0].shape == x.shape
    _, weights = layer(x, key, value, need_weights=True)
    assert weights.shape == (batch, length, length)


def test_a_layer_without_parameters_lacks_their_attributes():
    layer = Linear(2, 3)
    assert not hasattr(layer, "packed_weight")
    with pytest.raises(ValueError, match="Linear has no parameters yet"):
        _ = layer.packed_weight
    assert hasattr(Linear(2, 3, rng=np.random.default_rng(0)), "packed_weight")


def test_a_part_without_parameters_is_that_of_the_layer():
    heads = r"self_attn.MultiHeadAttention has no parameters yet"
    layer, x = TransformerEncoderLayer(8, 2), np.ones((1, 3, 8), np.float32)
    for call in (lambda: layer(x), lambda: vjp(layer, x), layer.state_dict):
        with pytest.raises(ValueError, match=f"^TransformerEncoderLayer's part {heads}"):
            call()
    with pytest.raises(ValueError, match=rf"^TransformerEncoder's part layers.0.{heads}"):
        TransformerEncoder([layer])(x)


CALLED = r"""
LayerNorm(16)(X[..., :15]) -> ValueError: ^LayerNorm\(\): x has shape .*15\); expected \(\.\.\., 16\)
RMSNorm(16)(X[..., :15]) -> ValueError: ^RMSNorm\(\): x has shape .*15\); expected \(\.\.\., 16\)
RMSNorm(16)('x') -> TypeError: ^RMSNorm\(\): x has dtype
LayerNorm(WIDTH)(X, residual=X[:1]) -> ValueError: ^LayerNorm\(\): residual has shape
RMSNorm(WIDTH)(X, out=X) -> ValueError: ^RMSNorm\(\): out shares memory with x
LayerNorm(16)(X, bogus=1) -> TypeError: ^LayerNorm.__call__\(\) got an unexpected .* 'bogus'
RMSNorm(16)() -> TypeError: ^RMSNorm.__call__\(\) missing 1 required .*: 'x'
TransformerEncoderLayer(16, 2, attention={'softcap': -1})
    -> ValueError: ^TransformerEncoderLayer\(\): softcap is -1
Transformer(16, 2, cross_attention={'window': 3}) -> TypeError: ^Transformer\(\): window is 3
ROPE.tables('x', 3, X.dtype) -> TypeError: ^Rope.tables\(\): offset is 'x' and length 3; expected
ROPE.tables(0, None, X.dtype) -> TypeError: ^Rope.tables\(\): offset is 0 and length None; expected
ROPE.tables(0, 3, 'float32') -> TypeError: ^Rope.tables\(\): dtype is 'float32'; expected a
"""


@refused(CALLED)
def test_errors_name_what_was_called(code, error):
    """No part of it, and no base class."""
    assert_refused(code, error, X=X, WIDTH=WIDTH, ROPE=ROPE)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("options", [*FEATURES.values(), {"kdim": 5, "vdim": 7}], ids=[*FEATURES, "kdim"])
def test_a_copy_holds_the_weights_once_and_read_only(options, again):
    layer = attention_layer(options)
    other = again(layer)
    key, value = (draw(BATCH, 5, options.get(name, WIDTH)) for name in ("kdim", "vdim"))
    np.testing.assert_array_equal(other(X, key, value)[0], layer(X, key, value)[0])
    if layer.all_maps is not None:
        np.testing.assert_array_equal(other(X)[0], layer(X)[0])
        for part in (other.query_maps, other.key_map, other.value_map, other.key_value_maps):
            assert np.shares_memory(part.weight.panels, other.all_maps.weight.panels)
        held = layer.all_maps.weight.nbytes + layer.out_proj.packed_weight.nbytes
        tables = 4096 + 2 * 64 * 12 * 12
        assert len(pickle.dumps(layer)) < 1.1 * held + tables
    for packed in (other.query_maps.weight, other.out_proj.packed_weight):
        assert not packed.panels.flags.writeable
        assert packed.panels.ctypes.data % 64 == 0
    again(MultiHeadAttention(64, 4))  # without parameters, too


def test_packed_weights_are_read_only():
    packed = Linear(2, 3, rng=np.random.default_rng(0)).packed_weight
    for name in ("panels", "out_features", "other"):
        with pytest.raises(AttributeError, match=f"read-only: pack.. another instead of setting {name}"):
            setattr(packed, name, 9)
    assert packed.out_features == 3


def test_a_stack_says_how_its_weights_are_stored():
    stack = TransformerEncoder([TransformerEncoderLayer(36, 4, 40, weights_dtype="bfloat16")])
    assert stack.weights_dtype == "bfloat16"
    stack.load_state_dict(randomized(stack).state_dict(), weights_dtype="int8")
    assert stack.weights_dtype == stack.layers[0].weights_dtype == "int8"
    model = Transformer(36, 4, 1, 1, 40)
    model.load_state_dict(randomized(model).state_dict(), weights_dtype="int8")
    assert model.weights_dtype == model.decoder.weights_dtype == "int8"


def test_loading_what_is_no_state():
    layer = TransformerEncoderLayer(36, 4, 40)
    state = randomized(layer).state_dict()
    with pytest.raises(
        TypeError, match=r"load_state_dict\(\): state_dict has the key 1; expected names of parameters"
    ):
        layer.load_state_dict({**state, 1: state["norm1.bias"]})
    masked = {**state, "norm1.bias": np.ma.masked_array(state["norm1.bias"])}
    with pytest.raises(ValueError, match=r"norm1.bias is a masked array; expected a plain one"):
        layer.load_state_dict(masked)
    with pytest.raises(ValueError, match=r"state_dict is the path '\\ud800'; expected one in UTF-8"):
        layer.load_state_dict("\ud800")


def test_files_of_other_kinds(tmp_path):
    layer = Linear(3, 4, rng=np.random.default_rng(0))
    np.savez(tmp_path / "x.npz", **layer.state_dict())
    other = Linear(3, 4)
    with pytest.raises(
        ValueError, match=r"x.npz is not a safetensors file; expected one, or what np.load\('.*x.npz'\)"
    ):
        other.load_state_dict(tmp_path / "x.npz")
    with pytest.raises(FileNotFoundError, match=r"x.pt is missing; expected .*, or what torch.load\('x.pt'"):
        other.load_state_dict("x.pt")
    (tmp_path / "x.bin").touch()
    with pytest.raises(
        ValueError, match=r"not a safetensors file; expected one, or what torch.load\('.*x.bin'"
    ):
        other.load_state_dict(tmp_path / "x.bin")
    with pytest.raises(ValueError, match="is a folder; expected a safetensors file"):
        other.load_state_dict(tmp_path)
    with np.load(tmp_path / "x.npz") as state:
        other.load_state_dict(state)
    np.testing.assert_array_equal(other.state_dict()["weight"], layer.state_dict()["weight"])


class Bfloat16Tensor:
    """An array whose conversion fails, as that of a torch tensor in bfloat16 does."""

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Got unsupported ScalarType BFloat16")


def test_a_tensor_that_numpy_cannot_read():
    layer = Linear(3, 4, bias=False)
    with pytest.raises(ValueError, match=r"weight is of type Bfloat16Tensor; .*BFloat16; .float\(\) makes"):
        layer.load_state_dict({"weight": Bfloat16Tensor()})


def test_values_of_another_type_than_keys(implementation):
    layer = MultiHeadAttention(8, 2, kdim=8, vdim=6, rng=np.random.default_rng(0))
    x, value = np.ones((1, 3, 8), np.float32), np.ones((1, 3, 6), np.float32)
    assert layer(x, x, value)[0].shape == (1, 3, 8)
    with pytest.raises(TypeError, match=r"MultiHeadAttention\(\): .*bfloat16"):
        layer(x, x, value.astype(ml_dtypes.bfloat16))
