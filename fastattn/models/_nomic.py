"""Nomic BERT (Nussbaum et al. 2024): the names of its tensors, and what its config.json says.

Rotary positions and a gated feed-forward, norms behind attention and feed-forward as in BERT, and no biases
of maps. Its config.json has the keys of GPT-2, or those of transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fastattn.models._blocks import ACTIVATIONS, BlockNames, Blocks, Source
from fastattn.models._families import EncoderNames, read_encoder
from fastattn.models._rope import frequencies, scaled

if TYPE_CHECKING:
    from fastattn._args.types import Activation
    from fastattn.models._embeddings import Frequencies
    from fastattn.models._encoder import Encoder
    from fastattn.models._files import Config

_NAMES = EncoderNames(
    tokens="embeddings.word_embeddings",
    types="embeddings.token_type_embeddings",
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
_BLOCK = _NAMES.block
_THETA = 1000.0
_MULTIPLE = 256  # of the inner size, which older files round up
_GATED: dict[str, Activation] = {"swiglu": "silu", "geglu": "gelu", "glu": "sigmoid"}


class _Keys(NamedTuple):
    """What config.json calls sizes."""

    hidden: str = "hidden_size"
    inner: str = "intermediate_size"
    heads: str = "num_attention_heads"
    layers: str = "num_hidden_layers"
    longest: str = "max_position_embeddings"
    eps: str = "layer_norm_eps"


_OLD = _Keys("n_embd", "n_inner", "n_head", "n_layer", "n_positions", "layer_norm_epsilon")


def build(source: Source) -> Encoder:
    """The model that the folder's files describe."""
    config = source.config
    old = "n_embd" in config.values
    keys = _OLD if old else _Keys()
    heads, longest = config.size(keys.heads), config.size(keys.longest, 2048)
    inner = config.size(keys.inner, 4 * config.size(keys.hidden) if old else 3072)
    biased: set[str | None] = set()
    if old:
        _refuse(config)
        inner = -(-inner // _MULTIPLE) * _MULTIPLE
        if config.get("qkv_proj_bias", bool, True):
            biased |= {*_BLOCK.qkv, _BLOCK.attended}
        if config.get("mlp_fc1_bias", bool, True):
            biased |= {_BLOCK.inner, _BLOCK.gate}
        if config.get("mlp_fc2_bias", bool, True):
            biased |= {_BLOCK.outer}
        activation = config.choice("activation_function", _GATED)
    else:
        activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    head_dim = config.divided(keys.hidden, keys.heads)
    config.refuse(head_dim=head_dim)
    blocks = Blocks(
        source,
        _BLOCK,
        num_layers=source.tensors.depth(config, keys.layers),
        hidden=config.size(keys.hidden),
        inner=inner,
        heads=heads,
        heads_kv=heads,
        head_dim=head_dim,
        eps=config.number(keys.eps, 1e-12),
        activation=activation,
        biased=frozenset(name for name in biased if name is not None),
    )
    rotary = _old_frequencies if old else _frequencies
    return read_encoder(
        _NAMES,
        blocks,
        types=config.size("type_vocab_size", 2, low=0),
        longest=longest,
        rotations=[0] * blocks.num_layers,
        frequencies=lambda: (rotary(config, head_dim),),
    )


def _refuse(config: Config) -> None:
    """Raise if an older config.json wants what is not there."""
    if config.values.get("rotary_emb_fraction") is None:
        config.values["rotary_emb_fraction"] = 0.0  # the default of this model's code: no rotary positions
    config.refuse_others(hidden_size="n_embd", num_attention_heads="n_head", num_hidden_layers="n_layer")
    config.refuse_others(max_position_embeddings="n_positions")
    config.refuse(
        scale_attn_weights=True,
        prenorm=False,
        parallel_block=False,
        use_rms_norm=False,
        causal=False,
        moe_every_n_layers=0,
        rotary_emb_fraction=1.0,
        rotary_emb_interleaved=False,
        rotary_emb_scale_base=False,
    )


def _frequencies(config: Config, head_dim: int) -> Frequencies:
    return frequencies(config, head_dim, _THETA)


def _old_frequencies(config: Config, head_dim: int) -> Frequencies:
    """With a `rotary_scaling_factor`, those that grow with the sequence past `max_trained_positions`."""
    scaling = {"rope_theta": config.number("rotary_emb_base", 10000.0)}
    if config.values.get("rotary_scaling_factor") is None:
        return scaled(config, head_dim, scaling, None)
    factor = config.number("rotary_scaling_factor")
    trained = config.size("max_trained_positions", 2048)
    return scaled(config, head_dim, {**scaling, "rope_type": "dynamic", "factor": factor}, trained)
