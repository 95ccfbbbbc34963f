"""Tokenizers of models' folders: tokenizer.json, and what other files change of it.

They are tokenizer_config.json of transformers, and the file of sentence-transformers' module Transformer.
"""

from __future__ import annotations

import base64
import copy
import json
import re
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

from fastattn._args.values import short
from fastattn.models._files import Config, ModelError, lfs_hint, read_json, require, tokenizer_config

# The module Transformer says what it is in the first of these that holds anything.
_SETTINGS = [
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
# Keys that it may have; these change nothing here.
_PLACES = {"trust_remote_code", "cache_dir", "revision", "code_revision", "token", "local_files_only"}
_OF_CONFIG = {*_PLACES, "use_cache", "attn_implementation", "use_memory_efficient_attention", "unpad_inputs"}
_OF_MODEL = {*_OF_CONFIG, "torch_dtype", "dtype", "device_map", "low_cpu_mem_usage", "use_safetensors",
             "add_pooling_layer"}  # fmt: skip
SIDES = "left", "right"
_CASES = {  # keys of transformers, and what the normalizer of BERT calls them
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
_OF_TOKENIZER = {*_PLACES, "model_max_length", "truncation_side", "padding_side", "use_fast", *_CASES}
_OF_CALL = {"padding", "return_tensors"}
# For each task, the model's output, and the module's name for it.
_TASKS = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "fill-mask": ("logits", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
    **dict.fromkeys(("text-generation", "any-to-any"), ("logits", "causal_logits")),
}
_KNOWN = {
    *("max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name"),
    *("model_kwargs", "model_args", "config_kwargs", "config_args", "processor_kwargs", "tokenizer_args"),
    *("processing_kwargs", "unpad_inputs", "cache_dir", "backend"),
}
LENGTHS = ("query_length", "document_length", "query_expansion")  # of a model with a vector of each token
_CASED = ("AlbertTokenizer", "DebertaV2Tokenizer")  # classes to which do_lower_case says something, too
GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")  # classes that know nothing of a model
_UNBOUNDED = 2**40  # tokens that no text has; files say 10**30, or 2**63 - 1, where there is no limit


def transformer_settings(folder: Path) -> Config:
    """Settings of the module Transformer; empty where the folder has none, or no modules.json names it."""
    config = Config.of(folder / _SETTINGS[0], {})
    if any((place / "modules.json").is_file() for place in (folder, *folder.parents[:2])):  # of a route
        for name in _SETTINGS:
            config = Config(folder / name, optional=True)
            if config.values:
                break
    return config


def check_transformer(folder: Path, task: str | None, read_elsewhere: tuple[str, ...]) -> None:
    """Raise if the module Transformer is to be other than it is here, for a model of the `task`, if known."""
    config = transformer_settings(folder)
    for key, value in config.values.items():
        if key not in (*_KNOWN, *read_elsewhere) and value is not None:
            raise config.wrong(key, value, "none of this name")
    said = config.one_of("transformer_task", _TASKS, task or "feature-extraction")
    if task is not None and (said, task) != ("any-to-any", "text-generation"):  # of texts they are the same
        config.refuse(transformer_task=task)
    for name, changes_nothing in (("model", _OF_MODEL), ("config", _OF_CONFIG)):
        for key in (f"{name}_args", f"{name}_kwargs"):
            _refuse_inner(config, key, config.get(key, dict, {}), changes_nothing)
    for key in ("tokenizer_args", "processor_kwargs"):
        _refuse_inner(config, key, config.get(key, dict, {}), _OF_TOKENIZER)
    processing = config.get("processing_kwargs", dict, {})
    for part in ("common", "text"):  # the others are of no text
        _refuse_inner(config, "processing_kwargs", processing.get(part) or {}, _OF_CALL)
    modalities: dict[str, Any] | None = config.get("modality_config", dict, {}) or None
    if modalities is not None:  # without it, the name of the output does not count
        output, name = _TASKS[said]
        text, wanted = modalities.get("text"), {"method": "forward", "method_output_name": output}
        if text != wanted:
            came = "'modality_config' has an unsupported 'text'"
            raise ModelError(f"{config.path}: {came}; only {wanted} is supported")
        if "message" in modalities and said in ("feature-extraction", "fill-mask", "sequence-classification"):
            came = "'modality_config' has 'message', with which texts go through a chat template"
            raise ModelError(f"{config.path}: {came}; expected 'text' alone, but for LogitScore")
        config.refuse(module_output_name=name)


def _refuse_inner(config: Config, key: str, given: Any, changes_nothing: set[str]) -> None:
    """Raise if the table under `key` says anything else."""
    names = given.keys() - changes_nothing if isinstance(given, dict) else {str(given)}
    others = sorted(map(str, names))
    if others:
        expected = f"none but {', '.join(sorted(changes_nothing))}"
        raise ModelError(f"{config.path}: {key!r} has {short(others[0])}; expected {expected}")


def length_limit(
    folder: Path, longest: int | None, asked: int | None, is_prompt: bool
) -> tuple[int | None, Path | str]:
    """The most tokens of a text of a model that takes `longest`, and the file that says so.

    `asked` says it, or the module Transformer; if neither does, tokenizer_config.json. A prompt of a model
    without a limit is never cut: its last words count most.
    """
    config = transformer_settings(folder)
    asked = asked or of_processor(config).optional_size("model_max_length")
    asked = asked or config.optional_size("max_seq_length")
    if asked is None and not (longest is None and is_prompt):
        config = tokenizer_config(folder)
        most = config.values.get("model_max_length")
        if not (type(most) is int and most > (longest or _UNBOUNDED)):
            asked = config.optional_size("model_max_length")
    if longest is not None and (asked is None or asked > longest):
        return longest, folder / "config.json" if folder.is_dir() else folder
    return asked, config.path


def open_tokenizer(
    folder: Path,
    limit: int | None,
    other: Callable[[Path], Any] | None,
    markers: tuple[str, ...],
) -> Any:
    """A `tokenizers.Tokenizer` that does not pad, and cuts at `limit`.

    Without tokenizer.json, `other` makes one. Of `markers`, those in the vocabulary become one token each.
    """
    tokenizers, tokenizer = require("tokenizers"), read(folder, other)
    tokenizer.no_padding()
    config, transformer = tokenizer_config(folder), transformer_settings(folder)
    processor = of_processor(transformer)
    for each in (config, processor):  # the second counts where both say something
        _normalize(tokenizer, each, config.values.get("tokenizer_class"))
    if transformer.get("do_lower_case", bool, False):
        normalizers, given = tokenizers.normalizers, tokenizer.normalizer
        both = [normalizers.Lowercase(), *([] if given is None else [given])]
        tokenizer.normalizer = normalizers.Sequence(both)
    if markers:
        tokens, how = _split(tokenizer, markers), {"normalized": False, "special": True}
        tokenizer.add_special_tokens([tokenizers.AddedToken(token, **how) for token in tokens])
    side = (tokenizer.truncation or {}).get("direction", "right")
    for each in (config, processor):
        side = each.one_of("truncation_side", SIDES, side)
    if limit is None:
        tokenizer.no_truncation()
    else:
        tokenizer.enable_truncation(limit, direction=side)
    return tokenizer


def read(folder: Path, other: Callable[[Path], Any] | None) -> Any:
    """The tokenizer as the folder has it."""
    path = folder / "tokenizer.json"
    if not path.exists():
        made = None if other is None else other(folder)
        if made is None:
            raise ModelError(f"{path} is missing; expected a tokenizer as the tokenizers library writes it")
        return made
    return opened(path)


def opened(path: Path) -> Any:
    """The tokenizer of a tokenizer.json; refused where it makes a text longer without bound."""
    of_json = require("tokenizers").Tokenizer.from_str
    if hint := lfs_hint(path):
        raise ModelError(hint)
    values = read_json(path)
    require_bounded(path, values)
    try:
        return of_json(json.dumps(values))  # what was checked: JSON may hold a key twice
    except Exception as error:
        if type(error) is not Exception:  # the library raises nothing narrower
            raise
        raise ModelError(f"{path} is no tokenizer: {error}") from error


def _split(tokenizer: Any, markers: tuple[str, ...]) -> Iterator[str]:
    """Yield the markers, or their first words, that are in the vocabulary and not one token yet."""
    for marker in markers:
        for token in (marker, *marker.split()[:1]):
            if tokenizer.token_to_id(token) is not None:
                if tokenizer.encode(token, add_special_tokens=False).tokens != [token]:
                    yield token
                break


def of_processor(transformer: Config) -> Config:
    """Settings of the tokenizer in those of the module Transformer."""
    config = copy.copy(transformer)
    name = "tokenizer_args" if "tokenizer_args" in transformer.values else "processor_kwargs"
    config.values = transformer.get(name, dict, {})
    return config


def _normalize(tokenizer: Any, config: Config, tokenizer_class: Any) -> None:
    """Set the case and accents of tokenizer_config.json, where that counts more than tokenizer.json."""
    normalizer = tokenizer.normalizer
    said = {key: config.get(key, bool) for key in _CASES if config.values.get(key) is not None}
    if not said or tokenizer_class in GENERIC:
        return
    if type(normalizer).__name__ == "BertNormalizer":
        for key, value in said.items():
            setattr(normalizer, _CASES[key], value)
        tokenizer.normalizer = normalizer
    elif str(tokenizer_class).startswith(_CASED) and "do_lower_case" in said:
        lowers = normalizer is not None and "A" not in normalizer.normalize_str("A")
        if lowers != said["do_lower_case"]:
            came = f"{config.path}: 'do_lower_case' is {said['do_lower_case']}"
            raise ModelError(f"{came}, unlike in tokenizer.json; expected the same")


# Growth of texts in a tokenizer.json: steps that make a text longer follow one another, and multiply.
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
        raise ModelError(f"{path} has the unknown step {short(kind)}; expected one of {expected}")
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
