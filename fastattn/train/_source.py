"""Source of a trainer's batches, and the place in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.values import integer, short

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

END = object()
KINDS = {"batches", "sequence"}


class Source:
    """Batches, begun anew at their end, and the place in them if it can be told.

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
        """Ask the batches for a new iterator. One that is an iterator itself goes on."""
        self._iterator = None
