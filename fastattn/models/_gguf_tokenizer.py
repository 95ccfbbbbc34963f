"""Tokenizers of GGUF files, made into those of the `tokenizers` library, and their chat templates."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastattn._args.types import Array
from fastattn._args.values import short
from fastattn._gguf import Strings
from fastattn.models._files import Config, ModelError, opened_gguf, require

# Characters of tokens, each as often as it may be cut in two: 256,000 tokens of up to 512 have 1 << 24.
_MOST_CUT = 1 << 26
_NO_TOKEN = (1 << 32) - 1  # -1, as some files have it

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # types of tokens

# Tokens that end an answer, by keys and by texts, as in llama.cpp (`special_eog_ids` in src/llama-vocab.cpp).
# Those of the last two lines end a file of code.
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
    "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "<|eom_id|>", "<EOT>",
    "_<EOT>", "[EOT]", "[EOS]", "<eos>", "<turn|>", "<|tool_response>", "</s>",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>",
    "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
)  # fmt: skip

# What texts are cut into before pairs are merged, by `tokenizer.ggml.pre`: the models' own expressions.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_BYWORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _ENDS
_LLAMA3, _QWEN2 = (_CONTRACTIONS + _BYWORDS % digits for digits in (r"\p{N}{1,3}", r"\p{N}"))
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BY_CASE = r"[^\r\n\p{L}\p{N}]?%s*%s+%s|[^\r\n\p{L}\p{N}]?%s+%s*%s|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _ENDS


def _by_case(digits: str, after: str) -> str:
    return _BY_CASE % (_UPPER, _LOWER, after, _UPPER, _LOWER, after, digits)


class _Words(NamedTuple):
    """Rule by which texts become words."""

    pattern: str | None = None  # None: GPT-2's
    digits: bool = False  # each digit is a word, before the pattern
    whole: bool = False  # a word that is a token is not made of merges
    begun: bool = False  # texts begin with a mark, if the file does not say
    composed: bool = False  # characters are composed first, by NFC


_WORDS = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jina-v2-code", "gpt-neox"), _Words()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _Words(digits=True)),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2"), _Words(_LLAMA3, whole=True, begun=True)
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Words(_LLAMA3)),
    "qwen2": _Words(_QWEN2, composed=True),
    "qwen35": _Words(_QWEN35, composed=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "megrez"), _Words(_QWEN2)),
    **dict.fromkeys(("gpt-4o", "llama4"), _Words(_by_case(r"\p{N}{1,3}", _CONTRACTIONS + "?"))),
    "tekken": _Words(_by_case(r"\p{N}", ""), whole=True, begun=True),
}


def tokenizer_config(path: Path) -> Config:
    """Values of tokenizer_config.json: the chat template, and special tokens."""
    try:
        found = path.stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return _tokenizer_config(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=8)
def _tokenizer_config(path: Path, *version: int) -> Config:
    config = _tokenizer(path)
    tokens = _list(config, "tokens", str)
    values: dict[str, Any] = {"chat_template": config.values.get("chat_template")}
    for name, token in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        i = config.values.get(f"{name}_token_id")
        if type(i) is int and 0 <= i < len(tokens):
            values[f"{token}_token"] = tokens[i]
    return Config.of(path, values, "tokenizer.")


def _tokenizer(path: Path) -> Config:
    """The keys of the tokenizer, without the prefix "tokenizer.ggml."."""
    with opened_gguf(path) as file:
        keys = [(name.removeprefix("tokenizer."), x) for name, x in file.metadata.items()]
    return Config.of(path, {name.removeprefix("ggml."): x for name, x in keys}, "tokenizer.ggml.")


def end_ids(said: Config, count: int) -> list[int]:
    """The ids that end an answer, of `count` tokens, by all keys of a file and by their texts."""
    ids = []
    for name in _END_KEYS:
        key = f"tokenizer.ggml.{name}_token_id"
        if said.values.get(key) is None or (i := said.size(key, low=0)) == _NO_TOKEN:
            continue
        if i >= count:
            raise said.wrong(key, i, f"less than the number of tokens, {count}")
        ids.append(i)
    if (more := said.values.get(key := "tokenizer.ggml.eos_token_ids")) is not None:
        given = more if isinstance(more, np.ndarray) else np.zeros(0)
        if given.dtype.kind not in "iu" or (given < 0).any() or (given >= count).any():
            raise said.wrong(key, more, f"an array of ids of the {count} tokens")
        ids += more.tolist()
    tokens = said.values.get("tokenizer.ggml.tokens")
    by_text, others = _ends(tokens) if isinstance(tokens, Strings) else ([], [])
    return [i for i in dict.fromkeys([*ids, *by_text]) if i not in others]


def _ends(tokens: Strings) -> tuple[list[int], list[int]]:
    """The tokens that end an answer by their text, whatever their type, and those that end none.

    "<|end|>" ends a part of an answer alone where other tokens end the answer, as in GPT-OSS; "</s>" is a tag
    of HTML beside Gemma 4's "<|tool_response>".
    """
    found = tokens.places(_END_TEXTS)
    calls = not found.keys().isdisjoint(("<|call|>", "<|calls|>"))
    parts = calls and not found.keys().isdisjoint(("<|return|>", "<|flush|>"))
    no_ends = {"<|end|>": parts, "</s>": "<|tool_response>" in found}
    others = [found.pop(text) for text, is_none in no_ends.items() if is_none and text in found]
    return list(found.values()), others


def tokenizer_of(path: Path) -> Any:
    """The file's tokenizer, a `tokenizers.Tokenizer`."""
    config = _tokenizer(path)
    try:
        return _made(config)
    except BaseException as error:  # a panic of the library is no Exception
        if type(error) not in (Exception, TypeError, ValueError) and type(error).__name__ != "PanicException":
            raise  # it is not the library's
        raise ModelError(f"{path}: its tokenizer cannot be made: {error}") from error


def _made(config: Config) -> Any:
    """The tokenizer that these keys describe, which have no prefix."""
    library, tokens = require("tokenizers"), _list(config, "tokens", str)
    kinds = _numbers(config, "token_type", "iu", len(tokens), np.ones(len(tokens), np.int32))
    makers: dict[str, Any] = {
        "gpt2": _bytewise, "llama": _by_scores, "gemma4": _by_merges, "bert": _by_words, "t5": _by_chances
    }  # fmt: skip
    kinds = kinds.copy()
    kinds[_ends(config.values["tokens"])[0]] = _CONTROL  # they are no part of the answer
    tokenizer, config = config.choice("model", makers)(config, tokens, kinds)
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        found = [
            library.AddedToken(tokens[i], normalized=False, special=special)
            for i in np.flatnonzero(kinds == kind)
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(found)
    marks = {"begin": _mark(config, tokens, "bos"), "end": _mark(config, tokens, "eos")}
    if any(marks.values()):
        begin, end = ([name] if marks[name] else [] for name in marks)
        pair = [f"{name}:1" for name in begin], [f"{name}:1" for name in end]
        template = library.processors.TemplateProcessing(
            [*begin, "$A", *end], [*begin, "$A", *end, *pair[0], "$B:1", *pair[1]],
            [{"id": name, "ids": [mark[1]], "tokens": [mark[0]]} for name, mark in marks.items() if mark],
        )  # fmt: skip
        before = tokenizer.post_processor
        steps = [template] if before is None else [before, template]
        tokenizer.post_processor = library.processors.Sequence(steps)
    return tokenizer


def _list(config: Config, name: str, kind: type) -> Any:
    """A list of the tokenizer's, of strings or numbers."""
    found = config.values.get(name)
    expected = "strings" if kind is str else "numbers"
    if not isinstance(found, Strings if kind is str else np.ndarray):
        raise config.wrong(name, found, f"an array of {expected}")
    try:
        return found.decoded() if isinstance(found, Strings) else found
    except UnicodeDecodeError as error:
        raise ModelError(
            f"{config.path}: 'tokenizer.ggml.{name}' has one that is no UTF-8: {error}"
        ) from error


def _numbers(config: Config, name: str, kinds: str, count: int, default: Any = None) -> Any:
    """An array of the tokenizer's, with a number for each token, of one of NumPy's `kinds`."""
    found = config.values.get(name)
    if found is None and default is not None:
        return default
    found = _list(config, name, float)
    if found.dtype.kind not in kinds or len(found) != count:
        came = f"has {len(found)} numbers in {found.dtype} for {count} tokens"
        what = "floats" if kinds == "f" else "integers"
        raise ModelError(f"{config.path}: 'tokenizer.ggml.{name}' {came}; expected {what}, one for each")
    return found


def _with_usual(config: Config, **usual: Any) -> Config:
    """The keys, with what models of this kind have where the file does not say it."""
    said = {name: value for name, value in config.values.items() if value is not None}
    return Config.of(config.path, {**usual, **said}, config.prefix)


def _mark(config: Config, tokens: list[str], name: str) -> tuple[str, int] | None:
    """The token that stands before or after texts, if one does, and its id."""
    if not config.get(f"add_{name}_token", bool, False):
        return None
    i = _token_id(config, tokens, f"{name}_token_id")
    return tokens[i], i


def _token_id(config: Config, tokens: list[str], name: str, default: int | None = None) -> int:
    i = config.size(name, low=0) if default is None else config.size(name, default, low=0)
    if i >= len(tokens):
        raise config.wrong(name, i, f"less than the number of tokens, {len(tokens)}")
    return i


def _bytewise(config: Config, tokens: list[str], kinds: Array) -> tuple[Any, Config]:
    """A tokenizer that merges pairs of bytes, as GPT-2's; and the keys, with usual ones."""
    library = require("tokenizers")
    words = config.choice("pre", _WORDS)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = _merges(config, vocabulary)
    tokenizer = library.Tokenizer(library.models.BPE(vocabulary, pairs, ignore_merges=words.whole))
    _cut_into(tokenizer, words)
    return tokenizer, _with_usual(config, add_bos_token=words.begun)


def _merges(config: Config, vocabulary: dict[str, int]) -> list[tuple[str, ...]]:
    """The pairs of tokens that are merged, the first ones first."""
    pairs = [tuple(pair.split(" ", 1)) for pair in _list(config, "merges", str)]
    for pair in pairs:
        if len(pair) != 2 or not all(part in vocabulary for part in (*pair, "".join(pair))):
            raise ModelError(
                f"{config.path}: 'tokenizer.ggml.merges' has {short(' '.join(pair))}; expected two tokens"
            )
    return pairs


def _cut_into(tokenizer: Any, words: _Words) -> None:
    """Have the tokenizer cut texts into words by this rule, and then into bytes."""
    library = require("tokenizers")
    before = library.pre_tokenizers
    steps = [before.Digits(individual_digits=True)] if words.digits else []
    if words.pattern is not None:
        steps.append(before.Split(library.Regex(words.pattern), "isolated"))
    steps.append(before.ByteLevel(add_prefix_space=False, use_regex=words.pattern is None))
    tokenizer.pre_tokenizer = before.Sequence(steps)
    tokenizer.decoder = library.decoders.ByteLevel()
    if words.composed:
        tokenizer.normalizer = library.normalizers.NFC()


def _by_scores(config: Config, tokens: list[str], kinds: Array) -> tuple[Any, Config]:
    """A tokenizer of SentencePiece, which merges by scores; and the keys, with usual ones."""
    scores = _numbers(config, "scores", "f", len(tokens))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    lengths = sorted({len(token) for token in tokens})
    work = sum(len(token) * bisect_left(lengths, len(token)) for token in tokens)
    if work > _MOST_CUT:
        came = f"strings of {len(lengths)} lengths up to {lengths[-1]}, {work} characters to cut for merges"
        raise ModelError(f"{config.path}: 'tokenizer.ggml.tokens' has {came}; expected at most {_MOST_CUT}")
    cuts = (
        (-scores[i], vocabulary[token[:at]], vocabulary[token[at:]])
        for i, token in enumerate(tokens)
        if kinds[i] not in (_CONTROL, _BYTE, _UNKNOWN)
        for at in takewhile(len(token).__gt__, lengths)
        if at and token[:at] in vocabulary and token[at:] in vocabulary
    )
    merges = [(tokens[left], tokens[right]) for _, left, right in sorted(cuts)]
    tokenizer = _spaced(config, tokens, vocabulary, merges, True)
    return tokenizer, _with_usual(config, add_bos_token=True)


def _by_merges(config: Config, tokens: list[str], kinds: Array) -> tuple[Any, Config]:
    """Gemma 4's tokenizer, SentencePiece's with the order of merges; and the keys, with usual ones."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = _spaced(config, tokens, vocabulary, _merges(config, vocabulary), False)
    return tokenizer, _with_usual(config, add_bos_token=True)


def _by_words(config: Config, tokens: list[str], kinds: Array) -> tuple[Any, Config]:
    """BERT's tokenizer, of words and their pieces; and the keys, with usual ones.

    A file marks the first piece of a word, BERT the others. Where the file does not say it, texts become
    lower case if no token has an upper one.
    """
    library = require("tokenizers")
    is_name = [kinds[i] == _CONTROL or token[:1] + token[-1:] == "[]" for i, token in enumerate(tokens)]
    pieces = [
        token if named else token[1:] if token.startswith("▁") else f"##{token}"
        for token, named in zip(tokens, is_name, strict=True)
    ]
    ids = {piece: i for i, piece in enumerate(pieces)}
    lower = all(named or token == token.lower() for token, named in zip(tokens, is_name, strict=True))
    lower = config.get("normalizer.lowercase", bool, lower)
    unknown = pieces[_token_id(config, tokens, "unknown_token_id", ids.get("[UNK]", 0))]
    tokenizer = library.Tokenizer(library.models.WordPiece(ids, unk_token=unknown))
    tokenizer.normalizer = library.normalizers.BertNormalizer(
        lowercase=lower, strip_accents=config.get("normalizer.strip_accents", bool, lower)
    )
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = library.decoders.WordPiece()
    values = dict(config.values)
    # These two come before what the file may have under the names of language models. So GGUF spells it.
    for mark, key, token in (("bos", "cls", "[CLS]"), ("eos", "seperator", "[SEP]")):
        if values.get(name := f"{key}_token_id") is not None:
            values[f"{mark}_token_id"] = _token_id(config, tokens, name)
        elif token in ids:
            values[f"{mark}_token_id"] = ids[token]
    values["add_eos_token"] = config.get("add_sep_token", bool, True)
    return tokenizer, _with_usual(Config.of(config.path, values, config.prefix), add_bos_token=True)


def _by_chances(config: Config, tokens: list[str], kinds: Array) -> tuple[Any, Config]:
    """A tokenizer of SentencePiece that finds the likeliest pieces; and the keys, with usual ones."""
    library, scores = require("tokenizers"), _numbers(config, "scores", "f", len(tokens))
    normalizers, before = library.normalizers, library.pre_tokenizers
    if not np.isfinite(scores).all():
        raise config.wrong("scores", float(scores[~np.isfinite(scores)][0]), "finite numbers")
    pairs = list(zip(tokens, scores.tolist(), strict=True))
    unknown = _token_id(config, tokens, "unknown_token_id", 2)
    model = library.models.Unigram(pairs, unk_id=unknown, byte_fallback=bool((kinds == _BYTE).any()))
    tokenizer, steps = library.Tokenizer(model), []
    if (table := config.values.get("precompiled_charsmap")) is not None:
        if not isinstance(table, np.ndarray) or table.dtype.itemsize != 1:
            raise config.wrong("precompiled_charsmap", table, "an array of bytes")
        steps.append(normalizers.Precompiled(table.tobytes()))
    if config.get("remove_extra_whitespaces", bool, True):
        steps += [normalizers.Strip(), normalizers.Replace(library.Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    scheme = "always" if config.get("add_space_prefix", bool, True) else "never"
    tokenizer.pre_tokenizer = before.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = library.decoders.Metaspace(prepend_scheme=scheme)
    return tokenizer, _with_usual(config, add_eos_token=True, eos_token_id=1)


def _spaced(
    config: Config,
    tokens: list[str],
    vocabulary: dict[str, int],
    merges: Sequence[tuple[str, ...]],
    begun: bool,
) -> Any:
    """A tokenizer of characters with marks for spaces, one before texts if the file says so, or `begun`."""
    library = require("tokenizers")
    unknown = tokens[_token_id(config, tokens, "unknown_token_id", 0)]
    model = library.models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = library.Tokenizer(model)
    prefix, normalizers, decoders = (
        config.get("add_space_prefix", bool, begun),
        library.normalizers,
        library.decoders,
    )
    steps = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ends = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    return tokenizer
