"""Folders of ColBERT models: those of sentence-transformers, of PyLate, and of Stanford's own code."""

from __future__ import annotations

import string
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastattn import ops
from fastattn._args.values import short
from fastattn.models._files import Config, ModelError
from fastattn.models._multi_vector import Expansion, MultiVectorEncoder, Settings
from fastattn.models._sentences import MASK, Dense, Normalize
from fastattn.models._tokenizer import LENGTHS, transformer_settings

if TYPE_CHECKING:
    from fastattn.models._blocks import Source
    from fastattn.models._encoder import Encoder

STANFORD = "HF_ColBERT"  # of `architectures` in config.json
_USUAL = 32  # tokens of a query
_SIMILARITIES = ("maxsim", "meanmaxsim")
_PREFIXES = {"query_prefix": "query", "document_prefix": "document"}
_PYLATE = (*LENGTHS, *_PREFIXES, "do_query_expansion", "attend_to_expansion_tokens", "skiplist_words")
_STRATEGIES = {"fixed": True, "min": False}
_ALL_ATTEND = ("deberta-v2",)  # families of which every token is attended


def multi_vector_encoder(
    source: Source, encoder: Encoder, modules: list[tuple[str, str]]
) -> MultiVectorEncoder:
    """With the modules of modules.json; without any, as Stanford's code writes a folder."""
    folder, sentences = source.folder, encoder.sentences
    saved = Config(folder / "config_sentence_transformers.json", optional=True)
    prompts, layers, features = dict(sentences.prompts), sentences.modules, sentences.features
    if modules:
        prefixes = {task: saved.get(key, str, "") for key, task in _PREFIXES.items() if key in saved.values}
        for task, prefix in prefixes.items():
            prompts[task] = prefix + prompts[task].removeprefix(prefix)
        lengths, words = _pylate(saved), _words(saved, "skiplist_words", string.punctuation)
    else:
        metadata = Config(folder / "artifact.metadata", optional=True)
        markers = (("query", "query_token_id", "[unused0]"), ("document", "doc_token_id", "[unused1]"))
        prefixes = {task: f"{metadata.get(key, str, usual)} " for task, key, usual in markers}
        prompts |= {task: prefix for task, prefix in prefixes.items() if not prompts[task]}
        lengths = _stanford(metadata)
        words = tuple(string.punctuation) if metadata.get("mask_punctuation", bool, True) else ()
        linear = _linear(source, encoder.hidden_size)
        layers, features = (linear,), linear.weight.out_features
    skipped_in: tuple[str, ...] = ("document",)
    mask = next((inner for kind, inner in modules if kind == MASK), None)
    if mask is None:
        layers = (*layers, Normalize())
    else:
        config = Config(folder / mask / "config.json")
        config.refuse(keep_only_token_ids=[])
        words, skipped_in = _words(config, "skiplist_words"), _words(config, "skiplist_tasks", skipped_in)

    own = transformer_settings(folder)
    own.values = {**lengths, **own.values}
    expansion, query_length = _expansion(own), own.optional_size("query_length")
    if expansion is not None:
        _require_fitting(own, expansion, query_length, encoder)
        most = max(query_length or 0, expansion.length)
        query_length = expansion.length if expansion.fixed else query_length and most
    asked = {None: None, "query": query_length, "document": own.optional_size("document_length")}
    text = replace(encoder.text, markers=tuple(prefixes.values()))
    similarity = saved.values.get("similarity_fn_name")
    return MultiVectorEncoder(
        encoder=replace(encoder, text=text, sentences=replace(sentences, prompts=prompts)),
        modules=layers,
        features=features,
        settings=Settings(
            expansion, words, skipped_in, similarity if similarity in _SIMILARITIES else _SIMILARITIES[0]
        ),
        texts={task: text if most is None else replace(text, asked=most) for task, most in asked.items()},
    )


def _pylate(saved: Config) -> dict[str, Any]:
    """What PyLate says in config_sentence_transformers.json, in the words of sentence-transformers."""
    values = saved.values
    if not any(key in values for key in _PYLATE):
        return {}
    found: dict[str, Any] = {key: saved.optional_size(key) for key in LENGTHS[:2]}
    if "query_expansion" in values:
        _expansion(saved)  # an error names this file
        found["query_expansion"] = values["query_expansion"]
    elif saved.get("do_query_expansion", bool, True):
        attend = saved.get("attend_to_expansion_tokens", bool, False)
        length = found.pop("query_length") or _USUAL
        found["query_expansion"] = {"strategy": "fixed", "attend": attend, "length": length}
    return found


def _stanford(metadata: Config) -> dict[str, Any]:
    attend, length = metadata.get("attend_to_mask_tokens", bool, False), metadata.size("query_maxlen", _USUAL)
    expansion = {"strategy": "fixed", "attend": attend, "length": length}
    return {"query_expansion": expansion, "document_length": metadata.optional_size("doc_maxlen")}


def _linear(source: Source, hidden: int) -> Dense:
    """The map behind a BERT, whose tensor lies beside the others."""
    name, tensors = "linear.weight", source.tensors
    size = len(tensors[name]) if name in tensors else 128
    tensors.expect({name: (size, hidden)}, ("linear.",))
    return Dense(ops.pack(source.vector(name)), None, "Identity")


def _expansion(config: Config) -> Expansion | None:
    """What `query_expansion` says."""
    inner = config.inner("query_expansion", {})
    if not inner.values:
        return None
    token = inner.get("token", str) if "token" in inner.values else None
    fixed, attend = inner.choice("strategy", _STRATEGIES), inner.get("attend", bool, False)
    return Expansion(inner.size("length"), fixed, attend, token)


def _require_fitting(
    config: Config, expansion: Expansion, query_length: int | None, encoder: Encoder
) -> None:
    """Raise unless queries can have that length, and the model takes tokens that others do not attend."""
    length, most = expansion.length, encoder.max_length
    if query_length is not None and query_length < length:
        expected = f"at least the 'length' of 'query_expansion', {length}"
        raise ModelError(f"{config.path}: 'query_length' is {query_length}; expected {expected}")
    if most is not None and length > most:
        came = f"'length' of 'query_expansion' is {length}"
        raise ModelError(f"{config.path}: {came}; expected at most {most}, the model's positions")
    if not expansion.attend and encoder.model_type in _ALL_ATTEND:
        came = f"'attend' of 'query_expansion' is false for {encoder.model_type}"
        raise ModelError(f"{config.path}: {came}; expected true")


def _words(config: Config, key: str, usual: Any = ()) -> tuple[str, ...]:
    """A list of strings, or one."""
    said = config.values.get(key)
    said = [said] if isinstance(said, str) else said
    if said is None:
        return tuple(usual)
    if not isinstance(said, list) or not all(isinstance(word, str) for word in said):
        raise ModelError(f"{config.path}: {key!r} is {short(said)}; expected a list of strings")
    return tuple(said)
