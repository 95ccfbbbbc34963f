"""Arithmetic without NumPy's warnings, as in kernels: what is too large is infinite, 0 / 0 is NaN."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")


def quiet(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate: no warnings, in this thread alone.

    ``np.errstate`` as a decorator has one state for all calls in NumPy 1.26, and mixes those of threads up.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return run
