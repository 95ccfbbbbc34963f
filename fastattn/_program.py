"""A model's operations one after another over the same rows, told once and run in one call.

Between two kernels Python is short, but what it touches has left the caches: checking and passing the
arguments of one costs 20 to 80 microseconds there, a quarter of the time of a small model. A program holds
what does not change from call to call, and is only told which arrays the rows lie in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fastattn import _backend
from fastattn._args import plain_args
from fastattn._ops_args import LinearArgs, RowsArgs

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


@dataclass(slots=True, eq=False)
class Program:
    """Steps over buffers that are (batch * length, columns) each and known by their numbers."""

    steps: tuple[Step, ...]
    _compiled: Any = field(default=None, init=False, repr=False)

    def run(self, buffers: list[Array], batch: int, lengths: Ints | None) -> None:
        """Run all steps; of each sequence the first `lengths`, int64 (batch,), keys count."""
        if not buffers[0].size:
            return
        if _backend.default_backend() == "compiled":
            if self._compiled is None:
                self._compiled = _backend.compiled_program(self.steps)
            self._compiled.run(buffers, batch, lengths, _backend.get_num_threads())
            return
        for step in self.steps:
            step.run(buffers, batch, lengths)

    def __reduce__(self) -> Any:
        return Program, (self.steps,)
