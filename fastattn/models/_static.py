"""Texts to vectors without a transformer: each token has a row of a table, or a number, and nothing else.

A dense vector is the mean of its tokens' rows (StaticEmbedding of sentence-transformers, and folders of
model2vec); a sparse one has the number of each token that a text has (SparseStaticEmbedding).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastattn._args.types import Array, Ints
from fastattn.layers._block import program_of_blocks
from fastattn.models._embeddings import Embeddings, SequenceRules
from fastattn.models._encoder import Encoder
from fastattn.models._files import Config, sentences_config
from fastattn.models._modules import SPARSE_STATIC, STATIC
from fastattn.models._sentences import Sentences
from fastattn.models._similarity import SIMILARITIES
from fastattn.models._source import Rows, Source
from fastattn.models._sparse import SparseEncoder, SpladePooling
from fastattn.models._text import Text

_TABLES = ("embedding.weight", "embeddings")  # as sentence-transformers and model2vec call it
_WEIGHTS = "weight"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StaticEncoder(Encoder):
    """An encoder whose hidden states are rows of a table."""

    @property
    def has_gradients(self) -> bool:
        """Whether `vjp`, and what trains a model, take it: no."""
        return False

    def _rows(self, tokens: Ints, lengths: Ints, types: Ints | None, attended: Ints | None = None) -> Array:
        return self.embeddings(tokens, tokens, types, self.dtype)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StaticSparseEncoder(SparseEncoder):
    """A sparse encoder with a fixed weight for each token, independent of its context."""

    def get_sentence_embedding_dimension(self) -> int:
        """Number of features of a vector: the size of the vocabulary."""
        return self.encoder.vocab_size

    def _weighted(self, sequences: list[Ints], pooling: SpladePooling) -> Iterator[tuple[Ints, Array]]:
        weights: Array = self.encoder.embeddings.tokens[:, 0]  # type: ignore[index]
        for ids in sequences:
            tokens = np.unique(ids)
            tokens = tokens[weights[tokens] != 0]
            yield pooling.largest(tokens, weights[tokens])


def static_encoder(source: Source) -> StaticEncoder:
    """Build an encoder of StaticEmbedding."""
    table = next((name for name in _TABLES if name in source), _TABLES[0])
    shape = source.shape(table) if table in source else ()
    rows = Rows(table, shape if len(shape) == 2 else (0, 0))
    tokens = source.checked(lambda: source.table(rows), own=("",))
    text = Text(source.folder, None, shape[0], special=False, alone=True)
    return _encoder(source, STATIC, tokens, text, Sentences.of(source, shape[1]))


def static_sparse_encoder(source: Source) -> StaticSparseEncoder:
    """Build a sparse encoder of SparseStaticEmbedding."""
    Config(source.folder / "config.json").refuse(path=None)
    (vocab, *_) = (*(source.shape(_WEIGHTS) if _WEIGHTS in source else ()), 0)
    weights = source.checked(lambda: source.vector(Rows(_WEIGHTS, (vocab,)), shape=(vocab, 1)), own=("",))
    settings = sentences_config(source.outer)
    text = Text(source.folder, None, vocab, special=False)
    encoder = _encoder(source, SPARSE_STATIC, weights, text, Sentences.of(source, 1))
    similarity = settings.one_of("similarity_fn_name", SIMILARITIES, "dot")
    most = settings.optional_size("max_active_dims")
    no_head: Any = ()
    return StaticSparseEncoder(encoder, no_head, SpladePooling(most=most), similarity)


def _encoder(source: Source, kind: str, table: Array, text: Text, sentences: Sentences) -> StaticEncoder:
    """The encoder of a `table` of tokens."""
    program, windows = program_of_blocks([])
    return StaticEncoder(
        model_type=kind,
        hidden_size=table.shape[1],
        num_heads=0,
        num_layers=0,
        vocab_size=len(table),
        program=program,
        precision=source.precision,
        text=text,
        max_length=None,
        embeddings=Embeddings(table),
        sequence_rules=SequenceRules(windows),
        sentences=sentences,
        origin=source.origin(),
    )
