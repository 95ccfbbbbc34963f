"""Steps of programs: each operation of a model once, over rows in named buffers.

Each step is written on the operations of a tape: `PLAIN` runs it on NumPy, where there are no kernels, and
any other records it for its gradients. A new kind of step is a class here and one in ``core/row_steps.pxi``;
docs/dev/architecture.md has the recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from fastattn._args.types import Activation, Array, AttentionArgs, Ints, ModifiersArgs, Rounding, plain_args
from fastattn._engine import settings

if TYPE_CHECKING:
    from fastattn._args.key_ranges import Range
    from fastattn._args.packed import PackedLinear
    from fastattn._engine.slots import Slots
    from fastattn._engine.tape import Tape

# The present value of each buffer: an array for `PLAIN`, else a `Value`; and what `AttendStep`s give to later
# ones.
Values = MutableMapping[str, Any]

# The caller's buffers: where a program reads its rows, where it writes its result, and `Sequences.inputs`.
X, OUT, INPUTS = "x", "out", "inputs"


class Sequences(NamedTuple):
    """The rows of a call: `batch` sequences end to end, of one length if there are no `begins`.

    With `begins`, arrays have (1, rows) for the axes (batch, 1, length).
    """

    batch: int
    # First and last key (exclusive) of each query, broadcast to (batch, 1, length); a step picks one.
    ranges: tuple[Range, ...] = ((None, None),)
    rotations: tuple[tuple[Array, Array], ...] = ()  # cos and sin, ([batch,] 1, length, pairs), lane type
    # Where the cache takes new keys and values, for heads of each size; older ones are attended, too.
    slots: tuple[Slots, ...] = ()
    begins: Ints | None = None  # the first row of each sequence, and the end, (batch + 1,)
    # Added to scores: for query i and key j what is at j - i from the middle of (heads, 2 n - 1), lane type.
    biases: tuple[Array, ...] = ()
    # Of each layer that carries states: the arguments of its convolution and its recurrence for them.
    states: Sequence[Sequence[dict[str, Any]]] | None = None
    inputs: Array | None = None  # (rows, features): more of the tokens than x has; steps may write there
    # Of attentions that layers compute in Python: what each is given, by number; and rows that some attend.
    attentions: Sequence[dict[str, Any]] = ()
    memory: Any = None

    def alone(self) -> Iterator[tuple[slice, Sequences]]:
        """The rows of each sequence of a ragged batch, and the sequence as a batch of its own."""
        assert self.begins is not None
        for i, (begin, end) in enumerate(pairwise(self.begins.tolist())):
            rows = slice(begin, end)
            ranges = tuple((_of_rows(first, rows), _of_rows(last, rows)) for first, last in self.ranges)
            rotations = tuple((cos[:, rows], sin[:, rows]) for cos, sin in self.rotations)
            slots = tuple(each.of_sequence(i, end - begin) for each in self.slots)
            yield rows, Sequences(1, ranges, rotations, slots, biases=self.biases)


def _of_rows(bound: Ints | None, rows: slice) -> Ints | None:
    return None if bound is None else bound[..., rows]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One kernel: it reads buffer `x` and writes buffer `out`.

    `run` is for NumPy and tapes; plain compiled calls take the class of `op` in ``core/*.pxi``.
    """

    op: ClassVar[str | None]  # its name in ``core/attend_step.pxi``'s _STEPS; None: it runs in Python only
    along: ClassVar[bool] = False  # rows read others of their sequence
    has_gradients: ClassVar[bool] = True  # a tape can record it
    sources: ClassVar[tuple[str, ...]] = ("x",)  # the fields that name a buffer it reads, or None

    x: str
    out: str

    @property
    def reads(self) -> tuple[str, ...]:
        """The buffers that it reads."""
        return tuple(name for field in self.sources if (name := getattr(self, field)) is not None)

    @property
    def columns(self) -> int:
        """Number of features of `out` that it writes."""
        raise NotImplementedError

    @property
    def scratch(self) -> dict[str, int]:
        """Features of buffers that it needs while it runs."""
        return {}

    def run(self, tape: Tape, values: Values, call: Sequences, out: Array | None = None) -> Any:
        """The value of buffer `out` after the step; `PLAIN` writes it to the array `out`."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class LinearStep(Step):
    """`ops.linear`; `out` must not be `x`."""

    op = "linear"
    sources = ("x", "residual")

    weight: PackedLinear
    bias: Array | None  # of the lane type and contiguous, like a norm's parameters
    activations: Rounding | None = None
    activation: Activation | None = None
    residual: str | None = None  # a buffer; it may be `out`

    @property
    def columns(self) -> int:
        return self.weight.out_features

    def run(self, tape: Tape, values: Values, call: Sequences, out: Array | None = None) -> Any:
        residual = None if self.residual is None else values[self.residual]
        parameters = self.weight, self.bias, self.activations, self.activation
        return tape.linear(values[self.x], *parameters, residual, out=out)


@dataclass(frozen=True, slots=True, eq=False)
class NormStep(Step):
    """`ops.layer_norm` or `ops.rms_norm`, of whole rows or, in place, of each of some heads of a row."""

    op = "norm"

    kind: str
    weight: Array  # (features,), or (heads, head_dim)
    bias: Array | None  # (features,); of heads only where there is one
    eps: float
    begin: int = 0  # the first feature of these heads

    @property
    def columns(self) -> int:
        return self.begin + self.weight.size

    def run(self, tape: Tape, values: Values, call: Sequences, out: Array | None = None) -> Any:
        if self.weight.ndim == 2:
            return tape.head_norm(values[self.x], self.kind, self.weight, self.eps, self.begin, self.bias)
        return tape.norm(values[self.x], self.kind, self.weight, self.bias, self.eps, out=out)


@dataclass(frozen=True, slots=True, eq=False)
class AddStep(Step):
    """``out = x + residual``, after a norm; a `LinearStep` adds its residual itself."""

    op = "add"
    sources = ("x", "residual")

    residual: str  # a buffer; it may be `out`, as `x` may
    features: int

    @property
    def columns(self) -> int:
        return self.features

    def run(self, tape: Tape, values: Values, call: Sequences, out: Array | None = None) -> Any:
        return tape.add(tape.dropped(values[self.x]), values[self.residual], out=out)


@dataclass(frozen=True, slots=True, eq=False)
class GateStep(Step):
    """``out = x * activation(gate)``, with the `features` from `begin` on of the rows of a buffer."""

    op = "gate"
    sources = ("x", "gate")

    gate: str
    begin: int
    features: int
    activation: Activation | None = "sigmoid"

    @property
    def columns(self) -> int:
        return self.features

    def run(self, tape: Tape, values: Values, call: Sequences, out: Array | None = None) -> Any:
        part = slice(self.begin, self.begin + self.features)
        (gate,) = tape.views(values[self.gate], lambda array: [array[:, part]], whole=False)
        return tape.gate(gate, values[self.x], self.activation, out=out)


@dataclass(frozen=True, slots=True, eq=False)
class ScaleStep(Step):
    """``out = x * weight``, feature by feature. It has no gradients."""

    op = "scale"
    has_gradients = False

    weight: Array  # (features,), of the rows' type

    @property
    def columns(self) -> int:
        return len(self.weight)

    def run(self, tape: Tape, values: Values, call: Sequences, out: Array | None = None) -> Any:
        if tape.recording:
            raise NotImplementedError("fastattn: scales of rows have no gradients")
        x = values[self.x]
        return tape.gate(np.broadcast_to(self.weight, x.shape), x, None, out=out)


@dataclass(frozen=True, slots=True, eq=False)
class AttendStep(Step):
    """`attention` of the queries, keys and values that stand side by side in the rows of `x`.

    With a rotation, `apply_rope` turns queries and keys first: in place, except for keys that go to a cache,
    which are turned on their way. With `keys`, there are queries alone in x. The keys and values are those
    that an earlier step `gives`: it has them in that buffer, rotated, or in the same heads of the cache.
    """

    op = "attend"
    along = True
    sources = ("x", "keys")

    heads: int
    heads_kv: int
    head_dim: int
    modifiers: ModifiersArgs
    first_kv: int = 0  # the first of its heads in a cache, which has those of all layers
    ranges: int = 0  # index into the call's `ranges`
    rotation: int | None = None  # and into its `rotations`
    bias: int | None = None  # and into its `biases`; not with a cache
    sinks: Array | None = None  # (heads,), lane type: logits that enter the denominator alone
    query_rotation: int | None = None  # that of queries where keys have another one
    size: int = 0  # index into the call's `slots`: that of its size of heads
    keys: str | None = None  # the `x` of the step whose keys and values it attends; None: its own
    keys_begin: int = 0  # the first feature of these keys there
    gives: bool = False  # later steps attend its keys and values

    @property
    def given(self) -> str:
        """The name of the keys and values that it gives or attends: two values for each part of the rows."""
        return f"{self.keys or self.x} given"

    @property
    def columns(self) -> int:
        return self.heads * self.head_dim

    def run(self, tape: Tape, values: Values, call: Sequences, out: Array | None = None) -> Any:
        x = values[self.x]
        n = len(tape.array(x))
        if not n:
            values[self.given] = [x, x]  # which nobody reads
            return tape.views(x, lambda array: [array[:, : self.columns]])[0]
        if out is None:
            out = tape.empty(None, n, self.columns, tape.array(x).dtype)
        end = self.heads + self.heads_kv
        used = (self.heads if self.keys else end + self.heads_kv) * self.head_dim
        parts = self._parts(call, n)

        def by_head(array: Array) -> list[Array]:
            return [_by_head(array[rows], own, self.head_dim) for rows, own in parts]

        # Queries and keys together where they are rotated alike, which is one kernel.
        apart = self.rotation is None or self.query_rotation is not None
        cuts = () if self.keys else (self.heads, end) if apart else (end,)

        def inputs(array: Array) -> list[Array]:
            return [head for each in by_head(array[:, :used]) for head in _cut(each, *cuts)]

        found = iter(tape.views(x, inputs, used == tape.array(x).shape[1]))
        given = iter(values.get(self.given, [None] * 2 * len(parts)))  # None: the cache has them
        calls = []
        for (_, own), result in zip(parts, by_head(out), strict=True):
            if self.keys:
                q, k, v = next(found), next(given), next(given)
                turned = self.rotation if self.query_rotation is None else self.query_rotation
                q = q if turned is None else tape.rotate(q, *own.rotations[turned])
            elif self.rotation is None:
                q, k = next(found), next(found)
            elif self.query_rotation is not None:
                q = tape.rotate(next(found), *own.rotations[self.query_rotation])
                k = tape.rotate(next(found), *own.rotations[self.rotation])
            else:
                rotated = tape.rotate(next(found), *own.rotations[self.rotation])
                q, k = tape.views(rotated, lambda array: _cut(array, self.heads))
            v = v if self.keys else next(found)
            if self.gives and tape.recording:
                k, v = tape.shared(k), tape.shared(v)
            args = self._args(own, tape.array(q), tape.array(k), tape.array(v), result)
            calls.append((args, q, k, v))
        if self.gives:
            values[self.given] = [value for _, _, *both in calls for value in both]
        table = None if self.bias is None else call.biases[self.bias]
        return tape.attend(calls, out, by_head, self.sinks, table)

    def _parts(self, call: Sequences, n: int) -> list[tuple[slice, Sequences]]:
        """The attentions of n rows that are computed at a time.

        A ragged batch with a bias or a cache is computed one by one.
        """
        if call.begins is not None and (self.bias is not None or call.slots):
            return [(rows, own) for rows, own in call.alone() if rows.stop > rows.start]
        return [(slice(0, n), call)]

    def _args(self, call: Sequences, q: Array, k: Array, v: Array, out: Array) -> AttentionArgs:
        """The arguments of one attention; new keys and values go to the cache, if there is one."""
        scales: list[Array] = []
        if call.slots:
            slots = call.slots[self.size]
            if self.keys is None:
                slots.put(k, v, self.first_kv)
            k, v, *scales = slots.held(self.first_kv, self.heads_kv)
        threads = settings.get_num_threads()
        if call.begins is None:
            args = plain_args(q, k, v, out, threads)
        else:
            args = plain_args(q[None], k[None], v[None], out[None], threads)
            args.q, args.k, args.v, args.out = q, k, v, out
            args.batch_shape, args.begins = (call.batch,), (call.begins, call.begins)
        if scales:
            args.k_scale, args.v_scale = scales
        for name, x in self.modifiers._asdict().items():
            setattr(args, name, x)
        args.sinks = self.sinks
        args.row_begin, args.row_end = call.ranges[self.ranges]
        if self.bias is not None:
            args.bias = by_distance(call.biases[self.bias], args.len_q)
        return args


def _cut(heads: Array, *cuts: int) -> list[Array]:
    """Heads (..., heads, length, size) up to each of `cuts`, and the rest."""
    begins = 0, *cuts
    return [heads[..., begin:end, :, :] for begin, end in zip(begins, (*cuts, None), strict=True)]


def _by_head(rows: Array, call: Sequences, size: int) -> Array:
    """Rows as (batch, heads, length, size), or of a ragged batch (heads, rows, size)."""
    if call.begins is not None:
        return rows.reshape(len(rows), -1, size).swapaxes(0, 1)
    return rows.reshape(call.batch, len(rows) // call.batch, -1, size).transpose(0, 2, 1, 3)


def by_distance(table: Array, length: int) -> Array:
    """The bias (heads, length, length) that `table` (heads, 2 n - 1) has for each query and key, as a view.

    Where `length` is more than n, the view has only the scores of n tokens.
    """
    n = min(length, (table.shape[1] + 1) // 2)
    row, col = table.strides
    middle = table[:, (table.shape[1] - 1) // 2 :]
    return np.lib.stride_tricks.as_strided(middle, (len(table), n, n), (row, -col, col), writeable=False)
