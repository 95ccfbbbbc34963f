"""SPLADE (Formal et al. 2021): texts to sparse vectors, with a weight for each token of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from fastattn._args.errors import named, wrong_shape, wrong_type
from fastattn._args.types import Array, Ints, Unpack, lane_dtype
from fastattn._args.values import integer
from fastattn.models._encode_calls import (
    EncodeSettings,
    Routes,
    SparseOptions,
    TextEncoder,
    calls,
    model_of,
    one_or_several,
    watched,
)
from fastattn.models._encoder import EncoderWithHead
from fastattn.models._files import require
from fastattn.models._sentences import Dense, LayerNorm, applied
from fastattn.models._similarity import similarities

Head = tuple[Dense, LayerNorm, Dense]
Names = tuple[str, ...]

_LOGITS = 1 << 23  # at a time: 32 MB of float32, of hundreds of tokens where the vocabulary is BERT's
STRATEGIES, FUNCTIONS = ("max", "sum"), ("relu", "log1p_relu")


@dataclass(frozen=True, slots=True)
class SpladePooling:
    """Pooling of the logits of a text's tokens to its weights."""

    strategy: str = "max"
    function: str = "relu"
    most: int | None = None  # weights that are kept

    def rows(self, head: Head, states: Array, cu_seqlens: Ints) -> Iterator[tuple[Ints, Array]]:
        """Yield each text's tokens that have a weight, and their weights; a text without tokens has none."""
        vocab, lane = head[-1].weight.out_features, lane_dtype(states.dtype)
        step = max(1, _LOGITS // vocab)
        logits, begin, end = np.empty((0, vocab), lane), 0, 0  # of tokens begin to end
        for first, last in pairwise(cu_seqlens.tolist()):
            pooled = np.zeros(vocab, logits.dtype)
            while first < last:
                if first == end:
                    begin, end = end, min(end + step, len(states))
                    logits = applied(head, states[begin:end]).astype(lane, copy=False)
                stop = min(last, end)
                self._add(pooled, logits[first - begin : stop - begin])
                first = stop
            tokens = np.flatnonzero(pooled)
            weights = pooled[tokens]
            yield self.largest(tokens, weights if self.strategy == "sum" else self._weights(weights))

    def _add(self, pooled: Array, logits: Array) -> None:
        if self.strategy == "max":  # the function of the largest is the largest of the functions
            np.maximum(pooled, logits.max(axis=0), out=pooled)
            return
        for token in logits:  # one by one: so the sum does not depend on which logits come together
            pooled += self._weights(np.maximum(token, 0))

    def _weights(self, x: Array) -> Array:
        x = np.log1p(x)
        return np.log1p(x) if self.function == "log1p_relu" else x

    def largest(self, tokens: Ints, weights: Array) -> tuple[Ints, Array]:
        """The tokens whose weights are kept, and these."""
        if self.most is not None and self.most < len(tokens):
            best = np.sort(np.argsort(-np.abs(weights), kind="stable")[: self.most])
            tokens, weights = tokens[best], weights[best]
        return tokens, weights


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SparseEncoder(TextEncoder, EncoderWithHead):
    """A sparse encoder, with a weight for each token of the vocabulary."""

    head: Head  # to the logits of all tokens
    pooling: SpladePooling
    similarity_fn_name: str  # measure of `similarity`: "dot", "cosine", "euclidean" or "manhattan"
    routes: Routes | None = field(default=None, kw_only=True)  # where texts go by their task

    def __repr__(self) -> str:
        return self._described(self.get_sentence_embedding_dimension())

    def get_sentence_embedding_dimension(self) -> int:
        """Number of features of a vector: the size of the vocabulary."""
        return self.head[-1].weight.out_features

    @named("encode")
    def encode(
        self, sentences: str | Iterable[str], *, task: str | None = None, **options: Unpack[SparseOptions]
    ) -> Any:
        """Make a sparse vector of each text.

        Parameters
        ----------
        sentences, task, prompt_name, prompt, batch_size, show_progress_bar
            As in `Encoder.encode`.
        max_active_dims : int, optional
            Number of largest weights to keep in each vector; by default as the folder says, or all.

        Returns
        -------
        scipy.sparse.csr_array, (n, vocab_size); (1, vocab_size) for one str
            float32, or float64 for a model in float64. A vector's bits depend on its text alone.

        Raises
        ------
        ImportError
            If scipy is missing.
        """
        return model_of(self, task)._encode(sentences, options)

    @named("decode")
    def decode(self, embeddings: Any, top_k: int | None = None) -> list[list[tuple[str, float]]]:
        """Tokens of each sparse vector of (n, vocab_size) and their weights, largest first.

        `top_k` is the number of tokens; by default all that have a weight.
        """
        vectors = self._vectors("embeddings", embeddings)
        top_k = None if top_k is None else integer("top_k", top_k, 1)
        token, found = self.text.tokenizer.id_to_token, []
        for begin, end in pairwise(vectors.indptr.tolist()):
            ids, weights = vectors.indices[begin:end], vectors.data[begin:end]
            order = np.argsort(-weights, kind="stable")[:top_k]
            found.append([(token(int(ids[i])), float(weights[i])) for i in order])
        return found

    def _vectors(self, name: str, x: Any) -> Any:
        """`x`, the argument `name`, as a csr_array."""
        sparse = require("scipy.sparse")
        if not sparse.issparse(x):
            raise wrong_type(name, x, "a sparse array, as encode makes it")
        if x.ndim != 2 or x.shape[1] != self.get_sentence_embedding_dimension():
            raise wrong_shape(name, x, f"(n, {self.get_sentence_embedding_dimension()})")
        return sparse.csr_array(x)

    def _compared(self, a: Any, b: Any, pairwise: bool) -> Array:
        x, y = self._vectors("embeddings1", a), self._vectors("embeddings2", b)
        return compared(self.similarity_fn_name, x, y, pairwise)

    def _encode(
        self, sentences: Any, options: SparseOptions, names: Names = (), task: str | None = None
    ) -> Any:
        sparse, pooling = require("scipy.sparse"), self.pooling
        _, lines = one_or_several(sentences)
        call = EncodeSettings.of(options, SparseOptions, self.encoder.sentences, names)
        most = options.get("max_active_dims")
        if most is not None:
            pooling = replace(pooling, most=integer("max_active_dims", most, 1))
        encoded = calls(self.text.encoded(call.prompt + text for text in lines), call.batch_size)
        chunks: Iterator[Any] = (list(self._weighted(each, pooling)) for each in encoded)
        rows = [row for chunk in watched(chunks, call.progress, lines) for row in chunk]
        tokens = np.concatenate([np.zeros(0, np.int64), *(tokens for tokens, _ in rows)])
        dtype = lane_dtype(self.encoder.dtype)
        weights = np.concatenate([np.zeros(0, dtype), *(weights for _, weights in rows)])
        begins = np.append(0, np.cumsum([len(tokens) for tokens, _ in rows], dtype=np.int64))
        shape = (len(rows), self.get_sentence_embedding_dimension())
        return sparse.csr_array((weights, tokens, begins), shape=shape)

    def _weighted(self, sequences: list[Ints], pooling: SpladePooling) -> Iterator[tuple[Ints, Array]]:
        """Yield the tokens that have a weight, and their weights, of each of these texts' ids."""
        return pooling.rows(self.head, *self.encoder.hidden(sequences))


def compared(kind: str, x: Any, y: Any, pairwise: bool) -> Array:
    """Similarity `kind` of each row of x, a csr_array, with each of y, (n, m); `pairwise` in turn, (n,)."""
    if kind != "dot":
        return similarities(kind, x.toarray(), y.toarray(), pairwise)
    if pairwise and x.shape != y.shape:
        raise wrong_shape("embeddings2", y, f"embeddings1's, {x.shape}")
    found: Array = x.multiply(y).sum(axis=1) if pairwise else (x @ y.T).toarray()
    return found
