"""Settings of the families of encoders in config.json, in the ways that are found on the Hub."""

import json

import numpy as np
import pytest
import tiny_models as tiny
from model_folders import refused
from tiny_models import CONFIGS, VOCAB

from fastattn import models

IDS = np.random.default_rng(0).integers(0, VOCAB, (2, 20))
OLD_NOMIC = {
    "vocab_size": VOCAB, "n_embd": 24, "n_inner": 256, "n_layer": 2, "n_head": 3, "n_positions": 32,
    "layer_norm_epsilon": 1e-5, "type_vocab_size": 2, "activation_function": "swiglu", "rotary_emb_base": 100,
    "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None, "max_trained_positions": 16, "prenorm": False, "causal": False,
    "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "use_rms_norm": False,
    "parallel_block": False,
}  # fmt: skip


def written(folder, kind, weights, config):
    """The model of exactly this config."""
    tiny.write(folder, kind, weights)
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **config}))
    return models.load(folder)


def test_distilbert_has_an_eps_of_its_own(tmp_path):
    """Transformers reads none, either."""
    weights = tiny.tensors("distilbert", CONFIGS["distilbert"])
    runs = [
        written(tmp_path, "distilbert", weights, {**CONFIGS["distilbert"], **changes})(IDS)
        for changes in ({}, {"layer_norm_eps": 0.1}, {"layer_norm_eps": "x"})
    ]
    np.testing.assert_array_equal(runs[1], runs[0])
    np.testing.assert_array_equal(runs[2], runs[0])


def test_the_activation_of_t5_is_that_of_its_feed_forward(tmp_path):
    weights = tiny.tensors("mt5", CONFIGS["mt5"])
    runs = [
        written(tmp_path, "mt5", weights, {**CONFIGS["mt5"], **changes})(IDS)
        for changes in ({}, {"hidden_act": "relu"})
    ]
    np.testing.assert_array_equal(*runs)


def test_the_thetas_of_modernbert(tmp_path):
    """Newer and older files have them in other ways; null is that of full attention."""
    config = CONFIGS["modernbert"]
    weights = tiny.tensors("modernbert", config)
    bare = {name: value for name, value in config.items() if not name.endswith("theta")}

    def run(**changes):
        return written(tmp_path, "modernbert", weights, {**bare, **changes})(IDS)

    thetas = {"full_attention": {"rope_theta": 1000.0}, "sliding_attention": {"rope_theta": 100.0}}
    expected = run(rope_parameters=thetas)
    np.testing.assert_array_equal(run(global_rope_theta=1000, local_rope_theta=100), expected)
    same = run(global_rope_theta=1000, local_rope_theta=1000)
    np.testing.assert_array_equal(run(global_rope_theta=1000, local_rope_theta=None), same)
    np.testing.assert_array_equal(run(), run(global_rope_theta=160_000, local_rope_theta=10_000))
    assert min(np.abs(x - expected).max() for x in (same, run())) > 1e-3


def test_scalings_and_windows_of_modernbert(tmp_path):
    """`rope_scaling` is of both kinds of layers; `sliding_window` is a side of the window."""
    config = CONFIGS["modernbert"]
    weights = tiny.tensors("modernbert", config)
    scaling = {"rope_type": "linear", "factor": 4.0}
    thetas = {"full_attention": 1000.0, "sliding_attention": 100.0}
    new = {kind: {"rope_theta": theta, **scaling} for kind, theta in thetas.items()}

    def run(**changes):
        return written(tmp_path, "modernbert", weights, {**config, **changes})(IDS)

    np.testing.assert_array_equal(run(rope_scaling=scaling), run(rope_parameters=new))
    np.testing.assert_array_equal(run(sliding_window=5), run(local_attention=10))
    others = run(rope_scaling=scaling), run(sliding_window=5)
    assert min(np.abs(x - run()).max() for x in others) > 1e-3


def test_nomic_with_the_keys_of_gpt2(tmp_path):
    """The inner size is rounded up to a multiple of 256."""
    new = {**CONFIGS["nomic_bert"], "intermediate_size": 256}
    weights = tiny.tensors("nomic_bert", new)
    expected = written(tmp_path, "nomic_bert", weights, new)(IDS)
    for inner in (256, 200):
        got = written(tmp_path, "nomic_bert", weights, {**OLD_NOMIC, "n_inner": inner})(IDS)
        np.testing.assert_array_equal(got, expected)


def test_nomic_with_biases(tmp_path):
    weights = tiny.tensors("nomic_bert", {**CONFIGS["nomic_bert"], "intermediate_size": 256})
    biases = {name.replace("weight", "bias"): np.zeros(len(x), np.float32)
              for name, x in weights.items() if ".attn." in name or ".mlp." in name}  # fmt: skip
    flags = {f"{name}_bias": True for name in ("qkv_proj", "mlp_fc1", "mlp_fc2")}
    expected = written(tmp_path, "nomic_bert", weights, OLD_NOMIC)(IDS)
    got = written(tmp_path, "nomic_bert", {**weights, **biases}, {**OLD_NOMIC, **flags})(IDS)
    np.testing.assert_array_equal(got, expected)
    for name in biases:
        ramp = np.linspace(0, 1, len(biases[name]), dtype=np.float32)  # norms take constants away again
        other = {**weights, **biases, name: ramp}
        moved = written(tmp_path, "nomic_bert", other, {**OLD_NOMIC, **flags})(IDS)
        assert np.abs(moved - expected).max() > 1e-2


def test_nomic_with_a_factor_changes_frequencies_past_the_trained_length(tmp_path):
    weights = tiny.tensors("nomic_bert", {**CONFIGS["nomic_bert"], "intermediate_size": 256})
    plain = written(tmp_path, "nomic_bert", weights, OLD_NOMIC)
    model = written(tmp_path, "nomic_bert", weights, {**OLD_NOMIC, "rotary_scaling_factor": 2})
    np.testing.assert_array_equal(model(IDS[:, :16]), plain(IDS[:, :16]))
    base = 100 * (2 * 20 / 16 - 1) ** (8 / 6)
    expected = written(tmp_path, "nomic_bert", weights, {**OLD_NOMIC, "rotary_emb_base": base})(IDS)
    np.testing.assert_allclose(model(IDS), expected, rtol=1e-5, atol=1e-5)
    assert np.abs(expected - plain(IDS)).max() > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prenorm": True}, "'prenorm' is True; only False is supported"),
        ({"rotary_emb_fraction": None}, "'rotary_emb_fraction' is 0.0; only 1.0 is supported"),
        ({"scale_attn_weights": False}, "'scale_attn_weights' is False; only True is supported"),
        ({"num_hidden_layers": 1}, "'num_hidden_layers' is 1; only 2 is supported"),
        ({"moe_every_n_layers": 2}, "'moe_every_n_layers' is 2; only 0 is supported"),
        ({"rotary_emb_fraction": 0.5}, "'rotary_emb_fraction' is 0.5; only 1.0 is supported"),
        ({"activation_function": "tanh"}, "'activation_function' is 'tanh'; expected one of "),
        ({"activation_function": "gelu"}, "'encoder.layers.0.mlp.fc1.weight' is missing"),
        ({"rotary_scaling_factor": -1}, "'rotary_scaling_factor' is -1; expected a number above 0"),
        ({"rotary_emb_base": 0.5}, "rotary positions: "),
    ],
)
def test_what_nomic_cannot_be(changes, message, tmp_path):
    weights = tiny.tensors("nomic_bert", {**CONFIGS["nomic_bert"], "intermediate_size": 256})
    written(tmp_path, "nomic_bert", weights, OLD_NOMIC)
    values = {"model_type": "nomic_bert", **OLD_NOMIC, **changes}
    values = {name: value for name, value in values.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(values))
    refused(tmp_path, message)
