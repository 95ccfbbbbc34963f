"""BERT (Devlin et al. 2018) and its relatives: names of tensors, and the keys of config.json.

RoBERTa, XLM-RoBERTa and CamemBERT are BERT whose positions begin after the padding token's id. DistilBERT
(Sanh et al. 2019) has no token types. ALBERT (Lan et al. 2019) maps narrow vectors of tokens to the blocks'
width, and has few blocks, each many times. MPNet (Song et al. 2020) has no token types, and adds biases to
scores by distance, from one table for all blocks.
"""

from __future__ import annotations

import re

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

# Whether positions begin after the padding token's id.
_COUNTS = {"bert": False, **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), True)}
TYPES = tuple(_COUNTS)

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
_DISTILBERT_KEYS = Keys("dim", "hidden_dim", "n_heads", "n_layers", eps=None, activation="activation")

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


def bert(source: Source) -> Encoder:
    """Build BERT, RoBERTa, XLM-RoBERTa or CamemBERT."""
    config = source.config
    table, blocks = config.size("max_position_embeddings"), Blocks.of(source, BERT.block)
    config.refuse(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    counts = config.choice("model_type", _COUNTS)
    first = config.size("pad_token_id", 1, low=0) + 1 if counts else 0
    if first >= table:
        expected = f"'max_position_embeddings' - 1, {table - 1}, as positions begin after it"
        raise config.wrong("pad_token_id", first - 1, f"less than {expected}")
    source.rename(lambda name: _OLD_NORM.sub(lambda found: f"LayerNorm.{_NEW_NORM[found[1]]}", name))
    return read_encoder(BERT, blocks, types=config.size("type_vocab_size", 2), positions=table, first=first)


def distilbert(source: Source) -> Encoder:
    """Build DistilBERT."""
    config = source.config
    config.refuse_others(hidden_size="dim", num_attention_heads="n_heads", num_hidden_layers="n_layers")
    blocks = Blocks.of(source, _DISTILBERT.block, _DISTILBERT_KEYS)
    return read_encoder(_DISTILBERT, blocks, positions=config.size("max_position_embeddings"))


def albert(source: Source) -> Encoder:
    """Build ALBERT."""
    config = source.config
    layers = config.size("num_hidden_layers", low=0)
    config.refuse(inner_group_num=1, position_embedding_type="absolute")
    if layers > _MOST_LAYERS:
        raise config.wrong("num_hidden_layers", layers, f"at most {_MOST_LAYERS}")
    config.values.setdefault("num_hidden_groups", 1)
    blocks = Blocks.of(source, _ALBERT.block, Keys(layers="num_hidden_groups"), activation="gelu_new")
    return read_encoder(
        _ALBERT,
        blocks,
        types=config.size("type_vocab_size", 2),
        positions=config.size("max_position_embeddings"),
        features=config.size("embedding_size", 128),
        order=[int(i / (layers / blocks.num_layers)) for i in range(layers)],  # as transformers rounds,
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
