"""Masks of chosen keys: dense ones, blocks, global tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args import key_ranges
from fastattn._args.key_ranges import Resolved
from fastattn._args.values import MOST_SIZE, as_array, integer, require_broadcast, short
from fastattn.masks._mask import Mask, ScoreShape, runs_of
from fastattn.masks._sequence import _integers, _set

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fastattn._args.types import Bools


@dataclass(frozen=True, repr=False, eq=False)
class dense(Mask):
    """A bool array, True where a query attends; broadcasts to (..., heads, len_q, len_k).

    As ``attention(mask=array)``, but it combines with other masks, and is read only once if compiled.
    """

    array: ArrayLike

    def __post_init__(self) -> None:
        _set(self, "array", _bools("dense", "array", self.array))

    def resolve(self, shape: ScoreShape) -> Resolved:
        array: Any = self.array
        target = (*shape.batch_shape, shape.heads, shape.len_q, shape.len_k)
        require_broadcast(shape.func, "array of dense()", array.shape, target, "(..., heads_q, len_q, len_k)")
        array = array.reshape((1,) * (3 - array.ndim) + array.shape)
        rows = array.shape[:-1]
        array = np.broadcast_to(array, (*rows, shape.len_k))
        index = np.arange(int(np.prod(rows))).reshape(rows)
        return key_ranges.simplified(key_ranges.union(index, index.size, *runs_of(array), shape.len_k))


@dataclass(frozen=True, repr=False, eq=False)
class block_sparse(Mask):
    """Blocks of keys for each block of queries, by their positions.

    Parameters
    ----------
    bitmap : array_like of bool, (..., blocks_q, blocks_k)
        True where the queries of a block attend the keys of a block. Leading axes are (..., heads). Positions
        beyond its blocks attend nothing, keys beyond are not attended.
    block : int or (int, int)
        Positions and keys of a block.
    """

    bitmap: ArrayLike
    block: int | tuple[int, int]

    def __post_init__(self) -> None:
        bitmap = _bools("block_sparse", "bitmap", self.bitmap)
        if bitmap.ndim < 2:
            raise ValueError(
                f"block_sparse(): bitmap has shape {bitmap.shape}; expected (..., blocks_q, blocks_k)"
            )
        _set(self, "bitmap", bitmap)
        block = self.block if isinstance(self.block, (tuple, list)) else (self.block, self.block)
        if len(block) != 2:
            raise ValueError(f"block_sparse(): block is {short(self.block)}; expected one integer or two")
        _set(self, "block", tuple(integer("block_sparse", "block", n, 1) for n in block))

    def resolve(self, shape: ScoreShape) -> Resolved:
        bitmap: Any = self.bitmap
        block_q, block_k = self.block  # type: ignore[misc]
        *lead, blocks_q, blocks_k = bitmap.shape
        target = (*shape.batch_shape, shape.heads, blocks_q, blocks_k)
        require_broadcast(
            shape.func, "bitmap of block_sparse()", bitmap.shape, target, "(..., heads_q, blocks_q, blocks_k)"
        )
        owner, begin, end = runs_of(bitmap)
        block = shape.position // min(block_q, key_ranges.UNBOUNDED)
        block_k = min(block_k, max(1, shape.len_k))
        n = int(np.prod(bitmap.shape[:-1]))
        row = np.arange(0, n, blocks_q or 1).reshape(*lead, 1) if lead else np.zeros((1, 1), np.int64)
        index = np.where((block >= 0) & (block < blocks_q), row + block, n)
        return Resolved(
            lists=key_ranges.union(index, n + 1, owner, begin * block_k, end * block_k, shape.len_k)
        )


@dataclass(frozen=True, repr=False, eq=False)
class global_tokens(Mask):
    """Positions that attend all keys and are attended by all: ``window(256, 256) | global_tokens([0])``.

    Longformer, Beltagy et al. 2020, arXiv:2004.05150.
    """

    index: ArrayLike

    def __post_init__(self) -> None:
        _set(self, "index", np.atleast_1d(_integers("global_tokens", "index", self.index)).ravel())

    def resolve(self, shape: ScoreShape) -> Resolved:
        chosen: Any = self.index
        number = np.isin(shape.position, chosen).astype(np.int64)
        owner = np.append(np.zeros_like(chosen), 1)
        begin, end = np.append(chosen, 0), np.append(chosen + 1, shape.len_k)
        return key_ranges.simplified(key_ranges.union(number, 2, owner, begin, end, shape.len_k))


@dataclass(frozen=True, repr=False, eq=False)
class bigbird(Mask):
    """Blocks: a window of them, some that are global, some at random.

    BigBird, Zaheer et al. 2020, arXiv:2007.14062.

    Parameters
    ----------
    block : int
        Positions of a block.
    window : int, default 3
        Blocks around a query's own, which is the middle one: an odd number.
    global_blocks : int, default 1
        The first so many blocks attend all and are attended by all.
    random : int, default 3
        Further blocks for each block of queries, the same for all heads, drawn without repetition.
    seed : int, default 0
        Of those.
    """

    block: int
    window: int = 3
    global_blocks: int = 1
    random: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = {"block": 1, "window": 1, "global_blocks": 0, "random": 0}
        for name, low in sizes.items():
            _set(self, name, integer("bigbird", name, getattr(self, name), low, MOST_SIZE))
        _set(self, "seed", integer("bigbird", "seed", self.seed, 0))
        if self.window % 2 == 0:
            raise ValueError(f"bigbird(): window is {self.window}; expected an odd number")

    def resolve(self, shape: ScoreShape) -> Resolved:
        return block_sparse(self.bitmap(shape.len_k), self.block).resolve(shape)

    def bitmap(self, len_k: int) -> Bools:
        """Which blocks of keys each block of queries attends, (blocks, blocks)."""
        n = -(-len_k // self.block)
        number = np.arange(n)
        bitmap = abs(number[:, None] - number) <= self.window // 2
        bitmap[: self.global_blocks] = True
        bitmap[:, : self.global_blocks] = True
        rng = np.random.default_rng(self.seed)
        for row in bitmap:
            others = np.flatnonzero(~row)
            row[rng.permutation(others)[: self.random]] = True
        return bitmap


def _bools(func: str, name: str, x: ArrayLike) -> Bools:
    array = as_array(func, name, x)
    if array.dtype != np.bool_:
        raise TypeError(f"{func}(): {name} has dtype {array.dtype}; expected bool")
    return array.copy()  # a mask is a value: what the caller writes later is not in it
