"""Parameters are chosen by patterns of their names."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from fastattn._args.values import short


def patterns(func: str, name: str, x: Any) -> list[str]:
    given = [x] if isinstance(x, str) else x
    if not isinstance(given, Sequence) or not all(isinstance(pattern, str) for pattern in given):
        raise TypeError(f"{func}(): {name} is {short(x)}; expected a pattern of names, or several")
    return list(given)


def matching(func: str, name: str, x: Any, params: Collection[str]) -> set[str]:
    """The names in `params` that a pattern of `x` has. Each pattern has one, or it is misspelt."""
    found: set[str] = set()
    for pattern in patterns(func, name, x):
        names = {param for param in params if fnmatchcase(param, pattern)}
        if not names:
            expected = f"a pattern of whole names: {near(pattern, params)}"
            raise ValueError(f"{func}(): {name} has {pattern!r}, which fits no name; expected {expected}")
        found |= names
    return found


def near(pattern: str, params: Collection[str]) -> str:
    """Advice for a `pattern` that fits no name."""
    core = pattern.strip("*.")
    held = [param for param in params if core and core in param]
    if held:
        return f"'*{core}*' has {len(held)} of them, such as {held[0]!r}"
    words = dict.fromkeys(word for param in params for word in re.split("[._]", param))
    for word in get_close_matches(core, (*params, *words), 1):
        return f"there is {word!r}, as in {next(param for param in params if word in param)!r}"
    return f"there is {next(iter(params))!r}" if params else "there are none"
