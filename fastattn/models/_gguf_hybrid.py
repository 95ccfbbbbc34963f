"""GGUF files of models with mixers in place of attention: names of tensors, and values of config.json."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastattn.models._files import Config

# The last norm of LFM2 has a name of its own.
LFM2_TOP = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
}
LFM2_NAMES = {
    "attn_norm": "operator_norm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
}
QWENS = "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"
# Beside names that other models have.
QWEN_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}
# As those of Llama, but for experts and mixers.
GRANITE_NAMES = {
    **{f"ffn_{part}": f"shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_exps": f"block_sparse_moe.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
# Vectors of a mixer, whose names do not end with ".weight" there, and the mixers by `model_type`.
OF_MIXERS = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
OF_MIXER = re.compile(rf"blk\.(\d+)\.({'|'.join(map(re.escape, OF_MIXERS))})")
MIXERS = {"granitemoehybrid": "mamba", **dict.fromkeys(QWENS, "linear_attn")}


def _of_lfm2(said: Config, prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    """Values of LFM2 that a file says otherwise."""
    return {
        **_by_heads(said, prefix, values, "conv"),
        "conv_L_cache": said.size(f"{prefix}.shortconv.l_cache"),
        "norm_eps": values.get("rms_norm_eps"),
        "block_auto_adjust_ff_dim": False,
    }


def _of_granite(said: Config, prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    """Values of Granite's hybrids that a file says otherwise."""
    said.refuse(**{f"{prefix}.ssm.dt_b_c_rms": False})
    sizes = {
        "conv_kernel": "mamba_d_conv",
        "state_size": "mamba_d_state",
        "group_count": "mamba_n_groups",
        "time_step_rank": "mamba_n_heads",
    }
    shared = said.size(f"{prefix}.expert_shared_feed_forward_length", values.get("intermediate_size", 0))
    rotated = said.get(f"{prefix}.rope.scaling.finetuned", bool, True)
    return {
        **_by_heads(said, prefix, values, "mamba"),
        **{name: said.size(f"{prefix}.ssm.{key}") for key, name in sizes.items()},
        "mamba_expand": said.divided(f"{prefix}.ssm.inner_size", f"{prefix}.embedding_length"),
        "shared_intermediate_size": shared,
        "num_local_experts": values.get("num_local_experts", 0),
        "position_embedding_type": "rope" if rotated else "nope",
    }


def _by_heads(said: Config, prefix: str, values: dict[str, Any], other: str) -> dict[str, Any]:
    """Heads of keys, and kinds of layers: those without heads are the `other` kind."""
    said.refuse(**{f"{prefix}.attention.sliding_window": 0})
    heads = values.get("num_key_value_heads")
    if not (isinstance(heads, list) and len({x for x in heads if x}) == 1):
        name = f"{prefix}.attention.head_count_kv"
        raise said.wrong(name, heads, "a number for each layer: 0, or the same for all others")
    kinds = ["full_attention" if x else other for x in heads]
    return {"num_key_value_heads": max(heads), "layer_types": kinds}


def layers(said: Config, prefix: str) -> int:
    """The number of layers before those that guess further tokens."""
    count, further = said.size(f"{prefix}.block_count"), said.size(f"{prefix}.nextn_predict_layers", 0, low=0)
    if further >= count:
        raise said.wrong(f"{prefix}.nextn_predict_layers", further, f"fewer than all {count} layers")
    return count - further


def _of_qwen(said: Config, prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    """Values of Qwens that a file says otherwise: sizes have the names of Mamba's."""
    for key in ("attention.recurrent_layers", "attention.sliding_window"):
        said.refuse(**{f"{prefix}.{key}": None})
    sizes = {
        "conv_kernel": "linear_conv_kernel_dim",
        "state_size": "linear_key_head_dim",
        "group_count": "linear_num_key_heads",
        "time_step_rank": "linear_num_value_heads",
    }
    found = {name: said.size(f"{prefix}.ssm.{key}") for key, name in sizes.items()}
    found["linear_value_head_dim"] = said.divided(f"{prefix}.ssm.inner_size", f"{prefix}.ssm.time_step_rank")
    if (sections := said.values.get(key := f"{prefix}.rope.dimension_sections")) is not None:
        # Those of a text share positions, if they have all pairs that are rotated.
        pairs = said.size(f"{prefix}.rope.dimension_count") // 2
        if not (isinstance(sections, np.ndarray) and sections[:3].sum() == sections.sum() == pairs):
            raise said.wrong(key, sections, f"three numbers of pairs, together {pairs}")
    found["num_hidden_layers"] = layers(said, prefix)
    found["full_attention_interval"] = said.size(f"{prefix}.full_attention_interval", 4)
    if experts := values.get("num_local_experts"):
        found["num_experts"] = experts
        found["shared_expert_intermediate_size"] = said.size(f"{prefix}.expert_shared_feed_forward_length")
    return found


BY_HEADS = "granitemoehybrid", "lfm2"  # layers without heads of keys are of another kind
VALUES: dict[str, Callable[[Config, str, dict[str, Any]], dict[str, Any]]] = {
    "granitemoehybrid": _of_granite,
    "lfm2": _of_lfm2,
    **dict.fromkeys(QWENS, _of_qwen),
}
