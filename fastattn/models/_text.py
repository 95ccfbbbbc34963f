"""From text to token ids and back: the folder's tokenizer.json, by the `tokenizers` library."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

from fastattn._args.errors import wrong_type
from fastattn._args.values import as_array, integer, iterated, short
from fastattn.models._files import Config, ModelError, lfs_hint, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fastattn._args.types import Ints

_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 8  # tokens of the prompt that the first piece is decoded with
NO_TOKEN = -1  # what `generate` yields for a sequence that has ended
_WITHOUT_TYPES = ("PreTrainedTokenizerFast", "TokenizersBackend")  # unless the folder asks for them
_MOST_BYTES = 4  # of a character in UTF-8

# Characters that go to the tokenizer at a time: enough work for all its threads, in bounded memory. It
# ignores signals, so it runs in a thread of its own, except for short batches, which take milliseconds.
_BATCH_CHARACTERS, _SHORT = 1 << 19, 1 << 13
_SECONDS_BETWEEN_SIGNALS = 0.05


@dataclass(frozen=True)
class Text:
    """The tokenizer of a model's folder, opened when it is first used."""

    folder: Path
    max_length: int | None = None  # what the model can take at most
    other: Callable[[Path], Any] | None = None  # makes one of other files; None: they are not there
    asked: int | None = None  # how long a text may be, whatever the folder's files say of it
    markers: tuple[str, ...] = ()  # that stand before texts; one that is in the vocabulary is one token

    @cached_property
    def tokenizer(self) -> Any:
        """A `tokenizers.Tokenizer` that does not pad, and cuts at `limit`; in lower case if asked."""
        tokenizers, tokenizer = require("tokenizers"), self._read()
        tokenizer.no_padding()
        if self._sentences.get("do_lower_case", bool, False):
            normalizers, given = tokenizers.normalizers, tokenizer.normalizer
            both = [normalizers.Lowercase(), *([] if given is None else [given])]
            tokenizer.normalizer = normalizers.Sequence(both)
        if self.markers:
            added = [
                tokenizers.AddedToken(token, normalized=False, special=True)
                for token in self._split(tokenizer)
            ]
            tokenizer.add_special_tokens(added)
        if self.limit is None:
            tokenizer.no_truncation()
        else:
            tokenizer.enable_truncation(self.limit)
        return tokenizer

    def _read(self) -> Any:
        """The tokenizer as the folder has it."""
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            made = None if self.other is None else self.other(self.folder)
            if made is not None:
                return made
            raise ModelError(f"{path} is missing; expected a tokenizer as the tokenizers library writes it")
        try:
            return require("tokenizers").Tokenizer.from_file(str(path))
        except ImportError:
            raise
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(lfs_hint(path) or f"{path} is no tokenizer: {error}") from error

    def _split(self, tokenizer: Any) -> Iterator[str]:
        """Of the markers, or else their first words, those in the vocabulary that are not one token yet."""
        for marker in self.markers:
            for token in (marker, *marker.split()[:1]):
                if tokenizer.token_to_id(token) is not None:
                    if tokenizer.encode(token, add_special_tokens=False).tokens != [token]:
                        yield token
                    break

    @property
    def _sentences(self) -> Config:
        return Config(self.folder / "sentence_bert_config.json", optional=True)

    @cached_property
    def limit(self) -> int | None:
        """The most tokens of a text, within the model's limit.

        `asked` says it, or sentence_bert_config.json; if neither does, tokenizer_config.json, for models that
        have a limit.
        """
        asked = self.asked or self._sentences.optional_size("max_seq_length")
        if asked is None and self.max_length is not None:
            config = Config(self.folder / "tokenizer_config.json", optional=True)
            most = config.values.get("model_max_length")
            if not (type(most) is int and most > self.max_length):  # without a limit, it is 10**30
                asked = config.optional_size("model_max_length")
        return min((n for n in (asked, self.max_length) if n is not None), default=None)

    def prompt_length(self, prompt: str) -> int:
        """Tokens of `prompt` when a text follows: without a special token at its end."""
        (ids,) = self.encode([prompt])
        added = self.tokenizer.get_added_tokens_decoder()
        return len(ids) - (bool(ids) and ids[-1] in added and added[ids[-1]].special)

    def encode(self, texts: Iterable[str]) -> list[list[int]]:
        """Ids of each text, special tokens included, cut to `limit`."""
        return list(self.encoded(strings("encode", "texts", texts)))

    def encoded(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Ids of each text, as `encode` has them; `texts` are read when they are needed, a batch ahead."""
        return (encoding.ids for encoding in self._encodings(texts))

    def encoded_pairs(self, pairs: Iterable[tuple[str, ...]]) -> Iterator[list[tuple[int, int]]]:
        """Ids and types of each pair of texts, which become one sequence, or of each (text,)."""
        inputs = (pair[0] if len(pair) == 1 else pair for pair in pairs)
        return (list(zip(each.ids, each.type_ids, strict=True)) for each in self._encodings(inputs))

    @cached_property
    def has_types(self) -> bool:
        """Whether a model is told the types of tokens, by tokenizer_config.json, as in transformers 5."""
        config = Config(self.folder / "tokenizer_config.json", optional=True)
        names = config.values.get("model_input_names")
        if isinstance(names, list):
            return "token_type_ids" in names
        return config.values.get("tokenizer_class") not in _WITHOUT_TYPES

    def _encodings(self, texts: Iterable[str | tuple[str, ...]]) -> Iterator[Any]:
        """What the tokenizer makes of each text, or pair of texts."""
        encode_batch = self.tokenizer.encode_batch  # which releases the GIL, and `encode` does not

        def encodings(batch: list[str | tuple[str, ...]]) -> list[Any]:
            long = sum(map(_characters, batch)) > _SHORT
            try:
                found: list[Any] = _interruptible(encode_batch, batch) if long else encode_batch(batch)
            except BaseException as error:  # a word is unknown, and has no id; a panic is no Exception
                if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                    raise
                came = f"{self.folder / 'tokenizer.json'} cannot encode a text: {error}"
                raise ModelError(f"{came}; expected a tokenizer for any") from error
            return found

        return chain.from_iterable(map(encodings, _batches(texts)))

    def decode(self, sequences: Iterable[Sequence[int] | Ints]) -> list[str]:
        """The text of each sequence of ids, without special tokens and the -1 that `generate` ends with."""
        func, name, rows = "decode", "sequences", []
        for ids in iterated(func, name, sequences, "sequences of ids, as [ids]"):
            if as_array(func, name, ids).ndim != 1:
                raise TypeError(f"{func}(): {name} is no list of sequences of ids; expected one, as [ids]")
            rows.append(list(_ids(func, name, ids)))
        decoded: list[str] = self.tokenizer.decode_batch(rows, skip_special_tokens=True)
        return decoded

    def stream(self, prompt: Sequence[int], ids: Iterable[int]) -> Iterator[str]:
        """Text of one sequence's `ids`, which follow `prompt`: a piece as soon as its characters are whole.

        It leaves out -1, which `generate` yields for a sequence of a batch that has ended.
        """

        def text(first: int, last: int | None = None) -> str:
            decoded: str = self.tokenizer.decode(tokens[first:last], skip_special_tokens=True)
            return decoded

        # Whether a token begins with a space can depend on the token before. So a piece is what its tokens
        # add to the text of the piece before.
        tokens = list(_ids("stream", "prompt", prompt))
        first, done = max(0, len(tokens) - _CONTEXT), len(tokens)
        for token in _ids("stream", "ids", ids):
            tokens.append(token)
            before, whole, end = text(first, done), text(first), len(tokens)
            if whole.endswith(_NO_CHARACTER):  # bytes that are not a character yet, or never will be
                if end - done < _MOST_BYTES:
                    continue
                # A character that is not whole yet begins in the last tokens. Cut where the text before them
                # stays the same with something after it: that will not change any more.
                cuts = ((cut, text(first, cut)) for cut in range(end - 1, end - _MOST_BYTES, -1))
                end, whole = next(
                    ((cut, part) for cut, part in cuts if len(part) < len(whole) and whole.startswith(part)),
                    (end, before),
                )
            if len(whole) > len(before):
                yield whole[len(before) :]
                first, done = done, end
        if rest := text(first)[len(text(first, done)) :]:
            yield rest


def strings(func: str, name: str, texts: Any, expected: str = "several, as [text]") -> Iterable[str]:
    """`texts`, the argument `name`: an iterable of strings that is not a string itself.

    A sequence is checked now; another iterable, which can be read only once, text by text.
    """
    if isinstance(texts, (str, bytes)):
        raise wrong_type(func, name, texts, expected)
    given = iterated(func, name, texts, expected)

    def checked() -> Iterator[str]:
        for text in given:
            if not isinstance(text, str):
                raise TypeError(f"{func}(): {name} has one of type {type(text).__name__}; expected strings")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                what = f"{text[error.start : error.end]!r}, half of a surrogate pair"
                raise ValueError(f"{func}(): {name} has one with {what}; expected whole characters") from None
            yield text

    return list(checked()) if isinstance(texts, Sequence) else checked()


def _characters(text: str | tuple[str, ...]) -> int:
    return len(text) if isinstance(text, str) else sum(map(len, text))


def _batches(texts: Iterable[str | tuple[str, ...]]) -> Iterator[list[str | tuple[str, ...]]]:
    """The texts in batches of up to `_BATCH_CHARACTERS`; a longer text is a batch of its own."""
    batch: list[str | tuple[str, ...]] = []
    characters = 0
    for text in texts:
        length = _characters(text)
        if batch and characters + length > _BATCH_CHARACTERS:
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


def _ids(func: str, name: str, ids: Iterable[int] | Ints) -> Iterator[int]:
    """The ids of one sequence, each as soon as it is there, without `NO_TOKEN`."""
    for token in iterated(func, name, ids, "ids of one sequence"):
        if isinstance(token, (list, tuple)) or getattr(token, "ndim", 0) != 0:
            expected = "ids of one sequence (`decode` takes a batch's)"
            raise TypeError(f"{func}(): {name} has {short(token)}; expected {expected}")
        token = integer(func, name, token, NO_TOKEN, 2**32 - 1)
        if token != NO_TOKEN:
            yield token
