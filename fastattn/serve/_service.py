"""A model that is served: what requests may ask of it, and how many of them wait."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fastattn.models import CrossEncoder, Encoder
from fastattn.serve._batcher import Batcher, Job

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from fastattn._args.types import Array
    from fastattn.serve._batcher import Item

    Reason = Literal["invalid", "unknown", "long", "large", "busy", "failed", "stopped"]

MOST_ITEMS = 2048  # of one request, as at OpenAI
_SHORT = 1 << 13  # characters that are tokenized in less time than a thread takes to be asked
_CHARACTERS = (
    64  # of a text at most, for each token that the model takes: more would be tokenized for seconds
)
_SPACE = " \t\r\n"
_CUT = "(a server that is started with --truncate cuts texts)"


class Refused(Exception):
    """A request that is not computed."""

    def __init__(self, reason: Reason, message: str, name: str | None = None):
        super().__init__(message)
        self.reason: Reason = reason
        self.name = name  # of the field of the body that is wrong


@dataclass(frozen=True)
class Limits:
    """Bounds of what a server takes.

    Attributes
    ----------
    batch_tokens : int, default 768
        Tokens that go through the model at a time.
    queue_texts : int, default 4096
        Texts that wait, of all requests.
    body_bytes : int, default 4194304
        Of a request.
    truncate : bool, default False
        Whether texts that the model does not take whole are cut, where a request does not say so.
    """

    batch_tokens: int = 768
    queue_texts: int = 2 * MOST_ITEMS
    body_bytes: int = 1 << 22
    truncate: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "queue_texts", "body_bytes"):
            x = getattr(self, name)
            if not isinstance(x, int) or isinstance(x, bool) or x < 1:
                raise ValueError(f"Limits(): {name} is {x!r}; expected an integer of at least 1")


class Service:
    """A model, its batcher, and how many texts have not been answered yet."""

    def __init__(
        self, model: Encoder | CrossEncoder, name: str, limits: Limits, prompt_name: str | None = None
    ):
        self.model, self.name, self.limits = model, name, limits
        self.waiting = self.tokens = 0
        self._encoder = model if isinstance(model, Encoder) else model.encoder
        self.prompt_name = prompt_name
        self.prompt = self.prompt_of(None)
        # Where the tokenizer cuts: some models have no limit of their own.
        self.truncation = model.text.tokenizer.truncation or {"max_length": None, "direction": "right"}
        self.most_tokens: int | None = self.truncation["max_length"]
        around = (self.prompt + text for text in ("a", f"{_SPACE}a{_SPACE}"))
        bare, spaced = (encoding.ids for encoding in model.text.encodings(around))
        self.dropped = _SPACE if bare == spaced else ""  # by the tokenizer, at both ends of a text
        self.compute(["warm"], self.prompt)
        self.batcher = Batcher(self.compute, limits.batch_tokens)

    def prompt_of(self, name: str | None) -> str:
        """The prompt of this name, by default the service's or else the model's own."""
        name = self.prompt_name if name is None else name
        try:
            prompt: str = self._encoder.sentences.prompt(name, None)
        except (TypeError, ValueError) as error:
            raise Refused("invalid", str(error).removeprefix("(): "), "prompt_name") from error
        return prompt

    def compute(self, items: list[Item], prompt: str) -> Array:
        """Vectors (n, features) of texts, or logits (n, num_labels) of texts or pairs."""
        if isinstance(self.model, Encoder):
            return self.model.encode([item for item in items if isinstance(item, str)], prompt=prompt)
        pairs = [(item,) if isinstance(item, str) else item for item in items]
        logits = self.model.predict(pairs, prompt=prompt, activation_fn=lambda x: x)
        return logits.reshape(len(items), -1)

    def bounded(self, items: Sequence[Item], truncate: bool, name: str) -> tuple[list[Item], set[int]]:
        """The items, texts of too many characters cut, and which they are; an error if they may not be."""
        tokens = self.most_tokens
        most = _CHARACTERS * (tokens or self.limits.body_bytes)
        left = self.truncation["direction"] == "left"

        def cut(i: int, text: str) -> str:
            text = text.strip(self.dropped) if len(text) > most else text
            if len(text) > most and not truncate:
                expected = f"expected at most {tokens} tokens, and {_CHARACTERS} characters for each"
                came = f"item {i} has {len(text)} characters"
                raise Refused("long", f"{came}; {expected} {_CUT}", name)
            if len(text) > most:
                shortened.add(i)
            return text[-most:] if left else text[:most]

        found: list[Item] = []
        shortened: set[int] = set()
        for i, item in enumerate(items):
            found.append(cut(i, item) if isinstance(item, str) else tuple(cut(i, text) for text in item))
        return found, shortened

    def count(
        self,
        items: Sequence[Item],
        shortened: set[int],
        prompt: str,
        truncate: bool,
        name: str,
        given_up: threading.Event,
    ) -> list[int]:
        """Tokens of each item; an error if one would be cut, or was `shortened` too much.

        It ends early where `given_up` is set.
        """
        tokens = []
        for i, encoding in enumerate(self._encodings(items, prompt)):
            if given_up.is_set():
                break
            if i in shortened and not encoding.overflowing:  # its end would be missing
                came = f"item {i} has words, or white space, of very many characters"
                raise Refused("long", f"{came}; expected less than {_CHARACTERS} for each token", name)
            if encoding.overflowing and not truncate:
                special = sum(encoding.special_tokens_mask)
                parts = (encoding, *encoding.overflowing)
                came = special + sum(len(part.ids) - special for part in parts)
                expected = f"expected at most {self.most_tokens}"
                raise Refused("long", f"item {i} has {came} tokens; {expected} {_CUT}", name)
            tokens.append(len(encoding.ids))
        return tokens

    def _encodings(self, items: Sequence[Item], prompt: str) -> Any:
        text, template = self.model.text, getattr(self.model, "template", None)
        pairs = ((item,) if isinstance(item, str) else item for item in items)
        if template is not None:
            return text.encodings((template.render(prompt, pair) for pair in pairs), special=False)
        joined = ((prompt + first, *rest) for first, *rest in pairs)
        return text.encodings((pair[0] if len(pair) == 1 else pair for pair in joined), text.special)

    async def rows(
        self, items: Sequence[Item], prompt: str, truncate: bool | None, name: str
    ) -> tuple[Array, int]:
        """The rows of the items, and their number of tokens. Cancelled, it computes no more."""
        most, truncate = self.limits.queue_texts, self.limits.truncate if truncate is None else truncate
        if len(items) > most:
            raise Refused("large", f"{len(items)} texts; expected at most {most}", name)
        if self.waiting + len(items) > most:
            came = f"{self.waiting} texts wait, and {len(items)} more came"
            raise Refused("busy", f"{came}; expected at most {most} in all: try again later")
        (items, shortened), given_up = self.bounded(items, truncate, name), threading.Event()
        asked = items, shortened, prompt, truncate, name, given_up
        self.waiting += len(items)  # only the event loop's thread counts
        try:
            try:
                short = sum(len(item) if isinstance(item, str) else sum(map(len, item)) for item in items)
                if short <= _SHORT:
                    tokens = self.count(*asked)
                else:
                    tokens = await asyncio.to_thread(self.count, *asked)
            except (TypeError, ValueError) as error:
                raise Refused("invalid", str(error), name) from error
            job = Job(items, tokens, prompt)
            self.batcher.submit(job)
            rows = await asyncio.wrap_future(job.rows)
            self.tokens += sum(tokens)
            return rows, sum(tokens)
        finally:
            given_up.set()
            self.waiting -= len(items)
