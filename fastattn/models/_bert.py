"""BERT (Devlin et al. 2018) and its relatives: the names of their tensors, and what their config.json says.

BERT and MiniLM; RoBERTa, XLM-RoBERTa and CamemBERT, whose positions begin behind the padding token's id.
"""

from __future__ import annotations

import re
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
    block=BlockNames(
        prefix="encoder.layer.{}.",
        qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
        attended="attention.output.dense",
        attention_norm="attention.output.LayerNorm",
        inner="intermediate.dense",
        outer="output.dense",
        inner_norm="output.LayerNorm",
        norm_first=False,
    ),
    prefixes=("bert.", "roberta."),
    ignored=re.compile(r"^embeddings\.(position|token_type)_ids$"),  # 0, 1, 2, ...; old files hold them
)
_OLD_NORM = re.compile(r"LayerNorm\.(gamma|beta)$")  # names of TensorFlow, and so of bert-base-uncased
_NEW_NORM = {"gamma": "weight", "beta": "bias"}


def build(source: Source) -> Encoder:
    """The model that the folder's files describe."""
    config, tensors = source.config, source.tensors
    heads, table = config.size("num_attention_heads"), config.size("max_position_embeddings")
    model_type = config.get("model_type", str)
    blocks = Blocks(
        source,
        _NAMES.block,
        num_layers=tensors.depth(config, "num_hidden_layers"),
        hidden=config.size("hidden_size"),
        inner=config.size("intermediate_size"),
        heads=heads,
        heads_kv=heads,
        head_dim=config.divided("hidden_size", "num_attention_heads"),
        eps=config.number("layer_norm_eps", 1e-12),
        activation=config.choice("hidden_act", ACTIVATIONS, "gelu"),
        biased=_NAMES.block.maps,
    )
    config.refuse(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    first = 0 if model_type == "bert" else config.size("pad_token_id", 1, low=0) + 1
    if first >= table:
        expected = f"'max_position_embeddings' - 1, {table - 1}, as positions begin behind it"
        raise ModelError(f"{config.path}: 'pad_token_id' is {first - 1}; expected less than {expected}")

    tensors.rename(lambda name: _OLD_NORM.sub(lambda found: f"LayerNorm.{_NEW_NORM[found[1]]}", name))
    types = config.size("type_vocab_size", 2)
    return read_encoder(_NAMES, blocks, types=types, positions=table, first=first)
