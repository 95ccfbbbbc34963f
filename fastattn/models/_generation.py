"""Answers of a language model: ids, or the pieces of a text, and where it ends."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fastattn._args.errors import named, wrong_type
from fastattn._args.types import Bools
from fastattn._args.values import as_array, integer, integers, iterated, short
from fastattn.models._answers import Kind, Part, Parts, overlap
from fastattn.models._grammar import Matcher, matchers
from fastattn.models._next_tokens import NextTokens, one_at_a_time, proposals_of, steps, tokens_of
from fastattn.models._prompts import Prompts
from fastattn.models._sampling import Sampler, Sampling
from fastattn.models._scores import chances_of
from fastattn.models._session import kept_as, require_fit
from fastattn.models._text import Said


@dataclass(frozen=True, slots=True)
class Piece:
    """Piece of a generated text, in whole characters; ``str(piece)`` is its text.

    Attributes
    ----------
    text : str
    ids : tuple of int
        Tokens generated since the previous piece.
    finish_reason : {"stop", "length"} or None
        Why the text ends: a token or text of `stop`, or `max_new_tokens`. None except in the last piece.
    index : int
        Number of the prompt, if there are several.
    logprobs : tuple of dict, or None
        With `logprobs`, for each of `ids` log-probabilities by token: of itself and of the best tokens. They
        are the model's, before temperature and other options.
    kind : {"text", "reasoning", "tool_call", "malformed_call"}
        Part of an answer to messages, by markers of the chat template. A tool call is one piece; a call that
        cannot be parsed is its text, with kind "malformed_call".
    tool_call : dict or None
        The call, ``{"name": "a_function", "arguments": {"its": "arguments"}}``.
    """

    text: str
    ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"] | None = None
    index: int = 0
    logprobs: tuple[dict[int, float], ...] | None = None
    kind: Kind = "text"
    tool_call: dict[str, Any] | None = None

    def __str__(self) -> str:
        return self.text


class Writer:
    """The text of a sequence, up to one of `ends`, or to the first text of `stop`, in its `parts`.

    Characters with which a text of `stop` may begin wait until it is clear.
    """

    def __init__(
        self,
        said: Said,
        ends: Collection[int],
        stop: Sequence[str],
        index: int,
        chances: bool,
        parts: Parts | None = None,
    ):
        self._said, self._ends, self._stop, self._index, self._chances = said, ends, stop, index, chances
        self._parts = parts
        self._shown = {} if parts is None else said.special(parts.markers)
        self._waiting, self.ended = "", False
        self._ids: list[int] = []  # since the last piece
        self._logprobs: list[dict[int, float]] = []

    def add(self, token: int, logprobs: dict[int, float] | None) -> list[Piece]:
        """The pieces that are clear with one more token."""
        self._ids.append(token)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        found = self._clear(self._said.add(token) + self._shown.get(token, ""))
        return found if token not in self._ends else found + self.finish("stop")

    def finish(self, reason: Literal["stop", "length"]) -> list[Piece]:
        """The last pieces, after the last token."""
        if self.ended:
            return []
        found = self._clear(self._said.rest())
        return found if self.ended else [*found, *self._pieces(self._waiting, reason)]

    def _clear(self, part: str) -> list[Piece]:
        self._waiting += part
        found = [at for at in map(self._waiting.find, self._stop) if at >= 0]
        if found:
            return self._pieces(self._waiting[: min(found)], "stop")
        kept = max((overlap(self._waiting, each) for each in self._stop), default=0)
        said, self._waiting = (
            self._waiting[: len(self._waiting) - kept],
            self._waiting[len(self._waiting) - kept :],
        )
        return self._pieces(said) if said else []

    def _pieces(self, said: str, reason: Literal["stop", "length"] | None = None) -> list[Piece]:
        """The pieces of some text; the first has the ids, and the last one of all has the `reason`."""
        self.ended = reason is not None
        parts = [Part(said)] if self._parts is None else self._parts.add(said)
        if self._parts is not None and self.ended:
            parts = parts + self._parts.rest() or [Part("")]
        found = []
        for i, part in enumerate(parts):
            ids, logprobs = tuple(self._ids), tuple(self._logprobs) if self._chances else None
            self._ids.clear()
            self._logprobs.clear()
            why = reason if i == len(parts) - 1 else None
            found.append(Piece(part.text, ids, why, self._index, logprobs, part.kind, part.call))
        return found


def pieces(
    every: Iterable[NextTokens], writers: Sequence[Writer], ended: Bools, logprobs: int | None
) -> Iterator[Piece]:
    """Pieces of what steps write; they end the sequences that are `ended`."""
    for running, tokens, logits in every:
        chances = [None] * len(tokens) if logprobs is None else chances_of(logits, tokens, logprobs)
        for i, token, each in zip(running.tolist(), tokens.tolist(), chances, strict=True):
            yield from writers[i].add(token, each)
            ended[i] = writers[i].ended
    for writer in writers:
        yield from writer.finish("length")


@named("message_of")
def message_of(pieces: Iterable[Piece]) -> dict[str, Any]:
    """Convert the pieces of an answer to a message, to continue the conversation.

    Parameters
    ----------
    pieces : iterable of Piece
        All pieces of one answer.

    Returns
    -------
    dict
        `role` and `content`, and, if present, `reasoning_content` and `tool_calls`, as chat templates read
        them.

    Raises
    ------
    TypeError
        If an item is not a `Piece`.
    """
    said: dict[str, str] = {"text": "", "reasoning": ""}
    calls: list[Mapping[str, Any]] = []
    for piece in iterated("pieces", pieces, "the pieces that generate() gave"):
        if not isinstance(piece, Piece):
            raise wrong_type("pieces", piece, "pieces that generate() gave")
        if piece.tool_call is not None:
            calls.append({"type": "function", "function": piece.tool_call})
        else:
            said["reasoning" if piece.kind == "reasoning" else "text"] += piece.text
    message: dict[str, Any] = {"role": "assistant", "content": said["text"]}
    if said["reasoning"]:
        message["reasoning_content"] = said["reasoning"]
    if calls:
        message["tool_calls"] = calls
    return message


def answers(
    model: Any,
    ids: Any,
    max_new_tokens: int,
    sampling: Sampling,
    *,
    attention_mask: Any,
    stop: Any,
    cache: Any,
    cache_dtype: Any,
    grammar: Any,
    speculate: Any,
    **others: Any,
) -> Iterator[Any]:
    """`Decoder.generate`; `others` are its arguments that belong to texts."""
    prompts = Prompts.of(model.text, model.vocab_size, ids, attention_mask, others)
    count, texts, logprobs = len(prompts.ids), list[str](), others["logprobs"]
    if prompts.are_texts:
        stop, texts = _parted(stop)
    if cache is not None:
        require_fit(cache, model, count, cache_dtype)
    cache_dtype = kept_as(cache_dtype, model.dtype, model.key_heads)
    proposals = proposals_of(speculate, model, prompts.ids)
    n_new = integer("max_new_tokens", max_new_tokens, 0)
    longest = max(map(len, prompts.ids), default=0)
    if model.max_length is not None and longest + n_new > model.max_length:
        asked = f"max_new_tokens is {short(n_new)} after a prompt of {longest} tokens"
        raise ValueError(f"(): {asked}; expected at most {model.max_length} together")
    ends = np.atleast_1d((*model.stop, *prompts.turns) if stop is None else as_array("stop", stop))
    ends = ends if ends.size else np.zeros(0, np.int64)
    known = {} if stop is None else {"low": 0, "high": model.vocab_size - 1}
    ends = integers("stop", ends, (ends.size,), "(n,)", **known)
    follow: list[Matcher] = []
    if grammar is not None:
        follow = matchers(grammar, model.text, model.vocab_size, ends.tolist(), count)
    sampler, ended = (
        Sampler(prompts.ids, model.vocab_size, sampling, prompts.single, follow),
        np.zeros(count, np.bool_),
    )
    every = steps(model, prompts.ids, n_new, sampler, ends, ended, cache_dtype, cache, proposals)
    every = one_at_a_time(every, cache)
    if not prompts.are_texts:
        return tokens_of(every, count, prompts.single)
    ending = set(ends.tolist())
    writers = [
        Writer(Said(model.text, prompt.tolist()), ending, texts, i, logprobs is not None, own)
        for i, (prompt, own) in enumerate(zip(prompts.ids, prompts.parts, strict=True))
    ]
    best = None if logprobs is None else integer("logprobs", logprobs, 0, model.vocab_size)
    return pieces(every, writers, ended, best)


def _parted(stop: Any) -> tuple[Any, list[str]]:
    """The ids of `stop`, None where it has texts alone or is None, and its texts."""
    if isinstance(stop, (bytes, bytearray)):  # which iterate as ids
        raise wrong_type("stop", stop, "ids and texts")
    if isinstance(stop, str) or not isinstance(stop, Iterable):
        stop = [] if stop is None else [stop]
        given = None if not stop or isinstance(stop[0], str) else stop
    else:
        stop = list(stop)
        given = [x for x in stop if not isinstance(x, str)]
        given = None if stop and not given else given
    texts = [x for x in stop if isinstance(x, str)]
    if "" in texts:
        raise ValueError("(): stop has an empty text; expected at least one character in each")
    return given, texts
