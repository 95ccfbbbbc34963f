"""Encoders with a head that scores: pairs of texts, texts, or tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn import ops
from fastattn._args.errors import named
from fastattn._args.types import lane_dtype
from fastattn._args.values import flag, integer, several, short
from fastattn._args.words import not_an_argument
from fastattn.models import _model
from fastattn.models._encode_calls import Call, TextOptions, calls, given, watched
from fastattn.models._encoder import EncoderWithHead
from fastattn.models._files import ModelError
from fastattn.models._sentences import ACTIVATIONS, applied
from fastattn.models._text import string, strings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.options import NoOptions
    from fastattn._args.types import Array, Ints
    from fastattn.models._chat import ChatTemplate
    from fastattn.models._sentences import Dense, LayerNorm, Pooling

    Texts = tuple[str, ...]  # one or two, which become one sequence

_PAIR = "a pair, as (text, text), or a single text, as (text,)"
_PAIRS = "pairs, as [(text, text)], or single texts, as [(text,)]"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Classifier(EncoderWithHead):
    """The base of `CrossEncoder` and `TokenClassifier`."""

    head: tuple[Dense | LayerNorm, ...]  # one after another
    labels: tuple[str, ...]  # their names

    @property
    def num_labels(self) -> int:
        """Scores of a pair, a text or a token."""
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
        """Logits; arguments are those of a call of `encoder`.

        Returns
        -------
        ndarray, (batch, num_labels), or (batch, length, num_labels) of a `TokenClassifier`
            float32, or float64 for a model in float64. 0 where a token does not count.
        """
        states = self.encoder(input_ids, attention_mask, token_type_ids)
        tokens = _model.token_ids(input_ids, self.encoder.vocab_size)
        mask = _model.attended(attention_mask, tokens)
        return self._logits(states, np.ones(tokens.shape, np.bool_) if mask is None else mask)

    def _logits(self, states: Array, mask: Array) -> Array:
        raise NotImplementedError

    def _scored(self, x: Array) -> Array:
        """The head's scores (n, num_labels) of vectors (n, hidden_size)."""
        return applied(self.head, x.astype(lane_dtype(x.dtype), copy=False))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TokenClassifier(Classifier):
    """An encoder with scores for each token: call it with ids."""

    def _logits(self, states: Array, mask: Array) -> Array:
        out = np.zeros((*mask.shape, self.num_labels), lane_dtype(states.dtype))
        out[mask] = self._scored(states[mask])
        return out


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CrossEncoder(Classifier):
    """An encoder with scores for each pair of texts, or each text: `predict`, `rank`, or call it with ids."""

    activation: str  # of the logits, by its name in torch.nn
    pooling: Pooling  # before the head
    template: ChatTemplate | None = None  # that makes a text of a pair; else the tokenizer takes both
    late: bool = False  # whether scores are pooled, those of all tokens
    _pairs = True

    def _logits(self, states: Array, mask: Array) -> Array:
        return self._pooled(states[mask], np.append(0, np.cumsum(mask.sum(axis=1))))

    def _pooled(self, rows: Array, cu_seqlens: Ints) -> Array:
        """The scores of sequences, of the hidden states of their tokens end to end."""
        if self.late:
            return self.pooling(self._scored(rows), cu_seqlens)
        return self._scored(self.pooling(rows, cu_seqlens))

    @named("predict")
    def predict(
        self,
        inputs: str | Iterable[Any],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        activation_fn: Callable[[Array], ArrayLike] | None = None,
        apply_softmax: bool = False,
        **others: Unpack[NoOptions],
    ) -> Array:
        """The scores of each pair of texts.

        The bits of scores depend on their pair alone, not on other pairs or on `batch_size`.

        Parameters
        ----------
        inputs : iterable of (str, str), or one pair
            A tuple of one text, or one str, is scored alone. Of a pair that has more tokens than
            `text.limit`, the longer text is cut first.
        prompt_name, prompt : str, optional
            As in `Encoder.encode`: what is put before the first text of each pair, or with a chat template
            the system message.
        batch_size : int, optional
            The most pairs that go through the layers at a time; see `Encoder.encode`.
        show_progress_bar : bool, optional
            Whether to show one, by tqdm; by default not.
        activation_fn : callable, optional
            What becomes of the logits (n, num_labels), an array of the same shape. By default `activation`:
            what the folder says, or else a sigmoid for one label, and nothing for several.
        apply_softmax : bool, default False
            Whether the scores of several labels become probabilities, after the activation.
        **others
            None: an error says what an argument of another library is called here.

        Returns
        -------
        ndarray, (n,) for one label, (n, num_labels) for several; without the first axis for one pair
            float32, or float64 for a model in float64.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit.
        ModelError
            If the folder has no tokenizer.json, or one that does not fit the model.
        """
        if others:
            raise not_an_argument(others, CrossEncoder.predict)
        options = given(TextOptions, prompt_name, prompt, batch_size, show_progress_bar)
        return self._predict(inputs, options, activation_fn, apply_softmax)

    def _predict(
        self, inputs: Any, options: TextOptions, activation_fn: Any, apply_softmax: bool = False
    ) -> Array:
        """Scores of pairs, as `predict` returns them."""
        one, pairs = _pairs("inputs", inputs)
        call = Call.of(options, TextOptions, self.encoder.sentences, ())
        softmax = flag("apply_softmax", apply_softmax)
        if activation_fn is not None and not callable(activation_fn):
            raise TypeError(f"(): activation_fn is {short(activation_fn)}; expected a function")
        chunks = self._chunks(call.prompt, pairs, call.batch_size)
        empty = np.empty((0, self.num_labels), lane_dtype(self.encoder.dtype))
        scores = np.concatenate([empty, *watched(chunks, call.progress, pairs)])
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
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        activation_fn: Callable[[Array], ArrayLike] | None = None,
        **others: Unpack[NoOptions],
    ) -> list[dict[str, Any]]:
        """The documents that fit a query best, the best one first; equal ones stay in order.

        Parameters
        ----------
        query : str
        documents : list, array or iterator of str
        top_k : int, optional
            How many; by default all.
        return_documents : bool, default False
            Whether the results have the documents.
        prompt_name, prompt, batch_size, show_progress_bar, activation_fn
            As in `predict`.
        **others
            None: an error says what an argument of another library is called here.

        Returns
        -------
        list of dict
            "corpus_id", the place in `documents`; "score", a float; and "text" if asked.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit; if the model has several labels.
        """
        if others:
            raise not_an_argument(others, CrossEncoder.rank)
        if self.num_labels != 1:
            raise ValueError(
                f"(): the model has {self.num_labels} labels; expected one, or predict for these"
            )
        query = string("query", query)
        texts = list(strings("documents", documents))
        top_k = None if top_k is None else integer("top_k", top_k, 1)
        with_text = flag("return_documents", return_documents)
        pairs = [(query, text) for text in texts]
        options = given(TextOptions, prompt_name, prompt, batch_size, show_progress_bar)
        scores = self._predict(pairs, options, activation_fn)
        found: list[dict[str, Any]] = [{"corpus_id": i, "score": x} for i, x in enumerate(scores.tolist())]
        found = sorted(found, key=lambda each: each["score"], reverse=True)[:top_k]
        return [{**each, "text": texts[each["corpus_id"]]} for each in found] if with_text else found

    def _encoded(self, prompt: str, pairs: Iterable[Texts]) -> Iterator[list[tuple[int, int]]]:
        """Ids and types of each pair."""
        if self.template is not None:
            return self.template.encoded(self.text, prompt, pairs)
        return self.text.encoded_pairs((prompt + first, *rest) for first, *rest in pairs)

    def _chunks(self, prompt: str, pairs: Iterable[Texts], batch_size: int | None) -> Iterator[Array]:
        """The logits in order, an array (n, num_labels) at a time."""
        kinds = 1 if self.encoder.embeddings.types is None else len(self.encoder.embeddings.types)
        typed = kinds > 1 and self.text.has_types
        for call in calls(self._encoded(prompt, pairs), batch_size):
            call = [each.reshape(-1, 2) for each in call]
            types = [each[:, 1] for each in call] if typed else None
            most = max((int(each.max(initial=0)) for each in types or ()), default=0)
            if most >= kinds:
                came = f"{self.text.folder / 'tokenizer.json'} gives a token the type {most}"
                raise ModelError(f"{came}; expected one of the model's {kinds}, which begin with 0")
            yield self._pooled(*self.encoder.hidden([each[:, 0] for each in call], types))

    def _scores(
        self,
        pairs: Iterable[Texts],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
    ) -> Iterator[Array]:
        """Scores as of `predict`, an array (n, num_labels) at a time; pairs are read when they are needed."""
        prompt = self.encoder.sentences.prompt(prompt_name, prompt)
        chunks = self._chunks(prompt, pairs, batch_size)
        return (self._activated(logits, None) for logits in chunks)

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
    checked = (_pair(f"{name}[{i}]", pair) for i, pair in enumerate(several(name, inputs, _PAIRS)))
    return False, checked if isinstance(inputs, Iterator) else list(checked)


def _pair(name: str, pair: Any) -> Texts:
    if not isinstance(pair, (list, tuple)):
        raise TypeError(f"(): {name} is {short(pair)}; expected {_PAIR}")
    if len(pair) not in (1, 2):
        raise ValueError(f"(): {name} has {len(pair)} texts; expected {_PAIR}")
    return tuple(strings(name, pair))
