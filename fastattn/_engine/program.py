"""A model's operations one after another over the same rows, told once and run in one call.

Between two kernels Python is short, but what it touches has left the caches: checking and passing the
arguments of one costs 20 to 80 microseconds there, a quarter of the time of a small model. A program holds
what does not change from call to call, and is only told which arrays the rows lie in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from fastattn._args.types import LinearArgs, RopeArgs, RowsArgs, plain_args
from fastattn._engine import dispatch, settings
from fastattn._engine.scratch import keep, scratch

if TYPE_CHECKING:
    from fastattn._args.key_ranges import Range
    from fastattn._args.packed import PackedLinear
    from fastattn._args.types import Activation, Array
    from fastattn.cache import Slots


class Sequences(NamedTuple):
    """What the rows of a call are: `batch` sequences of one length, end to end."""

    batch: int
    # Begin and end of the keys that a query attends, broadcast to (batch, 1, length); a step says which.
    ranges: tuple[Range, ...] = ((None, None),)
    rotation: tuple[Array, Array] | None = None  # cos and sin, ([batch,] 1, length, pairs), lane type
    slots: Slots | None = None  # of a cache, where keys and values go; those in it are attended, too


class LinearStep(NamedTuple):
    """`ops.linear` from buffer x into buffer out, neither of which is the other."""

    x: int
    out: int
    weight: PackedLinear
    bias: Array | None  # of the lane type, contiguous, as the norm's parameters
    activation: Activation | None = None
    residual: int | None = None
    op: Literal["linear"] = "linear"

    def run(self, buffers: list[Array], call: Sequences) -> None:
        residual = None if self.residual is None else buffers[self.residual]
        args = LinearArgs(
            buffers[self.x], self.weight, self.bias, self.activation, residual, buffers[self.out], 1
        )
        dispatch.run(args, None)


class NormStep(NamedTuple):
    """`ops.layer_norm` or `ops.rms_norm`."""

    x: int
    out: int
    kind: str
    weight: Array
    bias: Array | None
    eps: float
    op: Literal["norm"] = "norm"

    def run(self, buffers: list[Array], call: Sequences) -> None:
        x, out = buffers[self.x], buffers[self.out]
        args = RowsArgs(self.kind, x, out, 1, weight=self.weight, bias=self.bias, eps=self.eps)
        dispatch.run(args, None)


class HeadNormStep(NamedTuple):
    """`ops.rms_norm` of each of the first heads in the rows of buffer x, in place."""

    x: int
    weight: Array  # (heads, head_dim), of the lane type, contiguous
    eps: float
    op: Literal["head_norm"] = "head_norm"

    def run(self, buffers: list[Array], call: Sequences) -> None:
        heads, head_dim = self.weight.shape
        for h in range(heads):
            x = buffers[self.x][:, h * head_dim : (h + 1) * head_dim]
            args = RowsArgs("rms_norm", x, x, 1, weight=self.weight[h], eps=self.eps)
            dispatch.run(args, None)


class AttendStep(NamedTuple):
    """`attention` of the queries, keys and values that stand side by side in the rows of buffer x.

    Where the call has a rotation, `apply_rope` turns queries and keys first: in place, but for keys that go
    to a cache, which are turned on their way.
    """

    x: int
    out: int
    heads: int
    heads_kv: int
    head_dim: int
    scale: float
    layer: int = 0  # the cache has `heads_kv` heads for each
    ranges: int = 0  # which of the call's
    op: Literal["attend"] = "attend"

    def run(self, buffers: list[Array], call: Sequences) -> None:
        def heads(array: Array) -> Array:
            batch = call.batch
            return array.reshape(batch, len(array) // batch, -1, self.head_dim).transpose(0, 2, 1, 3)

        together, end = heads(buffers[self.x]), self.heads + self.heads_kv
        qk, v = together[:, :end], together[:, end:]
        if call.rotation is not None:
            dispatch.run(RopeArgs(qk, qk, *call.rotation, False, 1), None)
        q, k = qk[:, : self.heads], qk[:, self.heads :]
        if call.slots is not None:
            k, v = call.slots.put(k, v, self.layer * self.heads_kv)
        args = plain_args(q, k, v, heads(buffers[self.out]), 1)
        args.scale = self.scale
        args.row_begin, args.row_end = call.ranges[self.ranges]
        dispatch.run(args, None)


Step = LinearStep | NormStep | HeadNormStep | AttendStep


X, OUT = 0, 1  # the buffers of every program; its own follow


@dataclass(slots=True, eq=False)
class Program:
    """Steps over buffers that are (batch * length, columns) each and known by their numbers.

    `X` and `OUT` are the caller's. The others lie in memory that lives as long as a call, at `places`,
    (begin, columns) in features of a row: what is not needed at one time may lie at one place.
    """

    use: str  # of the memory: see `scratch.py`
    steps: tuple[Step, ...]
    places: tuple[tuple[int, int], ...]
    columns: int  # of OUT
    _compiled: Any = field(default=None, init=False, repr=False)

    def run(self, x: Array, call: Sequences) -> Array:
        """OUT, of x's dtype."""
        n = len(x)
        out = np.empty((n, self.columns), x.dtype)
        if not out.size:
            return out
        memory = scratch(self.use, n, max(begin + width for begin, width in self.places), x.dtype)
        if settings.default_backend() == "compiled":
            if self._compiled is None:
                self._compiled = settings.core.Program(self.steps, self.places)
            self._compiled.run(x, out, memory, call, settings.get_num_threads())
        else:
            flat = memory.reshape(-1)
            places = (flat[n * begin : n * (begin + width)].reshape(n, width) for begin, width in self.places)
            buffers = [x, out, *places]
            for step in self.steps:
                step.run(buffers, call)
        keep(self.use, memory)
        return out

    def __reduce__(self) -> Any:
        return Program, (self.use, self.steps, self.places, self.columns)
