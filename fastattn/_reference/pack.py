"""Packing in NumPy: the readable twin of src/pack.inc.h."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fastattn._args.packed import PackArgs
from fastattn._args.quiet import quiet
from fastattn._args.types import Array
from fastattn._args.weight_types import BLOCK, STORED, Stored, columns, two_a_byte

# Blocks of this many numbers stay in the second-level cache. They have at most so many, whole blocks of
# 32, of each output feature.
_BLOCK, _BLOCK_FEATURES = 1 << 17, 1 << 12


@quiet  # a float64 too large for float32 becomes infinite
def pack(args: PackArgs) -> None:
    """Fill args.out, args.scales, args.minima, args.sums and args.bad."""
    if args.blocks and args.blocks[0].layout is not None:
        for i in range(args.maps):
            put_codes(args, i, *_of_files(args, i))
        return
    stored, width, maps = STORED[args.dtype], columns(args.dtype), args.maps
    by_map = args.out.reshape(-1, maps, *args.out.shape[1:])
    scales: Any = None if args.scales is None else args.scales.reshape(-1, maps, *args.scales.shape[1:])
    minima: Any = None if args.minima is None else args.minima.reshape(-1, maps, *args.minima.shape[1:])
    for i in range(maps):
        largest = _largest(args, i) if stored.scales == "row" else None
        sums = np.zeros((len(by_map), width))
        for panel, feature, block in _blocks(args, i):
            here, step = slice(panel, panel + len(block)), feature // stored.features
            if largest is not None:
                scales[here, i] = scale = largest.reshape(-1, width)[here] / np.float32(127)
                block, integers = stored.encode(_scaled(block, scale[..., None]))
                sums[here] += integers.sum(axis=-1, dtype=float) * scale  # exact
            elif not stored.scales:
                block, _ = stored.encode(block)
            else:
                part = slice(feature // BLOCK, (feature + block.shape[-1]) // BLOCK)
                if minima is not None:
                    block, minima[here, i, part] = _above_minima(block)
                block, scales[here, i, part], products = _coded(block, stored, args.in_features - feature)
                if minima is not None:
                    counts = np.clip(args.in_features - feature - BLOCK * np.arange(len(products)), 0, BLOCK)
                    products += counts[:, None, None] * minima[here, i, part].swapaxes(0, 1).astype(float)
                for each in products:  # one after another, as in C
                    sums[here] += each
            values = block.reshape(len(block), width, -1, *stored.shape).swapaxes(1, 2)
            by_map[here, i, step : step + values.shape[1]] = values
        if args.sums is not None:  # of finite weights, they may be too large for float32
            unit = stored.table.unit if stored.table else 1.0
            most = np.finfo(np.float32).max
            args.sums.reshape(-1, maps, width)[:, i] = (sums * unit).clip(-most, most)


def _blocks(args: PackArgs, map_: int) -> Iterator[tuple[int, int, Array]]:
    """Cut a map into blocks (panels, width, features) in the lane type, each padded with 0.

    Yields the first panel and the first feature of each block with it. The padding completes the last panel,
    and the last features of a step, or of a block. Rows that are not finite are marked.
    """
    width, stored = columns(args.dtype), STORED[args.dtype]
    unit = BLOCK if stored.scales == "block" else stored.features
    lane = np.float64 if args.dtype == "float64" else np.float32
    depth = min(_BLOCK_FEATURES, max(unit, args.in_features))
    panels = max(1, _BLOCK // (width * depth))
    beyond = lane(args.beyond)
    for row in range(0, args.out_features, panels * width):
        rows = min(panels * width, -(-(args.out_features - row) // width) * width)
        for feature in range(0, args.in_features, depth):
            count = min(depth, args.in_features - feature)
            block = np.zeros((rows, -(-count // unit) * unit), lane)
            for i, (_, array, first, its_map, _) in enumerate(args.blocks):
                begin, end = max(row, first), min(row + rows, first + len(array))
                if its_map == map_ and begin < end:
                    part = block[begin - row : end - row, :count]
                    part[...] = array[begin - first : end - first, feature : feature + count]
                    args.bad[i] |= not (np.abs(part) < beyond).all()
            yield row // width, feature, block.reshape(-1, width, block.shape[-1])


def _largest(args: PackArgs, map_: int) -> Array:
    """The largest magnitude of each output feature, up to a whole panel."""
    width = columns(args.dtype)
    largest = np.zeros(-(-args.out_features // width) * width, np.float32)
    for panel, _, block in _blocks(args, map_):
        rows = largest[panel * width :][: block.shape[0] * width]
        np.maximum(rows, np.abs(block).max(axis=-1).ravel(), out=rows)
    return largest


def _scaled(x: Array, scales: Array) -> Array:
    """Divide x by scales that broadcast; by 0 it becomes 0."""
    return np.asarray(x / np.where(scales == 0, np.float32(np.inf), scales))


def _above_minima(block: Array) -> tuple[Array, Array]:
    """Subtract minima (panels, blocks, width) of blocks of 32 from a block (panels, width, features)."""
    x = block.reshape(*block.shape[:2], -1, BLOCK)
    minima = x.min(axis=-1).astype(np.float16)
    return (x - minima.astype(np.float32)[..., None]).reshape(block.shape), minima.swapaxes(1, 2)


def _coded(block: Array, stored: Stored, features: int) -> tuple[Array, Array, Array]:
    """Codes as they are stored, and scales (panels, blocks, width), of a block (panels, width, features).

    After them (blocks, panels, width): each block's sum of the integers that multiply int8, scaled. Only the
    first `features` are summed; the others are padding.
    """
    x = block.reshape(*block.shape[:2], -1, BLOCK)
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=-1)[..., None], axis=-1)
    most = np.abs(largest) if stored.by_magnitude else largest
    scales = (most / np.float32(stored.extreme)).astype(np.float16)
    divisor = scales.astype(np.float32)
    codes, integers = stored.encode(_scaled(x, divisor))
    counted = np.arange(block.shape[-1]).reshape(-1, BLOCK) < features
    sums = (integers * counted).sum(axis=-1, dtype=float) * divisor[..., 0]
    return codes.reshape(*block.shape[:2], -1), scales[..., 0].swapaxes(1, 2), np.moveaxis(sums, -1, 0)


def _of_files(args: PackArgs, map_: int) -> tuple[Array, Array, Array]:
    """Codes (rows, in_features) of a map, up to whole panels, and scales and minima (rows, blocks).

    Blocks whose scales or minima are not finite are marked.
    """
    rows = len(args.out) // args.maps * columns(args.dtype)
    codes: Array = np.zeros((rows, args.in_features), np.int8)
    scales, minima = np.zeros((2, rows, args.in_features // args.block), np.float16)
    for i, (_, array, first, its_map, layout) in enumerate(args.blocks):
        if its_map != map_ or layout is None:
            continue
        here, each = slice(first, first + len(array)), layout.shared // args.block
        found = layout.parts(array.reshape(-1, layout.nbytes))
        codes[here] = found.codes.reshape(len(array), -1)
        scales[here] = found.scales.reshape(len(array), -1).repeat(each, axis=1)
        if found.minima is not None:
            minima[here] = found.minima.reshape(len(array), -1).repeat(each, axis=1)
        elif args.minima is not None and STORED[args.dtype].table:  # -8 .. 7 become 0 .. 15
            codes[here] += np.int8(8)
            minima[here] = np.float16(-8) * scales[here]
        args.bad[i] |= not (np.isfinite(scales[here]).all() and np.isfinite(minima[here]).all())
    return codes, scales, minima


def put_codes(args: PackArgs, map_: int, codes: Array, scales: Array, minima: Array) -> None:
    """Make panels of a map in blocks: codes (rows, in_features), whole panels and whole blocks of them.

    They are int8, what scales are times. `scales` and `minima` are those of blocks, (rows, in_features /
    args.block), float16; minima may all be 0.
    """
    width, here = columns(args.dtype), slice(map_, None, args.maps)
    table = STORED[args.dtype].table
    stored = codes if table is None else two_a_byte(table.numbers(codes))
    words = np.ascontiguousarray(stored).view(np.uint32).reshape(-1, width, args.out.shape[1])
    args.out.view(np.uint32)[here, ..., 0] = words.swapaxes(1, 2)
    lists: Any = args.scales, args.minima, args.sums
    lists[0][here] = scales.reshape(-1, width, scales.shape[-1]).swapaxes(1, 2)
    if args.minima is not None:
        lists[1][here] = minima.reshape(-1, width, minima.shape[-1]).swapaxes(1, 2)
    each = codes.reshape(*scales.shape, args.block).sum(axis=-1, dtype=np.int32)
    products = each * scales.astype(float) + args.block * minima.astype(float)
    sums = np.zeros(len(codes))
    for column in products.T:  # one after another, as in C
        sums += column
    lists[2][here] = sums.reshape(-1, width)
