"""GGUF files of models: how they are opened, and what they say as folders of models say it.

A row for each `model_type` has the names of tensors, and which keys it needs, takes, or says otherwise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastattn._args.values import short
from fastattn._gguf import GgufFile, Strings
from fastattn.models._files import Config, ModelError, opened_gguf
from fastattn.models._gguf_tokenizer import end_ids

Values = Callable[[Config, str, dict[str, Any], GgufFile], dict[str, Any]]

_FORWARD = "gate", "up", "down"  # maps of feed-forwards
# Names of tensors: those outside of blocks, and in blocks.
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NAMES = {
    "attn_norm": "input_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in _FORWARD},
    **{f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in _FORWARD},
}
_POST_NORM = {"post_attention_norm": "post_attention_layernorm"}
_OLMO = {**_NAMES, **_POST_NORM, "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA = {**_OLMO, "ffn_norm": "pre_feedforward_layernorm"}
_GEMMA4 = {
    **_GEMMA, "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm", "layer_output_scale": "layer_scalar",
}  # fmt: skip
_GEMMA4_TOP = {
    **_TOP, "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}  # fmt: skip
_GPT_OSS = {**_NAMES, **_POST_NORM, "attn_sinks": "self_attn.sinks", "ffn_gate_inp": "mlp.router"}
_MIXTRAL = {
    **_NAMES, "ffn_gate_inp": "block_sparse_moe.gate",
    **{f"ffn_{part}_exps": f"block_sparse_moe.experts.{{}}.{own}"
       for part, own in (("gate", "w1"), ("up", "w3"), ("down", "w2"))},
}  # fmt: skip
_PHI3 = {**_NAMES, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_LFM2_TOP = {**_TOP, "token_embd_norm": "model.embedding_norm"}  # and no "output_norm"
del _LFM2_TOP["output_norm"]
_LFM2 = {
    "attn_norm": "operator_norm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"attn_{part}_norm": f"self_attn.{part}_layernorm" for part in "qk"},
    "attn_output": "self_attn.out_proj",
    "ffn_norm": "ffn_norm",
    **{f"ffn_{part}": f"feed_forward.{own}" for part, own in (("gate", "w1"), ("up", "w3"), ("down", "w2"))},
    **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
}
_QWEN_NEXT = {
    **{name: x for name, x in _NAMES.items() if name != "ffn_norm"}, **_POST_NORM,
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_ba": "linear_attn.in_proj_ba", "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in _FORWARD},
}  # fmt: skip
_GRANITE = {
    **_NAMES, "ffn_gate_inp": "block_sparse_moe.router.layer",
    **{f"ffn_{part}{end}": f"shared_mlp.{part}_proj" for end in ("", "_shexp") for part in _FORWARD},
    **{f"ffn_{part}_exps": f"block_sparse_moe.experts.{{}}.{part}_proj" for part in _FORWARD},
    "ssm_in": "mamba.in_proj", "ssm_conv1d": "mamba.conv1d", "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}  # fmt: skip
_BERT_TOP = {
    "token_embd": "embeddings.word_embeddings", "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings", "token_embd_norm": "embeddings.LayerNorm",
}  # fmt: skip
_BERT = {
    "attn_q": "attention.self.query", "attn_k": "attention.self.key", "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense", "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense", "ffn_down": "output.dense", "layer_output_norm": "output.LayerNorm",
}  # fmt: skip
# Vectors of a mixer, whose names do not end with ".weight" there.
_OF_MIXERS = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
_OF_MIXER = re.compile(rf"blk\.(\d+)\.({'|'.join(map(re.escape, _OF_MIXERS))})")
_OF_LAYERS = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")
_IN_BLOCK = re.compile(r"blk\.(\d+)\.((?:shortconv\.)?\w+?)(?:\.(\d+))?\.(weight|bias)")
_MOST_EXPERTS = 1 << 12
_MOST_TENSORS = 1 << 18  # where those of experts are apart: more than three times those of the largest models
_MOST_PAIRS = 1 << 16  # of dimensions of a head

# What frequencies of rotary positions are divided by: in all models but Phi-3, and there in two ways.
_FACTORS = "rope_freqs.weight"
_LONG_FACTORS = dict.fromkeys(("short_factor", "long_factor"), _FACTORS)
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
_BERT_KEYS = (
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "context_length",
)
_BERT_SIZES = {**{key: _SIZES[key] for key in _BERT_KEYS}, "attention.layer_norm_epsilon": "layer_norm_eps"}
_BERT_TABLES = {"vocab_size": "token_embd.weight", "type_vocab_size": "token_types.weight"}
_POOLINGS = ("mean", "mean", "cls", "lasttoken")  # the first: none, as where a folder says nothing


def _of_llama(said: Config, prefix: str, values: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    """What else a file of this architecture may be."""
    other = (
        "mixtral" if values.get("num_local_experts") else "mistral" if values.get("sliding_window") else ""
    )
    return {"model_type": other} if other else {}


def _of_olmo(said: Config, prefix: str, values: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    return (
        {"model_type": "olmo3", "layer_types": _kinds(said, prefix)} if values.get("sliding_window") else {}
    )


def _of_gemma(largest: int) -> Values:
    """The scale of scores that llama.cpp has, another one for so many layers."""

    def values_of(said: Config, prefix: str, values: dict[str, Any], file: GgufFile) -> dict[str, Any]:
        sizes = f"{prefix}.embedding_length", f"{prefix}.attention.head_count"
        is_largest = values.get("num_hidden_layers") == largest
        return {"query_pre_attn_scalar": said.divided(*sizes) if is_largest else values["head_dim"]}

    return values_of


def _of_ministral3(said: Config, prefix: str, values: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    growth = said.values.get(f"{prefix}.attention.temperature_scale")
    return {"rope_scaling": {**values["rope_scaling"], "llama_4_scaling_beta": growth}}


def _of_gpt_oss(said: Config, prefix: str, values: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    scaling = values["rope_scaling"]  # as it was trained, though llama.cpp does truncate
    return {"rope_scaling": {**scaling, "truncate": False}} if scaling["rope_type"] == "yarn" else {}


def _of_lfm2(said: Config, prefix: str, values: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    """Values of LFM2 that a file says otherwise."""
    return {
        **_by_heads(said, prefix, values, "conv"),
        "conv_L_cache": said.size(f"{prefix}.shortconv.l_cache"),
        "norm_eps": values.get("rms_norm_eps"),
        "block_auto_adjust_ff_dim": False,
    }


def _of_granite(said: Config, prefix: str, values: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    """Values of Granite's hybrids that a file says otherwise."""
    shared = said.size(f"{prefix}.expert_shared_feed_forward_length", values.get("intermediate_size", 0))
    rotated = said.get(f"{prefix}.rope.scaling.finetuned", bool, True)
    return {
        **_by_heads(said, prefix, values, "mamba"),
        **_mixer_sizes(said, prefix, "mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads"),
        "mamba_expand": said.divided(f"{prefix}.ssm.inner_size", f"{prefix}.embedding_length"),
        "shared_intermediate_size": shared,
        "num_local_experts": values.get("num_local_experts", 0),
        "position_embedding_type": "rope" if rotated else "nope",
    }


def _mixer_sizes(said: Config, prefix: str, *names: str) -> dict[str, Any]:
    """Sizes of mixers, under config.json's names."""
    keys = "conv_kernel", "state_size", "group_count", "time_step_rank"
    return {name: said.size(f"{prefix}.ssm.{key}") for key, name in zip(keys, names, strict=True)}


def _by_heads(said: Config, prefix: str, values: dict[str, Any], other: str) -> dict[str, Any]:
    """Heads of keys, and kinds of layers: those without heads are the `other` kind."""
    heads = values.get("num_key_value_heads")
    if not (isinstance(heads, list) and len({x for x in heads if x}) == 1):
        name = f"{prefix}.attention.head_count_kv"
        raise said.wrong(name, heads, "a number for each layer: 0, or the same for all others")
    kinds = ["full_attention" if x else other for x in heads]
    return {"num_key_value_heads": max(heads), "layer_types": kinds}


def _layers(said: Config, prefix: str) -> int:
    """The number of layers before those that guess further tokens."""
    count, further = said.size(f"{prefix}.block_count"), said.size(f"{prefix}.nextn_predict_layers", 0, low=0)
    if further >= count:
        raise said.wrong(f"{prefix}.nextn_predict_layers", further, f"fewer than all {count} layers")
    return count - further


def _of_qwen(said: Config, prefix: str, values: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    """Values of Qwens that a file says otherwise: sizes have the names of Mamba's."""
    names = "conv_kernel_dim", "key_head_dim", "num_key_heads", "num_value_heads"
    found = _mixer_sizes(said, prefix, *(f"linear_{name}" for name in names))
    found["linear_value_head_dim"] = said.divided(f"{prefix}.ssm.inner_size", f"{prefix}.ssm.time_step_rank")
    if (sections := said.values.get(key := f"{prefix}.rope.dimension_sections")) is not None:
        # Those of a text share positions, if they have all pairs that are rotated.
        pairs = said.size(f"{prefix}.rope.dimension_count") // 2
        if not (isinstance(sections, np.ndarray) and sections[:3].sum() == sections.sum() == pairs):
            raise said.wrong(key, sections, f"three numbers of pairs, together {pairs}")
    found["num_hidden_layers"] = _layers(said, prefix)
    found["full_attention_interval"] = said.size(f"{prefix}.full_attention_interval", 4)
    if experts := values.get("num_local_experts"):
        found["num_experts"] = experts
        found["shared_expert_intermediate_size"] = said.size(f"{prefix}.expert_shared_feed_forward_length")
    return found


def _of_bert(said: Config, file: GgufFile) -> dict[str, Any]:
    """The values, by config.json's names; and "pooling", a mode of sentence-transformers.

    Files do not say which GELU it is. The models that are converted have the exact one.
    """
    if said.get("bert.attention.causal", bool, False):
        raise said.wrong("bert.attention.causal", True, "False")
    said.number("bert.attention.layer_norm_epsilon")
    kind = said.size("bert.pooling_type", 0, low=0)
    if kind >= len(_POOLINGS):
        raise said.wrong("bert.pooling_type", kind, "0 to 3: vectors of texts, and no scores of pairs")
    values: dict[str, Any] = {"model_type": "bert", "hidden_act": "gelu", "pooling": _POOLINGS[kind]}
    values |= {name: said.values.get(f"bert.{key}") for key, name in _BERT_SIZES.items()}
    return values | {name: file.shape(x)[0] for name, x in _BERT_TABLES.items() if x in file.names}


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


def _kinds(said: Config, prefix: str) -> list[str] | None:
    """The kinds of layers, as config.json would say them; None if the file does not."""
    slides = said.values.get(key := f"{prefix}.attention.sliding_window_pattern")
    if slides is None:
        return None
    count = said.size(f"{prefix}.block_count")
    if not (isinstance(slides, np.ndarray) and slides.dtype == np.bool_ and slides.size == count):
        raise said.wrong(key, slides, f"{count} of bool")
    return [("full_attention", "sliding_attention")[slid] for slid in slides.tolist()]


def _scaling(path: Path, file: GgufFile, prefix: str, names: Mapping[str, str]) -> dict[str, Any]:
    """The scaling of rotary positions, as config.json would say it."""
    said = Config.of(path, file.metadata)
    begin = f"{prefix}.rope.scaling."
    kind = said.choice(f"{begin}type", {x: x for x in ("none", "linear", "yarn", "longrope")}, "none")
    given = {key.removeprefix(begin): x for key, x in file.metadata.items() if key.startswith(begin)}
    both = names is not _LONG_FACTORS  # those of short texts, and of long ones
    known = {**_SCALING, "attn_factor": "attention_factor"} if both else _SCALING
    if unknown := sorted(given.keys() - {*known, "finetuned"}):
        raise ModelError(f"{path}: {begin + unknown[0]!r} is not known; expected one of {', '.join(known)}")
    linear = said.number(f"{prefix}.rope.scale_linear", 1.0)
    if linear != 1:
        raise ModelError(f"{path}: '{prefix}.rope.scale_linear' is {linear}; expected '{begin}type'")
    found = {known[key]: x for key, x in given.items() if key in known}
    if any(name in file.names for name in names.values()):
        if kind != "none" and not (both and kind == "longrope"):
            raise ModelError(
                f"{path}: there are {', '.join(set(names.values()))}, and a scaling; expected one"
            )
        each = {key: _factors(path, file, name) for key, name in names.items()}
        usual = {"attention_factor": 1.0, "original_max_position_embeddings": 2}
        return {**usual, **(found if both else {}), **each, "rope_type": "longrope"}
    if "mscale_all_dim" in found:
        found["mscale"] = 1.0
    return {"rope_type": "default"} if kind == "none" else found


def _factors(path: Path, file: GgufFile, name: str) -> list[float]:
    """Divisors of the frequencies."""
    prefix = file.metadata["general.architecture"]
    rotated = Config.of(path, file.metadata).size(f"{prefix}.rope.dimension_count", _head_dim(path, file))
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


class _Row(NamedTuple):
    """What files of a model have."""

    names: Mapping[str, str] = _NAMES
    top: Mapping[str, str] = _TOP
    block: str = "model.layers"  # the prefix of a block, as transformers has it
    interleaved: bool = False  # rows of heads of queries and keys: there pairs that rotate are neighbours
    mixer: str | None = None  # in place of attention, in some layers
    needs: tuple[str, ...] = ()  # keys beside those of all models, where config.json's may be missing
    only: Mapping[str, Any] = {}  # what alone is supported of keys
    experts: bool = False
    multiplied: bool = False  # by Granite's multipliers
    grown: bool = False  # queries, with their positions
    rotates_part: bool = False  # of each head
    guesses: bool = False  # tokens, in further layers
    mixes_by_heads: bool = False  # in layers without heads of keys
    sizes_by_layer: bool = False  # of keys and feed-forwards
    factors: Mapping[str, str] = _LONG_FACTORS  # tensors that frequencies are divided by
    values: Values | None = None  # of config.json that a file says otherwise
    alone: Callable[[Config, GgufFile], dict[str, Any]] | None = None  # all values


_WINDOW, _OF_EXPERT = "attention.sliding_window", "expert_feed_forward_length"
_HYBRID = _Row(only={_WINDOW: 0}, mixes_by_heads=True)
_QWEN = _Row(
    _QWEN_NEXT, mixer="linear_attn", needs=(_OF_EXPERT,),
    only={_WINDOW: None, "attention.recurrent_layers": None},
    experts=True, rotates_part=True, guesses=True, values=_of_qwen,
)  # fmt: skip
_ROWS = {
    "bert": _Row(_BERT, _BERT_TOP, "encoder.layer", alone=_of_bert),
    "gemma2": _Row(_GEMMA, values=_of_gemma(46)),
    "gemma3_text": _Row(_GEMMA, needs=(_WINDOW,), values=_of_gemma(62)),
    "gemma4_text": _Row(
        _GEMMA4, _GEMMA4_TOP, needs=(_WINDOW,), sizes_by_layer=True, values=_of_gemma4
    ),
    "gpt_oss": _Row(
        _GPT_OSS, needs=(_WINDOW,), only={f"{_WINDOW}_pattern": 2},  # layers in turn have one
        experts=True, values=_of_gpt_oss,
    ),
    "granite": _Row(  # heads are rotated where this key is true
        interleaved=True, needs=("logit_scale",), only={"rope.scaling.finetuned": True}, multiplied=True
    ),
    "granitemoehybrid": _HYBRID._replace(
        names=_GRANITE, mixer="mamba", interleaved=True, only={**_HYBRID.only, "ssm.dt_b_c_rms": False},
        experts=True, multiplied=True, values=_of_granite,
    ),
    "lfm2": _HYBRID._replace(names=_LFM2, top=_LFM2_TOP, values=_of_lfm2),
    "llama": _Row(interleaved=True, experts=True, values=_of_llama),
    "ministral3": _Row(interleaved=True, grown=True, values=_of_ministral3),
    "mixtral": _Row(_MIXTRAL),
    "olmo2": _Row(_OLMO, values=_of_olmo),
    "olmo3": _Row(_OLMO),
    "phi3": _Row(_PHI3, rotates_part=True, factors=_PHI3_FACTORS),
    "qwen2": _Row(),
    "qwen3": _Row(),
    "qwen3_moe": _Row(needs=(_OF_EXPERT,), experts=True),
    "qwen3_next": _QWEN,
    "qwen3_5_text": _QWEN._replace(needs=(), experts=False),
    "qwen3_5_moe_text": _QWEN,
    "smollm3": _Row(interleaved=True),
}  # fmt: skip
# By the file's `general.architecture`, the `model_type` of config.json.
ARCHITECTURES = {
    "bert": "bert", "gemma2": "gemma2", "gemma3": "gemma3_text", "gemma4": "gemma4_text",
    "gpt-oss": "gpt_oss", "granite": "granite", "granitehybrid": "granitemoehybrid", "lfm2": "lfm2",
    "llama": "llama", "mistral3": "ministral3", "olmo2": "olmo2", "phi3": "phi3", "qwen2": "qwen2",
    "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "qwen3next": "qwen3_next", "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text", "smollm3": "smollm3",
}  # fmt: skip


def opened(path: Path, stack: ExitStack) -> GgufFile:
    """The file, which `stack` closes."""
    file = stack.enter_context(opened_gguf(path))
    said = Config.of(path, file.metadata)
    row = _ROWS[_model_type(said)]
    _join_layers(said, row)
    if row.guesses:  # in further layers
        layers = _layers(said, file.metadata["general.architecture"])
        blocks = [_BLOCK.match(name) for name in file.names]
        file.names = [
            name for name, x in zip(file.names, blocks, strict=True) if x is None or int(x[1]) < layers
        ]
    if (types := "token_types.weight") in file.names and len(file.shape(types)) == 1:
        file.as_row(types)  # older converters wrote a table of one type so
    if row.interleaved:
        for name in file.names:
            found = _IN_BLOCK.fullmatch(name)
            if found and found[2] in ("attn_q", "attn_k"):
                file.interleaved[name] = _head_dim(path, file)
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


def _join_layers(said: Config, row: _Row) -> None:
    """Make one number of an array that has the same one for each layer, but where it tells their kinds."""
    prefix = said.values["general.architecture"]
    for key in (f"{prefix}.{name}" for name in _OF_LAYERS):
        if not isinstance(each := said.values.get(key), np.ndarray):
            continue
        layers = said.size(f"{prefix}.block_count")
        if each.size != layers:
            raise said.wrong(key, each, f"a number for each of {layers} layers")
        if key.endswith("_kv") and row.mixes_by_heads:
            continue
        if (each == each[0]).all():
            said.values[key] = each[0].item()
        elif not row.sizes_by_layer or key.endswith("head_count"):
            raise said.wrong(key, each.tolist(), "the same number for all layers")


def _model_type(said: Config) -> str:
    return said.choice("general.architecture", ARCHITECTURES)


def config_of(path: Path, file: GgufFile) -> Config:
    """The values that config.json would have; keys of other models that change results are refused."""
    said = Config.of(path, file.metadata)
    model_type = _model_type(said)
    row, prefix = _ROWS[model_type], file.metadata["general.architecture"]
    parts = said.size("split.count", 1, low=0)
    if parts > 1:
        raise ModelError(f"{path}: 'split.count' is {parts}; expected a model in one file")
    for name in file.names:
        if _known_name(model_type, name) is None and name not in row.factors.values():
            raise ModelError(f"{path}: the tensor {short(name)} is not known")
    ends = end_ids(said, _token_count(said, file))
    if row.alone is not None:
        return Config.of(path, row.alone(said, file))
    if experts := said.size(f"{prefix}.expert_count", 0, low=0):
        if not row.experts:
            came = f"'{prefix}.expert_count' is {experts}"
            raise ModelError(f"{path}: {came}; expected none in a {model_type}")
        said.refuse(**{f"{prefix}.{key}": value for key, value in _OF_EXPERTS.items()})
    if found := [key for key in _OF_OTHERS if f"{prefix}.{key}" in file.metadata]:
        raise ModelError(f"{path}: there is a '{prefix}.{found[0]}'; expected none in a {model_type}")
    said.refuse(**{f"{prefix}.{key}": value for key, value in row.only.items()})
    if not said.get(f"{prefix}.attention.causal", bool, True):
        raise ModelError(f"{path}: '{prefix}.attention.causal' is False; expected True")
    values: dict[str, Any] = {"model_type": model_type}
    known = dict(_SIZES)
    if row.multiplied:
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
    for key in ("attention.layer_norm_rms_epsilon", *row.needs):
        said.number(f"{prefix}.{key}")
    if experts:
        said.size(f"{prefix}.expert_used_count")
    head_dim = _head_dim(path, file)
    usual = {"num_key_value_heads": values.get("num_attention_heads"), "rope_theta": 1e4}
    values = {**usual, "attention_multiplier": head_dim**-0.5, **values}  # as llama.cpp
    values["norm_topk_prob"] = True  # llama.cpp always does
    if "token_embd.weight" in file.names:
        values["vocab_size"] = file.shape("token_embd.weight")[0]
    values["tie_word_embeddings"] = "output.weight" not in file.names
    values["attention_bias"] = any(name.endswith(".attn_output.bias") for name in file.names)
    rotated = said.size(f"{prefix}.rope.dimension_count", head_dim)
    if row.rotates_part and rotated <= head_dim:
        values["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise ModelError(f"{path}: '{prefix}.rope.dimension_count' is {rotated}; expected {head_dim}")
    values["head_dim"] = head_dim
    values["rope_scaling"] = _scaling(path, file, prefix, row.factors)
    if not row.grown and f"{prefix}.attention.temperature_scale" in file.metadata:
        raise ModelError(f"{path}: there is a '{prefix}.attention.temperature_scale'; expected a mistral3")
    values["eos_token_id"] = ends or None
    if row.values is not None:
        values |= row.values(said, prefix, values, file)
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


def _head_dim(path: Path, file: GgufFile) -> int:
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
    return _known_name(model_type, name) or name


def _known_name(model_type: str, name: str) -> str | None:
    """The name of a tensor as transformers has it; None for one that no model here has."""
    row = _row(model_type)
    if found := _OF_MIXER.fullmatch(name):
        return row.mixer and f"model.layers.{found[1]}.{row.mixer}.{_OF_MIXERS[found[2]]}"
    if found := _IN_BLOCK.fullmatch(name):
        number, part, expert, kind = found.groups()
        if part not in row.names or (expert is None) == part.endswith("_exps"):
            return None
        return f"{row.block}.{number}.{row.names[part].format(expert)}.{kind}"
    stem, _, kind = name.rpartition(".")
    kinds = ("weight", "bias") if stem == "token_embd_norm" else ("weight",)
    return f"{row.top[stem]}.{kind}" if stem in row.top and kind in kinds else None


def _row(model_type: str) -> _Row:
    """The row of a model, or of those without anything of their own."""
    return _ROWS.get(model_type, _Row())
