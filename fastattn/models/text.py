"""From text to token ids and back: the folder's tokenizer.json, by the `tokenizers` library."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fastattn.models.files import ModelError, read_json, require

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

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
            raise ModelError(f"{path} is no tokenizer: {error}") from error
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

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, special tokens included, cut to `limit`."""
        if self.limit is not None:
            self.tokenizer.enable_truncation(self.limit)
        return [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]

    def stream(self, prompt: Sequence[int], ids: Iterable[int]) -> Iterator[str]:
        """Text of `ids`, which follow on `prompt`: piece by piece, each when its characters are whole."""

        def text(first: int, last: int | None = None) -> str:
            decoded: str = self.tokenizer.decode(tokens[first:last], skip_special_tokens=True)
            return decoded

        # Whether a token begins with a space can depend on what is before it. So a piece is what its tokens
        # add to the text of the piece before.
        tokens = list(prompt)
        first, done = max(0, len(tokens) - _CONTEXT), len(tokens)
        for token in ids:
            tokens.append(token)
            before, after = text(first, done), text(first)
            # Bytes that are no character yet, or never will be
            is_whole = not after.endswith("\N{REPLACEMENT CHARACTER}") or len(tokens) - done >= _MOST_BYTES
            if is_whole and len(after) > len(before):
                yield after[len(before) :]
                first, done = done, len(tokens)
        if done < len(tokens):
            yield text(first)[len(text(first, done)) :]
