"""Models against `transformers`: tiny ones with random weights, made, saved and loaded here; no download."""

import json
import warnings

import numpy as np
import pytest
import sentence_similarity as example
import tiny_hybrid
import torch
import transformers
from model_folders import change_config
from safetensors.torch import load_file, save_file
from transformers.integrations import mxfp4

from fastattn import models
from fastattn.models._sampling import Sampler, Sampling

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
GROUPED = {**SIZES, "num_key_value_heads": 2}
NO_EOS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}


def bert(**changes):
    return transformers.BertModel(transformers.BertConfig(**SIZES, **changes), add_pooling_layer=False)


def roberta(name="Roberta", **changes):
    config = getattr(transformers, f"{name}Config")(**SIZES, **changes)
    return getattr(transformers, f"{name}Model")(config, add_pooling_layer=False)


def takes_no_positions(model):
    """T5 has none, and the others count them from ids."""
    return type(model).__name__ in (
        "RobertaModel",
        "XLMRobertaModel",
        "CamembertModel",
        "MPNetModel",
        "T5EncoderModel",
        "MT5EncoderModel",
    )


def modernbert(**changes):
    special = {f"{name}_token_id": i for i, name in enumerate(("pad", "bos", "eos", "cls", "sep"))}
    config = transformers.ModernBertConfig(**SIZES, **special, local_attention=6, **changes)
    return transformers.ModernBertModel(config)


def eurobert(**changes):
    sizes = {**GROUPED, **NO_EOS, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    return transformers.EuroBertModel(transformers.EuroBertConfig(**{**sizes, **changes}))


def embedding_gemma2(**changes):
    """Layers without a window have wider heads, of fewer keys; tokens' vectors are mapped at the end."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    sizes = {**GROUPED, **NO_EOS, "num_hidden_layers": 4, "layer_types": kinds, "head_dim": 8}
    sizes |= {"global_head_dim": 16, "num_global_key_value_heads": 1, "sliding_window": 3}
    sizes |= {"hidden_size_per_layer_input": 12, "embedding_dim": 36}
    config = transformers.EmbeddingGemma2TextConfig(**{**sizes, **changes})
    model = transformers.EmbeddingGemma2TextModel(config)
    for i, layer in enumerate(model.layers):
        layer.layer_scalar.fill_(0.5 + 0.2 * i)
    return model


def whole_embedding_gemma2():
    """The model as it is with towers, without any."""
    texts = embedding_gemma2().config.to_dict()
    config = transformers.EmbeddingGemma2Config(text_config=texts, vision_config=None, audio_config=None)
    return transformers.EmbeddingGemma2Model(config)


def distilbert(**changes):
    sizes = {"vocab_size": VOCAB, "dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 6}
    return transformers.DistilBertModel(transformers.DistilBertConfig(**sizes, **changes))


def mpnet(**changes):
    config = transformers.MPNetConfig(**{**SIZES, "max_position_embeddings": 200}, **changes)
    return transformers.MPNetModel(config, add_pooling_layer=False)


def nomic(**changes):
    return transformers.NomicBertModel(transformers.NomicBertConfig(**SIZES, **changes))


def gte(**changes):
    return transformers.GteModel(transformers.GteConfig(**SIZES, **changes))


def albert(**changes):
    config = transformers.AlbertConfig(**SIZES, embedding_size=20, **changes)
    return transformers.AlbertModel(config, add_pooling_layer=False)


def deberta(**changes):
    third = {
        "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False,
    }  # fmt: skip
    return transformers.DebertaV2Model(transformers.DebertaV2Config(**{**SIZES, **third, **changes}))


def gpt2(**changes):
    sizes = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **NO_EOS, **changes))


def llama(sizes=SIZES, **changes):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **NO_EOS, **changes}))


def mistral(**changes):
    return transformers.MistralForCausalLM(transformers.MistralConfig(**GROUPED, **NO_EOS, **changes))


def qwen2(**changes):
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**GROUPED, **NO_EOS, **changes))


def qwen3(**changes):
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GROUPED, **NO_EOS, **changes))


def qwen3_moe(**changes):
    experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "head_dim": 8}
    config = transformers.Qwen3MoeConfig(**{**GROUPED, **NO_EOS, **experts, **changes})
    return transformers.Qwen3MoeForCausalLM(config)


def mixtral(**changes):
    config = transformers.MixtralConfig(**{**GROUPED, **NO_EOS, "num_local_experts": 5, **changes})
    return transformers.MixtralForCausalLM(config)


def ministral(**changes):
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = {**GROUPED, "layer_types": kinds, "head_dim": 8, "sliding_window": 5}
    config = transformers.MinistralConfig(**{**sizes, **NO_EOS, **changes})
    return transformers.MinistralForCausalLM(config)


def ministral3(**changes):
    """Queries that grow within a text: it was trained for few positions."""
    rope = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 8}
    rope |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
    sizes = {**GROUPED, "head_dim": 16, "rope_parameters": rope}
    config = transformers.Ministral3Config(**{**sizes, **NO_EOS, **changes})
    return transformers.Ministral3ForCausalLM(config)


def mistral3(text=None, **changes):
    """With a tower for images, which is left out; the model of a text alone."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"head_dim": 8, "image_size": 28, "patch_size": 14}
    text = {"model_type": "mistral", **GROUPED, "head_dim": 16, "sliding_window": None, **(text or {})}
    config = transformers.Mistral3Config(text_config=text, vision_config=vision, **{**NO_EOS, **changes})
    return transformers.Mistral3ForConditionalGeneration(config)


def phi3(**changes):
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**{**GROUPED, **NO_EOS, **changes}))


def gpt_oss(**changes):
    """A small bound, which values reach."""
    sizes = {"head_dim": 8, "sliding_window": 5, "num_local_experts": 6, "num_experts_per_tok": 3}
    config = transformers.GptOssConfig(**{**GROUPED, **NO_EOS, **sizes, "swiglu_limit": 0.6, **changes})
    return transformers.GptOssForCausalLM(config)


def granite(**changes):
    """Multipliers as those of Granite 3, with scores that differ from each other."""
    each = {"embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.22}
    config = transformers.GraniteConfig(**{**GROUPED, **NO_EOS, **each, "logits_scaling": 3.0, **changes})
    return transformers.GraniteForCausalLM(config)


def olmo2(**changes):
    return transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**{**GROUPED, **NO_EOS, **changes}))


def olmo3(**changes):
    """Four layers, of which the last has no window."""
    sizes = {**GROUPED, "num_hidden_layers": 4, "sliding_window": 5}
    config = transformers.Olmo3Config(**{**sizes, **NO_EOS, **changes})
    return transformers.Olmo3ForCausalLM(config)


def smollm3(**changes):
    return transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**{**GROUPED, **NO_EOS, **changes}))


def t5(name="T5", **changes):
    sizes = {"vocab_size": VOCAB, "d_model": 48, "d_kv": 10, "d_ff": 80, "num_layers": 3, "num_heads": 6}
    config = getattr(transformers, f"{name}Config")(**{**sizes, **changes})
    return getattr(transformers, f"{name}EncoderModel")(config)


def gemma3(kind="Gemma3TextModel", **changes):
    """Three layers: two with windows, then one without. Norms multiply by 1 + weight."""
    sizes = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "head_dim": 10}
    config = transformers.Gemma3TextConfig(**{**GROUPED, "sliding_window": 6, **sizes, **NO_EOS, **changes})
    return getattr(transformers, kind)(config)


NEAR, ALL = "sliding_attention", "full_attention"


def gemma4(**changes):
    """Two kinds of layers, with heads of 8 and 16; the last three attend the keys of earlier ones."""
    sizes = {
        "layer_types": [NEAR, ALL, NEAR, NEAR, NEAR, ALL], "num_hidden_layers": 6, "num_attention_heads": 4,
        "head_dim": 8, "global_head_dim": 16, "num_kv_shared_layers": 3, "sliding_window": 6,
        "hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": VOCAB + 3,
        "final_logit_softcapping": 8.0,
    }  # fmt: skip
    config = transformers.Gemma4TextConfig(**{**GROUPED, **sizes, **NO_EOS, **changes})
    model = transformers.Gemma4ForCausalLM(config)
    for i, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(1.5 - i / 4)
    return model


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


def gemma2(**changes):
    """Caps that scores and logits reach. `eager` is the one implementation that caps scores."""
    sizes = {"head_dim": 10, "sliding_window": 6, "query_pre_attn_scalar": 12, "num_hidden_layers": 3}
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 8.0}
    config = transformers.Gemma2Config(**{**GROUPED, **sizes, **caps, **NO_EOS, **changes})
    config._attn_implementation = "eager"
    return transformers.Gemma2ForCausalLM(config)


def lfm2(**changes):
    kinds = ["conv", "full_attention", "conv"]
    sizes = {**GROUPED, "layer_types": kinds, "block_auto_adjust_ff_dim": False}
    return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**{**sizes, **NO_EOS, **changes}))


def granite_hybrid(**changes):
    sizes = {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_local_experts": 0,
        "shared_intermediate_size": 40, "mamba_n_heads": 8, "mamba_d_state": 16, "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 0.6,
    }  # fmt: skip
    config = transformers.GraniteMoeHybridConfig(**{**GROUPED, **sizes, **NO_EOS, **changes})
    return transformers.GraniteMoeHybridForCausalLM(config)


LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}  # fmt: skip


OF_EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip


def qwen3_next(**changes):
    config = transformers.Qwen3NextConfig(**{**GROUPED, **LINEAR, **OF_EXPERTS, **NO_EOS, **changes})
    return transformers.Qwen3NextForCausalLM(config)


def qwen3_5_moe(**changes):
    config = transformers.Qwen3_5MoeTextConfig(**{**GROUPED, **LINEAR, **OF_EXPERTS, **NO_EOS, **changes})
    return transformers.Qwen3_5MoeForCausalLM(config)


def qwen3_5(**changes):
    config = transformers.Qwen3_5TextConfig(**{**GROUPED, **LINEAR, **NO_EOS, **changes})
    return transformers.Qwen3_5ForCausalLM(config)


FROM_DECODERS = (
    transformers.Gemma3TextModel,
    transformers.LlamaModel,
    transformers.MistralModel,
    transformers.Qwen2Model,
    transformers.Qwen3Model,
)
MODULES = [
    {"path": "", "type": "sentence_transformers.models.Transformer"},
    {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


def from_decoder(make, **changes):
    """A family's model without its output layer, which sentence-transformers' folders hold."""
    return lambda: make(**changes).model


ENCODERS = {
    "bert": bert,
    "bert-relu-one-layer": lambda: bert(hidden_act="relu"),
    "roberta": roberta,
    "roberta-padding-id-3": lambda: roberta(pad_token_id=3),
    "xlm-roberta": lambda: roberta("XLMRoberta"),
    "camembert": lambda: roberta("Camembert"),
    "qwen3-embedding": from_decoder(qwen3, head_dim=16),
    "e5-mistral": from_decoder(mistral, sliding_window=5),
    "llama-not-causal": from_decoder(llama, is_causal=False),
    "qwen2-not-causal-windows": from_decoder(
        qwen2, is_causal=False, use_sliding_window=True, sliding_window=3, max_window_layers=1
    ),
    "t5": t5,
    "t5-gated-few-buckets": lambda: t5(
        feed_forward_proj="gated-gelu", relative_attention_num_buckets=8, relative_attention_max_distance=9
    ),
    "t5-gated-silu": lambda: t5(feed_forward_proj="gated-silu"),
    "mt5": lambda: t5("MT5"),
    "embedding-gemma": lambda: gemma3(use_bidirectional_attention=True),
    "embedding-gemma-odd-window-scaled": lambda: gemma3(
        use_bidirectional_attention=True,
        sliding_window=5,
        query_pre_attn_scalar=7,
        attention_bias=True,
        hidden_activation="silu",
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "gemma3-causal": gemma3,
    "distilbert": distilbert,
    "distilbert-sinusoidal-relu": lambda: distilbert(sinusoidal_pos_embds=True, activation="relu"),
    "mpnet": mpnet,
    "mpnet-relu": lambda: mpnet(hidden_act="relu"),
    "nomic": nomic,
    "nomic-gelu-theta": lambda: nomic(hidden_act="gelu", rope_parameters={"rope_theta": 50.0}),
    "gte": gte,
    "gte-no-types-relu-theta": lambda: gte(
        type_vocab_size=0, hidden_act="relu", rope_parameters={"rope_theta": 50.0}
    ),
    "albert": albert,
    "albert-two-groups-gelu": lambda: albert(num_hidden_groups=2, hidden_act="gelu"),
    "deberta-v3": deberta,
    "deberta-own-maps-types-positions": lambda: deberta(
        share_att_key=False, norm_rel_ebd="none", type_vocab_size=2, position_biased_input=True
    ),
    "deberta-one-kind-no-buckets": lambda: deberta(
        pos_att_type="c2p", position_buckets=-1, max_relative_positions=9
    ),
    "deberta-other-kind": lambda: deberta(share_att_key=False, pos_att_type="p2c", max_relative_positions=20),
    "modernbert": modernbert,
    "modernbert-biased": lambda: modernbert(attention_bias=True, mlp_bias=True, norm_bias=True),
    "embedding-gemma2": embedding_gemma2,
    "embedding-gemma2-whole": whole_embedding_gemma2,
    "embedding-gemma2-biased-one-kind": lambda: embedding_gemma2(
        attention_bias=True,
        layer_types=["full_attention"] * 4,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "eurobert": eurobert,
    "eurobert-biased-usual-positions": lambda: eurobert(
        attention_bias=True, mlp_bias=True, num_key_value_heads=None, head_dim=10, rope_parameters=None
    ),
    "modernbert-all-sliding": lambda: modernbert(layer_types=["sliding_attention"] * 3),
}
DECODERS = {
    "gpt2": gpt2,
    "gpt2-inverse-layer-scale": lambda: gpt2(
        scale_attn_by_inverse_layer_idx=True, n_inner=50, activation_function="gelu"
    ),
    "gpt2-untied-unscaled": lambda: gpt2(tie_word_embeddings=False, scale_attn_weights=False),
    "gemma2": gemma2,
    "gemma2-without-caps": lambda: gemma2(
        attn_logit_softcapping=None, final_logit_softcapping=None, attention_bias=True
    ),
    "gemma3": lambda: gemma3("Gemma3ForCausalLM", tie_word_embeddings=False),
    "gemma3-with-tower": lambda: with_tower(
        gemma3("Gemma3ForCausalLM", tie_word_embeddings=False),
        {"mm_tokens_per_image": 4, "tie_word_embeddings": False},
        image_size=28,
        patch_size=14,
    ),
    "gemma4": gemma4,
    "gemma4-with-tower": lambda: with_tower(
        gemma4(), {}, num_key_value_heads=2, head_dim=8, patch_size=14, position_embedding_size=16
    ),
    "gemma4-experts": lambda: gemma4(
        enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=16, attention_k_eq_v=True
    ),
    "gemma4-alike-no-inputs": lambda: gemma4(
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
        final_logit_softcapping=None,
        tie_word_embeddings=False,
    ),
    "gemma4-wide-biased": lambda: gemma4(
        use_double_wide_mlp=True,
        attention_bias=True,
        global_head_dim=8,
        rope_parameters={
            ALL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 500.0},
            NEAR: {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "gpt-oss": gpt_oss,
    "gpt-oss-unbiased-usual-bound": lambda: gpt_oss(
        attention_bias=False,
        swiglu_limit=7.0,
        layer_types=["full_attention"] * 3,
        rope_parameters={"rope_theta": 500.0, "rope_type": "default"},
    ),
    "granite": granite,
    "granite-biased-tied-usual": lambda: granite(
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        embedding_multiplier=1.0,
        attention_multiplier=0.3,
        residual_multiplier=1.0,
        logits_scaling=1.0,
    ),
    "granite-hybrid": granite_hybrid,
    "granite-hybrid-rotary-groups": lambda: granite_hybrid(
        position_embedding_type="rope", mamba_n_groups=2, mamba_conv_bias=False, attention_bias=True
    ),
    "granite-hybrid-experts": lambda: granite_hybrid(
        num_local_experts=6, num_experts_per_tok=3, intermediate_size=24, head_dim=12
    ),
    "lfm2": lfm2,
    "lfm2-untied-adjusted": lambda: lfm2(
        conv_L_cache=4,
        tie_word_embeddings=False,
        block_auto_adjust_ff_dim=True,
        block_multiple_of=32,
        block_ffn_dim_multiplier=1.4,
    ),
    "llama": llama,
    "llama-grouped": lambda: llama(GROUPED),
    "llama-one-key-head-tied-biased": lambda: llama(
        {**SIZES, "num_key_value_heads": 1, "head_dim": 10},
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
    ),
    "ministral": ministral,
    "ministral3": ministral3,
    "mistral3-untied": lambda: mistral3(tie_word_embeddings=False),
    "mistral3-of-ministral3": lambda: mistral3({"model_type": "ministral3", "sliding_window": 5}),
    "ministral3-usual-window": lambda: ministral3(rope_parameters=None, sliding_window=5),
    "mixtral": mixtral,
    "mixtral-window": lambda: mixtral(sliding_window=5, num_experts_per_tok=3, head_dim=16),
    "mistral-window": lambda: mistral(sliding_window=5),
    "mistral-no-window": lambda: mistral(sliding_window=None, head_dim=16),
    "olmo2": olmo2,
    "olmo2-one-key-head-biased": lambda: olmo2(num_key_value_heads=1, attention_bias=True),
    "olmo3": olmo3,
    "olmo3-scaled": lambda: olmo3(
        layer_types=["full_attention", "sliding_attention"] * 2,
        rope_parameters={
            "full_attention": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 500.0, **TRAINED},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "phi3": phi3,
    "phi3-window-partly-rotated": lambda: phi3(
        head_dim=16, sliding_window=5, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.75}
    ),
    "qwen2": qwen2,
    "qwen2-window-in-upper-layers": lambda: qwen2(
        use_sliding_window=True, sliding_window=4, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3": lambda: qwen3(head_dim=16),
    "qwen3.5": qwen3_5,
    "qwen3.5-biased-tied-half-rotated": lambda: qwen3_5(
        attention_bias=True,
        tie_word_embeddings=True,
        linear_num_key_heads=1,
        linear_conv_kernel_dim=3,
        partial_rotary_factor=0.5,
    ),
    "qwen3.5-moe": qwen3_5_moe,
    "qwen3-next": qwen3_next,
    "qwen3-next-weights-not-normalised": lambda: qwen3_next(
        norm_topk_prob=False, attention_bias=True, num_hidden_layers=4, layer_types=None
    ),
    "qwen3-moe": qwen3_moe,
    "qwen3-moe-normalised": lambda: qwen3_moe(norm_topk_prob=True, attention_bias=True),
    "qwen3-moe-window": lambda: qwen3_moe(use_sliding_window=True, sliding_window=3),
    "qwen3-window": lambda: qwen3(head_dim=8, use_sliding_window=True, sliding_window=3, max_window_layers=2),
    "smollm3": lambda: smollm3(num_hidden_layers=5),
    "smollm3-biased-untied": lambda: smollm3(
        no_rope_layers=[0, 1, 0], attention_bias=True, mlp_bias=True, tie_word_embeddings=False
    ),
}
TRAINED = {"original_max_position_embeddings": 16}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **TRAINED},
    "yarn-options": {
        "rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 0.7,
        **TRAINED,
    },
    "yarn-unused": {  # keys that transformers does not read
        "rope_type": "yarn", "factor": 3.0, "finetuned": True, "attn_factor": 2.0, "low_freq_factor": 2.0,
        "mrope_section": [1, 2, 1], **TRAINED,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **TRAINED,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.2, 1.5, 2.0],
        "long_factor": [2.0, 3.0, 5.0, 9.0],
        "factor": 4.0,
        **TRAINED,
    },
}  # fmt: skip


def scaled(name):
    """A Llama with that scaling; a dynamic one was trained for all positions that its config has."""
    parameters = {"rope_theta": 500.0, **SCALINGS[name]}
    return llama(rope_parameters=parameters, max_position_embeddings=16 if name == "dynamic" else 64)


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
    return model.eval()


def saved(model, folder, **options):
    with warnings.catch_warnings():  # what transformers has to say is not ours to mend
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, **options)
    if type(model) in FROM_DECODERS:
        (folder / "modules.json").write_text(json.dumps(MODULES))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    return folder


def some_ids(shape, seed=0):
    return np.random.default_rng(seed).integers(4, VOCAB, shape)  # past the padding ids


def theirs(model, ids, mask=None, **more):
    """Run transformers in the model's type; positions are counted from the mask as `generate` does."""
    arguments = {"input_ids": torch.tensor(ids), **more}
    if mask is not None:
        arguments["attention_mask"] = torch.tensor(mask, dtype=torch.long)
        if not takes_no_positions(model):
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


@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS])
def test_results(name, tmp_path, implementation):
    model = randomised({**ENCODERS, **DECODERS}[name]())
    got = models.load(saved(model, tmp_path))
    ids = some_ids((2, 23))
    require_close(got(ids), theirs(model, ids), exact=lambda: exactly(model, tmp_path, ids))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS])
def test_padded_results(name, side, tmp_path):
    model = randomised({**ENCODERS, **DECODERS}[name]())
    ids, mask = padded(side)
    if takes_no_positions(model):
        ids[mask == 0] = model.config.pad_token_id
    got = models.load(saved(model, tmp_path))
    require_close(got(ids, mask), theirs(model, ids, mask), mask, lambda: exactly(model, tmp_path, ids, mask))


def test_convolutions_with_biases(tmp_path):
    """Not padded: transformers takes biases of padding on the left for inputs of the tokens after it."""
    model = randomised(lfm2(conv_bias=True))
    ids = some_ids((2, 23))
    require_close(models.load(saved(model, tmp_path))(ids), theirs(model, ids))


def test_limits_of_steps(tmp_path):
    """transformers forgets them after the prompt, in steps with a cache."""
    more = {"mamba_proj_bias": True, "tie_word_embeddings": True}
    model = randomised(granite_hybrid(time_step_limit=(0.3, 0.8), **more))
    ids = some_ids((2, 23))
    require_close(models.load(saved(model, tmp_path))(ids), theirs(model, ids))
    other = randomised(granite_hybrid(**more))
    other = models.load(saved(other, tmp_path / "other"))
    assert np.abs(models.load(tmp_path)(ids) - other(ids)).max() > 0.1


def test_distances_past_the_last_bucket(tmp_path):
    model = randomised(mpnet())
    ids = some_ids((1, 190))
    require_close(models.load(saved(model, tmp_path))(ids), theirs(model, ids))


TIED = {  # whose table another tensor of the file is, by these names
    "gpt2": (gpt2, "lm_head.weight"),
    **{make.__name__: (make, "lm_head.weight") for make in (llama, granite, lfm2, olmo2, qwen3_moe, smollm3)},
    "gemma3": (lambda **changes: gemma3("Gemma3ForCausalLM", **changes), "lm_head.weight"),
    "mistral3": (mistral3, "lm_head.weight"),
    "qwen3_5": (qwen3_5, "lm_head.weight"),
    "t5": (t5, "encoder.embed_tokens.weight"),
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
    saved(randomised(ministral()), tmp_path)
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


@pytest.mark.parametrize("apart", [False, True])
def test_experts_in_mxfp4(apart, tmp_path):
    """As real folders have them; blocks and scales may be in different files."""
    model = randomised(gpt_oss(hidden_size=64, intermediate_size=96))
    rng, state = np.random.default_rng(0), {}
    for i, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            parameter = getattr(layer.mlp.experts, name)
            count, n_in, n_out = parameter.shape
            blocks = torch.from_numpy(rng.integers(0, 256, (count, n_out, n_in // 32, 16), dtype=np.uint8))
            scales = torch.from_numpy(rng.integers(121, 125, (count, n_out, n_in // 32), dtype=np.uint8))
            numbers = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            parameter.data.copy_(numbers)
            whole = f"model.layers.{i}.mlp.experts.{name}"
            state |= {f"{whole}_blocks": blocks, f"{whole}_scales": scales}
    saved(model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    others = {
        name: x for name, x in model.state_dict().items() if not name.endswith(("up_proj", "down_proj"))
    }
    names = [*state, *others]
    parts = {
        "a": [name for name in names if "_scales" in name],
        "b": [x for x in names if "_scales" not in x],
    }
    if apart:
        files = {name: f"{part}.safetensors" for part, own in parts.items() for name in own}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for part, own in parts.items() if apart else [("model", names)]:
        save_file({name: {**state, **others}[name] for name in own}, tmp_path / f"{part}.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = some_ids((2, 23))
    require_close(models.load(tmp_path)(ids), theirs(model, ids))


def test_float64(tmp_path):
    model = randomised(llama(GROUPED)).double()
    ids = some_ids((2, 23))
    with torch.no_grad():
        expected = model(torch.tensor(ids)).logits.numpy()
    got = models.load(saved(model.float(), tmp_path), dtype="float64")(ids)
    # transformers computes angles and norms in float32, whatever the model's type
    assert np.abs(got - expected).max() < TOLERANCE


def test_token_types(tmp_path):
    model = randomised(bert())
    ids, types = some_ids((2, 9)), np.arange(18).reshape(2, 9) % 2
    got = models.load(saved(model, tmp_path))(ids, token_type_ids=types)
    require_close(got, theirs(model, ids, token_type_ids=torch.tensor(types)))


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertForNextSentencePrediction", "BertModel"])
def test_heads_of_other_tasks_are_left_out(kind, tmp_path):
    model = randomised(getattr(transformers, kind)(transformers.BertConfig(**SIZES)))
    ids = some_ids((2, 9))
    encoder = model if kind == "BertModel" else model.bert
    require_close(models.load(saved(model, tmp_path))(ids), theirs(encoder, ids))


@pytest.mark.parametrize("length", [10, 40])
@pytest.mark.parametrize("name", list(SCALINGS))
def test_rope_scaling(name, length, tmp_path):
    """Lengths lie within what the model was trained for, and beyond it."""
    model = randomised(scaled(name))
    ids = some_ids((2, length))
    require_close(models.load(saved(model, tmp_path))(ids), theirs(model, ids))


def test_the_scalings_differ(tmp_path):
    """Otherwise the test above would pass whatever is read from config.json."""
    ids = some_ids((1, 40))
    results = [models.load(saved(randomised(scaled(name)), tmp_path / name))(ids) for name in SCALINGS]
    for i, one in enumerate(results):
        for other in results[:i]:
            assert np.abs(one - other).max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama-grouped", "llama-one-key-head-tied-biased"])
def test_sharded(name, tmp_path):
    model = randomised({**ENCODERS, **DECODERS}[name]())
    saved(model, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert not (tmp_path / "model.safetensors").exists()
    ids = some_ids((2, 9))
    require_close(models.load(tmp_path)(ids), theirs(model, ids))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama-grouped", "qwen3", "qwen3-embedding"])
def test_16_bit_files(name, dtype, tmp_path):
    """Computed in float32 from the rounded weights, as transformers does with dtype=torch.float32."""
    model = randomised({**ENCODERS, **DECODERS}[name]()).to(getattr(torch, dtype))
    saved(model, tmp_path)
    ids = some_ids((2, 9))
    # read anew: what is computed once, such as frequencies, would stay rounded in the model at hand
    model = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    require_close(models.load(tmp_path)(ids), theirs(model, ids))


def greedy(model, ids, mask, n):
    """Tokens of transformers (batch, n), and the least distance of the two best logits on the way."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(
            torch.tensor(ids), attention_mask=torch.tensor(mask), max_new_tokens=n, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    best = torch.stack(out.logits).topk(2).values
    return out.sequences[:, ids.shape[1] :].numpy(), float((best[..., 0] - best[..., 1]).min())


def told_apart(make, ids, mask, n):
    """A model whose best token is never within 1e-3 of the next, and its tokens."""
    for seed in range(30):
        model = randomised(make(), seed)
        tokens, gap = greedy(model, ids, mask, n)
        if gap > 1e-3 and all(len(set(row.tolist())) > 2 for row in tokens):
            return model, tokens
    raise AssertionError("no seed is fit")


@pytest.mark.parametrize("name", list(DECODERS))
def test_greedy_generation(name, tmp_path, implementation):
    ids, mask = padded("left")
    model, expected = told_apart(DECODERS[name], ids, mask, 12)
    got = models.load(saved(model, tmp_path))

    def require_same(prompts, mask=None):
        tokens = list(got.generate(prompts, 12, attention_mask=mask))
        np.testing.assert_array_equal(np.stack(tokens, axis=1), expected)

    require_same(ids, mask)
    right_ids, right_mask = padded("right")
    prompts = [list(row[m == 1]) for row, m in zip(ids, mask, strict=True)]
    require_same(prompts)
    for row, prompt in zip(expected, prompts, strict=True):
        assert list(got.generate(prompt, 12)) == row.tolist()
    for row, m, left, kept in zip(right_ids, right_mask, ids, mask, strict=True):
        row[m == 1] = left[kept == 1]
    require_same(right_ids, right_mask)


@pytest.mark.parametrize("name", [name for name in SCALINGS if name != "longrope"])
def test_greedy_generation_with_rope_scaling(name, tmp_path):
    """One prompt grows beyond the trained length. In a batch the longest would decide dynamic scalings."""
    ids = some_ids((1, 12))
    model, expected = told_apart(lambda: scaled(name), ids, np.ones_like(ids), 16)
    got = models.load(saved(model, tmp_path))
    assert list(got.generate(ids[0], 16)) == expected[0].tolist()


def test_generation_ends_where_transformers_ends(tmp_path):
    ids, mask = padded("left")
    model, expected = told_apart(llama, ids, mask, 12)
    stop = int(expected[0, 4])
    model.generation_config.eos_token_id = model.config.eos_token_id = stop
    with torch.no_grad():
        ended = model.generate(torch.tensor(ids), attention_mask=torch.tensor(mask), max_new_tokens=12)
    got = models.load(saved(model, tmp_path))
    assert got.stop == (stop,)
    tokens = np.stack(list(got.generate(ids, 12, attention_mask=mask)), axis=1)
    np.testing.assert_array_equal(np.where(tokens < 0, 0, tokens), ended[:, ids.shape[1] :].numpy())
    assert (tokens < 0).any()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, None, None), (0.7, 10, None), (1.3, None, 0.8), (0.9, 20, 0.5), (1.0, 1, None), (1.0, None, 0.0),
     (1.0, 500, 1.0)],
)  # fmt: skip
@pytest.mark.parametrize("more", [{}, {"min_p": 0.05}, {"typical_p": 0.7}, {"min_p": 0.02, "typical_p": 0.9}])
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
    if "typical_p" in more:
        warpers.append(transformers.TypicalLogitsWarper(more["typical_p"]))
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


def test_repetition_penalty():
    scores = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[1, 2, 2, 9], [5, 4, 3, 3]])
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.3)(ids, scores)
    sampler = Sampler(list(ids.numpy()), VOCAB, Sampling({"repetition_penalty": 1.3}))
    np.testing.assert_allclose(sampler._processed(scores.numpy()), expected.numpy(), rtol=1e-6)


def test_minilm_hidden_states(minilm_folder, implementation):
    model = transformers.AutoModel.from_pretrained(minilm_folder, attn_implementation="eager").eval()
    batch = transformers.AutoTokenizer.from_pretrained(minilm_folder)(example.SENTENCES, padding="longest")
    ids, mask = np.array(batch["input_ids"]), np.array(batch["attention_mask"])
    got = models.load(minilm_folder)(ids, mask)
    with torch.no_grad():
        expected = model(torch.tensor(ids), torch.tensor(mask)).last_hidden_state.numpy()
    require_close(got, expected, mask)
