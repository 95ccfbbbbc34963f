"""GGUF files of models: how they are opened, and what they say as config.json says it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from fastattn._gguf import GgufFile, Strings
from fastattn.models._files import Config, ModelError, opened_gguf
from fastattn.models._gguf_rows import (
    ARCHITECTURES,
    LONG_FACTORS,
    OF_GRANITE,
    ROWS,
    SIZES,
    WINDOW,
    Row,
    layers_of,
)
from fastattn.models._gguf_tokenizer import end_ids

_OF_LAYERS = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
IN_BLOCK = re.compile(r"blk\.(\d+)\.((?:shortconv\.)?\w+?)(?:\.(\d+))?\.(weight|bias)")
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")
_MOST_EXPERTS = 1 << 12
_MOST_TENSORS = 1 << 18  # where those of experts are apart: more than three times those of the largest models
_MOST_PAIRS = 1 << 16  # of dimensions of a head

# What files of experts may say otherwise, and what is supported: a softmax, and no expert for every token.
_OF_EXPERTS = {
    "expert_shared_count": 0,
    "expert_gating_func": 1,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.0,
    "leading_dense_block_count": 0,
}
# Keys of other models' attention and experts, which change results.
_OF_OTHERS = ("attention.clamp_kqv", "attention.max_alibi_bias", "swiglu_clamp_exp", "swiglu_clamp_shexp")
_SCALING = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_attn_factor": "attention_factor",
    "yarn_log_multiplier": "mscale_all_dim",
}
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def _said(path: Path, file: GgufFile) -> tuple[str, Row, Config]:
    """The `model_type` of a file, its row, and the keys under its architecture's name."""
    model_type = Config.of(path, file.metadata).choice("general.architecture", ARCHITECTURES)
    prefix = f"{file.metadata['general.architecture']}."
    keys = {key.removeprefix(prefix): x for key, x in file.metadata.items() if key.startswith(prefix)}
    return model_type, ROWS[model_type], Config.of(path, keys, prefix)


def opened(path: Path, stack: ExitStack) -> GgufFile:
    """The file, which `stack` closes."""
    file = stack.enter_context(opened_gguf(path))
    _, row, own = _said(path, file)
    _join_layers(own, row)
    file.metadata |= {f"{own.prefix}{key}": x for key, x in own.values.items()}
    if row.guesses:  # in further layers
        layers = layers_of(own)
        blocks = [_BLOCK.match(name) for name in file.names]
        file.names = [
            name for name, x in zip(file.names, blocks, strict=True) if x is None or int(x[1]) < layers
        ]
    if (types := "token_types.weight") in file.names and len(file.shape(types)) == 1:
        file.as_row(types)  # older converters wrote a table of one type so
    names: list[str] = []
    for name in file.names:
        found = IN_BLOCK.fullmatch(name)
        if found and found[2] in ("attn_q", "attn_k") and row.interleaved:
            file.interleaved[name] = _head_dim(own)
        if not (found and found[2].endswith("_exps")):
            names.append(name)
            continue
        axes, shape = "(experts, out, in)" if found[4] == "weight" else "(experts, out)", file.shape(name)
        if len(shape) != axes.count(",") + 1 or shape[0] > _MOST_EXPERTS:
            came = f"{path}: {name!r} has shape {shape}"
            raise ModelError(f"{came}; expected {axes}, of at most {_MOST_EXPERTS}")
        if len(names) + shape[0] > _MOST_TENSORS:
            came = f"{path}: {name!r} has {shape[0]} experts, after {len(names)} tensors"
            raise ModelError(f"{came}; expected at most {_MOST_TENSORS} together")
        names += file.split(name)
    file.names = names
    return file


def _join_layers(own: Config, row: Row) -> None:
    """Make one number of an array that has the same one for each layer, but where it tells their kinds."""
    for key in _OF_LAYERS:
        if not isinstance(each := own.values.get(key), np.ndarray):
            continue
        layers = own.size("block_count")
        if each.size != layers:
            raise own.wrong(key, each, f"a number for each of {layers} layers")
        if key.endswith("_kv") and row.mixes_by_heads:
            continue
        if (each == each[0]).all():
            own.values[key] = each[0].item()
        elif not row.sizes_by_layer or key.endswith("head_count"):
            raise own.wrong(key, each.tolist(), "the same number for all layers")


def config_of(path: Path, file: GgufFile) -> Config:
    """The values that config.json would have; keys of other models that change results are refused."""
    model_type, row, own = _said(path, file)
    said = Config.of(path, file.metadata)
    parts = said.size("split.count", 1, low=0)
    if parts > 1:
        raise said.wrong("split.count", parts, "a model in one file")
    ends = end_ids(said, _token_count(said, file))
    if row.alone is not None:
        return Config.of(path, row.alone(own, file))
    none = f"none in a {model_type}"
    if experts := own.size("expert_count", 0, low=0):
        if not row.experts:
            raise own.wrong("expert_count", experts, none)
        own.refuse(**_OF_EXPERTS)
    own.refuse_any(_OF_OTHERS, none)
    own.refuse(**row.only)
    if not own.get("attention.causal", bool, True):
        raise own.wrong("attention.causal", False, "True")
    if not row.multiplied:
        own.refuse_any(OF_GRANITE, none)
    values: dict[str, Any] = {"model_type": model_type}
    for key, name in {**SIZES, **OF_GRANITE}.items():
        value = own.values.get(key)
        value = value.tolist() if isinstance(value, np.ndarray) else value
        if key == WINDOW and value == 0:  # as Phi-4 says that there is none
            value, values[name] = None, None
        if value is not None:
            values[name] = value
    for key in ("attention.layer_norm_rms_epsilon", *row.needs):
        own.number(key)
    if experts:
        own.size("expert_used_count")
    head_dim = _head_dim(own)
    usual = {"num_key_value_heads": values.get("num_attention_heads"), "rope_theta": 1e4}
    values = {**usual, "attention_multiplier": head_dim**-0.5, **values}  # as llama.cpp
    values["norm_topk_prob"] = True  # llama.cpp always does
    if "token_embd.weight" in file.names:
        values["vocab_size"] = file.shape("token_embd.weight")[0]
    values["tie_word_embeddings"] = "output.weight" not in file.names
    values["attention_bias"] = any(name.endswith(".attn_output.bias") for name in file.names)
    rotated = own.size("rope.dimension_count", head_dim)
    if row.rotates_part and rotated <= head_dim:
        values["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise own.wrong("rope.dimension_count", rotated, str(head_dim))
    values["head_dim"] = head_dim
    values["rope_scaling"] = _scaling(own, file, head_dim, row.factors)
    if not row.grown:
        own.refuse_any(("attention.temperature_scale",), "a mistral3")
    values["eos_token_id"] = ends or None
    if row.values is not None:
        values |= row.values(own, values, file)
    return Config.of(path, values)


def _token_count(said: Config, file: GgufFile) -> int:
    """The number of tokens, at most the rows of their table: further rows are padding."""
    table, tokens = "token_embd.weight", said.values.get(key := "tokenizer.ggml.tokens")
    if table not in file.names:
        raise ModelError(f"{said.path}: {table!r} is missing")
    count = file.shape(table)[0]
    if not isinstance(tokens, Strings):
        return count
    if tokens.number > count:
        came = f"{key!r} has {tokens.number} strings"
        raise ModelError(f"{said.path}: {came}; expected at most {count}, the rows of {table!r}")
    return tokens.number


def usual_sampling(path: Path) -> dict[str, Any]:
    """Options of `generate` that a file recommends."""
    with opened_gguf(path) as file:
        said = Config.of(path, file.metadata)
    found = {}
    for key, option in _SAMPLING.items():
        value = said.values.get(name := f"general.sampling.{key}")
        if value is None:
            continue
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise said.wrong(name, value, "a number of at least 0")
        found[option] = value
    return found if found.get("temperature") else {}


def _head_dim(own: Config) -> int:
    """Features of a head of queries or keys."""
    key, value = (own.optional_size(f"attention.{name}_length") for name in ("key", "value"))
    if key is None:
        key = own.divided("embedding_length", "attention.head_count")
    if value not in (None, key):
        raise own.wrong("attention.value_length", value, f"that of keys, {key}")
    return key


def _scaling(own: Config, file: GgufFile, head_dim: int, names: Mapping[str, str]) -> dict[str, Any]:
    """The scaling of rotary positions, as config.json would say it."""
    begin = "rope.scaling."
    kind = own.one_of(f"{begin}type", ("none", "linear", "yarn", "longrope"), "none")
    given = {key.removeprefix(begin): x for key, x in own.values.items() if key.startswith(begin)}
    both = names is not LONG_FACTORS  # factors for short texts, and for long ones
    known = {**_SCALING, "attn_factor": "attention_factor"} if both else _SCALING
    if unknown := sorted(given.keys() - {*known, "finetuned"}):
        came = f"{own.path}: {own.prefix + begin + unknown[0]!r} is not known"
        raise ModelError(f"{came}; expected one of {', '.join(known)}")
    linear = own.number("rope.scale_linear", 1.0)
    if linear != 1:
        raise own.wrong("rope.scale_linear", linear, f"'{own.prefix}{begin}type'")
    found = {known[key]: x for key, x in given.items() if key in known}
    if any(name in file.names for name in names.values()):
        if kind != "none" and not (both and kind == "longrope"):
            came = f"there are {', '.join(set(names.values()))}, and a scaling"
            raise ModelError(f"{own.path}: {came}; expected one")
        pairs = own.size("rope.dimension_count", head_dim) // 2
        each = {key: _factors(own, file, name, pairs) for key, name in names.items()}
        usual = {"attention_factor": 1.0, "original_max_position_embeddings": 2}
        return {**usual, **(found if both else {}), **each, "rope_type": "longrope"}
    if "mscale_all_dim" in found:
        found["mscale"] = 1.0
    return {"rope_type": "default"} if kind == "none" else found


def _factors(own: Config, file: GgufFile, name: str, pairs: int) -> list[float]:
    """Divisors of the frequencies."""
    fits = name in file.names and file.kind(name) == "F32" and file.shape(name) == (pairs,)
    if fits and pairs <= _MOST_PAIRS:
        factors = file.get_tensor(name)
        if np.isfinite(factors).all() and (factors > 0).all():
            found: list[float] = factors.tolist()
            return found
    expected = f"float32 numbers above 0, as many as {own.path} rotates pairs"
    raise ModelError(f"{own.path}: {name!r}: there are others; expected {expected}")
