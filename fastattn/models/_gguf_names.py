"""Names of tensors in GGUF files, by what they are in a block: the names of a family say the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from fastattn.models._families.bert import BERT
from fastattn.models._families.gemma4 import GEMMA4
from fastattn.models._families.gpt import GPT_OSS
from fastattn.models._families.hybrid import GRANITE_FILES, LFM2, QWEN, QWEN_EXPERTS
from fastattn.models._families.llama import FAMILIES
from fastattn.models._families.shared import ModelNames
from fastattn.models._gguf import IN_BLOCK

_POST_NORMS = "post_attention_norm", "post_ffw_norm"


class _Row(NamedTuple):
    """Names of a model's tensors, and what its files call otherwise."""

    names: ModelNames
    norms: tuple[str, str] = ("attn_norm", "ffn_norm")  # of attention, and of the feed-forward
    last: str = "output_norm"
    mixer: str | None = None  # in place of attention, in some layers
    of_mixer: Mapping[str, str] = {}
    outside: Mapping[str, str] = {}  # further names, outside of blocks and inside
    inside: Mapping[str, str] = {}
    shared_is_plain: bool = False  # the expert of every row, where there are no others


_QWEN = _Row(
    QWEN_EXPERTS, ("attn_norm", _POST_NORMS[0]), mixer="linear_attn", of_mixer={
        "attn_qkv": "in_proj_qkv", "attn_gate": "in_proj_z", "ssm_ba": "in_proj_ba", "ssm_beta": "in_proj_b",
        "ssm_alpha": "in_proj_a", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj",
    },
)  # fmt: skip
_OTHERS = {  # than families like Llama
    "bert": _Row(BERT, ("attn_output_norm", "layer_output_norm"), outside={
        "position_embd": "embeddings.position_embeddings", "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
    }),
    "gemma4_text": _Row(
        GEMMA4,
        outside={
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        inside={
            "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm", "layer_output_scale": "layer_scalar",
        },
    ),
    "gpt_oss": _Row(GPT_OSS, ("attn_norm", _POST_NORMS[0])),
    "granitemoehybrid": _Row(
        GRANITE_FILES, mixer="mamba", shared_is_plain=True,
        of_mixer={"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"},
    ),
    "lfm2": _Row(
        LFM2, last="token_embd_norm", mixer="conv",
        of_mixer={f"shortconv.{part}": part for part in ("conv", "in_proj", "out_proj")},
    ),
    "qwen3_5_text": _QWEN._replace(names=QWEN),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), _QWEN),
}  # fmt: skip
_ROWS = {**{model_type: _Row(family.names) for model_type, family in FAMILIES.items()}, **_OTHERS}
# Vectors of a mixer, whose names do not end with ".weight" there.
_OF_MIXERS = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
_OF_MIXER = re.compile(rf"blk\.(\d+)\.({'|'.join(map(re.escape, _OF_MIXERS))})")


@lru_cache
def _tables(model_type: str) -> tuple[str, dict[str, str], dict[str, str]]:
    """The prefix of a block, names outside of blocks, and those inside."""
    row = _ROWS[model_type]
    names, block = row.names, row.names.block
    prefix = "" if names.last_norm is None else names.prefixes[0]
    outside = {"token_embd": f"{prefix}{names.tokens}", **row.outside}
    if names.last_norm is not None:
        outside |= {row.last: f"{prefix}{names.last_norm}", "output": "lm_head"}
    found: dict[str, Any] = dict(zip(row.norms, (block.attention_norm, block.inner_norm), strict=True))
    found["attn_output"], found["ffn_gate_inp"] = block.attended, block.router
    found["attn_sinks"] = block.sinks and block.sinks.removesuffix(".weight")
    queries = ("attn_q", "attn_k", "attn_v") if len(block.qkv) > 1 else ("attn_qkv",)
    found |= dict(zip(queries, block.qkv, strict=True))
    found |= dict(zip(("attn_q_norm", "attn_k_norm"), block.head_norms or (), strict=False))
    found |= dict(zip(_POST_NORMS, block.post_norms or (), strict=False))
    ends = {"": "", **({} if block.router is None else {"_exps": block.experts})}
    if block.shared is not None:
        found["ffn_gate_inp_shexp"], ends["_shexp"] = block.shared
        ends[""] = block.shared[1] if row.shared_is_plain else ""
    gate = None if block.gate == block.inner else block.gate
    for part, name in (("gate", gate), ("up", block.inner), ("down", block.outer)):
        found |= {f"ffn_{part}{end}": name and f"{inner}{name}" for end, inner in ends.items()}
    found |= {stem: f"{row.mixer}.{name}" for stem, name in row.of_mixer.items()} | {**row.inside}
    inside = {stem: name for stem, name in found.items() if name is not None}
    return f"{prefix}{block.prefix}", outside, inside


def known_name(model_type: str, name: str) -> str | None:
    """The name of a tensor as transformers has it; None for one that no model here has."""
    prefix, outside, inside = _tables(model_type)
    if found := _OF_MIXER.fullmatch(name):
        mixer = _ROWS[model_type].mixer
        return mixer and f"{prefix.format(found[1])}{mixer}.{_OF_MIXERS[found[2]]}"
    if found := IN_BLOCK.fullmatch(name):
        number, part, expert, kind = found.groups()
        if part not in inside or (expert is None) == part.endswith("_exps"):
            return None
        return f"{prefix.format(number)}{inside[part].format(expert)}.{kind}"
    stem, _, kind = name.rpartition(".")
    kinds = ("weight", "bias") if stem == "token_embd_norm" else ("weight",)
    return f"{outside[stem]}.{kind}" if stem in outside and kind in kinds else None
