"""Llama and its family: rows of a table, each with names of tensors, defaults of config.json, and switches.

A folder with modules.json is an encoder (Qwen3-Embedding, Qwen3-Reranker, E5-Mistral, EmbeddingGemma), and so
is one with a head that scores texts; any other is a decoder. EuroBERT is always an encoder, whose tokens see
those after them.

Qwen3-MoE and Mixtral have experts in place of the feed-forward; a router chooses a few for each token. OLMo
norms what attention and the feed-forward give, not their inputs; one norm is of all query heads together, one
of all key heads. Granite is Llama with multipliers of tokens, scores, logits and of what is added to the
residual.

In Gemma 2 and 3, norms come before and after attention and feed-forward, and multiply by 1 + weight. Vectors
of tokens are scaled. Gemma 2 caps scores and logits. In Gemma 3 and OLMo 3, layers with a window have their
own rotary positions, which no scaling changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from fastattn.models._blocks import BlockNames, Blocks, Keys
from fastattn.models._decoder import Decoder, QueryGrowth
from fastattn.models._encoder import Encoder
from fastattn.models._families.shared import (
    ALL,
    NEAR,
    ModelNames,
    expert_counts,
    frequencies,
    frequencies_by_kind,
    kinds_of,
    read_decoder,
    read_encoder,
    windows_of,
)
from fastattn.models._files import Config
from fastattn.models._source import Source

LLAMA = ModelNames(
    prefixes=("model.",),
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
    last_norm="norm",
    ignored=re.compile(r"\.rotary_emb\.inv_freq$"),  # config.json gives them; old files hold them
)


def with_block(names: ModelNames = LLAMA, **changes: Any) -> ModelNames:
    """Names of a decoder whose blocks differ in these."""
    return names._replace(block=names.block._replace(**changes))


HEAD_NORMS = "self_attn.q_norm", "self_attn.k_norm"
POST_NORMS = "post_attention_layernorm", "post_feedforward_layernorm"
EXPERTS: Any = {"gate": "gate_proj", "inner": "up_proj", "outer": "down_proj", "experts": "mlp.experts.{}."}
_PHI3 = with_block(qkv=("self_attn.qkv_proj",), inner="mlp.gate_up_proj", gate="mlp.gate_up_proj")
_MIXTRAL = with_block(
    router="block_sparse_moe.gate", experts="block_sparse_moe.experts.{}.", gate="w1", inner="w3", outer="w2"
)
_OLMO = with_block(
    attention_norm=None, inner_norm=None, post_norms=POST_NORMS, head_norms=HEAD_NORMS, norms_of_all=True
)
_GEMMA: Any = {"inner_norm": "pre_feedforward_layernorm", "post_norms": POST_NORMS, "norm_offset": 1.0}
KEYS = Keys(eps="rms_norm_eps")
# The older name of the base of rotary positions of each kind of layers, and its default.
_OLMO_THETAS = dict.fromkeys((ALL, NEAR), ("rope_theta", 5e5))
_GEMMA_THETAS = {ALL: ("rope_theta", 1e6), NEAR: ("rope_local_base_freq", 1e4)}
_MINISTRAL3 = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


class _Family(NamedTuple):
    """A family like Llama: defaults of config.json's keys, and what differs from Llama."""

    names: ModelNames = LLAMA
    eps: float = 1e-6
    heads_kv: int | None = None  # None: as many as heads of queries
    head_dim: int | None = None  # None: equal parts of the hidden size
    theta: float = 1e4
    tied: bool = False
    biases: tuple[str, ...] = ()  # which of `_BIASES` are read
    biased: tuple[str, ...] = ()  # maps that always have a bias
    width: int | None = None  # of windows
    slides: Callable[[Config, int], bool] | bool = (
        False  # layers with windows; True: whatever `layer_types` is
    )
    switched: bool = False  # windows by `use_sliding_window`
    experts: Callable[[Source], dict[str, Any]] | None = None
    thetas: Mapping[str, tuple[str, float]] | None = None  # by kind of layers
    rotates_part: bool = False  # of each head, where config.json says so
    skips_rotation: bool = False  # in the layers that `no_rope_layers` names
    multiplied: bool = False  # by Granite's multipliers
    grown: bool = False  # queries, with their positions
    encodes: bool = True  # where the folder says so
    bidirectional: bool = False  # an encoder in any case
    activation: tuple[str, str] = ("hidden_act", "silu")  # its key, and the default
    gemma: bool = False  # scales of tokens and of scores, and which attention is not causal
    caps: tuple[float | None, float | None] = (None, None)  # of scores and of logits


def qwen_experts(source: Source, inner: int = 768, chosen: int = 8, divides: bool = False) -> dict[str, Any]:
    """The sizes of experts, as `Blocks` has them, by default these."""
    config = source.config
    key = "num_experts" if "num_experts" in config.values else "num_local_experts"  # older files, and newer
    config.refuse(mlp_only_layers=[], decoder_sparse_step=1)
    sizes = {"inner": config.size("moe_intermediate_size", inner), **expert_counts(source, key, chosen)}
    return {"normalised": config.get("norm_topk_prob", bool, divides), **sizes}


_BIASES = _OF_ATTENTION, _ = "attention_bias", "mlp_bias"
_MISTRAL = _Family(heads_kv=8, width=4096, slides=lambda config, i: True)
_QWEN2 = _Family(
    biased=LLAMA.block.qkv, width=4096, switched=True,
    slides=lambda config, i: i >= config.size("max_window_layers", 28, low=0),
)  # fmt: skip
_QWEN3 = _QWEN2._replace(names=with_block(head_norms=HEAD_NORMS), biases=(_OF_ATTENTION,), biased=())
_OLMO2 = _Family(_OLMO, 1e-5, biases=(_OF_ATTENTION,), encodes=False)
_GEMMA2 = _Family(
    with_block(**_GEMMA), heads_kv=4, head_dim=256, tied=True, biases=(_OF_ATTENTION,), width=4096,
    slides=lambda config, i: (i + 1) % config.size("sliding_window_pattern", 2) > 0,
    activation=("hidden_activation", "gelu_pytorch_tanh"), gemma=True, caps=(50.0, 30.0),
)  # fmt: skip
FAMILIES = {
    "eurobert": _Family(eps=1e-5, biases=_BIASES, bidirectional=True),
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2._replace(
        names=with_block(head_norms=HEAD_NORMS, **_GEMMA), thetas=_GEMMA_THETAS, caps=_Family().caps,
        slides=lambda config, i: (i + 1) % config.size("sliding_window_pattern", 6) > 0,
    ),
    "granite": _Family(biases=_BIASES, multiplied=True, encodes=False),
    "llama": _Family(biases=_BIASES),
    "ministral": _MISTRAL,
    "ministral3": _Family(eps=1e-5, heads_kv=8, head_dim=128, slides=True, grown=True),
    "mistral": _MISTRAL,
    "mixtral": _Family(
        _MIXTRAL, 1e-5, heads_kv=8, theta=1e6, slides=True,
        experts=lambda source: {"normalised": True, **expert_counts(source, "num_local_experts", 2)},
    ),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2._replace(width=4096, slides=lambda config, i: (i + 1) % 4 > 0, thetas=_OLMO_THETAS),
    "phi3": _Family(_PHI3, 1e-5, slides=True, rotates_part=True),
    "qwen2": _QWEN2,
    "qwen3": _QWEN3._replace(head_dim=128),
    "qwen3_moe": _QWEN3._replace(
        names=with_block(_QWEN3.names, router="mlp.gate", **EXPERTS),
        heads_kv=4, slides=True, experts=qwen_experts,
    ),
    "smollm3": _Family(
        heads_kv=4, theta=2e6, tied=True, biases=_BIASES, switched=True, skips_rotation=True,
        slides=lambda config, i: not _rotated(config, i + 1)[i],
    ),
}  # fmt: skip
TYPES = tuple(FAMILIES)


def decoder_blocks(
    source: Source,
    names: BlockNames,
    keys: Keys = KEYS,
    *,
    heads_kv: int | None = None,
    head_dim: int | None = None,
    eps: float = 1e-6,
    activation: str = "silu",
    biased: frozenset[str] | None = None,
    **others: Any,
) -> Blocks:
    """`Blocks.of` with these defaults; attention's maps have biases if config.json says so."""
    config = source.config
    heads = config.size("num_attention_heads")
    heads_kv = config.optional_size("num_key_value_heads") or heads_kv or heads
    if heads % heads_kv:
        raise config.wrong("num_attention_heads", heads, f"a multiple of 'num_key_value_heads', {heads_kv}")
    head_dim = config.optional_size("head_dim") or head_dim
    head_dim = head_dim or config.divided("hidden_size", "num_attention_heads")
    if biased is None:
        has = config.get("attention_bias", bool, False)
        biased = frozenset((*names.qkv, names.attended) if has else ())
    sizes: Any = {"heads": heads, "heads_kv": heads_kv, "head_dim": head_dim, "biased": biased}
    return Blocks.of(source, names, keys, eps=eps, activation=activation, **sizes, **others)


def llama(source: Source) -> Decoder | Encoder:
    """Build a model of one of `TYPES`."""
    config = source.config
    family = config.choice("model_type", FAMILIES)
    names, (key, activation) = without_offset(source, family.names), family.activation
    caps = family.caps
    if family.gemma:
        caps = (
            _cap(config, "attn_logit_softcapping", caps[0]),
            _cap(config, "final_logit_softcapping", caps[1]),
        )
    blocks = decoder_blocks(
        source,
        names.block,
        KEYS._replace(activation=key),
        heads_kv=family.heads_kv,
        head_dim=family.head_dim,
        eps=family.eps,
        activation=activation,
        biased=_biased(source, family),
        modifiers={"softcap": caps[0] or 0.0},
        **({} if family.experts is None else family.experts(source)),
    )
    layers, growth = blocks.num_layers, None
    if family.grown:
        config, growth = _growing(config)
    scales: dict[str, Any] = {}
    if family.gemma:
        causal = not config.get("use_bidirectional_attention", bool, False)
        config.refuse(is_causal=True)  # `use_bidirectional_attention` says otherwise
        is_encoder = source.has_modules or not causal
        scales["scales"] = [config.number("query_pre_attn_scalar", 256) ** -0.5] * layers
        scales["token_scale"] = rounded_root(source, blocks.hidden)
    else:
        scores = config.architecture.endswith("ForSequenceClassification")
        encodes = scores or source.has_modules or family.bidirectional
        is_encoder = growth is None and family.encodes and encodes
        causal = not is_encoder or (config.get("is_causal", bool, True) and not family.bidirectional)
    rotated = _rotated(config, layers) if family.skips_rotation else [True] * layers
    slides = family.slides
    width = config.optional_size("sliding_window", family.width) if slides else None
    if isinstance(slides, bool):
        kinds = [NEAR if slides else ALL] * layers
    else:
        kinds = kinds_of(config, layers, partial(slides, config))
    if family.switched and not config.get("use_sliding_window", bool, False):
        width = None
    if family.gemma and not causal:
        width = width and width // 2
    if family.skips_rotation and width is None and NEAR in (config.values.get("layer_types") or ()):
        came = config.values.get("use_sliding_window")
        raise config.wrong("use_sliding_window", came, f"true, as 'layer_types' has {NEAR}")
    rotations = [0 if has else None for has in rotated]
    if family.thetas is not None:
        rotations = [list(family.thetas).index(kind) for kind in kinds]

    def rotary() -> Any:
        if family.thetas is not None:
            return frequencies_by_kind(config, family.thetas, blocks.head_dim)
        return (frequencies(config, blocks.head_dim, family.theta, family.rotates_part),)

    windows = windows_of(kinds, width, causal)
    each: Any = {"windows": windows, "rotations": rotations, "frequencies": rotary, **scales}
    if is_encoder:
        longest = config.optional_size("max_position_embeddings")
        return read_encoder(names, blocks, longest=longest, causal=causal, **each)
    config.refuse(is_causal=True)
    if family.multiplied:
        return multiplied(names, blocks, **each)
    tied = config.get("tie_word_embeddings", bool, family.tied)
    return read_decoder(names, blocks, **each, query_growth=growth, logits_cap=caps[1], tied=tied)


def multiplied(names: ModelNames, blocks: Blocks, **how: Any) -> Decoder:
    """The decoder of `blocks` with Granite's multipliers.

    Without multiplying what is added: every reader of the residual is an RMS norm, whose result is the same
    for x / c and an eps of ``eps / c**2``. So the tokens' vectors are divided by that multiplier instead.
    """
    config = blocks.source.config
    added = config.number("residual_multiplier", 1.0)
    return read_decoder(
        names,
        replace(blocks, eps=blocks.eps / added**2),
        scales=[config.number("attention_multiplier", 1.0)] * blocks.num_layers,
        token_scale=config.number("embedding_multiplier", 1.0) / added,
        logit_scale=1 / config.number("logits_scaling", 1.0),
        tied=config.get("tie_word_embeddings", bool, False),
        **how,
    )


def _biased(source: Source, family: _Family) -> frozenset[str]:
    """The maps that have a bias: by config.json, or in a GGUF file by its tensors."""
    if family.biased:
        return frozenset(family.biased)
    names = family.names.block
    inner = (names.inner,) if names.gate is None else (names.gate, names.inner)
    together = names.qkv, (names.attended,), inner, (names.outer,)
    if source.is_gguf:
        own = [name.removesuffix(".bias") for name in source.names if name.endswith(".bias")]
        has = [any(name.endswith(each) for name in own) for each in together]
    else:
        said = {key: source.config.get(key, bool, False) for key in family.biases}
        has = [said.get(key, False) for key in _BIASES for _ in range(2)]
    return frozenset(name for each, biased in zip(together, has, strict=True) if biased for name in each)


def _rotated(config: Config, num_layers: int) -> list[bool]:
    """Whether each layer of SmolLM3 has rotary positions: all but every fourth one."""
    interval = config.size("no_rope_layer_interval", 4)
    has: Any = config.values.get("no_rope_layers")  # 1 where there are rotary positions, whatever its name
    if has is None:
        has = [(i + 1) % interval != 0 for i in range(num_layers)]
    if not isinstance(has, list) or len(has) < num_layers or any(x not in (0, 1) for x in has):
        raise config.wrong("no_rope_layers", has, f"a list of {num_layers} of 0 and 1")
    return has[:num_layers]


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


def mistral3(source: Source) -> Decoder | Encoder:
    """Build the text model of Mistral 3, a Mistral or Ministral 3; its tower for images is left out."""
    return llama(of_text(source, "mistral", "ministral3"))


def gemma3(source: Source) -> Decoder | Encoder:
    """Build the text model of Gemma 3; its tower for images is left out."""
    source = of_text(source, "gemma3_text")
    usual = {"num_attention_heads": 8, "vocab_size": 262208}  # files leave them out
    return llama(source.with_config(Config.of(source.config.path, {**usual, **source.config.values})))


def of_text(source: Source, *model_types: str) -> Source:
    """The text model of a source with towers: `text_config`, by default of the first of these types."""
    config = source.config
    values = {"model_type": model_types[0], **config.get("text_config", dict)}
    if values["model_type"] not in model_types:
        expected = f"{' or '.join(model_types)} in 'text_config'"
        raise config.wrong("model_type", values["model_type"], expected)
    source = source.with_config(Config.of(f"{config.path}: 'text_config'", values))
    before = re.compile(r"^(model\.)?language_model\.(model\.|(?=lm_head))?")
    source.rename(lambda name: before.sub(lambda found: "model." if found[1] or found[2] else "", name))
    values["tie_word_embeddings"] = config.get("tie_word_embeddings", bool, True)
    return source


def without_offset(source: Source, names: ModelNames) -> ModelNames:
    """Names of norms that multiply by 1 + weight; in a GGUF file the weights have 1 added."""
    return with_block(names, norm_offset=0.0) if source.is_gguf else names


def rounded_root(source: Source, hidden: int) -> float:
    """The scale of Gemma's tokens, rounded as in transformers."""
    return float(source.precision.dtype.type(hidden**0.5))


def _cap(config: Config, name: str, default: float | None) -> float | None:
    """A bound of scores or logits; None without one."""
    given = config.values.get(name, default)
    return None if given is None else config.number(name, default or 0.0)
