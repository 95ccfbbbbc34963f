"""Text that a language model writes: its pieces, and where it ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fastattn._args.errors import wrong_type
from fastattn._args.values import short

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from fastattn.models._text import Text

    Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of a text that is being written, in whole characters; ``str`` of it is its text.

    Attributes
    ----------
    text : str
    ids : tuple of int
        The tokens that were generated since the piece before.
    finish_reason : {"stop", "length"} or None
        Why the text ends: a token or text of `stop`, or `max_new_tokens`. None, but for the last piece.
    """

    text: str
    ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"] | None = None

    def __str__(self) -> str:
        return self.text


def is_conversation(x: Any) -> TypeIs[Messages]:
    """Tell whether `x` is a list of messages."""
    return isinstance(x, (list, tuple)) and bool(x) and all(isinstance(each, Mapping) for each in x)


def parted(stop: Any) -> tuple[Any, list[str]]:
    """The ids of `stop`, None where it has texts alone or is None, and its texts."""
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


def pieces(
    text: Text, prompt: Sequence[int], tokens: Iterator[int], ends: Iterable[int], stop: Sequence[str]
) -> Iterator[Piece]:
    """Pieces of what `tokens` write after `prompt`, up to one of `ends`, or to the first text of `stop`.

    Characters with which a text of `stop` may begin wait until it is clear.
    """
    fresh: list[int] = []  # since the last piece
    last = None

    def seen() -> Iterator[int]:
        nonlocal last
        for last in tokens:
            fresh.append(last)
            yield last

    def piece(said: str, reason: Any = None) -> Piece:
        ids = tuple(fresh)
        fresh.clear()
        return Piece(said, ids, reason)

    waiting = ""
    for part in text.stream(prompt, seen()):
        waiting += part
        found = min((at for at in map(waiting.find, stop) if at >= 0), default=None)
        if found is not None:
            yield piece(waiting[:found], "stop")
            return
        kept = max((_overlap(waiting, each) for each in stop), default=0)
        said, waiting = waiting[: len(waiting) - kept], waiting[len(waiting) - kept :]
        if said:
            yield piece(said)
    yield piece(waiting, "stop" if last in set(ends) else "length")


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` with which `stop` begins."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)


def checked(messages: Messages) -> list[dict[str, Any]]:
    """Messages, each with a role."""
    for message in messages:
        if not isinstance(message.get("role"), str):
            expected = "a 'role' in each, as {'role': 'user', 'content': 'a question'}"
            raise ValueError(f"(): ids has the message {short(dict(message))}; expected {expected}")
    return [dict(message) for message in messages]


def require_one(prompt: Any) -> None:
    """Raise for several texts or conversations, and for a message without a list."""
    several = isinstance(prompt, (list, tuple)) and any(
        isinstance(x, str) or is_conversation(x) for x in prompt
    )
    if several:
        how = "ids of several, as model.text.encode(texts) or model.conversation_ids(messages) makes them"
        raise TypeError(f"(): ids has several texts or conversations; expected one, or {how}")
    if isinstance(prompt, Mapping):
        raise TypeError("(): ids is one message; expected a list of messages")


def values_of(given: Any) -> dict[str, Any]:
    """Values that a chat template sees beside the messages, checked."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise wrong_type("template_values", given, "a mapping of names to values")
    return dict(given)
