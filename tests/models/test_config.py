"""Errors about a config.json that describes no model that can be computed."""

from pathlib import Path
from shutil import rmtree

import numpy as np
import pytest
import tiny_models as tiny
from model_folders import change_config, refused

from fastattn import models
from fastattn.models._families import shared


def test_folders_that_are_none(tmp_path):
    refused(
        tmp_path / "nowhere",
        "nowhere is no folder; expected one with config.json and model.safetensors, or a GGUF file: `hf",
    )
    refused(tmp_path / ("e" * 5000), "is no folder; expected one with config.json")
    refused(
        Path("all-MiniLM-L12-v2"),
        "or a name of the Hub with its organisation, as sentence-transformers/all-MiniLM-L12-v2",
    )
    refused(None, "load(): folder is of type NoneType; expected a path", error=TypeError)
    refused(tmp_path, "config.json is missing")
    for name in ("1_Pooling", "model"):
        tiny.write(tmp_path / name, "bert")
    refused(tmp_path, f"{tmp_path} has no config.json; expected one; there is one in {tmp_path / 'model'}")
    for name in ("config.json", "model.safetensors"):
        file = tmp_path / "model" / name
        refused(file, f"{file} is a file; expected its folder, {tmp_path / 'model'}, or a GGUF file")
    rmtree(tmp_path / "model")
    (tmp_path / "config.json").mkdir()
    refused(tmp_path, "config.json cannot be read")


@pytest.mark.parametrize("text", ["", "{", '{"model_type": ', "\x80\x81", "[" * 100_000])
def test_a_config_that_is_not_json(text, tmp_path):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    refused(tmp_path, "config.json is not JSON")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "config.json holds a list; expected a dict"),
        ("{}", "config.json: 'model_type' is missing; expected a string"),
        ('{"model_type": 3}', "config.json: 'model_type' is 3; expected a string"),
        ('{"model_type": "t4"}', "'model_type' is 't4'; expected one of bert, roberta, xlm-roberta, "),
        ('{"model_type": "llama", "quantization_config": {}}', "'quantization_config'"),
    ],
)
def test_a_config_of_no_known_model(text, message, tmp_path):
    (tmp_path / "config.json").write_text(text)
    refused(tmp_path, message)


NEAR_LAST = ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]
HUGE = 10**400  # no float holds it
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

WRONG_VALUES = [
    ("bert", {"hidden_size": None}, "'hidden_size' is missing; expected an integer of at least 1"),
    ("bert", {"hidden_size": "24"}, "'hidden_size' is '24'; expected an integer of at least 1"),
    ("bert", {"hidden_size": "2" * 5000},
     f"'hidden_size' is '{'2' * 35}...'; expected an integer of at least 1"),
    ("bert", {"hidden_act": "e" * 5000}, f"'hidden_act' is '{'e' * 35}...'; expected one of relu"),
    ("gpt2", {"eos_token_id": ["e"] * 500},
     "'eos_token_id' is a value of type list; expected an id or a list of id"),
    ("bert", {"hidden_size": True}, "'hidden_size' is True; expected an integer of at least 1"),
    ("bert", {"num_attention_heads": 0}, "'num_attention_heads' is 0; expected an integer of at least 1"),
    ("bert", {"num_attention_heads": 5}, "is 24; expected a multiple of 'num_attention_heads', 5"),
    ("bert", {"layer_norm_eps": -1.0}, "'layer_norm_eps' is -1.0; expected a number above 0"),
    ("bert", {"layer_norm_eps": float("nan")}, "'layer_norm_eps' is nan; expected a number above 0"),
    ("bert", {"layer_norm_eps": HUGE}, "'layer_norm_eps' is inf; expected a number above 0"),
    ("bert", {"num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000; expected no more layers"),
    ("bert", {"num_hidden_layers": HUGE}, "'num_hidden_layers' is above 2**62"),
    ("gpt2", {"n_layer": 400_000}, "is 400000; expected no more layers than the 28 tensors of model.saf"),
    ("llama", {"num_hidden_layers": 10**9}, "is 1000000000; expected no more layers than the 21 tensors"),
    ("roberta", {"pad_token_id": 33}, "'pad_token_id' is 33; expected less than"),
    ("bert", {"hidden_act": "tanh"}, "'hidden_act' is 'tanh'; expected one of relu"),
    ("bert", {"position_embedding_type": "relative_key"}, "only 'absolute' is supported"),
    ("bert", {"is_decoder": True}, "'is_decoder' is True; only False is supported"),
    ("modernbert", {"rope_parameters": {"full_attention": 3}}, "is {'full_attention': 3}; expected a table"),
    ("modernbert", {"rope_parameters": {"rope_theta": 5.0}}, "expected a table for each of full_attention"),
    ("modernbert", {"global_rope_theta": -1}, "'global_rope_theta' is -1; expected a number above 0"),
    ("modernbert", {"layer_types": ["sliding_attention"]}, "expected a list of 3 of full_attention, sliding"),
    ("distilbert", {"num_hidden_layers": 1}, "'num_hidden_layers' is 1; only 2 is supported"),
    ("distilbert", {"hidden_size": 12}, "'hidden_size' is 12; only 24 is supported"),
    ("gpt2", {"num_attention_heads": 6}, "'num_attention_heads' is 6; only 3 is supported"),
    ("distilbert", {"n_heads": 5}, "'dim' is 24; expected a multiple of 'n_heads', 5"),
    ("mpnet", {"max_position_embeddings": 2}, "'max_position_embeddings' is 2; expected more than 2"),
    ("mpnet", {"relative_attention_num_buckets": 16}, "is 16; only 32 is supported"),
    ("nomic_bert", {"head_dim": 4}, "'head_dim' is 4; only 8 is supported"),
    ("new", {"position_embedding_type": "absolute"}, "is 'absolute'; only 'rope' is supported"),
    ("new", {"rope_scaling": {"type": "ntk"}},
     "'factor' of 'rope_scaling' is None; expected a number from 1 to"),
    ("new", {"rope_scaling": {"type": "ntk", "factor": 2, "mixed_b": 0.6}}, "has a mixed_b; expected none"),
    ("new", {"logn_attention_scale": True}, "'logn_attention_scale' is True; only False is supported"),
    ("albert", {"inner_group_num": 2}, "'inner_group_num' is 2; only 1 is supported"),
    ("albert", {"num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000; expected at most 1000"),
    ("albert", {"num_hidden_groups": 10**9}, "is 1000000000; expected no more layers than"),
    ("nomic-experts", {"moe_top_k": 6}, "'moe_top_k' is 6; expected at most 'num_experts', 5"),
    ("nomic-experts", {"num_shared_experts": 1}, "'num_shared_experts' is 1; only 0 is supported"),
    ("nomic-experts", {"moe_normalize_expert_weights": True}, "'moe_normalize_expert_weights' is True; only"),
    ("jina_embeddings_v3", {"lora_adaptations": ["base"]}, "is ['base']; expected a list of different tasks"),
    ("jina_embeddings_v3", {"lora_adaptations": ["separation", ""]}, "'lora_adaptations' is"),
    ("jina_embeddings_v3", {"lora_adaptations": ["x", "x"]}, "'lora_adaptations' is ['x', 'x']; expected"),
    ("jina_embeddings_v3", {"lora_adaptations": [[]]}, "'lora_adaptations' is [[]]; expected"),
    ("bert", {"architectures": ["BertForTokenClassification"]}, "which scores tokens; expected an encoder"),
    ("deberta-v2", {"relative_attention": False}, "'relative_attention' is false; only true is supported"),
    ("deberta-v2", {"pos_att_type": "p2c|p2p"},
     "'pos_att_type' is 'p2c|p2p'; expected one of c2p, p2c, or b"),
    ("deberta-v2", {"conv_kernel_size": 3}, "'conv_kernel_size' is 3; only 0 is supported"),
    ("deberta-v2", {"embedding_size": 8}, "'embedding_size' is 8; only 24 is supported"),
    ("deberta-v2", {"position_buckets": "4"}, "'position_buckets' is '4'; expected an integer of at least 1"),
    ("deberta-v2", {"position_buckets": 1}, "'position_buckets' is 1; expected at least 2"),
    ("deberta-v2", {"pos_att_type": [[]]}, "'pos_att_type' is [[]]; expected one of c2p, p2c, or both"),
    ("deberta-v2", {"pos_att_type": [{}]}, "expected one of c2p, p2c, or both"),
    ("deberta-v2", {"layer_norm_eps": 1e300}, "is 1e+300; expected a number above 0 that float32 holds"),
    ("deberta-v2", {"max_relative_positions": 3}, "is 3 with 4 'position_buckets'; expected at least 4"),
    ("gpt2", {"n_head": 7}, "'n_embd' is 24; expected a multiple of 'n_head', 7"),
    ("gpt2", {"scale_attn_weights": 1}, "'scale_attn_weights' is 1; expected true or false"),
    ("gpt2", {"eos_token_id": "end"}, "'eos_token_id' is 'end'; expected an id or a list of ids"),
    ("gpt2", {"eos_token_id": 10**30}, "expected an id or a list of ids"),
    ("gpt2", {"eos_token_id": [1, "end"]}, "expected an id or a list of ids"),
    ("llama", {"num_key_value_heads": 3},
     "'num_attention_heads' is 4; expected a multiple of 'num_key_value_heads', 3"),
    ("gpt_oss", {"swiglu_alpha": 1.5}, "'swiglu_alpha' is 1.5; only 1.702 is supported"),
    ("gpt_oss", {"num_experts_per_tok": 9},
     "'num_experts_per_tok' is 9; expected at most 'num_local_experts', 5"),
    ("gpt_oss", {"swiglu_limit": 0}, "'swiglu_limit' is 0; expected a number above 0"),
    ("granite", {"residual_multiplier": 0.0}, "'residual_multiplier' is 0.0; expected a number above 0"),
    ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": "x"}},
     "'llama_4_scaling_beta' is 'x'; expected"),
    ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": 0.1}},
     "'rope_parameters': 'original_max_position_embeddings' is missing"),
    ("ministral3", {"model_type": "mistral3"}, "'text_config' is missing; expected a table"),
    ("ministral3", {"model_type": "mistral3", "text_config": {"model_type": "qwen2"}},
     "'model_type' is 'qwen2'; expected mistral or ministral3 in 'text_config'"),
    ("olmo3", {"layer_types": ["full_attention"]}, "expected a list of 2 of full_attention, sliding"),
    ("olmo3", {"rope_parameters": {"rope_theta": 5.0}}, "expected a table for each of full_attention"),
    ("llama", {"rope_scaling": "linear"}, "'rope_scaling' is 'linear'; expected a table"),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "scaling of type linear has no factor"),
    ("llama", {"rope_scaling": {"rope_type": "spiral"}}, "the type of scaling is 'spiral'"),
    ("llama", {"rope_theta": -5}, "'rope_theta' is -5; expected a number above 0"),
    ("llama", {"rms_norm_eps": HUGE}, "'rms_norm_eps' is inf; expected a number above 0"),
    ("llama", {"rope_theta": HUGE}, "'rope_theta' is inf; expected a number above 0"),
    ("llama", {"max_position_embeddings": HUGE}, "'max_position_embeddings' is above 2**62; expected a size"),
    ("llama", {"rope_parameters": {"rope_theta": HUGE}}, "rotary positions: "),
    ("llama", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": HUGE}}, "rotary positions: "),
    ("llama", {"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5; expected 1.0, the only"),
    ("phi3", {"partial_rotary_factor": 1.5}, "'partial_rotary_factor' is 1.5; expected a number above 0"),
    ("smollm3", {"no_rope_layers": [[1], [1], [0]]}, "expected a list of 3"),
    ("smollm3", {"no_rope_layers": [1, 2, 1]},
     "'no_rope_layers' is [1, 2, 1]; expected a list of 3 of 0 and 1"),
    ("gemma3-causal", {"final_logit_softcapping": 0}, "softcapping' is 0; expected a number above 0"),
    ("gemma2", {"attn_logit_softcapping": "50"}, "softcapping' is '50'; expected a number above 0"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, "'mlp_only_layers' is [0]; only [] is supported"),
    ("qwen3_moe", {"num_experts_per_tok": 7},
     "'num_experts_per_tok' is 7; expected at most 'num_experts', 6"),
    ("mixtral", {"num_local_experts": 10**9}, "'num_local_experts' is 1000000000; expected no more"),
    ("granitemoehybrid", {"num_local_experts": 2, "num_experts_per_tok": 3},
     "at most 'num_local_experts', 2"),
    ("granitemoehybrid", {"num_local_experts": 2, "head_dim": 0}, "'head_dim' is 0; expected"),
    ("granitemoehybrid", {"residual_multiplier": 0}, "'residual_multiplier' is 0; expected a number above"),
    ("granitemoehybrid", {"mamba_n_heads": 7}, "'mamba_n_heads' is 7; expected as many as make 48 features"),
    ("granitemoehybrid", {"mamba_n_groups": 4}, "'mamba_n_heads' is 6; expected a multiple of 'mamba_n_gro"),
    ("granitemoehybrid", {"time_step_limit": [1, 0]}, "is [1, 0]; expected two numbers, 0 or more"),
    ("granitemoehybrid", {"time_step_limit": "all"}, "'time_step_limit' is 'all'; expected two numbers"),
    ("granitemoehybrid", {"position_embedding_type": "alibi"}, "is 'alibi'; expected rope, nope or null"),
    ("lfm2", {"conv_L_cache": 9}, "'conv_L_cache' is 9; expected at most 8"),
    ("lfm2", {"layer_types": ["conv", "mamba", "conv"]}, "expected a list of 3 of full_attention, conv"),
    ("lfm2", {"layer_types": None, "full_attn_idxs": 1}, "'full_attn_idxs' is 1; expected a list of numbers"),
    ("lfm2", {"layer_types": None, "full_attn_idxs": [0]}, "does not fit"),
    ("lfm2", {"architectures": ["Lfm2ForSequenceClassification"]}, "expected a language model"),
    ("lfm2", {"block_ff_dim": 41}, "does not fit"),
    ("qwen3_5_text", {"linear_conv_kernel_dim": 9}, "'linear_conv_kernel_dim' is 9; expected at most 8"),
    ("qwen3_5_text", {"linear_num_key_heads": 3}, "is 4; expected a multiple of 'linear_num_key_heads', 3"),
    ("qwen3_5_text", {"hidden_act": "gelu"}, "'hidden_act' is 'gelu'; only 'silu' is supported"),
    ("qwen3_5_text", {"partial_rotary_factor": 2}, "'partial_rotary_factor' is 2; expected a number above 0"),
    ("qwen3_5_text", {"layer_types": ["full_attention"]}, "expected a list of 2 of full_attention, linear"),
    ("qwen3_next", {"decoder_sparse_step": 2}, "'decoder_sparse_step' is 2; only 1 is supported"),
    ("qwen3_next", {"num_experts_per_tok": 6}, "is 6; expected at most 'num_experts', 5"),
    ("qwen3_next", {"shared_expert_intermediate_size": 21}, "does not fit"),
    ("llama", {"head_dim": 7}, "rotary_dim is 7; expected an even number"),
    ("mistral", {"sliding_window": 0}, "'sliding_window' is 0; expected an integer of at least 1"),
    ("qwen2", {"layer_types": ["full_attention"]}, "expected a list of 2 of full_attention, sliding"),
    ("t5", {"feed_forward_proj": "gated"}, "'feed_forward_proj' is 'gated'; expected one of relu, gelu"),
    ("t5", {"dense_act_fn": "silu"},
     "'dense_act_fn' is 'silu'; expected the one of 'feed_forward_proj', relu"),
    ("t5", {"is_gated_act": True}, "'is_gated_act' is True; only False is supported"),
    ("mt5", {"is_gated_act": False}, "'is_gated_act' is False; only True is supported"),
    ("t5", {"head_dim": 4}, "'head_dim' is 4; only"),
    ("t5", {"num_hidden_layers": 1}, "'num_hidden_layers' is 1; only 2 is supported"),
    ("t5", {"d_kv": None}, "'d_kv' is missing; expected an integer of at least 1"),
    ("t5", {"is_decoder": True}, "'is_decoder' is True; only False is supported"),
    ("t5", {"num_layers": 10**9}, "'num_layers' is 1000000000; expected no more layers than the 19 tensors"),
    ("t5", {"relative_attention_max_distance": 2}, "relative positions: t5_buckets(): max_distance is 2"),
    ("t5", {"relative_attention_max_distance": HUGE}, "'relative_attention_max_distance' is above 2**62"),
    ("gemma3_text", {"is_causal": False}, "'is_causal' is False; only True is supported"),
    ("gemma3_text", {"query_pre_attn_scalar": 0}, "'query_pre_attn_scalar' is 0; expected a number above 0"),
    ("gemma3_text", {"num_key_value_heads": 3}, "expected a multiple of 'num_key_value_heads', 3"),
    ("gemma3_text", {"layer_types": ["full_attention"]}, "expected a list of 3 of full_attention, sliding"),
    ("gemma3_text", {"rope_parameters": {"rope_theta": 5.0}}, "expected a table for each of full_attention"),
    ("gemma3_text", {"rope_parameters": {"full_attention": 1}}, "expected a table for each of full_attent"),
    ("gemma3_text", {"rope_local_base_freq": -1}, "'rope_local_base_freq' is -1; expected a number above 0"),
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear"}}, "scaling of type linear has no factor"),
    ("gemma4-experts", {"top_k_experts": 6}, "'top_k_experts' is 6; expected at most 'num_experts', 5"),
    ("gemma4-experts", {"num_experts": None}, "'num_experts' is missing; expected an integer"),
    ("gemma4-experts", {"num_experts": 10**9}, "'num_experts' is 1000000000; expected no more"),
    ("gemma4-experts", {"moe_intermediate_size": 18}, "does not fit"),
    ("gemma4-experts", {"enable_moe_block": False}, "does not fit"),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "is 'all'; expected null, or 'vision'"),
    ("gemma4_text", {"vocab_size_per_layer_input": 59}, "is 59; expected at least 'vocab_size', 60"),
    ("gemma4_text", {"layer_types": ["full_attention"]}, "expected a list of 4 of full_attention, sliding"),
    ("gemma4_text", {"layer_types": NEAR_LAST}, "expected full_attention for the last layer"),
    ("gemma4_text", {"num_kv_shared_layers": 3}, "is 3; expected a layer of each kind in 'layer_types'"),
    ("gemma4_text", {"num_kv_shared_layers": 5}, "is 5; expected a layer of each kind in 'layer_types'"),
    ("gemma4_text", {"num_kv_shared_layers": 1}, "does not fit"),
    ("gemma4_text", {"num_global_key_value_heads": 3},
     "is 3; expected a divisor of 'num_attention_heads', 4"),
    ("gemma4_text", {"global_head_dim": 12}, "does not fit"),
    ("gemma4_text", {"use_double_wide_mlp": False}, "does not fit"),
    ("gemma4_text", {"hidden_size_per_layer_input": 6}, "does not fit"),
    ("gemma4_text", {"per_layer_config": [8]}, "is [8]; expected tables of head_dim and num_key_value_heads"),
    ("gemma4_text", {"per_layer_config": {"1": {"rope": 8}}},
     "expected tables of head_dim and num_key_value"),
    ("gemma4_text", {"per_layer_config": {"1": {"head_dim": 8}}},
     "the same for all layers of full_attention"),
    ("gemma4_text", {"rope_parameters": {"rope_theta": 5.0}}, "expected a table for each of full_attention"),
    ("gemma4_text", {"sliding_window": None, "final_logit_softcapping": 0},
     "softcapping' is 0; expected a num"),
    ("qwen2", {"layer_types": ["full_attention", "none"]}, "expected a list of 2 of full_attention"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "message"), WRONG_VALUES)
def test_wrong_values_in_a_config(kind, changes, message, tmp_path):
    tiny.write(tmp_path, kind)
    models.load(tmp_path)  # it is right before the change, so that the change alone is wrong
    change_config(tmp_path, **changes)
    if kind == "llama" and "head_dim" in changes:  # tensors that fit the wrong value
        tiny.write(tmp_path, kind, **changes)
    name = "model.safetensors" if message == "does not fit" else "config.json"
    refused(tmp_path, str(tmp_path / name), message)


@pytest.mark.parametrize("longest", [10**8, 2**40, 2**62])
def test_distances_of_no_more_tokens_than_come(longest, tmp_path):
    """Numbers of 2**40 distances would take terabytes; 10**8 took seconds."""
    tiny.write(tmp_path, "deberta-v2", max_relative_positions=32)
    expected = models.load(tmp_path)([[1, 2, 3, 4]])
    change_config(tmp_path, max_position_embeddings=longest)
    np.testing.assert_array_equal(models.load(tmp_path)([[1, 2, 3, 4]]), expected)


def test_a_recurrent_model_is_no_encoder(tmp_path):
    tiny.write(tmp_path, "lfm2")
    tiny.write_modules(tmp_path, "mean")
    refused(tmp_path, "modules.json makes an encoder of it; expected a language model")


def test_no_size_is_believed_before_the_tensors_have_it(tmp_path, monkeypatch):
    """Rotary frequencies of a head_dim of 2**31 would take gigabytes."""

    def never(*arguments, **options):
        raise AssertionError("frequencies of a size that no tensor has")

    monkeypatch.setattr(shared, "rope_frequencies", never)
    for kind in ("qwen3", "qwen3-embedding", "gemma3_text"):
        tiny.write(tmp_path, kind)
        change_config(tmp_path, head_dim=2**31)
        refused(tmp_path, "does not fit config.json")
