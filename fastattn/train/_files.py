"""A training run in one file: a safetensors file, whose header also holds what is no array."""

from __future__ import annotations

import os
from types import NoneType
from typing import Any

from fastattn._args.values import short

FORMAT = 2  # of the values in a file
_VALUES: dict[str, tuple[Any, str]] = {
    "optimizer": (str, "a name"),
    "optimizer_steps": (int, "a number"),
    "steps": (int, "a number"),
    "schedule": ((str, NoneType), "a schedule's name, or null"),
    "place": (dict, "a place in the data"),
}
KEY = "fastattn.train"  # of the values in the header


def require_fit(path: str | os.PathLike[str], values: Any, optimizer: str) -> None:
    """Raise unless `values` are those of a run with this optimizer."""
    where = os.fsdecode(path)
    for name, (kind, expected) in _VALUES.items():
        x = values.get(name)
        if name not in values or not isinstance(x, kind) or (isinstance(x, int) and (x is True or x < 0)):
            came = f"is {short(x)}" if name in values else "is missing"
            raise ValueError(f"(): {name!r} in the header of {where} {came}; expected {expected}")
    if values["optimizer"] != optimizer:
        came = f"of the optimizer {values['optimizer']}"
        raise ValueError(f"(): {where} is {came}; expected {optimizer}")
