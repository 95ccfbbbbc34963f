"""Programs on a tape: what each kind of step computes, and what its gradients are.

A program overwrites its buffers. Here each step has an array of its own for its result, as gradients need it;
norms of heads and rotations still work in place, as nobody needs what was there.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._args.grad_types import RowsGradArgs
from fastattn._args.types import BackwardArgs, RopeArgs, RowsArgs, lane_dtype, plain_args
from fastattn._engine import dispatch
from fastattn._engine.program import (
    OUT,
    AddStep,
    AttendStep,
    LinearStep,
    NormStep,
    Sequences,
    X,
    by_distance,
)
from fastattn._engine.recycled import recycled_empty
from fastattn._engine.settings import get_num_threads
from fastattn._engine.tape import Value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastattn._args.types import Array, AttentionArgs
    from fastattn._engine.program import Program, Step
    from fastattn._engine.tape import Tape

    Values = dict[str, Value]


def has_gradients(program: Program) -> bool:
    """Whether `record` knows every step of `program`."""
    return all(type(step) in _RECORDED for step in program.steps)


def record(program: Program, tape: Tape, x: Value, call: Sequences, checkpoint: bool = False) -> Value:
    """Run `program` of rows x on a tape; its value is OUT.

    With `checkpoint`, only the input of each block is kept, and the block runs again for its gradients.
    """
    if call.slots is not None:
        raise ValueError("fastattn: a program with a cache has no gradients")
    if not program.steps:
        return tape.note(x.array, x.put)
    if not checkpoint:
        return _run(program.steps, tape, {X: x}, call)[program.steps[-1].out]
    for segment in _segments(program.steps):
        x = tape.checkpoint(partial(_run_segment, segment, call), [x])
    return x


def _run_segment(segment: _Segment, call: Sequences, tape: Tape, inputs: Sequence[Value]) -> Value:
    return _run(segment.steps, tape, {segment.x: inputs[0]}, call)[segment.out]


def _run(steps: Sequence[Step], tape: Tape, values: Values, call: Sequences) -> Values:
    for step in steps:
        values[step.out] = _RECORDED[type(step)](step, tape, values, call)
    return values


class _Segment(NamedTuple):
    """Steps that share one buffer with those before them, and one with those behind them."""

    x: str
    steps: tuple[Step, ...]
    out: str


def _segments(steps: Sequence[Step]) -> list[_Segment]:
    """The steps in parts: each has one attention, where one buffer alone is needed between two attentions."""
    needed, alone = {OUT}, {len(steps): OUT}  # the only buffer that is needed before the step of that number
    for i in range(len(steps) - 1, -1, -1):
        needed = needed.difference((steps[i].out,)).union(steps[i].reads)
        if len(needed) == 1:
            (alone[i],) = needed
    cuts, last = [0], None
    for i, step in enumerate(steps):
        if i in alone and i > cuts[-1]:
            last = i
        if isinstance(step, AttendStep):
            if last is not None and any(isinstance(s, AttendStep) for s in steps[cuts[-1] : last]):
                cuts.append(last)
            last = None
    cuts.append(len(steps))
    return [_Segment(alone[begin], tuple(steps[begin:end]), alone[end]) for begin, end in pairwise(cuts)]


def _linear(step: LinearStep, tape: Tape, values: Values, call: Sequences) -> Value:
    residual = None if step.residual is None else values[step.residual]
    how = step.activations, step.activation, residual
    return tape.linear(values[step.x], step.weight, step.bias, *how)


def _norm(step: NormStep, tape: Tape, values: Values, call: Sequences) -> Value:
    x = values[step.x]
    if step.weight.ndim == 1:
        return tape.norm(x, step.kind, step.weight, step.bias, step.eps)
    threads, rows, weight = get_num_threads(), _writable(x, step, values), step.weight
    before = rows[:, : weight.size].copy()
    size = weight.shape[1]
    parts = [slice(i * size, (i + 1) * size) for i in range(len(weight))]
    for part, own in zip(parts, weight, strict=True):
        dispatch.run(RowsArgs(step.kind, before[:, part], rows[:, part], threads, weight=own, eps=step.eps))

    def back(dout: Array, owned: bool) -> None:
        dx = dout if owned else dout.copy()
        dweight = np.empty_like(weight)
        for part, own, result in zip(parts, weight, dweight, strict=True):
            args = RowsGradArgs(step.kind, dx[:, part], before[:, part], threads, dx[:, part], eps=step.eps)
            args.weight, args.dweight = own, result
            dispatch.run_grad(args)
        tape.gradients.add(weight, dweight)
        x.put(dx, owned=True)

    return tape.note(rows, back)


def _add(step: AddStep, tape: Tape, values: Values, call: Sequences) -> Value:
    return tape.add(tape.dropped(values[step.x]), values[step.residual])


def _attend(step: AttendStep, tape: Tape, values: Values, call: Sequences) -> Value:
    x, threads = values[step.x], get_num_threads()
    rows = x.array if step.rotation is None else _writable(x, step, values)
    out = recycled_empty((len(rows), step.columns), rows.dtype)
    end = step.heads + step.heads_kv

    def turned(array: Array, sign: int) -> None:
        """Rotate queries and keys in place."""
        if step.rotation is not None:
            cos, sin = call.rotations[step.rotation]
            qk = _by_head(array, call, step.head_dim)[..., :end, :, :]
            dispatch.run(RopeArgs(qk, qk, cos, sin if sign > 0 else -sin, False, threads))

    if not rows.size:
        return tape.note(out, lambda dout, owned: x.put(np.zeros_like(rows), True))
    turned(rows, 1)
    calls = [_attention(step, own, x, y, threads) for own, (x, y) in _parts(step, call, rows, out)]
    drops = tape.attention_dropout()
    for i, args in enumerate(calls):
        (args.dropout, args.seed), args.first = drops, i
        dispatch.run(args)

    def back(dout: Array, owned: bool) -> None:
        used = (end + step.heads_kv) * step.head_dim
        dx = recycled_empty(rows.shape, rows.dtype)
        dx[:, used:] = 0
        for args, (own, (d_rows, d_out)) in zip(calls, _parts(step, call, dx, dout), strict=True):
            heads = _by_head(d_rows[:, :used], own, step.head_dim)
            dq, dk, dv = np.split(heads, [step.heads, end], axis=-3)
            d_heads, sums = _by_head(d_out, own, step.head_dim), _diagonals(step, args)
            dispatch.run(BackwardArgs(args, d_heads, None, dq, dk, dv, args.scale, dbias_diagonals=sums))
            if sums is not None and step.bias is not None:
                tape.gradients.add(*_of_table(call.biases[step.bias], sums))
        turned(dx, -1)
        x.put(dx, owned=True)

    return tape.note(out, back)


def _parts(step: AttendStep, call: Sequences, *rows: Array) -> list[tuple[Sequences, list[Array]]]:
    """The attentions that are computed at a time: all, but one by one with a bias in a ragged batch."""
    if call.begins is None or step.bias is None:
        return [(call, list(rows))]
    return [(own, [x[part] for x in rows]) for part, own in call.alone() if part.stop > part.start]


def _by_head(rows: Array, call: Sequences, size: int) -> Array:
    """Rows as (batch, heads, length, size), or of a ragged batch (heads, rows, size)."""
    if call.begins is not None:
        return rows.reshape(len(rows), -1, size).swapaxes(0, 1)
    return rows.reshape(call.batch, len(rows) // call.batch, -1, size).transpose(0, 2, 1, 3)


def _attention(step: AttendStep, call: Sequences, rows: Array, out: Array, threads: int) -> AttentionArgs:
    """The arguments of an attention that also gives the lse."""
    end, size = step.heads + step.heads_kv, step.head_dim
    used = (end + step.heads_kv) * size
    together, result = (_by_head(array, call, size) for array in (rows[:, :used], out))
    q, k, v = np.split(together, [step.heads, end], axis=-3)
    if call.begins is None:
        args = plain_args(q, k, v, result, threads)
    else:
        args = plain_args(q[None], k[None], v[None], result[None], threads)
        args.q, args.k, args.v, args.out = q, k, v, result
        args.batch_shape, args.begins = (call.batch,), (call.begins, call.begins)
    args.lse = np.empty(result.shape[:-1], lane_dtype(rows.dtype))
    args.scale = step.scale
    args.row_begin, args.row_end = call.ranges[step.ranges]
    if step.bias is not None:
        args.bias = by_distance(call.biases[step.bias], args.len_q)
    return args


def _diagonals(step: AttendStep, args: AttentionArgs) -> Array | None:
    """Room for the gradient of a bias by distance: sums over the diagonals of scores."""
    if step.bias is None:
        return None
    return np.zeros((step.heads, args.len_q + args.len_k - 1), lane_dtype(args.q.dtype))


def _of_table(table: Array, sums: Array) -> tuple[Array, Array]:
    """`table`, and its gradient: `sums` around the middle."""
    gradient = np.zeros(table.shape, table.dtype)
    first = (table.shape[1] - sums.shape[1]) // 2
    gradient[:, first : first + sums.shape[1]] = sums
    return table, gradient


def _writable(x: Value, step: Step, values: Values) -> Array:
    """The rows of x to work in, which may not be the caller's."""
    return x.array.copy() if step.x == X and values.get(X) is x else x.array


_RECORDED: dict[type[Step], Callable[[Any, Tape, Values, Sequences], Value]] = {
    LinearStep: _linear,
    NormStep: _norm,
    AddStep: _add,
    AttendStep: _attend,
}
