"""A training run in one file: a safetensors file, whose header also holds what is no array, as JSON."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from fastattn._args.errors import wrong_type
from fastattn._args.values import short
from fastattn._atomic import replaced
from fastattn.layers._files import opened

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastattn._args.types import Array
    from fastattn._safetensors import TensorFile

FORMAT = 2  # of the values in a file
_VALUES: dict[str, tuple[Any, str]] = {
    "optimizer": (str, "a name"),
    "optimizer_steps": (int, "a number"),
    "steps": (int, "a number"),
    "schedule": ((str, NoneType), "a schedule's name, or null"),
    "place": (dict, "a place in the data"),
}
_KEY = "fastattn.train"  # of the JSON in the header


def write(path: str | os.PathLike[str], arrays: Mapping[str, Array], values: Any) -> None:
    """Write both to `path`. Whoever reads meanwhile, or after a crash, finds the old file or the new one."""
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        needed = "the safetensors package: pip install safetensors"
        raise ImportError(f"(): writing {_decoded(path)} needs {needed}") from error
    with replaced(Path(_decoded(path)), "(): ") as file:
        save_file(dict(arrays), file, {_KEY: json.dumps(values, allow_nan=False)})


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Array], Any]:
    """Read the arrays and values that `write` wrote."""
    where = _decoded(path)
    with ExitStack() as stack:
        file = opened(where, stack)
        values = header(path, file)
        if values is None:
            raise ValueError(f"(): {where} holds no training run; expected a file that save() wrote")
        return {name: file.get_tensor(name) for name in file.names}, values


def _decoded(path: str | os.PathLike[str]) -> str:
    if not isinstance(path, (str, os.PathLike)):
        raise wrong_type("path", path, "the path of a file")
    return os.fsdecode(path)


def header(path: str | os.PathLike[str], file: TensorFile) -> Any:
    """The values in `file`, open; None if it holds no run."""
    text = file.metadata.get(_KEY)
    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        raise ValueError(f"(): the header of {os.fsdecode(path)} is not JSON: {error}") from error


def require_fit(path: str | os.PathLike[str], values: Any, optimizer: str) -> None:
    """Raise unless `values` are those of a run with this optimizer."""
    where = os.fsdecode(path)
    came = values.get("format") if isinstance(values, dict) else None
    if came != FORMAT:
        raise ValueError(f"(): the format of the run in {where} is {short(came)}; expected {FORMAT}")
    for name, (kind, expected) in _VALUES.items():
        x = values.get(name)
        if name not in values or not isinstance(x, kind) or (isinstance(x, int) and (x is True or x < 0)):
            came = f"is {short(x)}" if name in values else "is missing"
            raise ValueError(f"(): {name!r} in the header of {where} {came}; expected {expected}")
    if values["optimizer"] != optimizer:
        came = f"of the optimizer {values['optimizer']}"
        raise ValueError(f"(): {where} is {came}; expected {optimizer}")
