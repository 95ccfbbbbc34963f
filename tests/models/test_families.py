"""Behaviour of single families of encoders, beside what all models do: see `test_results.py`."""

import numpy as np
import pytest
import tiny_gpt_oss
import tiny_models as tiny
from model_folders import refused
from tiny_tokenizers import write_tokenizer

from fastattn import models
from fastattn._args.packed import PackedLinear

IDS = [[3, 1, 4, 1, 5, 9, 2, 6]]
# Families that are others under another name, or hold them: their tests have them by that.
OF_OTHERS = {
    "camembert", "clip", "embedding_gemma2", "embedding_gemma2_text", "gemma3", "gemma4", "mistral3",
    "siglip", "xlm-roberta",
}  # fmt: skip


def test_every_family_has_a_tiny_model():
    assert set(models.MODEL_TYPES) - set(tiny.CONFIGS) == OF_OTHERS


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_decoder_with_modules_is_an_encoder(kind, tmp_path):
    """Its output layer is left out; without it, the file holds the same model."""
    weights = tiny.write(tmp_path, kind)
    assert isinstance(models.load(tmp_path), models.Decoder)
    tiny.write_modules(tmp_path, "lasttoken")
    model = models.load(tmp_path)
    assert isinstance(model, models.Encoder)
    expected = model(IDS)
    assert expected.shape == (1, 8, 24)
    bare = {name.removeprefix("model."): x for name, x in weights.items() if name != "lm_head.weight"}
    tiny.write(tmp_path, kind, bare)
    np.testing.assert_array_equal(models.load(tmp_path)(IDS), expected)


def test_an_encoder_made_of_a_decoder_may_look_ahead(tmp_path):
    """`is_causal` says so; a window is then to both sides. A decoder is causal, whatever its folder says."""
    tiny.write(tmp_path, "e5-mistral")
    results = []
    for config in ({}, {"is_causal": False}, {"is_causal": False, "sliding_window": None}):
        tiny.write(tmp_path, "e5-mistral", **config)
        model = models.load(tmp_path)
        alone = model(IDS[0][:3])
        results.append(model(IDS))
        assert (np.abs(results[-1][:, :3] - alone).max() < 1e-5) == (config == {})
    assert np.abs(results[1] - results[2]).max() > 0.01
    (tmp_path / "modules.json").unlink()
    refused(tmp_path, "'is_causal' is False; only True is supported")


def test_texts_of_an_encoder_are_cut_and_ids_are_not(tmp_path):
    tiny.write(tmp_path, "qwen3-embedding", max_position_embeddings=6)
    write_tokenizer(tmp_path)
    model = models.load(tmp_path)
    assert [len(ids) for ids in model.text.encode(["the cat sat on the mat the cat"])] == [6]
    assert model(IDS).shape == (1, 8, 24)


@pytest.mark.parametrize("kind", ["t5", "mt5"])
def test_t5_by_the_names_of_other_files(kind, tmp_path):
    """A file may have the encoder's table of tokens alone, or both, or a decoder, too."""
    weights = tiny.write(tmp_path, kind)
    expected = models.load(tmp_path)(IDS)
    table = weights.pop("shared.weight")
    tiny.write(tmp_path, kind, {**weights, "encoder.embed_tokens.weight": table})
    np.testing.assert_array_equal(models.load(tmp_path)(IDS), expected)
    more = {"encoder.embed_tokens.weight": table, "decoder.final_layer_norm.weight": np.ones(24, np.float32)}
    tiny.write(tmp_path, kind, {**weights, "shared.weight": table, **more, "lm_head.weight": table})
    np.testing.assert_array_equal(models.load(tmp_path)(IDS), expected)
    tiny.write(tmp_path, kind, weights)
    refused(tmp_path, "'shared.weight' is missing")


def test_t5_has_a_bias_for_each_distance(tmp_path):
    """Without it, a model does not know the order of tokens."""
    weights = tiny.write(tmp_path, "t5")
    turned = [IDS[0][::-1]]
    model = models.load(tmp_path)
    assert np.abs(model(turned)[:, ::-1] - model(IDS)).max() > 0.01
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    tiny.write(tmp_path, "t5", {**weights, name: np.ones_like(weights[name])})
    model = models.load(tmp_path)
    np.testing.assert_allclose(model(turned)[:, ::-1], model(IDS), atol=1e-5)


def test_the_feed_forward_of_t5(tmp_path):
    """`feed_forward_proj` names the activation, and says whether it gates."""
    weights = tiny.write(tmp_path, "mt5")
    results = []
    for named in ("gated-gelu", "gated-gelu_new", "gated-silu", "gated-relu"):
        tiny.write(tmp_path, "mt5", weights, feed_forward_proj=named)
        results.append(models.load(tmp_path)(IDS))
    np.testing.assert_array_equal(results[0], results[1])
    assert all(np.abs(results[0] - other).max() > 1e-3 for other in results[2:])
    tiny.write(tmp_path, "mt5", weights, feed_forward_proj="relu")
    refused(tmp_path, "'encoder.block.0.layer.1.DenseReluDense.wi.weight' is missing")


def test_layers_of_ministral_slide_as_they_say(tmp_path):
    weights, results = tiny.write(tmp_path, "ministral"), []
    for kinds in (["sliding"] * 2, ["full"] * 2, ["full", "sliding"]):
        tiny.write(tmp_path, "ministral", weights, layer_types=[f"{kind}_attention" for kind in kinds])
        results.append(models.load(tmp_path)(IDS))
    tiny.write(tmp_path, "ministral", weights)
    np.testing.assert_array_equal(models.load(tmp_path)(IDS), results[0])
    tiny.write(tmp_path, "ministral", weights, sliding_window=None)
    np.testing.assert_array_equal(models.load(tmp_path)(IDS), results[1])
    assert all(np.abs(results[2] - other).max() > 0.01 for other in results[:2])


def test_gemma_that_is_causal_makes_vectors_where_modules_say_so(tmp_path):
    tiny.write(tmp_path, "gemma3_text", use_bidirectional_attention=False)
    assert isinstance(models.load(tmp_path), models.Decoder)
    tiny.write_modules(tmp_path, "mean")
    model = models.load(tmp_path)
    np.testing.assert_allclose(model(IDS)[:, :5], model(IDS[0][:5]), rtol=1e-5, atol=1e-5)


def test_a_group_of_albert_is_found_as_in_transformers(tmp_path):
    """Groups are found in floating point: layer 9 of 18 is at 6.999... of 14 groups."""
    config = {**tiny.CONFIGS["albert"], "num_hidden_layers": 18, "num_hidden_groups": 14}
    weights = tiny.write(tmp_path, "albert", tiny.tensors("albert", config), **config)
    expected = tiny.result("albert", config, weights, IDS[0])
    np.testing.assert_allclose(models.load(tmp_path)(IDS)[0], expected, rtol=1e-4, atol=1e-4)


def test_layers_of_gemma_with_windows(tmp_path):
    """`layer_types` and the pattern of old files say the same; a window is half as wide to either side."""
    results = []
    for config in (
        {},
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        {"sliding_window": 4},  # as 5: two tokens to either side
        {"sliding_window": 6},
        {"sliding_window_pattern": 1},
    ):
        tiny.write(tmp_path, "gemma3_text", **config)
        results.append(models.load(tmp_path)(IDS))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])
    assert all(np.abs(results[0] - other).max() > 0.01 for other in results[3:])


def test_old_and_new_ways_to_say_rope_in_gemma(tmp_path):
    scaling = {"rope_type": "linear", "factor": 4.0}
    new = {"full_attention": {"rope_theta": 500.0, **scaling}, "sliding_attention": {"rope_theta": 50.0}}
    results = []
    for config in (
        {"rope_scaling": scaling},
        {"rope_theta": None, "rope_local_base_freq": None, "rope_parameters": new},
        {"rope_local_base_freq": None, "rope_scaling": scaling},
        {"rope_theta": None, "rope_scaling": scaling},
        {},
    ):
        tiny.write(tmp_path, "gemma3_text", **config)
        results.append(models.load(tmp_path)(IDS))
    np.testing.assert_array_equal(results[0], results[1])
    assert all(np.abs(results[0] - other).max() > 0.01 for other in results[2:])


MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}


def test_experts_in_mxfp4(tmp_path):
    """They stay as they are, and are not transposed, as others are."""
    sizes = {"hidden_size": 64, "intermediate_size": 32}
    config = {**tiny.CONFIGS["gpt_oss"], **sizes}
    blocks, numbers = tiny_gpt_oss.in_mxfp4(tiny.tensors("gpt_oss", config))
    tiny.write(tmp_path, "gpt_oss", numbers, **sizes)
    expected = models.load(tmp_path)(IDS)
    tiny.write(tmp_path, "gpt_oss", blocks, **sizes, **MXFP4)
    np.testing.assert_array_equal(models.load(tmp_path, weights_dtype="float32")(IDS), expected)
    model = models.load(tmp_path)
    assert model.weights_dtype == "file"
    np.testing.assert_allclose(model(IDS), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert {x.parameter.dtype for x in model.origin.parameters if isinstance(x.parameter, PackedLinear)} == {
        "float32",
        "fp4",
    }
    again = models.load(tmp_path, weights_dtype="float32").with_state_dict(model.state_dict())
    np.testing.assert_array_equal(again(IDS), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scales": None}, "experts.0.gate_up_proj.weight' is missing"),
        ({"scales": np.zeros((5, 64, 3), np.uint8)}, "experts.0.gate_up_proj.weight' is missing"),
        ({"blocks": np.zeros((5, 64, 2, 16), np.int8)}, "experts.0.gate_up_proj.weight' is missing"),
        ({"blocks": np.zeros((4, 64, 2, 16), np.uint8), "scales": np.zeros((4, 64, 2), np.uint8)},
         "experts.4.gate_up_proj.weight' is missing"),
        ({"scales": np.full((5, 64, 2), 255, np.uint8)}, "values that are not finite"),
    ],
)  # fmt: skip
def test_blocks_of_experts_that_do_not_fit(changes, message, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 32}
    blocks, _ = tiny_gpt_oss.in_mxfp4(tiny.tensors("gpt_oss", {**tiny.CONFIGS["gpt_oss"], **sizes}))
    for part, x in changes.items():
        name = f"model.layers.0.mlp.experts.gate_up_proj_{part}"
        blocks.pop(name)
        if x is not None:
            blocks[name] = x
    tiny.write(tmp_path, "gpt_oss", blocks, **sizes, **MXFP4)
    refused(tmp_path, message)
