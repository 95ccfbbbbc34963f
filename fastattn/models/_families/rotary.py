"""Encoders with rotary positions: GTE, Nomic BERT and ModernBERT.

GTE (Zhang et al. 2024; `model_type` new or gte) and Nomic BERT (Nussbaum et al. 2024) have a gated
feed-forward, and norms after attention and feed-forward, as BERT has. Nomic's maps have no biases; its
config.json has the keys of GPT-2, or those of transformers. Nomic's second version (Nussbaum and Duderstadt
2025) has biases and no gates, and experts in every second block. ModernBERT (Warner et al. 2024) attends all
tokens in every third block, and in the others a window around each; both kinds have frequencies of their own.
"""

from __future__ import annotations

import re
from typing import Any

from fastattn._args.types import Activation
from fastattn._args.values import short
from fastattn.models._blocks import ACTIVATIONS, BlockNames, Blocks, Keys
from fastattn.models._embeddings import Frequencies
from fastattn.models._encoder import Encoder
from fastattn.models._families.shared import (
    ALL,
    NEAR,
    ModelNames,
    expert_counts,
    frequencies,
    frequencies_by_kind,
    kind,
    kinds_of,
    read_encoder,
    scaled,
    windows_of,
)
from fastattn.models._files import Config, ModelError
from fastattn.models._source import Source

_GTE = ModelNames(
    tokens="embeddings.word_embeddings",
    types="embeddings.token_type_embeddings",
    first_norm="embeddings.LayerNorm",
    block=BlockNames(
        prefix="encoder.layer.{}.",
        qkv=("attention.qkv_proj",),
        attended="attention.o_proj",
        attention_norm="attn_ln",
        inner="mlp.up_gate_proj",
        gate="mlp.up_gate_proj",
        gate_first=False,
        outer="mlp.down_proj",
        inner_norm="mlp_ln",
        norm_first=False,
    ),
    prefixes=("new.", "gte."),
)
_GTE_THETAS = {"new": 10_000.0, "gte": 160_000.0}  # where config.json has none
_MOST_FACTOR = 1_000_000

_NOMIC = _GTE._replace(
    first_norm="emb_ln",
    block=BlockNames(
        prefix="encoder.layers.{}.",
        qkv=("attn.Wqkv",),
        attended="attn.out_proj",
        attention_norm="norm1",
        inner="mlp.fc11",
        gate="mlp.fc12",
        outer="mlp.fc2",
        inner_norm="norm2",
        norm_first=False,
    ),
    prefixes=("nomic_bert.", "bert."),
)
_NOMIC_PLAIN = _NOMIC._replace(  # without gates; where there are experts, in some blocks
    block=_NOMIC.block._replace(
        inner="mlp.fc1",
        gate=None,
        experts="mlp.experts.{}.",
        transposed_experts=("mlp.fc2",),
        experts_bias="mlp.experts.bias",
    )
)
_ROUTER = "mlp.router.layer"
_EXPERT = re.compile(r"\.mlp\.experts\.mlp\.w([12])\.(\d+)$")
_OLD_KEYS = Keys("n_embd", "n_inner", "n_head", "n_layer", "layer_norm_epsilon", "activation_function")
_MULTIPLE = 256  # of Nomic's inner size, which older files round up
_GATED: dict[str, Activation] = {"swiglu": "silu", "geglu": "gelu", "glu": "sigmoid"}

_MODERNBERT = ModelNames(
    tokens="embeddings.tok_embeddings",
    first_norm="embeddings.norm",
    block=BlockNames(
        prefix="layers.{}.",
        attention_norm="attn_norm",
        qkv=("attn.Wqkv",),
        attended="attn.Wo",
        inner_norm="mlp_norm",
        inner="mlp.Wi",
        gate="mlp.Wi",
        outer="mlp.Wo",
        first_norm=False,  # the tokens' vectors have been normed
    ),
    last_norm="final_norm",
    prefixes=("model.",),
)
# Kinds of attention, with the older name and the default of its theta.
_KINDS = {ALL: ("global_rope_theta", 160_000.0), NEAR: ("local_rope_theta", 10_000.0)}


def gte(source: Source) -> Encoder:
    """Build GTE."""
    config, names = source.config, _GTE.block
    config.refuse(
        position_embedding_type="rope",
        layer_norm_type="layer_norm",
        pack_qkv=True,
        logn_attention_scale=False,
    )
    blocks = Blocks.of(source, names, biased=names.maps - {names.inner})
    theta = _GTE_THETAS[config.get("model_type", str)]
    return read_encoder(
        _GTE,
        blocks,
        types=config.size("type_vocab_size", 1, low=0),
        longest=config.size("max_position_embeddings"),
        frequencies=lambda: (_gte_frequencies(config, blocks.head_dim, theta),),
    )


def _gte_frequencies(config: Config, head_dim: int, theta: float) -> Frequencies:
    """Frequencies as in `shared.py`, but "ntk" is this family's own.

    It multiplies the base by the factor, and divides all frequencies so that the lowest is the trained one
    over the factor.
    """
    scaling = config.get("rope_scaling", dict, {})
    if kind(scaling) != "ntk":
        return frequencies(config, head_dim, theta)
    factor = scaling.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 1 <= factor <= _MOST_FACTOR:
        came = f"'factor' of 'rope_scaling' is {short(factor)}"
        raise ModelError(f"{config.path}: {came}; expected a number from 1 to {_MOST_FACTOR}")
    if scaling.get("mixed_b") is not None:
        raise ModelError(f"{config.path}: 'rope_scaling' has a mixed_b; expected none")
    base = config.number("rope_theta", theta) * factor
    slower = {"rope_type": "linear", "factor": factor ** (2 / head_dim), "rope_theta": base}
    return scaled(config, head_dim, slower, None)


def nomic(source: Source) -> Encoder:
    """Build Nomic BERT."""
    config, all_names = source.config, _NOMIC
    old = "n_embd" in config.values
    forward: dict[str, Any] = {}
    if old and config.get("activation_function", str) not in _GATED:
        all_names, forward = _NOMIC_PLAIN, _nomic_experts(source)
        if forward:
            all_names = all_names._replace(block=all_names.block._replace(router=_ROUTER))
    names = all_names.block
    keys = _OLD_KEYS if old else Keys()
    longest = config.size("n_positions" if old else "max_position_embeddings", 2048)
    inner = config.size(keys.inner, 4 * config.size(keys.hidden) if old else 3072)
    biased: set[str | None] = set()
    if old:
        _refuse_unknown(config)
        if names.gate is not None:
            config.refuse(moe_every_n_layers=0)
            inner = -(-inner // _MULTIPLE) * _MULTIPLE
        maps = {"qkv_proj": (*names.qkv, names.attended), "mlp_fc1": (names.inner, names.gate)}
        for part, own in {**maps, "mlp_fc2": (names.outer,)}.items():
            biased |= {*own} if config.get(f"{part}_bias", bool, True) else set()
    config.refuse(head_dim=config.divided(keys.hidden, keys.heads))
    blocks = Blocks.of(
        source,
        names,
        keys,
        activation=None if old else "silu",
        activations=_GATED if old and names.gate is not None else ACTIVATIONS,
        inner=inner,
        biased=frozenset(name for name in biased if name is not None),
        **forward,
    )

    def rotary() -> Frequencies:
        head_dim = blocks.head_dim
        return _nomic_frequencies(config, head_dim) if old else frequencies(config, head_dim, 1000.0)

    return read_encoder(
        all_names,
        blocks,
        types=config.size("type_vocab_size", 2, low=0),
        longest=longest,
        frequencies=lambda: (rotary(),),
    )


def _nomic_experts(source: Source) -> dict[str, Any]:
    """The fields of `Blocks` for experts, in every block of which the number leaves 1 as a rest; or none."""
    config = source.config
    every = config.size("moe_every_n_layers", 0, low=0)
    if not every:
        return {}
    config.refuse(moe_normalize_expert_weights=False, expert_choice_router=False)
    config.refuse(num_shared_experts=0, ffn_div=1)
    source.rename(lambda name: _EXPERT.sub(r".mlp.experts.\2.mlp.fc\1.weight", name))
    counts = expert_counts(source, "num_experts", 1, "moe_top_k")
    routed = frozenset(i for i in range(source.depth("n_layer")) if i % every == 1)
    return {"normalised": False, "routed": routed, **counts}


def _refuse_unknown(config: Config) -> None:
    """Raise if Nomic's older config.json wants what is not there."""
    if config.values.get("rotary_emb_fraction") is None:
        config.values["rotary_emb_fraction"] = 0.0  # the default of this model's code: no rotary positions
    config.refuse_others(max_position_embeddings="n_positions")
    config.refuse(
        scale_attn_weights=True,
        prenorm=False,
        parallel_block=False,
        use_rms_norm=False,
        causal=False,
        rotary_emb_fraction=1.0,
        rotary_emb_interleaved=False,
        rotary_emb_scale_base=False,
    )


def _nomic_frequencies(config: Config, head_dim: int) -> Frequencies:
    """Frequencies of the older config.json.

    With a `rotary_scaling_factor`, they grow with the sequence past `max_trained_positions`.
    """
    scaling = {"rope_theta": config.number("rotary_emb_base", 10000.0)}
    if config.values.get("rotary_scaling_factor") is None:
        return scaled(config, head_dim, scaling, None)
    factor = config.number("rotary_scaling_factor")
    trained = config.size("max_trained_positions", 2048)
    return scaled(config, head_dim, {**scaling, "rope_type": "dynamic", "factor": factor}, trained)


def modernbert(source: Source) -> Encoder:
    """Build ModernBERT."""
    config, block = source.config, _MODERNBERT.block
    longest = config.size("max_position_embeddings", 8192)
    biased: tuple[str, ...] = ()
    if config.get("attention_bias", bool, False):
        biased += (*block.qkv, block.attended)
    if config.get("mlp_bias", bool, False):
        biased += (block.inner, block.outer)
    names = _MODERNBERT._replace(block=block._replace(norm_bias=config.get("norm_bias", bool, False)))
    keys = Keys(eps="norm_eps", activation="hidden_activation")
    blocks = Blocks.of(source, names.block, keys, eps=1e-5, biased=frozenset(biased))
    kinds = kinds_of(
        config, blocks.num_layers, lambda i: i % config.size("global_attn_every_n_layers", 3) > 0
    )
    side = config.optional_size("sliding_window") or config.size("local_attention", 128) // 2
    thetas = _KINDS
    if config.values.get(_KINDS[NEAR][0], 0) is None:  # null: that of the other kind
        thetas = dict.fromkeys(_KINDS, _KINDS[ALL])
    return read_encoder(
        names,
        blocks,
        longest=longest,
        windows=windows_of(kinds, side, causal=False),
        rotations=[list(_KINDS).index(kind) for kind in kinds],
        frequencies=lambda: frequencies_by_kind(config, thetas, blocks.head_dim, longest, _KINDS),
    )
