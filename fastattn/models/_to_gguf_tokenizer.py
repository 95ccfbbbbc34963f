"""Tokenizers of folders as keys of GGUF files: the inverse of `_gguf_tokenizer`, which reads them again.

A tokenizer is written if what is read has its words, its normalizer and its merges, and the same ids of some
odd texts. Any other is refused.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.values import short
from fastattn._gguf import Strings
from fastattn.models._chat import template_of
from fastattn.models._files import Config, ModelError, require, tokenizer_config
from fastattn.models._gguf_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    WORDS,
    cut_into,
    made,
)
from fastattn.models._tokenizers import opened

if TYPE_CHECKING:
    from pathlib import Path

_PREFIX = "tokenizer.ggml."
_IDS = {"bos": "bos", "unk": "unknown", "pad": "padding"}  # names of tokens, and of keys
_PROBES = (
    "The quick brown fox, it's 12345.67 times\n\n\tas  quick!",
    "naïve Ünïcödé e\u0301 \u4e2d\u6587 \U0001f600",
    "  x = {'a': [1, 2]}  # don't\r\n", "HelloWorld fooBar I'M we'LL", " ", "",
)  # fmt: skip


def tokenizer_values(folder: Path, vocab_size: int, stop: tuple[int, ...]) -> dict[str, Any]:
    """Keys and values for the folder's tokenizer.json and chat template, and for the ids that end texts."""
    path, values = folder / "tokenizer.json", _ends(folder, stop)
    if not path.is_file():
        return values
    tokenizer = opened(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    said, names = json.loads(tokenizer.to_str()), tokenizer_config(folder)
    added = {each["id"]: each for each in said["added_tokens"]}
    tokens, kinds = _tokens(path, said, added, vocab_size)
    model = said["model"]
    if model.get("type") != "BPE" or model.get("dropout") or any(map(model.get, _AFFIXES)):
        raise _refused(path, f"a model {short(model.get('type'))}", "BPE without dropout, prefix and suffix")
    values |= {"tokens": Strings.of(tokens), "token_type": kinds}
    merges = [tuple(x) if isinstance(x, list) else tuple(x.split(" ", 1)) for x in model["merges"]]
    values |= (_by_scores if model.get("byte_fallback") else _bytewise)(path, said, tokens, kinds, merges)
    ids = {token: i for i, token in enumerate(tokens)}
    for name, key in _IDS.items():
        if (token := names.token(f"{name}_token")) in ids:
            values[f"{key}_token_id"] = ids[token]
    _mark(path, tokenizer, values)
    again = made(Config.of(path, values))
    _require_same(path, said, json.loads(again.to_str()))
    for text in (*_PROBES, "".join(each["content"] + " x" for each in added.values())):
        expected, got = (each.encode(text).ids for each in (tokenizer, again))
        if expected != got:
            raise _refused(path, f"other ids for {short(text)}", "ids that a GGUF file's tokenizer has")
    if (template := template_of(folder)) is not None:
        values["chat_template"] = template
    return values


_AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")


def named_values(values: dict[str, Any]) -> dict[str, Any]:
    """The keys with their prefixes."""
    return {("tokenizer." if key == "chat_template" else _PREFIX) + key: x for key, x in values.items()}


def _ends(folder: Path, stop: tuple[int, ...]) -> dict[str, Any]:
    """Keys of the one or two ids that end texts, first that which tokenizer_config.json calls `eos_token`."""
    if len(set(stop)) > 2:
        raise ModelError(f"{folder} has {len(set(stop))} ids that end a text; expected at most 2, as in GGUF")
    return dict(zip(("eos_token_id", "eot_token_id"), dict.fromkeys(stop), strict=False))


def _tokens(path: Path, said: Any, added: dict[int, Any], size: int) -> tuple[list[str], Any]:
    """Tokens by id, as many as the model has, and their types."""
    given = {**{i: token for token, i in said["model"]["vocab"].items()}}
    given |= {i: each["content"] for i, each in added.items()}
    if max(given, default=0) >= size:
        raise _refused(path, f"the id {max(given)}", f"less than the model's 'vocab_size', {size}")
    tokens = [given.get(i, f"[PAD{i}]") for i in range(size)]
    kinds = np.array([NORMAL if i in given else UNUSED for i in range(size)], np.int32)
    for i, each in added.items():
        if each["lstrip"] or each["rstrip"] or each["single_word"]:
            raise _refused(path, f"{short(each['content'])}, which takes spaces or whole words", "none such")
        kinds[i] = CONTROL if each["special"] else USER_DEFINED
    if len(set(tokens)) < size:
        raise _refused(path, "a token twice", "different ones")
    return tokens, kinds


def _bytewise(path: Path, said: Any, tokens: list[str], kinds: Any, merges: list[Any]) -> dict[str, Any]:
    """Keys of a tokenizer that merges bytes; the rule by which it cuts texts is one of `WORDS`."""
    library = require("tokenizers")
    for name, words in WORDS.items():
        candidate = library.Tokenizer(library.models.BPE({}, [], ignore_merges=words.whole))
        cut_into(candidate, words)
        other = json.loads(candidate.to_str())
        same = said["model"].get("ignore_merges", False) == words.whole
        if same and all(
            _plain(said[part]) == _plain(other[part]) for part in ("normalizer", "pre_tokenizer")
        ):
            return {"model": "gpt2", "pre": name, "merges": Strings.of([" ".join(pair) for pair in merges])}
    raise _refused(path, f"a 'pre_tokenizer' {short(said['pre_tokenizer'])}", "one of a model in GGUF")


def _by_scores(path: Path, said: Any, tokens: list[str], kinds: Any, merges: list[Any]) -> dict[str, Any]:
    """Keys of a tokenizer of SentencePiece: a token's score is by the place of its first merge."""
    first: dict[str, int] = {}
    for i, pair in enumerate(merges):
        first.setdefault("".join(pair), i)
    scores = np.array([-float(first.get(token, len(merges))) for token in tokens], np.float32)
    for i, token in enumerate(tokens):
        if kinds[i] == NORMAL and len(token) == 6 and token.startswith("<0x"):
            kinds[i] = BYTE
    unknown = said["model"].get("unk_token")
    if unknown not in tokens:
        raise _refused(path, f"'unk_token' {short(unknown)}", "one of its tokens")
    if kinds[tokens.index(unknown)] == NORMAL:  # else texts may have it, and control tokens stay such
        kinds[tokens.index(unknown)] = UNKNOWN
    begins = "Prepend" in json.dumps(said["normalizer"])
    found = {"model": "llama", "scores": scores, "add_space_prefix": begins}
    return {**found, "unknown_token_id": tokens.index(unknown)}


def _mark(path: Path, tokenizer: Any, values: dict[str, Any]) -> None:
    """Set what stands before and after texts: one token or none."""
    marked, bare = (tokenizer.encode("a", add_special_tokens=special).ids for special in (True, False))
    at = next((i for i in range(len(marked)) if marked[i : i + len(bare)] == bare), None)
    before, after = (marked, [-1, -1]) if at is None else (marked[:at], marked[at + len(bare) :])
    for name, ids in (("bos", before), ("eos", after)):
        key = f"{name}_token_id"
        if len(ids) > 1 or (ids and values.setdefault(key, ids[0]) != ids[0]):
            raise _refused(path, f"{marked} around a text", "at most one token before it, and one after it")
        values[f"add_{name}_token"] = bool(ids)


def _require_same(path: Path, said: Any, again: Any) -> None:
    """Raise unless both tokenizers, as JSON, have the same parts, but for how they are written."""
    for part in ("normalizer", "pre_tokenizer"):
        if _plain(said[part]) != _plain(again[part]):
            came, expected = short(json.dumps(said[part])), short(json.dumps(again[part]))
            raise _refused(path, f"a {part!r} {came}", expected)
    for key in ("merges", "byte_fallback", "fuse_unk", "ignore_merges"):
        if (said["model"].get(key) or False) != (again["model"].get(key) or False):
            raise _refused(path, f"other {key!r} than a GGUF file can say", "those of a model in GGUF")


def _plain(x: Any) -> Any:
    """A part without what changes no ids: offsets, and sequences of one or in sequences."""
    if not isinstance(x, dict):
        return x
    x = {key: value for key, value in x.items() if key != "trim_offsets"}
    for key in ("normalizers", "pretokenizers"):
        if x.get("type") == "Sequence" and key in x:
            parts = [_plain(each) for each in x[key]]
            flat = [y for each in parts for y in (each[key] if each.get("type") == "Sequence" else [each])]
            return flat[0] if len(flat) == 1 else {**x, key: flat}
    return x


def _refused(path: Path, came: str, expected: str) -> ModelError:
    return ModelError(f"{path} has {came}; expected {expected}, or path without '.gguf'")
