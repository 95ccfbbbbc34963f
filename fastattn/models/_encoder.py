"""Encoders: models whose hidden states become vectors of texts, alone or with a head."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastattn import ops
from fastattn._args.errors import named, wrong_shape
from fastattn._args.types import Array, ArrayLike, Bools, Ints, Self, Unpack, lane_dtype
from fastattn._args.values import integer
from fastattn._engine.steps import Sequences
from fastattn._engine.values import Gradients
from fastattn.grad import Pullback
from fastattn.layers._block import Projection
from fastattn.models import _model
from fastattn.models._embeddings import SequenceRules
from fastattn.models._encode_calls import (
    EncodeOptions,
    EncodeSettings,
    Routes,
    TextEncoder,
    TextModel,
    calls,
    model_of,
    one_or_several,
    watched,
)
from fastattn.models._model import pulled
from fastattn.models._parameters import required
from fastattn.models._sentences import Sentences
from fastattn.models._similarity import similarities
from fastattn.models._text import Text, strings

Names = tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Encoder(TextEncoder, _model.Model):
    """An encoder: a call returns hidden states, `encode` vectors of texts."""

    sentences: Sentences
    sequence_rules: SequenceRules
    routes: Routes | None = field(default=None, kw_only=True)  # where texts go by their task

    @named("{self.model_type}")
    def __call__(
        self,
        input_ids: ArrayLike,
        attention_mask: ArrayLike | None = None,
        token_type_ids: ArrayLike | None = None,
    ) -> Array:
        """Hidden states of the last layer.

        Parameters
        ----------
        input_ids : array_like of int, (batch, length) or (length,)
        attention_mask : array_like of bool or of 0 and 1, (batch, length), optional
            True or 1 for tokens that count. Padding can be on either side: positions start at the first token
            that counts.
        token_type_ids : array_like of int, (batch, length), optional
            Default 0.

        Returns
        -------
        ndarray, (batch, length, hidden_size)
            In the model's dtype, 0 at padding; one sequence (length,) is a batch of one.
        """
        tokens, lengths, mask, types = self._arguments(input_ids, attention_mask, token_type_ids)
        rows = self._rows(tokens[_counted(mask)].reshape(-1), lengths, types)
        return _model.unpacked(rows, mask, (*tokens.shape, self.hidden_size))

    def _vjp(
        self,
        input_ids: ArrayLike,
        attention_mask: ArrayLike | None = None,
        token_type_ids: ArrayLike | None = None,
        *,
        checkpoint: bool = False,
        dropout: float = 0.0,
        seed: int | None = None,
    ) -> tuple[Array, Pullback]:
        """Hidden states, as from a call, and their pullback: see `fastattn.grad.vjp`."""
        tokens, lengths, mask, types = self._arguments(input_ids, attention_mask, token_type_ids)
        call, positions = self.sequence_rules(lengths, self.dtype, None)
        counted, how = tokens[_counted(mask)].reshape(-1), (checkpoint, dropout, seed)
        recorded = self._record(counted, positions, types, call, *how)
        return pulled(recorded, mask, (*tokens.shape, self.hidden_size))

    def _add_gradients(self, gradients: Gradients, call: Sequences) -> None:
        self.sequence_rules.add_gradients(gradients, call)

    def _arguments(
        self, input_ids: ArrayLike, attention_mask: ArrayLike | None, token_type_ids: ArrayLike | None
    ) -> tuple[Ints, Ints, Bools | None, Ints | None]:
        """Tokens, lengths and mask of a call, and the types of the tokens that count, end to end."""
        types = None
        tokens, lengths, mask = self._tokens(input_ids, attention_mask, self.max_length, "input_ids")
        if token_type_ids is not None:
            n_types = 1 if self.embeddings.types is None else len(self.embeddings.types)
            types = _model.token_ids(token_type_ids, n_types, "token_type_ids")
            if types.shape != tokens.shape:
                raise wrong_shape("token_type_ids", types, tokens.shape)
        return tokens, lengths, mask, None if types is None else types[_counted(mask)].reshape(-1)

    def hidden(
        self,
        sequences: Sequence[Ints],
        types: Sequence[Ints] | None = None,
        attended: Sequence[int] | None = None,
    ) -> tuple[Array, Ints]:
        """Hidden states of the last layer, of sequences end to end.

        Parameters
        ----------
        sequences : list of ndarray of int64, (length,)
            Token ids.
        types : list of ndarray of int64, (length,), optional
            Token types.
        attended : list of int, optional
            Number of leading tokens of each sequence that are attended; by default all.

        Returns
        -------
        rows : ndarray, (tokens, hidden_size)
            In the model's dtype. The bits of a sequence's rows do not depend on other sequences.
        cu_seqlens : ndarray of int64, (n + 1,)
            Sequence i is ``rows[cu_seqlens[i] : cu_seqlens[i + 1]]``.
        """
        lengths = np.array([len(ids) for ids in sequences], np.int64)
        none = np.zeros(0, np.int64)
        tokens = np.concatenate([*sequences, none])
        counts = None if attended is None else np.array(attended, np.int64)
        rows = self._rows(tokens, lengths, None if types is None else np.concatenate([*types, none]), counts)
        return rows, np.append(0, np.cumsum(lengths))

    def _rows(self, tokens: Ints, lengths: Ints, types: Ints | None, attended: Ints | None = None) -> Array:
        """Hidden states (tokens, hidden_size) of sequences of `lengths` end to end."""
        sequences, positions = self.sequence_rules(lengths, self.dtype, attended)
        return self.program.run(self.embeddings(tokens, positions, types, self.dtype), sequences)

    @property
    def prompts(self) -> dict[str, str]:
        """Prompts of the folder, by name."""
        return dict(self.sentences.prompts)

    @property
    def default_prompt_name(self) -> str | None:
        """Name of the default prompt of `encode`."""
        return self.sentences.default_prompt_name

    @property
    def similarity_fn_name(self) -> str:
        """Measure of `similarity`: "cosine", "dot", "euclidean" or "manhattan"."""
        return self.sentences.similarity

    def get_sentence_embedding_dimension(self) -> int:
        """Number of features of vectors from `encode`."""
        return min(self.sentences.features, self.sentences.truncate_dim or self.sentences.features)

    @named("tokenize")
    def tokenize(self, texts: Iterable[str]) -> dict[str, Array]:
        """Token ids of texts, padded on the right, and their attention mask.

        Returns
        -------
        dict of ndarray
            "input_ids" of int64 and "attention_mask" of bool, both (n, length).
        """
        ids, mask = _model.pad(list(self._encoded(strings("texts", texts))))
        return {"input_ids": ids, "attention_mask": mask}

    @named("encode")
    def encode(
        self, sentences: str | Iterable[str], *, task: str | None = None, **options: Unpack[EncodeOptions]
    ) -> Array:
        """Make a vector of each text.

        Parameters
        ----------
        sentences : str or list, array or iterator of str
            Texts longer than `max_seq_length` are cut.
        task : str, optional
            Name of a route or adapter, for models that have several.
        prompt_name : str, optional
            Key of `prompts`: the prompt put before each text. By default `default_prompt_name`, if any.
        prompt : str, optional
            Text put before each text, in place of `prompt_name`.
        batch_size : int, optional
            Maximum number of texts per pass through the layers; by default as many as have 768 tokens, which
            is also the upper limit. There is no padding, so it bounds memory and hardly changes speed.
        show_progress_bar : bool, optional
            Show a progress bar of tqdm. Default False.
        normalize_embeddings : bool, default False
            Scale vectors to length 1. Models whose folder has a Normalize module always do.
        truncate_dim : int, optional
            Number of leading features to keep, before scaling; by default as the folder says, or all.

        Returns
        -------
        ndarray, (n, features), or (features,) for one str
            float32, or float64 for a model in float64. A vector's bits depend on its text alone, not on other
            texts or on `batch_size`.

        Raises
        ------
        ModelError
            If the folder has no tokenizer.json, or a malformed one.
        """
        return model_of(self, task)._encode(sentences, options)

    def _compared(self, a: ArrayLike, b: ArrayLike, pairwise: bool) -> Array:
        return similarities(self.similarity_fn_name, a, b, pairwise)

    def _encode(
        self, sentences: Any, options: EncodeOptions, names: Names = (), task: str | None = None
    ) -> Array:
        one, lines = self._inputs(sentences)
        call = self._checked(options, names)
        chunks = deque(watched(self._vectors(lines, call), call.progress, lines))
        if not chunks:
            chunks.append(call.finished(np.empty((0, call.features), lane_dtype(self.dtype))))
        vectors = np.empty((sum(map(len, chunks)), *chunks[0].shape[1:]), chunks[0].dtype)
        done = 0
        while chunks:  # each is freed before the next one is copied
            chunk = chunks.popleft()
            vectors[done : done + len(chunk)] = chunk
            done += len(chunk)
        return vectors[0] if one else vectors

    def _inputs(self, sentences: Any) -> tuple[bool, Iterable[Any]]:
        """Return whether `sentences` is one text, and the checked texts."""
        return one_or_several(sentences)

    def _encoded(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Token ids of each text; texts are read as they are needed."""
        return self.text.encoded(texts)

    def _vectors(self, texts: Iterable[Any], call: EncodeSettings) -> Iterator[Array]:
        """Yield vectors (n, features) in order; texts are read as they are needed."""
        encoded = self._encoded(call.prompt + text for text in texts)
        for sequences in calls(encoded, call.batch_size):
            rows, cu_seqlens = self.hidden(sequences)
            yield call.finished(self.sentences.vectors(rows, cu_seqlens, call.prompt_length))

    def _checked(self, options: EncodeOptions, names: Names = ()) -> EncodeSettings:
        """The options of a call."""
        call, most = EncodeSettings.of(options, EncodeOptions, self.sentences, names), self.sentences.features
        dim = options.get("truncate_dim")
        dim = self.sentences.truncate_dim if dim is None else integer("truncate_dim", dim, 1)
        call = call._replace(features=min(most, dim or most))
        if call.prompt and not self.sentences.pooling.include_prompt:
            return call._replace(prompt_length=self.text.prompt_length(call.prompt))
        return call


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ProjectedEncoder(Encoder):
    """An encoder with a linear map after its blocks."""

    projection: Projection

    def _rows(self, tokens: Ints, lengths: Ints, types: Ints | None, attended: Ints | None = None) -> Array:
        rows = super(ProjectedEncoder, self)._rows(tokens, lengths, types, attended)
        weight, bias, rounded = self.projection
        return ops.linear(rows, weight, bias, activations=rounded)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class EncoderWithHead(TextModel, _model.Fixed):
    """The base of models that are an encoder with a head."""

    encoder: Encoder

    @property
    def model_type(self) -> str:
        """Name of the family, as in config.json."""
        return self.encoder.model_type

    @property
    def text(self) -> Text:  # type: ignore[override]
        """The tokenizer."""
        return self.encoder.text

    def _replace_text(self, text: Text) -> None:
        object.__setattr__(self.encoder, "text", text)

    def state_dict(self) -> dict[str, Array]:
        """Tensors of encoder and head; see `Encoder.state_dict`."""
        return self.encoder.state_dict()

    @named("with_state_dict")
    def with_state_dict(self, state_dict: Mapping[str, ArrayLike]) -> Self:
        """A model with other tensors; see `Encoder.with_state_dict`."""
        found: Self = required(self.encoder.origin).changed(self, state_dict)
        return found

    def _described(self, size: int) -> str:
        """The `repr` of one that makes so many numbers."""
        return f"{repr(self.encoder)[:-1]}; {type(self).__name__} of {size}>"


def _counted(mask: Bools | None) -> Any:
    return slice(None) if mask is None else mask
