"""State dicts, safetensors files and generators: how layers get their parameters, and what is refused."""

import ml_dtypes
import numpy as np
import pytest
from layer_oracle import (
    BATCH,
    HEADS,
    LENGTH,
    WIDTH,
    draw,
    randomized,
)
from safetensors.numpy import save_file

from fastattn import layers


def every_layer(dtype="float32"):
    heads = {"num_kv_heads": 2, "qk_norm": True, "output_gate": True, "sinks": True, "add_bias_kv": True}
    return [
        layers.Linear(20, 33, weights_dtype=dtype),
        layers.LayerNorm(20, weights_dtype=dtype),
        layers.RMSNorm(20, weights_dtype=dtype),
        layers.FeedForward(20, 45, weights_dtype=dtype),
        layers.FeedForward(20, 45, "swiglu", bias=False, weights_dtype=dtype),
        layers.MultiHeadAttention(36, 4, weights_dtype=dtype, **heads),
        layers.MultiHeadAttention(36, 4, kdim=20, vdim=7, bias=False, weights_dtype=dtype),
        layers.TransformerEncoderLayer(
            36, 4, 40, "geglu", norm="rms_norm", weights_dtype=dtype, attention=heads
        ),
        layers.Transformer(36, 4, 1, 2, 40, weights_dtype=dtype),
    ]


# How much a number may change when it is stored, as a share of the largest of its row.
ROUNDING = {"bfloat16": 2**-8, "int8": 0.5001 / 127, "int4": 1.001 / 8, "uint4": 1.01 / 15, "nf4": 0.153}
ROUNDING |= {"q8": 0.501 / 127, "iq4": 14.1 / 127, "fp4": 2.01 / 12}


@pytest.mark.parametrize("dtype", ["float32", "float64", *ROUNDING])
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
        bound = ROUNDING.get(dtype, 0) * abs(x).max(axis=-1, keepdims=True)
        assert (abs(saved[name] - x) <= bound).all(), name
        saved[name].fill(0)  # a copy: the layer keeps its own
    other.load_state_dict(layer.state_dict())
    for name, x in layer.state_dict().items():
        np.testing.assert_allclose(other.state_dict()[name], x, rtol=1e-6 if dtype in ROUNDING else 0)
        assert x.any()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_weights_of_few_bits_are_those_weights(dtype, implementation):
    """A layer of rounded weights computes what a float32 layer of the same values does."""
    layer = randomized(layers.TransformerEncoderLayer(WIDTH, HEADS, 96, weights_dtype=dtype))
    same = layers.TransformerEncoderLayer(WIDTH, HEADS, 96)
    same.load_state_dict(layer.state_dict())
    x = draw(BATCH, LENGTH, WIDTH)
    # With a dot product of bfloat16 pairs, what a weight meets is rounded to bfloat16, too.
    bound = 0.05 if dtype == "bfloat16" else 1e-4
    np.testing.assert_allclose(layer(x), same(x), rtol=0, atol=bound)
    assert layer.self_attn.all_maps.weight.nbytes < same.self_attn.all_maps.weight.nbytes * 0.6


def test_weights_dtype_of_a_load_is_for_all_parts():
    layer = layers.TransformerEncoderLayer(WIDTH, HEADS, 96)
    state = randomized(layer).state_dict()
    layer.load_state_dict(state, weights_dtype="float64")
    x = draw(BATCH, LENGTH, WIDTH, dtype=np.float64)
    assert layer(x).dtype == np.float64
    with pytest.raises(TypeError, match="src has dtype float32; expected float64, for weights in float64"):
        layer(x.astype(np.float32))
    layer.load_state_dict(state, weights_dtype="int8")
    assert layer.feed_forward.weight1.dtype == layer.self_attn.out_proj.packed_weight.dtype == "int8"


def test_one_error_lists_all_and_changes_nothing():
    layer = randomized(layers.TransformerEncoderLayer(36, 4, 40))
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
    layer = randomized(layers.TransformerEncoderLayer(36, 4, 40))
    state = {name: x.astype(dtype) for name, x in layer.state_dict().items()}
    save_file(
        {f"model.{name}": x for name, x in state.items()} | {"head": np.ones(3)}, tmp_path / "x.safetensors"
    )
    other = layers.TransformerEncoderLayer(36, 4, 40)
    other.load_state_dict(tmp_path / "x.safetensors", prefix="model.")
    for name, x in other.state_dict().items():
        np.testing.assert_array_equal(x, state[name].astype(np.float32))
    with pytest.raises(ValueError, match=r"prefix is '', and no name fits; expected 'model.'$"):
        other.load_state_dict(str(tmp_path / "x.safetensors"))
    run = {f"{part}.{name}": x for part in ("first", "params", "second") for name, x in state.items()}
    with pytest.raises(ValueError, match=r"expected 'params.'$"):
        other.load_state_dict(run)
    del state["norm1.weight"]
    with pytest.raises(ValueError, match=r"(?s)missing: norm1.weight \(36,\).*not known: model"):
        other.load_state_dict({f"model.{name}": x for name, x in state.items()})


def test_a_file_that_is_not_sound(tmp_path, monkeypatch):
    layer = layers.Linear(3, 4)
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


def test_a_file_that_shrinks_while_it_is_read(tmp_path, python):
    """Where a file is mapped, to touch what was cut off ends the process."""
    path = tmp_path / "x.safetensors"
    save_file({"weight": np.ones((400, 300), np.float32), "bias": np.ones(400, np.float32)}, path)
    code = f"""
import os
from fastattn.layers import Linear, _state

checked = _state.checked_state
def late(*args):
    os.truncate({str(path)!r}, 4096)
    return checked(*args)
_state.checked_state = late
try:
    Linear(300, 400).load_state_dict({str(path)!r})
except ValueError as error:
    print(error)
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert f"{path} has become shorter, and has no byte " in done.stdout


@pytest.mark.parametrize("which", range(9))
def test_a_generator_draws_the_same_again(which):
    """A seed gives what its generator gives. Without either there are no parameters, and a call says so."""
    layer = every_layer()[which]
    kind = type(layer)
    names = layer.__dataclass_fields__
    options = {n: getattr(layer, n) for n in names if names[n].init and n not in ("rng", "_")}
    one, two, other = (kind(**options, rng=rng).state_dict() for rng in (np.random.default_rng(1), 1, 2))
    for name, x in one.items():
        np.testing.assert_array_equal(two[name], x)
        if "weight" in name and x.ndim == 2:
            assert (other[name] != x).mean() > 0.9
            assert np.isfinite(x).all()
    if kind not in (layers.LayerNorm, layers.RMSNorm):
        for what in (layer.state_dict, lambda: layer(np.ones((1, 2, 36), np.float32), np.ones((1, 2, 36)))):
            with pytest.raises((ValueError, TypeError), match=r"has no parameters yet|positional"):
                what()
