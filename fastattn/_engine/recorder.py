"""Reverse-mode differentiation: what operations note for their gradients, and how these are computed.

Values are `Value`s, arrays that may get a gradient. Each operation notes how to compute the gradients of its
inputs from its result's, and `pull` goes through the notes from the last to the first. A kernel adds its part
to an input's gradient that is already there, as after a residual connection. A note is dropped, with what it
keeps, when it was used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fastattn._args.types import Array
from fastattn._engine.values import Gradients, Value

_APART = 0x9E3779B97F4A7C15  # between the seeds of attentions: 2**64 times the golden ratio, which is odd


class Drops(NamedTuple):
    """Dropout of a computation: its share, the generator's seed, and how many operations had some."""

    rate: float = 0.0
    seed: int = 0
    operations: int = 0


class _Note(NamedTuple):
    out: Value
    back: Callable[[Array, bool], None]  # of out's gradient, and whether it may be overwritten


class Recorder:
    """Notes of a computation's operations; without `recording` there are none, and values are arrays."""

    def __init__(
        self,
        gradients: Gradients | None = None,
        drops: Drops | None = None,
        by_block: bool = False,
        recording: bool = True,
    ):
        self.recording = recording
        self.by_block = by_block  # whether the input of each block is all that is kept of it
        self.gradients = gradients or Gradients()
        self.drops = drops or Drops()
        self._notes: list[_Note] = []

    def array(self, x: Any) -> Array:
        """The array of the value x."""
        array: Array = x.array if self.recording else x
        return array

    def note(
        self,
        out: Array,
        back: Callable[[Array, bool], None],
        room: Callable[[], Array] | None = None,
    ) -> Any:
        """The value of an operation that gave `out`; `back` computes the inputs' gradients."""
        if not self.recording:
            return out
        value = Value(out, True, room)
        self._notes.append(_Note(value, back))
        return value

    def pull(self, out: Value, dout: Array) -> None:
        """Compute the gradients of all inputs and parameters from that of `out`; only once."""
        out.put(dout, owned=False)
        while self._notes:
            value, back = self._notes.pop()
            gradient, owned = value.take()
            if gradient is not None:
                back(gradient, owned)

    def checkpoint(self, compute: Callable[..., Any], *inputs: Value) -> Any:
        """``compute(tape, *inputs)``, of which nothing is kept: it runs again for its gradients.

        That is a value, or a pair of a value and a tuple of more, which later operations may use, too.
        """
        drops = self.drops

        def run(tape: Recorder) -> tuple[Sequence[Value], Value, tuple[Value, ...]]:
            fresh = [Value(x.array) for x in inputs]
            found = compute(tape, *fresh)
            return (fresh, *found) if isinstance(found, tuple) else (fresh, found, ())

        def back(dout: Array, owned: bool) -> None:
            tape = type(self)(self.gradients, drops)
            fresh, out, others = run(tape)
            for x, later in zip(others, more, strict=True):
                gradient, mine = later.take()
                if gradient is not None:
                    x.put(gradient, mine)
            tape.pull(out, dout)
            for x, again in zip(inputs, fresh, strict=True):
                gradient, mine = again.take()
                if gradient is not None:
                    x.put(gradient, mine)

        tape = type(self)(drops=drops)
        _, out, others = run(tape)
        tape._notes.clear()  # which know the tape: what they keep would wait for the garbage collector
        self.drops = tape.drops
        more = tuple(Value(x.array.copy()) for x in others)  # a view would keep the whole product alive
        noted = self.note(out.array, back)
        return (noted, more) if more else noted

    def stream(self) -> int:
        """The number of an operation that has dropout, from 1 on."""
        self.drops = self.drops._replace(operations=self.drops.operations + 1)
        return self.drops.operations

    def attention_dropout(self) -> tuple[float, int]:
        """The share of probabilities that an attention drops, and its seed."""
        if not self.drops.rate:
            return 0.0, 0
        return self.drops.rate, (self.drops.seed + self.stream() * _APART) % 2**64

    def block(self, compute: Callable[..., Any], *inputs: Any) -> Any:
        """``compute(tape, *inputs)``; a tape with `by_block` keeps nothing else of it."""
        return self.checkpoint(compute, *inputs) if self.by_block else compute(self, *inputs)
