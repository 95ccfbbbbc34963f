"""The errors that checks raise most often: the caller raises what these functions return."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastattn._args.types import Array

# What writing fails with that could be opened: the disk, a quota, a limit of size, or the device.
FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG, errno.EIO)


def wrong_shape(func: str, name: str, x: Array, expected: object) -> ValueError:
    """The argument `name` of `func` became the array `x`, whose shape is not `expected`."""
    return ValueError(f"{func}(): {name} has shape {x.shape}; expected {expected}")


def wrong_dtype(func: str, name: str, x: Array, expected: str) -> TypeError:
    """The dtype of the array `x` is not `expected`."""
    return TypeError(f"{func}(): {name} has dtype {x.dtype}; expected {expected}")


def wrong_type(func: str, name: str, x: Any, expected: str) -> TypeError:
    """The type of `x` is not `expected`."""
    return TypeError(f"{func}(): {name} is of type {type(x).__name__}; expected {expected}")


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Give an OSError of `FULL` the name of the file that the block writes; Python's own has none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in FULL:
            error.filename = os.fsdecode(path)
        raise
