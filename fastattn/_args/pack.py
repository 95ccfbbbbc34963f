"""The arguments of packing, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastattn._args.blocks import copied
from fastattn._args.dtypes import dtype_choice
from fastattn._args.errors import wrong_dtype, wrong_shape
from fastattn._args.packed import PackArgs, RowBlock
from fastattn._args.types import Array
from fastattn._args.values import float_array
from fastattn._args.weight_types import WEIGHT_DTYPES
from fastattn._engine.settings import require_backend, threads


def pack_args(weight: Any, gate: Any, dtype: Any, num_threads: int | None, backend: str | None) -> PackArgs:
    """Check the arguments of `ops.pack`."""
    if backend is not None:
        require_backend(backend)
    array = _weight("weight", weight)
    maps = {"weight": array}
    if gate is not None:
        maps["gate"] = other = _weight("gate", gate)
        if other.shape != array.shape:
            raise wrong_shape("gate", other, f"weight's, {array.shape}")
        if dtype is None and other.dtype != array.dtype:
            expected = f"weight's, {array.dtype}, or dtype= given, which says how both are stored"
            raise wrong_dtype("gate", other, expected)
    if dtype is None:
        dtype = {"float64": "float64", "bfloat16": "bfloat16"}.get(array.dtype.name, "float32")
    stored = dtype_choice("dtype", dtype, WEIGHT_DTYPES)
    named = [[(name, x)] for name, x in maps.items()]
    return blocks_args(named, stored, threads(num_threads))


def blocks_args(
    maps: Sequence[Sequence[tuple[str, Array]]], dtype: str, num_threads: int, unit: int = 1
) -> PackArgs:
    """Checked rows of a map, or of a gated pair: up, gate. They are never copied together.

    A map's blocks of rows, each with a name for messages, follow one another. Each begins at a multiple of
    `unit` output features.
    """
    blocks = []
    for i, named in enumerate(maps):
        end = 0
        for name, array in named:
            first = -(-end // unit) * unit
            end = first + len(array)
            blocks.append(RowBlock(name, native(array), first, len(maps) - 1 - i))
    return PackArgs(blocks, maps[0][0][1].shape[1], end, len(maps), dtype, num_threads)


def _weight(name: str, x: Any) -> Array:
    """`x` as a 2-D floating array."""
    array = float_array(name, x)
    if array.ndim != 2:
        raise wrong_shape(name, array, "(out_features, in_features)")
    return array


def native(array: Array) -> Array:
    """The array, or a copy in native byte order."""
    if array.dtype.isnative:
        return array
    return copied(array, np.empty(array.shape, array.dtype.newbyteorder("=")))
