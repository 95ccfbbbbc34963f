"""Caches of language models: keys and values of all layers, and states of those without attention.

Of layers with windows, no more keys are kept than are needed; of states, copies at earlier places.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._args.key_ranges import Range
from fastattn._args.types import Array, ArrayLike, DTypeLike, Ints
from fastattn._engine.slots import Slots
from fastattn.layers._block import Window
from fastattn.layers._cache import KVCache
from fastattn.layers._mixers import Carried, Kind

if TYPE_CHECKING:
    from typing_extensions import Self

# Keys are dropped in multiples of so many tokens. Kernels merge what they have of keys at multiples of it,
# counted from the first key (PART_K in `src/operands.inc.h`): so results keep their bits. A text can be cut
# back by so many tokens at least.
PART = 4096
# Tokens that are proposed at a time. With 15, a step takes 1.9 times as long in float32 weights, 4 in 4 bits.
MOST = 15
# Tokens between two snapshots that are taken within a text.
EVERY = 256


class KeyHeads(NamedTuple):
    """Heads of keys that the layers of a model have together, of one size and one window."""

    heads_kv: int
    head_dim: int
    left: int | None  # so many keys before a query are attended; None: all


class _Snapshot(NamedTuple):
    """States after so many tokens of a sequence."""

    length: int
    states: tuple[Array, ...]


class ModelCache:
    """Keys and values of all layers of a model, in a `KVCache` for each of its `KeyHeads`; and states.

    Keys with a window are dropped when `forget` finds that they are in no window any more. Then the first
    keys that are there have the positions `firsts`.

    States, of which each layer without attention has these `kinds`, are after the tokens of all calls that
    ended. They cannot be cut back as keys can. So a session takes snapshots of them, to which `truncate` goes
    back. Their number grows with the logarithm of the text's length: where a text is cut, at most as many
    tokens are computed again as are cut off, or `EVERY`.
    """

    def __init__(
        self,
        key_heads: Sequence[KeyHeads],
        capacity: int = 0,
        dtype: DTypeLike | None = None,
        kinds: Sequence[Sequence[Kind]] = (),
    ) -> None:
        self._heads = tuple(key_heads)
        self.groups = [KVCache(capacity, dtype) for _ in key_heads]
        self.firsts = (0,) * len(self.groups)
        self.kinds = kinds
        self._now = _Snapshot(0, ())  # empty before the first token
        self._spare: tuple[Array, ...] = ()  # of the same shapes: the next call writes there
        self._snapshots: list[_Snapshot] = []
        self._rows: tuple[Array, ...] = ()  # of a `staggered` cache: states before each row, and at the end

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
        states = (*self._now.states, *self._spare, *(x for each in self._snapshots for x in each.states))
        return sum(each.nbytes for each in self.groups) + sum(x.nbytes for x in states)

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

    def carried(self, batch: int) -> list[Carried]:
        """The arguments of a call of each layer: it reads the states as they are, and writes to others."""
        kinds = [kind for each in self.kinds for kind in each]
        if not self._rows and not self._spare:
            self._spare = tuple(np.empty((batch, *shape), dtype) for shape, dtype in kinds)
        no_states: list[Any] = [None] * len(kinds)
        before = iter([x[:-1] for x in self._rows] or self._now.states or no_states)
        after = iter([x[1:] for x in self._rows] or self._spare)
        found = [[{"state": next(before), "out_state": next(after)} for _ in each] for each in self.kinds]
        return [(*each, {}) if len(each) == 1 else each for each in found]

    def keep(self) -> None:
        """Hold the states that a call has written, of the tokens whose keys are here."""
        self._now, self._spare = _Snapshot(self.length, self._spare), self._now.states

    def take_snapshot(self) -> None:
        """Copy the states as they are now, and forget copies that are not needed."""
        kept: list[_Snapshot] = []
        now = self._now
        every = [each for each in self._snapshots if each.length < now.length]
        every.append(_Snapshot(now.length, tuple(x.copy() for x in now.states)))
        for i, each in enumerate(every):
            begin = kept[-1].length if kept else 0
            # Without it, a text that is cut before the next one goes back by less than is cut off.
            if each is every[-1] or every[i + 1].length - begin > now.length - every[i + 1].length:
                kept.append(each)
        self._snapshots = kept

    def reachable(self, length: int) -> int:
        """The most tokens, up to `length`, to which it can be cut back."""
        if self.kinds:
            lengths = [0, *(each.length for each in (*self._snapshots, self._now))]
            return max(n for n in lengths if n <= length and (not n or self._keys_reach(n)))
        return length if self._keys_reach(length) else 0

    def _keys_reach(self, length: int) -> bool:
        """Whether all keys are here that tokens from `length` on attend."""
        each = zip(self._heads, self.firsts, strict=True)
        return not any(x.left is not None and first and length - x.left < first for x, first in each)

    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on, which is `reachable`."""
        if not length:
            self.firsts = (0,) * len(self.groups)
        for each, first in zip(self.groups, self.firsts, strict=True):
            each.truncate(length - first)
        self._snapshots = [each for each in self._snapshots if each.length <= length]
        if self.kinds and self._now.length != length:
            found = (each.states for each in self._snapshots if each.length == length)
            self._now = _Snapshot(length, tuple(x.copy() for x in next(found, ())))

    def own(self) -> None:
        """Hold everything in memory of its own, without room for more tokens."""
        if self.batch is not None:
            for each in self.groups:
                each._forget(0, each.length)
        self._now, self._snapshots = copy.deepcopy((self._now, self._snapshots))
        self._spare = ()

    def select(self, sequences: ArrayLike) -> None:
        """Keep the sequences of these indices, as `KVCache.select` does."""
        for each in self.groups:
            each.select(sequences)
        if self.kinds:
            index = np.asarray(sequences)
            self._now, self._spare = _Snapshot(self.length, tuple(x[index] for x in self._now.states)), ()

    def staggered(self, tokens: int) -> Self:
        """Count more tokens of the only sequence, and return their cache: see `KVCache._staggered`.

        It has memory for their states.
        """
        cache = copy.copy(self)
        cache.groups = [each._staggered(tokens) for each in self.groups]
        cache._rows = tuple(np.empty((tokens + 1, *x.shape[1:]), x.dtype) for x in self._now.states)
        for rows, x in zip(cache._rows, self._now.states, strict=True):
            rows[:1] = x
        return cache

    def go_on(self, staggered: Self, row: int) -> None:
        """Take over the states after that row, the next token, of a `staggered` cache."""
        if self.kinds:
            states = tuple(x[row + 1 : row + 2].copy() for x in staggered._rows)
            self._now = _Snapshot(self._now.length + 1, states)

    def _arrays(self) -> dict[str, Array]:
        """Keys, values, scales, lengths, positions of the first keys and all states, by name: copies."""
        found = {"lengths": self.lengths, "firsts": np.array(self.firsts)}
        for i, each in enumerate(self.groups):
            arrays = each._arrays()
            del arrays["lengths"]
            found |= {_numbered(name, i): x for name, x in arrays.items()}
        for at in (self._now, *self._snapshots):
            found |= {f"states.{at.length}.{i}": x.copy() for i, x in enumerate(at.states)}
        return found

    @classmethod
    def of(
        cls,
        key_heads: Sequence[KeyHeads],
        kinds: Sequence[Sequence[Kind]],
        arrays: dict[str, Array],
        where: str,
    ) -> ModelCache:
        """The cache of one sequence with these `_arrays`, of the file `where`."""
        states = {name: x for name, x in arrays.items() if kinds and name.startswith("states.")}
        arrays = {name: x for name, x in arrays.items() if name not in states}
        names = ("k", "v", "k_scale", "v_scale") if "k_scale" in arrays else ("k", "v")
        groups = [{name: _numbered(name, i) for name in names} for i in range(len(key_heads))]
        expected = [*(own for each in groups for own in each.values()), "lengths", "firsts"]
        if arrays.keys() != {*expected}:
            came = f"{where} has the arrays {', '.join(arrays)}"
            raise ValueError(f"(): {came}; expected {', '.join(expected)}")
        cache, firsts, lengths = cls(key_heads, kinds=kinds), arrays["firsts"], arrays["lengths"]
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
        if cache.length and not cache._keys_reach(cache.length):
            came = f"keys from the positions {cache.firsts} on"
            raise ValueError(f"(): {where} has {came}; expected all that the next token's windows reach")
        if kinds:
            cache._take_over(states, where)
        return cache

    def _take_over(self, states: dict[str, Array], where: str) -> None:
        """Hold the states of the file `where`."""
        flat = [((1, *shape), dtype) for each in self.kinds for shape, dtype in each]
        lengths = sorted({int(part) for name in states if (part := name.split(".")[1]).isdecimal()})
        expected = {f"states.{length}.{i}": kind for length in lengths for i, kind in enumerate(flat)}
        found = {name: (x.shape, x.dtype) for name, x in states.items()}
        if found != expected or not lengths or not 0 < lengths[0] <= lengths[-1] == self.length:
            came = f"states after {lengths} tokens, of {len(found)} arrays"
            raise ValueError(f"(): {where} has {came}; expected what a session of this model holds")
        self._snapshots = [
            _Snapshot(length, tuple(states[f"states.{length}.{i}"] for i in range(len(flat))))
            for length in lengths
        ]
        self._now = _Snapshot(lengths[-1], tuple(x.copy() for x in self._snapshots[-1].states))


def _numbered(name: str, i: int) -> str:
    """The name of an array of the group i."""
    return f"{name}.{i}" if i else name
