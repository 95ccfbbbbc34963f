"""Checks of the arguments of optimizers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import numpy as np

from fastattn._args.errors import wrong_type
from fastattn._args.results import require_apart
from fastattn._args.types import FLOAT32, FLOAT64, Array
from fastattn._args.values import number, short


def rate(name: str, x: Any) -> float:
    """`x`, a number of at least 0."""
    value = number(name, x, FLOAT32)
    if value < 0:
        raise ValueError(f"(): {name} is {value}; expected a number of at least 0")
    return value


def fraction(name: str, x: Any) -> float:
    """`x`, a number from 0 up to but not 1."""
    value = number(name, x, FLOAT32)
    if not 0 <= value < 1:
        raise ValueError(f"(): {name} is {value}; expected a number from 0 up, below 1")
    return value


def plain(parameters: Any) -> dict[str, Array]:
    """`parameters`, arrays that can be changed in place, by their names."""
    if not isinstance(parameters, Mapping):
        expected = "a layer, a mapping of names to layers and arrays, or for a model of files "
        expected += "ContrastiveTuning(model), ClassifierTuning(model, num_labels) or NextTokenTuning(model)"
        raise wrong_type("parameters", parameters, expected)
    for name, array in parameters.items():
        if not isinstance(name, str):
            raise TypeError(f"(): parameters has the key {name!r}; expected names of parameters")
        if not isinstance(array, np.ndarray) or array.dtype not in (FLOAT32, FLOAT64):
            came = short(array) if isinstance(array, np.ndarray) else f"of type {type(array).__name__}"
            expected = "a layer, or an ndarray in float32 or float64"
            raise TypeError(f"(): parameters[{name!r}] is {came}; expected {expected}")
        if not array.flags.carray:
            fault = "read-only" if not array.flags.writeable else "not C-contiguous"
            raise ValueError(f"(): parameters[{name!r}] is {fault}; expected a writable, contiguous array")
    if not parameters:
        raise ValueError("(): parameters is empty; expected at least one array")
    named = [(f"parameters[{name!r}]", x) for name, x in parameters.items() if x.size]
    for pair in pairwise(sorted(named, key=lambda item: item[1].ctypes.data)):  # two that overlap meet there
        require_apart(list(pair))
    return dict(parameters)


def own_options(groups: Any, params: Collection[str]) -> dict[str, dict[str, float]]:
    """Options of each name in `groups`; the first group that has a name counts."""
    if not isinstance(groups, Sequence) or not all(isinstance(group, Mapping) for group in groups):
        raise TypeError(f"(): groups is {short(groups)}; expected a sequence of dicts")
    options: dict[str, dict[str, float]] = {}
    for i, group in enumerate(groups):
        where = f"groups[{i}]"
        unknown = group.keys() - {"params", "lr", "weight_decay"}
        if unknown or "params" not in group:
            came = f"has {sorted(unknown, key=str)[0]!r}" if unknown else "lacks 'params'"
            raise ValueError(f"(): {where} {came}; expected params, and lr or weight_decay")
        rates = {key: rate(f"{where}[{key!r}]", group[key]) for key in ("lr", "weight_decay") if key in group}
        for name in matching(f"{where}['params']", group["params"], params):
            options.setdefault(name, rates)
    return options


def fault_of(grads: Mapping[str, Array]) -> str:
    """Description of the first of `grads` that is not finite."""
    return next(_faults(grads), "the norm of all gradients is too large for a number")


def _faults(grads: Mapping[str, Array]) -> Iterator[str]:
    for name, array in grads.items():
        nans, infinities = int(np.isnan(array).sum()), int(np.isinf(array).sum())
        if nans or infinities:
            counts = f"{nans} NaN and {infinities} infinities among its {array.size} elements"
            yield f"the gradient of {name} has {counts}; expected finite ones"


def matching(name: str, x: Any, params: Collection[str]) -> set[str]:
    """The names in `params` that a pattern of `x` has. Each pattern has one, or it is misspelt."""
    given, found = [x] if isinstance(x, str) else x, set[str]()
    if not isinstance(given, Sequence) or not all(isinstance(pattern, str) for pattern in given):
        raise TypeError(f"(): {name} is {short(x)}; expected a pattern of names, or several")
    for pattern in given:
        names = {param for param in params if fnmatchcase(param, pattern)}
        if not names:
            expected = f"a pattern of whole names, as {next(iter(params), '*')!r}"
            raise ValueError(f"(): {name} has {pattern!r}, which fits no name; expected {expected}")
        found |= names
    return found
