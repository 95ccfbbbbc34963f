"""Values of config.json and options of `generate`, made of what GGUF files say."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.values import short
from fastattn._gguf import Strings
from fastattn.models import _gguf_bert, _gguf_hybrid
from fastattn.models._files import Config, ModelError
from fastattn.models._gguf import architecture, head_dim_of, known_name, names_in_file, opened_alone
from fastattn.models._gguf_tokenizer import end_ids

if TYPE_CHECKING:
    from pathlib import Path

    from fastattn._gguf import GgufFile

_MOST_PAIRS = 1 << 16  # of dimensions of a head

# What frequencies of rotary positions are divided by: in all models but Phi-3, and there in two ways.
_FACTORS = "rope_freqs.weight"
_PHI3_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
# Keys under the architecture's name, and config.json's.
_SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_OF_GRANITE = {
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_WITH_EXPERTS = ("gpt_oss", "granitemoehybrid", "llama", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text")
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
# Keys that models need beside those of all models, where config.json's may be missing.
_WINDOW, _OF_EXPERT = ("attention.sliding_window",), ("expert_feed_forward_length",)
_REQUIRED = {
    **dict.fromkeys(("gemma3_text", "gemma4_text", "gpt_oss"), _WINDOW),
    **dict.fromkeys(("qwen3_moe", "qwen3_next", "qwen3_5_moe_text"), _OF_EXPERT),
    "granite": ("logit_scale",),
}
_SCALING = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_attn_factor": "attention_factor",
    "yarn_log_multiplier": "mscale_all_dim",
}
# And config.json's names of what is made of other keys, or of tensors.
_MADE_OF = {
    "conv_L_cache": "shortconv.l_cache",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    **dict.fromkeys(("mamba_d_conv", "linear_conv_kernel_dim"), "ssm.conv_kernel"),
    **dict.fromkeys(("mamba_d_state", "linear_key_head_dim"), "ssm.state_size"),
    **dict.fromkeys(("mamba_n_groups", "linear_num_key_heads"), "ssm.group_count"),
    **dict.fromkeys(("mamba_n_heads", "linear_num_value_heads"), "ssm.time_step_rank"),
    "num_experts": "expert_count",
    "layer_types": "attention.sliding_window_pattern",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "per_layer_config": "attention.head_count_kv",
    "partial_rotary_factor": "rope.dimension_count",
    "rope_parameters": "rope.scaling.type",
    "llama_4_scaling_beta": "attention.temperature_scale",
}
_MADE_OF_TENSORS = {
    "vocab_size": "token_embd.weight",
    "vocab_size_per_layer_input": "per_layer_token_embd.weight",
}
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def config_of(path: Path, file: GgufFile) -> Config:
    """The values that config.json would have; keys of other models that change results are refused."""
    said = Config.of(path, file.metadata)
    model_type, _ = architecture(path, file.metadata)
    prefix = file.metadata["general.architecture"]
    parts = said.size("split.count", 1, low=0)
    if parts > 1:
        raise ModelError(f"{path}: 'split.count' is {parts}; expected a model in one file")
    for name in file.names:
        factors = _PHI3_FACTORS.values() if model_type == "phi3" else (_FACTORS,)
        if known_name(model_type, name) is None and name not in factors:
            raise ModelError(f"{path}: the tensor {short(name)} is not known")
    ends = end_ids(said, _token_count(said, file))
    if model_type == "bert":
        return Config.of(path, _gguf_bert.values_of(said, file))
    if experts := said.size(f"{prefix}.expert_count", 0, low=0):
        if model_type not in _WITH_EXPERTS:
            came = f"'{prefix}.expert_count' is {experts}"
            raise ModelError(f"{path}: {came}; expected none in a {model_type}")
        said.refuse(**{f"{prefix}.{key}": value for key, value in _OF_EXPERTS.items()})
    if found := [key for key in _OF_OTHERS if f"{prefix}.{key}" in file.metadata]:
        raise ModelError(f"{path}: there is a '{prefix}.{found[0]}'; expected none in a {model_type}")
    if model_type == "granite":  # heads are rotated where this is true
        said.refuse(**{f"{prefix}.rope.scaling.finetuned": True})
    if model_type == "gpt_oss":  # layers in turn have a window
        said.refuse(**{f"{prefix}.attention.sliding_window_pattern": 2})
    if not said.get(f"{prefix}.attention.causal", bool, True):
        raise ModelError(f"{path}: '{prefix}.attention.causal' is False; expected True")
    values: dict[str, Any] = {"model_type": model_type}
    known = dict(_SIZES)
    if model_type in ("granite", "granitemoehybrid"):
        known |= _OF_GRANITE
    elif found := [key for key in _OF_GRANITE if f"{prefix}.{key}" in file.metadata]:
        raise ModelError(f"{path}: there is a '{prefix}.{found[0]}'; expected none in a {model_type}")
    for key, name in known.items():
        value = file.metadata.get(f"{prefix}.{key}")
        value = value.tolist() if isinstance(value, np.ndarray) else value
        if key == "attention.sliding_window" and value == 0:  # as Phi-4 says that there is none
            value, values[name] = None, None
        if value is not None:
            values[name] = value
    for key in ("attention.layer_norm_rms_epsilon", *_REQUIRED.get(model_type, ())):
        said.number(f"{prefix}.{key}")
    if experts:
        said.size(f"{prefix}.expert_used_count")
    head_dim = head_dim_of(path, file)
    usual = {"num_key_value_heads": values.get("num_attention_heads"), "rope_theta": 1e4}
    values = {**usual, "attention_multiplier": head_dim**-0.5, **values}  # as llama.cpp
    if model_type in ("gemma2", "gemma3_text"):  # of each size, the scale that llama.cpp has
        largest = values.get("num_hidden_layers") == (46 if model_type == "gemma2" else 62)
        sizes = f"{prefix}.embedding_length", f"{prefix}.attention.head_count"
        values["query_pre_attn_scalar"] = said.divided(*sizes) if largest else head_dim
    if model_type in _gguf_hybrid.VALUES:
        values |= _gguf_hybrid.VALUES[model_type](said, prefix, values)
    if model_type == "llama" and experts:
        values["model_type"] = "mixtral"
    elif model_type == "llama" and values.get("sliding_window"):
        values["model_type"] = "mistral"
    elif model_type == "olmo2" and values.get("sliding_window"):
        values["model_type"] = "olmo3"
        values["layer_types"] = _kinds(said, prefix)
    values["norm_topk_prob"] = True  # llama.cpp always does
    if "token_embd.weight" in file.names:
        values["vocab_size"] = file.shape("token_embd.weight")[0]
    values["tie_word_embeddings"] = "output.weight" not in file.names
    values["attention_bias"] = any(name.endswith(".attn_output.bias") for name in file.names)
    rotated = said.size(f"{prefix}.rope.dimension_count", head_dim)
    if (model_type == "phi3" or model_type in _gguf_hybrid.QWENS) and rotated <= head_dim:
        values["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise ModelError(f"{path}: '{prefix}.rope.dimension_count' is {rotated}; expected {head_dim}")
    values["head_dim"] = head_dim
    values["rope_scaling"] = _scaling(path, file, prefix)
    if model_type == "gpt_oss" and values["rope_scaling"]["rope_type"] == "yarn":
        values["rope_scaling"]["truncate"] = False  # as it was trained, though llama.cpp does truncate
    growth = said.values.get(f"{prefix}.attention.temperature_scale")
    if model_type == "ministral3":
        values["rope_scaling"]["llama_4_scaling_beta"] = growth
    elif growth is not None:
        raise ModelError(f"{path}: there is a '{prefix}.attention.temperature_scale'; expected a mistral3")
    if model_type == "gemma4_text":
        values |= _of_gemma4(said, prefix, values, file)
    values["eos_token_id"] = ends or None
    return Config.of(path, values)


def in_its_words(file: GgufFile, model_type: str, message: str) -> str:
    """A message about what `config_of` and `renamed` give, with the file's own names of keys and tensors."""
    prefix = file.metadata["general.architecture"]
    keys = {**_SIZES, **_OF_GRANITE, **_gguf_bert.SIZES}
    keys |= {f"rope.scaling.{key}": name for key, name in _SCALING.items()}
    names = {name: f"{prefix}.{key}" for key, name in keys.items()}
    names |= {name: f"{prefix}.{key}" for name, key in _MADE_OF.items()} | _MADE_OF_TENSORS

    def own(found: re.Match[str]) -> str:
        if (name := found[1]) in names:
            return f"'{names[name]}'"
        return " or ".join(f"'{x}'" for x in names_in_file(model_type, name)) or found[0]

    message = re.sub(r"'([\w.]+)'", own, message)
    return re.sub(r"'(blk\.\d+\.\w+_exps)\.(\d+)\.(weight|bias)'", r"'\1.\3' of expert \2", message)


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


def _of_gemma4(said: Config, prefix: str, values: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    """Values of Gemma 4 that a file says otherwise: each layer has its sizes."""
    count, kinds = said.size(f"{prefix}.block_count"), _kinds(said, prefix)
    if kinds is None:
        name = f"{prefix}.attention.sliding_window_pattern"
        raise said.wrong(name, None, f"{count} of bool")
    shared = said.size(f"{prefix}.attention.shared_kv_layers", 0, low=0)
    near = said.size(f"{prefix}.attention.key_length_swa")
    said.refuse(**{f"{prefix}.{key}_swa": near for key in ("attention.value_length", "rope.dimension_count")})
    sizes = {"full_attention": values["head_dim"], "sliding_attention": near}
    heads, inner = values.get("num_key_value_heads"), values.get("intermediate_size")
    if not isinstance(heads, list):
        heads = [heads] * count
    doubled = isinstance(inner, list)
    if isinstance(inner, list):
        if inner != [inner[0] * (2 if i >= count - shared else 1) for i in range(count)]:
            name = f"{prefix}.feed_forward_length"
            raise said.wrong(
                name, inner, "the same for all layers, or twice as many in those with others' keys"
            )
        inner = inner[0]
    own = [i for i in range(count - shared) if kinds[i] == "full_attention"]
    given = "per_layer_token_embd.weight" in file.names
    return {
        "num_key_value_heads": heads[0],
        "intermediate_size": inner,
        "use_double_wide_mlp": doubled,
        "num_kv_shared_layers": shared,
        "layer_types": kinds,
        "per_layer_config": {
            str(i): {"head_dim": sizes[kind], "num_key_value_heads": heads[i]} for i, kind in enumerate(kinds)
        },
        "attention_k_eq_v": not any(f"blk.{i}.attn_v.weight" in file.names for i in own),
        "hidden_size_per_layer_input": said.size(f"{prefix}.embedding_length_per_layer_input", 0, low=0),
        "vocab_size_per_layer_input": file.shape("per_layer_token_embd.weight")[0] if given else None,
        "rope_parameters": {
            "full_attention": {
                **_proportional(said, values["rope_scaling"]),
                "rope_theta": values.get("rope_theta"),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": said.number(f"{prefix}.rope.freq_base_swa", 1e4),
            },
        },
        "rope_scaling": None,
    }


def _proportional(said: Config, scaling: dict[str, Any]) -> dict[str, Any]:
    """A scaling whose divisors are 1, and beyond all numbers for pairs that are not rotated."""
    divisors = scaling.get("long_factor")
    if divisors is None:
        return scaling
    rotated = divisors.count(1.0)
    if divisors[:rotated] != [1.0] * rotated or min(divisors[rotated:], default=1e30) < 1e20:
        raise said.wrong(_FACTORS, divisors, "1 for each pair that is rotated, then 1e30")
    # A half more: what this becomes is cut to an integer.
    return {"rope_type": "proportional", "partial_rotary_factor": (rotated + 0.5) / len(divisors)}


def usual_sampling(path: Path) -> dict[str, Any]:
    """Options of `generate` that a file recommends."""
    with opened_alone(path) as file:
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


def _kinds(said: Config, prefix: str) -> list[str] | None:
    """The kinds of layers, as config.json would say them; None if the file does not."""
    slides = said.values.get(key := f"{prefix}.attention.sliding_window_pattern")
    if slides is None:
        return None
    count = said.size(f"{prefix}.block_count")
    if not (isinstance(slides, np.ndarray) and slides.dtype == np.bool_ and slides.size == count):
        raise said.wrong(key, slides, f"{count} of bool")
    return [("full_attention", "sliding_attention")[slid] for slid in slides.tolist()]


def _scaling(path: Path, file: GgufFile, prefix: str) -> dict[str, Any]:
    """The scaling of rotary positions, as config.json would say it."""
    said = Config.of(path, file.metadata)
    begin = f"{prefix}.rope.scaling."
    kind = said.choice(f"{begin}type", {x: x for x in ("none", "linear", "yarn", "longrope")}, "none")
    given = {key.removeprefix(begin): x for key, x in file.metadata.items() if key.startswith(begin)}
    known = {**_SCALING, "attn_factor": "attention_factor"} if prefix == "phi3" else _SCALING
    if unknown := sorted(given.keys() - {*known, "finetuned"}):
        raise ModelError(f"{path}: {begin + unknown[0]!r} is not known; expected one of {', '.join(known)}")
    linear = said.number(f"{prefix}.rope.scale_linear", 1.0)
    if linear != 1:
        raise ModelError(f"{path}: '{prefix}.rope.scale_linear' is {linear}; expected '{begin}type'")
    found = {known[key]: x for key, x in given.items() if key in known}
    names = _PHI3_FACTORS if prefix == "phi3" else dict.fromkeys(("short_factor", "long_factor"), _FACTORS)
    if any(name in file.names for name in names.values()):
        if kind != "none" and (prefix, kind) != ("phi3", "longrope"):
            raise ModelError(
                f"{path}: there are {', '.join(set(names.values()))}, and a scaling; expected one"
            )
        each = {key: _factors(path, file, name) for key, name in names.items()}
        usual = {"attention_factor": 1.0, "original_max_position_embeddings": 2}
        return {**usual, **(found if prefix == "phi3" else {}), **each, "rope_type": "longrope"}
    if "mscale_all_dim" in found:
        found["mscale"] = 1.0
    return {"rope_type": "default"} if kind == "none" else found


def _factors(path: Path, file: GgufFile, name: str) -> list[float]:
    """Divisors of the frequencies."""
    prefix = file.metadata["general.architecture"]
    rotated = Config.of(path, file.metadata).size(f"{prefix}.rope.dimension_count", head_dim_of(path, file))
    shape = (rotated // 2,)
    if (
        name in file.names
        and file.kind(name) == "F32"
        and file.shape(name) == shape
        and shape[0] <= _MOST_PAIRS
    ):
        factors = file.get_tensor(name)
        if np.isfinite(factors).all() and (factors > 0).all():
            found: list[float] = factors.tolist()
            return found
    expected = f"float32 numbers above 0, as many as {path} rotates pairs"
    raise ModelError(f"{path}: {name!r}: there are others; expected {expected}")
