"""Masks of predicates, and masks that are resolved once for many calls."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastattn._args import key_ranges
from fastattn._args.errors import named
from fastattn._args.key_ranges import RangeLists, Resolved
from fastattn._args.types import ArrayLike, Bools, Ints, Shape
from fastattn._args.values import require_broadcast
from fastattn.masks._mask import Mask, ScoreShape, bools, runs_of, score_shape, shown

# `compile` evaluates a predicate on blocks of at most this many scores.
_BLOCK_SCORES = 2**20


@dataclass(frozen=True, repr=False, eq=False)
class _Compiled(Mask):
    """A mask that has been resolved for one shape."""

    source: Any  # the mask or predicate that `compile` was given
    shape: ScoreShape
    resolved: Resolved

    def resolve(self, shape: ScoreShape) -> Resolved:
        if self.shape.scores != shape.scores:
            raise ValueError(
                f"(): mask was compiled for {self.shape.scores}, (..., heads_q, len_q, len_k);"
                f" expected one for {shape.scores}"
            )
        if (self.shape.offset != shape.offset).any():
            raise ValueError("(): mask was compiled for another q_offset; expected one for this")
        return self.resolved

    def __repr__(self) -> str:
        return f"compile({shown(self.source)}, {self.shape.scores})"


@named("compile")
def compile(
    mask: Mask | Callable[[Ints, Ints, Ints, Ints], ArrayLike],
    shape: Shape,
    *,
    q_offset: ArrayLike | None = None,
) -> Mask:
    """Resolve a mask or a predicate once, for many calls with scores of one shape.

    Parameters
    ----------
    mask : Mask or callable
        A mask, or a function ``f(b, h, i, j)`` that returns a bool array, True where the query attends the
        key. Its arguments are integer arrays that broadcast against each other: number of the sequence over
        all batch dimensions, query head, position of the query, index of the key. Called on blocks of at most
        about a million scores.
    shape : tuple of int
        Shape of the scores, (..., heads_q, len_q, len_k); heads_q is 1 for 2-D arrays.
    q_offset : int or array_like of int, optional
        Position of the first query, as in `attention`; default ``len_k - len_q``.

    Returns
    -------
    Mask
        Holds the ranges, for this shape and offset only.

    Raises
    ------
    TypeError, ValueError
        If `mask` is neither a mask nor a function, or the function does not return a bool array that
        broadcasts to the scores.

    Notes
    -----
    O(scores) time for a predicate, less if it does not depend on b or h; memory for one block and the ranges.

    Examples
    --------
    >>> from fastattn import masks
    >>> mask = masks.compile(lambda b, h, i, j: (i >= j) & (i - j < 4), (1, 8, 64, 64))
    """
    scores = score_shape(shape, q_offset)
    if isinstance(mask, Mask):
        return _Compiled(mask, scores, mask.resolve(scores))
    if not callable(mask):
        raise TypeError(f"(): mask is of type {type(mask).__name__}; expected a mask or a function")
    return _Compiled(mask, scores, key_ranges.simplified(_of_predicate(mask, scores)))


def _explain(error: Exception, function: Callable[..., Any]) -> None:
    """Say more of an `error` where the predicate takes its arguments for numbers, or takes other ones."""
    if str(error).startswith("The truth value of an array"):
        came = "mask is a function that asks whether an array is true"
        expected = "&, | and np.where in the place of and, or and if: its arguments are arrays"
        raise ValueError(f"(): {came}; expected {expected}") from error
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C
        return
    try:
        signature.bind(*"bhij")
    except TypeError:
        expected = "f(b, h, i, j): batch item, head, position of the query, key"
        raise TypeError(f"(): mask is a function of {signature}; expected {expected}") from error


def _of_predicate(function: Callable[..., ArrayLike], shape: ScoreShape) -> RangeLists:
    """Lists of the keys for which `function` returns True."""
    b = np.arange(math.prod(shape.batch_shape)).reshape(*shape.batch_shape, 1, 1, 1)
    h = np.arange(shape.heads)[:, None, None]
    i, j = shape.position[..., None], np.arange(shape.len_k)

    def called(i: Ints) -> Bools:
        try:
            found = bools("what mask returns", function(b, h, i, j))
        except (TypeError, ValueError) as error:
            _explain(error, function)
            raise
        target = (*shape.batch_shape, shape.heads, i.shape[-2], shape.len_k)
        require_broadcast("what mask returns", found.shape, target, "(..., heads_q, len_q, len_k)")
        return found if found.ndim > 2 else found[(None,) * (3 - found.ndim)]

    # An axis has length 1 here where the predicate does not depend on the sequence, or on the head.
    lead = called(i[..., :1, :]).shape[:-2]
    block = max(1, _BLOCK_SCORES // max(1, math.prod(lead) * shape.len_k))
    numbers = np.arange(math.prod(lead) * shape.len_q).reshape(*lead, shape.len_q)
    parts = [np.zeros((3, 0), np.int64)]
    for first in range(0, shape.len_q, block):
        rows = numbers[..., first : first + block]
        found = called(i[..., first : first + block, :])
        row, begin, end = runs_of(np.broadcast_to(found, (*rows.shape, shape.len_k)))
        parts.append(np.stack([rows.ravel()[row], begin, end]))
    owner, begin, end = np.concatenate(parts, axis=1)
    return key_ranges.union(numbers, numbers.size, owner, begin, end, shape.len_k)
