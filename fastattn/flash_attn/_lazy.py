"""The functions for tensors, which are imported with torch, or with the first tensor."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any


def of_tensors() -> Any:
    """The module of these functions. torch's compiler follows no import: it has to find them loaded."""
    name = "fastattn.flash_attn._torch"
    return sys.modules.get(name) or import_module(name)
