"""Gradients of the operations in NumPy: the readable twins of the kernels in C."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from fastattn._args.blocks import blocks
from fastattn._args.grad_types import DropoutArgs, LogitsArgs, OuterArgs, RowsGradArgs, ScatterArgs
from fastattn._args.quiet import quiet
from fastattn._args.types import Array, lane_dtype
from fastattn._reference.activations import activate, slope
from fastattn._reference.ops import centered, side_by_side
from fastattn._reference.philox import kept


@quiet
def rows_grad(args: RowsGradArgs) -> None:
    """Fill args.dx, args.dup, args.dweight and args.dbias, those that are there."""
    lane, args = lane_dtype(args.x.dtype), side_by_side(args)
    for sums in (args.dweight, args.dbias):
        if sums is not None:
            sums[...] = 0

    def wide(x: Array) -> Array:
        return x.astype(lane, copy=False)

    for block in blocks(args.x.shape[:1], math.prod(args.x.shape[1:])):
        dout, x = wide(args.dout[block]), wide(args.x[block])
        if args.kind == "softmax":
            dx = x * (dout - (dout * x).sum(axis=-1, keepdims=True))
        elif args.kind == "activate":
            if args.dup is not None:
                args.dup[block] = dout * activate(x, args.activation)
            dx = dout if args.up is None else dout * wide(args.up[block])
            dx = dx * slope(x, args.activation)
        elif args.up is None:
            dx, _ = _norm_grad(args, block, dout, x, wide)
        else:
            up = wide(args.up[block])
            gate, of_gate = activate(up, args.activation), slope(up, args.activation)
            if args.gate_first:
                dz, _ = _norm_grad(args, block, dout, x * gate, wide)
                dx, dup = dz * gate, dz * x * of_gate
            else:
                dx, normed = _norm_grad(args, block, dout * gate, x, wide)
                dup = dout * normed * of_gate
            if args.dup is not None:
                args.dup[block] = dup
        if args.dx is not None:
            args.dx[block] = dx


def _norm_grad(
    args: RowsGradArgs, block: slice, dout: Array, x: Array, wide: Callable[[Array], Array]
) -> tuple[Array, Array]:
    """The gradient of a norm's input, and its result without bias; adds to those of its parameters."""
    if args.residual is not None:
        x = x + wide(args.residual[block])
    if args.kind == "layer_norm":
        x = centered(x)
    factor = 1 / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + x.dtype.type(args.eps))
    normalized = x * factor
    if args.dweight is not None:
        args.dweight += (dout * normalized).reshape(-1, x.shape[-1]).sum(axis=0)
    if args.dbias is not None:
        args.dbias += dout.sum(axis=0)
    if args.weight is not None:
        dout = dout * args.weight
    dx: Array = dout - normalized * (dout * normalized).mean(axis=-1, keepdims=True)
    if args.kind == "layer_norm":
        dx -= dout.mean(axis=-1, keepdims=True)
    dx *= factor
    if args.dsum is not None:
        dx += wide(args.dsum[block])
    return dx, normalized if args.weight is None else normalized * args.weight


# Rows that a product sums at a time: Ctrl-C waits for one block only.
_OUTER_ROWS = 4096


@quiet
def outer(args: OuterArgs) -> None:
    """Fill args.out and args.sums, those that are there."""
    lane = lane_dtype(args.a.dtype)
    for result in (args.out, args.sums):
        if result is not None and not args.more:
            result[...] = 0
    for first in range(0, len(args.a), _OUTER_ROWS):
        rows = slice(first, first + _OUTER_ROWS)
        a, b = args.a[rows].astype(lane, copy=False), args.b[rows].astype(lane, copy=False)
        if args.out is not None:
            args.out += a.T @ b
        if args.sums is not None:
            args.sums += a.sum(axis=0)


@quiet
def logits(args: LogitsArgs) -> None:
    """Fill args.loss, and args.logits with the gradient."""
    n = args.logits.shape[1]
    for rows in blocks(args.logits.shape[:1], n):
        x, targets, smoothing = args.logits[rows], args.targets[rows], args.label_smoothing
        target = (np.arange(len(x)), targets)
        row_max = x.max(axis=-1, keepdims=True)
        shifted = x - row_max
        probs = np.exp(shifted)
        row_sum = probs.sum(axis=-1)
        loss = np.log(row_sum) - (1 - smoothing) * shifted[target]
        if smoothing:
            loss = loss - smoothing * shifted.mean(axis=-1)
        args.loss[rows] = loss
        if args.factor is None:
            continue
        probs /= row_sum[:, None]
        probs -= smoothing / n
        probs[target] -= 1 - smoothing
        args.logits[rows] = probs * args.factor[rows][:, None]


# Rows that are gathered at a time.
_GATHERED = 256


@quiet
def scatter(args: ScatterArgs) -> None:
    """Add rows to args.out."""
    for i, place in enumerate(args.places.tolist()):
        for first in range(args.firsts[i], args.firsts[i + 1], _GATHERED):
            which = args.order[first : min(first + _GATHERED, args.firsts[i + 1])]
            args.out[place] += args.x[which].astype(args.out.dtype, copy=False).sum(axis=0)


@quiet
def dropout(args: DropoutArgs) -> None:
    """Fill args.out."""
    m, n = args.x.shape
    lane = lane_dtype(args.x.dtype)
    for rows in blocks((m,), n):
        some = kept(args.rate, args.seed, args.stream, np.arange(m)[rows], slice(0, n))
        x = args.x[rows].astype(lane, copy=False) * lane.type(args.scale)
        args.out[rows] = np.where(some, x, lane.type(0))
