"""Batches of sequences of different lengths: which tokens count, and where they stand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fastattn._args.values import as_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from fastattn._args.types import Array, Bools, Ints

NO_TOKEN = -1  # what `generate` yields for a sequence that has ended


def token_ids(func: str, ids: ArrayLike, vocab_size: int, name: str = "ids") -> Ints:
    """`ids`, the argument `name`, as (batch, length); a single sequence is a batch of one."""
    array = as_array(func, name, ids)
    if array.dtype.kind == "U":
        raise TypeError(f"{func}(): {name} is text; expected ids, as text.encode([...]) makes them")
    if array.size == 0:
        array = np.zeros(array.shape, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{func}(): {name} has dtype {array.dtype}; expected integers")
    if array.ndim not in (1, 2):
        raise ValueError(f"{func}(): {name} has shape {array.shape}; expected (batch, length) or (length,)")
    if array.size:
        least, most = array.min(), array.max()
        if least < 0 or most >= vocab_size:
            wrong = least if least < 0 else most
            raise ValueError(f"{func}(): {name} has {wrong}; expected 0 to {vocab_size - 1}")
    return np.atleast_2d(array).astype(np.int64, copy=False)


def attended(func: str, mask: ArrayLike | None, ids: Ints) -> Bools | None:
    """`mask`, 1 or True for each token that counts, as (batch, length) of bool; None if all do."""
    if mask is None:
        return None
    array = as_array(func, "attention_mask", mask)
    if array.dtype.kind not in "biu" or (array.dtype.kind != "b" and not ((array == 0) | (array == 1)).all()):
        raise TypeError(f"{func}(): attention_mask is of {array.dtype}; expected bool, or integers 0 and 1")
    bools: Bools = np.atleast_2d(array).astype(np.bool_, copy=False)
    if bools.shape != ids.shape:
        raise ValueError(f"{func}(): attention_mask has shape {bools.shape}; expected ids', {ids.shape}")
    return None if bools.all() else bools


def align(mask: Bools | None) -> tuple[Ints | None, Ints | None]:
    """How many tokens of each sequence count, (batch,), and the order that puts these before the others.

    The order, (batch, length), is for `reorder`. So padding on the left or between tokens becomes padding on
    the right, which is the only one that models know. Without a mask both are None; the order is None, too,
    if nothing has to move.
    """
    if mask is None:
        return None, None
    lengths: Ints = mask.sum(axis=1)
    if np.array_equal(mask, np.arange(mask.shape[1]) < lengths[:, None]):
        return lengths, None
    return lengths, np.argsort(~mask, axis=1, kind="stable")


def reorder(x: Array, order: Ints | None) -> Array:
    """x is (batch, length, ...), order (batch, length): the tokens of each sequence in that order."""
    return x if order is None else x[np.arange(len(x))[:, None], order]


def restore(x: Array, order: Ints | None) -> Array:
    """Undo `reorder`."""
    return reorder(x, None if order is None else np.argsort(order, axis=1))


def require_length(func: str, length: int, longest: int | None) -> None:
    """Raise if the model has no positions for a sequence of that length."""
    if longest is not None and length > longest:
        raise ValueError(f"{func}(): {length} tokens in a sequence; expected at most {longest}")


def pad(sequences: Sequence[Sequence[int] | Ints]) -> tuple[Ints, Bools]:
    """Sequences of ids as one array, filled up on the right, and which of it counts; both (batch, length)."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    ids = np.zeros((len(sequences), max(lengths, default=0)), np.int64)
    mask: Bools = np.arange(ids.shape[1]) < lengths[:, None]
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = sequence
    return ids, mask
