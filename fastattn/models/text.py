"""From text to token ids and back: the folder's tokenizer.json, by the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._inputs import integer
from fastattn.models.files import ModelError, lfs_hint, read_json, require
from fastattn.models.padding import NO_TOKEN

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from fastattn._args import Ints

_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 8  # tokens of the prompt that the first piece is decoded with
_MOST_BYTES = 4  # of a character in UTF-8


@dataclass(frozen=True)
class Text:
    """The tokenizer of a model's folder, opened when it is first used."""

    folder: Path
    max_length: int | None = None  # what the model can take at most

    @cached_property
    def tokenizer(self) -> Any:
        """A `tokenizers.Tokenizer` that neither pads nor cuts."""
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{path} is missing; expected a tokenizer as the tokenizers library writes it")
        tokenizers = require("tokenizers")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(lfs_hint(path) or f"{path} is no tokenizer: {error}") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    @cached_property
    def limit(self) -> int | None:
        """Tokens of a text that are used: what sentence_bert_config.json says, or else the model's limit."""
        path = self.folder / "sentence_bert_config.json"
        asked = read_json(path).get("max_seq_length") if path.is_file() else None
        if asked is not None and (type(asked) is not int or asked < 1):
            raise ModelError(f"{path}: 'max_seq_length' is {asked!r}; expected an integer of at least 1")
        return min((n for n in (asked, self.max_length) if n is not None), default=None)

    def encode(self, texts: Iterable[str]) -> list[list[int]]:
        """Ids of each text, special tokens included, cut to `limit`."""
        lines = strings("encode", "texts", texts)
        if self.limit is not None:
            self.tokenizer.enable_truncation(self.limit)
        return [encoding.ids for encoding in self.tokenizer.encode_batch(lines)]

    def decode(self, sequences: Iterable[Sequence[int] | Ints]) -> list[str]:
        """The text of each sequence of ids, special tokens left out, and the -1 that `generate` ends with."""
        rows = []
        for ids in sequences:
            if np.ndim(ids) != 1:
                raise TypeError("decode(): sequences is no list of sequences of ids; expected one, as [ids]")
            rows.append(list(_ids("decode", "sequences", ids)))
        decoded: list[str] = self.tokenizer.decode_batch(rows, skip_special_tokens=True)
        return decoded

    def stream(self, prompt: Sequence[int], ids: Iterable[int]) -> Iterator[str]:
        """Text of `ids`, which follow on `prompt`: piece by piece, each when its characters are whole.

        Of one sequence; -1, which `generate` yields for those of a batch that have ended, is left out.
        """

        def text(first: int, last: int | None = None) -> str:
            decoded: str = self.tokenizer.decode(tokens[first:last], skip_special_tokens=True)
            return decoded

        # Whether a token begins with a space can depend on what is before it. So a piece is what its tokens
        # add to the text of the piece before.
        tokens = list(_ids("stream", "prompt", prompt))
        first, done = max(0, len(tokens) - _CONTEXT), len(tokens)
        for token in _ids("stream", "ids", ids):
            tokens.append(token)
            before, whole, end = text(first, done), text(first), len(tokens)
            if whole.endswith(_NO_CHARACTER):  # bytes that are no character yet, or never will be
                if end - done < _MOST_BYTES:
                    continue
                # One that may yet be whole begins in the last tokens. What stood before them, and still does
                # with something after it, will not change any more.
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


def strings(func: str, name: str, texts: Any) -> list[str]:
    """`texts`, the argument `name`, as a list: an iterable of strings that is not one itself."""
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable):
        raise TypeError(f"{func}(): {name} is of type {type(texts).__name__}; expected several, as [text]")
    lines = list(texts)
    for line in lines:
        if not isinstance(line, str):
            raise TypeError(f"{func}(): {name} has one of type {type(line).__name__}; expected strings")
    return lines


def _ids(func: str, name: str, ids: Iterable[int] | Ints) -> Iterator[int]:
    """The ids of one sequence, each as soon as it is there, without what stands behind its end."""
    for token in ids:
        if np.ndim(token):
            raise TypeError(
                f"{func}(): {name} has an array of shape {np.shape(token)}; expected ids of one sequence"
                f" (`decode` takes a batch's)"
            )
        token = integer(func, name, token, NO_TOKEN, 2**32 - 1)
        if token != NO_TOKEN:
            yield token
