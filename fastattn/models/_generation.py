"""Text that a language model writes: its pieces, and where it ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from fastattn._args.errors import named, wrong_type
from fastattn._args.types import Array, Bools, Ints
from fastattn._args.values import iterated, short
from fastattn.models._answers import Kind, Part, Parts, overlap
from fastattn.models._text import Said, string

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Messages = Sequence[Mapping[str, Any]]


_ROWS = 64  # of logits, which are as long as the vocabulary, at a time


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


def is_conversation(x: Any) -> TypeIs[Messages]:
    """Tell whether `x` is a list of messages."""
    return isinstance(x, (list, tuple)) and bool(x) and all(isinstance(each, Mapping) for each in x)


def parted(stop: Any) -> tuple[Any, list[str]]:
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


class Step(NamedTuple):
    """The next tokens of the sequences that have not ended."""

    running: Ints  # (n,), their numbers
    tokens: Ints  # (n,)
    logits: Array  # (n, vocab_size), as the model gives them


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
    steps: Iterable[Step], writers: Sequence[Writer], ended: Bools, logprobs: int | None
) -> Iterator[Piece]:
    """Pieces of what `steps` write; they end the sequences that are `ended`."""
    for running, tokens, logits in steps:
        chances = [None] * len(tokens) if logprobs is None else chances_of(logits, tokens, logprobs)
        for i, token, each in zip(running.tolist(), tokens.tolist(), chances, strict=True):
            yield from writers[i].add(token, each)
            ended[i] = writers[i].ended
    for writer in writers:
        yield from writer.finish("length")


def chances_of(logits: Array, tokens: Ints, best: int) -> list[dict[int, float]]:
    """Logarithms of probabilities, by token: of each of `tokens`, and of the `best` ones of its row."""
    found = []
    for row, token in zip(logits.astype(np.float64), tokens.tolist(), strict=True):
        row -= row.max()
        row -= np.log(np.exp(row).sum())
        order: Ints = np.zeros(0, np.int64)
        if best:
            likely = np.flatnonzero(row >= np.partition(row, -best)[-best])
            order = likely[np.argsort(-row[likely], kind="stable")][:best]
        found.append({i: float(row[i]) for i in (token, *order.tolist())})
    return found


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probabilities of a continuation of a prompt.

    Attributes
    ----------
    logprob : float
        Log-probability of the whole text: the sum of `logprobs`.
    ids : tuple of int
        Tokens of the text.
    logprobs : tuple of float
        Log-probability of each token, given the tokens before it.
    is_greedy : bool
        Whether greedy decoding would choose each token.
    """

    logprob: float
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_greedy: bool


def score_of(ids: Ints, rows: Array, logits: Callable[[Array], Array]) -> Score:
    """The score of `ids`, whose logits `logits` makes of hidden states `rows`."""
    found = []
    for first in range(0, len(ids), _ROWS):
        part = slice(first, first + _ROWS)
        found += chances_of(logits(rows[part]), ids[part], 1)
    tokens, best = tuple(ids.tolist()), all(len(each) == 1 for each in found)
    logprobs = tuple(each[token] for each, token in zip(found, tokens, strict=True))
    return Score(sum(logprobs), tokens, logprobs, best)


def checked(messages: Messages) -> list[dict[str, Any]]:
    """Messages, each with a role."""
    for message in messages:
        if not isinstance(message.get("role"), str):
            expected = "a 'role' in each, as {'role': 'user', 'content': 'a question'}"
            raise ValueError(f"(): ids has the message {short(dict(message))}; expected {expected}")
        if "content" not in message and message["role"] in ("system", "user"):
            raise ValueError(f"(): ids has the message {short(dict(message))}; expected a 'content', too")
    return [dict(message) for message in messages]


def prompts_of(given: Any) -> tuple[bool, list[str | Messages]] | None:
    """Whether `given` is one text or conversation, and all; None if it has ids."""
    single = isinstance(given, str) or is_conversation(given)
    if single:
        given = [given]
    if isinstance(given, Mapping):
        raise TypeError("(): ids is one message; expected a list of messages")
    if not isinstance(given, (list, tuple)):
        return None
    written = [isinstance(each, str) or is_conversation(each) for each in given]
    if any(written) and not all(written):
        other = short(given[written.index(False)])
        raise TypeError(f"(): ids has texts or conversations, and {other}; expected no ids among them")
    for i, each in enumerate(given):
        if isinstance(each, str):
            string("ids" if single else f"ids[{i}]", each)
    return (single, list(given)) if any(written) else None


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


def values_of(given: Any, tools: Any) -> dict[str, Any] | None:
    """Values that a chat template sees beside the messages, `tools` among them, checked; None: none."""
    if given is not None and not isinstance(given, Mapping):
        raise wrong_type("template_values", given, "a mapping of names to values")
    if given is not None and "messages" in given:
        raise ValueError("(): template_values has 'messages', which are given as such; expected other names")
    if tools is None:
        return None if given is None else dict(given)
    if given is not None and "tools" in given:
        raise ValueError("(): template_values has 'tools', which is given, too; expected one of the two")
    is_list = isinstance(tools, (list, tuple))
    if not is_list or not all(isinstance(each, Mapping) for each in tools):
        wrong = next((each for each in tools if not isinstance(each, Mapping)), None) if is_list else tools
        raise wrong_type("tools", wrong, "a list of JSON schemas, as {'type': 'function', 'function': {}}")
    return {**(given or {}), "tools": [dict(each) for each in tools]}
