"""From the weights that a caller passes to a checked PackArgs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.blocks import copied
from fastattn._args.errors import wrong_dtype, wrong_shape
from fastattn._args.packed import WEIGHT_DTYPES, PackArgs, RowBlock
from fastattn._args.values import choice, float_array
from fastattn._engine.settings import require_backend, threads

if TYPE_CHECKING:
    from fastattn._args.types import Array


def pack_args(
    func: str, weight: Any, gate: Any, dtype: str | None, num_threads: int | None, backend: str | None
) -> PackArgs:
    """Check the arguments of `ops.pack`."""
    if backend is not None:
        require_backend(func, backend)
    array = _weight(func, "weight", weight)
    maps = {"weight": array}
    if gate is not None:
        maps["gate"] = other = _weight(func, "gate", gate)
        if other.shape != array.shape:
            raise wrong_shape(func, "gate", other, f"weight's, {array.shape}")
        if dtype is None and other.dtype != array.dtype:
            expected = f"weight's, {array.dtype}, or dtype= given, which says how both are stored"
            raise wrong_dtype(func, "gate", other, expected)
    if dtype is None:
        dtype = {"float64": "float64", "bfloat16": "bfloat16"}.get(array.dtype.name, "float32")
    choice(func, "dtype", dtype, WEIGHT_DTYPES)
    number = {"weight": len(maps) - 1, "gate": 0}
    blocks = [RowBlock(name, native(x), 0, number[name]) for name, x in maps.items()]
    out_features, in_features = array.shape
    return PackArgs(blocks, in_features, out_features, len(maps), dtype, threads(func, num_threads))


def _weight(func: str, name: str, x: Any) -> Array:
    """`x` as a 2-D floating array."""
    array = float_array(func, name, x)
    if array.ndim != 2:
        raise wrong_shape(func, name, array, "(out_features, in_features)")
    return array


def native(array: Array) -> Array:
    """`array`, or a copy in native byte order."""
    if array.dtype.isnative:
        return array
    return copied(array, np.empty(array.shape, array.dtype.newbyteorder("=")))
