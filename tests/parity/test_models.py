"""Models against `transformers`: tiny ones with random weights, made, saved and loaded here; no download.

One or two of each family: tests/models compares all its options with plain NumPy.
"""

import inspect
import json
import warnings
from functools import partial

import numpy as np
import pytest
import tiny_hybrid
import torch
import transformers
from model_folders import change_config
from safetensors.torch import load_file, save_file

from fastattn import models
from fastattn.models._sampling import Sampling

TOLERANCE = 1e-5
VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
}
NO_EOS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
GROUPED = {**SIZES, **NO_EOS, "num_key_value_heads": 2}
NEAR, ALL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
TRAINED = {"original_max_position_embeddings": 16}
T5 = {"vocab_size": VOCAB, "d_model": 48, "d_kv": 10, "d_ff": 80, "num_layers": 3, "num_heads": 6}
GEMMA = {**GROUPED, "sliding_window": 6, "layer_types": [NEAR, NEAR, ALL], "head_dim": 10}
DELTA = {
    **GROUPED, "layer_types": [LINEAR, ALL, LINEAR], "head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
TWO_ROPES = {
    ALL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    NEAR: {"rope_type": "default", "rope_theta": 50.0},
}
SPECIAL = {f"{name}_token_id": i for i, name in enumerate(("pad", "bos", "eos", "cls", "sep"))}
# The name of a family's config in transformers, and its sizes.
OF_TEXTS = {
    "albert": ("Albert", {**SIZES, "embedding_size": 20, "num_hidden_groups": 2}),
    "bert": ("Bert", SIZES),
    "camembert": ("Camembert", SIZES),
    "deberta-v3": ("DebertaV2", {
        **SIZES, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False,
    }),
    "distilbert": ("DistilBert", {
        "vocab_size": VOCAB, "dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 6,
    }),
    "embedding-gemma2": ("EmbeddingGemma2Text", {
        **GROUPED, "num_hidden_layers": 4, "layer_types": [NEAR, ALL] * 2, "head_dim": 8, "embedding_dim": 36,
        "global_head_dim": 16, "num_global_key_value_heads": 1, "sliding_window": 3,
        "hidden_size_per_layer_input": 12,
    }),
    "eurobert": ("EuroBert", {**GROUPED, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "gemma3": ("Gemma3Text", GEMMA),
    "gte": ("Gte", SIZES),
    "modernbert": ("ModernBert", {**SIZES, **SPECIAL, "local_attention": 6}),
    "mpnet": ("MPNet", {**SIZES, "max_position_embeddings": 200}),
    "mt5": ("MT5", T5),
    "nomic": ("NomicBert", SIZES),
    "roberta": ("Roberta", SIZES),
    "t5": ("T5", T5),
    "xlm-roberta": ("XLMRoberta", SIZES),
}  # fmt: skip
OF_TOKENS = {
    "gemma2": ("Gemma2", {  # caps that scores and logits reach
        **GROUPED, "head_dim": 10, "sliding_window": 6, "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 8.0,
    }),
    "gemma3": ("Gemma3Text", {**GEMMA, "tie_word_embeddings": False}),
    "gemma4": ("Gemma4Text", {  # heads of 8 and 16; the last three layers attend the keys of earlier ones
        **GROUPED, "layer_types": [NEAR, ALL, NEAR, NEAR, NEAR, ALL], "num_hidden_layers": 6,
        "num_attention_heads": 4, "head_dim": 8, "global_head_dim": 16, "num_kv_shared_layers": 3,
        "sliding_window": 6, "hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": VOCAB + 3,
        "final_logit_softcapping": 8.0,
    }),
    "gpt2": ("GPT2", {
        "vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64, **NO_EOS,
    }),
    "gpt-oss": ("GptOss", {  # a small bound, which values reach
        **GROUPED, "head_dim": 8, "sliding_window": 5, "num_local_experts": 6, "num_experts_per_tok": 3,
        "swiglu_limit": 0.6,
    }),
    "granite": ("Granite", {
        **GROUPED, "embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.22,
        "logits_scaling": 3.0,
    }),
    "granite-hybrid": ("GraniteMoeHybrid", {
        **GROUPED, "layer_types": [LINEAR, ALL, LINEAR], "num_local_experts": 0, "mamba_d_state": 16,
        "shared_intermediate_size": 40, "mamba_n_heads": 8, "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 0.6,
    }),
    "lfm2": ("Lfm2", {**GROUPED, "layer_types": ["conv", ALL, "conv"], "block_auto_adjust_ff_dim": False}),
    "llama": ("Llama", GROUPED),
    "ministral": ("Ministral", {
        **GROUPED, "layer_types": [NEAR, ALL, NEAR], "head_dim": 8, "sliding_window": 5,
    }),
    "ministral3": ("Ministral3", {  # queries that grow within a text: it was trained for few positions
        **GROUPED, "head_dim": 16, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 8,
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
        },
    }),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": 5}),
    "mixtral": ("Mixtral", {**GROUPED, "num_local_experts": 5}),
    "olmo2": ("Olmo2", GROUPED),
    "olmo3": ("Olmo3", {**GROUPED, "num_hidden_layers": 4, "sliding_window": 5}),
    "phi3": ("Phi3", GROUPED),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 16}),
    "qwen3-moe": ("Qwen3Moe", {**GROUPED, **EXPERTS, "head_dim": 8}),
    "qwen3-next": ("Qwen3Next", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 24}),
    "qwen3.5": ("Qwen3_5Text", DELTA),
    "qwen3.5-moe": ("Qwen3_5MoeText", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 24}),
    "smollm3": ("SmolLM3", {**GROUPED, "num_hidden_layers": 5}),
}  # fmt: skip


def configured(name, sizes, kind, **changes):
    config = getattr(transformers, f"{name}Config")(**sizes, **changes)
    if name == "Gemma2":  # the one implementation that caps scores
        config._attn_implementation = "eager"
    names = f"{name}{kind}", f"{name.removesuffix('Text')}{kind}", f"{name}LMHeadModel"
    made = next(getattr(transformers, each) for each in names if hasattr(transformers, each))
    pools = "add_pooling_layer" in inspect.signature(made).parameters
    return made(config, **({"add_pooling_layer": False} if pools else {}))


def encoder(family, **changes):
    name, sizes = OF_TEXTS[family]
    return configured(name, {**sizes, **changes}, "EncoderModel" if name.endswith("T5") else "Model")


def decoder(family, kind="ForCausalLM", **changes):
    name, sizes = OF_TOKENS[family]
    return configured(name, {**sizes, **changes}, kind)


def mistral3(text=None, **changes):
    """With a tower for images, which is left out; the model of a text alone."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"head_dim": 8, "image_size": 28, "patch_size": 14}
    text = {"model_type": "mistral", **GROUPED, "head_dim": 16, "sliding_window": None, **(text or {})}
    config = transformers.Mistral3Config(text_config=text, vision_config=vision, **{**NO_EOS, **changes})
    return transformers.Mistral3ForConditionalGeneration(config)


def with_tower(text, config, **vision):
    """The model of texts and images whose text model is `text`; its tower is left out."""
    name = type(text).__name__.replace("ForCausalLM", "")
    vision |= {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    whole = getattr(transformers, f"{name}Config")(
        text_config=text.config.to_dict(), vision_config=vision, **config
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(whole)
    model.model.language_model.load_state_dict(text.model.state_dict())  # with numbers that nobody draws
    return model


def whole_embedding_gemma2():
    """The model as it is with towers, without any."""
    texts = encoder("embedding-gemma2").config.to_dict()
    config = transformers.EmbeddingGemma2Config(text_config=texts, vision_config=None, audio_config=None)
    return transformers.EmbeddingGemma2Model(config)


def options(make, table):
    """Functions that make a family's model with some options, by the family and what these are."""
    return {name: partial(make, name.partition(",")[0], **changes) for name, changes in table.items()}


ENCODERS = {
    **options(encoder, {family: {} for family in OF_TEXTS}),
    **options(encoder, {
        "deberta-v3, own maps, types, positions": {
            "share_att_key": False, "norm_rel_ebd": "none", "type_vocab_size": 2,
            "position_biased_input": True,
        },
        "deberta-v3, one kind, no buckets": {
            "pos_att_type": "c2p", "position_buckets": -1, "max_relative_positions": 9,
        },
        "distilbert, sinusoidal": {"sinusoidal_pos_embds": True, "activation": "relu"},
        "embedding-gemma2, one kind": {
            "attention_bias": True, "layer_types": [ALL] * 4,
            "rope_parameters": {name: {**rope, "rope_type": "default"} for name, rope in TWO_ROPES.items()},
        },
        "eurobert, usual positions": {
            "attention_bias": True, "mlp_bias": True, "num_key_value_heads": None, "head_dim": 10,
            "rope_parameters": None,
        },
        "gemma3, not causal, odd window, scaled": {
            "use_bidirectional_attention": True, "sliding_window": 5, "query_pre_attn_scalar": 7,
            "attention_bias": True, "hidden_activation": "silu", "rope_parameters": TWO_ROPES,
        },
        "gte, no types": {
            "type_vocab_size": 0, "hidden_act": "relu", "rope_parameters": {"rope_theta": 50.0},
        },
        "modernbert, all near": {
            "layer_types": [NEAR] * 3, "attention_bias": True, "mlp_bias": True, "norm_bias": True,
        },
        "nomic, theta": {"hidden_act": "gelu", "rope_parameters": {"rope_theta": 50.0}},
        "roberta, padding is 3": {"pad_token_id": 3},
        "t5, gated, few buckets": {
            "feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 9,
        },
    }),
    "embedding-gemma2, whole": whole_embedding_gemma2,
    "e5-mistral": lambda: decoder("mistral").model,
    "llama, not causal": lambda: decoder("llama", is_causal=False).model,
    "qwen3-moe, not causal, windows": lambda: decoder(
        "qwen3-moe", is_causal=False, use_sliding_window=True, sliding_window=3
    ).model,
    "smollm3, some rotated": lambda: decoder("smollm3", no_rope_layer_interval=2).model,
    "qwen2, not causal, windows": lambda: decoder(
        "qwen2", is_causal=False, use_sliding_window=True, sliding_window=3, max_window_layers=1
    ).model,
    "qwen3-embedding": lambda: decoder("qwen3").model,
}  # fmt: skip
DECODERS = {
    **options(decoder, {family: {} for family in OF_TOKENS}),
    **options(decoder, {
        "gemma2, no caps": {
            "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True,
        },
        "gemma4, experts": {
            "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 16,
            "attention_k_eq_v": True,
        },
        "gemma4, no inputs of layers": {
            "attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0, "final_logit_softcapping": None, "tie_word_embeddings": False,
        },
        "gemma4, wide, partly rotated": {
            "use_double_wide_mlp": True, "attention_bias": True, "global_head_dim": 8, "rope_parameters": {
                ALL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 500.0},
                NEAR: {"rope_type": "default", "rope_theta": 50.0},
            },
        },
        "gpt2, inverse scale, untied": {
            "scale_attn_by_inverse_layer_idx": True, "n_inner": 50, "tie_word_embeddings": False,
        },
        "gpt-oss, no window": {
            "attention_bias": False, "swiglu_limit": 7.0, "layer_types": [ALL] * 3,
            "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
        },
        "granite-hybrid, rotary, groups": {
            "position_embedding_type": "rope", "mamba_n_groups": 2, "mamba_conv_bias": False,
            "attention_bias": True,
        },
        "granite-hybrid, experts": {
            "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24, "head_dim": 12,
        },
        "lfm2, adjusted": {
            "conv_L_cache": 4, "tie_word_embeddings": False, "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.4,
        },
        "llama, one key head, tied, biased": {
            "num_key_value_heads": 1, "head_dim": 10, "tie_word_embeddings": True, "attention_bias": True,
            "mlp_bias": True,
        },
        "ministral3, usual positions, window": {"rope_parameters": None, "sliding_window": 5},
        "mixtral, window": {"sliding_window": 5, "num_experts_per_tok": 3, "head_dim": 16},
        "olmo3, scaled": {"layer_types": [ALL, NEAR] * 2, "rope_parameters": {
            ALL: {"rope_type": "yarn", "factor": 8.0, "rope_theta": 500.0, **TRAINED},
            NEAR: {"rope_type": "default", "rope_theta": 500.0},
        }},
        "phi3, window, partly rotated": {
            "head_dim": 16, "sliding_window": 5,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75},
        },
        "qwen2, window in upper layers": {
            "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
        "qwen3-moe, normalised, window": {
            "norm_topk_prob": True, "attention_bias": True, "use_sliding_window": True, "sliding_window": 3,
        },
        "qwen3-next, weights not normalised": {
            "norm_topk_prob": False, "attention_bias": True, "num_hidden_layers": 4, "layer_types": None,
        },
        "qwen3.5, half rotated": {
            "attention_bias": True, "tie_word_embeddings": True, "linear_num_key_heads": 1,
            "linear_conv_kernel_dim": 3, "partial_rotary_factor": 0.5,
        },
        "smollm3, some rotated": {"no_rope_layers": [0, 1, 0, 1, 1], "tie_word_embeddings": False},
    }),
    "gemma3, with tower": lambda: with_tower(
        decoder("gemma3"), {"mm_tokens_per_image": 4, "tie_word_embeddings": False}, image_size=28,
        patch_size=14,
    ),
    "gemma4, with tower": lambda: with_tower(
        decoder("gemma4"), {}, num_key_value_heads=2, head_dim=8, patch_size=14, position_embedding_size=16
    ),
    "mistral3, of ministral3": lambda: mistral3({"model_type": "ministral3", "sliding_window": 5}),
}  # fmt: skip
# Not padded: transformers takes biases of padding on the left for inputs of the tokens after it, and forgets
# limits of steps after the prompt.
UNPADDED = options(decoder, {
    "lfm2, biased": {"conv_bias": True},
    "granite-hybrid, limits of steps": {
        "time_step_limit": (0.3, 0.8), "mamba_proj_bias": True, "tie_word_embeddings": True,
    },
})  # fmt: skip
MODULES = [
    {"path": "", "type": "sentence_transformers.models.Transformer"},
    {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
FROM_DECODERS = (
    "Gemma3TextModel", "LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "Qwen3MoeModel",
    "SmolLM3Model",
)  # fmt: skip
NO_POSITIONS = (  # T5 has none, and the others count them from ids
    "RobertaModel", "XLMRobertaModel", "CamembertModel", "MPNetModel", "T5EncoderModel", "MT5EncoderModel"
)  # fmt: skip


def randomised(model, seed=0):
    """Draw every parameter anew: biases and norms begin as zeros and ones, which would hide an omission."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * 0.15
            is_norm = "norm" in name.lower() or ".ln_" in name
            adds = type(model).__name__.startswith(("Gemma3", "Qwen3Next", "Qwen3_5"))  # 1, by itself
            is_weight = name.endswith("weight") and (not adds or "linear_attn" in name)
            parameter.copy_(drawn + 1 if is_norm and is_weight else drawn)
        scalars = [x for name, x in model.named_buffers() if name.endswith("layer_scalar")]
        for i, scalar in enumerate(scalars):
            scalar.fill_(1.5 - i / 4)
    return model.eval()


def saved(model, folder, **options):
    with warnings.catch_warnings():  # what transformers has to say is not ours to mend
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, **options)
    if type(model).__name__ in FROM_DECODERS:
        (folder / "modules.json").write_text(json.dumps(MODULES))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    return folder


def some_ids(shape, seed=0):
    return np.random.default_rng(seed).integers(4, VOCAB, shape)  # past the padding ids


OPTIONAL = (  # keys whose defaults change no shapes
    "rms_norm_eps", "rope_theta", "rope_parameters", "sliding_window", "use_sliding_window",
    "max_window_layers", "hidden_act",
)  # fmt: skip


@pytest.mark.parametrize("family", [
    "granite", "llama", "ministral", "mistral", "mixtral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3",
    "qwen3-moe", "smollm3",
])  # fmt: skip
def test_defaults(family, tmp_path):
    """Keys that config.json lacks have transformers' defaults; tiny embeddings let the norms' eps be seen."""
    model = randomised(decoder(family))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.003)
    config = json.loads((saved(model, tmp_path) / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in OPTIONAL}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ours, ids = models.load(tmp_path), some_ids((1, 30))
    expected = theirs(torch.from_numpy(ids)).logits.detach().numpy()
    np.testing.assert_allclose(ours(ids), expected, atol=1e-5 * np.abs(expected).max())
    width = getattr(theirs.config, "sliding_window", None)
    kinds = getattr(theirs.config, "layer_types", None) or [NEAR] * theirs.config.num_hidden_layers
    assert set(ours.windows) == {(width - 1, 0) if width and kind == NEAR else None for kind in kinds}


def theirs(model, ids, mask=None, **more):
    """Run transformers in the model's type; positions are counted from the mask as `generate` does."""
    arguments = {"input_ids": torch.tensor(ids), **more}
    if mask is not None:
        arguments["attention_mask"] = torch.tensor(mask, dtype=torch.long)
        if type(model).__name__ not in NO_POSITIONS:
            arguments["position_ids"] = torch.tensor(np.maximum(np.cumsum(mask, axis=1) - 1, 0))
    with torch.no_grad():
        out = model(**arguments)
    return (out.last_hidden_state if "last_hidden_state" in out else out.logits).numpy()


def exactly(model, folder, ids, mask=None):
    """Results in float64: of transformers, but for delta rules, which it computes in float32 always."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] not in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        return theirs(model.double(), ids, mask)
    config |= config["rope_parameters"]
    tensors = {name: x.double().numpy() for name, x in load_file(folder / "model.safetensors").items()}
    logits = np.zeros((*ids.shape, VOCAB))
    for row, out, counts in zip(ids, logits, np.ones_like(ids) if mask is None else mask, strict=True):
        out[counts == 1] = tiny_hybrid.result(config["model_type"], config, tensors, row[counts == 1])
    return logits


def require_close(got, expected, mask=None, exact=None):
    """To a bound or, where a function gives `exact` results, 4 times as far from these as the expected ones.

    Norms of heads enlarge the rounding of small results.
    """
    assert got.shape == expected.shape
    assert np.abs(expected).mean() > 0.1, "a result next to nothing shows nothing"
    counted = np.s_[:] if mask is None else mask.astype(bool)
    largest = np.abs(got - expected)[counted].max()
    bound = TOLERANCE * max(1, np.abs(expected).max())
    if exact is not None and not largest < bound:
        exact = exact()
        own = np.abs(expected - exact)[counted].max()
        assert own < 10 * bound
        largest = np.abs(got - exact)[counted].max()
        bound = max(bound, 4 * own)
    assert largest < bound, f"largest difference {largest:.2e}, bound {bound:.2e}"


def padded(side):
    """Lengths from 1 to 12 in one batch."""
    lengths = np.array([12, 1, 7, 11])
    index = np.arange(12)
    mask = index >= 12 - lengths[:, None] if side == "left" else index < lengths[:, None]
    return some_ids((4, 12)) * mask, mask.astype(np.int64)


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS, *UNPADDED])
def test_results(name, side, tmp_path):
    if name in UNPADDED and side is not None:
        return
    model = randomised({**ENCODERS, **DECODERS, **UNPADDED}[name]())
    ids, mask = padded(side) if side else (some_ids((2, 23)), None)
    if side and type(model).__name__ in NO_POSITIONS:
        ids[mask == 0] = model.config.pad_token_id
    got = models.load(saved(model, tmp_path))(ids, mask)
    require_close(got, theirs(model, ids, mask), mask, lambda: exactly(model, tmp_path, ids, mask))


TIED = {  # whose table another tensor of the file is, by these names
    "mistral3": (mistral3, "lm_head.weight"),
    "t5": (partial(encoder, "t5"), "encoder.embed_tokens.weight"),
    **{
        name: (partial(decoder, name), "lm_head.weight")
        for name in ("gpt2", "llama", "granite", "lfm2", "olmo2", "qwen3-moe", "smollm3", "qwen3.5")
    },
    "gemma3": (partial(decoder, "gemma3", "ForCausalLM"), "lm_head.weight"),
}


@pytest.mark.parametrize("there", ["another", "equal", "alone"])
@pytest.mark.parametrize("name", TIED)
def test_tied_to_another_tensor(name, there, tmp_path):
    """The file counts, not config.json, which need not say it, either."""
    make, other = TIED[name]
    model = randomised(make(tie_word_embeddings=True))
    path = saved(model, tmp_path) / "model.safetensors"
    tensors = load_file(path)
    (table,) = (
        key for key in tensors if key.endswith(("embed_tokens.weight", "wte.weight", "shared.weight"))
    )
    tensors[other] = torch.randn(tensors[table].shape) if there == "another" else tensors[table].clone()
    if there == "alone":
        del tensors[table]
    save_file(tensors, path, {"format": "pt"})
    if type(model.config)().tie_word_embeddings:
        change_config(tmp_path, tie_word_embeddings=None)
    expected = type(model).from_pretrained(tmp_path).eval()
    ids = some_ids((2, 9))
    got = models.load(tmp_path)
    require_close(got(ids), theirs(expected, ids))
    models.save(got, tmp_path / "new")
    require_close(models.load(tmp_path / "new")(ids), theirs(expected, ids))
    if name != "mistral3":  # without its tower
        require_close(theirs(type(model).from_pretrained(tmp_path / "new"), ids), theirs(expected, ids))


def test_a_ministral_that_is_called_mistral(tmp_path):
    """As Ministral-8B's folder is."""
    saved(randomised(decoder("ministral")), tmp_path)
    change_config(tmp_path, model_type="mistral", architectures=["MistralForCausalLM"])
    ids = some_ids((2, 23))
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    require_close(models.load(tmp_path)(ids), theirs(expected, ids))


def test_mistral3_by_its_older_names(tmp_path):
    model = randomised(mistral3(tie_word_embeddings=False))
    saved(model, tmp_path)
    path = tmp_path / "model.safetensors"
    before = load_file(path)
    names = {
        name: f"language_model.{name.replace('language_model.', '')}"
        for name in before
        if "vision" not in name
    }
    save_file({names.get(name, name): x for name, x in before.items()}, path)
    assert any(name.startswith("language_model.model.layers.0.") for name in load_file(path))
    ids = some_ids((2, 9))
    require_close(models.load(tmp_path)(ids), theirs(model, ids))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, None, None), (0.7, 10, None), (1.3, None, 0.8), (0.9, 20, 0.5), (1.0, 1, None), (1.0, None, 0.0),
     (1.0, 500, 1.0)],
)  # fmt: skip
@pytest.mark.parametrize("more", [{}, {"min_p": 0.05}])
def test_what_may_be_drawn(temperature, top_k, top_p, more):
    """The distribution after each restriction is that of transformers."""
    scores = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    scores[:, 5] = scores[:, 9]  # a tie
    warpers = [transformers.TemperatureLogitsWarper(temperature)]
    if top_k is not None:
        warpers.append(transformers.TopKLogitsWarper(min(top_k, VOCAB)))
    if top_p is not None:
        warpers.append(transformers.TopPLogitsWarper(top_p))
    if "min_p" in more:
        warpers.append(transformers.MinPLogitsWarper(more["min_p"]))
    warped = scores
    for warper in warpers:
        warped = warper(None, warped)
    expected = warped.softmax(-1).numpy()
    sampling = Sampling({"temperature": temperature, "top_k": top_k, "top_p": top_p, **more})
    for row, wanted in zip(scores.numpy(), expected, strict=True):
        tokens, probs = sampling.candidates(row)
        got = np.zeros(VOCAB)
        got[tokens] = probs
        np.testing.assert_allclose(got, wanted, atol=1e-6)
