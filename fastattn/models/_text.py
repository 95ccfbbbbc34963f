"""Text to token ids and back, by the `tokenizers` library."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from fastattn._args.errors import named, put_name
from fastattn._args.types import Ints
from fastattn._args.values import MOST_SIZE, as_array, integer, iterated, several, short
from fastattn.models._files import ModelError, tokenizer_config
from fastattn.models._tokenizers import GENERIC, length_limit, open_tokenizer, read

_Input = str | tuple[str, ...]

_T = TypeVar("_T")

_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 8  # tokens of the prompt that the first piece is decoded with
NO_TOKEN = -1  # what `generate` yields for a sequence that has ended
_MOST_BYTES = 4  # of a character in UTF-8

# Characters that go to the tokenizer at a time: enough work for all its threads, in bounded memory. It
# ignores signals, so it runs in a separate thread, except for short batches, which take milliseconds.
_BATCH_CHARACTERS, _BATCH_TEXTS, _SHORT = 1 << 19, 1 << 13, 1 << 13
_SECONDS_BETWEEN_SIGNALS = 0.05


@dataclass(frozen=True)
class Text:
    """The tokenizer of a model's folder, opened when it is first used."""

    folder: Path
    max_length: int | None = None  # what the model can take at most
    vocab_size: int | None = None  # of the model, if ids are checked
    other: Callable[[Path], Any] | None = None  # makes one of other files; None: they are not there
    asked: int | None = None  # maximum length, in place of the folder's
    markers: tuple[str, ...] = ()  # put before texts; one that is in the vocabulary is one token
    is_prompt: bool = False  # whether texts are prompts, which a model without `max_length` takes whole
    special: bool = True  # whether special tokens are added to a text
    alone: bool = False  # whether tokenizer.json, and no other file, says how texts are cut and read

    @cached_property
    def tokenizer(self) -> Any:
        """A `tokenizers.Tokenizer` without padding that truncates at `limit`."""
        if self.alone:
            tokenizer = read(self.folder, None)
            tokenizer.no_padding()
            if self.asked is not None:  # else it cuts texts where it did
                tokenizer.enable_truncation(self.asked)
            return tokenizer
        return open_tokenizer(self.folder, self.limit, self.other, self.markers)

    @cached_property
    def _limit(self) -> tuple[int | None, Path | str]:
        if self.alone:
            return self.asked, self.folder
        return length_limit(self.folder, self.max_length, self.asked, self.is_prompt)

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens of a text, at most the model's maximum."""
        return self._limit[0]

    def shortened(self, tokens: int, pairs: bool = False) -> Text:
        """Return a tokenizer that truncates texts, or pairs, at `tokens`."""
        name, most = "max_seq_length", MOST_SIZE if self.max_length is None else self.max_length
        asked = integer(name, tokens, -MOST_SIZE)
        text = replace(self, asked=min(max(1, asked), most))
        added = text.tokenizer.num_special_tokens_to_add(pairs) if self.special else 0
        least = added + 1  # a token of the text itself
        integer(name, asked, least, most)
        return text

    def prompt_length(self, prompt: str) -> int:
        """Number of tokens of `prompt` before a text, without a special token at its end."""
        (ids,) = self.encode([prompt])
        added = self.tokenizer.get_added_tokens_decoder()
        return len(ids) - (bool(ids) and ids[-1] in added and added[ids[-1]].special)

    @named("encode")
    def encode(self, texts: Iterable[str]) -> list[list[int]]:
        """Token ids of each text, with special tokens, truncated to `limit`."""
        return list(self.encoded(strings("texts", texts)))

    def encoded(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Yield the ids of each text, as `encode`; `texts` are read as they are needed, a batch ahead."""
        return (encoding.ids for encoding in self.encodings(texts, self.special))

    def encoded_pairs(self, pairs: Iterable[tuple[str, ...]]) -> Iterator[list[tuple[int, int]]]:
        """Yield ids and token types of each pair of texts, as one sequence, or of each (text,)."""
        inputs = (pair[0] if len(pair) == 1 else pair for pair in pairs)
        return (list(zip(each.ids, each.type_ids, strict=True)) for each in self.encodings(inputs))

    @cached_property
    def has_types(self) -> bool:
        """Whether a model takes token types, by tokenizer_config.json, as in transformers 5."""
        config = tokenizer_config(self.folder)
        names = config.values.get("model_input_names")
        if isinstance(names, list):
            return "token_type_ids" in names
        return config.values.get("tokenizer_class") not in GENERIC

    def encodings(self, texts: Iterable[_Input], special: bool = True) -> Iterator[Any]:
        """Encodings of each text, or pair of texts, with `special` tokens or without."""
        encode_batch = self.tokenizer.encode_batch  # which releases the GIL, and `encode` does not
        if not special:
            encode_batch = partial(encode_batch, add_special_tokens=False)

        def encodings(batch: list[_Input]) -> list[Any]:
            long = sum(map(_characters, batch)) > _SHORT
            try:
                found: list[Any] = _interruptible(encode_batch, batch) if long else encode_batch(batch)
            except BaseException as error:  # a word is unknown, and has no id; a panic is no Exception
                if type(error) not in (Exception, TypeError) and type(error).__name__ != "PanicException":
                    raise  # it is not the library's
                require_whole("a text", "".join(map("".join, batch)))
                if isinstance(error, TypeError):
                    raise
                came = f"{self._file} cannot encode a text: {error}"
                raise ModelError(f"{came}; expected a tokenizer for any text") from error
            return found

        return map(self._fitting, chain.from_iterable(map(encodings, _batches(texts))))

    @property
    def _file(self) -> Path:
        """The file that has the tokenizer."""
        return self.folder if self.other else self.folder / "tokenizer.json"

    def _fitting(self, encoding: Any) -> Any:
        """Check that the model takes an encoding: tokenizers keep special tokens beyond the limit."""
        limit, said_by = self._limit
        if limit is not None and len(encoding.ids) > limit:
            came = f"{said_by} cuts texts to {limit}"
            added = sum(encoding.special_tokens_mask)
            expected = f"at least the special tokens that {self._file.name} adds, {added}"
            raise ModelError(f"{came}; expected {expected}")
        if self.vocab_size is not None and max(encoding.ids, default=0) >= self.vocab_size:
            came = f"{self._file} gives a token the id {max(encoding.ids)}"
            raise ModelError(f"{came}; expected less than 'vocab_size' of config.json, {self.vocab_size}")
        return encoding

    @named("decode")
    def decode(self, sequences: Iterable[Sequence[int] | Ints]) -> list[str]:
        """Text of each sequence of ids, without special tokens and the -1 that `generate` ends with."""
        name, rows = "sequences", []
        for ids in iterated(name, sequences, "sequences of ids, as [ids]"):
            if as_array(name, ids).ndim != 1:
                raise TypeError(f"(): {name} is not a list of sequences of ids; expected one, as [ids]")
            rows.append(list(_ids(name, ids)))
        decoded: list[str] = self.tokenizer.decode_batch(rows, skip_special_tokens=True)
        return decoded

    def stream(self, prompt: Sequence[int], ids: Iterable[int]) -> Iterator[str]:
        """Yield the text of one sequence's `ids` after `prompt`, in pieces of complete characters.

        -1, which `generate` yields for finished sequences of a batch, is left out.
        """
        try:
            said = Said(self, _ids("prompt", prompt))
            for token in _ids("ids", ids):
                if part := said.add(token):
                    yield part
            if rest := said.rest():
                yield rest
        except Exception as error:
            put_name("stream", error)
            raise


class Said:
    """Text of tokens that arrive one by one after a prompt."""

    def __init__(self, text: Text, prompt: Iterable[int]):
        self._decode, self._tokens = text.tokenizer.decode, list(prompt)
        added = text.tokenizer.get_added_tokens_decoder().items()
        self._special = {i: token.content for i, token in added if token.special}
        # Whether a token begins with a space can depend on the token before. So a part is what its tokens
        # add to the text of the part before.
        self._first, self._done = max(0, len(self._tokens) - _CONTEXT), len(self._tokens)

    def special(self, texts: Iterable[str]) -> dict[int, str]:
        """The special tokens among `texts`, by their ids: they are not in the text."""
        return {i: content for i, content in self._special.items() if content in texts}

    def _text(self, first: int, last: int | None = None) -> str:
        decoded: str = self._decode(self._tokens[first:last], skip_special_tokens=True)
        return decoded

    def add(self, token: int) -> str:
        """Characters that one more token completes; often none."""
        if token in self._special:  # else a run of them would be decoded again with each
            return ""
        self._tokens.append(token)
        before, whole, end = self._text(self._first, self._done), self._text(self._first), len(self._tokens)
        if whole.endswith(_NO_CHARACTER):  # bytes that are not a character yet, or never will be
            if end - self._done < _MOST_BYTES:
                return ""
            # A character that is not whole yet begins in the last tokens. Cut where the text before them
            # stays the same with something after it: that will not change any more.
            cuts = ((cut, self._text(self._first, cut)) for cut in range(end - 1, end - _MOST_BYTES, -1))
            end, whole = next(
                ((cut, part) for cut, part in cuts if len(part) < len(whole) and whole.startswith(part)),
                (end, before),
            )
        if len(whole) <= len(before):
            return ""
        self._first, self._done = self._done, end
        return whole[len(before) :]

    def rest(self) -> str:
        """Characters of the last tokens, complete or not."""
        return self._text(self._first)[len(self._text(self._first, self._done)) :]


def strings(name: str, texts: Any, expected: str = "several, as [text]") -> Iterable[str]:
    """`texts`, the argument `name`: a list, an array, a column or an iterator of strings."""
    return each_checked(name, texts, expected, string)


def each_checked(name: str, x: Any, expected: str, check: Callable[[str, Any], _T]) -> Iterable[_T]:
    """Elements of `x`, the argument `name`, as `check` returns them by their names.

    An iterator, which can be read only once, is checked element by element; others now.
    """
    checked = (check(f"{name}[{i}]", each) for i, each in enumerate(several(name, x, expected)))
    return checked if isinstance(x, Iterator) else list(checked)


def string(name: str, text: Any) -> str:
    """`text`, the argument `name`: one string."""
    if not isinstance(text, str):
        hint = ", as its column's .to_pylist() has them" if hasattr(text, "as_py") else ""
        raise TypeError(f"(): {name} is {short(text)}; expected a string{hint}")
    require_whole(name, text)
    return text


def require_whole(came: str, text: str) -> None:
    """Raise if the text, which `came` names, cannot be encoded in UTF-8, as tokenizers need it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = f"{text[error.start : error.end]!r}, half of a surrogate pair"
        raise ValueError(f"(): {came} has {what}; expected whole characters") from None


def _characters(text: _Input) -> int:
    return len(text) if isinstance(text, str) else sum(map(len, text))


def _batches(texts: Iterable[_Input]) -> Iterator[list[_Input]]:
    """Yield batches of texts of up to `_BATCH_CHARACTERS` together; a longer text is one batch.

    Texts are counted, too: encodings of short ones, and of empty ones, take memory as well.
    """
    batch: list[_Input] = []
    characters = 0
    for text in texts:
        length = _characters(text)
        if batch and (characters + length > _BATCH_CHARACTERS or len(batch) == _BATCH_TEXTS):
            yield batch
            batch, characters = [], 0
        batch.append(text)
        characters += length
    if batch:
        yield batch


def _interruptible(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` in another thread, which is abandoned if a signal ends the wait for it."""
    outcome: Future[Any] = Future()

    def work() -> None:
        try:
            outcome.set_result(function(*args))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    while not outcome.done():
        wait((outcome,), _SECONDS_BETWEEN_SIGNALS)
    return outcome.result()


def _ids(name: str, ids: Iterable[int] | Ints) -> Iterator[int]:
    """The ids of one sequence, each as soon as it is there, without `NO_TOKEN`."""
    for token in iterated(name, ids, "ids of one sequence"):
        if isinstance(token, (list, tuple)) or getattr(token, "ndim", 0) != 0:
            expected = "ids of one sequence (`decode` takes a batch's)"
            raise TypeError(f"(): {name} has {short(token)}; expected {expected}")
        token = integer(name, token, NO_TOKEN, 2**32 - 1)
        if token != NO_TOKEN:
            yield token
