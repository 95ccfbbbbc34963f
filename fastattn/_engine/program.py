"""Programs: a model's operations one after another over the same rows, described once and run in one call.

The Python code between two kernels is short, but it has left the caches by the time it runs. Checking and
passing the arguments of one kernel then costs 20 to 80 microseconds, a quarter of a small model's time. A
program keeps what is the same in every call, so that a call only says where the rows are.

A new kind of step is a class here and one in ``core/program.pxi``; docs/architecture.md has the recipe.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from fastattn._args.packed import LinearArgs
from fastattn._args.types import RopeArgs, RowsArgs, plain_args
from fastattn._engine import dispatch, settings
from fastattn._engine.scratch import keep, scratch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fastattn._args.key_ranges import Range
    from fastattn._args.packed import PackedLinear
    from fastattn._args.types import Activation, Array, Ints, Rounding
    from fastattn._engine.slots import Slots

    Buffers = Mapping[str, Array]

# The caller's two buffers: where a program reads its rows, and where it writes its result.
X, OUT = "x", "out"


class Sequences(NamedTuple):
    """What the rows of a call are: `batch` sequences end to end, of one length if there are no `begins`.

    With `begins`, arrays have (1, rows) for the axes (batch, 1, length).
    """

    batch: int
    # First and last key (exclusive) of each query, broadcast to (batch, 1, length); a step picks one.
    ranges: tuple[Range, ...] = ((None, None),)
    rotations: tuple[tuple[Array, Array], ...] = ()  # cos and sin, ([batch,] 1, length, pairs), lane type
    slots: Slots | None = None  # where the cache takes new keys and values; older ones are attended, too
    begins: Ints | None = None  # the first row of each sequence, and the end, (batch + 1,)
    # Added to scores: for query i and key j what is at j - i from the middle of (heads, 2 n - 1), lane type.
    biases: tuple[Array, ...] = ()

    def alone(self) -> Iterator[tuple[slice, Sequences]]:
        """The rows of each sequence of a ragged batch, and what they are without the others."""
        assert self.begins is not None
        for i, (begin, end) in enumerate(pairwise(self.begins.tolist())):
            rows = slice(begin, end)
            ranges = tuple((_of_rows(first, rows), _of_rows(last, rows)) for first, last in self.ranges)
            rotations = tuple((cos[:, rows], sin[:, rows]) for cos, sin in self.rotations)
            slots = None if self.slots is None else self.slots.of_sequence(i, end - begin)
            yield rows, Sequences(1, ranges, rotations, slots, biases=self.biases)


def _of_rows(bound: Ints | None, rows: slice) -> Ints | None:
    return None if bound is None else bound[..., rows]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One kernel: it reads buffer `x` and writes buffer `out`."""

    op: ClassVar[str | None]  # its name in ``core/program.pxi``; None: it runs in Python only

    x: str
    out: str

    @property
    def reads(self) -> tuple[str, ...]:
        """The buffers that it reads."""
        return (self.x,)

    @property
    def columns(self) -> int:
        """How many features of `out` it writes."""
        raise NotImplementedError

    def run(self, buffers: Buffers, call: Sequences) -> None:
        """Compute it with the kernel's NumPy twin."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class LinearStep(Step):
    """`ops.linear`; `out` must not be `x`."""

    op = "linear"

    weight: PackedLinear
    bias: Array | None  # of the lane type and contiguous, like a norm's parameters
    activations: Rounding | None = None
    activation: Activation | None = None
    residual: str | None = None  # a buffer; it may be `out`

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x,) if self.residual is None else (self.x, self.residual)

    @property
    def columns(self) -> int:
        return self.weight.out_features

    def run(self, buffers: Buffers, call: Sequences) -> None:
        x, out = buffers[self.x], buffers[self.out]
        residual = None if self.residual is None else buffers[self.residual]
        parameters = self.weight, self.bias, self.activation
        dispatch.run(LinearArgs(x, *parameters, residual, out, 1, self.activations))


@dataclass(frozen=True, slots=True, eq=False)
class NormStep(Step):
    """`ops.layer_norm` or `ops.rms_norm`, of whole rows or, in place, of each of the first heads of a row."""

    op = "norm"

    kind: str
    weight: Array  # (features,), or (heads, head_dim)
    bias: Array | None  # (features,)
    eps: float

    @property
    def columns(self) -> int:
        return self.weight.size

    def run(self, buffers: Buffers, call: Sequences) -> None:
        begin = 0
        for weight in np.atleast_2d(self.weight):
            part = slice(begin, begin := begin + len(weight))
            x, out = buffers[self.x][:, part], buffers[self.out][:, part]
            dispatch.run(RowsArgs(self.kind, x, out, 1, weight=weight, bias=self.bias, eps=self.eps))


@dataclass(frozen=True, slots=True, eq=False)
class AddStep(Step):
    """``out = x + residual``: for what a norm stands in front of, as `LinearStep` adds its own result."""

    op = "add"

    residual: str  # a buffer; it may be `out`, as `x` may
    features: int

    @property
    def reads(self) -> tuple[str, ...]:
        return self.x, self.residual

    @property
    def columns(self) -> int:
        return self.features

    def run(self, buffers: Buffers, call: Sequences) -> None:
        x, out = buffers[self.x], buffers[self.out]
        dispatch.run(RowsArgs("activate", x, out, 1, residual=buffers[self.residual]))


@dataclass(frozen=True, slots=True, eq=False)
class AttendStep(Step):
    """`attention` of the queries, keys and values that stand side by side in the rows of `x`.

    With a rotation, `apply_rope` turns queries and keys first: in place, except for keys that go to a cache,
    which are turned on their way.
    """

    op = "attend"

    heads: int
    heads_kv: int
    head_dim: int
    scale: float
    layer: int = 0  # a cache holds `heads_kv` heads for each layer, in order
    ranges: int = 0  # index into the call's `ranges`
    rotation: int | None = None  # and into its `rotations`
    bias: int | None = None  # and into its `biases`; not with a cache

    @property
    def columns(self) -> int:
        return self.heads * self.head_dim

    def run(self, buffers: Buffers, call: Sequences) -> None:
        if call.begins is not None:
            for rows, own in call.alone():
                if rows.stop > rows.start:
                    self.run({name: array[rows] for name, array in buffers.items()}, own)
            return

        def heads(array: Array) -> Array:
            batch = call.batch
            return array.reshape(batch, len(array) // batch, -1, self.head_dim).transpose(0, 2, 1, 3)

        together, end = heads(buffers[self.x]), self.heads + self.heads_kv
        qk, v = together[:, :end], together[:, end:]
        if self.rotation is not None:
            dispatch.run(RopeArgs(qk, qk, *call.rotations[self.rotation], False, 1))
        q, k = qk[:, : self.heads], qk[:, self.heads :]
        scales: list[Array] = []
        if call.slots is not None:
            k, v, *scales = call.slots.put(k, v, self.layer * self.heads_kv)
        args = plain_args(q, k, v, heads(buffers[self.out]), 1)
        if scales:
            args.k_scale, args.v_scale = scales
        args.scale = self.scale
        args.row_begin, args.row_end = call.ranges[self.ranges]
        if self.bias is not None:
            args.bias = by_distance(call.biases[self.bias], args.len_q)
        dispatch.run(args)


def by_distance(table: Array, length: int) -> Array:
    """The bias (heads, length, length) that `table` (heads, 2 n - 1) has for each query and key, as a view.

    Where `length` is more than n, the view has only the scores of n tokens.
    """
    n = min(length, (table.shape[1] + 1) // 2)
    row, col = table.strides
    middle = table[:, (table.shape[1] - 1) // 2 :]
    return np.lib.stride_tricks.as_strided(middle, (len(table), n, n), (row, -col, col), writeable=False)


@dataclass(slots=True, eq=False)
class Program:
    """Steps over named buffers of shape (batch * length, columns); `build` makes one.

    `X` and `OUT` are the caller's arrays. The other buffers live in scratch memory during a call.
    """

    use: str  # which scratch memory: see `scratch.py`
    steps: tuple[Step, ...]
    places: dict[str, tuple[int, int]]  # begin and width of each scratch buffer, in features of a row
    columns: int  # of OUT
    _compiled: Any = field(default=None, init=False, repr=False)

    def run(self, x: Array, call: Sequences) -> Array:
        """OUT, a new array of x's dtype."""
        n = len(x)
        out = np.empty((n, self.columns), x.dtype)
        if not out.size:
            return out
        ends = (begin + width for begin, width in self.places.values())
        memory = scratch(self.use, n, max(ends, default=0), x.dtype)
        if settings.default_backend() == "compiled":
            if self._compiled is None:
                self._compiled = self._compile()
            for part in self._compiled:
                if isinstance(part, Step):
                    part.run(self._buffers(x, out, memory), call)
                else:
                    part.run(x, out, memory, call, settings.get_num_threads())
        else:
            buffers = self._buffers(x, out, memory)
            for step in self.steps:
                step.run(buffers, call)
        keep(self.use, memory)
        return out

    def _compile(self) -> list[Any]:
        """The steps that run in Python, and those between them as programs."""
        parts: list[Any] = []
        for in_python, steps in groupby(self.steps, lambda step: step.op is None):
            some = tuple(steps)
            parts += some if in_python else [settings.core.Program(some, self.places)]
        return parts

    def _buffers(self, x: Array, out: Array, memory: Array) -> Buffers:
        n, flat, buffers = len(x), memory.reshape(-1), {X: x, OUT: out}
        for name, (begin, width) in self.places.items():
            buffers[name] = flat[n * begin : n * (begin + width)].reshape(n, width)
        return buffers

    def __reduce__(self) -> Any:
        return Program, (self.use, self.steps, self.places, self.columns)


def build(use: str, steps: Sequence[Step]) -> Program:
    """A program of `steps`, whose scratch buffers share memory where they are not needed at the same time.

    A buffer is as wide as the widest result that a step writes to it. It is needed from a step that writes it
    to the last step that reads this result. `X` is scratch memory, too, if a step writes it.
    """
    widths: dict[str, int] = {}
    for step in steps:
        widths[step.out] = max(step.columns, widths.get(step.out, 0))
    columns = widths.pop(OUT, 0)
    widths.pop(X, None)

    needed = {OUT}  # after the step that is looked at, from the last one to the first
    neighbours: defaultdict[str, set[str]] = defaultdict(set)  # buffers that are needed at the same time
    for step in reversed(steps):
        together = needed.union((step.out,), step.reads)
        for name in together:
            neighbours[name] |= together
        needed = needed.difference((step.out,)).union(step.reads)
    if steps and (unwritten := needed - {X}):
        raise ValueError(f"fastattn: steps read {', '.join(sorted(unwritten))} before anything is there")

    places: dict[str, tuple[int, int]] = {}
    for name in sorted(widths, key=lambda name: -widths[name]):  # each at the first gap that is wide enough
        begin = 0
        for other, width in sorted(place for n, place in places.items() if n in neighbours[name]):
            if begin + widths[name] <= other:
                break
            begin = max(begin, other + width)
        places[name] = begin, widths[name]
    return Program(use, tuple(steps), places, columns)
