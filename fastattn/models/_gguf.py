"""GGUF files of models: how they are recognised, opened and described, and what their tensors are called."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.values import short
from fastattn._gguf import MAGIC, GgufFile, Strings
from fastattn.models import _gguf_bert, _gguf_hybrid
from fastattn.models._files import Config, ModelError, lfs_hint

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path

SUFFIX = ".gguf"

# By the file's `general.architecture`, the `model_type` of config.json, and whether the rows of each head of
# queries and keys are interleaved: there pairs of rotary positions are neighbours.
ARCHITECTURES = {
    "bert": ("bert", False),
    "gemma2": ("gemma2", False),
    "gemma3": ("gemma3_text", False),
    "gemma4": ("gemma4_text", False),
    "gpt-oss": ("gpt_oss", False),
    "granite": ("granite", True),
    "granitehybrid": ("granitemoehybrid", True),
    "lfm2": ("lfm2", False),
    "llama": ("llama", True),
    "mistral3": ("ministral3", True),
    "olmo2": ("olmo2", False),
    "phi3": ("phi3", False),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
    "qwen3moe": ("qwen3_moe", False),
    "qwen3next": ("qwen3_next", False),
    "qwen35": ("qwen3_5_text", False),
    "qwen35moe": ("qwen3_5_moe_text", False),
    "smollm3": ("smollm3", True),
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_NAMES = {**_BLOCK_NAMES, "ffn_norm": "pre_feedforward_layernorm", **_POST_NORMS}
_GEMMA4_TOP = {
    **_NAMES,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_GEMMA4_NAMES = {
    **_GEMMA_NAMES,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale": "layer_scalar",
}
_OLMO_NAMES = {**_BLOCK_NAMES, **_POST_NORMS}
_GPT_OSS_NAMES = {
    **_BLOCK_NAMES,
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
_MIXTRAL_NAMES = {
    **_BLOCK_NAMES,
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_PHI3_NAMES = {**_BLOCK_NAMES, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_QWEN_NEXT_NAMES = {**_BLOCK_NAMES, **_gguf_hybrid.QWEN_NAMES}
del _QWEN_NEXT_NAMES["ffn_norm"]
_OTHER_NAMES = {
    "bert": _gguf_bert.BLOCK,
    "gemma2": _GEMMA_NAMES,
    "gemma3_text": _GEMMA_NAMES,
    "gemma4_text": _GEMMA4_NAMES,
    "gpt_oss": _GPT_OSS_NAMES,
    "granitemoehybrid": {**_BLOCK_NAMES, **_gguf_hybrid.GRANITE_NAMES},
    "lfm2": _gguf_hybrid.LFM2_NAMES,
    "mixtral": _MIXTRAL_NAMES,
    **dict.fromkeys(("olmo2", "olmo3"), _OLMO_NAMES),
    "phi3": _PHI3_NAMES,
    **dict.fromkeys(_gguf_hybrid.QWENS, _QWEN_NEXT_NAMES),
}
_OTHER_TOPS = {"bert": _gguf_bert.TOP, "gemma4_text": _GEMMA4_TOP, "lfm2": _gguf_hybrid.LFM2_TOP}
_OF_LAYERS = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")
_RENAMED = re.compile(r"(?:model\.layers|encoder\.layer)\.(\d+)\.(?:.*\bexperts\.(\d+)\.)?.*")
_IN_BLOCK = re.compile(r"blk\.(\d+)\.((?:shortconv\.)?\w+?)(?:\.(\d+))?\.(weight|bias)")
_MOST_EXPERTS = 1 << 12
_MOST_TENSORS = 1 << 18  # where those of experts are apart: more than three times those of the largest models


def is_file(path: Path) -> bool:
    """Tell whether the path is that of a GGUF file, by its name or its first bytes."""
    if not os.path.isfile(path):  # unlike Path.is_file(), it raises nothing for a name that is too long
        return False
    if path.suffix.lower() == SUFFIX:
        return True
    try:
        with open(path, "rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def opened(path: Path, stack: ExitStack) -> GgufFile:
    """The file, which `stack` closes."""
    file = stack.enter_context(opened_alone(path))
    model_type, interleaved = architecture(path, file.metadata)
    _join_layers(Config.of(path, file.metadata), model_type)
    if model_type in _gguf_hybrid.QWENS:  # further layers guess tokens
        layers = _gguf_hybrid.layers(Config.of(path, file.metadata), file.metadata["general.architecture"])
        blocks = [_BLOCK.match(name) for name in file.names]
        file.names = [
            name for name, x in zip(file.names, blocks, strict=True) if x is None or int(x[1]) < layers
        ]
    if (types := "token_types.weight") in file.names and len(file.shape(types)) == 1:
        file.as_row(types)  # older converters wrote a table of one type so
    if interleaved:
        for name in file.names:
            found = _IN_BLOCK.fullmatch(name)
            if found and found[2] in ("attn_q", "attn_k"):
                file.interleaved[name] = head_dim_of(path, file)
    names: list[str] = []
    for name in file.names:
        found = _IN_BLOCK.fullmatch(name)
        if not (found and found[2].endswith("_exps")):
            names.append(name)
            continue
        axes, shape = "(experts, out, in)" if found[4] == "weight" else "(experts, out)", file.shape(name)
        if len(shape) != axes.count(",") + 1 or shape[0] > _MOST_EXPERTS:
            raise ModelError(
                f"{path}: {name!r} has shape {shape}; expected {axes}, of at most {_MOST_EXPERTS}"
            )
        if len(names) + shape[0] > _MOST_TENSORS:
            came = f"{name!r} has {shape[0]} experts, after {len(names)} tensors"
            raise ModelError(f"{path}: {came}; expected at most {_MOST_TENSORS} together")
        names += file.split(name)
    file.names = names
    return file


def _join_layers(said: Config, model_type: str) -> None:
    """Make one number of an array that has the same one for each layer, but where it tells their kinds."""
    prefix = said.values["general.architecture"]
    for key in (f"{prefix}.{name}" for name in _OF_LAYERS):
        if not isinstance(each := said.values.get(key), np.ndarray):
            continue
        layers = said.size(f"{prefix}.block_count")
        if each.size != layers:
            raise said.wrong(key, each, f"a number for each of {layers} layers")
        if key.endswith("_kv") and model_type in _gguf_hybrid.BY_HEADS:
            continue
        if (each == each[0]).all():
            said.values[key] = each[0].item()
        elif model_type != "gemma4_text" or key.endswith("head_count"):
            raise said.wrong(key, each.tolist(), "the same number for all layers")


def opened_alone(path: Path) -> GgufFile:
    """The file, which the caller closes; its tensors are as they lie there."""
    try:
        return GgufFile(path, ModelError)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}; expected a GGUF file") from error
    except ModelError as error:
        raise ModelError(lfs_hint(path) or str(error)) from None


def described(path: Path) -> str:
    """The keys of a file, arrays by their sizes, and its tensors by type, as lines of text."""
    if path.is_dir():
        raise ModelError(f"{path} is a folder; expected a GGUF file")
    with opened_alone(path) as file:
        named = ((name if name.isprintable() else short(name), x) for name, x in file.metadata.items())
        lines = [f"{name:40} {_shown(value)}" for name, value in named]
        kinds = Counter(file.kind(name) for name in file.names)
        sizes = dict.fromkeys(kinds, 0)
        for name in file.names:
            sizes[file.kind(name)] += math.prod(file.shape(name))
        lines += [f"{kind:40} {kinds[kind]} tensors, {sizes[kind]:,} numbers" for kind in kinds]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, Strings):
        return f"{value.number:,} strings"
    if isinstance(value, np.ndarray):
        return f"{value.size:,} numbers in {value.dtype}"
    return short(value)


def architecture(path: Path, metadata: dict[str, Any]) -> tuple[str, bool]:
    """The entry of `ARCHITECTURES` for a file's metadata."""
    return Config.of(path, metadata).choice("general.architecture", ARCHITECTURES)


def head_dim_of(path: Path, file: GgufFile) -> int:
    """Features of a head of queries or keys."""
    prefix = file.metadata["general.architecture"]
    config = Config.of(path, file.metadata)
    key, value = (config.optional_size(f"{prefix}.attention.{name}_length") for name in ("key", "value"))
    if key is None:
        key = config.divided(f"{prefix}.embedding_length", f"{prefix}.attention.head_count")
    if value not in (None, key):
        raise config.wrong(f"{prefix}.attention.value_length", value, f"that of keys, {key}")
    return key


def renamed(model_type: str, name: str) -> str:
    """The name of a model's tensor as transformers has it."""
    return known_name(model_type, name) or name


def names_in_file(model_type: str, name: str) -> list[str]:
    """The names of which `renamed` makes this one, or what families make of it."""
    ends, top = ("weight", "bias"), _OTHER_TOPS.get(model_type, _NAMES)
    candidates = [f"{part}.{kind}" for part in top for kind in ends]
    if found := _RENAMED.fullmatch(name):
        block, expert = f"blk.{found[1]}.", f".{found[2]}"
        parts = _OTHER_NAMES.get(model_type, _BLOCK_NAMES)
        each = [part + expert * part.endswith("_exps") for part in parts]
        candidates = [f"{block}{part}.{kind}" for part in each for kind in ends]
        candidates += [block + part for part in _gguf_hybrid.OF_MIXERS]
    return [x for x in candidates if known_name(model_type, x) in (name, f"{name}.weight")]


def known_name(model_type: str, name: str) -> str | None:
    """The name of a tensor as transformers has it; None for one that no model here has."""
    if found := _gguf_hybrid.OF_MIXER.fullmatch(name):
        mixer = _gguf_hybrid.MIXERS.get(model_type)
        return mixer and f"model.layers.{found[1]}.{mixer}.{_gguf_hybrid.OF_MIXERS[found[2]]}"
    if found := _IN_BLOCK.fullmatch(name):
        number, part, expert, kind = found.groups()
        names = _OTHER_NAMES.get(model_type, _BLOCK_NAMES)
        if part not in names or (expert is None) == part.endswith("_exps"):
            return None
        block = "encoder.layer" if model_type == "bert" else "model.layers"
        return f"{block}.{number}.{names[part].format(expert)}.{kind}"
    stem, _, kind = name.rpartition(".")
    names = _OTHER_TOPS.get(model_type, _NAMES)
    kinds = ("weight", "bias") if stem == "token_embd_norm" else ("weight",)
    return f"{names[stem]}.{kind}" if stem in names and kind in kinds else None
