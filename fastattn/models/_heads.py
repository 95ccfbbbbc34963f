"""Heads of encoders: the names of their tensors, and what config.json says of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fastattn import ops
from fastattn._args.values import short
from fastattn._engine.program import NormStep
from fastattn.models._blocks import ACTIVATIONS as OURS
from fastattn.models._classify import CrossEncoder, TokenClassifier
from fastattn.models._colbert import STANFORD, multi_vector_encoder
from fastattn.models._files import Config, ModelError
from fastattn.models._logit_score import logit_score_encoder
from fastattn.models._sentences import (
    ACTIVATIONS,
    SCORE,
    Dense,
    LayerNorm,
    Pooling,
    is_cross_encoder,
    is_multi_vector,
    modules_of,
)
from fastattn.models._sparse import FUNCTIONS, STRATEGIES, SparseEncoder, SpladePooling, VocabularyHead
from fastattn.models._vectors import SIMILARITIES

if TYPE_CHECKING:
    from pathlib import Path

    from fastattn._args.types import Array, Shape
    from fastattn.models._blocks import Source
    from fastattn.models._encoder import Encoder
    from fastattn.models._multi_vector import MultiVectorEncoder


class HeadNames(NamedTuple):
    """What a family calls the linear maps of a head, the one with an activation between them."""

    inner: str | None
    outer: str
    activation: str = "Tanh"
    norm: str | None = None  # behind the activation
    last: bool = False  # of the last token, and without a bias; else of the first one, or as config.json says


class VocabularyNames(NamedTuple):
    """What a family calls the tensors of the head that its masked language model has."""

    inner: str
    norm: str
    output: str  # if its weight is not the table of tokens
    bias: str  # if it is
    activation: str | None = None  # the key of config.json that names it; "gelu" without
    table: str = "embeddings.word_embeddings"


# By the end of a name in `architectures`, and by `model_type`.
_TEXTS, _TOKENS = "ForSequenceClassification", "ForTokenClassification"
_TEXT_HEADS = {
    **dict.fromkeys(("bert", "new", "gte", "nomic_bert"), HeadNames("pooler.dense", "classifier")),
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "camembert", "mpnet"), HeadNames("classifier.dense", "classifier.out_proj")
    ),
    "distilbert": HeadNames("pre_classifier", "classifier", "ReLU"),
    "albert": HeadNames("pooler", "classifier"),
    "deberta-v2": HeadNames("pooler.dense", "classifier", "GELU"),
    "modernbert": HeadNames("head.dense", "classifier", "GELU", "head.norm"),
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
        ("roberta", "xlm-roberta", "camembert"),
        VocabularyNames("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias"),
    ),
    "distilbert": VocabularyNames(
        "vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias", "activation"
    ),
}
_TOKEN_HEADS = {
    **{name: HeadNames(None, "classifier") for name, head in _TEXT_HEADS.items() if not head.last},
    "modernbert": _TEXT_HEADS["modernbert"],
}
_POOLINGS = {"cls": Pooling(("cls",)), "mean": Pooling(("mean",))}  # by `classifier_pooling`


def with_head(
    source: Source, encoder: Encoder
) -> Encoder | CrossEncoder | TokenClassifier | SparseEncoder | MultiVectorEncoder:
    """The encoder, with the head that the folder says it has; heads that make no scores are left out.

    Where modules.json makes vectors of texts, that counts.
    """
    said = source.config.values.get("architectures")
    task = said[0] if isinstance(said, list) and said and isinstance(said[0], str) else ""
    modules = modules_of(source.folder)
    if modules and modules[-1][0] == "SpladePooling":
        return _sparse_encoder(source, encoder, modules[-1][1])
    if modules and modules[-1][0] == SCORE:
        activation = _activation(source.folder, source.config, 1)
        return logit_score_encoder(source, encoder, modules[-1][1], activation)
    if is_multi_vector(modules) or (task == STANFORD and not modules):
        return multi_vector_encoder(source, encoder, modules)
    if modules or not task.endswith((_TEXTS, _TOKENS)):
        if is_cross_encoder(source.folder):
            came = f"'architectures' is {short(said)}, and the folder is one of a CrossEncoder"
            raise ModelError(f"{source.config.path}: {came}; expected one that ends with {_TEXTS}")
        return encoder
    known = _TEXT_HEADS if task.endswith(_TEXTS) else _TOKEN_HEADS
    names = known.get(encoder.model_type)
    if names is None:
        expected = f"a head of {', '.join(known)}"
        raise ModelError(f"{source.config.path}: 'architectures' has {short(task)}; expected {expected}")
    found = source.config.get("id2label", dict, {})
    count = len(found) or source.config.size("num_labels", 2)
    labels = tuple(str(found.get(str(i), f"LABEL_{i}")) for i in range(count))
    head = _read(source, names, encoder, count)
    if task.endswith(_TOKENS):
        return TokenClassifier(encoder, head, labels)
    activation = _activation(source.folder, source.config, count)
    pooling = Pooling(("lasttoken",)) if names.last else None
    pooling = pooling or source.config.choice("classifier_pooling", _POOLINGS, "cls")
    return CrossEncoder(encoder, head, labels, activation, pooling)


def _read(source: Source, names: HeadNames, encoder: Encoder, count: int) -> tuple[Dense | LayerNorm, ...]:
    """The layers one after another; they are small, and kept in the type that the kernels compute in."""
    config, hidden = source.config, encoder.hidden_size
    config.refuse(pooler_hidden_act="gelu", classifier_activation="gelu")  # DeBERTa's and ModernBERT's
    shapes: dict[str, Shape] = {f"{names.outer}.weight": (count, hidden)}
    if not names.last:
        shapes[f"{names.outer}.bias"] = (count,)
    if names.inner is not None:
        shapes[f"{names.inner}.weight"] = hidden, hidden
        if names.norm is None or config.get("classifier_bias", bool, False):
            shapes[f"{names.inner}.bias"] = (hidden,)
    if names.norm is not None:
        shapes[f"{names.norm}.weight"] = (hidden,)
        if config.get("norm_bias", bool, False):
            shapes[f"{names.norm}.bias"] = (hidden,)
    source.tensors.expect(shapes, ("pooler.",) if "pooler.dense.weight" in shapes else ())
    source.tensors.expect(shapes, ("classifier.", "score."))  # and no other

    def bias(name: str) -> Array | None:
        return source.vector(f"{name}.bias") if f"{name}.bias" in shapes else None

    def dense(name: str, activation: str) -> Dense:
        return Dense(ops.pack(source.vector(f"{name}.weight")), bias(name), activation)

    layers: list[Dense | LayerNorm] = []
    if names.inner is not None:
        layers.append(dense(names.inner, names.activation))
    if names.norm is not None:
        layers.append(LayerNorm(source.vector(f"{names.norm}.weight"), bias(names.norm), _eps(encoder)))
    return (*layers, dense(names.outer, "Identity"))


def _eps(encoder: Encoder) -> float:
    """The eps of a head's norm: in every family that of the encoder's norms."""
    return next(step.eps for step in encoder.program.steps if isinstance(step, NormStep))


def _activation(folder: Path, config: Config, num_labels: int) -> str:
    """What becomes of logits: sentence-transformers has had three places for it."""
    settings = Config(folder / "config_sentence_transformers.json", optional=True)
    inner = config.get("sentence_transformers", dict, {})
    places = (
        (settings.path, "activation_fn", settings.values),
        (config.path, "activation_fn", inner),
        (config.path, "sbert_ce_default_activation_function", config.values),
    )
    for path, key, values in places:
        said = values.get(key)
        if said is not None:
            name = said.rpartition(".")[2] if isinstance(said, str) else ""
            if name not in ACTIVATIONS:
                expected = f"one of {', '.join(ACTIVATIONS)}"
                raise ModelError(f"{path}: {key!r} is {short(said)}; expected {expected}")
            return name
    return "Sigmoid" if num_labels == 1 else "Identity"


def _sparse_encoder(source: Source, encoder: Encoder, inner: str) -> SparseEncoder:
    """With the head of a masked language model, pooled as the folder `inner` says."""
    config, tensors, precision = source.config, source.tensors, source.precision
    names = _VOCABULARY_HEADS.get(encoder.model_type)
    if names is None:
        expected = f"one of {', '.join(_VOCABULARY_HEADS)}, or another module"
        raise ModelError(
            f"{config.path}: 'model_type' of SpladePooling is {encoder.model_type!r}; expected {expected}"
        )
    pooling = Config(source.folder / inner / "config.json")
    strategies, functions = ({name: name for name in kind} for kind in (STRATEGIES, FUNCTIONS))
    settings = Config(source.folder / "config_sentence_transformers.json", optional=True)
    splade = SpladePooling(
        pooling.choice("pooling_strategy", strategies, "max"),
        pooling.choice("activation_function", functions, "relu"),
        settings.optional_size("max_active_dims"),
    )
    similarity = settings.choice("similarity_fn_name", {kind: kind for kind in SIMILARITIES}, "dot")

    tied = config.get("tie_word_embeddings", bool, True)
    output, bias = (names.table, names.bias) if tied else (names.output, f"{names.output}.bias")
    hidden, vocab = encoder.hidden_size, encoder.vocab_size
    shapes: dict[str, Shape] = {f"{output}.weight": (vocab, hidden), bias: (vocab,)}
    shapes |= {f"{names.inner}.weight": (hidden, hidden)}
    shapes |= dict.fromkeys((f"{names.inner}.bias", f"{names.norm}.weight", f"{names.norm}.bias"), (hidden,))
    tensors.expect(shapes, ())
    head = VocabularyHead(
        inner=tensors.pack([f"{names.inner}.weight"]),
        inner_bias=source.vector(f"{names.inner}.bias"),
        activation="gelu" if names.activation is None else config.choice(names.activation, OURS, "gelu"),
        norm_weight=source.vector(f"{names.norm}.weight"),
        norm_bias=source.vector(f"{names.norm}.bias"),
        eps=_eps(encoder),
        output=tensors.pack([f"{output}.weight"]),
        output_bias=source.vector(bias),
        rounded=precision.activations,
    )
    return SparseEncoder(encoder, head, splade, similarity)
