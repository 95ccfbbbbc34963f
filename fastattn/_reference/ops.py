"""The kernels of `fastattn.ops` and of rotary positions in NumPy: the readable twins of those in C."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np

from fastattn._args.blocks import blocks
from fastattn._args.packed import LinearArgs, PackedLinear
from fastattn._args.quiet import quiet
from fastattn._args.types import INT4, Array, RopeArgs, RowsArgs, lane_dtype
from fastattn._args.weight_types import STORED, columns
from fastattn._reference import int4
from fastattn._reference.activations import activate
from fastattn._reference.attention import exp_below

# `linear` computes blocks of this many rows and panels, 4 MB of float32 results. A block has fewer panels
# where it would take more multiplications than this, so that Ctrl-C never waits long.
_BLOCK_ROWS = 1024
_BLOCK_PANELS = 32
_BLOCK_MULTIPLICATIONS = 1 << 30


@quiet
def linear(args: LinearArgs) -> None:
    """Fill args.out."""
    if args.transposed:
        return _transposed(args)
    weight, out = args.weight, args.out
    n_maps = 1 + weight.gated
    lane = lane_dtype(out.dtype)
    each = n_maps * _BLOCK_ROWS * weight.in_features * columns(weight.dtype)
    step = n_maps * min(_BLOCK_PANELS // n_maps, max(1, _BLOCK_MULTIPLICATIONS // max(1, each)))
    for row in range(0, len(out), _BLOCK_ROWS):
        rows = slice(row, row + _BLOCK_ROWS)
        x = args.x[rows].astype(lane, copy=False)
        rounded = None if args.activations is None else quantised_rows(x)
        for first in range(0, len(weight.panels), step):
            which = slice(first, first + step)
            if rounded is None:
                products = np.matmul(x, weight.floats(which))
            else:
                products = _integer_products(*rounded, weight, which)
            count, _, width = products.shape
            maps = products.reshape(count // n_maps, n_maps, len(x), width)
            maps = maps.transpose(1, 2, 0, 3).reshape(n_maps, len(x), -1)
            start = first // n_maps * width
            features = slice(start, min(start + maps.shape[-1], weight.out_features))
            _store(args, rows, features, maps[..., : features.stop - start])


def _store(args: LinearArgs, rows: slice, features: slice, maps: Array) -> None:
    """Fill some rows and features of args.out and args.pre, of products (1 or 2 maps, rows, features)."""
    if args.bias is not None:
        maps = maps + args.bias.reshape(len(maps), 1, -1)[..., features]
    if args.pre is not None:
        args.pre.reshape(len(args.out), len(maps), -1)[rows, :, features] = maps.swapaxes(0, 1)
    result = activate(maps[0], args.activation)
    if len(maps) == 2:
        result = result * maps[1]
    if args.residual is not None:
        result = result + args.residual[rows, features].astype(maps.dtype, copy=False)
    args.out[rows, features] = result


def _transposed(args: LinearArgs) -> None:
    """`linear` of x (m, maps * out_features) and the weight, not its transpose."""
    weight, out = args.weight, args.out
    n_maps, n, width = 1 + weight.gated, weight.out_features, columns(weight.dtype)
    lane = lane_dtype(out.dtype)
    step = n_maps * max(
        1, _BLOCK_MULTIPLICATIONS // max(1, n_maps * _BLOCK_ROWS * weight.in_features * width)
    )
    for row in range(0, len(out), _BLOCK_ROWS):
        rows = slice(row, row + _BLOCK_ROWS)
        x = args.x[rows]
        x = x.reshape(len(x), n_maps, n)
        total = np.zeros((len(x), weight.in_features), lane)
        for first in range(0, len(weight.panels), step):
            panels = weight.rows_of(slice(first, first + step))
            start = first // n_maps * width
            for i in range(n_maps):
                part = x[:, i, start : start + len(panels) // n_maps * width].astype(lane, copy=False)
                total += part @ panels[i::n_maps].reshape(-1, weight.in_features)[: part.shape[1]]
        _store(args, rows, slice(None), total[None])


# Half of a row's range: below it, 127 / half could overflow.
_LEAST_HALF = np.float32(2.0**-100)


def quantised_rows(x: Array) -> tuple[Array, Array, Array]:
    """Rows x as integers (m, k), float32, scales and middles, (m, 1): integers * scale + middle is nearly x.

    A scale is (max - min) / 254, or NaN if the row is not finite; the middle is that of both.
    """
    given = x if x.shape[-1] else np.zeros((len(x), 1), x.dtype)
    low, high = given.min(axis=-1, keepdims=True), given.max(axis=-1, keepdims=True)
    finite = np.isfinite(low) & np.isfinite(high)
    low, high, x = (np.where(finite, each, np.float32(0)) for each in (low, high, x))
    middle = low * np.float32(0.5) + high * np.float32(0.5)
    half = np.maximum(np.maximum(high - middle, middle - low), _LEAST_HALF)
    integers = np.rint((x - middle) * (np.float32(127) / half))
    return integers, np.where(finite, half / np.float32(127), np.float32(np.nan)), middle


def _integer_products(x: Array, x_scales: Array, middles: Array, weight: PackedLinear, which: slice) -> Array:
    """Products (panels, m, columns) of integers x with panels of integers."""
    codes, stored = weight.codes(which), STORED[weight.dtype]
    assert weight.scales is not None
    assert weight.sums is not None
    weight_sums = weight.sums[which][:, None]
    scales = weight.scales[which].astype(np.float32)
    if stored.scales == "row":  # float64 holds the sums exactly
        sums = np.matmul(x.astype(np.float64), codes.astype(np.float64)).astype(np.float32)
        return np.asarray(sums * scales[:, None] * x_scales + weight_sums * middles)
    total = np.zeros((len(codes), len(x), codes.shape[-1]), np.float32)
    for block in range(scales.shape[1]):
        part = slice(block * weight.block, (block + 1) * weight.block)
        sums = np.matmul(x[:, part], codes[:, part].astype(np.float32))
        total += sums * scales[:, block, None]
        if weight.minima is not None:
            total += x[:, part].sum(axis=-1, keepdims=True) * weight.minima[which][:, block, None].astype(
                np.float32
            )
    unit = np.float32(stored.table.unit if stored.table else 1)
    return np.asarray(total * (x_scales * unit) + weight_sums * middles)


@quiet
def rows(args: RowsArgs) -> None:
    """Fill args.out, and args.total if it is there."""
    lane, args = lane_dtype(args.out.dtype), side_by_side(args)
    for block in blocks(args.out.shape[:1], math.prod(args.out.shape[1:])):
        x = args.x[block].astype(lane, copy=False)
        if args.residual is not None:
            x = x + args.residual[block].astype(lane, copy=False)
        if args.total is not None:
            args.total[block] = x
        if args.kind == "softmax":
            result = _softmax(x)
        elif args.kind == "activate":
            result = activate(x, args.activation)
            if args.up is not None:
                result = result * args.up[block].astype(lane, copy=False)
        else:
            gate = None if args.up is None else activate(args.up[block].astype(lane), args.activation)
            if gate is not None and args.gate_first:
                x = x * gate
            result = _normalized(x, args.eps, center=args.kind == "layer_norm")
            if args.weight is not None:
                result = result * args.weight
            if args.bias is not None:
                result = result + args.bias
            if gate is not None and not args.gate_first:
                result = result * gate
        args.out[block] = result


def side_by_side(args: Any) -> Any:
    """The arguments as they are or, where h rows of `up` lie side by side, with arrays (m / h, h, n)."""
    if args.up is None or args.up.shape == args.x.shape:
        return args
    n = args.x.shape[1]
    shape = len(args.up), args.up.shape[1] // n, n
    names = [x.name for x in fields(args) if getattr(getattr(args, x.name), "ndim", 0) == 2]
    return replace(args, **{name: getattr(args, name).reshape(shape) for name in names})


def centered(x: Array) -> Array:
    """x - mean of each row, without what rounding leaves of the mean: equal numbers become 0."""
    x = x - x.mean(axis=-1, keepdims=True)
    return x - x.mean(axis=-1, keepdims=True)  # type: ignore[no-any-return]


def _normalized(x: Array, eps: float, center: bool) -> Array:
    """(x - mean) / sqrt(variance + eps) of each row, or x / sqrt(mean square + eps)."""
    if center:
        x = centered(x)
    normalized: Array = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + x.dtype.type(eps))
    return normalized


def _softmax(x: Array) -> Array:
    """Softmax of each row; a row whose every element is -inf gives 0."""
    probs = exp_below(x, x.max(axis=-1, keepdims=True))
    row_sum = probs.sum(axis=-1, keepdims=True)
    result: Array = np.divide(probs, row_sum, out=probs, where=row_sum != 0)
    return result


@quiet
def rope(args: RopeArgs) -> None:
    """Fill args.out, and args.scale if it is there."""
    x, out = args.x, args.out
    if args.scale is not None or out.dtype == INT4:
        out = np.empty(x.shape, args.cos.dtype)
    pairs = args.cos.shape[-1]
    cos, sin = (np.broadcast_to(table, (*x.shape[:-1], pairs)) for table in (args.cos, args.sin))
    first, second = slice(pairs), slice(pairs, 2 * pairs)
    if args.interleaved:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    for rows in blocks(x.shape[:-1], x.shape[-1]):
        a, b = (x[rows][..., half].astype(cos.dtype) for half in (first, second))  # copied, as out may be x
        out[rows][..., first] = a * cos[rows] - b * sin[rows]
        out[rows][..., second] = b * cos[rows] + a * sin[rows]
        out[rows][..., 2 * pairs :] = x[rows][..., 2 * pairs :]
    if args.scale is not None:
        _round_rows(out, args.out, args.scale)
    elif args.out.dtype == INT4:
        int4.round_rows(out, args.out)


def _round_rows(x: Array, out: Array, scale: Array) -> None:
    """out = x / scale in int8, scale = max |x| / 127: NaN for a row that is not finite."""
    largest = np.abs(x).max(axis=-1)
    # With a scale of fewer digits, x / scale might exceed 127.
    scale[...] = np.where(largest > 0, np.maximum(largest / 127, np.finfo(scale.dtype).tiny), 0)
    scale[~np.isfinite(largest)] = np.nan
    out[...] = np.where(scale[..., None] > 0, np.rint(x / scale[..., None]), 0)
