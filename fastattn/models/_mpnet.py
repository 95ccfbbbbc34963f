"""MPNet (Song et al. 2020): the names of its tensors, and what its config.json says.

BERT without token types, and with biases of scores by distance, from one table for all blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastattn.models._blocks import ACTIVATIONS, BlockNames, Blocks, Source
from fastattn.models._buckets import BucketBiases
from fastattn.models._families import EncoderNames, read_encoder
from fastattn.models._files import ModelError

if TYPE_CHECKING:
    from fastattn.models._encoder import Encoder

_NAMES = EncoderNames(
    tokens="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    first_norm="embeddings.LayerNorm",
    block=BlockNames(
        prefix="encoder.layer.{}.",
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        attended="attention.attn.o",
        attention_norm="attention.LayerNorm",
        inner="intermediate.dense",
        outer="output.dense",
        inner_norm="output.LayerNorm",
        norm_first=False,
    ),
    prefixes=("mpnet.",),
)
_BIASES = "encoder.relative_attention_bias.weight"
_BUCKETS, _MAX_DISTANCE = 32, 128  # whatever config.json says, transformers has these
_FIRST = 2  # positions begin behind the padding token's id, which is 1


def build(source: Source) -> Encoder:
    """The model that the folder's files describe."""
    config = source.config
    heads, table = config.size("num_attention_heads"), config.size("max_position_embeddings")
    if table <= _FIRST:
        raise ModelError(f"{config.path}: 'max_position_embeddings' is {table}; expected more than {_FIRST}")
    config.refuse(relative_attention_num_buckets=_BUCKETS)
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
        biased=_NAMES.block.maps,
        bias=0,
    )
    return read_encoder(
        _NAMES,
        blocks,
        positions=table,
        first=_FIRST,
        others={_BIASES: (_BUCKETS, heads)},
        biases=lambda: BucketBiases(source.vector(_BIASES), _MAX_DISTANCE),
    )
