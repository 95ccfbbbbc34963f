"""Models in GGUF files: values of config.json, names of tensors and tokenizers, made of what a file says."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._args.values import short
from fastattn._gguf import MAGIC, GgufFile, Strings
from fastattn.models._files import Config, ModelError, lfs_hint, require

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path

    from fastattn._args.types import Array

SUFFIX = ".gguf"
_MOST_PAIRS = 1 << 16  # of dimensions of a head

# By the file's `general.architecture`, the `model_type` of config.json, and whether the rows of each head of
# queries and keys are interleaved: there pairs of rotary positions are neighbours.
_ARCHITECTURES = {"llama": ("llama", True), "qwen2": ("qwen2", False), "qwen3": ("qwen3", False)}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_FACTORS = "rope_freqs.weight"  # what frequencies of rotary positions are divided by
# Keys under the architecture's name, and config.json's.
_SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
_SCALING = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # types of tokens


def is_file(path: Path) -> bool:
    """Tell whether the path is that of a GGUF file, by its name or its first bytes."""
    if not os.path.isfile(path):  # unlike Path.is_file(), it raises nothing for a name that is too long
        return False
    if path.suffix.lower() == SUFFIX:
        return True
    try:
        with open(path, "rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def opened(path: Path, stack: ExitStack) -> GgufFile:
    """The file, which `stack` closes."""
    file = stack.enter_context(_open(path))
    _, interleaved = _architecture(path, file.metadata)
    if interleaved:
        for name in file.names:
            found = _IN_BLOCK.fullmatch(name)
            if found and found[2] in ("attn_q", "attn_k"):
                file.interleaved[name] = _head_dim(path, file)
    return file


def _open(path: Path) -> GgufFile:
    try:
        return GgufFile(path, ModelError)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    except ModelError as error:
        raise ModelError(lfs_hint(path) or str(error)) from None


def described(path: Path) -> str:
    """The keys of a file, arrays by their sizes, and its tensors by type, as lines of text."""
    with _open(path) as file:
        named = ((name if name.isprintable() else short(name), x) for name, x in file.metadata.items())
        lines = [f"{name:40} {_shown(value)}" for name, value in named]
        kinds = Counter(file.kind(name) for name in file.names)
        sizes = dict.fromkeys(kinds, 0)
        for name in file.names:
            sizes[file.kind(name)] += math.prod(file.shape(name))
        lines += [f"{kind:40} {kinds[kind]} tensors, {sizes[kind]:,} numbers" for kind in kinds]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, Strings):
        return f"{value.number:,} strings"
    if isinstance(value, np.ndarray):
        return f"{value.size:,} numbers in {value.dtype}"
    return short(value)


def config_of(path: Path, file: GgufFile) -> Config:
    """The values that config.json would have; what would change results and is not known is refused."""
    said = Config.of(path, file.metadata)
    model_type, _ = _architecture(path, file.metadata)
    prefix = file.metadata["general.architecture"]
    parts = said.size("split.count", 1, low=0)
    if parts > 1:
        raise ModelError(f"{path}: 'split.count' is {parts}; expected a model in one file")
    for name in file.names:
        if _known(name) is None and name != _FACTORS:
            raise ModelError(f"{path}: the tensor {short(name)} is not known")
    experts = said.size(f"{prefix}.expert_count", 0, low=0)
    if experts:
        raise ModelError(
            f"{path}: '{prefix}.expert_count' is {experts}; only models without experts are supported"
        )
    if not said.get(f"{prefix}.attention.causal", bool, True):
        raise ModelError(f"{path}: '{prefix}.attention.causal' is False; expected True")
    values: dict[str, Any] = {"model_type": model_type}
    for key, name in _SIZES.items():
        if (value := file.metadata.get(f"{prefix}.{key}")) is not None:
            values[name] = value.tolist() if isinstance(value, np.ndarray) else value
    if model_type == "llama" and "sliding_window" in values:
        values["model_type"] = "mistral"
    if "token_embd.weight" in file.names:
        values["vocab_size"] = file.shape("token_embd.weight")[0]
    values["tie_word_embeddings"] = "output.weight" not in file.names
    values["attention_bias"] = "blk.0.attn_output.bias" in file.names
    head_dim = _head_dim(path, file)
    rotated = said.size(f"{prefix}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ModelError(f"{path}: '{prefix}.rope.dimension_count' is {rotated}; expected {head_dim}")
    values["head_dim"] = head_dim
    if scaling := _scaling(path, file, prefix):
        values["rope_scaling"] = scaling
    ends = [said.optional_id(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    values["eos_token_id"] = list(dict.fromkeys(i for i in ends if i is not None)) or None
    return Config.of(path, values)


def renamed(name: str) -> str:
    """The name of a tensor as transformers has it."""
    return _known(name) or name


def _known(name: str) -> str | None:
    """The name of a tensor as transformers has it; None for one that no model here has."""
    if found := _IN_BLOCK.fullmatch(name):
        number, part, kind = found.groups()
        return f"model.layers.{number}.{_BLOCK_NAMES[part]}.{kind}" if part in _BLOCK_NAMES else None
    stem, _, kind = name.rpartition(".")
    return f"{_NAMES[stem]}.{kind}" if stem in _NAMES and kind == "weight" else None


def _architecture(path: Path, metadata: dict[str, Any]) -> tuple[str, bool]:
    return Config.of(path, metadata).choice("general.architecture", _ARCHITECTURES)


def _head_dim(path: Path, file: GgufFile) -> int:
    """Features of a head of queries or keys."""
    prefix = file.metadata["general.architecture"]
    config = Config.of(path, file.metadata)
    key, value = (config.optional_size(f"{prefix}.attention.{name}_length") for name in ("key", "value"))
    if key is None:
        key = config.divided(f"{prefix}.embedding_length", f"{prefix}.attention.head_count")
    if value not in (None, key):
        raise config.wrong(f"{prefix}.attention.value_length", value, f"that of keys, {key}")
    return key


def _scaling(path: Path, file: GgufFile, prefix: str) -> dict[str, Any]:
    """The scaling of rotary positions, as config.json would say it."""
    said = Config.of(path, file.metadata)
    begin = f"{prefix}.rope.scaling."
    kind = said.get(f"{begin}type", str, "none")
    given = {key.removeprefix(begin): x for key, x in file.metadata.items() if key.startswith(begin)}
    if unknown := sorted(given.keys() - {*_SCALING, "finetuned"}):
        raise ModelError(
            f"{path}: {begin + unknown[0]!r} is not known; expected one of {', '.join(_SCALING)}"
        )
    linear = said.number(f"{prefix}.rope.scale_linear", 1.0)
    if linear != 1:
        raise ModelError(f"{path}: '{prefix}.rope.scale_linear' is {linear}; expected '{begin}type'")
    if _FACTORS in file.names:
        factors, expected = _factors(file), f"float32 numbers above 0, as many as {said.path} rotates pairs"
        if factors is None or kind != "none" or len(factors) != _head_dim(path, file) // 2:
            came = "there is a scaling, too" if kind != "none" else "there are others"
            raise ModelError(f"{path}: {_FACTORS!r}: {came}; expected {expected}")
        each = {"short_factor": factors, "long_factor": factors}
        return {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0,
                "original_max_position_embeddings": 2, **each}  # fmt: skip
    return {} if kind == "none" else {_SCALING[key]: x for key, x in given.items() if key in _SCALING}


def _factors(file: GgufFile) -> list[float] | None:
    """Divisors of the frequencies; None if they are not numbers above 0."""
    if (
        file.kind(_FACTORS) != "F32"
        or len(file.shape(_FACTORS)) != 1
        or file.shape(_FACTORS)[0] > _MOST_PAIRS
    ):
        return None
    factors = file.get_tensor(_FACTORS)
    return factors.tolist() if np.isfinite(factors).all() and (factors > 0).all() else None


# What texts are cut into before pairs are merged, by `tokenizer.ggml.pre`: the models' own expressions.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_BY_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _ENDS
_LLAMA3, _QWEN2 = (_CONTRACTIONS + _BY_WORDS % digits for digits in (r"\p{N}{1,3}", r"\p{N}"))
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
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _Words(_LLAMA3, whole=True, begun=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Words(_LLAMA3)),
    "qwen2": _Words(_QWEN2, composed=True),
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
    return Config.of(path, values)


def _tokenizer(path: Path) -> Config:
    """The keys of the tokenizer, without the prefix "tokenizer.ggml."."""
    with _open(path) as file:
        keys = [(name.removeprefix("tokenizer."), x) for name, x in file.metadata.items()]
    return Config.of(path, {name.removeprefix("ggml."): x for name, x in keys})


def tokenizer_of(path: Path) -> Any:
    """The file's tokenizer, a `tokenizers.Tokenizer`."""
    config = _tokenizer(path)
    try:
        return _made(config)
    except (ModelError, ImportError):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{path}: its tokenizer cannot be made: {error}") from error


def _made(config: Config) -> Any:
    library, tokens = require("tokenizers"), _list(config, "tokens", str)
    kinds = _numbers(config, "token_type", "iu", len(tokens), np.ones(len(tokens), np.int32))
    makers: dict[str, Any] = {"gpt2": _bytewise, "llama": _by_scores}
    tokenizer, begun = config.choice("model", makers)(config, tokens, kinds)
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        found = [
            library.AddedToken(tokens[i], normalized=False, special=special)
            for i in np.flatnonzero(kinds == kind)
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(found)
    marks = {"begin": _mark(config, tokens, "bos", begun), "end": _mark(config, tokens, "eos", False)}
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
        raise ModelError(
            f"{config.path}: 'tokenizer.ggml.{name}' is {short(found)}; expected an array of {expected}"
        )
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


def _mark(config: Config, tokens: list[str], name: str, usual: bool) -> tuple[str, int] | None:
    """The token that stands before or after texts, if one does, and its id."""
    if not config.get(f"add_{name}_token", bool, usual):
        return None
    i = _token_id(config, tokens, f"{name}_token_id")
    return tokens[i], i


def _token_id(config: Config, tokens: list[str], name: str, default: int | None = None) -> int:
    i = config.size(name, low=0) if default is None else config.size(name, default, low=0)
    if i >= len(tokens):
        raise config.wrong(name, i, f"less than the number of tokens, {len(tokens)}")
    return i


def _bytewise(config: Config, tokens: list[str], kinds: Array) -> tuple[Any, bool]:
    """A tokenizer that merges pairs of bytes, as GPT-2's; and whether texts begin with a mark."""
    library = require("tokenizers")
    words = config.choice("pre", _WORDS)
    pairs = [tuple(pair.split(" ", 1)) for pair in _list(config, "merges", str)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    for pair in pairs:
        if len(pair) != 2 or not all(part in vocabulary for part in (*pair, "".join(pair))):
            raise ModelError(
                f"{config.path}: 'tokenizer.ggml.merges' has {short(' '.join(pair))}; expected two tokens"
            )
    tokenizer = library.Tokenizer(library.models.BPE(vocabulary, pairs, ignore_merges=words.whole))
    before = library.pre_tokenizers
    steps = [before.Digits(individual_digits=True)] if words.digits else []
    if words.pattern is not None:
        steps.append(before.Split(library.Regex(words.pattern), "isolated"))
    steps.append(before.ByteLevel(add_prefix_space=False, use_regex=words.pattern is None))
    tokenizer.pre_tokenizer = before.Sequence(steps)
    tokenizer.decoder = library.decoders.ByteLevel()
    if words.composed:
        tokenizer.normalizer = library.normalizers.NFC()
    return tokenizer, words.begun


def _by_scores(config: Config, tokens: list[str], kinds: Array) -> tuple[Any, bool]:
    """A tokenizer of SentencePiece, which merges by scores; and that its texts begin with a mark."""
    library = require("tokenizers")
    scores = _numbers(config, "scores", "f", len(tokens))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    lengths = sorted({len(token) for token in tokens})
    cuts = (
        (-scores[i], vocabulary[token[:at]], vocabulary[token[at:]])
        for i, token in enumerate(tokens)
        if kinds[i] not in (_CONTROL, _BYTE, _UNKNOWN)
        for at in takewhile(len(token).__gt__, lengths)
        if at and token[:at] in vocabulary and token[at:] in vocabulary
    )
    merges = [(tokens[left], tokens[right]) for _, left, right in sorted(cuts)]
    unknown = tokens[_token_id(config, tokens, "unknown_token_id", 0)]
    model = library.models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = library.Tokenizer(model)
    prefix, normalizers, decoders = (
        config.get("add_space_prefix", bool, True),
        library.normalizers,
        library.decoders,
    )
    steps = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ends = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    return tokenizer, True
