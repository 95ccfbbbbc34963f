"""The names that a public module lists, and its error for one that it does not have."""

from __future__ import annotations

import sys
from importlib import import_module
from types import FrameType
from typing import Any


class _Missing:
    """The text of an error for a missing name. It imports all public modules to find the nearest one.

    So it does when it is shown only: `hasattr` and `getattr` with a default do not show it.
    """

    def __init__(self, text: str, module: str, name: str) -> None:
        self.text, self.module, self.name = text, module, name

    def __str__(self) -> str:
        nearest: str = import_module("fastattn._args.words").nearest_name(self.module, self.name)
        return self.text + nearest

    def __repr__(self) -> str:
        return repr(str(self))


def missing_name(module: str, name: str, asking: FrameType) -> Exception:
    """The error for `name`, which the public `module` does not have; the frame `asking` wants it."""
    text = f"module {module!r} has no attribute {name!r}"
    if name.startswith("_") or not name.isidentifier():
        return AttributeError(text)
    package = "__path__" in vars(sys.modules[module])
    # A module that nobody has imported is none of the names.
    if package and import_module("importlib.util").find_spec(f"{module}.{name}"):
        return AttributeError(text)
    # `from module import x` asks whether there is x, and hides all but an ImportError.
    imports = asking.f_globals.get("__name__") == "importlib._bootstrap"
    return (ImportError if imports else AttributeError)(_Missing(text, module, name))


def show_public(module: str) -> None:
    """Let `module` list its ``__all__`` alone, and say which name is most like one that is not there.

    Type checkers do not see it: for them, such a name stays an error.
    """
    there = vars(sys.modules[module])

    def get(name: str) -> Any:
        raise missing_name(module, name, sys._getframe(1))

    there.update(__getattr__=get, __dir__=lambda: there["__all__"])
