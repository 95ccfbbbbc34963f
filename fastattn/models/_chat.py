"""Conversations, and pairs of texts as one, which a chat template writes as one text, by Jinja."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from itertools import takewhile, tee
from pathlib import Path
from typing import Any

import numpy as np

from fastattn._args.errors import needed, wrong_type
from fastattn._args.values import short
from fastattn.models import _gguf_tokenizer
from fastattn.models._files import Config, ModelError, is_gguf, read_bytes, tokenizer_config
from fastattn.models._text import Text
from fastattn.models._tokenizers import transformer_settings

Texts = tuple[str, ...]

_ROLES = {1: ("user",), 2: ("query", "document")}
_PROBES = (("alpha", "bravo"), ("charlie", "bravo"), ("alpha", "foxtrot"))
_FILLERS = ("0", "1 2 3 4")  # of no common token
# Signs of a template that takes contents as lists of parts, as sentence-transformers guesses it.
_STRUCTURED = ("content[0]", ".type", "'type'", '"type"', "item.type", "message.content[")
_SPECIAL = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
# Arguments of apply_chat_template, not of the template.
_ARGUMENTS = {
    *("tools", "documents", "chat_template", "continue_final_message", "tokenize", "sanitize_control_tokens"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("tokenizer_kwargs", "messages"),
}
# With which templates end a turn, beside `eos_token`; in GPT-OSS, "<|end|>" ends a part of an answer.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|end|>")
_WHOLE = "<|return|>"  # of a template with such parts
# Of a subclass, the value that it adds methods to.
_OWN: dict[type, Any] = {bool: bool, str: str.__str__, int: int.__int__, float: float.__float__}
_SAFE = (3, 1, 6)  # templates get out of the sandbox of an older Jinja


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A folder's chat template, and how sentence-transformers fills it."""

    path: Path  # as messages say it
    source: str
    structured: bool  # whether a content is a list of parts
    values: dict[str, Any] = field(default_factory=dict)  # that the template sees beside the messages
    restore: bool = True  # the template's end where a text was cut

    @classmethod
    def of(cls, folder: Path) -> ChatTemplate | None:
        """Read it from the folder; None where the module Transformer takes texts without a template."""
        settings = transformer_settings(folder)
        modalities = settings.get("modality_config", dict, {})
        if "message" not in modalities:
            return None
        message = settings.inner("modality_config", {}).inner("message", {})
        message.refuse(method="forward", method_output_name="logits")
        style = message.one_of("format", ("flat", "structured", "auto"), "auto")
        values = dict(settings.inner("processing_kwargs", {}).get("chat_template", dict, {}))
        restore = bool(values.pop("restore_suffix", True))
        if wrong := sorted(_ARGUMENTS & values.keys()):
            came = f"'processing_kwargs' has {wrong[0]!r} for the chat template"
            raise ModelError(f"{settings.path}: {came}; expected values that the template takes")
        config = tokenizer_config(folder)
        path, source, one = _source(folder, config)
        if style == "auto":
            style = "flat" if one and not any(part in source for part in _STRUCTURED) else "structured"
        template = cls(path, source, style == "structured", {**_special(config), **values}, restore)
        template._check()
        return template

    def _check(self) -> None:
        """Raise unless both texts of a pair reach what the template writes."""
        base, *varied = (self.render("", pair) for pair in _PROBES)
        for role, rendered in zip(_ROLES[2], varied, strict=True):
            if rendered == base:
                came = f"the chat template leaves out what role {role!r} says"
                raise ModelError(f"{self.path}: {came}; expected both texts")

    def render(self, prompt: str, texts: Texts) -> str:
        """The conversation of one or two `texts` as one text: a prompt is its system message."""
        named = [*([("system", prompt)] if prompt else []), *zip(_ROLES[len(texts)], texts, strict=True)]
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if self.structured else text}
            for role, text in named
        ]
        given = {"add_generation_prompt": False, **self.values}
        return _rendered(self.path, self.source, messages, given, "one for query and document")

    def encoded(self, text: Text, prompt: str, pairs: Iterable[Texts]) -> Iterator[list[tuple[int, int]]]:
        """Ids and types of each conversation, cut to the limit of `text`; the template's end comes back."""
        pairs, again = tee(pairs)
        suffixes: dict[int, list[int]] = {}
        rendered = (self.render(prompt, texts) for texts in pairs)
        for encoding, texts in zip(text.encodings(rendered, special=False), again, strict=True):
            ids = list(encoding.ids)
            if self.restore and text.limit is not None and len(ids) >= text.limit:
                count = len(texts)
                if count not in suffixes:
                    suffixes[count] = self._suffix(text, prompt, count)
                if suffix := suffixes[count][-len(ids) :]:
                    ids[-len(suffix) :] = suffix
            yield [(token, 0) for token in ids]

    def _suffix(self, text: Text, prompt: str, count: int) -> list[int]:
        """The tokens with which every conversation of `count` texts ends."""
        fillers = (self.render(prompt, (filler,) * count) for filler in _FILLERS)
        first, second = (_uncut(text, each) for each in text.encodings(fillers, special=False))
        pairs = zip(reversed(first), reversed(second), strict=False)
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        return first[len(first) - same :] if 0 < same < min(len(first), len(second)) else []


def conversation(
    folder: Path, messages: list[dict[str, Any]], values: dict[str, Any]
) -> tuple[str, str, list[str]]:
    """A conversation up to the next answer, as a chat template writes it; the template; what ends a turn."""
    if is_gguf(folder):
        config = _gguf_tokenizer.tokenizer_config(folder)
        source = config.get("chat_template", str)
        path = folder
    else:
        config = tokenizer_config(folder)
        path, source, _ = _source(folder, config)
    special = _special(config)
    given = {"add_generation_prompt": True, **special, **values}
    if ".thinking" in source:  # what GPT-OSS calls it
        messages = [
            {"thinking" if key == "reasoning_content" else key: value for key, value in message.items()}
            for message in messages
        ]
    ends = [text for text in END_OF_TURN if text in source and _WHOLE not in source]
    if "eos_token" in source and "eos_token" in special:
        ends.append(special["eos_token"])
    return _rendered(path, source, messages, given, "one for these messages"), source, ends


def _special(config: Config) -> dict[str, str]:
    """Special tokens by the names that templates have for them."""
    return {name: token for name in _SPECIAL if (token := config.token(name)) is not None}


def _rendered(path: Path, source: str, messages: Any, given: dict[str, Any], expected: str) -> str:
    template = _compiled(path, source)
    from fastattn.models._template import FAILURES  # it needs Jinja

    values = _plain({"tools": None, "documents": None, **given, "messages": messages})
    try:
        rendered: str = template.render(values)
    except FAILURES as error:
        raise _failed(path, error, expected) from error
    return rendered


def _uncut(text: Text, encoding: Any) -> list[int]:
    """Ids of a whole text, also where the tokenizer cut it."""
    pieces = [encoding.ids, *(each.ids for each in encoding.overflowing)]
    if (text.tokenizer.truncation or {}).get("direction") == "left":
        pieces.reverse()
    return [token for piece in pieces for token in piece]


def _source(folder: Path, config: Config) -> tuple[Path, str, bool]:
    """The file that has the template, the template, and whether it is the only one of its model."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            text = read_bytes(path).decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        return path, text, not (folder / "additional_chat_templates").is_dir()
    found = config.values.get("chat_template")
    one, there = isinstance(found, str), folder / "tokenizer_config.json"
    if isinstance(found, list) and all(isinstance(each, dict) for each in found):
        found = next((each.get("template") for each in found if each.get("name") == "default"), None)
    if found is None:
        raise ModelError(f"{path} is missing, and {there} has no 'chat_template'; expected one of the two")
    if not isinstance(found, str):
        raise ModelError(f"{there}: 'chat_template' is {short(found)}; expected a string")
    return there, found, one


@lru_cache(maxsize=8)
def _compiled(path: Path, source: str) -> Any:
    """The template, in an environment as transformers has it."""
    _require_jinja()
    from fastattn.models._template import FAILURES, compiled  # it needs Jinja

    try:
        return compiled(source)
    except FAILURES as error:
        raise _failed(path, error, "one that Jinja reads") from error


def _plain(x: Any) -> Any:
    """A value of Python's own types alone: methods of others, as NumPy's `tofile`, are not for templates."""
    if isinstance(x, np.generic):
        x = x.item()
    if x is None:
        return x
    for kind, own in _OWN.items():
        if isinstance(x, kind):
            return own(x)
    if isinstance(x, Mapping):
        return {_plain(key): _plain(each) for key, each in x.items()}
    if isinstance(x, (list, tuple)):
        return (list if isinstance(x, list) else tuple)(_plain(each) for each in x)
    expected = "texts, numbers, True, False, None, and lists and mappings of these"
    raise wrong_type("a value for the chat template", x, expected)


def _require_jinja() -> None:
    wanted = ".".join(map(str, _SAFE))
    how = f"pip install 'jinja2>={wanted}', or fastattn with the extra 'rerank'"
    needed("jinja2", "chat templates need Jinja", how)
    there = version("jinja2")
    if tuple(int(part) for part in there.split(".")[:3] if part.isdecimal()) < _SAFE:
        raise ImportError(f"chat templates need a newer Jinja than {there}: {how}")


def _failed(path: Path, error: Exception, expected: str) -> ModelError:
    what = " ".join(f"{type(error).__name__}: {str(error)[:1000]}".split())
    return ModelError(f"{path}: the chat template fails, {what}; expected {expected}")
