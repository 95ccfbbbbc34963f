"""What a language model is asked: ids, texts and conversations as sequences of ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fastattn._args.errors import wrong_type
from fastattn._args.types import Ints, TypeIs
from fastattn._args.values import short
from fastattn.models._answers import Parts
from fastattn.models._chat import conversation
from fastattn.models._model import attended, token_ids
from fastattn.models._text import Text, string

Messages = Sequence[Mapping[str, Any]]


class Prompts(NamedTuple):
    """Prompts as ids, and what is known of their answers."""

    single: bool  # whether one was given, and not several
    ids: list[Ints]
    are_texts: bool = False
    parts: Sequence[Parts | None] = ()  # of the answer to each text, or conversation
    turns: Sequence[int] = ()  # ids with which the chat template ends a turn

    @classmethod
    def of(
        cls, text: Text, vocab_size: int, ids: Any, attention_mask: Any, others: Mapping[str, Any]
    ) -> Prompts:
        """Check the argument `ids` of `generate`, and the `others` that belong to texts."""
        written = _texts(ids)
        if written is None:
            for name, x in others.items():
                if x is not None:
                    came = f"{name} {'is' if name == 'logprobs' else 'are'} given with ids"
                    raise ValueError(f"(): {came}; expected a text or messages, or None")
            return cls(*_sequences(ids, attention_mask, vocab_size))
        if attention_mask is not None:
            raise ValueError("(): attention_mask is given with a text; expected None")
        single, given = written
        values = values_of(others["template_values"], others["tools"])
        if values is not None and all(isinstance(each, str) for each in given):
            came = "tools" if set(values) == {"tools"} else "template_values"
            raise ValueError(f"(): {came} are given with a text; expected messages, or None")
        found: list[tuple[list[int], Parts | None]] = []
        turns: list[int] = []
        for each in given:
            if isinstance(each, str):
                found.append((text.encode([each])[0], None))
            else:
                own, parts, turns = encoded(text, each, values or {})
                found.append((own, parts))
        _, prompts = _sequences([own for own, _ in found], None, vocab_size)
        return cls(single, prompts, True, [parts for _, parts in found], turns)


def encoded(text: Text, messages: Messages, values: dict[str, Any]) -> tuple[list[int], Parts, list[int]]:
    """The ids of a conversation, the parts of its answer, and the ids with which a turn ends."""
    said, template, ends = conversation(text.folder, _checked(messages), values)
    if values.get("tools") and "tools" not in template:
        came = f"tools are given, and the chat template of {text.folder} writes none"
        raise ValueError(f"(): {came}; expected None, and what the model is to know of them in a message")
    (encoding,) = text.encodings([said], special=False)
    turns = [i for each in ends if (i := text.tokenizer.token_to_id(each)) is not None]
    return encoding.ids, Parts(template, said, bool(values.get("tools"))), turns


def _sequences(ids: Any, attention_mask: Any, vocab_size: int) -> tuple[bool, list[Ints]]:
    """Whether `ids` is one sequence, and the sequences without tokens that do not count."""
    rows = ids if isinstance(ids, (list, tuple)) and attention_mask is None else ()
    single = False
    if rows and all(_is_row(row) for row in rows):
        prompts = [token_ids(row, vocab_size)[0] for row in rows]
    else:
        tokens = token_ids(ids, vocab_size)
        mask, single = attended(attention_mask, tokens), np.ndim(ids) == 1
        prompts = list(tokens) if mask is None else [row[m] for row, m in zip(tokens, mask, strict=True)]
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("generate(): ids has a prompt without a token; expected at least one in each")
    return single, prompts


def _is_row(x: Any) -> bool:
    """Tell whether `x` is one sequence; `np.ndim` raises for lists of different lengths."""
    try:
        return np.ndim(x) == 1
    except ValueError:
        return False


def is_conversation(x: Any) -> TypeIs[Messages]:
    """Tell whether `x` is a list of messages."""
    return isinstance(x, (list, tuple)) and bool(x) and all(isinstance(each, Mapping) for each in x)


def _texts(given: Any) -> tuple[bool, list[str | Messages]] | None:
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


def _checked(messages: Messages) -> list[dict[str, Any]]:
    """Messages, each with a role."""
    for message in messages:
        if not isinstance(message.get("role"), str):
            expected = "a 'role' in each, as {'role': 'user', 'content': 'a question'}"
            raise ValueError(f"(): ids has the message {short(dict(message))}; expected {expected}")
        if "content" not in message and message["role"] in ("system", "user"):
            raise ValueError(f"(): ids has the message {short(dict(message))}; expected a 'content', too")
    return [dict(message) for message in messages]


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
