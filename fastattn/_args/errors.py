"""The errors of checks: their texts begin with "(): ", before which a public function puts its name.

So nothing but the public function knows its name, and calls without an error pay nothing for it.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

from fastattn._args.types import Array, dtype_name

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
                name = func.format(cls=cls.__name__, self=first)
                found = told(error, name, function, kwargs, by_name)
                text, own = str(found), f"{function.__qualname__}()"
                if isinstance(found, TypeError) and text.startswith(own) and hasattr(cls, function.__name__):
                    # Python's, which names the class that defines the method
                    found.args = (text.replace(own, f"{cls.__name__}.{function.__name__}()", 1),)
                raise found from error.__cause__

        return checked

    return decorate


def told(
    error: Exception,
    name: str,
    function: Callable[..., Any],
    given: Mapping[str, Any],
    by_name: str = "",
    inner: str = "",
) -> Exception:
    """`error` of `function`, called with these arguments `given` by name, as the caller of `name` reads it.

    Of Python's own, it says which name is likely meant, and which ones are passed `by_name`. See `put_name`.
    """
    text = str(error)
    if isinstance(error, TypeError) and text.startswith(f"{function.__qualname__}() got an unexpected key"):
        error = import_module("fastattn._args.words").not_an_argument(given, function)
    elif by_name and "positional argument" in text:
        error.args = (f"{text}; {by_name} are passed by name",)
    put_name(name, error, inner)
    return error


def wrong_shape(name: str, x: Any, expected: object) -> ValueError:
    """The argument `name` became the array or tensor `x`, whose shape is not `expected`."""
    return ValueError(f"(): {name} has shape {tuple(x.shape)}; expected {expected}")


def wrong_dtype(name: str, x: Array, expected: str) -> TypeError:
    """The dtype of the array `x` is not `expected`."""
    return TypeError(f"(): {name} has dtype {dtype_name(x.dtype)}; expected {expected}")


def wrong_type(name: str, x: Any, expected: str) -> TypeError:
    """The type of `x` is not `expected`."""
    return TypeError(f"(): {name} is of type {type(x).__name__}; expected {expected}")


def needed(module: str, needs: str, how: str) -> Any:
    """Import an optional module; where it is missing, the error says what `needs` it, and `how` to get it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{needs}: {how} ({error})") from error


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Give an OSError of `FULL` the name of the file that the block writes; Python's own has none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in FULL:
            error.filename = os.fsdecode(path)
        raise
