"""Heads of encoders: the names of their tensors, and what config.json says of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from fastattn import ops
from fastattn._args.values import short
from fastattn.models._classify import CrossEncoder, TokenClassifier
from fastattn.models._files import Config, ModelError
from fastattn.models._sentences import ACTIVATIONS, Dense, is_cross_encoder, kinds_of_modules

if TYPE_CHECKING:
    from pathlib import Path

    from fastattn._args.types import Shape
    from fastattn.models._blocks import Source
    from fastattn.models._encoder import Encoder

_NONE = re.compile("(?!)")


class HeadNames(NamedTuple):
    """What a family calls the linear maps of a head, the one with an activation between them."""

    inner: str | None
    outer: str
    activation: str = "Tanh"


# By the end of a name in `architectures`, and by `model_type`.
_TEXTS, _TOKENS = "ForSequenceClassification", "ForTokenClassification"
_TEXT_HEADS = {
    "bert": HeadNames("pooler.dense", "classifier"),
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "camembert"), HeadNames("classifier.dense", "classifier.out_proj")
    ),
}
_TOKEN_HEADS = dict.fromkeys(_TEXT_HEADS, HeadNames(None, "classifier"))


def with_head(source: Source, encoder: Encoder) -> Encoder | CrossEncoder | TokenClassifier:
    """The encoder, with the head that the folder says it has; heads that make no scores are left out.

    Where modules.json makes vectors of texts, that counts.
    """
    said = source.config.values.get("architectures")
    task = said[0] if isinstance(said, list) and said and isinstance(said[0], str) else ""
    if not task.endswith((_TEXTS, _TOKENS)) or "Pooling" in kinds_of_modules(source.folder):
        settings = Config(source.folder / "config_sentence_transformers.json", optional=True)
        if is_cross_encoder(settings):
            came = f"'architectures' is {short(said)} beside a {settings.path.name} of a CrossEncoder"
            raise ModelError(f"{source.config.path}: {came}; expected one that ends with {_TEXTS}")
        return encoder
    names = (_TEXT_HEADS if task.endswith(_TEXTS) else _TOKEN_HEADS).get(encoder.model_type)
    if names is None:
        expected = f"a head of {', '.join(_TEXT_HEADS)}"
        raise ModelError(f"{source.config.path}: 'architectures' has {short(task)}; expected {expected}")
    found = source.config.get("id2label", dict, {})
    count = len(found) or source.config.size("num_labels", 2)
    labels = tuple(str(found.get(str(i), f"LABEL_{i}")) for i in range(count))
    head = _read(source, names, encoder.hidden_size, count)
    if task.endswith(_TOKENS):
        return TokenClassifier(encoder, head, labels)
    return CrossEncoder(encoder, head, labels, _activation(source.folder, source.config, count))


def _read(source: Source, names: HeadNames, hidden: int, count: int) -> tuple[Dense, ...]:
    """The linear maps; they are small, and kept in the type that the kernels compute in."""
    maps = {name: hidden for name in (names.inner,) if name is not None} | {names.outer: count}
    shapes: dict[str, Shape] = {}
    for name, n_out in maps.items():
        shapes |= {f"{name}.weight": (n_out, hidden), f"{name}.bias": (n_out,)}
    source.tensors.expect(shapes, ("pooler.",) if names.inner == "pooler.dense" else (), _NONE)
    source.tensors.expect(shapes, ("classifier.",), _NONE)  # and no other
    return tuple(
        Dense(
            ops.pack(source.vector(f"{name}.weight")),
            source.vector(f"{name}.bias"),
            "Identity" if name == names.outer else names.activation,
        )
        for name in maps
    )


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
