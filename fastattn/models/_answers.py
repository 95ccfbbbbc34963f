"""Parts of an answer: text, reasoning, and calls of tools, by the markers of the model's chat template."""

from __future__ import annotations

import json
import re
from typing import Any, Literal, NamedTuple

Kind = Literal["text", "reasoning", "tool_call", "malformed_call"]
_State = Literal["text", "reasoning", "tool_call", "header"]

_THINK = "<think>", "</think>"
# What begins a call, what ends it (None: another one, or the end of the answer), and what a template with
# such calls contains.
_CALLS = (
    ("<tool_call>", "</tool_call>", "<tool_call>"),  # Hermes, Qwen, SmolLM3
    ("[TOOL_CALLS]", None, "[TOOL_CALLS]"),  # Mistral
    ("<|python_tag|>", None, '{"name": function name, "parameters":'),  # Llama 3, mostly without the marker
)
# GPT-OSS (harmony): a header says what follows, as in <|channel|>analysis<|message|>a thought<|end|>, and in
# <|channel|>commentary to=functions.f<|message|>{"its": "arguments"}<|call|>.
_MESSAGE = "<|message|>"
_HEADERS = ("<|channel|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


class Part(NamedTuple):
    """Some of an answer."""

    text: str
    kind: Kind = "text"
    call: dict[str, Any] | None = None


class Parts:
    """The parts of one answer, whose text arrives in pieces; markers are left out.

    Characters that may begin a marker are held back until that is decided, and calls until they are complete.
    """

    def __init__(self, template: str, prompt: str, tools: bool):
        states: tuple[_State, ...] = ("text", "reasoning", "tool_call", "header")
        self._after: dict[_State, dict[str, _State]] = {state: {} for state in states}
        self._opened, self._waiting, self._bare = "", "", False
        self._header = ""  # of what follows, as far as it was read
        self._kind: _State = "text"
        if _MESSAGE in template and _HEADERS[0] in template:
            for state in states:
                self._after[state] = dict.fromkeys(_HEADERS, "header")
            self._after["header"][_MESSAGE] = "text"
            self._kind = "header"
            return
        if all(marker in template for marker in _THINK):
            self._after["text"][_THINK[0]], self._after["reasoning"][_THINK[1]] = "reasoning", "text"
        begin, end, _ = next((each for each in _CALLS if tools and each[2] in template), (None, None, ""))
        if begin is not None:
            self._after["text"][begin] = "tool_call"
            self._after["tool_call"][end or begin] = "text" if end else "tool_call"
        self._bare = begin == "<|python_tag|>"  # whether a whole answer may be a call without a marker
        if self._after["reasoning"] and prompt.rstrip().endswith(_THINK[0]):
            self._kind = "reasoning"

    @property
    def markers(self) -> set[str]:
        """All texts that part an answer: those that are special tokens have to be shown."""
        return {marker for after in self._after.values() for marker in after}

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
            before, self._waiting = self._waiting[:at], self._waiting[at + len(marker) :]
            found += self._ended(before, marker)
            self._header = f"{self._header} {before}" if self._kind == "header" else ""
            self._kind, self._opened = self._said_by_header() if marker == _MESSAGE else after[marker], marker
        if self._kind in ("tool_call", "header"):
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

    def _said_by_header(self) -> _State:
        """The kind of what follows a header."""
        if _RECIPIENT.search(self._header):
            return "tool_call"
        return "reasoning" if re.search(r"^(?:assistant )?\s*analysis\b", self._header.strip()) else "text"

    def _ended(self, text: str, marker: str) -> list[Part]:
        """The parts of `text`, which `marker` ends."""
        if self._kind == "header":  # text that stands in none is not lost, nor is one that was cut
            between = self._opened not in _HEADERS[:2] and marker != _MESSAGE
            between = between and not _RECIPIENT.fullmatch(text.strip())
            if not text or (marker and not between):
                return []
            return [Part(text if between else self._opened + text)]
        if recipient := _RECIPIENT.search(self._header) if self._kind == "tool_call" else None:
            called = f"{recipient[1]}[ARGS]{text}" if marker == "<|call|>" else ""
            return _called(called, text, self._opened + text + marker)
        if self._kind != "tool_call":
            return [Part(text, self._kind)] if text else []
        # An end that is missing: the answer was cut.
        whole = (
            marker or None in [end for begin, end, _ in _CALLS if begin == self._opened] or not self._opened
        )
        written = self._opened + text + ("" if marker == self._opened else marker)
        return _called(text if whole else "", text, written)


def _called(calls: str, text: str, written: str) -> list[Part]:
    """The parts of `calls`, shown as `text`; as they were written, if they cannot be read."""
    found = [Part("" if i else text, "tool_call", call) for i, call in enumerate(_calls_of(calls))]
    return found or [Part(written, "malformed_call")]


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
