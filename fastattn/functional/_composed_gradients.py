"""Gradients of functions that are made of calls of attention: sums over these calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.backward import gradient_shape, of_source, source_of, summed_to
from fastattn._args.types import FLOAT64, OF_HEADS, Array, AttentionArgs, BackwardArgs, Shape, lane_dtype
from fastattn._args.values import operand
from fastattn._engine import dispatch

if TYPE_CHECKING:
    from fastattn._args.backward import Gradients
    from fastattn.functional._differentiable import Request


def computed(found: Gradients, options: Mapping[str, Any]) -> tuple[Any, ...]:
    """The gradients of one call."""
    if found.args.out.size:
        dispatch.run(found.args, options.get("backend"))
    else:
        found.clear()
    return found.results()


class ComposedGradients:
    """The gradients of a request, summed in the lane dtype over calls of attention."""

    def __init__(self, request: Request, options: Mapping[str, Any]) -> None:
        self.options, self.given, self.names = options, request.given, request.need
        self.bias = request.own_bias  # else the function adds the caller's
        self.sums: dict[str, Any] = {}

    def wants(self, *names: str) -> bool:
        """Whether one of these gradients is asked for."""
        return any(name in self.names for name in names)

    def attend(
        self,
        args: AttentionArgs,
        dout: Array,
        dlse: Array | None = None,
        item: tuple[Shape, Shape] | None = None,
        uses: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> Any:
        """Differentiate one call, and add the gradients of its options. Returns its BackwardArgs, filled.

        `item`: the index of the batch item that the call computes, and the batch shape of the whole call.

        `uses`: for dq, dk, dv and dbias of this call, the gradients that are made of them; by default those
        of the same name. Without one that is wanted, they are not computed, and None.

        Parts that are merged have out and lse of the whole: then no part needs a dlse of its own.
        """
        lane = lane_dtype(args.q.dtype)
        args.q, args.k, args.v, args.out, dout = (
            _rows_in(args.q.dtype, x) for x in (args.q, args.k, args.v, args.out, dout)
        )
        call = BackwardArgs(args, dout, dlse)
        of_scale = self.wants("dscale")
        call.dq_factor = 1.0 if of_scale else args.scale
        of_heads, filled = [f"d{option}" for option in OF_HEADS], False
        for name in ("dq", "dk", "dv", "dbias", "dbias_diagonals", *of_heads):
            wanted = self.wants(*uses.get(name, (name,))) or (of_scale and name == "dq")
            if wanted and getattr(args, source_of(name)) is not None:
                dtype = FLOAT64 if name in of_heads else lane
                setattr(call, name, np.zeros(gradient_shape(args, name), dtype))
                filled = True
        if args.out.size and filled:
            dispatch.run(call, self.options.get("backend"))
        if of_scale and call.dq is not None:
            self.add("dscale", product_sums(args.q, call.dq).sum())
            call.dq *= lane.type(args.scale)
        for name in of_heads:
            x = getattr(call, name)
            if item is not None and x is not None:
                whole = np.zeros((*item[1], args.heads_q))
                whole[item[0]] = summed_to(whole[item[0]].shape, x)
                x = whole
            self.add(name, x)
        for name in ("dbias", "dbias_diagonals") if self.bias else ():
            self.add(name, getattr(call, name))
        return call

    def add_all(self, call: BackwardArgs) -> None:
        """Add dq, dk and dv of a call."""
        for name in ("dq", "dk", "dv"):
            self.add(name, getattr(call, name))

    def add(self, name: str, x: Any) -> None:
        """Add to a gradient, if it is asked for, `x` summed over what its source was broadcast along."""
        if name not in self.names or x is None:
            return
        shape = np.shape(self.given[source_of(name)])
        if name == "dbias_diagonals":
            shape = (*shape[:-2], x.shape[-1])
        found = summed_to(shape, np.asarray(x))
        self.sums[name] = self.sums[name] + found if name in self.sums else found

    def results(self) -> tuple[Any, ...]:
        """The gradients, in the order of `need`, in the dtypes of what they are gradients of.

        One of an option is 0 where no call had anything to do.
        """
        return tuple(self._result(name) for name in self.names)

    def _result(self, name: str) -> Any:
        source = self.given[source_of(name)]
        found = self.sums[name] if name in self.sums else np.zeros(np.shape(source))
        scalar = isinstance(source, np.generic) or not hasattr(source, "dtype")
        if scalar and np.ndim(found) == 0:
            return float(found)
        return np.asarray(found if name == "dbias_diagonals" else of_source(source, found), order="C")


def _rows_in(dtype: np.dtype[Any], x: Array) -> Array:
    """`x` as `dtype`, its rows contiguous, as kernels read them.

    What NumPy computes or casts has the memory order of its inputs: that of broadcast ones has strided rows.
    """
    return operand("x", np.asarray(x, dtype), [])


def cotangents(args: AttentionArgs, request: Request) -> tuple[Array, Array | None]:
    """The gradients of out and lse, with the batch dimensions of the results of `args`."""
    rows = args.out.shape[:-1]
    dlse = None if request.dmore is None else request.dmore.reshape(rows)
    return request.dout.reshape(args.out.shape), dlse


def product_sums(x: Array, dx: Array) -> Array:
    """Sums over rows and features of x * dx, (..., heads), in float64. A dx of 0 hides what is in x."""
    found: Array = np.where(dx == 0, 0, dx * x.astype(dx.dtype)).sum(axis=(-2, -1), dtype=float)
    return found


def shown(x: Array, dx: Array) -> Array:
    """`x` in the dtype of `dx`; rows of which dx is 0 took no part and become 0, whatever they hold."""
    return np.where((dx == 0).all(axis=-1, keepdims=True), 0, x.astype(dx.dtype, copy=False))
