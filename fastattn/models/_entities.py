"""GLiNER (Zaratiana et al. 2023): texts and labels to the spans of words that the labels name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn import ops
from fastattn._args.errors import named
from fastattn._args.types import lane_dtype
from fastattn._args.values import flag, integer, number, short
from fastattn.models._encode_calls import calls, one_or_several
from fastattn.models._encoder import EncoderWithHead
from fastattn.models._files import ModelError
from fastattn.models._sentences import applied
from fastattn.models._text import strings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fastattn._args.packed import PackedLinear
    from fastattn._args.types import Array, Ints
    from fastattn.models._sentences import Dense

_WORD = re.compile(r"\w+(?:[-_]\w+)*|\S")


class Entity(NamedTuple):
    """A span of a text, which a label names."""

    start: int  # the first character
    end: int  # and the one after the last
    text: str
    label: str
    score: float


class Marks(NamedTuple):
    """Tokens of the prompt: one before each label, and one before the text."""

    label: str
    text: str
    label_id: int
    is_label: bool  # the vector of a label is that of the mark before it; else of the token after the mark


class Lstm(NamedTuple):
    """One direction of a recurrent layer, as torch has it."""

    weight: PackedLinear  # (4 hidden, features): input gate, forget gate, cell, output gate
    own_weight: PackedLinear  # (4 hidden, hidden), of the state
    bias: Array
    own_bias: Array

    def run(self, x: Array, begins: Ints, backwards: bool) -> Array:
        """The states (words, hidden) of all words x (words, features) of sequences end to end.

        Steps are of all sequences that still have a word; a sequence has the bits that it has alone.
        """
        inputs = ops.linear(x, self.weight, self.bias)
        n = inputs.shape[1] // 4
        out = np.empty((len(x), n), x.dtype)
        lengths = np.diff(begins)
        order = np.argsort(-lengths, kind="stable")
        lengths, firsts = lengths[order], (begins[1:] - 1 if backwards else begins[:-1])[order]
        state, cell = np.zeros((2, len(order), n), x.dtype)
        for step in range(int(lengths.max(initial=0))):
            going = int(np.searchsorted(-lengths, -step))
            rows = firsts[:going] + (-step if backwards else step)
            gates = inputs[rows] + ops.linear(state[:going], self.own_weight, self.own_bias)
            first, forget, new, last = (gates[:, i * n : (i + 1) * n] for i in range(4))
            kept = _sigmoid(forget) * cell[:going]
            cell = kept + _sigmoid(first) * np.tanh(new)
            out[rows] = state = _sigmoid(last) * np.tanh(cell)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class SpanHead:
    """Scores of all spans of words ("markerV0"), without a vector of each span.

    A span's vector is a map of two layers of its first and its last word. The first layer is a sum of what
    either word gives, and the second one is applied to the labels' vectors, which are fewer.
    """

    labels: tuple[Dense, ...]
    firsts: tuple[Dense, ...]  # of the first word of a span
    lasts: tuple[Dense, ...]
    of_first: PackedLinear
    of_last: PackedLinear
    bias: Array  # of the first layer
    weight: PackedLinear  # of the second one, transposed
    last_bias: Array

    def words(self, x: Array) -> tuple[Array, Array]:
        """The share of each word x (words, features) as the first and as the last one of a span."""
        first = ops.activate(applied(self.firsts, x), "relu")
        last = ops.activate(applied(self.lasts, x), "relu")
        return ops.linear(first, self.of_first, self.bias), ops.linear(last, self.of_last)

    def scores(self, first: Array, last: Array, labels: Array, max_width: int) -> Array:
        """Logits (words, widths, labels) of the spans of a text, within its words; -inf past its end."""
        vectors = applied(self.labels, labels)
        weight = ops.pack(ops.linear(vectors, self.weight), dtype=vectors.dtype)
        bias = (vectors * self.last_bias).sum(axis=1)
        n, max_width = len(first), min(max_width, len(first))
        found = np.full((n, max_width, len(labels)), -np.inf, first.dtype)
        for width in range(max_width):
            inner = ops.activate(first[: n - width] + last[width:], "relu")
            found[: n - width, width] = ops.linear(inner, weight, bias)
        return found


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class EntityRecognizer(EncoderWithHead):
    """An encoder that finds what any labels name in texts: `entities`."""

    projection: tuple[Dense, ...]
    lstm: tuple[Lstm, ...]  # forwards and backwards, layer by layer
    head: SpanHead
    marks: Marks
    max_words: int  # of a text
    max_width: int  # words of a span

    def __repr__(self) -> str:
        return f"{repr(self.encoder)[:-1]}; EntityRecognizer of spans of up to {self.max_width} words>"

    @named("entities")
    def entities(
        self,
        texts: str | Iterable[str],
        labels: Iterable[str],
        threshold: float = 0.5,
        flat: bool = True,
        multi_label: bool = False,
        batch_size: int | None = None,
    ) -> Any:
        """Find the spans of each text that `labels` name.

        The bits of scores depend on their text and the labels alone, not on other texts or on `batch_size`.

        Parameters
        ----------
        texts : str or list, array or iterator of str
            Words past `max_words` are not read.
        labels : list, array or iterator of str
            Any names, as "person" or "name of a drug"; one that is there twice counts once.
        threshold : float, default 0.5
            The score that an entity exceeds, from 0 to 1.
        flat : bool, default True
            Of spans that overlap, the one with the best score stays; without, spans may lie within others.
        multi_label : bool, default False
            Whether the same span may have several labels.
        batch_size : int, optional
            The most texts that go through the layers at a time; see `Encoder.encode`.

        Returns
        -------
        list of list of Entity; one list for one str
            In the order of their first characters.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit.
        ModelError
            If the folder has no tokenizer.json, or one that does not fit the model.
        """
        one, lines = one_or_several(texts, "texts")
        names = list(dict.fromkeys(strings("labels", labels)))
        if not names or not all(name.strip() for name in names):
            raise ValueError("(): labels has none, or an empty one; expected names, as ['person', 'city']")
        least = number("threshold", threshold, np.dtype(np.float64))
        if not 0 <= least <= 1:
            raise ValueError(f"(): threshold is {least}; expected a number from 0 to 1")
        batch_size = None if batch_size is None else integer("batch_size", batch_size, 1)
        flat, multi_label = flag("flat", flat), flag("multi_label", multi_label)
        found = [
            _chosen(text, words, names, scores, least, flat, multi_label)
            for text, words, scores in self._scores(lines, names, batch_size)
        ]
        return found[0] if one else found

    def _scores(
        self, texts: Iterable[str], labels: list[str], batch_size: int | None
    ) -> Iterator[tuple[str, list[tuple[int, int]], Array]]:
        """Each text, the characters of its words, and the probabilities (words, widths, labels)."""
        prompt = [part for label in labels for part in (self.marks.label, label)] + [self.marks.text]
        self._require_tokens(prompt, labels)
        cut = [(text, [match.span() for match in _WORD.finditer(text)][: self.max_words]) for text in texts]
        inputs = ([*prompt, *(text[i:j] for i, j in words)] for text, words in cut)
        encodings = self.text.encodings(inputs, words=True)
        tokens = (list(zip(each.ids, _numbers(each.word_ids), strict=True)) for each in encodings)
        rest = iter(cut)
        for call in calls(tokens, batch_size):
            own = [next(rest) for _ in call]
            counts = [len(words) for _, words in own]
            yield from zip(
                *zip(*own, strict=True), self._probabilities(call, len(prompt), counts), strict=True
            )

    def _probabilities(self, call: list[Ints], prompt: int, counts: list[int]) -> Iterator[Array]:
        """Probabilities of the spans of each text of a call; the first `prompt` words are the prompt."""
        call = [each.reshape(-1, 2) for each in call]
        rows, cu_seqlens = self.encoder.hidden([each[:, 0] for each in call])
        x = applied(self.projection, rows.astype(lane_dtype(rows.dtype), copy=False))
        begins = np.append(0, np.cumsum(counts))
        words, labels = np.zeros((begins[-1], x.shape[1]), x.dtype), []  # 0: a word that has no token
        for each, first, begin, count in zip(call, cu_seqlens, begins, counts, strict=False):
            starts = np.flatnonzero(np.diff(each[:, 1], prepend=-1) * (each[:, 1] > prompt) > 0)
            of_text = each[starts, 1] - prompt - 1
            here = of_text < count
            words[begin + of_text[here]] = x[first + starts[here]]
            marks = np.flatnonzero(each[:, 0] == self.marks.label_id) + (0 if self.marks.is_label else 1)
            labels.append(x[first + marks])
        self._require_labels([len(each) for each in labels], prompt // 2)
        for forwards, backwards in zip(self.lstm[::2], self.lstm[1::2], strict=True):
            both = forwards.run(words, begins, False), backwards.run(words, begins, True)
            words = np.concatenate(both, axis=1)
        shares = self.head.words(words)
        for (begin, end), own in zip(pairwise(begins.tolist()), labels, strict=True):
            first, last = (share[begin:end] for share in shares)
            yield ops.activate(self.head.scores(first, last, own, self.max_width), "sigmoid")

    def _require_tokens(self, prompt: list[str], labels: list[str]) -> None:
        """Raise for a label that is cut into none, or has a mark; a limit may cut off the last ones."""
        for label in labels:
            if mark := next((mark for mark in self.marks[:2] if mark in label), None):
                raise ValueError(f"(): labels has {short(label)}; expected labels without the mark {mark!r}")
        (encoding,) = self.text.encodings([prompt], words=True)
        there = {word for word in encoding.word_ids if word is not None}
        for i, label in enumerate(labels):
            if 2 * i + 1 not in there and max(there, default=0) > 2 * i + 1:
                raise ValueError(
                    f"(): labels has {short(label)}, which gives no token; expected one that does"
                )

    def _require_labels(self, counts: list[int], expected: int) -> None:
        """Raise unless each text has its prompt: a tokenizer may lack the mark, or cut a text there."""
        wrong = next((count for count in counts if count != expected), None)
        if wrong is not None:
            came = f"{self.text.folder / 'tokenizer.json'} gives {wrong} marks {self.marks.label!r}"
            most = "" if self.text.limit is None else f" within the {self.text.limit} tokens of a text"
            raise ModelError(
                f"{came} of the id {self.marks.label_id}; expected {expected}, one a label,{most}"
            )


def _sigmoid(x: Array) -> Array:
    return ops.activate(np.ascontiguousarray(x), "sigmoid")


def _numbers(word_ids: list[int | None]) -> list[int]:
    """The number of each token's word, from 1 on; 0 of special tokens."""
    return [0 if word is None else word + 1 for word in word_ids]


def _chosen(
    text: str,
    words: list[tuple[int, int]],
    labels: list[str],
    scores: Array,
    threshold: float,
    flat: bool,
    multi_label: bool,
) -> list[Entity]:
    """The spans above the threshold, of those that overlap the best ones, in order."""
    spans = np.argwhere(scores > threshold)
    values = scores[tuple(spans.T)]
    chosen = list[tuple[int, int, int, float]]()
    for i in np.argsort(-values, kind="stable").tolist():
        start, width, label = spans[i].tolist()
        end = start + width
        if not any(_clash(start, end, other[0], other[1], flat, multi_label) for other in chosen):
            chosen.append((start, end, label, float(values[i])))
    chosen.sort(key=lambda span: span[0])
    places = [(words[start][0], words[end][1], labels[label], score) for start, end, label, score in chosen]
    return [Entity(begin, end, text[begin:end], label, score) for begin, end, label, score in places]


def _clash(start: int, end: int, first: int, last: int, flat: bool, multi_label: bool) -> bool:
    """Tell whether two spans of words cannot both be entities."""
    if (start, end) == (first, last):
        return not multi_label
    if start > last or first > end:
        return False
    within = (start <= first and last <= end) or (first <= start and end <= last)
    return flat or not within
