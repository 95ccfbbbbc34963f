"""What an engine hands to a worker: calls that compute one problem, and how to read their results."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import numpy as np

from fastattn._bench.cases import Array


class Unsupported(Exception):
    """The engine cannot compute this problem; the message says why."""


class Way(NamedTuple):
    """`call` is timed. Afterwards, `read` turns its result into an array of the right shape.

    Where `load` does something, it prepares `call` once, and is timed on its own.
    """

    call: Callable[[], Any]
    read: Callable[[Any], Array] = np.asarray
    load: Callable[[], Any] = lambda: None


_ENTERED = ExitStack()


def enter_for_good(context: AbstractContextManager[Any]) -> None:
    """Enter a context until the process ends, so that the timed call need not enter it."""
    _ENTERED.enter_context(context)


def refuse_dense(scores_bytes: int, copies: int = 2) -> None:
    """Refuse a problem to an engine of attention that holds several copies of all scores at once."""
    refuse_above_memory(copies * scores_bytes, "holds every score at once")


def refuse_above_memory(need: float, why: str) -> None:
    """Refuse a problem for which an engine needs more than half of the free memory."""
    if need > free_memory() / 2:
        raise Unsupported(f"{why}: {need / 1e9:.0f} GB")


def peak_memory() -> float | None:
    """Bytes that this process had in memory at most; None where the system does not tell."""
    try:  # which begins anew with a program, and what getrusage says does not
        with open("/proc/self/status") as file:
            return next(1024.0 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return None


def free_memory() -> float:
    """Bytes, or infinity where the system does not tell. On Linux, cached files count as free memory."""
    try:
        with open("/proc/meminfo") as file:
            return next(1024.0 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pages = os.sysconf("SC_AVPHYS_PAGES") if hasattr(os, "sysconf") else float("inf")
        return pages * os.sysconf("SC_PAGE_SIZE") if pages != float("inf") else pages
