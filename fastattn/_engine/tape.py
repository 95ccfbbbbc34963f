"""Operations of layers and models, each with its gradient.

A layer is written once, on the operations of a tape, which notes them for their gradients: see `Recorder`.
`PLAIN` is the tape that records nothing: its values are arrays, and each operation is one kernel. Arrays are
rows (m, n) with a contiguous last axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.grad_types import DropoutArgs, OuterArgs, RowsGradArgs, rounds
from fastattn._args.packed import LinearArgs, PackedLinear
from fastattn._args.types import (
    FLOAT64,
    Activation,
    Array,
    AttentionArgs,
    BackwardArgs,
    RopeArgs,
    Rounding,
    RowsArgs,
    lane_dtype,
)
from fastattn._engine import dispatch
from fastattn._engine.memory import keep, recycled_empty, scratch
from fastattn._engine.recorder import Recorder
from fastattn._engine.settings import get_num_threads
from fastattn._engine.values import Part, Value

if TYPE_CHECKING:
    Views = Callable[[Array], Sequence[Array]]
    # One attention of an operation: its arguments, and the values of its queries, keys and values.
    TapedAttention = tuple[AttentionArgs, Any, Any, Any]

# Weights that are stored as numbers that can change a little; the others are frozen.
TRAINED = ("float32", "float64", "bfloat16")


class Tape(Recorder):
    """Operations; where it is `recording`, in their order and with the gradients of their parameters.

    An operation of `PLAIN` may write to `out`, an array. `use` names scratch memory for the result; `done`
    gives it back. When recording, these have no effect: each result has a separate array, as gradients need
    it.
    """

    def done(self, use: str, x: Any) -> None:
        """Give back the memory of x, whose operation had this `use`; gradients may need it."""
        if not self.recording:
            keep(use, x)

    def empty(self, use: str | None, rows: int, columns: int, dtype: np.dtype[Any]) -> Array:
        """An uninitialised array for the result of `attend`."""
        if self.recording:
            return recycled_empty((rows, columns), dtype)
        return np.empty((rows, columns), dtype) if use is None else scratch(use, rows, columns, dtype)

    def _writable(self, x: Any) -> Array:
        """The array of x to work in; when recording, it may not be the caller's."""
        array = self.array(x)
        return array.copy() if self.recording and not x.made else array

    def dropped(self, x: Any) -> Any:
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

    def linear(
        self,
        x: Any,
        weight: PackedLinear,
        bias: Array | None,
        rounding: Rounding | None = None,
        activation: Activation | None = None,
        residual: Any = None,
        *,
        use: str | None = None,
        out: Array | None = None,
    ) -> Any:
        """`ops.linear`; dropout is of what is added to a residual."""
        n, array, added = weight.out_features, x, residual
        if self.recording:
            if residual is not None and self.drops.rate:
                return self.add(self.dropped(self.linear(x, weight, bias, rounding, activation)), residual)
            array, added = x.array, None if residual is None else residual.array
            out = recycled_empty((len(array), n), array.dtype)
        elif out is None:
            out = self.empty(use, len(x), n, x.dtype)
        args = LinearArgs(array, weight, bias, activation, added, out, get_num_threads(), rounding)
        if not self.recording:
            dispatch.run(args)
            return out
        pre = None  # what the activation is applied to: the gate's n features come first
        if weight.gated or not (activation is None or (activation == "relu" and residual is None)):
            args.pre = pre = recycled_empty((len(array), n * (1 + weight.gated)), array.dtype)
        dispatch.run(args)
        # The derivative of relu can be read off its result; without an activation, that is not kept.
        before = out if pre is None and activation is not None else pre
        return self.note(out, partial(self._linear_back, x, weight, bias, activation, residual, before))

    def _linear_back(
        self, x: Value, weight: PackedLinear, bias: Array | None, activation: Activation | None,
        residual: Value | None, before: Array | None, dout: Array, owned: bool,
    ) -> None:  # fmt: skip
        """Gradients of a `linear`'s inputs from its result's; `before` is the activation's input."""
        threads, lane, dpre, n = get_num_threads(), lane_dtype(dout.dtype), dout, weight.out_features
        if before is not None:
            free = owned and residual is None and not weight.gated
            dpre = dout if free else recycled_empty(before.shape, before.dtype)
            grad = RowsGradArgs("activate", dout, before[:, :n], threads, dpre[:, :n])
            if weight.gated:
                grad.up, grad.dup = before[:, n:], dpre[:, n:]
            grad.activation = activation
            dispatch.run_grad(grad)
        n = dpre.shape[1]
        dweight = np.empty((n, weight.in_features), lane) if weight.dtype in TRAINED else None
        dbias = None if bias is None else np.empty(n, lane)
        if dweight is not None or dbias is not None:
            pairs = rounds(dpre.dtype, weight)
            dispatch.run_grad(OuterArgs(dpre, x.array, dweight, dbias, threads, pairs=pairs))
        if dweight is not None:
            shape = (2, n // 2, weight.in_features) if weight.gated else dweight.shape
            self.gradients.add(weight, dweight.reshape(shape))
        if bias is not None and dbias is not None:
            self.gradients.add(bias, dbias.reshape(bias.shape))
        there, mine = x.take()
        dx = there if mine and there is not None else recycled_empty(x.array.shape, x.array.dtype)
        dispatch.run(LinearArgs(dpre, weight, None, None, there, dx, threads, None, True))
        x.put(dx, owned=True)
        if residual is not None:
            residual.put(dout, owned)

    def norm(
        self,
        x: Any,
        kind: str,
        weight: Array,
        bias: Array | None,
        eps: float,
        *,
        out: Array | None = None,
    ) -> Any:
        """`ops.layer_norm` or `ops.rms_norm`."""
        array, scale, shift = x, weight, bias
        if self.recording:
            array, lane = x.array, lane_dtype(x.array.dtype)
            out = recycled_empty(array.shape, array.dtype)
            scale, shift = (
                weight.astype(lane, copy=False),
                None if bias is None else bias.astype(lane, copy=False),
            )
        elif out is None:
            out = np.empty(x.shape, x.dtype)
        dispatch.run(RowsArgs(kind, array, out, get_num_threads(), None, None, None, scale, shift, eps))
        if not self.recording:
            return out
        return self.note(out, partial(self._norm_back, x, kind, (weight, bias), scale, shift, eps))

    def _norm_back(
        self, x: Value, kind: str, parameters: tuple[Array, Array | None], scale: Array, shift: Array | None,
        eps: float, dout: Array, owned: bool,
    ) -> None:  # fmt: skip
        """Gradients of x and of a `norm`'s parameters, which are `scale` and `shift` in lanes."""
        there, there_owned = x.take()
        dx = dout if owned else there if there_owned else None
        if dx is None:
            dx = recycled_empty(x.array.shape, x.array.dtype)
        sums = dweight, dbias = np.empty_like(scale), None if shift is None else np.empty_like(shift)
        args = RowsGradArgs(kind, dout, x.array, get_num_threads(), dx, None, there, eps=eps)
        args.weight, args.dweight, args.dbias = scale, dweight, dbias
        dispatch.run_grad(args)
        for parameter, dparameter in zip(parameters, sums, strict=True):
            if parameter is not None and dparameter is not None:
                self.gradients.add(parameter, dparameter.astype(parameter.dtype, copy=False))
        x.put(dx, owned=True)

    def head_norm(
        self, x: Any, kind: str, weight: Array, eps: float, begin: int = 0, bias: Array | None = None
    ) -> Any:
        """A norm of each of some heads of a row, in place, from `begin` on; weight is (heads, head_dim).

        There is a bias (head_dim,) only with one head.
        """
        threads, rows = get_num_threads(), self._writable(x)
        before = rows[:, begin : begin + weight.size].copy() if self.recording else rows
        for part, own in by_columns(weight, begin):
            args = RowsArgs(kind, rows[:, part], rows[:, part], threads, weight=own, bias=bias, eps=eps)
            dispatch.run(args)

        def back(dout: Array, owned: bool) -> None:
            dx = dout if owned else dout.copy()
            dweight, dbias = np.empty_like(weight), None if bias is None else np.empty_like(bias)
            heads = zip(by_columns(weight), by_columns(weight, begin), dweight, strict=True)
            for (own, scale), (part, _), result in heads:
                args = RowsGradArgs(kind, dx[:, part], before[:, own], threads, dx[:, part], eps=eps)
                args.weight, args.dweight, args.dbias = scale, result, dbias
                dispatch.run_grad(args)
            self.gradients.add(weight, dweight)
            if bias is not None and dbias is not None:
                self.gradients.add(bias, dbias)
            x.put(dx, owned=True)

        return self.note(rows, back)

    def gated_norm(
        self, x: Any, gate: Any, weight: Array, eps: float, activation: Activation, gate_first: bool = False
    ) -> Any:
        """`ops.rms_norm` with a gate, in which some rows of x may lie side by side.

        weight is (features,), or (parts, features) where a row has several, each with a separate norm.
        """
        array, up, whole = self.array(x), self.array(gate), weight.ndim == 1
        parts = by_columns(np.atleast_2d(weight))
        out = np.empty(array.shape, array.dtype)
        for part, own in parts:
            args = RowsArgs("rms_norm", array[:, part], out[:, part], get_num_threads(), weight=own, eps=eps)
            args.up, args.activation, args.gate_first = up if whole else up[:, part], activation, gate_first
            dispatch.run(args)

        def back(dout: Array, owned: bool) -> None:
            dx, dup, dweight = x.room(), gate.room(), np.empty_like(weight)
            for (part, own), result in zip(parts, np.atleast_2d(dweight), strict=True):
                args = RowsGradArgs("rms_norm", dout[:, part], array[:, part], get_num_threads(), dx[:, part])
                args.up, args.dup = (up, dup) if whole else (up[:, part], dup[:, part])
                args.weight, args.dweight, args.eps = own, result, eps
                args.activation, args.gate_first = activation, gate_first
                dispatch.run_grad(args)
            self.gradients.add(weight, dweight)
            x.put(dx, owned=True)
            gate.put(dup, owned=True)

        return self.note(out, back)

    def add(self, x: Any, residual: Any, *, out: Array | None = None) -> Any:
        """The sum."""
        array = self.array(x)
        if self.recording:
            out = recycled_empty(array.shape, array.dtype)
        elif out is None:
            out = np.empty(array.shape, array.dtype)
        dispatch.run(RowsArgs("activate", array, out, get_num_threads(), self.array(residual)))

        def back(dout: Array, owned: bool) -> None:
            x.put(dout, owned=False)  # both have the same array
            residual.put(dout, owned=False)

        return self.note(out, back)

    def gate(
        self, x: Any, up: Any, activation: Activation | None = "sigmoid", *, out: Array | None = None
    ) -> Any:
        """``activation(x) * up``; `out` may be up's array."""
        array, other = self.array(x), self.array(up)
        out = np.empty(array.shape, array.dtype) if self.recording or out is None else out
        dispatch.run(RowsArgs("activate", array, out, get_num_threads(), up=other, activation=activation))

        def back(dout: Array, owned: bool) -> None:
            dx, dup = x.room(), up.room()
            args = RowsGradArgs("activate", dout, array, get_num_threads(), dx, None, None, other, dup)
            args.activation = activation
            dispatch.run_grad(args)
            x.put(dx, owned=True)
            up.put(dup, owned=True)

        return self.note(out, back)

    def call(self, function: Callable[..., Any], inputs: Mapping[str, Any], **options: Any) -> Any:
        """The first result of a function that `grad.vjp` takes: `inputs` are values, parameters or None.

        When recording, its pullback keeps what gradients need.
        """
        if not self.recording:
            found = function(**inputs, **options)
            return found[0] if isinstance(found, tuple) else found
        arrays = {name: x.array if isinstance(x, Value) else x for name, x in inputs.items()}
        given = {name: x for name, x in inputs.items() if x is not None}
        out, pullback = function._vjp(**arrays, **options)  # type: ignore[attr-defined]

        def back(dout: Array, owned: bool) -> None:
            found = pullback(dout, need=tuple(f"d{name}" for name in given))
            for x, gradient in zip(given.values(), found, strict=True):
                if isinstance(x, Value):
                    x.put(gradient, owned=True)
                else:
                    self.gradients.add(x, gradient)

        return self.note(out, back)

    def views(self, x: Any, views: Views, whole: bool = True) -> Sequence[Any]:
        """Parts of x, views that do not overlap; `whole`: of all its elements."""
        if not self.recording:
            return views(x)
        array = x.array
        rooms: list[Array] = []
        base = self.note(array, x.put)

        def room(i: int) -> Array:
            if not rooms:
                found = x.room()
                if not whole:
                    found[...] = 0
                base.put(found, owned=True)
                rooms.extend(views(found))
            return rooms[i]

        return [Part(view, x.made, partial(room, i)) for i, view in enumerate(views(array))]

    def by_row(self, x: Any) -> Any:
        """Heads x ([batch,] heads, length, head_dim) as rows ([batch *] length * heads, head_dim)."""
        array = self.array(x)
        *batch, heads, length, size = array.shape
        rows: Array = array.swapaxes(-3, -2).reshape(-1, size)

        def back(dout: Array, owned: bool) -> None:
            x.put(dout.reshape(*batch, length, heads, size).swapaxes(-3, -2), owned)

        return self.note(rows, back)

    def rotate(self, x: Any, cos: Array, sin: Array, interleaved: bool = False) -> Any:
        """Rotate x (..., heads, length, head_dim) in place by tables ([batch,] 1, length, pairs)."""
        array = self._writable(x)
        dispatch.run(RopeArgs(array, array, cos, sin, interleaved, get_num_threads()))
        if not self.recording:
            return array

        def back(dout: Array, owned: bool) -> None:
            dx = dout if owned else dout.copy()
            dispatch.run(RopeArgs(dx, dx, cos, -sin, interleaved, get_num_threads()))
            x.put(dx, owned=True)

        return self.note(array, back, x.room)

    def shared(self, x: Any) -> Any:
        """x, for several operations: copied, or with the sum of their gradients.

        A `Part` takes one gradient alone.
        """
        return self.note(x.array, x.put) if self.recording else x.copy()

    def extended(self, x: Any, longer: Array, parameter: Array | None) -> Any:
        """Keys or values `longer`, which begin with x; then comes `parameter`, if there is one."""
        n = self.array(x).shape[2]

        def back(dout: Array, owned: bool) -> None:
            x.put(dout[:, :, :n], owned=False)
            if parameter is not None:
                self.gradients.add(parameter, dout[:, :, n].sum(axis=0, dtype=parameter.dtype))

        return self.note(longer, back)

    def attend(
        self,
        calls: Sequence[TapedAttention],
        out: Array,
        by_head: Views,
        sinks: Array | None = None,
        table: Array | None = None,
    ) -> Any:
        """Attention of `calls`, in rows of `out`: `by_head` gives the views of it that calls write to.

        `sinks` and `table`, a bias by distance, are parameters. Probabilities are dropped, if anything is.
        """
        if not self.recording:
            for args, *_ in calls:
                dispatch.run(args)
            return out
        for args, *_ in calls:
            if args.lse is None:
                args.lse = np.empty(args.out.shape[:-1], lane_dtype(args.q.dtype))
            args.dropout, args.seed = self.attention_dropout()  # a seed each: heads count from 0
            dispatch.run(args)

        def back(dout: Array, owned: bool) -> None:
            for (args, *inputs), d_heads in zip(calls, by_head(dout), strict=True):
                dq, dk, dv = rooms = [x.room() for x in inputs]
                backward = BackwardArgs(args, d_heads, None, dq, dk, dv, args.scale)
                if sinks is not None:
                    backward.dsinks = np.zeros((*args.batch_shape, args.heads_q), FLOAT64)
                if table is not None:
                    sums = (args.heads_q, args.len_q + args.len_k - 1)
                    backward.dbias_diagonals = np.zeros(sums, lane_dtype(args.q.dtype))
                if args.out.size:
                    dispatch.run(backward)
                else:
                    dq[...], dk[...], dv[...] = 0, 0, 0
                if sinks is not None and backward.dsinks is not None:
                    self.gradients.add(sinks, backward.dsinks.sum(axis=0).astype(sinks.dtype))
                if table is not None and backward.dbias_diagonals is not None:
                    self.gradients.add(table, _of_table(table, backward.dbias_diagonals))
                for x, room in zip(inputs, rooms, strict=True):
                    x.put(room, owned=True)

        return self.note(out, back)

    def rows(self, x: Any, which: Array) -> Any:
        """Some rows of x, as a bool array says."""
        array = self.array(x)

        def back(dout: Array, owned: bool) -> None:
            dx = np.zeros(array.shape, array.dtype)
            dx[which] = dout
            x.put(dx, owned=True)

        return self.note(array[which], back)

    def spread(self, x: Any, which: Array) -> Any:
        """Rows of x, which nobody else reads, where a bool array is True, 0 elsewhere."""
        array = self.array(x)
        out = np.zeros((len(which), array.shape[1]), array.dtype)
        out[which] = array
        if self.recording:
            x.forget()
        return self.note(out, lambda dout, owned: x.put(dout[which], owned=True))


PLAIN = Tape(recording=False)


def by_columns(weight: Array, begin: int = 0) -> list[tuple[slice, Array]]:
    """The columns of each head, the first at `begin`, and its weight."""
    size = weight.shape[1]
    return [(slice(begin + i * size, begin + (i + 1) * size), own) for i, own in enumerate(weight)]


def _of_table(table: Array, sums: Array) -> Array:
    """The gradient of a bias by distance: `sums` over diagonals of scores, around the middle of `table`."""
    gradient = np.zeros(table.shape, table.dtype)
    first = (table.shape[1] - sums.shape[1]) // 2
    gradient[:, first : first + sums.shape[1]] = sums
    return gradient
