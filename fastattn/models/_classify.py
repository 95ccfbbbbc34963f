"""Encoders with a head that scores pairs of texts, or texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastattn import ops
from fastattn._args.errors import named
from fastattn._args.options import require_options
from fastattn._args.types import Array, ArrayLike, Ints, Unpack, lane_dtype
from fastattn._args.values import flag, integer, short
from fastattn.models import _model
from fastattn.models._chat import ChatTemplate
from fastattn.models._encode_calls import EncodeSettings, TextOptions, calls, watched
from fastattn.models._encoder import EncoderWithHead
from fastattn.models._files import ModelError
from fastattn.models._sentences import ACTIVATIONS, Dense, LayerNorm, Pooling, applied
from fastattn.models._text import each_checked, string, strings

Texts = tuple[str, ...]  # one or two, which become one sequence

_PAIR = "a pair, as (text, text), or a single text, as (text,)"
_PAIRS = "pairs, as [(text, text)], or single texts, as [(text,)]"


class RankOptions(TextOptions, total=False):
    """Keyword arguments of `CrossEncoder.rank`, which `predict` documents."""

    activation_fn: Callable[[Array], ArrayLike] | None


class PredictOptions(RankOptions, total=False):
    """Keyword arguments of `CrossEncoder.predict`, which documents them."""

    apply_softmax: bool


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CrossEncoder(EncoderWithHead):
    """An encoder with a head that scores texts or pairs: `predict`, `rank`, or a call with token ids."""

    head: tuple[Dense | LayerNorm, ...]  # one after another
    labels: tuple[str, ...]  # their names
    activation: str  # of the logits, by its name in torch.nn
    pooling: Pooling  # before the head
    template: ChatTemplate | None = None  # that makes a text of a pair; else the tokenizer takes both
    late: bool = False  # whether scores are pooled, those of all tokens
    _pairs = True

    @property
    def num_labels(self) -> int:
        """Number of scores of a pair or a text."""
        return len(self.labels)

    def __repr__(self) -> str:
        return self._described(self.num_labels)

    @named("{self.model_type}")
    def __call__(
        self,
        input_ids: ArrayLike,
        attention_mask: ArrayLike | None = None,
        token_type_ids: ArrayLike | None = None,
    ) -> Array:
        """Logits, for the arguments of a call of `encoder`.

        Returns
        -------
        ndarray, (batch, num_labels)
            float32, or float64 for a model in float64.
        """
        states = self.encoder(input_ids, attention_mask, token_type_ids)
        tokens = _model.token_ids(input_ids, self.encoder.vocab_size)
        mask = _model.attended(attention_mask, tokens)
        mask = np.ones(tokens.shape, np.bool_) if mask is None else mask
        return self._pooled(states[mask], np.append(0, np.cumsum(mask.sum(axis=1))))

    def _scored(self, x: Array) -> Array:
        """The head's scores (n, num_labels) of vectors (n, hidden_size)."""
        return applied(self.head, x.astype(lane_dtype(x.dtype), copy=False))

    def _pooled(self, rows: Array, cu_seqlens: Ints) -> Array:
        """The scores of sequences, of the hidden states of their tokens end to end."""
        if self.late:
            return self.pooling(self._scored(rows), cu_seqlens)
        return self._scored(self.pooling(rows, cu_seqlens))

    @named("predict")
    def predict(self, inputs: str | Iterable[Any], **options: Unpack[PredictOptions]) -> Array:
        """Score each pair of texts.

        Parameters
        ----------
        inputs : iterable of (str, str), or one pair
            A tuple of one text, or one str, is scored alone. Of pairs longer than `max_seq_length` tokens,
            the longer text is cut first.
        prompt_name, prompt : str, optional
            As in `Encoder.encode`: put before the first text of each pair, or with a chat template the system
            message.
        batch_size, show_progress_bar : optional
            As in `Encoder.encode`.
        activation_fn : callable, optional
            Function of the logits (n, num_labels) that returns an array of the same shape. By default
            `activation`: as the folder says, or a sigmoid for one label, and none for several.
        apply_softmax : bool, default False
            Apply a softmax over several labels, after the activation.

        Returns
        -------
        ndarray, (n,) for one label, (n, num_labels) for several; without the first axis for one pair
            float32, or float64 for a model in float64. The bits depend on the pair alone, not on other pairs
            or on `batch_size`.

        Raises
        ------
        ModelError
            If the folder has no tokenizer.json, or one that does not fit the model.
        """
        require_options(options, PredictOptions)
        return self._predict(inputs, **options)

    def _predict(
        self, inputs: Any, activation_fn: Any = None, apply_softmax: bool = False, **options: Any
    ) -> Array:
        one, pairs = _pairs("inputs", inputs)
        call = EncodeSettings.of(options, TextOptions, self.encoder.sentences)
        softmax = flag("apply_softmax", apply_softmax)
        if activation_fn is not None and not callable(activation_fn):
            raise TypeError(f"(): activation_fn is {short(activation_fn)}; expected a function")
        empty = np.empty((0, self.num_labels), lane_dtype(self.encoder.dtype))
        scores = np.concatenate([empty, *watched(self._chunks(call, pairs), call.progress, pairs)])
        scores = self._activated(scores, activation_fn)
        if self.num_labels == 1:
            scores = scores[:, 0]
        elif softmax:
            scores = ops.softmax(scores)
        result: Array = scores[0] if one else scores
        return result

    @named("rank")
    def rank(
        self,
        query: str,
        documents: Iterable[str],
        top_k: int | None = None,
        return_documents: bool = False,
        **options: Unpack[RankOptions],
    ) -> list[dict[str, Any]]:
        """Rank documents by their score with a query, best first; ties keep the given order.

        Parameters
        ----------
        query : str
        documents : list, array or iterator of str
        top_k : int, optional
            Number of documents; by default all.
        return_documents : bool, default False
            Include the documents in the results.
        **options
            `prompt_name`, `prompt`, `batch_size`, `show_progress_bar`, `activation_fn`, as in `predict`.

        Returns
        -------
        list of dict
            "corpus_id", the index in `documents`; "score", a float; and "text" with `return_documents`.

        Raises
        ------
        ValueError
            If the model has several labels.
        """
        require_options(options, RankOptions, "query", "documents", "top_k", "return_documents")
        if self.num_labels != 1:
            came = f"the model has {self.num_labels} labels"
            raise ValueError(f"(): {came}; expected one: use predict for several")
        query = string("query", query)
        texts = list(strings("documents", documents))
        top_k = None if top_k is None else integer("top_k", top_k, 1)
        with_text = flag("return_documents", return_documents)
        scores = self._predict([(query, text) for text in texts], **options)
        found: list[dict[str, Any]] = [{"corpus_id": i, "score": x} for i, x in enumerate(scores.tolist())]
        found = sorted(found, key=lambda each: each["score"], reverse=True)[:top_k]
        return [{**each, "text": texts[each["corpus_id"]]} for each in found] if with_text else found

    def _encoded(self, prompt: str, pairs: Iterable[Texts]) -> Iterator[list[tuple[int, int]]]:
        """Ids and types of each pair."""
        if self.template is not None:
            return self.template.encoded(self.text, prompt, pairs)
        return self.text.encoded_pairs((prompt + first, *rest) for first, *rest in pairs)

    def _chunks(self, call: EncodeSettings, pairs: Iterable[Texts]) -> Iterator[Array]:
        """The logits in order, an array (n, num_labels) at a time."""
        kinds = 1 if self.encoder.embeddings.types is None else len(self.encoder.embeddings.types)
        typed = kinds > 1 and self.text.has_types
        for rows in calls(self._encoded(call.prompt, pairs), call.batch_size):
            rows = [each.reshape(-1, 2) for each in rows]
            types = [each[:, 1] for each in rows] if typed else None
            most = max((int(each.max(initial=0)) for each in types or ()), default=0)
            if most >= kinds:
                came = f"{self.text.folder / 'tokenizer.json'} gives a token the type {most}"
                raise ModelError(f"{came}; expected one of the model's {kinds}, which begin with 0")
            yield self._pooled(*self.encoder.hidden([each[:, 0] for each in rows], types))

    def _activated(self, logits: Array, activation_fn: Callable[[Array], ArrayLike] | None) -> Array:
        if activation_fn is not None:
            scores = np.asarray(activation_fn(logits))
            if scores.shape != logits.shape or scores.dtype.kind != "f":
                came = f"activation_fn returned {scores.dtype} of shape {scores.shape}"
                raise ValueError(f"(): {came}; expected floats of shape {logits.shape}")
            return scores
        kind = ACTIVATIONS[self.activation]
        if kind is not None:
            return ops.activate(logits, kind)
        return np.tanh(logits) if self.activation == "Tanh" else logits


def _pairs(name: str, inputs: Any) -> tuple[bool, Iterable[Texts]]:
    """Return whether `inputs`, the argument `name`, are one pair; and the pairs, checked as by `strings`."""
    if isinstance(inputs, np.ndarray):
        inputs = inputs.tolist()
    if isinstance(inputs, str):
        inputs = (inputs,)
    if isinstance(inputs, Sequence) and len(inputs) > 0 and isinstance(inputs[0], str):
        return True, [_pair(name, inputs)]
    return False, each_checked(name, inputs, _PAIRS, _pair)


def _pair(name: str, pair: Any) -> Texts:
    if not isinstance(pair, (list, tuple)):
        raise TypeError(f"(): {name} is {short(pair)}; expected {_PAIR}")
    if len(pair) not in (1, 2):
        raise ValueError(f"(): {name} has {len(pair)} texts; expected {_PAIR}")
    return tuple(strings(name, pair))
