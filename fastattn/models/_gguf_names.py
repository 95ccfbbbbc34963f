"""Names of tensors in GGUF files, by what they are in a block: the names of a family say the rest."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from fastattn.models._families.bert import BERT
from fastattn.models._families.gemma4 import GEMMA4
from fastattn.models._families.gpt import GPT_OSS
from fastattn.models._families.hybrid import GRANITE_FILES, LFM2, QWEN, QWEN_EXPERTS
from fastattn.models._families.llama import FAMILIES
from fastattn.models._gguf import IN_BLOCK

_OTHERS = {  # than families like Llama
    "bert": BERT, "gemma4_text": GEMMA4, "gpt_oss": GPT_OSS, "granitemoehybrid": GRANITE_FILES, "lfm2": LFM2,
    "qwen3_5_text": QWEN, **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), QWEN_EXPERTS),
}  # fmt: skip
_POST_NORMS = "post_attention_norm", "post_ffw_norm"
_AFTER_ATTENTION = ("gpt_oss", *(name for name in _OTHERS if name.startswith("qwen")))  # as their files say
# Names in blocks of what other families have not: of parts of layers, and of mixers.
_QWEN_MIXER = {
    "attn_qkv": "in_proj_qkv", "attn_gate": "in_proj_z", "ssm_ba": "in_proj_ba", "ssm_beta": "in_proj_b",
    "ssm_alpha": "in_proj_a", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj",
}  # fmt: skip
_MAMBA = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
_CONVOLUTION = {f"shortconv.{part}": part for part in ("conv", "in_proj", "out_proj")}
_MIXERS = {
    "granitemoehybrid": ("mamba", _MAMBA), "lfm2": ("conv", _CONVOLUTION),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), ("linear_attn", _QWEN_MIXER)),
}  # fmt: skip
_OF_GEMMA4 = {
    "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm", "layer_output_scale": "layer_scalar",
}  # fmt: skip
_TOP_OF_GEMMA4 = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
# Vectors of a mixer, whose names do not end with ".weight" there.
_OF_MIXERS = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
_OF_MIXER = re.compile(rf"blk\.(\d+)\.({'|'.join(map(re.escape, _OF_MIXERS))})")


@lru_cache
def _tables(model_type: str) -> tuple[str, dict[str, str], dict[str, str]]:
    """The prefix of names, those outside of blocks, and those in blocks."""
    names = _OTHERS[model_type] if model_type in _OTHERS else FAMILIES[model_type].names
    block, decodes = names.block, names.last_norm is not None
    prefix = names.prefixes[0] if decodes else ""
    last = "token_embd_norm" if model_type == "lfm2" else "output_norm"
    top: dict[str, Any] = {"token_embd": names.tokens, last: names.last_norm, "token_types": names.types}
    top |= {"position_embd": names.positions, **({} if decodes else {"token_embd_norm": names.first_norm})}
    outside = {stem: f"{prefix}{name}" for stem, name in top.items() if name is not None}
    if decodes:
        outside |= {"output": "lm_head", **(_TOP_OF_GEMMA4 if model_type == "gemma4_text" else {})}
    norms = ("attn_norm", "ffn_norm") if block.norm_first else ("attn_output_norm", "layer_output_norm")
    if model_type in _AFTER_ATTENTION:
        norms = norms[0], _POST_NORMS[0]
    found: dict[str, Any] = {norms[0]: block.attention_norm, norms[1]: block.inner_norm}
    found["attn_output"] = block.attended
    queries = ("attn_q", "attn_k", "attn_v") if len(block.qkv) > 1 else ("attn_qkv",)
    found |= dict(zip(queries, block.qkv, strict=True))
    found |= dict(zip(("attn_q_norm", "attn_k_norm"), block.head_norms or (), strict=False))
    found |= dict(zip(_POST_NORMS, block.post_norms or (), strict=False))
    forward = {"gate": block.gate, "up": block.inner, "down": block.outer}
    if block.gate == block.inner:
        del forward["gate"]
    ends = {"": "", **({} if block.router is None else {"_exps": block.experts})}
    if block.shared is not None:
        found["ffn_gate_inp_shexp"], ends["_shexp"] = block.shared
        ends |= {"": block.shared[1]} if model_type == "granitemoehybrid" else {}
    for end, inner in ends.items():
        found |= {f"ffn_{part}{end}": f"{inner}{name}" for part, name in forward.items() if name is not None}
    sinks = block.sinks and block.sinks.removesuffix(".weight")
    found |= {"ffn_gate_inp": block.router, "attn_sinks": sinks}
    mixer, of_mixer = _MIXERS.get(model_type, ("", {}))
    found |= {stem: f"{mixer}.{name}" for stem, name in of_mixer.items()}
    found |= _OF_GEMMA4 if model_type == "gemma4_text" else {}
    inside = {stem: name for stem, name in found.items() if name is not None}
    return f"{prefix}{block.prefix}", outside, inside


def known_name(model_type: str, name: str) -> str | None:
    """The name of a tensor as transformers has it; None for one that no model here has."""
    prefix, outside, inside = _tables(model_type)
    if found := _OF_MIXER.fullmatch(name):
        mixer, _ = _MIXERS.get(model_type, (None, {}))
        return mixer and f"{prefix.format(found[1])}{mixer}.{_OF_MIXERS[found[2]]}"
    if found := IN_BLOCK.fullmatch(name):
        number, part, expert, kind = found.groups()
        if part not in inside or (expert is None) == part.endswith("_exps"):
            return None
        return f"{prefix.format(number)}{inside[part].format(expert)}.{kind}"
    stem, _, kind = name.rpartition(".")
    kinds = ("weight", "bias") if stem == "token_embd_norm" else ("weight",)
    return f"{outside[stem]}.{kind}" if stem in outside and kind in kinds else None
