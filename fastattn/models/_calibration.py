"""Inputs of a model's linear maps over some texts: what watches them, and their second moments.

A map's error in its result is the error of its weight times its input. Its mean square is a quadratic form of
the weight's error, whose matrix is that of the inputs' second moments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._engine.plain import Plain
from fastattn.models._decoder import Decoder
from fastattn.models._encode_calls import calls
from fastattn.models._encoder import Encoder, EncoderWithHead
from fastattn.models._parameters import required

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from fastattn._args.packed import PackedLinear
    from fastattn._args.types import Array
    from fastattn._engine.program import Program

_TOKENS = 512  # of a sequence that is computed at once


class Watch(Plain):
    """Plain operations, which show each product's input to `seen`."""

    def __init__(self) -> None:
        self.found: dict[int, Any] = {}  # by the id of the weight

    def seen(self, weight: PackedLinear, rows: Array) -> None:
        """Take note of an input (rows, in_features), float32."""
        raise NotImplementedError

    def linear(self, x: Any, weight: PackedLinear, *how: Any, **options: Any) -> Any:
        """`ops.linear`."""
        if len(x):
            self.seen(weight, x.astype(np.float32, copy=False))
        return super().linear(x, weight, *how, **options)


class _Moments(Watch):
    def seen(self, weight: PackedLinear, rows: Array) -> None:
        there = self.found.setdefault(id(weight), np.zeros((weight.in_features,) * 2, np.float32))
        there += rows.T @ rows


def moments(model: Decoder, texts: Iterable[str]) -> dict[str, Array]:
    """Sums of x x^T over all tokens, (in_features, in_features), by the names of the maps' tensors."""
    return by_name(model, watched(model, _Moments(), texts))


def core_of(model: Any) -> Encoder | Decoder:
    """The part of a model that has programs."""
    return model.encoder if isinstance(model, EncoderWithHead) else model


def programs(model: Any) -> tuple[Program, ...]:
    """The programs of a model: hidden states, and a decoder's logits."""
    core = core_of(model)
    return (core.program, core.logits) if isinstance(core, Decoder) else (core.program,)


def by_name(model: Any, found: Mapping[int, Any]) -> dict[str, Any]:
    """Facts about weights, known by their ids, by the names of their tensors."""
    made = required(core_of(model).origin).parameters
    return {part.name: found[id(x)] for x, parts, _ in made if id(x) in found for part in parts}


def watched(model: Any, tape: Watch, texts: Iterable[str]) -> dict[int, Any]:
    """Run the programs of a model over all texts, and return what `tape` found."""
    core = core_of(model)
    for x, call in _decoder_calls(core, texts) if isinstance(core, Decoder) else _encoder_calls(core, texts):
        for program in programs(model):
            x = program.on(tape, x, call) if program.steps else x
    if not tape.found:
        raise ValueError("(): calibrate has no text with a token; expected some ten thousand tokens")
    return tape.found


def _decoder_calls(model: Decoder, texts: Iterable[str]) -> Iterator[tuple[Array, Any]]:
    longest = min(_TOKENS, model.max_length or _TOKENS)
    for ids in model.text.encode(texts):
        for begin in range(0, len(ids), longest):
            tokens = np.array(ids[begin : begin + longest])
            x, call, _ = model._inputs(tokens, np.array([len(tokens)]), len(tokens))
            yield x, call


def _encoder_calls(model: Encoder, texts: Iterable[str]) -> Iterator[tuple[Array, Any]]:
    for sequences in calls(model._encoded(texts), None):
        lengths = np.array([len(ids) for ids in sequences])
        call, positions = model.sequence_rules(lengths, model.dtype, None)
        yield model.embeddings(np.concatenate(sequences), positions, None, model.dtype), call
