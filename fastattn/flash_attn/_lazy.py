"""The functions for tensors, which are imported with the first of these, or with torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_loaded: list[Any] = []


def of_tensors() -> Any:
    """The module of these functions. torch's compiler follows no import: it has to find them loaded."""
    if not _loaded:
        _loaded.append(import_module("fastattn.flash_attn._torch"))
    return _loaded[0]
