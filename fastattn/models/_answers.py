"""Parts of an answer: text, reasoning, and calls of tools, by the markers of the model's chat template."""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

Kind = Literal["text", "reasoning", "tool_call", "malformed_call"]

_THINK = "<think>", "</think>"
# What begins a call, what ends it (None: another one, or the end of the answer), and what a template with
# such calls contains.
_CALLS = (
    ("<tool_call>", "</tool_call>", "<tool_call>"),  # Hermes, Qwen, SmolLM3
    ("[TOOL_CALLS]", None, "[TOOL_CALLS]"),  # Mistral
    ("<|python_tag|>", None, '{"name": function name, "parameters":'),  # Llama 3, mostly without the marker
)


class Part(NamedTuple):
    """Some of an answer."""

    text: str
    kind: Kind = "text"
    call: dict[str, Any] | None = None


class Parts:
    """The parts of one answer, whose text comes piece by piece; markers are left out.

    Characters with which a marker may begin wait until it is clear, and calls until they are whole.
    """

    def __init__(self, template: str, prompt: str, tools: bool):
        self._after: dict[str, dict[str, Kind]] = {"text": {}, "reasoning": {}, "tool_call": {}}
        if all(marker in template for marker in _THINK):
            self._after["text"][_THINK[0]], self._after["reasoning"][_THINK[1]] = "reasoning", "text"
        begin, end, _ = next((each for each in _CALLS if tools and each[2] in template), (None, None, ""))
        if begin is not None:
            self._after["text"][begin] = "tool_call"
            self._after["tool_call"][end or begin] = "text" if end else "tool_call"
        self._bare = begin == "<|python_tag|>"  # whether a whole answer may be a call without a marker
        self._opened, self._waiting = "", ""
        self._kind: Kind = "text"
        if self._after["reasoning"] and prompt.rstrip().endswith(_THINK[0]):
            self._kind = "reasoning"

    @property
    def markers(self) -> set[str]:
        """All texts that part an answer: those that are special tokens have to be shown."""
        return {*self._after["text"], *self._after["reasoning"], *self._after["tool_call"]}

    def add(self, text: str) -> list[Part]:
        """The parts that are clear with more text."""
        self._waiting += text
        if self._bare and self._waiting.strip():
            self._bare = False
            if self._waiting.lstrip().startswith("{"):
                self._kind = "tool_call"
        found: list[Part] = []
        while True:
            after = self._after[self._kind]
            at, marker = min(
                ((self._waiting.find(each), each) for each in after if each in self._waiting),
                default=(-1, ""),
            )
            if at < 0:
                break
            found += self._ended(self._waiting[:at], marker)
            self._waiting = self._waiting[at + len(marker) :]
            self._kind, self._opened = after[marker], marker
        if self._kind == "tool_call":
            return found
        kept = max((overlap(self._waiting, each) for each in after), default=0)
        if self._bare:  # spaces
            kept = len(self._waiting)
        cut = len(self._waiting) - kept
        found += self._ended(self._waiting[:cut], "")
        self._waiting = self._waiting[cut:]
        return found

    def rest(self) -> list[Part]:
        """The last parts."""
        found, self._waiting = self._ended(self._waiting, ""), ""
        return found

    def _ended(self, text: str, marker: str) -> list[Part]:
        """The parts of `text`, which `marker` ends."""
        if self._kind != "tool_call":
            return [Part(text, self._kind)] if text else []
        # An end that is missing: the answer was cut.
        whole = (
            marker or None in [end for begin, end, _ in _CALLS if begin == self._opened] or not self._opened
        )
        calls = _calls_of(text) if whole else []
        if not calls:
            closed = "" if marker == self._opened else marker
            return [Part(self._opened + text + closed, "malformed_call")]
        return [Part("" if i else text, "tool_call", call) for i, call in enumerate(calls)]


def overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` with which `stop` begins."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)


def _calls_of(text: str) -> list[dict[str, Any]]:
    """The calls that `text` consists of, as ``{"name": "f", "arguments": {}}``; none if it is not sound."""
    name, separator, arguments = text.strip().partition("[ARGS]")  # of Mistral's later models
    try:
        if separator:
            found: Any = [{"name": name.strip(), "arguments": json.loads(arguments)}]
        else:
            found = json.loads(name)
    except (ValueError, RecursionError):
        return []
    calls = []
    for each in found if isinstance(found, list) else [found]:
        if not isinstance(each, dict):
            return []
        given = each.get("arguments", each.get("parameters"))
        if not isinstance(each.get("name"), str) or not each["name"] or not isinstance(given, dict):
            return []
        calls.append({"name": each["name"], "arguments": given})
    return calls
