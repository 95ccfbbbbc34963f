"""Ranges of what a model's linear maps round to int8: found over some texts, kept with its weights."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fastattn._args.ops import input_range
from fastattn._engine.steps import LinearStep
from fastattn.models._calibration import Watch, by_name, core_of, programs, watched
from fastattn.models._decoder import Decoder
from fastattn.models._encoder import Encoder, EncoderWithHead
from fastattn.models._files import ModelError, require
from fastattn.models._parameters import substituted
from fastattn.models._tensors import WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from fastattn._args.packed import PackedLinear
    from fastattn._args.types import Array

    Range = tuple[float, float]

_KEY = "fastattn.input_ranges"  # in the header of model.safetensors: JSON of {a tensor's name: [low, high]}
_Model = TypeVar("_Model")


class _Ranges(Watch):
    def seen(self, weight: PackedLinear, rows: Array) -> None:
        low, high = self.found.get(id(weight), (np.inf, -np.inf))
        ends = np.minimum(low, rows.min()), np.maximum(high, rows.max())  # NaN stays
        self.found[id(weight)] = float(ends[0]), float(ends[1])


def calibrated(model: _Model, texts: Iterable[str]) -> _Model:
    """Return `model` with maps that round on one grid, from the smallest to the largest input of texts."""
    if not _has_ranges(model):
        came = f"calibrate is given for a {type(model).__name__}"
        expected = "a decoder, or one encoder, without routes for tasks"
        raise ModelError(f"(): {came}; expected None, or the folder of {expected}")
    found = by_name(model, watched(model, _Ranges(), texts))
    for name, ends in found.items():
        if not np.isfinite(ends).all():
            raise ModelError(f"(): calibrate gives {name!r} inputs that are not finite; expected finite ones")
    return _with_ranges(model, found)


def as_saved(model: _Model) -> _Model:
    """Return `model` with the ranges that its folder has, if it has any."""
    origin = core_of(model).origin if _has_ranges(model) else None
    if origin is None or not (path := origin.folder / WEIGHTS).is_file():
        return model
    with require("safetensors").safe_open(path, "numpy") as file:
        said = (file.metadata() or {}).get(_KEY)
    if said is None:
        return model
    found = _parsed(f"{path}: {_KEY}", said)
    if missing := sorted(_weights(model).keys() - found.keys()):
        expected = "a range of each map that rounds its input"
        raise ModelError(f"{path}: {_KEY} has no {missing[0]!r}; expected {expected}")
    return _with_ranges(model, found)


def _parsed(where: str, said: str) -> dict[str, Range]:
    try:
        pairs = {name: input_range(repr(name), pair).tolist() for name, pair in json.loads(said).items()}
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise ModelError(f"{where}: {str(error).removeprefix('(): ')}") from None
    return {name: (low, high) for name, (low, high) in pairs.items()}


def ranges(model: Any) -> dict[str, Range]:
    """The ranges that are known, by the names of the maps' tensors."""
    if not _has_ranges(model):
        return {}
    known = [(step.weight, step.activations) for step in _steps(model)]
    return by_name(model, {id(x): tuple(a.tolist()) for x, a in known if isinstance(a, np.ndarray)})


def header(model: Any) -> dict[str, str]:
    """Entry for the header of the file of weights, with which the ranges stay."""
    found = ranges(model)
    return {_KEY: json.dumps(found)} if found else {}


def _has_ranges(model: Any) -> bool:
    return isinstance(model, (Encoder, EncoderWithHead, Decoder)) and getattr(model, "routes", None) is None


def _steps(model: Any) -> Iterator[LinearStep]:
    """Products that round their inputs."""
    for program in programs(model):
        for step in program.steps:
            if isinstance(step, LinearStep) and step.activations is not None:
                yield step


def _weights(model: Any) -> dict[str, int]:
    """Ids of the weights of these products, by the names of their tensors."""
    return by_name(model, {id(step.weight): id(step.weight) for step in _steps(model)})


def _with_ranges(model: _Model, found: Mapping[str, Range]) -> _Model:
    """Return `model` with ranges; a map of several tensors has all that theirs have."""
    together: dict[int, list[float]] = {}
    for name, weight in _weights(model).items():
        together.setdefault(weight, []).extend(found[name])
    precision = core_of(model).precision
    new: dict[int, Any] = {id(precision): replace(precision, known_ranges=True)}
    for step in _steps(model):
        both = together[id(step.weight)]
        new[id(step)] = replace(step, activations=np.array([min(both), max(both)], np.float32))
    changed: _Model = substituted(model, new)
    return changed
