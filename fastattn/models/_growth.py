"""Growth of texts in a tokenizer.json: steps that make a text longer follow one another, and multiply."""

from __future__ import annotations

import base64
import re
from math import prod
from typing import TYPE_CHECKING, Any

from fastattn._args.values import short
from fastattn.models._files import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MOST = 2**16  # ALBERT's, which is the largest of known ones, has half of it
# The most bytes that steps make of a byte, or tokens of a token, by their types; `_growth` has the others.
_STEPS = {
    **dict.fromkeys(("Strip", "StripAccents", "Nmt", "BertPreTokenizer", "CharDelimiterSplit", "Digits"), 1),
    **dict.fromkeys(("FixedLength", "Punctuation", "Split", "UnicodeScripts", "Whitespace", "Fuse"), 1),
    **dict.fromkeys(("WhitespaceSplit", "ByteFallback"), 1),
    **dict.fromkeys(("Lowercase", "BPEDecoder", "CTC", "WordPiece"), 2),
    **dict.fromkeys(("NFC", "NFD", "BertProcessing", "RobertaProcessing"), 3),
    **{"ByteLevel": 4, "Metaspace": 5, "NFKC": 11, "NFKD": 11, "BertNormalizer": 12},
}
# Expressions that match a character at least: characters and classes in a row, none of them optional. Others
# may match nothing; their grammar is the library's, where "a{2}?" does.
_ONE = r"(?:\\[][dDnrsStwW.*+?(){}|^$\\/-]|\[\^?(?:[^\[\]\\&]|\\\w)+\]|[^\\\[\](){}|?*+^$])"
_MATCHES_SOME = re.compile(rf"(?:{_ONE}(?:\+|\{{[1-9]\d*(?:,|,[1-9]\d*)?\}})?)+")
_INNER = ("normalizers", "pretokenizers", "decoders", "processors")  # where a Sequence has its steps
_BEFORE, _AFTER = ("normalizer", "pre_tokenizer", "post_processor"), ("decoder",)  # the model


def require_bounded(path: Path, values: dict[str, Any]) -> None:
    """Raise if the steps that `values` of a tokenizer.json have make a text too long, or are not known."""
    for names in (_BEFORE, _AFTER):
        growth = prod(_growth(path, step) for name in names for step in _steps(values.get(name)))
        if growth > _MOST:
            came = f"{path}: {', '.join(names)} can make a text {growth} times as long"
            raise ModelError(f"{came}; expected at most {_MOST} times")


def _steps(step: Any) -> Iterator[Any]:
    """The steps of which a step consists."""
    left = [] if step is None else [step]
    while left:
        step = left.pop()
        if isinstance(step, dict) and step.get("type") == "Sequence":
            left += [each for name in _INNER if isinstance(step.get(name), list) for each in step[name]]
        else:
            yield step


def _growth(path: Path, step: Any) -> int:
    """How many times as long a step makes a text, at most."""
    kind = step.get("type") if isinstance(step, dict) else None
    if kind == "Replace":
        most, given = _size(step.get("content")), step.get("pattern")
        pattern = given if isinstance(given, dict) else {}
        least = _size(pattern.get("String")) or bool(_MATCHES_SOME.fullmatch(str(pattern.get("Regex", ""))))
        return max(1, -(-most // least)) if least else 1 + most
    if kind == "Prepend":
        return 1 + _size(step.get("prepend"))
    if kind == "Precompiled":
        return _of_table(step.get("precompiled_charsmap"))
    if kind == "TemplateProcessing":
        special = step.get("special_tokens")
        tokens = special.values() if isinstance(special, dict) else ()
        most = max((_size(x.get("ids")) for x in tokens if isinstance(x, dict)), default=1)
        return max(1, _size(step.get("single")), _size(step.get("pair"))) * max(1, most)
    if kind not in _STEPS:
        expected = ", ".join((*_STEPS, "Replace", "Prepend", "Precompiled", "TemplateProcessing"))
        raise ModelError(f"{path} has the step {short(kind)}; expected one of {expected}")
    return _STEPS[kind]


def _of_table(said: Any) -> int:
    """The longest text in a table of SentencePiece, which follow a tree, each with a zero after it."""
    try:
        table = base64.b64decode(said)
    except (TypeError, ValueError):  # which the library refuses
        return 1
    return max(1, *map(len, table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")))


def _size(x: Any) -> int:
    """Bytes of a text, or elements of a list."""
    x = x.encode("utf-8", "surrogatepass") if isinstance(x, str) else x
    return len(x) if isinstance(x, (bytes, list)) else 0
