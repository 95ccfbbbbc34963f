"""Names of modules: ``flash_attn`` in place of ``fastattn.flash_attn``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

from fastattn._undo import Shared, Undo

_MODULES = ("", ".flash_attn_interface", ".bert_padding", ".layers", ".layers.rotary")


def install() -> Undo:
    """Let ``import flash_attn`` of this process find the functions here, until undone.

    Its modules ``flash_attn_interface``, ``bert_padding`` and ``layers.rotary`` are there, too. Call it
    before what imports them: a program that has looked for flash_attn may remember that there was none.

    Returns
    -------
    Undo
        ``undo()`` ends it, as does the end of a ``with`` block; names that were imported remain.

    Raises
    ------
    RuntimeError
        If the package flash-attn is installed.

    Examples
    --------
    >>> from fastattn.flash_attn import install
    >>> with install():
    ...     from flash_attn.bert_padding import pad_input
    """
    return Undo([_INSTALLED.use()], lambda: "flash_attn: fastattn.flash_attn")


def _put() -> Callable[[], None]:
    """Put the modules where imports look; returns what takes them away."""
    if "flash_attn" in sys.modules or find_spec("flash_attn") is not None:
        raise RuntimeError(
            "install(): there is a flash_attn already; expected the package not to be installed"
        )
    for name in _MODULES:
        sys.modules[f"flash_attn{name}"] = import_module(f"fastattn.flash_attn{name}")

    def take_away() -> None:
        for name in _MODULES:
            sys.modules.pop(f"flash_attn{name}", None)

    return take_away


_INSTALLED = Shared(_put)
