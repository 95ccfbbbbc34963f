"""The errors that checks raise most often: the caller raises what these functions return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastattn._args.types import Array


def wrong_shape(func: str, name: str, x: Array, expected: object) -> ValueError:
    """The argument `name` of `func` became the array `x`, whose shape is not `expected`."""
    return ValueError(f"{func}(): {name} has shape {x.shape}; expected {expected}")


def wrong_dtype(func: str, name: str, x: Array, expected: str) -> TypeError:
    """The dtype of the array `x` is not `expected`."""
    return TypeError(f"{func}(): {name} has dtype {x.dtype}; expected {expected}")


def wrong_type(func: str, name: str, x: Any, expected: str) -> TypeError:
    """The type of `x` is not `expected`."""
    return TypeError(f"{func}(): {name} is of type {type(x).__name__}; expected {expected}")
