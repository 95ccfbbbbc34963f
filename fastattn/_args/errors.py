"""The errors of checks: their texts begin with "(): ", before which a public function puts its name.

So nothing but the public function knows its name, and calls without an error pay nothing for it.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from fastattn._args.types import Array

P = ParamSpec("P")
R = TypeVar("R")

# What writing fails with that could be opened: the disk, a quota, a limit of size, or the device.
FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG, errno.EIO)


def put_name(func: str, error: Exception, inner: str = "") -> None:
    """Let the text of `error` begin with the name `func`, if checks raised it and it has no name yet.

    It may have the name `inner`: of a function that `func` consists of, which callers do not know.
    """
    text = error.args[0] if error.args else None
    if isinstance(text, str) and (text.startswith("():") or (inner and text.startswith(f"{inner}()"))):
        text = func + text[text.index("()") :]
        error.args = (text, *error.args[1:])
        if isinstance(error, ImportError):
            error.msg = text


def named(func: str, by_name: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a public function: the errors of its checks get its name.

    In `func`, {self} is the first argument, and {cls} its class, or itself in a classmethod. Functions that
    take a few microseconds call `put_name` themselves: a decorator costs some tenths of one. Python's error
    for too many positional arguments also says which are passed `by_name`.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                first = args[0] if args else None
                cls = first if isinstance(first, type) else type(first)
                put_name(func.format(cls=cls.__name__, self=first), error)
                text, own = str(error), f"{function.__qualname__}()"
                if isinstance(error, TypeError) and text.startswith(own) and hasattr(cls, function.__name__):
                    # Python's, which names the class that defines the method
                    error.args = (text.replace(own, f"{cls.__name__}.{function.__name__}()", 1),)
                if by_name and "positional argument" in str(error):
                    error.args = (f"{error}; {by_name} are passed by name",)
                raise

        return checked

    return decorate


def wrong_shape(name: str, x: Array, expected: object) -> ValueError:
    """The argument `name` became the array `x`, whose shape is not `expected`."""
    return ValueError(f"(): {name} has shape {x.shape}; expected {expected}")


def wrong_dtype(name: str, x: Array, expected: str) -> TypeError:
    """The dtype of the array `x` is not `expected`."""
    return TypeError(f"(): {name} has dtype {x.dtype}; expected {expected}")


def wrong_type(name: str, x: Any, expected: str) -> TypeError:
    """The type of `x` is not `expected`."""
    return TypeError(f"(): {name} is of type {type(x).__name__}; expected {expected}")


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Give an OSError of `FULL` the name of the file that the block writes; Python's own has none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in FULL:
            error.filename = os.fsdecode(path)
        raise
