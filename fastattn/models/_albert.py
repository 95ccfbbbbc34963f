"""ALBERT (Lan et al. 2019): the names of its tensors, and what its config.json says.

BERT with narrow vectors of tokens, mapped to the blocks' width, and with few blocks, each many times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastattn.models._blocks import ACTIVATIONS, BlockNames, Blocks, Source
from fastattn.models._families import EncoderNames, read_encoder
from fastattn.models._files import ModelError

if TYPE_CHECKING:
    from fastattn.models._encoder import Encoder

_NAMES = EncoderNames(
    tokens="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    types="embeddings.token_type_embeddings",
    first_norm="embeddings.LayerNorm",
    widened="encoder.embedding_hidden_mapping_in",
    block=BlockNames(
        prefix="encoder.albert_layer_groups.{}.albert_layers.0.",
        qkv=("attention.query", "attention.key", "attention.value"),
        attended="attention.dense",
        attention_norm="attention.LayerNorm",
        inner="ffn",
        outer="ffn_output",
        inner_norm="full_layer_layer_norm",
        norm_first=False,
    ),
    prefixes=("albert.",),
)
_MOST_LAYERS = 1000  # of which no tensors tell


def build(source: Source) -> Encoder:
    """The model that the folder's files describe."""
    config = source.config
    heads, layers = config.size("num_attention_heads"), config.size("num_hidden_layers", low=0)
    config.refuse(inner_group_num=1, position_embedding_type="absolute")
    if layers > _MOST_LAYERS:
        expected = f"at most {_MOST_LAYERS}"
        raise ModelError(f"{config.path}: 'num_hidden_layers' is {layers}; expected {expected}")
    config.values.setdefault("num_hidden_groups", 1)
    groups = source.tensors.depth(config, "num_hidden_groups")
    blocks = Blocks(
        source,
        _NAMES.block,
        num_layers=groups,
        hidden=config.size("hidden_size"),
        inner=config.size("intermediate_size"),
        heads=heads,
        heads_kv=heads,
        head_dim=config.divided("hidden_size", "num_attention_heads"),
        eps=config.number("layer_norm_eps", 1e-12),
        activation=config.choice("hidden_act", ACTIVATIONS, "gelu_new"),
        biased=_NAMES.block.maps,
    )
    return read_encoder(
        _NAMES,
        blocks,
        types=config.size("type_vocab_size", 2),
        positions=config.size("max_position_embeddings"),
        features=config.size("embedding_size", 128),
        order=[int(i / (layers / groups)) for i in range(layers)],  # as transformers rounds,
    )
