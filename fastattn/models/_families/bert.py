"""BERT (Devlin et al. 2018) and its relatives: names of tensors, and the keys of config.json.

RoBERTa, XLM-RoBERTa and CamemBERT are BERT whose positions begin after the padding token's id. DistilBERT
(Sanh et al. 2019) has no token types. ALBERT (Lan et al. 2019) maps narrow vectors of tokens to the blocks'
width, and has few blocks, each many times. MPNet (Song et al. 2020) has no token types, and adds biases to
scores by distance, from one table for all blocks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from fastattn.models._blocks import BlockNames, Blocks, Keys
from fastattn.models._embeddings import BucketBiases
from fastattn.models._encoder import Encoder
from fastattn.models._families.shared import ModelNames, read_encoder
from fastattn.models._source import Rows, Source

BERT = ModelNames(
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

_DISTILBERT = BERT._replace(
    types=None,
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

_ALBERT = BERT._replace(
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
_MOST_LAYERS = 1000  # of ALBERT, whose tensors do not tell their number

_MPNET = BERT._replace(
    types=None,
    block=BERT.block._replace(
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        attended="attention.attn.o",
        attention_norm="attention.LayerNorm",
    ),
    prefixes=("mpnet.",),
)
_BIASES = "encoder.relative_attention_bias.weight"
_BUCKETS, _MAX_DISTANCE = 32, 128  # whatever config.json says, transformers has these
_FIRST = 2  # MPNet's positions begin after the padding token's id, which is 1


class _Family(NamedTuple):
    """A family like BERT: names of tensors, keys of config.json, and what differs from BERT."""

    names: ModelNames = BERT
    keys: Keys = Keys()
    types: int | None = 2  # the default of `type_vocab_size`; None: there are no token types
    counts: bool = False  # positions begin after the padding token's id
    only: Mapping[str, Any] = {}  # what alone is supported of keys


_BERT = _Family(
    only={"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
)
FAMILIES = {
    "bert": _BERT,
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), _BERT._replace(counts=True)),
    "distilbert": _Family(
        _DISTILBERT, Keys("dim", "hidden_dim", "n_heads", "n_layers", eps=None, activation="activation"), None
    ),
}
TYPES = tuple(FAMILIES)


def bert(source: Source) -> Encoder:
    """Build a model of one of `TYPES`."""
    config = source.config
    family = config.choice("model_type", FAMILIES)
    names, table = family.names, config.size("max_position_embeddings")
    blocks = Blocks.of(source, names.block, family.keys)
    config.refuse(**family.only)
    first = config.size("pad_token_id", 1, low=0) + 1 if family.counts else 0
    if first >= table:
        expected = f"'max_position_embeddings' - 1, {table - 1}, as positions begin after it"
        raise config.wrong("pad_token_id", first - 1, f"less than {expected}")
    source.rename(lambda name: _OLD_NORM.sub(lambda found: f"LayerNorm.{_NEW_NORM[found[1]]}", name))
    types = 0 if family.types is None else config.size("type_vocab_size", family.types)
    return read_encoder(names, blocks, types=types, positions=table, first=first)


def albert(source: Source) -> Encoder:
    """Build ALBERT."""
    config = source.config
    layers = config.size("num_hidden_layers", low=0)
    config.refuse(inner_group_num=1, position_embedding_type="absolute")
    if layers > _MOST_LAYERS:
        raise config.wrong("num_hidden_layers", layers, f"at most {_MOST_LAYERS}")
    config.values.setdefault("num_hidden_groups", 1)
    groups = source.depth("num_hidden_groups")
    blocks = Blocks.of(source, _ALBERT.block, num_layers=groups, activation="gelu_new")
    return read_encoder(
        _ALBERT,
        blocks,
        types=config.size("type_vocab_size", 2),
        positions=config.size("max_position_embeddings"),
        features=config.size("embedding_size", 128),
        order=[int(i / (layers / groups)) for i in range(layers)],  # as transformers rounds,
    )


def mpnet(source: Source) -> Encoder:
    """Build MPNet."""
    config = source.config
    table = config.size("max_position_embeddings")
    if table <= _FIRST:
        raise config.wrong("max_position_embeddings", table, f"more than {_FIRST}")
    config.refuse(relative_attention_num_buckets=_BUCKETS)
    blocks = Blocks.of(source, _MPNET.block, bias=0)
    return read_encoder(
        _MPNET,
        blocks,
        positions=table,
        first=_FIRST,
        biases=lambda: BucketBiases(source.vector(Rows(_BIASES, (_BUCKETS, blocks.heads))), _MAX_DISTANCE),
    )
