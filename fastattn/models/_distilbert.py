"""DistilBERT (Sanh et al. 2019): the names of its tensors, and what its config.json says.

BERT without token types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastattn.models._blocks import ACTIVATIONS, BlockNames, Blocks, Source
from fastattn.models._families import EncoderNames, read_encoder

if TYPE_CHECKING:
    from fastattn.models._encoder import Encoder

_NAMES = EncoderNames(
    tokens="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    first_norm="embeddings.LayerNorm",
    block=BlockNames(
        prefix="transformer.layer.{}.",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        attended="attention.out_lin",
        attention_norm="sa_layer_norm",
        inner="ffn.lin1",
        outer="ffn.lin2",
        inner_norm="output_layer_norm",
        norm_first=False,
    ),
    prefixes=("distilbert.",),
)


def build(source: Source) -> Encoder:
    """The model that the folder's files describe."""
    config = source.config
    heads = config.size("n_heads")
    config.refuse_others(hidden_size="dim", num_attention_heads="n_heads", num_hidden_layers="n_layers")
    blocks = Blocks(
        source,
        _NAMES.block,
        num_layers=source.tensors.depth(config, "n_layers"),
        hidden=config.size("dim"),
        inner=config.size("hidden_dim"),
        heads=heads,
        heads_kv=heads,
        head_dim=config.divided("dim", "n_heads"),
        eps=1e-12,
        activation=config.choice("activation", ACTIVATIONS, "gelu"),
        biased=_NAMES.block.maps,
    )
    return read_encoder(_NAMES, blocks, positions=config.size("max_position_embeddings"))
