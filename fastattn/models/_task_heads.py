"""Models that are an encoder with a head: the names of their tensors, and what their folders say of them.

Heads score texts or tokens, make sparse vectors, or a vector of each token, as ColBERT: its folders are those
of sentence-transformers and of PyLate.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastattn import ops
from fastattn._args.packed import PackedLinear
from fastattn._args.types import Array
from fastattn._args.values import short
from fastattn._engine.steps import NormStep
from fastattn.models._blocks import ACTIVATIONS as OURS
from fastattn.models._chat import ChatTemplate
from fastattn.models._classify import CrossEncoder
from fastattn.models._encoder import Encoder
from fastattn.models._files import Config, ModelError, sentences_config
from fastattn.models._modules import MASK, SCORE, is_cross_encoder, is_multi_vector, modules_of
from fastattn.models._multi_vector import Expansion, MultiVectorEncoder, Settings
from fastattn.models._sentences import ACTIVATIONS, Dense, LayerNorm, Normalize, Pooling
from fastattn.models._similarity import SIMILARITIES
from fastattn.models._source import Rows, Source
from fastattn.models._sparse import FUNCTIONS, STRATEGIES, Head, SparseEncoder, SpladePooling
from fastattn.models._tensors import Tensors
from fastattn.models._tokenizers import LENGTHS, transformer_settings

_LATE = "late"  # of `classifier_pooling`: the mean of the scores of all tokens
_POOLINGS = {"cls": Pooling(("cls",)), "mean": Pooling(("mean",))}  # by `classifier_pooling`
_EUROBERT = {"bos": _POOLINGS["cls"], "mean": _POOLINGS["mean"], _LATE: _POOLINGS["mean"]}


class HeadNames(NamedTuple):
    """Names of the linear maps of a head, and of the activation between them."""

    inner: str | None
    outer: str
    activation: str = "Tanh"
    norm: str | None = None  # after the activation
    last: bool = False  # of the last token, and without a bias; else of the first one, or as config.json says
    poolings: Mapping[str, Pooling] = _POOLINGS  # by `classifier_pooling`, and its default
    pooled: str = "cls"


class VocabularyNames(NamedTuple):
    """Names of the tensors of a masked language model's head."""

    inner: str
    norm: str
    output: str  # if its weight is not the table of tokens
    bias: str  # if it is
    activation: str | None = None  # the key of config.json that names it; "gelu" without
    table: str = "embeddings.word_embeddings"


# By the end of a name in `architectures`, and by `model_type`.
_TEXTS = "ForSequenceClassification"
_TEXT_HEADS = {
    **dict.fromkeys(("bert", "new", "gte", "nomic_bert"), HeadNames("pooler.dense", "classifier")),
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "camembert", "mpnet", "jina_embeddings_v3"),
        HeadNames("classifier.dense", "classifier.out_proj"),
    ),
    "distilbert": HeadNames("pre_classifier", "classifier", "ReLU"),
    "albert": HeadNames("pooler", "classifier"),
    "deberta-v2": HeadNames("pooler.dense", "classifier", "GELU"),
    "modernbert": HeadNames("head.dense", "classifier", "GELU", "head.norm"),
    "eurobert": HeadNames("dense", "classifier", "GELU", poolings=_EUROBERT, pooled=_LATE),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), HeadNames(None, "score", last=True)),
}
_VOCABULARY_HEADS = {
    "bert": VocabularyNames(
        inner="cls.predictions.transform.dense",
        norm="cls.predictions.transform.LayerNorm",
        output="cls.predictions.decoder",
        bias="cls.predictions.bias",
        activation="hidden_act",
    ),
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "camembert", "jina_embeddings_v3"),
        VocabularyNames("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias"),
    ),
    "distilbert": VocabularyNames(
        "vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias", "activation"
    ),
}
_LANGUAGE_MODELS = ("llama", "mistral", "qwen2", "qwen3")  # of LogitScore
_STANFORD = "HF_ColBERT"  # of `architectures` in config.json
_QUERY_LENGTH = 32  # tokens of a query
_BY_TOKEN = ("maxsim", "meanmaxsim")
_PREFIXES = {"query_prefix": "query", "document_prefix": "document"}
_PYLATE = (*LENGTHS, *_PREFIXES, "do_query_expansion", "attend_to_expansion_tokens", "skiplist_words")
_STRATEGIES = {"fixed": True, "min": False}
_ALL_ATTEND = ("deberta-v2",)  # families of which every token is attended


def with_head(
    source: Source, encoder: Encoder
) -> Encoder | CrossEncoder | SparseEncoder | MultiVectorEncoder:
    """The encoder, with the head that the folder says it has; heads that make no scores are left out.

    Where modules.json makes vectors of texts, that counts.
    """
    task, modules = source.config.architecture, modules_of(source.outer, source.route)
    if modules and modules[-1][0] == "SpladePooling":
        return _sparse_encoder(source, encoder, modules[-1][1])
    if modules and modules[-1][0] == SCORE:
        activation = _activation(source.folder, source.config, 1)
        return _logit_score_encoder(source, encoder, modules[-1][1], activation)
    if task == _STANFORD and not modules:
        came = f"{source.config.path}: 'architectures' has {_STANFORD!r}"
        how = "sentence_transformers.MultiVectorEncoder(folder).save_pretrained(path) writes one"
        raise ModelError(f"{came}; expected a folder with modules.json: {how}")
    if is_multi_vector(modules):
        return _multi_vector_encoder(source, encoder, modules)
    if task.endswith("ForTokenClassification") and not modules:
        came = f"{source.config.path}: 'architectures' has {short(task)}, which scores tokens"
        raise ModelError(f"{came}; expected an encoder, or a head for texts")
    if modules or not task.endswith(_TEXTS):
        if is_cross_encoder(source.folder):
            said = short(source.config.values.get("architectures"))
            came = f"'architectures' is {said}, and the folder is one of a CrossEncoder"
            raise ModelError(f"{source.config.path}: {came}; expected one that ends with {_TEXTS}")
        return encoder
    names = _TEXT_HEADS.get(encoder.model_type)
    if names is None:
        expected = f"a head of {', '.join(_TEXT_HEADS)}"
        raise ModelError(f"{source.config.path}: 'architectures' has {short(task)}; expected {expected}")
    found = source.config.get("id2label", dict, {})
    count = len(found) or source.config.size("num_labels", 2)
    labels = tuple(str(found.get(str(i), f"LABEL_{i}")) for i in range(count))
    head = _read(source, names, encoder, count)
    activation = _activation(source.folder, source.config, count)
    if names.last:
        return CrossEncoder(encoder, head, labels, activation, Pooling(("lasttoken",)))
    pooling = source.config.choice("classifier_pooling", names.poolings, names.pooled)
    said = source.config.get("classifier_pooling", str, names.pooled)
    if names.pooled == _LATE:
        source.config.refuse(clf_pooling=said)  # its name in older files
    return CrossEncoder(encoder, head, labels, activation, pooling, late=said == _LATE)


def _read(source: Source, names: HeadNames, encoder: Encoder, count: int) -> tuple[Dense | LayerNorm, ...]:
    """The layers one after another; they are small, and kept in the type that the kernels compute in."""
    config, hidden = source.config, encoder.hidden_size
    config.refuse(pooler_hidden_act="gelu", classifier_activation="gelu")  # DeBERTa's and ModernBERT's
    has_inner_bias = names.norm is None or config.get("classifier_bias", bool, False)
    has_norm_bias = names.norm is not None and config.get("norm_bias", bool, False)

    def vector(name: str, n: int) -> Array:
        return source.vector(Rows(name, (n,)))

    def dense(name: str, out: int, activation: str, biased: bool) -> Dense:
        weight = source.pack([Rows(f"{name}.weight", (out, hidden))], stored=source.precision.lane.name)
        bias = vector(f"{name}.bias", out) if biased else None
        return Dense(weight, bias, ACTIVATIONS[activation], tanh=activation == "Tanh")

    def read() -> tuple[Dense | LayerNorm, ...]:
        layers: list[Dense | LayerNorm] = []
        if names.inner is not None:
            layers.append(dense(names.inner, hidden, names.activation, has_inner_bias))
        if names.norm is not None:
            bias = vector(f"{names.norm}.bias", hidden) if has_norm_bias else None
            layers.append(LayerNorm(vector(f"{names.norm}.weight", hidden), bias, _eps(encoder)))
        return (*layers, dense(names.outer, count, "Identity", not names.last))

    own = "classifier.", "score.", *(("pooler.",) if names.inner == "pooler.dense" else ())
    return source.checked(read, own=own)


def _eps(encoder: Encoder) -> float:
    """The eps of a head's norm: in every family that of the encoder's norms."""
    return next(step.eps for step in encoder.program.steps if isinstance(step, NormStep))


def _activation(folder: Path, config: Config, num_labels: int) -> str:
    """Name of the activation of logits: sentence-transformers has had three places for it."""
    settings = sentences_config(folder)
    inner = config.get("sentence_transformers", dict, {})
    keys = (
        (settings.path, "activation_fn", settings.values),
        (config.path, "activation_fn", inner),
        (config.path, "sbert_ce_default_activation_function", config.values),
    )
    for path, key, values in keys:
        said = values.get(key)
        if said is not None:
            name = said.rpartition(".")[2] if isinstance(said, str) else ""
            if name not in ACTIVATIONS:
                expected = f"one of {', '.join(ACTIVATIONS)}"
                raise ModelError(f"{path}: {key!r} is {short(said)}; expected {expected}")
            return name
    return "Sigmoid" if num_labels == 1 else "Identity"


def _sparse_encoder(source: Source, encoder: Encoder, inner: Path) -> SparseEncoder:
    """Read the head of a masked language model, pooled as the folder `inner` says."""
    config = source.config
    names = _VOCABULARY_HEADS.get(encoder.model_type)
    if names is None:
        expected = f"one of {', '.join(_VOCABULARY_HEADS)}, or another module"
        came = f"'model_type' of SpladePooling is {encoder.model_type!r}"
        raise ModelError(f"{config.path}: {came}; expected {expected}")
    pooling = Config(inner / "config.json")
    settings = sentences_config(source.outer)
    splade = SpladePooling(
        pooling.one_of("pooling_strategy", STRATEGIES, "max"),
        pooling.one_of("activation_function", FUNCTIONS, "relu"),
        settings.optional_size("max_active_dims"),
    )
    similarity = settings.one_of("similarity_fn_name", SIMILARITIES, "dot")

    tied = config.get("tie_word_embeddings", bool, True)
    output = source.tied(f"{names.table}.weight", f"{names.output}.weight", tied)
    bias = source.tied(names.bias, f"{names.output}.bias", tied)
    hidden, vocab = encoder.hidden_size, encoder.vocab_size
    activation = "gelu" if names.activation is None else config.choice(names.activation, OURS, "gelu")
    rounded = source.precision.activations

    def vector(name: str, n: int = hidden) -> Array:
        return source.vector(Rows(name, (n,)))

    def read() -> Head:
        weight = source.pack([Rows(f"{names.inner}.weight", (hidden, hidden))])
        dense = Dense(weight, vector(f"{names.inner}.bias"), activation, rounded=rounded)
        norm = LayerNorm(vector(f"{names.norm}.weight"), vector(f"{names.norm}.bias"), _eps(encoder))
        weight = source.pack([Rows(output, (vocab, hidden))])
        return dense, norm, Dense(weight, vector(bias, vocab), rounded=rounded)

    return SparseEncoder(encoder, source.checked(read, own=()), splade, similarity)


def _logit_score_encoder(source: Source, encoder: Encoder, inner: Path, activation: str) -> CrossEncoder:
    """Read the score of a last token, as of Qwen3-Reranker: the logit of "yes" less that of "no".

    The folder `inner` of the module LogitScore says which tokens these are.
    """
    if encoder.model_type not in _LANGUAGE_MODELS:
        came = f"'model_type' of LogitScore is {encoder.model_type!r}"
        raise ModelError(f"{source.config.path}: {came}; expected one of {', '.join(_LANGUAGE_MODELS)}")
    config = Config(inner / "config.json")
    config.refuse(module_input_name="causal_logits")
    names = ["true_token_id"]
    if config.values.get("false_token_id") is not None:  # else the first one's logit is the score
        names.append("false_token_id")
    ids = [config.size(name, low=0) for name in names]
    for name, token in zip(names, ids, strict=True):
        if token >= encoder.vocab_size:
            raise config.wrong(name, token, f"less than 'vocab_size' of config.json, {encoder.vocab_size}")
    tied = source.config.get("tie_word_embeddings", bool, False)
    output = source.tied("embed_tokens.weight", "lm_head.weight", tied)
    rows = Rows(output, (encoder.vocab_size, encoder.hidden_size))
    make = partial(_difference, ids, source.precision.lane)
    weight = source.checked(lambda: source.computed(make, rows), own=())
    template = ChatTemplate.of(source.folder)
    head = (Dense(weight, None),)
    return CrossEncoder(encoder, head, ("LABEL_0",), activation, Pooling(("lasttoken",)), template)


def _difference(ids: Sequence[int], lane: np.dtype[Any], tensors: Tensors, output: str) -> PackedLinear:
    """The output layer's row of the first id, less that of the second if there is one, packed."""
    rows = tensors.rows(output, ids).astype(lane)
    return ops.pack(rows[:1] if len(ids) == 1 else rows[:1] - rows[1:])


def _multi_vector_encoder(
    source: Source, encoder: Encoder, modules: list[tuple[str, Path]]
) -> MultiVectorEncoder:
    """Read the modules of modules.json."""
    folder, sentences = source.folder, encoder.sentences
    saved = sentences_config(folder)
    prompts, layers = dict(sentences.prompts), sentences.modules
    prefixes = {task: saved.get(key, str, "") for key, task in _PREFIXES.items() if key in saved.values}
    for task, prefix in prefixes.items():
        prompts[task] = prefix + prompts[task].removeprefix(prefix)
    words = _words(saved, "skiplist_words", string.punctuation)
    skipped_in: tuple[str, ...] = ("document",)
    mask = next((inner for kind, inner in modules if kind == MASK), None)
    if mask is None:
        layers = (*layers, Normalize())
    else:
        config = Config(mask / "config.json")
        config.refuse(keep_only_token_ids=[])
        words, skipped_in = _words(config, "skiplist_words"), _words(config, "skiplist_tasks", skipped_in)

    own = transformer_settings(folder)
    own.values = {**_pylate(saved), **own.values}
    expansion, query_length = _expansion(own), own.optional_size("query_length")
    if expansion is not None:
        _require_fitting(own, expansion, query_length, encoder)
        most = max(query_length or 0, expansion.length)
        query_length = expansion.length if expansion.fixed else query_length and most
    asked = {None: None, "query": query_length, "document": own.optional_size("document_length")}
    text = replace(encoder.text, markers=tuple(prefixes.values()))
    similarity = saved.values.get("similarity_fn_name")
    similarity = similarity if similarity in _BY_TOKEN else _BY_TOKEN[0]
    return MultiVectorEncoder(
        encoder=replace(encoder, text=text, sentences=replace(sentences, prompts=prompts)),
        modules=layers,
        features=sentences.features,
        settings=Settings(expansion, words, skipped_in, similarity),
        texts={task: text if most is None else replace(text, asked=most) for task, most in asked.items()},
    )


def _pylate(saved: Config) -> dict[str, Any]:
    """Settings of PyLate in config_sentence_transformers.json, under the keys of sentence-transformers."""
    values = saved.values
    if not any(key in values for key in _PYLATE):
        return {}
    found: dict[str, Any] = {key: saved.optional_size(key) for key in LENGTHS[:2]}
    if "query_expansion" in values:
        _expansion(saved)  # an error names this file
        found["query_expansion"] = values["query_expansion"]
    elif saved.get("do_query_expansion", bool, True):
        attend = saved.get("attend_to_expansion_tokens", bool, False)
        length = found.pop("query_length") or _QUERY_LENGTH
        found["query_expansion"] = {"strategy": "fixed", "attend": attend, "length": length}
    return found


def _expansion(config: Config) -> Expansion | None:
    """Table `query_expansion`."""
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
        raise config.wrong("query_length", query_length, expected)
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
        raise config.wrong(key, said, "a list of strings")
    return tuple(said)
