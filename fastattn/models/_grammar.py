"""Answers that follow a grammar: a JSON schema, or a grammar in Lark's form, by the library llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from fastattn._args.errors import needed, wrong_type
from fastattn._args.types import Bools
from fastattn.models._text import Text


class Matcher:
    """Tokens of one answer so far, and which tokens may follow."""

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher, self._size = matcher, vocab_size
        self._bits = np.zeros((1, -(-vocab_size // 32)), np.int32)

    def allowed(self) -> Bools:
        """Which tokens may follow, (vocab_size,)."""
        _library("llguidance.numpy").fill_next_token_bitmask(self._matcher, self._bits)
        bits = np.unpackbits(self._bits.view(np.uint8), count=self._size, bitorder="little")
        allowed: Bools = bits.view(np.bool_)
        return allowed

    def accept(self, token: int) -> None:
        """Go on by a token that may follow."""
        self._matcher.consume_token(token)


def matchers(grammar: Any, text: Text, vocab_size: int, ends: Sequence[int], count: int) -> list[Matcher]:
    """Matchers of `grammar`, the argument, for so many answers, which end with one of `ends`."""
    kind = _library("llguidance").LLMatcher
    if isinstance(grammar, Mapping):
        source = kind.grammar_from_json_schema(json.dumps(dict(grammar)))
    elif isinstance(grammar, str):
        if grammar.lstrip().startswith("{"):
            raise ValueError(
                "(): grammar is a string of JSON; expected the schema as a mapping, from json.loads"
            )
        source = kind.grammar_from_lark(grammar)
    else:
        raise wrong_type("grammar", grammar, "a JSON schema, as a mapping, or a grammar in Lark's form")
    if not ends:
        raise ValueError("(): grammar is given, and stop has no id; expected one, to end the text")
    tokenizer = _tokenizer(text.tokenizer, vocab_size, tuple(ends))
    made = [kind(tokenizer, source) for _ in range(count)]
    if made and (error := made[0].get_error()):
        said = " ".join(error.split())
        raise ValueError(f"(): grammar is invalid: {said}; expected one that llguidance takes")
    return [Matcher(each, vocab_size) for each in made]


@lru_cache(maxsize=4)
def _tokenizer(tokenizer: Any, vocab_size: int, ends: tuple[int, ...]) -> Any:
    """A `tokenizers.Tokenizer`, which equals none but itself, as llguidance has it."""
    kind = _library("llguidance").LLTokenizer
    try:
        return kind(tokenizer.to_str(), n_vocab=vocab_size, eos_token=list(ends))
    except ValueError as error:
        came = f"grammar is given, and llguidance does not read the model's tokenizer: {error}"
        raise ValueError(f"(): {came}; expected one with a byte-level or byte-fallback decoder") from None


def _library(name: str) -> Any:
    how = "pip install llguidance, or fastattn with the extra 'grammar'"
    return needed(name, "(): grammar needs llguidance", how)
