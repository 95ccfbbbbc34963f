"""What GGUF files say otherwise than config.json: a row for each `model_type`, with its functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fastattn._gguf import GgufFile
from fastattn.models._files import Config

Values = Callable[[Config, dict[str, Any], GgufFile], dict[str, Any]]  # of keys of the architecture

# What frequencies of rotary positions are divided by: in all models but Phi-3, and there in two ways.
FACTORS = "rope_freqs.weight"
LONG_FACTORS = dict.fromkeys(("short_factor", "long_factor"), FACTORS)
_PHI3_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
# Keys under the architecture's name, and config.json's.
SIZES = {
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
OF_GRANITE = {
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_BERT_KEYS = (
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "context_length",
)
_BERT_SIZES = {**{key: SIZES[key] for key in _BERT_KEYS}, "attention.layer_norm_epsilon": "layer_norm_eps"}
_BERT_TABLES = {"vocab_size": "token_embd.weight", "type_vocab_size": "token_types.weight"}
_POOLINGS = ("mean", "mean", "cls", "lasttoken")  # the first: none, as where a folder says nothing


def _of_llama(own: Config, values: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    """What else a file of this architecture may be."""
    others = {"num_local_experts": "mixtral", "sliding_window": "mistral"}
    found = [model_type for name, model_type in others.items() if values.get(name)]
    return {"model_type": found[0]} if found else {}


def _of_olmo(own: Config, values: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    return {"model_type": "olmo3", "layer_types": _kinds(own)} if values.get("sliding_window") else {}


def _of_gemma(largest: int) -> Values:
    """The scale of scores that llama.cpp has, another one for so many layers."""

    def values_of(own: Config, values: dict[str, Any], file: GgufFile) -> dict[str, Any]:
        scale = values["head_dim"]
        if values.get("num_hidden_layers") == largest:
            scale = own.divided("embedding_length", "attention.head_count")
        return {"query_pre_attn_scalar": scale}

    return values_of


def _of_ministral3(own: Config, values: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    growth = own.values.get("attention.temperature_scale")
    return {"rope_scaling": {**values["rope_scaling"], "llama_4_scaling_beta": growth}}


def _of_gpt_oss(own: Config, values: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    scaling = values["rope_scaling"]  # as it was trained, though llama.cpp does truncate
    return {"rope_scaling": {**scaling, "truncate": False}} if scaling["rope_type"] == "yarn" else {}


def _of_lfm2(own: Config, values: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    """Values of LFM2 that a file says otherwise."""
    return {
        **_by_heads(own, values, "conv"),
        "conv_L_cache": own.size("shortconv.l_cache"),
        "norm_eps": values.get("rms_norm_eps"),
        "block_auto_adjust_ff_dim": False,
    }


def _of_granite(own: Config, values: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    """Values of Granite's hybrids that a file says otherwise."""
    shared = own.size("expert_shared_feed_forward_length", values.get("intermediate_size", 0))
    rotated = own.get("rope.scaling.finetuned", bool, True)
    return {
        **_by_heads(own, values, "mamba"),
        **_mixer_sizes(own, "mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads"),
        "mamba_expand": own.divided("ssm.inner_size", "embedding_length"),
        "shared_intermediate_size": shared,
        "num_local_experts": values.get("num_local_experts", 0),
        "position_embedding_type": "rope" if rotated else "nope",
    }


def _mixer_sizes(own: Config, *names: str) -> dict[str, Any]:
    """Sizes of mixers, under config.json's names."""
    keys = "conv_kernel", "state_size", "group_count", "time_step_rank"
    return {name: own.size(f"ssm.{key}") for key, name in zip(keys, names, strict=True)}


def _by_heads(own: Config, values: dict[str, Any], other: str) -> dict[str, Any]:
    """Heads of keys, and kinds of layers: those without heads are the `other` kind."""
    heads = values.get("num_key_value_heads")
    if not (isinstance(heads, list) and len({x for x in heads if x}) == 1):
        expected = "a number for each layer: 0, or the same for all others"
        raise own.wrong("attention.head_count_kv", heads, expected)
    kinds = ["full_attention" if x else other for x in heads]
    return {"num_key_value_heads": max(heads), "layer_types": kinds}


def layers_of(own: Config) -> int:
    """Number of layers, without the ones that guess further tokens."""
    count, further = own.size("block_count"), own.size("nextn_predict_layers", 0, low=0)
    if further >= count:
        raise own.wrong("nextn_predict_layers", further, f"fewer than all {count} layers")
    return count - further


def _of_qwen(own: Config, values: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    """Values of Qwens that a file says otherwise: sizes have the names of Mamba's."""
    names = "conv_kernel_dim", "key_head_dim", "num_key_heads", "num_value_heads"
    found = _mixer_sizes(own, *(f"linear_{name}" for name in names))
    found["linear_value_head_dim"] = own.divided("ssm.inner_size", "ssm.time_step_rank")
    if (sections := own.values.get(key := "rope.dimension_sections")) is not None:
        # Those of a text share positions, if they have all pairs that are rotated.
        pairs = own.size("rope.dimension_count") // 2
        if not (isinstance(sections, np.ndarray) and sections[:3].sum() == sections.sum() == pairs):
            raise own.wrong(key, sections, f"three numbers of pairs, together {pairs}")
    found["num_hidden_layers"] = layers_of(own)
    found["full_attention_interval"] = own.size("full_attention_interval", 4)
    if experts := values.get("num_local_experts"):
        found["num_experts"] = experts
        found["shared_expert_intermediate_size"] = own.size("expert_shared_feed_forward_length")
    return found


def _of_bert(own: Config, file: GgufFile) -> dict[str, Any]:
    """The values, by config.json's names; and "pooling", a mode of sentence-transformers.

    Files do not say which GELU it is. The models that are converted have the exact one.
    """
    if own.get("attention.causal", bool, False):
        raise own.wrong("attention.causal", True, "False")
    own.number("attention.layer_norm_epsilon")
    kind = own.size("pooling_type", 0, low=0)
    if kind >= len(_POOLINGS):
        raise own.wrong("pooling_type", kind, "0 to 3: vectors of texts, and no scores of pairs")
    values: dict[str, Any] = {"model_type": "bert", "hidden_act": "gelu", "pooling": _POOLINGS[kind]}
    values |= {name: own.values.get(key) for key, name in _BERT_SIZES.items()}
    return values | {name: file.shape(x)[0] for name, x in _BERT_TABLES.items() if x in file.names}


def _of_gemma4(own: Config, values: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    """Values of Gemma 4 that a file says otherwise: each layer has its sizes."""
    count, kinds = own.size("block_count"), _kinds(own)
    if kinds is None:
        raise own.wrong("attention.sliding_window_pattern", None, f"{count} of bool")
    shared = own.size("attention.shared_kv_layers", 0, low=0)
    near = own.size("attention.key_length_swa")
    own.refuse(**{f"{key}_swa": near for key in ("attention.value_length", "rope.dimension_count")})
    sizes = {"full_attention": values["head_dim"], "sliding_attention": near}
    heads, inner = values.get("num_key_value_heads"), values.get("intermediate_size")
    if not isinstance(heads, list):
        heads = [heads] * count
    doubled = isinstance(inner, list)
    if isinstance(inner, list):
        if inner != [inner[0] * (2 if i >= count - shared else 1) for i in range(count)]:
            expected = "the same for all layers, or twice as many in those with others' keys"
            raise own.wrong("feed_forward_length", inner, expected)
        inner = inner[0]
    full = [i for i in range(count - shared) if kinds[i] == "full_attention"]
    table = "per_layer_token_embd.weight"
    rotated = _proportional(own, values["rope_scaling"])
    return {
        "num_key_value_heads": heads[0],
        "intermediate_size": inner,
        "use_double_wide_mlp": doubled,
        "num_kv_shared_layers": shared,
        "layer_types": kinds,
        "per_layer_config": {
            str(i): {"head_dim": sizes[kind], "num_key_value_heads": heads[i]} for i, kind in enumerate(kinds)
        },
        "attention_k_eq_v": not any(f"blk.{i}.attn_v.weight" in file.names for i in full),
        "hidden_size_per_layer_input": own.size("embedding_length_per_layer_input", 0, low=0),
        "vocab_size_per_layer_input": file.shape(table)[0] if table in file.names else None,
        "rope_parameters": {
            "full_attention": {**rotated, "rope_theta": values.get("rope_theta")},
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": own.number("rope.freq_base_swa", 1e4),
            },
        },
        "rope_scaling": None,
    }


def _proportional(own: Config, scaling: dict[str, Any]) -> dict[str, Any]:
    """A scaling whose divisors are 1, and beyond all numbers for pairs that are not rotated."""
    divisors = scaling.get("long_factor")
    if divisors is None:
        return scaling
    rotated = divisors.count(1.0)
    if divisors[:rotated] != [1.0] * rotated or min(divisors[rotated:], default=1e30) < 1e20:
        said = Config.of(own.path, {})
        raise said.wrong(FACTORS, divisors, "1 for each pair that is rotated, then 1e30")
    # A half more: what this becomes is cut to an integer.
    return {"rope_type": "proportional", "partial_rotary_factor": (rotated + 0.5) / len(divisors)}


def _kinds(own: Config) -> list[str] | None:
    """The kinds of layers, as config.json would say them; None if the file does not."""
    slides = own.values.get(key := "attention.sliding_window_pattern")
    if slides is None:
        return None
    count = own.size("block_count")
    if not (isinstance(slides, np.ndarray) and slides.dtype == np.bool_ and slides.size == count):
        raise own.wrong(key, slides, f"{count} of bool")
    return [("full_attention", "sliding_attention")[slid] for slid in slides.tolist()]


class Row(NamedTuple):
    """What files of a model have."""

    interleaved: bool = False  # rows of heads of queries and keys: there pairs that rotate are neighbours
    needs: tuple[str, ...] = ()  # keys that not all models need, where config.json's may be missing
    only: Mapping[str, Any] = {}  # what alone is supported of keys
    experts: bool = False
    multiplied: bool = False  # by Granite's multipliers
    grown: bool = False  # queries, with their positions
    rotates_part: bool = False  # of each head
    guesses: bool = False  # tokens, in further layers
    mixes_by_heads: bool = False  # in layers without heads of keys
    sizes_by_layer: bool = False  # of keys and feed-forwards
    factors: Mapping[str, str] = LONG_FACTORS  # tensors that frequencies are divided by
    values: Values | None = None  # of config.json that a file says otherwise
    alone: Callable[[Config, GgufFile], dict[str, Any]] | None = None  # all values


WINDOW, _OF_EXPERT = "attention.sliding_window", "expert_feed_forward_length"
_HYBRID = Row(only={WINDOW: 0}, mixes_by_heads=True)
_QWEN = Row(
    needs=(_OF_EXPERT,), only={WINDOW: None, "attention.recurrent_layers": None},
    experts=True, rotates_part=True, guesses=True, values=_of_qwen,
)  # fmt: skip
ROWS = {
    "bert": Row(alone=_of_bert),
    "gemma2": Row(values=_of_gemma(46)),
    "gemma3_text": Row(needs=(WINDOW,), values=_of_gemma(62)),
    "gemma4_text": Row(needs=(WINDOW,), sizes_by_layer=True, values=_of_gemma4),
    "gpt_oss": Row(
        needs=(WINDOW,), only={f"{WINDOW}_pattern": 2}, experts=True, values=_of_gpt_oss  # layers in turn
    ),
    "granite": Row(  # heads are rotated where this key is true
        interleaved=True, needs=("logit_scale",), only={"rope.scaling.finetuned": True}, multiplied=True
    ),
    "granitemoehybrid": _HYBRID._replace(
        interleaved=True, only={**_HYBRID.only, "ssm.dt_b_c_rms": False}, experts=True, multiplied=True,
        values=_of_granite,
    ),
    "lfm2": _HYBRID._replace(values=_of_lfm2),
    "llama": Row(interleaved=True, experts=True, values=_of_llama),
    "ministral3": Row(interleaved=True, grown=True, values=_of_ministral3),
    "olmo2": Row(values=_of_olmo),
    "phi3": Row(rotates_part=True, factors=_PHI3_FACTORS),
    "qwen2": Row(),
    "qwen3": Row(),
    "qwen3_moe": Row(needs=(_OF_EXPERT,), experts=True),
    "qwen3_next": _QWEN,
    "qwen3_5_text": _QWEN._replace(needs=(), experts=False),
    "qwen3_5_moe_text": _QWEN,
    "smollm3": Row(interleaved=True),
}  # fmt: skip
# By the file's `general.architecture`, the `model_type` of config.json.
ARCHITECTURES = {
    "bert": "bert", "gemma2": "gemma2", "gemma3": "gemma3_text", "gemma4": "gemma4_text",
    "gpt-oss": "gpt_oss", "granite": "granite", "granitehybrid": "granitemoehybrid", "lfm2": "lfm2",
    "llama": "llama", "mistral3": "ministral3", "olmo2": "olmo2", "phi3": "phi3", "qwen2": "qwen2",
    "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "qwen3next": "qwen3_next", "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text", "smollm3": "smollm3",
}  # fmt: skip
