"""Parameters are chosen by patterns of their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from fastattn._args.values import short


def patterns(func: str, name: str, x: Any) -> list[str]:
    given = [x] if isinstance(x, str) else x
    if not isinstance(given, Sequence) or not all(isinstance(pattern, str) for pattern in given):
        raise TypeError(f"{func}(): {name} is {short(x)}; expected a pattern of names, or several")
    return list(given)


def matching(func: str, name: str, x: Any, params: Iterable[str]) -> set[str]:
    """The names in `params` that a pattern of `x` has. Each pattern has one, or it is misspelt."""
    found: set[str] = set()
    for pattern in patterns(func, name, x):
        names = {param for param in params if fnmatchcase(param, pattern)}
        if not names:
            raise ValueError(
                f"{func}(): {name} has {pattern!r}; expected the name of a parameter, or a pattern"
            )
        found |= names
    return found
