"""A computation that is recorded while it runs, for its gradients: reverse-mode differentiation.

A `Tape` runs operations on `Value`s, arrays that may get a gradient. Each notes how the gradient of its
result becomes those of its inputs; `Tape.pull` goes through the notes from the last to the first. What an
input's gradient already holds, as behind a residual connection, is added by the kernel that makes the rest.

Arrays are rows (m, n) with a contiguous last axis. A note is dropped, with what it keeps, when it was used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fastattn._args.grad_types import DropoutArgs, OuterArgs, RowsGradArgs
from fastattn._args.packed import LinearArgs, PackedLinear
from fastattn._args.types import RowsArgs, lane_dtype
from fastattn._engine import dispatch
from fastattn._engine.recycled import recycled_empty
from fastattn._engine.settings import get_num_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastattn._args.types import Activation, Array, Rounding

    Parameter = Array | PackedLinear

_APART = 0x9E3779B97F4A7C15  # between the seeds of attentions: 2**64 times the golden ratio, which is odd
# Weights that are stored as numbers that can change a little; the others are frozen.
TRAINED = ("float32", "float64", "bfloat16")


class Value:
    """An array, and the gradient with respect to it as far as it is known."""

    __slots__ = ("_gradient", "_owned", "array")

    def __init__(self, array: Array):
        self.array = array
        self._gradient: Array | None = None
        self._owned = False

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


class Gradients:
    """Sums of the gradients of parameters, which are known by identity: arrays and packed weights."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Parameter, Array]] = {}

    def of(self, parameter: Parameter | None) -> Array | None:
        """That of `parameter`, in plain layout; None if there is none."""
        return None if parameter is None else self._sums.get(id(parameter), (None, None))[1]

    def move(self, whole: Parameter | None, parts: Sequence[tuple[Parameter | None, slice]]) -> None:
        """Give the gradient of `whole` to its `parts`, rows of it."""
        there = self.of(whole)
        if there is not None:
            del self._sums[id(whole)]
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


class Drops(NamedTuple):
    """What dropout a computation has: its share, the generator's seed, and how many operations had some."""

    rate: float = 0.0
    seed: int = 0
    operations: int = 0


class _Note(NamedTuple):
    out: Value
    back: Callable[[Array, bool], None]  # of out's gradient, and whether it may be overwritten


class Tape:
    """Operations that ran, in their order, and the gradients of their parameters."""

    def __init__(self, gradients: Gradients | None = None, drops: Drops | None = None):
        self.gradients = gradients or Gradients()
        self.drops = drops or Drops()
        self._notes: list[_Note] = []

    def note(self, out: Array, back: Callable[[Array, bool], None]) -> Value:
        """The value of an operation that gave `out`."""
        value = Value(out)
        self._notes.append(_Note(value, back))
        return value

    def pull(self, out: Value, dout: Array) -> None:
        """From the gradient of `out` to those of all inputs and parameters; it can be done once."""
        out.put(dout, owned=False)
        while self._notes:
            value, back = self._notes.pop()
            gradient, owned = value.take()
            if gradient is not None:
                back(gradient, owned)

    def checkpoint(self, compute: Callable[[Tape, Sequence[Value]], Value], inputs: Sequence[Value]) -> Value:
        """``compute(tape, inputs)``, of which nothing is kept: it runs again for its gradients."""
        drops = self.drops

        def run(tape: Tape) -> tuple[Sequence[Value], Value]:
            fresh = [Value(x.array) for x in inputs]
            return fresh, compute(tape, fresh)

        def back(dout: Array, owned: bool) -> None:
            tape = Tape(self.gradients, drops)
            fresh, out = run(tape)
            tape.pull(out, dout)
            for x, again in zip(inputs, fresh, strict=True):
                gradient, mine = again.take()
                if gradient is not None:
                    x.put(gradient, mine)

        tape = Tape(drops=drops)
        out = run(tape)[1].array
        self.drops = tape.drops
        return self.note(out, back)

    def stream(self) -> int:
        """The number of an operation that has dropout, from 1 on."""
        self.drops = self.drops._replace(operations=self.drops.operations + 1)
        return self.drops.operations

    def dropped(self, x: Value) -> Value:
        """`grad.dropout`; x itself where nothing is dropped."""
        rate, seed, _ = self.drops
        if not rate:
            return x
        stream, array, threads = self.stream(), x.array, get_num_threads()

        def drop(x: Array, out: Array) -> None:
            dispatch.run_grad(DropoutArgs(x, out, rate, 1 / (1 - rate), seed, stream, threads))

        def back(dout: Array, owned: bool) -> None:
            dx = dout if owned else recycled_empty(dout.shape, dout.dtype)
            drop(dout, dx)
            x.put(dx, owned=True)

        out = recycled_empty(array.shape, array.dtype)
        drop(array, out)
        return self.note(out, back)

    def attention_dropout(self) -> tuple[float, int]:
        """The share of probabilities that an attention drops, and its seed."""
        if not self.drops.rate:
            return 0.0, 0
        return self.drops.rate, (self.drops.seed + self.stream() * _APART) % 2**64

    def linear(
        self,
        x: Value,
        weight: PackedLinear,
        bias: Array | None,
        rounding: Rounding | None = None,
        activation: Activation | None = None,
        residual: Value | None = None,
    ) -> Value:
        """`ops.linear`; what it adds to a residual is dropped, if anything is."""
        if residual is not None and self.drops.rate:
            return self.add(self.dropped(self.linear(x, weight, bias, rounding, activation)), residual)
        threads, array, n = get_num_threads(), x.array, weight.out_features
        out = recycled_empty((len(array), n), array.dtype)
        added = None if residual is None else residual.array
        args = LinearArgs(array, weight, bias, activation, added, out, threads, rounding)
        pre = None  # what the activation is applied to: the gate's n features come first
        if weight.gated or not (activation is None or (activation == "relu" and residual is None)):
            args.pre = pre = recycled_empty((len(array), n * (1 + weight.gated)), array.dtype)
        dispatch.run(args)

        def back(dout: Array, owned: bool) -> None:
            dpre = dout
            if activation is not None or weight.gated:
                # The derivative of relu can be read off its result.
                before = out if pre is None else pre
                free = owned and residual is None and not weight.gated
                dpre = dout if free else recycled_empty(before.shape, before.dtype)
                grad = RowsGradArgs("activate", dout, before[:, :n], threads, dpre[:, :n])
                if weight.gated:
                    grad.up, grad.dup = before[:, n:], dpre[:, n:]
                grad.activation = activation
                dispatch.run_grad(grad)
            self._map_back(x, weight, bias, dpre)
            if residual is not None:
                residual.put(dout, owned)

        return self.note(out, back)

    def _map_back(self, x: Value, weight: PackedLinear, bias: Array | None, dpre: Array) -> None:
        """From the gradient of ``x @ weight.T + bias`` to those of its inputs."""
        threads, lane, n = get_num_threads(), lane_dtype(dpre.dtype), dpre.shape[1]
        dweight = np.empty((n, weight.in_features), lane) if weight.dtype in TRAINED else None
        dbias = None if bias is None else np.empty(n, lane)
        if dweight is not None or dbias is not None:
            pairs = dpre.dtype.name == "bfloat16"
            dispatch.run_grad(OuterArgs(dpre, x.array, dweight, dbias, threads, pairs=pairs))
        if dweight is not None:
            shape = (2, n // 2, weight.in_features) if weight.gated else dweight.shape
            self.gradients.add(weight, dweight.reshape(shape))
        if bias is not None and dbias is not None:
            self.gradients.add(bias, dbias.reshape(bias.shape))
        there, owned = x.take()
        dx = there if owned and there is not None else recycled_empty(x.array.shape, x.array.dtype)
        dispatch.run(LinearArgs(dpre, weight, None, None, there, dx, threads, None, True))
        x.put(dx, owned=True)

    def norm(self, x: Value, kind: str, weight: Array, bias: Array | None, eps: float) -> Value:
        """`ops.layer_norm` or `ops.rms_norm`."""
        threads, array = get_num_threads(), x.array
        out = recycled_empty(array.shape, array.dtype)
        dispatch.run(RowsArgs(kind, array, out, threads, weight=weight, bias=bias, eps=eps))

        def back(dout: Array, owned: bool) -> None:
            there, there_owned = x.take()
            dx = dout if owned else there if there_owned else None
            if dx is None:
                dx = recycled_empty(array.shape, array.dtype)
            dweight = np.empty_like(weight)
            dbias = None if bias is None else np.empty_like(bias)
            args = RowsGradArgs(kind, dout, array, threads, dx, None, there, eps=eps)
            args.weight, args.dweight, args.dbias = weight, dweight, dbias
            dispatch.run_grad(args)
            self.gradients.add(weight, dweight)
            if bias is not None and dbias is not None:
                self.gradients.add(bias, dbias)
            x.put(dx, owned=True)

        return self.note(out, back)

    def rows(self, x: Value, which: Array) -> Value:
        """Some rows of x, as a bool array says."""

        def back(dout: Array, owned: bool) -> None:
            dx = np.zeros(x.array.shape, x.array.dtype)
            dx[which] = dout
            x.put(dx, owned=True)

        return self.note(x.array[which], back)

    def spread(self, x: Value, which: Array) -> Value:
        """Rows of x where a bool array is True, 0 elsewhere."""
        out = np.zeros((len(which), x.array.shape[1]), x.array.dtype)
        out[which] = x.array
        return self.note(out, lambda dout, owned: x.put(dout[which], owned=True))

    def cleared(self, x: Value, which: Array) -> Value:
        """x with 0 in the rows where a bool array is True, and so in its gradient."""
        if not which.any():
            return x

        def back(dout: Array, owned: bool) -> None:
            dx = dout if owned else dout.copy()
            dx[which] = 0
            x.put(dx, owned=True)

        out = x.array.copy()
        out[which] = 0
        return self.note(out, back)

    def add(self, x: Value, residual: Value) -> Value:
        """The sum."""

        def back(dout: Array, owned: bool) -> None:
            x.put(dout, owned=False)  # both have the same array
            residual.put(dout, owned=False)

        out = recycled_empty(x.array.shape, x.array.dtype)
        dispatch.run(RowsArgs("activate", x.array, out, get_num_threads(), residual.array))
        return self.note(out, back)
