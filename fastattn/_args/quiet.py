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

    In NumPy 1.26, ``np.errstate`` as a decorator shares one state among all calls: concurrent ones restore
    each other's settings.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return run
