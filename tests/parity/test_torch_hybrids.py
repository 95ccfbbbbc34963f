"""Hybrid models of transformers with our functions beside their own: results, gradients, generated tokens."""

import importlib

import pytest
import torch
import transformers

import fastattn.torch as ft
from fastattn.torch._hybrids import FUNCTIONS

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "full_attention_interval": 2,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 8, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
MAMBA2 = {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "expand": 2, "chunk_size": 16}
MAMBA_N = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
MODELS = {
    "mamba": {"state_size": 8, "conv_kernel": 4},
    "falcon_mamba": {"state_size": 8, "conv_kernel": 4},
    "mamba2": MAMBA2,
    "jamba": {"mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
    "bamba": {**MAMBA_N, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**MAMBA_N, "mamba_d_ssm": 64},
    "granitemoehybrid": {**MAMBA_N, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 2},
    "zamba": {
        "mamba_d_state": 8, "n_mamba_heads": 2, "num_hidden_layers": 6,
        "layers_block_type": ["mamba", "mamba", "hybrid"] * 2,
    },
    "zamba2": {
        "mamba_d_state": 8, "n_mamba_heads": 8, "chunk_size": 16, "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "hybrid"] * 2,
    },
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "num_experts": 4},
    "qwen3_next": DELTA,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA,
    "olmo_hybrid": {**DELTA, "num_key_value_heads": 4},
    "lara_mini": {**DELTA, "layer_types": ["linear_attention", "full_attention"] * 2},
    "kimi_linear": {**LATENT, "linear_num_heads": 4, "linear_head_dim": 8},
    "bailing_hybrid": {**LATENT, "layer_group_size": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "qwen4_exp_text": {
        **DELTA, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "lfm3": {"conv_L_cache": 3},
}  # fmt: skip


def tiny(name, **more):
    config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[name]
    options = {**SMALL, **MODELS[name], **more}
    config = config_class(**options)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    model = tiny(name)
    ids = torch.randint(3, 97, (2, 37))
    called = []
    expected = model(ids).logits
    expected.square().mean().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    text = model.generate(ids[:1, :9], max_new_tokens=12, do_sample=False)
    with ft.register(measure=False):
        module = importlib.import_module(type(model).__module__)
        for function in FUNCTIONS:
            if hasattr(module, function):
                called.append(function)
        got = model(ids).logits
        got.square().mean().backward()
        again = model.generate(ids[:1, :9], max_new_tokens=12, do_sample=False)
    assert called
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    torch.testing.assert_close(again, text, rtol=0, atol=0)
    for n, p in model.named_parameters():
        if n in gradients:
            most = gradients[n].abs().max().item()
            torch.testing.assert_close(p.grad, gradients[n], rtol=0, atol=2e-5 * most + 1e-9, msg=n)
