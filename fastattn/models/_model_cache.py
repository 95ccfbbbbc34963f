"""Caches of language models: keys and values of all layers, of those with windows no more than is needed."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn.layers._cache import KVCache
from fastattn.models._speculation import MOST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, DTypeLike
    from typing_extensions import Self

    from fastattn._args.key_ranges import Range
    from fastattn._args.types import Array, Ints
    from fastattn._engine.slots import Slots
    from fastattn.layers._block import Window

# Keys are dropped in multiples of so many tokens. Kernels merge what they have of keys at multiples of it,
# counted from the first key (PART_K in `src/operands.inc.h`): so results keep their bits. A text can be cut
# back by so many tokens at least.
PART = 4096


class KeyHeads(NamedTuple):
    """Heads of keys that the layers of a model have together, of one size and one window."""

    heads_kv: int
    head_dim: int
    left: int | None  # so many keys before a query are attended; None: all


class ModelCache:
    """Keys and values of all layers of a model, in a `KVCache` for each of its `KeyHeads`.

    Those with a window are dropped when `forget` finds that they are in no window any more. Then the first
    keys that are there have the positions `firsts`.
    """

    def __init__(
        self, key_heads: Sequence[KeyHeads], capacity: int = 0, dtype: DTypeLike | None = None
    ) -> None:
        self._heads = tuple(key_heads)
        self.groups = [KVCache(capacity, dtype) for _ in key_heads]
        self.firsts = (0,) * len(self.groups)

    def __copy__(self) -> Self:
        """A cache that goes on by itself, over the same arrays."""
        cache = object.__new__(type(self))
        vars(cache).update(vars(self), groups=[copy.copy(each) for each in self.groups])
        return cache

    @property
    def batch(self) -> int | None:
        """Number of sequences; None before the first tokens."""
        return self.groups[0].batch

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return self.firsts[0] + self.groups[0].length

    @property
    def lengths(self) -> Ints:
        """Tokens of each sequence, (batch,)."""
        return self.groups[0].lengths + self.firsts[0]

    @property
    def offset(self) -> Ints | int:
        """Position of the next token: one number, or one for each sequence, (batch,)."""
        return self.groups[0].offset + self.firsts[0]

    @property
    def nbytes(self) -> int:
        """Bytes of memory of all arrays."""
        return sum(each.nbytes for each in self.groups)

    def extend(self, batch: int, tokens: int, dtype: np.dtype[Any], counts: Ints | None) -> tuple[Slots, ...]:
        """Make room for new tokens and count them; the positions in these slots are from `firsts` on."""
        shapes = [(batch, heads.heads_kv, tokens, heads.head_dim) for heads in self._heads]
        groups = zip(self.groups, shapes, strict=True)
        return tuple(each._extend(shape, shape, dtype, counts) for each, shape in groups)

    def ranges(self, ranges: Sequence[Range], windows: Sequence[Window]) -> tuple[Range, ...]:
        """Ranges of all keys, one for each of `windows`, as ranges of those that are here."""
        firsts = {heads.left: first for heads, first in zip(self._heads, self.firsts, strict=True)}
        found = []
        for (begin, end), window in zip(ranges, windows, strict=True):
            if window is not None and (first := firsts.get(window[0], 0)):
                begin, end = (None if x is None else x - first for x in (begin, end))
            found.append((begin, end))
        return tuple(found)

    def forget(self) -> None:
        """Drop keys that are in no window of the last `PART` tokens, nor of any after them."""
        if all(heads.left is None for heads in self._heads):
            return
        shortest, longest = int(np.min(self.offset)), self.length
        for i, (heads, first) in enumerate(zip(self._heads, self.firsts, strict=True)):
            if heads.left is None:
                continue
            count = (shortest - PART - heads.left - first) // PART * PART
            if count > 0:
                # For as many as there are when the next ones are dropped, with tokens that are proposed.
                capacity = longest - shortest + heads.left + 2 * PART + MOST + 1
                groups, firsts = self.groups.copy(), list(self.firsts)
                groups[i], firsts[i] = copy.copy(groups[i]), first + count
                groups[i]._forget(count, capacity)
                vars(self).update(groups=groups, firsts=tuple(firsts))  # at once: it may be interrupted

    def reachable(self, length: int) -> int:
        """The most tokens, up to `length`, to which it can be cut back: so many, or 0."""
        for heads, first in zip(self._heads, self.firsts, strict=True):
            if heads.left is not None and first and length - heads.left < first:
                return 0
        return length

    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on, which is `reachable`."""
        if not length:
            self.firsts = (0,) * len(self.groups)
        for each, first in zip(self.groups, self.firsts, strict=True):
            each.truncate(length - first)

    def own(self) -> None:
        """Hold everything in memory of its own, without room for more tokens."""
        if self.batch is not None:
            for each in self.groups:
                each._forget(0, each.length)

    def select(self, sequences: ArrayLike) -> None:
        """Keep the sequences of these indices, as `KVCache.select` does."""
        for each in self.groups:
            each.select(sequences)

    def staggered(self, tokens: int) -> Self:
        """Count more tokens of the only sequence, and return their cache: see `KVCache._staggered`."""
        cache = copy.copy(self)
        cache.groups = [each._staggered(tokens) for each in self.groups]
        return cache

    def go_on(self, staggered: Self, row: int) -> None:
        """Take over what that row of a `staggered` cache has made beside keys and values: nothing."""

    def _arrays(self) -> dict[str, Array]:
        """Keys, values, scales, lengths and positions of the first keys, by name: copies."""
        found = {"lengths": self.lengths, "firsts": np.array(self.firsts)}
        for i, each in enumerate(self.groups):
            arrays = each._arrays()
            del arrays["lengths"]
            found |= {_numbered(name, i): x for name, x in arrays.items()}
        return found

    @classmethod
    def of(cls, key_heads: Sequence[KeyHeads], arrays: dict[str, Array], where: str) -> ModelCache:
        """The cache of one sequence with these `_arrays`, of the file `where`."""
        scaled, plain = (
            [{name: _numbered(name, i) for name in names} for i in range(len(key_heads))]
            for names in (("k", "v", "k_scale", "v_scale"), ("k", "v"))
        )
        groups = scaled if "k_scale" in arrays else plain
        if arrays.keys() != {*_names(groups)}:
            came = f"{where} has the arrays {', '.join(arrays)}"
            expected = f"{', '.join(_names(scaled))}, or {', '.join(_names(plain))}"
            raise ValueError(f"(): {came}; expected {expected}")
        cache, firsts, lengths = cls(key_heads), arrays["firsts"], arrays["lengths"]
        if firsts.shape != (len(groups),) or firsts.dtype != np.int64:
            came = f"firsts {firsts.shape} in {firsts.dtype}"
            raise ValueError(f"(): {where} has {came}; expected ({len(groups)},) in int64")
        cache.firsts = tuple(firsts.tolist())
        if any(n and (n < 0 or x.left is None) for n, x in zip(cache.firsts, key_heads, strict=True)):
            came = f"keys from the positions {cache.firsts} on"
            raise ValueError(f"(): {where} has {came}; expected 0 where there is no window, and no less")
        cache.groups = [
            KVCache._of({**{name: arrays[own] for name, own in each.items()}, "lengths": lengths - n}, where)
            for each, n in zip(groups, cache.firsts, strict=True)
        ]
        if cache.reachable(cache.length) < cache.length:
            came = f"keys from the positions {cache.firsts} on"
            raise ValueError(f"(): {where} has {came}; expected all that the next token's windows reach")
        return cache


def _numbered(name: str, i: int) -> str:
    """The name of an array of the group i."""
    return f"{name}.{i}" if i else name


def _names(groups: Sequence[dict[str, str]]) -> list[str]:
    """The names of all arrays of a cache, with those of its groups."""
    return [*(name for each in groups for name in each.values()), "lengths", "firsts"]
