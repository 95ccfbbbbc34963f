"""Llama and its family: the names of their tensors, and the keys of config.json.

They differ in which maps have biases (Llama and SmolLM3 as configured; Qwen2 those of queries, keys and
values) or share a tensor (Phi-3), in a norm of each query and key head (Qwen3, Gemma 3), in which layers have
no rotary positions (SmolLM3), and in which attend to a sliding window only. A folder with modules.json is an
encoder (Qwen3-Embedding, Qwen3-Reranker, E5-Mistral, EmbeddingGemma), so is one with a head that scores
texts, and any other is a decoder. EuroBERT is always an encoder, whose tokens see those after them.

Qwen3-MoE and Mixtral have experts in place of the feed-forward, of which a router chooses a few for a token.

In Gemma 2 and 3, norms stand before and after attention and feed-forward, and multiply by 1 + weight. Vectors
of tokens are scaled. Gemma 2 caps scores and logits; in Gemma 3 layers with a window have rotary positions of
their own.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

from fastattn.models import _gguf
from fastattn.models._blocks import BlockNames, Blocks, Keys
from fastattn.models._families.shared import (
    DecoderNames,
    EncoderNames,
    frequencies,
    frequencies_by_kind,
    head_counts,
    read_decoder,
    read_encoder,
)
from fastattn.models._files import Config
from fastattn.models._next_tokens import QueryGrowth

if TYPE_CHECKING:
    from fastattn.layers._block import Window
    from fastattn.models._decoder import Decoder
    from fastattn.models._encoder import Encoder
    from fastattn.models._source import Source

LLAMA = DecoderNames(
    prefix="model.",
    tokens="embed_tokens",
    block=BlockNames(
        prefix="layers.{}.",
        attention_norm="input_layernorm",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        attended="self_attn.o_proj",
        inner_norm="post_attention_layernorm",
        inner="mlp.up_proj",
        gate="mlp.gate_proj",
        outer="mlp.down_proj",
        norm="rms_norm",
    ),
    norm="norm",
    ignored=re.compile(r"\.rotary_emb\.inv_freq$"),  # config.json gives them; old files hold them
)
_PHI3 = LLAMA._replace(
    block=LLAMA.block._replace(qkv=("self_attn.qkv_proj",), inner="mlp.gate_up_proj", gate="mlp.gate_up_proj")
)
_QWEN3 = LLAMA._replace(block=LLAMA.block._replace(head_norms=("self_attn.q_norm", "self_attn.k_norm")))
_QWEN3_MOE = _QWEN3._replace(
    block=_QWEN3.block._replace(
        router="mlp.gate", experts="mlp.experts.{}.", gate="gate_proj", inner="up_proj", outer="down_proj"
    )
)
_MIXTRAL = LLAMA._replace(
    block=LLAMA.block._replace(
        router="block_sparse_moe.gate",
        experts="block_sparse_moe.experts.{}.",
        gate="w1",
        inner="w3",
        outer="w2",
    )
)


def as_encoder(names: DecoderNames) -> EncoderNames:
    """The names of a decoder's tensors as those of an encoder, without an output layer."""
    return EncoderNames(
        block=names.block,
        tokens=names.tokens,
        last_norm=names.norm,
        prefixes=(names.prefix,),
        ignored=names.ignored,
    )


_GEMMA: Any = {
    "inner_norm": "pre_feedforward_layernorm",
    "post_norms": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "norm_offset": 1.0,
}
_GEMMA2 = LLAMA._replace(block=LLAMA.block._replace(**_GEMMA))
_GEMMA3 = _QWEN3._replace(block=_QWEN3.block._replace(**_GEMMA))
KEYS = Keys(eps="rms_norm_eps")
# Where config.json does not say.
_HEADS_KV = {"mistral": 8, "ministral": 8, "ministral3": 8, "mixtral": 8, "qwen3_moe": 4, "smollm3": 4}
_MINISTRAL3 = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
ALL, NEAR = "full_attention", "sliding_attention"  # kinds of layers
# The older name of the base of rotary positions of each kind in Gemma 3, and its default.
_THETAS = {ALL: ("rope_theta", 1e6), NEAR: ("rope_local_base_freq", 1e4)}


def llama(source: Source) -> Decoder | Encoder:
    """Build Llama, Mistral, Ministral, Mixtral, Phi-3, Qwen2, Qwen3, Qwen3-MoE, SmolLM3 or EuroBERT."""
    config = source.config
    model_type = config.get("model_type", str)
    is_eurobert = model_type == "eurobert"
    each = {"qwen3": _QWEN3, "phi3": _PHI3, "qwen3_moe": _QWEN3_MOE, "mixtral": _MIXTRAL}
    names = each.get(model_type, LLAMA)
    heads, heads_kv = head_counts(config, _HEADS_KV.get(model_type))
    head_dim = config.optional_size("head_dim") or (
        128 if model_type in ("qwen3", "ministral3") else config.divided("hidden_size", "num_attention_heads")
    )
    blocks = Blocks.of(
        source,
        names.block,
        KEYS,
        eps=1e-5 if model_type in ("phi3", "ministral3", "mixtral", "eurobert") else 1e-6,
        activation="silu",
        heads=heads,
        heads_kv=heads_kv,
        head_dim=head_dim,
        biased=biased(source, model_type, names.block),
        **({} if names.block.router is None else _experts(source, model_type)),
    )
    theta = {"smollm3": 2e6, "mixtral": 1e6}.get(model_type, 1e4)
    growth = None
    if model_type == "ministral3":
        config, growth = _growing(config)
    rotary = partial(frequencies, config, head_dim, theta, model_type == "phi3")
    said = config.values.get("architectures")
    scores = isinstance(said, list) and str(next(iter(said), "")).endswith("ForSequenceClassification")
    if growth is None and (scores or source.has_modules or is_eurobert):
        causal = config.get("is_causal", bool, True) and not is_eurobert
        return read_encoder(
            as_encoder(names),
            blocks,
            longest=config.optional_size("max_position_embeddings"),
            windows=_windows(config, model_type, blocks.num_layers, causal),
            rotations=[0] * blocks.num_layers,
            causal=causal,
            frequencies=lambda: (rotary(),),
        )
    config.refuse(is_causal=True)
    return read_decoder(
        names,
        blocks,
        windows=_windows(config, model_type, blocks.num_layers),
        rotations=_rotations(config, blocks.num_layers) if model_type == "smollm3" else None,
        frequencies=lambda: (rotary(),),
        query_growth=growth,
        tied=config.get("tie_word_embeddings", bool, model_type == "smollm3"),
    )


def mistral3(source: Source) -> Decoder | Encoder:
    """Build the text model of Mistral 3, a Mistral or Ministral 3; its tower for images is left out."""
    return llama(of_text(source, "mistral", "ministral3"))


def gemma3(source: Source) -> Decoder | Encoder:
    """Build the text model of Gemma 3; its tower for images is left out."""
    source = of_text(source, "gemma3_text")
    usual = {"num_attention_heads": 8, "vocab_size": 262208}  # files leave them out
    return gemma(source.with_config(Config.of(source.config.path, {**usual, **source.config.values})))


def of_text(source: Source, *model_types: str) -> Source:
    """The text model of a source with towers: `text_config`, by default of the first of these types."""
    config = source.config
    values = {"model_type": model_types[0], **config.get("text_config", dict)}
    if values["model_type"] not in model_types:
        expected = f"{' or '.join(model_types)} in 'text_config'"
        raise config.wrong("model_type", values["model_type"], expected)
    source = source.with_config(Config.of(f"{config.path}: 'text_config'", values))
    source.rename(
        lambda name: re.sub(r"^(model\.)?language_model\.(model\.|(?=lm_head))?", _text_prefix, name)
    )
    values["tie_word_embeddings"] = config.get("tie_word_embeddings", bool, True)
    return source


def _text_prefix(found: re.Match[str]) -> str:
    return "model." if found[1] or found[2] else ""


def _growing(config: Config) -> tuple[Config, QueryGrowth | None]:
    """Ministral 3's config with its rotary positions, and what these say of queries."""
    given = {**config.get("rope_scaling", dict, {}), **config.get("rope_parameters", dict, {})} or _MINISTRAL3
    said = Config.of(f"{config.path}: 'rope_parameters'", given)
    growth = None
    if given.get("llama_4_scaling_beta"):
        growth = QueryGrowth(
            said.number("llama_4_scaling_beta"), said.size("original_max_position_embeddings")
        )
    return Config.of(config.path, {**config.values, "rope_scaling": None, "rope_parameters": given}), growth


def _experts(source: Source, model_type: str) -> dict[str, Any]:
    """The sizes of experts, as `Blocks` has them."""
    config = source.config
    if model_type == "mixtral":
        key = "num_local_experts"
        found: dict[str, Any] = {"normalised": True, "chosen": config.size("num_experts_per_tok", 2)}
    else:
        key = (
            "num_experts" if "num_experts" in config.values else "num_local_experts"
        )  # older files, and newer
        config.refuse(mlp_only_layers=[], decoder_sparse_step=1)
        found = {
            "normalised": config.get("norm_topk_prob", bool, False),
            "chosen": config.size("num_experts_per_tok", 8),
            "inner": config.size("moe_intermediate_size", 768),
        }
    experts = source.depth(key)
    if found["chosen"] > experts:
        raise config.wrong("num_experts_per_tok", found["chosen"], f"at most {key!r}, {experts}")
    return {**found, "experts": experts}


def _rotations(config: Config, num_layers: int) -> list[int | None]:
    """Rotary positions of each layer of SmolLM3: all but every fourth one has the first ones."""
    interval = config.size("no_rope_layer_interval", 4)
    has: Any = config.values.get("no_rope_layers")  # 1 where there are rotary positions, whatever its name
    if has is None:
        has = [(i + 1) % interval != 0 for i in range(num_layers)]
    if not isinstance(has, list) or len(has) < num_layers or any(x not in (0, 1) for x in has):
        raise config.wrong("no_rope_layers", has, f"a list of {num_layers} of 0 and 1")
    return [0 if rotated else None for rotated in has[:num_layers]]


def biased(source: Source, model_type: str, names: BlockNames) -> frozenset[str]:
    """The maps that have a bias: by config.json, or in a GGUF file by its tensors."""
    if model_type == "qwen2":
        return frozenset(names.qkv)
    inner = (names.inner,) if names.gate is None else (names.gate, names.inner)
    together = names.qkv, (names.attended,), inner, (names.outer,)
    if _gguf.is_file(source.folder):
        own = [name.removesuffix(".bias") for name in source.names if name.endswith(".bias")]
        has = [any(name.endswith(each) for name in own) for each in together]
    else:
        config, as_llama = source.config, model_type in ("llama", "granite", "smollm3", "eurobert")
        attends = as_llama or model_type in ("qwen3", "qwen3_moe")
        has = [attends and config.get("attention_bias", bool, False)] * 2
        has += [as_llama and config.get("mlp_bias", bool, False)] * 2
    return frozenset(name for each, biased in zip(together, has, strict=True) if biased for name in each)


def _windows(config: Config, model_type: str, num_layers: int, causal: bool = True) -> list[Window]:
    """Window of each layer: a token and the `sliding_window - 1` before it; None for all tokens.

    If the model is not causal, `sliding_window` tokens on either side, as in transformers.
    """
    if model_type in ("llama", "eurobert"):
        return [None] * num_layers
    no_width = model_type in ("phi3", "ministral3", "mixtral", "smollm3")
    width = config.optional_size("sliding_window", None if no_width else 4096)
    if model_type in ("ministral3", "mixtral", "phi3"):
        slides = [True] * num_layers
    elif model_type in ("mistral", "ministral"):
        said = config.words("layer_types", (ALL, NEAR), num_layers)
        slides = [kind == NEAR for kind in said or [NEAR] * num_layers]
    else:
        if not config.get("use_sliding_window", bool, False):
            width = None
        elif model_type == "qwen3_moe":
            return [(width - 1, 0) if width else None] * num_layers
        kinds = config.words("layer_types", (ALL, NEAR), num_layers)
        if kinds is not None and NEAR in kinds and width is None and model_type == "smollm3":
            came = config.values.get("use_sliding_window")
            raise config.wrong("use_sliding_window", came, f"true, as 'layer_types' has {NEAR}")
        if kinds is None and model_type == "smollm3":
            slides = [rotated is None for rotated in _rotations(config, num_layers)]
        elif kinds is None:
            first = config.size("max_window_layers", 28, low=0)
            slides = [i >= first for i in range(num_layers)]
        else:
            slides = [kind == NEAR for kind in kinds]
    if width is None:
        return [None] * num_layers
    window = (width - 1, 0) if causal else (width, width)
    return [window if sliding else None for sliding in slides]


def gemma(source: Source) -> Decoder | Encoder:
    """Build Gemma 2, or Gemma 3's text model."""
    config = source.config
    second = config.get("model_type", str) == "gemma2"
    all_names = _GEMMA2 if second else _GEMMA3
    if _gguf.is_file(source.folder):  # its norms have 1 added
        all_names = all_names._replace(block=all_names.block._replace(norm_offset=0.0))
    names = all_names.block
    causal = not config.get("use_bidirectional_attention", bool, False)
    config.refuse(is_causal=True)  # `use_bidirectional_attention` says otherwise
    heads, heads_kv = head_counts(config, 4)
    biased = (*names.qkv, names.attended) if config.get("attention_bias", bool, False) else ()
    blocks = Blocks.of(
        source,
        names,
        KEYS._replace(activation="hidden_activation"),
        eps=1e-6,
        activation="gelu_pytorch_tanh",
        heads=heads,
        heads_kv=heads_kv,
        head_dim=config.size("head_dim", 256),
        biased=frozenset(biased),
        softcap=_cap(config, "attn_logit_softcapping", 50.0 if second else None) or 0.0,
    )
    kinds = config.words("layer_types", (ALL, NEAR), blocks.num_layers)
    if kinds is None:
        pattern = config.size("sliding_window_pattern", 2 if second else 6)
        kinds = [NEAR if (i + 1) % pattern else ALL for i in range(blocks.num_layers)]
    width, window = config.optional_size("sliding_window", 4096), None
    if width is not None:  # half of it to either side, if keys may be after a query
        window = (width - 1, 0) if causal else (width // 2, width // 2)
    longest = config.optional_size("max_position_embeddings")
    each: Any = {
        "scales": [config.number("query_pre_attn_scalar", 256) ** -0.5] * blocks.num_layers,
        "windows": [window if kind == NEAR else None for kind in kinds],
        "rotations": [0 if second else list(_THETAS).index(kind) for kind in kinds],
        "token_scale": float(source.precision.dtype.type(blocks.hidden**0.5)),  # as transformers rounds it
        "frequencies": lambda: (
            (frequencies(config, blocks.head_dim),)
            if second
            else frequencies_by_kind(config, _THETAS, blocks.head_dim, longest, (ALL,))
        ),
    }
    if causal and not source.has_modules:
        tied = config.get("tie_word_embeddings", bool, True)
        cap = _cap(config, "final_logit_softcapping", 30.0 if second else None)
        return read_decoder(all_names, blocks, **each, tied=tied, softcap=cap)
    return read_encoder(as_encoder(all_names), blocks, longest=longest, causal=causal, **each)


def _cap(config: Config, name: str, default: float | None) -> float | None:
    """A bound of scores or logits; None without one."""
    given = config.values.get(name, default)
    return None if given is None else config.number(name, default or 0.0)
