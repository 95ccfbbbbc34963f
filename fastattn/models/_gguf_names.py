"""Names of tensors in GGUF files as transformers has them: a row for each `model_type` unlike Llama."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_FORWARD = "gate", "up", "down"  # maps of feed-forwards
_WS = ("gate", "w1"), ("up", "w3"), ("down", "w2")  # as Mixtral and LFM2 call them
# Names of tensors: those outside of blocks, and in blocks.
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LLAMA = {
    "attn_norm": "input_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in _FORWARD},
    **{f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in _FORWARD},
}


class _Names(NamedTuple):
    """Names of a model's tensors."""

    names: Mapping[str, str] = _LLAMA
    top: Mapping[str, str] = _TOP
    block: str = "model.layers"  # the prefix of a block, as transformers has it
    mixer: str | None = None  # in place of attention, in some layers


_POST_NORM = {"post_attention_norm": "post_attention_layernorm"}
_OLMO = {**_LLAMA, **_POST_NORM, "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA = _Names({**_OLMO, "ffn_norm": "pre_feedforward_layernorm"})
_GEMMA4 = _Names(
    {
        **_GEMMA.names, "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm", "layer_output_scale": "layer_scalar",
    },
    {
        **_TOP, "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    },
)  # fmt: skip
_GPT_OSS = {**_LLAMA, **_POST_NORM, "attn_sinks": "self_attn.sinks", "ffn_gate_inp": "mlp.router"}
_MIXTRAL = {
    **_LLAMA, "ffn_gate_inp": "block_sparse_moe.gate",
    **{f"ffn_{part}_exps": f"block_sparse_moe.experts.{{}}.{own}" for part, own in _WS},
}  # fmt: skip
_LFM2 = _Names(
    {
        "attn_norm": "operator_norm",
        **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
        **{f"attn_{part}_norm": f"self_attn.{part}_layernorm" for part in "qk"},
        "attn_output": "self_attn.out_proj",
        "ffn_norm": "ffn_norm",
        **{f"ffn_{part}": f"feed_forward.{own}" for part, own in _WS},
        **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
    },
    {
        "token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head",
    },  # and no "output_norm"
)  # fmt: skip
_QWEN_NEXT = _Names(
    {
        **{name: x for name, x in _LLAMA.items() if name != "ffn_norm"}, **_POST_NORM,
        "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
        "ssm_ba": "linear_attn.in_proj_ba", "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a", "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in _FORWARD},
    },
    mixer="linear_attn",
)  # fmt: skip
_GRANITE = _Names(
    {
        **_LLAMA, "ffn_gate_inp": "block_sparse_moe.router.layer",
        **{f"ffn_{part}{end}": f"shared_mlp.{part}_proj" for end in ("", "_shexp") for part in _FORWARD},
        **{f"ffn_{part}_exps": f"block_sparse_moe.experts.{{}}.{part}_proj" for part in _FORWARD},
        "ssm_in": "mamba.in_proj", "ssm_conv1d": "mamba.conv1d", "ssm_norm": "mamba.norm",
        "ssm_out": "mamba.out_proj",
    },
    mixer="mamba",
)  # fmt: skip
_BERT = _Names(
    {
        "attn_q": "attention.self.query", "attn_k": "attention.self.key", "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense", "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense", "ffn_down": "output.dense", "layer_output_norm": "output.LayerNorm",
    },
    {
        "token_embd": "embeddings.word_embeddings", "position_embd": "embeddings.position_embeddings",
        "token_types": "embeddings.token_type_embeddings", "token_embd_norm": "embeddings.LayerNorm",
    },
    "encoder.layer",
)  # fmt: skip
_ROWS = {
    "bert": _BERT,
    **dict.fromkeys(("gemma2", "gemma3_text"), _GEMMA),
    "gemma4_text": _GEMMA4,
    "gpt_oss": _Names(_GPT_OSS),
    "granitemoehybrid": _GRANITE,
    "lfm2": _LFM2,
    "mixtral": _Names(_MIXTRAL),
    **dict.fromkeys(("olmo2", "olmo3"), _Names(_OLMO)),
    "phi3": _Names({**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _QWEN_NEXT),
}
# Vectors of a mixer, whose names do not end with ".weight" there.
_OF_MIXERS = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
_OF_MIXER = re.compile(rf"blk\.(\d+)\.({'|'.join(map(re.escape, _OF_MIXERS))})")
IN_BLOCK = re.compile(r"blk\.(\d+)\.((?:shortconv\.)?\w+?)(?:\.(\d+))?\.(weight|bias)")


def known_name(model_type: str, name: str) -> str | None:
    """The name of a tensor as transformers has it; None for one that no model here has."""
    row = _ROWS.get(model_type, _Names())
    if found := _OF_MIXER.fullmatch(name):
        return row.mixer and f"model.layers.{found[1]}.{row.mixer}.{_OF_MIXERS[found[2]]}"
    if found := IN_BLOCK.fullmatch(name):
        number, part, expert, kind = found.groups()
        if part not in row.names or (expert is None) == part.endswith("_exps"):
            return None
        return f"{row.block}.{number}.{row.names[part].format(expert)}.{kind}"
    stem, _, kind = name.rpartition(".")
    kinds = ("weight", "bias") if stem == "token_embd_norm" else ("weight",)
    return f"{row.top[stem]}.{kind}" if stem in row.top and kind in kinds else None
