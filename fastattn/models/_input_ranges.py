"""Ranges of what a model's linear maps round to int8: found over some texts, kept in the model's folder."""

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
from fastattn.models._files import ModelError, read_json
from fastattn.models._parameters import substituted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from fastattn._args.packed import PackedLinear
    from fastattn._args.types import Array

    Range = tuple[float, float]

RANGES = "input_ranges.json"  # [low, high] of each map, by the names of its tensors
_Model = TypeVar("_Model")


class _Ranges(Watch):
    def seen(self, weight: PackedLinear, rows: Array) -> None:
        low, high = self.found.get(id(weight), (np.inf, -np.inf))
        self.found[id(weight)] = min(low, float(rows.min())), max(high, float(rows.max()))


def calibrated(model: _Model, texts: Iterable[str]) -> _Model:
    """Return `model` with maps that round on one grid, from the smallest to the largest input of texts."""
    if not _has_ranges(model):
        expected = "that of an Encoder, one with a head, or a Decoder, without routes for tasks"
        raise ModelError(f"(): calibrate is given for a {type(model).__name__}; expected a folder {expected}")
    return _with_ranges(model, by_name(model, watched(model, _Ranges(), texts)))


def as_saved(model: _Model) -> _Model:
    """Return `model` with the ranges that its folder has, if it has any."""
    origin = core_of(model).origin if _has_ranges(model) else None
    if origin is None or not (path := origin.folder / RANGES).is_file():
        return model
    found = {name: _pair(path, name, pair) for name, pair in read_json(path).items()}
    if missing := sorted(_weights(model).keys() - found.keys()):
        raise ModelError(f"{path} has no {missing[0]!r}; expected a range of each map that rounds its input")
    return _with_ranges(model, found)


def _pair(path: Path, name: str, pair: Any) -> Range:
    try:
        low, high = input_range(repr(name), pair).tolist()
    except (TypeError, ValueError) as error:
        raise ModelError(f"{path}: {str(error).removeprefix('(): ')}") from None
    return low, high


def ranges(model: Any) -> dict[str, Range]:
    """The ranges that are known, by the names of the maps' tensors."""
    if not _has_ranges(model):
        return {}
    known = [(step.weight, step.activations) for step in _steps(model)]
    return by_name(model, {id(x): tuple(a.tolist()) for x, a in known if isinstance(a, np.ndarray)})


def write(found: Mapping[str, Range], folder: Path) -> None:
    """Write the ranges of a model that `folder` holds; without any, remove those of another."""
    path = folder / RANGES
    if found:
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    else:
        path.unlink(missing_ok=True)


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
    new = {}
    for step in _steps(model):
        both = together[id(step.weight)]
        new[id(step)] = replace(step, activations=np.array([min(both), max(both)], np.float32))
    changed: _Model = substituted(model, new)
    return changed
