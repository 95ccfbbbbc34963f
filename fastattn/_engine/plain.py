"""Operations without gradients, each of which is a plain call.

A layer is written once, on the operations of a tape. `PLAIN` has them, too, and keeps nothing: its values are
arrays, and each operation is one kernel. Arrays are rows (m, n) with a contiguous last axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.packed import LinearArgs, PackedLinear
from fastattn._args.types import Activation, Array, AttentionArgs, RopeArgs, Rounding, RowsArgs
from fastattn._engine import dispatch
from fastattn._engine.memory import keep, scratch
from fastattn._engine.settings import get_num_threads

if TYPE_CHECKING:
    Views = Callable[[Array], Sequence[Array]]
    # One attention of an operation: its arguments, and the values of its queries, keys and values.
    Call = tuple[AttentionArgs, Any, Any, Any]


class Plain:
    """Operations without gradients; values are arrays.

    An operation may write to `out`, an array, or with `over` to the memory of its input or residual, which
    nobody needs any more. `use` names scratch memory for the result; `done` gives it back.
    """

    recording = False
    by_block = False  # whether the input of each block is all that is kept of it

    @staticmethod
    def array(x: Any) -> Array:
        """The array of the value x."""
        array: Array = x
        return array

    def done(self, use: str, x: Any) -> None:
        """Give back the memory of x, whose operation had this `use`."""
        keep(use, x)

    def empty(self, use: str | None, rows: int, columns: int, dtype: np.dtype[Any]) -> Array:
        """An uninitialised array for the result of `attend`."""
        return np.empty((rows, columns), dtype) if use is None else scratch(use, rows, columns, dtype)

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
        over: bool = False,
        out: Array | None = None,
    ) -> Any:
        """`ops.linear`; with `over`, in the residual's memory."""
        if out is None:
            n = weight.out_features
            if over:
                out = residual
            else:
                out = np.empty((len(x), n), x.dtype) if use is None else scratch(use, len(x), n, x.dtype)
        dispatch.run(
            LinearArgs(x, weight, bias, activation, residual, out, get_num_threads(), rounding), None
        )
        return out

    def norm(
        self,
        x: Any,
        kind: str,
        weight: Array,
        bias: Array | None,
        eps: float,
        *,
        over: bool = False,
        out: Array | None = None,
    ) -> Any:
        """`ops.layer_norm` or `ops.rms_norm`."""
        if out is None:
            out = x if over else np.empty(x.shape, x.dtype)
        dispatch.run(RowsArgs(kind, x, out, get_num_threads(), None, None, None, weight, bias, eps))
        return out

    def gated_norm(
        self, x: Any, gate: Any, weight: Array, eps: float, activation: Activation, gate_first: bool = False
    ) -> Any:
        """`ops.rms_norm` with a gate, in which some rows of x may lie side by side.

        weight is (features,), or (parts, features) where a row has several, each with a norm of its own.
        """
        out = np.empty(x.shape, x.dtype)
        for part, own in by_columns(np.atleast_2d(weight)):
            up = gate if weight.ndim == 1 else gate[:, part]
            args = RowsArgs(
                "rms_norm", x[:, part], out[:, part], get_num_threads(), up=up, weight=own, eps=eps
            )
            args.activation, args.gate_first = activation, gate_first
            dispatch.run(args)
        return out

    def head_norm(
        self, x: Any, kind: str, weight: Array, eps: float, begin: int = 0, bias: Array | None = None
    ) -> Any:
        """A norm of each of some heads of a row, in place, from `begin` on; weight is (heads, head_dim).

        There is a bias (head_dim,) only with one head.
        """
        for part, own in by_columns(weight, begin):
            args = RowsArgs(kind, x[:, part], x[:, part], get_num_threads(), weight=own, bias=bias, eps=eps)
            dispatch.run(args)
        return x

    def add(self, x: Any, residual: Any, *, out: Array | None = None) -> Any:
        """The sum."""
        out = np.empty(x.shape, x.dtype) if out is None else out
        dispatch.run(RowsArgs("activate", x, out, get_num_threads(), residual))
        return out

    def gate(
        self, x: Any, up: Any, activation: Activation | None = "sigmoid", *, out: Array | None = None
    ) -> Any:
        """``activation(x) * up``; `out` may be up's array."""
        out = np.empty(x.shape, x.dtype) if out is None else out
        dispatch.run(RowsArgs("activate", x, out, get_num_threads(), up=up, activation=activation))
        return out

    def call(self, function: Callable[..., Any], inputs: Mapping[str, Any], **options: Any) -> Any:
        """The first result of a function that `grad.vjp` takes: `inputs` are values, parameters or None."""
        found = function(**inputs, **options)
        return found[0] if isinstance(found, tuple) else found

    def dropped(self, x: Any) -> Any:
        """x: a plain call drops nothing."""
        return x

    def views(self, x: Any, views: Views, whole: bool = True) -> Sequence[Any]:
        """Parts of x, views that do not overlap; `whole`: of all its elements."""
        return views(x)

    def by_row(self, x: Any) -> Any:
        """Heads x ([batch,] heads, length, head_dim) as rows ([batch *] length * heads, head_dim)."""
        found: Array = x.swapaxes(-3, -2).reshape(-1, x.shape[-1])
        return found

    def rotate(self, x: Any, cos: Array, sin: Array, interleaved: bool = False) -> Any:
        """Rotate x (..., heads, length, head_dim) in place by tables ([batch,] 1, length, pairs)."""
        dispatch.run(RopeArgs(x, x, cos, sin, interleaved, get_num_threads()))
        return x

    def shared(self, x: Any) -> Any:
        """x, for several operations, in memory of its own."""
        return x.copy()

    def extended(self, x: Any, longer: Array, parameter: Array | None) -> Any:
        """Keys or values `longer`, which begin with x; then comes `parameter`, if there is one."""
        return longer

    def attend(
        self,
        calls: Sequence[Call],
        out: Array,
        by_head: Views,
        sinks: Array | None = None,
        table: Array | None = None,
    ) -> Any:
        """Attention of `calls`, in rows of `out`: `by_head` gives the views of it that calls write to.

        `sinks` and `table`, a bias by distance, are parameters.
        """
        for args, *_ in calls:
            dispatch.run(args)
        return out

    def block(self, compute: Callable[..., Any], *inputs: Any) -> Any:
        """``compute(tape, *inputs)``; a tape with `by_block` keeps nothing else of it."""
        return compute(self, *inputs)

    def rows(self, x: Any, which: Array) -> Any:
        """Some rows of x, as a bool array says."""
        return x[which]

    def spread(self, x: Any, which: Array) -> Any:
        """Rows of x where a bool array is True, 0 elsewhere."""
        out = np.zeros((len(which), x.shape[1]), x.dtype)
        out[which] = x
        return out

    def cleared(self, x: Any, which: Array, over: bool = False) -> Any:
        """x with 0 in the rows where a bool array is True, and so in its gradient."""
        if which.any():
            x = x if over else x.copy()
            x[which] = 0
        return x


PLAIN = Plain()


def by_columns(weight: Array, begin: int = 0) -> list[tuple[slice, Array]]:
    """The columns of each head, the first at `begin`, and its weight."""
    size = weight.shape[1]
    return [(slice(begin + i * size, begin + (i + 1) * size), own) for i, own in enumerate(weight)]
