"""Arrays of Dask in the chunks of the blocks, and their blocks: held by Dask, or read by whoever needs them.

A block of an array on disk is not a task of its own. Dask would hold its result until every task that needs
it has run, on disk once more if memory ends. Each task reads it instead: it carries the few steps that do so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dask
import dask.array as da
import numpy as np

from fastattn._args.errors import wrong_dtype, wrong_shape, wrong_type
from fastattn._args.types import Array, Shape
from fastattn._args.values import is_float, is_masked

# What the graph of an array on disk calls: it reads and cuts, and computes nothing. By these names dask has
# called such functions so far; of others, blocks are held, which is right, too.
_READS = {
    "load", "getter", "getter_nofancy", "getter_inline", "getitem", "concatenate", "concatenate3",
    "concatenate_shaped", "load_chunk", "load_store_chunk",
}  # fmt: skip


def operand(name: str, x: Any, block: int) -> Any:
    """`x` as an array of Dask, of a floating type and known sizes; what is none is cut along its length."""
    if is_masked(x) or not _is_array(x):
        raise wrong_type(name, x, "an array of Dask, or an array that lies on disk or in memory")
    if not is_float(x.dtype):
        raise wrong_dtype(name, x, "float32, float64, float16 or bfloat16")
    if x.ndim < 2:
        expected = "(..., heads, length, head_dim), or (length, head_dim) for one head"
        raise wrong_shape(name, x, expected)
    if not isinstance(x, da.Array):
        if isinstance(x, np.memmap):  # what is written to one of mode "c" never reaches its file
            x = Mapped.of(name, x) if x.filename is not None and x.mode != "c" else np.asarray(x)
        return da.from_array(x, chunks=(*x.shape[:-2], block, x.shape[-1]))
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


@dataclass(frozen=True)
class Reading:
    """A block of an array on disk: the steps that read it."""

    graph: dict[Any, Any]
    key: Any

    def __call__(self) -> Array:
        block: Array = dask.get(self.graph, self.key)
        return block


class Blocks:
    """The blocks of an array: what a task is given for each, a key of Dask's graph or a `Reading`."""

    def __init__(self, name: str, array: Any, reread: bool | None) -> None:
        self.array = array
        self.readings = None if reread is False else self._readings()
        self.read = self.readings is not None
        if reread and not self.read:
            raise ValueError(
                f"(): reread is True, and {name} is not on disk; expected a memmap as it is, an"
                " array of zarr or h5py, one of from_zarr or from_npy_stack, or reread=None"
            )

    def __getitem__(self, index: tuple[int, ...]) -> Any:
        """By its place; batch axes that the array lacks or broadcasts along do not count."""
        index = index[len(index) - self.array.ndim :]
        sizes = self.array.numblocks
        key = (self.array.name, *(0 if n == 1 else i for i, n in zip(index, sizes, strict=True)))
        return key if self.readings is None else self.readings[key]

    def _readings(self) -> dict[Any, Reading] | None:
        """Steps that make each block, if all of them only read."""
        graph, found = self.array.__dask_graph__(), {}
        for index in np.ndindex(self.array.numblocks):
            key = (self.array.name, *index)
            steps = {name: _step(task, graph) for name, task in graph.cull({key}).items()}
            if None in steps.values():
                return None
            found[key] = Reading(steps, key)
        return found


def _step(task: Any, graph: Mapping[Any, Any]) -> Any:
    """`task` if it reads or cuts an array, or is one that lies elsewhere and is cheap to send; else None."""
    if isinstance(task, tuple) and task and callable(task[0]):
        return task if getattr(task[0], "__name__", "") in _READS else None
    if hasattr(task, "func"):
        return task if getattr(task.func, "__name__", "") in _READS else None
    if type(task).__name__ == "Alias" or (isinstance(task, (str, tuple)) and task in graph):
        return task
    stored = getattr(task, "value", task)
    return task if _is_array(stored) and not isinstance(stored, np.ndarray) else None


def _is_array(x: Any) -> bool:
    return all(hasattr(x, name) for name in ("shape", "dtype", "__getitem__"))


@dataclass(frozen=True)
class Mapped:
    """An array of a file, by its place there: a memmap itself would be read and sent whole."""

    filename: str
    changed: int  # when, in ns: a cluster that holds results of what the file had before computes them again
    offset: int
    shape: Shape
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, name: str, x: np.memmap[Any, Any]) -> Mapped:
        """`x`, the argument `name`: a map of a file or a view of one."""
        whole: Any = x
        while isinstance(whole.base, np.memmap):
            whole = whole.base
        offset = whole.offset + x.ctypes.data - whole.ctypes.data
        try:
            changed = os.stat(whole.filename).st_mtime_ns
        except FileNotFoundError:
            came = f"{name} is a memmap of {whole.filename}, which is gone"
            raise ValueError(f"(): {came}; expected a file that workers can read") from None
        return cls(str(whole.filename), changed, offset, x.shape, x.strides, x.dtype)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __getitem__(self, index: Any) -> Array:
        file: Any = np.memmap(self.filename, np.uint8, "r")
        part: Array = np.ndarray(self.shape, self.dtype, file, self.offset, self.strides)[index]
        return part
