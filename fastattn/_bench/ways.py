"""What an engine hands to a worker: calls that compute one problem, and how to read their results."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fastattn._bench.cases import Array
from fastattn._bench.problem import Problem


class Unsupported(Exception):
    """The engine has nothing that computes this problem; the message says why."""


class Way(NamedTuple):
    """`call` is what is timed; `read` turns its result into a (B, H, Lq, Dv) array afterwards."""

    call: Callable[[], Any]
    read: Callable[[Any], Array] = np.asarray


Ways = Callable[[Problem, int], dict[str, Way]]


def refuse_dense(problem: Problem, copies: int = 2) -> None:
    """For engines that hold all scores at once, and some of them copies."""
    need = copies * problem.scores_bytes
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") if hasattr(os, "sysconf") else need
    if need > free / 2:
        raise Unsupported(f"holds every score at once: {need / 1e9:.0f} GB")
