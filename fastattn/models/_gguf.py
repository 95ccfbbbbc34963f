"""Models in GGUF files: values of config.json, names of tensors and tokenizers, made of what a file says."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._args.values import short
from fastattn._gguf import GgufFile, Strings
from fastattn.models._files import Config, ModelError, lfs_hint, require

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path

    from fastattn._args.types import Array

SUFFIX = ".gguf"

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


def opened(path: Path, stack: ExitStack) -> GgufFile:
    """The file, which `stack` closes."""
    try:
        file = stack.enter_context(GgufFile(path, ModelError))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    except ModelError as error:
        raise ModelError(lfs_hint(path) or str(error)) from None
    _, interleaved = _architecture(path, file.metadata)
    if interleaved:
        for name in file.names:
            found = _IN_BLOCK.fullmatch(name)
            if found and found[2] in ("attn_q", "attn_k"):
                file.interleaved[name] = _head_dim(path, file)
    return file


def config_of(path: Path, file: GgufFile) -> Config:
    """The values that config.json would have."""
    metadata = file.metadata
    model_type, _ = _architecture(path, metadata)
    prefix = metadata["general.architecture"]
    values: dict[str, Any] = {"model_type": model_type}
    for key, name in _SIZES.items():
        if (value := metadata.get(f"{prefix}.{key}")) is not None:
            values[name] = value.tolist() if isinstance(value, np.ndarray) else value
    if metadata.get(f"{prefix}.expert_count"):
        count = short(metadata[f"{prefix}.expert_count"])
        raise ModelError(
            f"{path}: '{prefix}.expert_count' is {count}; only models without experts are supported"
        )
    if model_type == "llama" and "sliding_window" in values:
        values["model_type"] = "mistral"
    if "token_embd.weight" in file.names:
        values["vocab_size"] = file.shape("token_embd.weight")[0]
    values["tie_word_embeddings"] = "output.weight" not in file.names
    values["attention_bias"] = "blk.0.attn_output.bias" in file.names
    rotated = metadata.get(f"{prefix}.rope.dimension_count")
    head_dim = _head_dim(path, file)
    if rotated is not None and rotated != head_dim:
        raise ModelError(f"{path}: '{prefix}.rope.dimension_count' is {short(rotated)}; expected {head_dim}")
    values["head_dim"] = head_dim
    scaling = _scaling(path, file, prefix)
    if scaling:
        values["rope_scaling"] = scaling
    if (end := metadata.get("tokenizer.ggml.eos_token_id")) is not None:
        turn = metadata.get("tokenizer.ggml.eot_token_id")
        values["eos_token_id"] = list(dict.fromkeys([end] if turn is None else [end, turn]))
    return Config.of(path, values)


def renamed(name: str) -> str:
    """The name of a tensor as transformers has it."""
    if found := _IN_BLOCK.fullmatch(name):
        number, part, kind = found.groups()
        return f"model.layers.{number}.{_BLOCK_NAMES.get(part, part)}.{kind}"
    stem, _, kind = name.rpartition(".")
    return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name


def _architecture(path: Path, metadata: dict[str, Any]) -> tuple[str, bool]:
    said = metadata.get("general.architecture")
    if said not in _ARCHITECTURES:
        expected = f"expected one of {', '.join(_ARCHITECTURES)}"
        raise ModelError(f"{path}: 'general.architecture' is {short(said)}; {expected}")
    return _ARCHITECTURES[said]


def _head_dim(path: Path, file: GgufFile) -> int:
    """Features of a head of queries or keys."""
    prefix = file.metadata["general.architecture"]
    config = Config.of(path, file.metadata)
    said = config.optional_size(f"{prefix}.attention.key_length")
    if said is not None:
        config.refuse(**{f"{prefix}.attention.value_length": said})
        return said
    return config.divided(f"{prefix}.embedding_length", f"{prefix}.attention.head_count")


def _scaling(path: Path, file: GgufFile, prefix: str) -> dict[str, Any]:
    """The scaling of rotary positions, as config.json would say it."""
    said = {name: file.metadata.get(f"{prefix}.rope.scaling.{key}") for key, name in _SCALING.items()}
    scaling = {name: value for name, value in said.items() if value is not None}
    if _FACTORS in file.names:
        factors = file.get_tensor(_FACTORS)
        if not (np.isfinite(factors).all() and (factors > 0).all()):
            raise ModelError(f"{path}: {_FACTORS!r} has {short(factors)}; expected numbers above 0")
        each = {"short_factor": factors.tolist(), "long_factor": factors.tolist()}
        return {"rope_type": "longrope", "attention_factor": 1.0, **each}
    return {} if scaling.get("rope_type", "none") == "none" else scaling


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
    """How texts become words."""

    pattern: str | None = None  # None: GPT-2's
    digits: bool = False  # each digit is a word, before the pattern
    whole: bool = False  # a word that is a token is not made of merges


_WORDS = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "jina-v2-code", "gpt-neox"), _Words()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _Words(digits=True)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _Words(_LLAMA3, whole=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Words(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), _Words(_QWEN2)),
    **dict.fromkeys(("gpt-4o", "llama4"), _Words(_by_case(r"\p{N}{1,3}", _CONTRACTIONS + "?"))),
    "tekken": _Words(_by_case(r"\p{N}", ""), whole=True),
}


def tokenizer_config(path: Path) -> Config:
    """What tokenizer_config.json would say: the chat template, and special tokens."""
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
    with GgufFile(path, ModelError) as file:
        keys = [(name.removeprefix("tokenizer."), x) for name, x in file.metadata.items()]
    return Config.of(path, {name.removeprefix("ggml."): x for name, x in keys})


def tokenizer_of(path: Path) -> Any:
    """The file's tokenizer, a `tokenizers.Tokenizer`."""
    config = _tokenizer(path)
    metadata = config.values
    tokens = _list(config, "tokens", str)
    kinds = metadata.get("token_type", np.ones(len(tokens), np.int32))
    if len(kinds) != len(tokens):
        raise ModelError(
            f"{path}: 'tokenizer.ggml.token_type' has {len(kinds)} numbers for {len(tokens)} tokens"
        )
    makers = {"gpt2": _bytewise, "llama": _by_scores}
    tokenizer = config.choice("model", makers)(config, tokens, kinds)
    library = require("tokenizers")
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        found = [
            library.AddedToken(tokens[i], normalized=False, special=special)
            for i in np.flatnonzero(kinds == kind)
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(found)
    usual = metadata["model"] == "llama" or metadata.get("pre") in (
        "llama-bpe",
        "llama3",
        "llama-v3",
        "tekken",
    )
    before = _marks(config, tokens, "bos", usual)
    after = _marks(config, tokens, "eos", False)
    if before or after:
        single = [*(token for token, _ in before), "$A", *(token for token, _ in after)]
        pair = [
            *single,
            *(f"{token}:1" for token, _ in before),
            "$B:1",
            *(f"{token}:1" for token, _ in after),
        ]
        tokenizer.post_processor = library.processors.Sequence(
            [
                *([tokenizer.post_processor] if tokenizer.post_processor is not None else []),
                library.processors.TemplateProcessing(single, pair, [*before, *after]),
            ]
        )
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


def _marks(config: Config, tokens: list[str], name: str, usual: bool) -> list[tuple[str, int]]:
    """The token that stands before or after texts, if one does, and its id."""
    if not config.get(f"add_{name}_token", bool, usual):
        return []
    i = config.size(f"{name}_token_id", low=0)
    if i >= len(tokens):
        raise config.wrong(f"{name}_token_id", i, f"less than the number of tokens, {len(tokens)}")
    return [(tokens[i], i)]


def _bytewise(config: Config, tokens: list[str], kinds: Array) -> Any:
    """A tokenizer that merges pairs of bytes, as GPT-2's."""
    library = require("tokenizers")
    words = config.choice("pre", _WORDS, "default")
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
    return tokenizer


def _by_scores(config: Config, tokens: list[str], kinds: Array) -> Any:
    """A tokenizer of SentencePiece that merges the pair whose token has the best score."""
    library = require("tokenizers")
    scores = _list(config, "scores", float)
    if len(scores) != len(tokens):
        raise ModelError(
            f"{config.path}: 'tokenizer.ggml.scores' has {len(scores)} numbers for {len(tokens)} tokens"
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    cuts = (
        (-scores[i], vocabulary[token[:at]], vocabulary[token[at:]])
        for i, token in enumerate(tokens)
        if kinds[i] not in (_CONTROL, _BYTE, _UNKNOWN)
        for at in range(1, len(token))
        if token[:at] in vocabulary and token[at:] in vocabulary
    )
    merges = [(tokens[left], tokens[right]) for _, left, right in sorted(cuts)]
    unknown = tokens[config.size("unknown_token_id", 0, low=0)]
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
    return tokenizer
