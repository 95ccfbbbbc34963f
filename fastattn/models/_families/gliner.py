"""GLiNER (Zaratiana et al. 2023): the names of its tensors, and the keys of gliner_config.json.

It is DeBERTa with labels before each text, a recurrent layer over words, and a score of each span and label.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fastattn import ops
from fastattn.models._entities import EntityRecognizer, Lstm, Marks, SpanHead
from fastattn.models._families.deberta import deberta
from fastattn.models._files import Config, ModelError
from fastattn.models._sentences import Dense

if TYPE_CHECKING:
    from fastattn._args.packed import PackedLinear
    from fastattn._args.types import Shape
    from fastattn.models._source import Source
    from fastattn.models._tensors import Tensors

_ENCODER, _PROJECTION = "token_rep_layer.bert_layer.model.", "token_rep_layer.projection"
_SPANS, _PROMPTS = "span_rep_layer.span_rep_layer.", "prompt_rep_layer"
_OWN = ("token_rep_layer.", "rnn.", "span_rep_layer.", f"{_PROMPTS}.")
_TYPES = {name: name for name in ("gliner", "gliner_uni_encoder_span")}
# Other kinds of GLiNER have one of these: two encoders, labels that are written, relations, fused layers.
_NOTHING: dict[str, Any] = {
    "labels_encoder": None,
    "labels_decoder": None,
    "relations_layer": None,
    "span_encoder_config": None,
    "post_fusion_schema": "",
    "fuse_layers": False,
    "precomputed_prompts_mode": False,
    "represent_spans": False,
}


def gliner(source: Source) -> EntityRecognizer:
    """Build GLiNER."""
    config = source.config
    config.choice("model_type", _TYPES, "gliner")
    config.refuse(span_mode="markerV0", subtoken_pooling="first", words_splitter_type="whitespace")
    config.refuse(**_NOTHING)
    hidden, layers = config.size("hidden_size", 512), config.size("num_rnn_layers", 1, low=0)
    if hidden % 2:
        raise config.wrong("hidden_size", hidden, "an even size: half of it in either direction")
    if layers > len(_OWN) * 16:
        raise config.wrong("num_rnn_layers", layers, f"at most {len(_OWN) * 16}")
    inner = _encoder_config(config)
    source = source.with_config(inner)
    source.drop_prefix(_ENCODER)
    encoder = deberta(source)
    shapes: dict[str, Shape] = {}
    if encoder.hidden_size != hidden:
        shapes |= _map_shapes(_PROJECTION, encoder.hidden_size, hidden)
    for suffix in _suffixes(layers):
        for kind, n in (("ih", hidden), ("hh", hidden // 2)):
            shapes |= {f"rnn.lstm.weight_{kind}{suffix}": (2 * hidden, n)}
            shapes |= {f"rnn.lstm.bias_{kind}{suffix}": (2 * hidden,)}
    for name, n in ((_PROMPTS, 1), *((f"{_SPANS}{part}", n) for part, n in _PARTS.items())):
        shapes |= _map_shapes(f"{name}.0", n * hidden, 4 * hidden)
        shapes |= _map_shapes(f"{name}.3", 4 * hidden, hidden)
    source.expect(shapes, _OWN)
    projection = () if encoder.hidden_size == hidden else (_dense(source, _PROJECTION),)
    marks = Marks(
        config.get("ent_token", str, "<<ENT>>"),
        config.get("sep_token", str, "<<SEP>>"),
        config.size("class_token_index", low=0),
        config.get("embed_ent_token", bool, True),
    )
    return EntityRecognizer(
        encoder=replace(encoder, text=replace(encoder.text, max_length=None)),
        projection=projection,
        lstm=tuple(_lstm(source, suffix) for suffix in _suffixes(layers)),
        head=_head(source),
        marks=marks,
        max_words=config.size("max_len", 384),
        max_width=config.size("max_width", 12),
    )


_PARTS = {"project_start": 1, "project_end": 1, "out_project": 2}


def _encoder_config(config: Config) -> Config:
    """The table of the encoder."""
    if config.values.get("encoder_config") is None:
        came = (
            "'encoder_config' is missing; expected the sizes of the encoder, which newer versions of gliner"
        )
        how = "from_pretrained(), save_pretrained(..., safe_serialization=True)"
        raise ModelError(f"{config.path}: {came} write: {how}")
    inner = config.inner("encoder_config", {})
    inner.choice("model_type", {"deberta-v2": "deberta-v2"}, "deberta-v2")
    inner.values.setdefault("model_type", "deberta-v2")
    return inner


def _suffixes(layers: int) -> list[str]:
    """Ends of the names of a recurrent layer's tensors: forwards and backwards, layer by layer."""
    return [f"_l{layer}{end}" for layer in range(layers) for end in ("", "_reverse")]


def _map_shapes(name: str, n_in: int, n_out: int) -> dict[str, Shape]:
    return {f"{name}.weight": (n_out, n_in), f"{name}.bias": (n_out,)}


def _packed(source: Source, name: str, transposed: bool = False) -> PackedLinear:
    return source.pack([name], transposed=transposed, stored=source.precision.lane.name)


def _dense(source: Source, name: str, relu: bool = False) -> Dense:
    weight, bias = _packed(source, f"{name}.weight"), source.vector(f"{name}.bias")
    return Dense(weight, bias, "relu" if relu else None)


def _lstm(source: Source, suffix: str) -> Lstm:
    names = [f"rnn.lstm.{{}}_{kind}{suffix}" for kind in ("ih", "hh")]
    weight, own_weight = (_packed(source, name.format("weight")) for name in names)
    bias, own_bias = (source.vector(name.format("bias")) for name in names)
    return Lstm(weight, own_weight, bias, own_bias)


def _head(source: Source) -> SpanHead:
    first, last, lane = f"{_SPANS}out_project.0", f"{_SPANS}out_project.3", source.precision.lane.name

    def mapped(name: str) -> tuple[Dense, ...]:
        return _dense(source, f"{name}.0", relu=True), _dense(source, f"{name}.3")

    return SpanHead(
        mapped(_PROMPTS),
        mapped(f"{_SPANS}project_start"),
        mapped(f"{_SPANS}project_end"),
        source.computed(partial(_half, lane, 0), f"{first}.weight"),
        source.computed(partial(_half, lane, 1), f"{first}.weight"),
        source.vector(f"{first}.bias"),
        _packed(source, f"{last}.weight", transposed=True),
        source.vector(f"{last}.bias"),
    )


def _half(lane: str, number: int, tensors: Tensors, name: str) -> PackedLinear:
    """The weight's columns for the first word of a span, or for the last one, packed."""
    weight = tensors.whole(name)
    n = weight.shape[1] // 2
    return ops.pack(weight[:, number * n : (number + 1) * n], dtype=lane)
