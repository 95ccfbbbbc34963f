"""A model's operations one after another over the same rows, told once and run in one call.

Between two kernels Python is short, but what it touches has left the caches: checking and passing the
arguments of one costs 20 to 80 microseconds there, a quarter of the time of a small model. A program holds
what does not change from call to call, and is only told which arrays the rows lie in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from fastattn import _backend
from fastattn._args import plain_args
from fastattn._ops_args import LinearArgs, RowsArgs
from fastattn._scratch import keep, scratch

if TYPE_CHECKING:
    from fastattn._args import Array, Ints
    from fastattn.packed import PackedLinear


class LinearStep(NamedTuple):
    """`ops.linear` from buffer x into buffer out, neither of which is the other."""

    x: int
    out: int
    weight: PackedLinear
    bias: Array | None  # of the lane type, contiguous, as the norm's parameters
    activation: str | None = None
    residual: int | None = None
    op: Literal["linear"] = "linear"

    def run(self, buffers: list[Array], batch: int, lengths: Ints | None) -> None:
        residual = None if self.residual is None else buffers[self.residual]
        args = LinearArgs(
            buffers[self.x], self.weight, self.bias, self.activation, residual, buffers[self.out], 1
        )
        _backend.run_op("linear", args, None)


class NormStep(NamedTuple):
    """`ops.layer_norm` or `ops.rms_norm`."""

    x: int
    out: int
    kind: str
    weight: Array
    bias: Array | None
    eps: float
    op: Literal["norm"] = "norm"

    def run(self, buffers: list[Array], batch: int, lengths: Ints | None) -> None:
        args = RowsArgs(
            self.kind,
            buffers[self.x],
            buffers[self.out],
            1,
            None,
            None,
            None,
            self.weight,
            self.bias,
            self.eps,
        )
        _backend.run_op("rows", args, None)


class AttendStep(NamedTuple):
    """`attention` of the queries, keys and values that stand side by side in the rows of buffer x."""

    x: int
    out: int
    heads: int
    heads_kv: int
    head_dim: int
    op: Literal["attend"] = "attend"

    def run(self, buffers: list[Array], batch: int, lengths: Ints | None) -> None:
        def heads(array: Array) -> Array:
            return array.reshape(batch, len(array) // batch, -1, self.head_dim).transpose(0, 2, 1, 3)

        together, end = heads(buffers[self.x]), self.heads + self.heads_kv
        q, k, v = together[:, : self.heads], together[:, self.heads : end], together[:, end:]
        args = plain_args(q, k, v, heads(buffers[self.out]), 1)
        args.row_end = None if lengths is None else lengths[:, None, None]
        _backend.run(args, None)


Step = LinearStep | NormStep | AttendStep


X, OUT = 0, 1  # the buffers of every program; its own follow


@dataclass(slots=True, eq=False)
class Program:
    """Steps over buffers that are (batch * length, columns) each and known by their numbers.

    `X` and `OUT` are the caller's. The others lie in memory that lives as long as a call, at `places`,
    (begin, columns) in features of a row: what is not needed at one time may lie at one place.
    """

    use: str  # of the memory: see `_scratch.py`
    steps: tuple[Step, ...]
    places: tuple[tuple[int, int], ...]
    _compiled: Any = field(default=None, init=False, repr=False)

    def run(self, x: Array, batch: int, lengths: Ints | None = None) -> Array:
        """OUT, of x's shape and dtype; of each sequence the first `lengths`, int64 (batch,), keys count."""
        out = np.empty(x.shape, x.dtype)
        if not out.size:
            return out
        n, columns = len(x), max(begin + width for begin, width in self.places)
        memory = scratch(self.use, n, columns, x.dtype)
        if _backend.default_backend() == "compiled":
            if self._compiled is None:
                self._compiled = _backend.compiled_program(self.steps, self.places)
            self._compiled.run(x, out, memory, batch, lengths, _backend.get_num_threads())
        else:
            flat = memory.reshape(-1)
            places = (flat[n * begin : n * (begin + width)].reshape(n, width) for begin, width in self.places)
            buffers = [x, out, *places]
            for step in self.steps:
                step.run(buffers, batch, lengths)
        keep(self.use, memory)
        return out

    def __reduce__(self) -> Any:
        return Program, (self.use, self.steps, self.places)
