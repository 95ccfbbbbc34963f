"""Masks that name the keys themselves: dense arrays, blocks, global tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastattn._args import key_ranges
from fastattn._args.key_ranges import Resolved
from fastattn._args.types import ArrayLike, Bools
from fastattn._args.values import MOST_SIZE, generator, integers, require_broadcast
from fastattn.masks._grid import sizes
from fastattn.masks._mask import Mask, ScoreShape, bools, runs_of


@dataclass(frozen=True, repr=False, eq=False)
class dense(Mask):
    """A bool array, True where a query attends a key; it broadcasts to (..., heads, len_q, len_k).

    As ``attention(mask=array)``, but it combines with other masks, and `compile` reads it only once.
    """

    array: ArrayLike

    def __post_init__(self) -> None:
        self._set(array=bools("array", self.array).copy())  # the caller may write to his own

    def resolve(self, shape: ScoreShape) -> Resolved:
        array: Any = self.array
        dims = "(..., heads_q, len_q, len_k)"
        require_broadcast("array of dense()", array.shape, shape.scores, dims)
        array = array.reshape((1,) * (3 - array.ndim) + array.shape)
        rows = array.shape[:-1]
        runs = runs_of(np.broadcast_to(array, (*rows, shape.len_k)))
        number = np.arange(math.prod(rows)).reshape(rows)
        return key_ranges.simplified(key_ranges.union(number, number.size, *runs, shape.len_k))


@dataclass(frozen=True, repr=False, eq=False)
class block_sparse(Mask):
    """Blocks of keys for each block of query positions.

    Parameters
    ----------
    bitmap : array_like of bool, (..., blocks_q, blocks_k)
        True where the queries of a block attend the keys of a block; leading axes are (..., heads). Positions
        after the last block are masked.
    block : int or (int, int)
        Block size in query positions and keys.
    """

    bitmap: ArrayLike
    block: int | tuple[int, int]

    def __post_init__(self) -> None:
        bitmap = bools("bitmap", self.bitmap).copy()
        if bitmap.ndim < 2:
            expected = "(..., blocks_q, blocks_k)"
            raise ValueError(f"(): bitmap has shape {bitmap.shape}; expected {expected}")
        self._set(bitmap=bitmap, block=sizes("block", self.block, 2, high=None))

    def resolve(self, shape: ScoreShape) -> Resolved:
        bitmap: Any = self.bitmap
        block_q, block_k = self.block  # type: ignore[misc]
        *lead, blocks_q, blocks_k = bitmap.shape
        target = (*shape.batch_shape, shape.heads, blocks_q, blocks_k)
        dims = "(..., heads_q, blocks_q, blocks_k)"
        require_broadcast("bitmap of block_sparse()", bitmap.shape, target, dims)
        owner, begin, end = runs_of(bitmap)
        block = shape.position // min(block_q, key_ranges.UNBOUNDED)
        block_k = min(block_k, max(1, shape.len_k))
        n = math.prod(bitmap.shape[:-1])  # the number of an empty list, for queries after the last block
        first = np.arange(0, n, blocks_q or 1).reshape(*lead, 1) if lead else np.zeros((1, 1), np.int64)
        number = np.where((block >= 0) & (block < blocks_q), first + block, n)
        lists = key_ranges.union(number, n + 1, owner, begin * block_k, end * block_k, shape.len_k)
        return Resolved(lists=lists)


@dataclass(frozen=True, repr=False, eq=False)
class global_tokens(Mask):
    """Tokens at positions `index` attend all keys, and all queries attend them.

    ``window(256, 256) | global_tokens([0])`` is Longformer, Beltagy et al. 2020, arXiv:2004.05150.
    """

    index: ArrayLike

    def __post_init__(self) -> None:
        self._set(index=integers("index", self.index, low=0).ravel())

    def resolve(self, shape: ScoreShape) -> Resolved:
        chosen: Any = self.index
        number = np.isin(shape.position, chosen).astype(np.int64)  # list 0: the chosen keys; 1: all keys
        owner = np.append(np.zeros_like(chosen), 1)
        begin, end = np.append(chosen, 0), np.append(chosen + 1, shape.len_k)
        return key_ranges.simplified(key_ranges.union(number, 2, owner, begin, end, shape.len_k))


@dataclass(frozen=True, repr=False, eq=False)
class bigbird(Mask):
    """BigBird: a window of blocks around the query's own, global blocks, and random blocks.

    Zaheer et al. 2020, arXiv:2007.14062.

    Parameters
    ----------
    block : int
        Positions per block.
    window : int, default 3
        Blocks in the window, an odd number, with the query's own in the middle.
    global_blocks : int, default 1
        Number of first blocks that attend all keys and are attended by all queries.
    random : int, default 3
        Random blocks per block of queries, without repetition, the same for all heads.
    rng : numpy.random.Generator, int or None, default 0
        Generator of the random blocks or its seed; None for a new one. The mask keeps a seed, so every call
        has the same blocks.
    """

    block: int
    window: int = 3
    global_blocks: int = 1
    random: int = 3
    rng: np.random.Generator | int | None = 0

    def __post_init__(self) -> None:
        self._set_integers(MOST_SIZE, block=1, window=1, global_blocks=0, random=0)
        if self.window % 2 == 0:
            raise ValueError(f"(): window is {self.window}; expected an odd number")
        drawing: Any = generator("rng", self.rng)
        has_seed = self.rng is not None and self.rng is not drawing
        self._set(rng=int(self.rng if has_seed else drawing.integers(2**63)))  # type: ignore[arg-type]

    def resolve(self, shape: ScoreShape) -> Resolved:
        return block_sparse(self.bitmap(shape.len_k), self.block).resolve(shape)

    def bitmap(self, len_k: int) -> Bools:
        """Return the blocks of keys that each block of queries attends, (blocks, blocks)."""
        number = np.arange(-(-len_k // self.block))
        bitmap = abs(number[:, None] - number) <= self.window // 2
        bitmap[: self.global_blocks] = True
        bitmap[:, : self.global_blocks] = True
        rng = np.random.default_rng(self.rng)
        for row in bitmap:
            others = np.flatnonzero(~row)
            row[rng.permutation(others)[: self.random]] = True
        return bitmap
