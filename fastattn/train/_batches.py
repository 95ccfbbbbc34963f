"""Batches of arrays in a random order, whose position can be saved; a trainer's source of any batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fastattn._args.errors import named, wrong_type
from fastattn._args.types import Array, ArrayLike
from fastattn._args.values import as_array, flag, generator, integer, short


class Batches(Iterable[Any]):
    """Iterate over rows of arrays in batches; a loop is one epoch: every row once, in a new order.

    Each ``for`` starts a new epoch, except the first one after `load_state_dict`, which continues the epoch
    of that state. All loops share one position, which `state_dict` returns.

    Parameters
    ----------
    *arrays : array_like
        All with the same number of rows. A batch has the same rows of each: an array, or a tuple of several.
        Windows of a text need no memory: ``numpy.lib.stride_tricks.sliding_window_view(tokens, length + 1)``.
    batch_size : int
        Rows of a batch. Remaining rows at the end of an epoch are skipped.
    shuffle : bool, default True
        Whether to draw the order of the rows.
    rng : Generator or int, optional
        Draws the orders.
    """

    @named("Batches")
    def __init__(
        self,
        *arrays: ArrayLike,
        batch_size: int,
        shuffle: bool = True,
        rng: np.random.Generator | int | None = None,
    ):
        if not arrays:
            raise TypeError("(): there is no array; expected one, or several")
        self._arrays = [as_array(f"arrays[{i}]", x) for i, x in enumerate(arrays)]
        rows = {x.shape[:1] for x in self._arrays}
        if rows == {()} or len(rows) > 1:
            shapes = ", ".join(str(x.shape) for x in self._arrays)
            raise ValueError(f"(): arrays have shapes {shapes}; expected one number of rows")
        self._num_rows = len(self._arrays[0])
        self.batch_size = integer("batch_size", batch_size, 1, max(1, self._num_rows))
        if self._num_rows == 0:
            raise ValueError("(): arrays have no rows; expected at least one")
        self.shuffle = flag("shuffle", shuffle)
        self.rng = generator("rng", rng)
        self._loaded = False  # and nothing was taken since
        self._begin()

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return self._num_rows // self.batch_size

    def __iter__(self) -> Iterator[Any]:
        if self._done == len(self) or (self._done and not self._loaded):
            self._begin()
        return self._epoch()

    def _epoch(self) -> Iterator[Any]:
        while True:
            if self._done == len(self):  # another loop has taken the last one
                self._begin()
            part: Any = slice(self._done * self.batch_size, (self._done + 1) * self.batch_size)
            if self._order is not None:
                part = self._order[part]
            batch = tuple(x[part] for x in self._arrays)
            self._done += 1
            self._loaded = False
            yield batch[0] if len(batch) == 1 else batch
            if self._done == len(self):
                return

    def _begin(self) -> None:
        """Draw the order of an epoch."""
        self._drawn_at = self.rng.bit_generator.state
        self._order: Array | None = self.rng.permutation(self._num_rows) if self.shuffle else None
        self._done = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position: numbers and the generator's states, which JSON can hold."""
        return {
            "drawn_at": rng_state(self._drawn_at),
            "rng": rng_state(self.rng.bit_generator.state),
            "done": self._done,
            "rows": self._num_rows,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
        }

    @named("Batches.load_state_dict")
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, with batches of the same arrays."""
        if not isinstance(state_dict, Mapping):
            raise wrong_type("state_dict", state_dict, "what state_dict() returned")
        own = self.state_dict()
        if missing := own.keys() - state_dict.keys():
            raise ValueError(
                f"(): state_dict lacks {sorted(missing)[0]!r}; expected what state_dict() returned"
            )
        for name in ("rows", "batch_size", "shuffle"):
            if state_dict[name] != own[name]:
                raise ValueError(f"(): {name} is {state_dict[name]!r}; expected {own[name]!r}")
        done = integer("done", state_dict["done"], 0, len(self))
        if done != self._done or state_dict != own:  # else it is there already: nothing is drawn
            for name in ("drawn_at", "rng"):
                require_rng_state(self.rng, state_dict[name])
            set_rng_state(self.rng, state_dict["drawn_at"])
            self._begin()
            self._done = done
            set_rng_state(self.rng, state_dict["rng"])
        self._loaded = True


def rng_state(state: Any) -> Any:
    """A bit generator's state, its arrays as lists."""
    if isinstance(state, Mapping):
        return {name: rng_state(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, (np.ndarray, np.generic)) else state


def require_rng_state(rng: np.random.Generator, state: Any) -> None:
    """Raise unless `state` is one of `rng_state`, of the same kind of generator as `rng`."""
    kind, came = type(rng.bit_generator), None
    if isinstance(state, Mapping):
        came = state.get("bit_generator")
    if came != kind.__name__:
        raise ValueError(
            f"(): the state is of the generator {came}; expected one of {kind.__name__}, which rng is"
        )
    try:
        kind().state = dict(state)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError("(): the generator's state is not one that state_dict() returned") from error


def set_rng_state(rng: np.random.Generator, state: Any) -> None:
    """Set the state of `rng` to one of `rng_state`, of the same kind of generator."""
    require_rng_state(rng, state)
    rng.bit_generator.state = dict(state)


END = object()
SOURCES = {"batches", "sequence"}


class Source:
    """Batches, restarted at their end, and the position in them if it is known.

    `kind` says how: "batches" tell their place, of a "sequence" those taken are counted. None: it cannot.
    """

    def __init__(self, batches: Iterable[Any]):
        self.batches: Any = batches
        self._iterator: Iterator[Any] | None = None
        self._taken = 0  # of a sequence, in this round
        self.kind: str | None = None
        if all(callable(getattr(batches, name, None)) for name in ("state_dict", "load_state_dict")):
            self.kind = "batches"
            self._iterator = iter(batches)  # now: a new epoch may begin, and `place` has to be in it
        elif isinstance(batches, Sequence) or (isinstance(batches, np.ndarray) and batches.ndim):
            self.kind = "sequence"

    def take(self) -> Any:
        """The next batch; END if there is none even in a new round."""
        if self.kind == "sequence":
            if not len(self.batches):
                return END
            self._taken = self._taken % len(self.batches) + 1
            return self.batches[self._taken - 1]
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self.batches)
            for batch in self._iterator:
                return batch
            self._iterator = None
        return END

    def place(self) -> dict[str, Any]:
        """Place that `go` takes, for JSON, by the kind."""
        if self.kind == "batches":
            return {self.kind: self.batches.state_dict()}
        if self.kind == "sequence":
            return {self.kind: {"taken": self._taken, "length": len(self.batches)}}
        return {}

    def go(self, place: Mapping[str, Any]) -> None:
        """Go to where `place` was taken, of batches of the same kind."""
        if self.kind == "batches":
            self.batches.load_state_dict(place[self.kind])
            self.anew()
        elif self.kind == "sequence":
            there, length = place[self.kind], len(self.batches)
            begun, taken = (
                (there.get("length"), there.get("taken")) if isinstance(there, Mapping) else (None,) * 2
            )
            if begun != length:
                raise ValueError(
                    f"(): batches has length {length}; expected {short(begun)}, as the run's had"
                )
            self._taken = integer("taken", taken, 0, length)

    def anew(self) -> None:
        """Take a new iterator of the batches; an iterator continues."""
        self._iterator = None
