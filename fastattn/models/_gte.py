"""GTE (Zhang et al. 2024), `model_type` new or gte: the names of its tensors, and what its config.json says.

Rotary positions and a gated feed-forward; norms behind attention and feed-forward, as in BERT.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastattn._args.values import short
from fastattn.models._blocks import ACTIVATIONS, BlockNames, Blocks, Source
from fastattn.models._families import EncoderNames, read_encoder
from fastattn.models._files import ModelError
from fastattn.models._rope import frequencies, kind, scaled

if TYPE_CHECKING:
    from fastattn.models._embeddings import Frequencies
    from fastattn.models._encoder import Encoder
    from fastattn.models._files import Config

_NAMES = EncoderNames(
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
_THETAS = {"new": 10_000.0, "gte": 160_000.0}  # where config.json has none
_MOST_FACTOR = 1_000_000


def build(source: Source) -> Encoder:
    """The model that the folder's files describe."""
    config = source.config
    model_type = config.get("model_type", str)
    heads = config.size("num_attention_heads")
    config.refuse(
        position_embedding_type="rope",
        layer_norm_type="layer_norm",
        pack_qkv=True,
        logn_attention_scale=False,
    )
    blocks = Blocks(
        source,
        _NAMES.block,
        num_layers=source.tensors.depth(config, "num_hidden_layers"),
        hidden=config.size("hidden_size"),
        inner=config.size("intermediate_size"),
        heads=heads,
        heads_kv=heads,
        head_dim=config.divided("hidden_size", "num_attention_heads"),
        eps=config.number("layer_norm_eps", 1e-12),
        activation=config.choice("hidden_act", ACTIVATIONS, "gelu"),
        biased=_NAMES.block.maps - {_NAMES.block.inner},
    )
    return read_encoder(
        _NAMES,
        blocks,
        types=config.size("type_vocab_size", 1, low=0),
        longest=config.size("max_position_embeddings"),
        rotations=[0] * blocks.num_layers,
        frequencies=lambda: (_frequencies(config, blocks.head_dim, _THETAS[model_type]),),
    )


def _frequencies(config: Config, head_dim: int, theta: float) -> Frequencies:
    """As in `_rope`, but "ntk" is this family's own.

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
