"""Weights that are not finite: refused by name wherever they come in, whatever they are stored as."""

import re
from itertools import cycle

import ml_dtypes
import numpy as np
import pytest
import tiny_models as tiny
from tiny_models import CONFIGS

from fastattn import models, ops
from fastattn._args.weight_types import BLOCKED, WEIGHT_DTYPES
from fastattn.layers import MultiHeadAttention, TransformerDecoderLayer
from fastattn.models import ModelError

BF16 = ml_dtypes.bfloat16
TYPES = [np.float16, np.float32, np.float64, BF16, ">f2", ">f4", ">f8"]
# Beside the largest of each type: what rounds to it, and what rounds to infinity.
LARGE = [65504.0, 65519.0, 65520.0, 524159.0, 524160.0, 3.38e38, 3.3895e38, 3.396e38, 3.3962e38, 3.4028e38]
LARGE += [3.4028235677973362e38, 3.4028236e38, 1e300]
NUMBERS = [0.0, 5e-324, 1e-40, 1.0, *LARGE, np.inf, np.nan]


@np.errstate(over="ignore")
def as_stored(x, stored):
    """Round the numbers x as storing them does, and return them in float64."""
    lane = x.astype(np.float64 if stored == "float64" else np.float32)
    if stored in BLOCKED:  # by the scale of a block
        most = {"int4": 8, "q8": 127, "iq4": 127, "fp4": 12}.get(stored, 1)
        scales = (lane / np.float32(most)).astype(np.float16)
        return np.where(np.isfinite(scales), lane, scales).astype(np.float64)
    return (lane.astype(BF16) if stored == "bfloat16" else lane).astype(np.float64)


@pytest.mark.parametrize("stored", [None, *WEIGHT_DTYPES])
@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: str(np.dtype(dtype)))
def test_pack(dtype, stored):
    """What is packed is what is finite as it is stored."""
    lane = "float64" if np.dtype(dtype).itemsize == 8 else "float32"
    for number in [sign * x for x in NUMBERS for sign in (1, -1)]:
        with np.errstate(over="ignore"):
            x = np.array([[0.5, -1.0, 0.0], [2.0, number, -0.0]]).astype(dtype)
        ones = np.ones_like(x)
        if np.isfinite(as_stored(x, stored or lane)).all():
            ops.pack(x, gate=ones, dtype=stored)
            continue
        for name, given in (("weight", (x, ones)), ("gate", (ones, x))):
            with pytest.raises(
                ValueError, match=rf"^pack\(\): {name} has values that are not finite as \w+;"
            ):
                ops.pack(given[0], gate=given[1], dtype=stored)


OPTIONS = {"add_bias_kv": True, "qk_norm": True, "output_gate": True, "sinks": True}


@pytest.mark.parametrize("stored", WEIGHT_DTYPES)
def test_load_state_dict(stored):
    """Every parameter of every layer: one message lists all that are wrong, and nothing changes."""
    layer = TransformerDecoderLayer(8, 2, 12, attention=OPTIONS, rng=np.random.default_rng(0))
    before = layer.state_dict()
    for name in before:
        for wrong in (np.nan, np.inf):
            state = {key: x.copy() for key, x in before.items()}
            state[name].flat[-1] = wrong
            with pytest.raises(ValueError, match="nothing was loaded") as error:
                layer.load_state_dict(state, weights_dtype=stored)
            (line,) = str(error.value).splitlines()[1:]
            assert line.startswith(f"  {name}: values that are not finite as ")
    state["linear1.weight"] = np.full(state["linear1.weight"].shape, np.nan, BF16)
    with pytest.raises(ValueError, match="nothing was loaded") as error:
        layer.load_state_dict(state, weights_dtype=stored)
    assert len(str(error.value).splitlines()) == 3
    for name, x in layer.state_dict().items():
        np.testing.assert_array_equal(x, before[name])


def test_sinks_may_be_none(implementation):
    """A sink of -inf has no weight. In other parameters -inf is refused."""
    layer = MultiHeadAttention(8, 2, sinks=True, rng=np.random.default_rng(0))
    plain = MultiHeadAttention(8, 2)
    state = layer.state_dict()
    plain.load_state_dict({name: x for name, x in state.items() if name != "sinks"})
    layer.load_state_dict({**state, "sinks": np.array([-np.inf, -np.inf], np.float16)})
    x = np.random.default_rng(1).standard_normal((2, 5, 8), np.float32)
    np.testing.assert_allclose(layer(x)[0], plain(x)[0], atol=1e-6)
    with pytest.raises(ValueError, match=r"out_proj.bias: values that are not finite as float32, expected"):
        layer.load_state_dict({**state, "out_proj.bias": np.full(8, -np.inf)})


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("kind", CONFIGS)
def test_models(kind, dtype, tmp_path):
    """Each tensor of a model, in every type that files have."""
    weights = {name: x.astype(dtype) for name, x in tiny.tensors(kind, CONFIGS[kind]).items()}
    rng = np.random.default_rng(0)
    ways = {}, {"weights_dtype": "bfloat16"}, {"weights_dtype": "int4"}, {"dtype": "float64"}
    for name, options in zip(weights, cycle(ways), strict=False):
        bad = weights[name].copy()
        bad.flat[rng.integers(bad.size)] = rng.choice([np.nan, np.inf, -np.inf])
        tiny.write(tmp_path, kind, {**weights, name: bad})
        with pytest.raises(ModelError, match="safetensors: ") as error:
            models.load(tmp_path, **options)
        found = re.sub(r"\.\d+' has", "' has", str(error.value))  # experts are named one by one
        assert f"{name!r} has values that are not finite as" in found


@pytest.mark.parametrize("options", [{}, {"weights_dtype": "int4"}, {"dtype": "float64"}])
def test_other_tensors_of_a_model_are_no_file_s(options, tmp_path):
    tiny.write(tmp_path, "llama")
    model = models.load(tmp_path, **options)
    state = model.state_dict()
    state["model.layers.1.self_attn.v_proj.weight"][0, 0] = np.nan
    message = r"^with_state_dict\(\): 'model.layers.1.self_attn.v_proj.weight' has values that are not finite"
    with pytest.raises(ValueError, match=message):
        model.with_state_dict(state)
