"""What an engine hands to a worker: calls that compute one problem, and how to read their results."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import numpy as np

from fastattn._bench.cases import Array


class Unsupported(Exception):
    """The engine has nothing that computes this problem; the message says why."""


class Way(NamedTuple):
    """`call` is what is timed; `read` turns its result into an array of the right shape afterwards."""

    call: Callable[[], Any]
    read: Callable[[Any], Array] = np.asarray


# Of a problem of the engine's suite, and a number of threads.
Ways = Callable[[Any, int], dict[str, Way]]


_ENTERED = ExitStack()


def enter_for_good(context: AbstractContextManager[Any]) -> None:
    """For modes that would cost time in the timed call. A context that nobody holds ends at once."""
    _ENTERED.enter_context(context)


def refuse_dense(problem: Any, copies: int = 2) -> None:
    """For engines of attention that hold all scores at once, and some of them copies."""
    refuse_above_memory(copies * problem.scores_bytes, "holds every score at once")


def free_memory() -> float:
    """Bytes; infinite where the system does not tell. Linux counts what it caches of files as free."""
    try:
        with open("/proc/meminfo") as file:
            return next(1024.0 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pages = os.sysconf("SC_AVPHYS_PAGES") if hasattr(os, "sysconf") else float("inf")
        return pages * os.sysconf("SC_PAGE_SIZE") if pages != float("inf") else pages


def refuse_above_memory(need: int, why: str) -> None:
    """No engine gets more than half of the memory that is free."""
    if need > free_memory() / 2:
        raise Unsupported(f"{why}: {need / 1e9:.0f} GB")
