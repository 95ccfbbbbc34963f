"""Arrays of Dask in the chunks of the blocks."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np

from fastattn._args.errors import wrong_dtype, wrong_shape, wrong_type
from fastattn._args.values import is_float


def operand(name: str, x: Any) -> da.Array:
    """`x`, an array of Dask of a floating type and known sizes."""
    if not isinstance(x, da.Array):
        raise wrong_type(name, x, "a dask.array.Array, as dask.array.from_array makes one")
    if not is_float(x.dtype):
        raise wrong_dtype(name, x, "float32, float64, float16 or bfloat16")
    if x.ndim < 2:
        expected = "(..., heads, length, head_dim), or (length, head_dim) for one head"
        raise wrong_shape(name, x, expected)
    if np.isnan(x.shape).any():
        raise ValueError(
            f"(): {name} has shape {x.shape}; expected known sizes ({name}.compute_chunk_sizes())"
        )
    return x


def cut(n: int, size: int) -> tuple[int, ...]:
    """Chunks of `size` of an axis of length n, the last one smaller."""
    return (size,) * (n // size) + ((n % size,) if n % size or not n else ())


def aligned(q: Any, k: Any, v: Any, rows: int, keys: int) -> tuple[Any, Any, Any]:
    """The arrays in chunks that fit each other: on batch axes those of q, on heads those of k.

    Axes of length 1 that others broadcast along keep their one chunk.
    """
    arrays = [q, k, v]
    wanted = [dict[int, tuple[int, ...]]() for _ in arrays]
    for axis in range(-max(x.ndim for x in arrays), -3):
        having = [i for i, x in enumerate(arrays) if x.ndim >= -axis and x.shape[axis] != 1]
        for i in having:
            wanted[i][axis] = arrays[having[0]].chunks[axis]
    group = q.shape[-3] // k.shape[-3]
    heads = k.chunks[-3]
    for i, x in enumerate(arrays):
        wanted[i][-3] = tuple(group * n for n in heads) if i == 0 else heads
        wanted[i][-2] = cut(x.shape[-2], keys if i else rows)
        wanted[i][-1] = (x.shape[-1],)
        arrays[i] = x.rechunk({x.ndim + axis: sizes for axis, sizes in wanted[i].items()})
    return arrays[0], arrays[1], arrays[2]


def key(x: Any, index: tuple[int, ...]) -> tuple[Any, ...]:
    """Dask's key of a block of `x`; batch axes that `x` lacks or broadcasts along do not count."""
    places = zip(index[len(index) - x.ndim :], x.numblocks, strict=True)
    return (x.name, *(0 if n == 1 else i for i, n in places))
