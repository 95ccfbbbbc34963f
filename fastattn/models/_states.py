"""Caches of models with recurrent layers: keys and values, states, and copies of states at earlier places."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn.models._model_cache import ModelCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, DTypeLike
    from typing_extensions import Self

    from fastattn._args.types import Array
    from fastattn.layers._mixers import Carried, Kind
    from fastattn.models._model_cache import KeyHeads

# Between two snapshots that are taken within a text.
EVERY = 256


class _Snapshot(NamedTuple):
    """States after so many tokens of a sequence."""

    length: int
    states: tuple[Array, ...]


class StateCache(ModelCache):
    """Keys and values of attention layers, and the states of a model's other layers.

    States are after the tokens of all calls that ended. They cannot be cut back as keys can. So a session
    takes snapshots of them, to which `truncate` goes back. Their number grows with the logarithm of the
    text's length: where a text is cut, at most as many tokens are computed again as are cut off, or `EVERY`.
    """

    def __init__(
        self,
        kinds: Sequence[Sequence[Kind]],
        key_heads: Sequence[KeyHeads],
        capacity: int = 0,
        dtype: DTypeLike | None = None,
    ) -> None:
        super().__init__(key_heads, capacity, dtype)
        self._kinds = kinds  # of a sequence's states, in each layer
        self._now = _Snapshot(0, ())  # empty before the first token
        self._spare: tuple[Array, ...] = ()  # of the same shapes: the next call writes there
        self._snapshots: list[_Snapshot] = []
        self._rows: tuple[Array, ...] = ()  # of a `staggered` cache: states before each row, and at the end

    @property
    def nbytes(self) -> int:
        """Bytes of memory of all arrays."""
        states = (*self._now.states, *self._spare, *(x for each in self._snapshots for x in each.states))
        return super().nbytes + sum(x.nbytes for x in states)

    def carried(self, batch: int) -> list[Carried]:
        """The arguments of a call of each layer: it reads the states as they are, and writes to others."""
        kinds = [kind for each in self._kinds for kind in each]
        if not self._rows and not self._spare:
            self._spare = tuple(np.empty((batch, *shape), dtype) for shape, dtype in kinds)
        no_states: list[Any] = [None] * len(kinds)
        before = iter([x[:-1] for x in self._rows] or self._now.states or no_states)
        after = iter([x[1:] for x in self._rows] or self._spare)
        found = [[{"state": next(before), "out_state": next(after)} for _ in each] for each in self._kinds]
        return [(*each, {}) if len(each) == 1 else each for each in found]

    def keep(self) -> None:
        """Hold the states that a call has written, of the tokens whose keys are here."""
        self._now, self._spare = _Snapshot(self.length, self._spare), self._now.states

    def staggered(self, tokens: int) -> Self:
        """Count more tokens of the only sequence, and return their cache: it has memory for their states."""
        cache = super().staggered(tokens)
        cache._rows = tuple(np.empty((tokens + 1, *x.shape[1:]), x.dtype) for x in self._now.states)
        for rows, x in zip(cache._rows, self._now.states, strict=True):
            rows[:1] = x
        return cache

    def go_on(self, staggered: Self, row: int) -> None:
        """Take over the states after that row, the next token, of a `staggered` cache."""
        states = tuple(x[row + 1 : row + 2].copy() for x in staggered._rows)
        self._now = _Snapshot(self._now.length + 1, states)

    def select(self, sequences: ArrayLike) -> None:
        """Keep the sequences of these indices, as `KVCache.select` does."""
        super().select(sequences)
        index = np.asarray(sequences)
        self._now, self._spare = _Snapshot(self.length, tuple(x[index] for x in self._now.states)), ()

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
        """The most tokens, up to `length`, after which states are here."""
        lengths, of_keys = [0, *(each.length for each in (*self._snapshots, self._now))], super().reachable
        return max(each for each in lengths if each <= length and of_keys(each) == each)

    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on, which is `reachable`."""
        super().truncate(length)
        self._snapshots = [each for each in self._snapshots if each.length <= length]
        if self._now.length == length:
            return
        if not length:
            self._now = _Snapshot(0, ())
            return
        found = next(each for each in self._snapshots if each.length == length)
        self._now = _Snapshot(length, tuple(x.copy() for x in found.states))

    def own(self) -> None:
        """Hold everything in memory of its own, without room for more tokens."""
        super().own()
        self._now, self._snapshots = copy.deepcopy((self._now, self._snapshots))
        self._spare = ()

    def _arrays(self) -> dict[str, Array]:
        """Keys, values, scales, lengths and all states, by name: copies."""
        arrays = super()._arrays()
        for at in (self._now, *self._snapshots):
            arrays |= {f"states.{at.length}.{i}": x.copy() for i, x in enumerate(at.states)}
        return arrays

    @classmethod
    def read(
        cls,
        kinds: Sequence[Sequence[Kind]],
        key_heads: Sequence[KeyHeads],
        arrays: dict[str, Array],
        where: str,
    ) -> StateCache:
        """The cache of one sequence with these `_arrays`, of the file `where`."""
        keys = {name: x for name, x in arrays.items() if not name.startswith("states.")}
        cache, held = cls(kinds, key_heads), ModelCache.of(key_heads, keys, where)
        vars(cache).update(vars(held))
        flat = [((1, *shape), dtype) for each in kinds for shape, dtype in each]
        names = arrays.keys() - keys.keys()
        lengths = sorted({int(part) for name in names if (part := name.split(".")[1]).isdecimal()})
        expected = {f"states.{length}.{i}": kind for length in lengths for i, kind in enumerate(flat)}
        found = {name: (arrays[name].shape, arrays[name].dtype) for name in names}
        if found != expected or not lengths or not 0 < lengths[0] <= lengths[-1] == cache.length:
            came = f"states after {lengths} tokens, of {len(found)} arrays"
            raise ValueError(f"(): {where} has {came}; expected what a session of this model holds")
        every = [
            _Snapshot(length, tuple(arrays[f"states.{length}.{i}"] for i in range(len(flat))))
            for length in lengths
        ]
        cache._snapshots = every
        cache._now = _Snapshot(lengths[-1], tuple(x.copy() for x in every[-1].states))
        return cache
