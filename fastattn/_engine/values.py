"""Values on a tape, which get a gradient, and sums of the gradients of parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fastattn._args.packed import PackedLinear
from fastattn._args.types import Array
from fastattn._engine.memory import recycled_empty

Parameter = Array | PackedLinear


class Value:
    """An array, and the gradient with respect to it as far as it is known."""

    __slots__ = ("_gradient", "_owned", "_room", "array", "made")

    def __init__(self, array: Array, made: bool = False, room: Callable[[], Array] | None = None):
        self.array = array
        self.made = made  # by an operation, so that others may work in place
        self._room = room
        self._gradient: Array | None = None
        self._owned = False

    def room(self) -> Array:
        """An array where an operation may write the gradient, which it then has to `put`."""
        return recycled_empty(self.array.shape, self.array.dtype) if self._room is None else self._room()

    def forget(self) -> None:
        """Let go of the numbers, which no operation needs any more; the gradient has their shape."""
        self.array = np.broadcast_to(self.array.dtype.type(0), self.array.shape)

    def take(self) -> tuple[Array | None, bool]:
        """The gradient, and whether the taker may overwrite it; it is None then."""
        gradient, self._gradient = self._gradient, None
        return gradient, self._owned

    def put(self, gradient: Array, owned: bool) -> None:
        """Add to the gradient. `owned`: nobody else reads or writes this array."""
        there, there_owned = self.take()
        if there is not None:
            if there_owned:
                gradient = np.add(there, gradient, out=there)
            else:
                gradient = np.add(there, gradient, out=gradient if owned else None)
            owned = True
        self._gradient, self._owned = gradient, owned

    def found(self) -> Array:
        """The gradient; 0 if nothing depends on this value."""
        return np.zeros(self.array.shape, self.array.dtype) if self._gradient is None else self._gradient


class Part(Value):
    """A view of another value's array, whose gradient is the same view of that one's gradient."""

    __slots__ = ()

    def put(self, gradient: Array, owned: bool) -> None:
        """Write the gradient to its room."""
        room = self.room()
        if gradient is not room:
            room[...] = gradient


class Gradients:
    """Sums of the gradients of parameters, which are known by identity: arrays and packed weights."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Parameter, Array]] = {}

    def of(self, parameter: Parameter | None) -> Array | None:
        """The sum for `parameter`, in plain layout; None if there is none."""
        return None if parameter is None else self._sums.get(id(parameter), (None, None))[1]

    def pop(self, parameter: Parameter | None) -> Array | None:
        """The sum for `parameter`, which then has none."""
        return None if parameter is None else self._sums.pop(id(parameter), (None, None))[1]

    def move(self, whole: Parameter | None, parts: Sequence[tuple[Parameter | None, slice]]) -> None:
        """Give the gradient of `whole` to its `parts`, rows of it."""
        if (there := self.pop(whole)) is not None:
            for part, rows in parts:
                assert part is not None
                self.add(part, there[rows])

    def add(self, parameter: Parameter, gradient: Array) -> None:
        """Add `gradient`, an array of nobody else."""
        there = self.of(parameter)
        if there is None:
            self._sums[id(parameter)] = parameter, gradient
        else:
            there += gradient
