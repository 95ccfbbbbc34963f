"""Batches of sequences of different lengths: which tokens count, and where they stand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._inputs import as_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from fastattn._args import Array, Bools, Ints


def token_ids(func: str, ids: ArrayLike, vocab_size: int) -> Ints:
    """`ids` as (batch, length); a single sequence is a batch of one."""
    array = as_array(func, "ids", ids)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{func}(): ids has dtype {array.dtype}; expected integers")
    if array.ndim not in (1, 2):
        raise ValueError(f"{func}(): ids has shape {array.shape}; expected (batch, length) or (length,)")
    if array.size:
        least, most = array.min(), array.max()
        if least < 0 or most >= vocab_size:
            wrong = least if least < 0 else most
            raise ValueError(f"{func}(): ids has {wrong}; expected 0 to {vocab_size - 1}")
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


def positions(mask: Bools | None, length: int) -> Ints:
    """Where each token stands among those of its sequence that count: (length,), or (batch, length)."""
    if mask is None:
        return np.arange(length)
    place: Ints = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    return place


def keys(mask: Bools | None) -> dict[str, Any]:
    """The arguments of `attention` that leave out the keys which do not count."""
    if mask is None:
        return {}
    count = mask.sum(axis=1)
    begin = mask.argmax(axis=1)
    index = np.arange(mask.shape[1])
    if not np.array_equal(mask, (index >= begin[:, None]) & (index < (begin + count)[:, None])):
        return {"mask": mask[:, None, None, :]}
    if not begin.any():  # padded on the right
        return {"kv_lengths": count}
    return {"row_ranges": (begin[:, None, None], (begin + count)[:, None, None])}


def pad(sequences: Sequence[Sequence[int] | Ints]) -> tuple[Ints, Bools]:
    """Sequences of ids as one array, filled up on the right, and which of it counts; both (batch, length)."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    ids = np.zeros((len(sequences), max(lengths, default=0)), np.int64)
    mask: Bools = np.arange(ids.shape[1]) < lengths[:, None]
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = sequence
    return ids, mask


def split_heads(x: Array, batch: int, length: int, heads: int) -> Array:
    """x is (batch * length, heads * head_dim); a view of it as (batch, heads, length, head_dim)."""
    return x.reshape(batch, length, heads, x.shape[1] // heads).transpose(0, 2, 1, 3)
