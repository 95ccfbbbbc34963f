"""BERT (Devlin et al. 2018) and its relatives: the names of their tensors, and what their config.json says.

BERT and MiniLM; RoBERTa, XLM-RoBERTa and CamemBERT, whose positions begin behind the padding token's id.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fastattn.layers._block import model_program
from fastattn.models._blocks import ACTIVATIONS, BlockNames, Blocks, Source
from fastattn.models._embeddings import Embeddings, Places
from fastattn.models._encoder import Encoder
from fastattn.models._files import ModelError
from fastattn.models._sentences import Sentences
from fastattn.models._text import Text

if TYPE_CHECKING:
    from fastattn._args.types import Shape

_TOKENS = "embeddings.word_embeddings.weight"
_POSITIONS = "embeddings.position_embeddings.weight"
_TYPES = "embeddings.token_type_embeddings.weight"
_FIRST_NORM = "embeddings.LayerNorm"
_NAMES = BlockNames(
    prefix="encoder.layer.{}.",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    attended="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    inner="intermediate.dense",
    outer="output.dense",
    inner_norm="output.LayerNorm",
    norm_first=False,
)
_IGNORED = re.compile(r"^embeddings\.(position|token_type)_ids$")  # 0, 1, 2, ...; old files hold them
_OLD_NORM = re.compile(r"LayerNorm\.(gamma|beta)$")  # names of TensorFlow, and so of bert-base-uncased
_NEW_NORM = {"gamma": "weight", "beta": "bias"}


def build(source: Source) -> Encoder:
    """The model that the folder's files describe."""
    folder, config, tensors, precision = source
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    vocab, types = config.size("vocab_size"), config.size("type_vocab_size", 2)
    table = config.size("max_position_embeddings")
    model_type = config.get("model_type", str)
    blocks = Blocks(
        source,
        _NAMES,
        num_layers=tensors.depth(config, "num_hidden_layers"),
        hidden=hidden,
        inner=config.size("intermediate_size"),
        heads=heads,
        heads_kv=heads,
        head_dim=config.divided("hidden_size", "num_attention_heads"),
        eps=config.number("layer_norm_eps", 1e-12),
        activation=config.choice("hidden_act", ACTIVATIONS, "gelu"),
        biased=_NAMES.maps,
    )
    config.refuse(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    first = 0 if model_type == "bert" else config.size("pad_token_id", 1, low=0) + 1
    if first >= table:
        expected = f"'max_position_embeddings' - 1, {table - 1}, as positions begin behind it"
        raise ModelError(f"{config.path}: 'pad_token_id' is {first - 1}; expected less than {expected}")

    tensors.drop_prefix("bert.", "roberta.")
    tensors.rename(lambda name: _OLD_NORM.sub(lambda found: f"LayerNorm.{_NEW_NORM[found[1]]}", name))
    shapes: dict[str, Shape] = {
        _TOKENS: (vocab, hidden),
        _POSITIONS: (table, hidden),
        _TYPES: (types, hidden),
        **blocks.norm_shapes(_FIRST_NORM),
        **blocks.shapes(),
    }
    tensors.expect(shapes, own=("embeddings.", "encoder."), ignored=_IGNORED)

    program, windows = model_program(blocks.read(), blocks.norm(_FIRST_NORM))
    token_types = source.vector(_TYPES)
    positions = source.vector(_POSITIONS)[first:] + token_types[0]
    return Encoder(
        model_type=model_type,
        hidden_size=hidden,
        num_heads=heads,
        num_layers=blocks.num_layers,
        vocab_size=vocab,
        program=program,
        precision=precision,
        text=Text(folder, len(positions)),
        max_length=len(positions),
        embeddings=Embeddings(
            tensors[_TOKENS], token_types.astype(precision.dtype), positions.astype(precision.dtype)
        ),
        places=Places(windows),
        sentences=Sentences.of(folder, hidden, precision.dtype),
    )
