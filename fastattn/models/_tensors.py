"""Tensors of safetensors files, or in memory: read, checked and packed, by the names in their files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastattn._args.coded import Layout
from fastattn._args.pack import native
from fastattn._args.packed import PackArgs, PackedLinear, RowBlock
from fastattn._args.types import Array, Shape
from fastattn._args.values import short
from fastattn._args.weight_types import BLOCKED, STORED, columns, is_finite
from fastattn._engine import dispatch
from fastattn._engine.settings import get_num_threads
from fastattn._formats import FORMATS, Format
from fastattn._gguf import GgufFile
from fastattn._safetensors import TensorFile
from fastattn.models import _gguf, _mxfp4
from fastattn.models._files import ModelError, is_gguf, is_name, lfs_hint, read_json, require
from fastattn.models._files import opened as in_folder
from fastattn.models._mxfp4 import Mxfp4Expert

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Bytes that a thread reads at a time and packs at once, while they are in a cache; and threads that do so.
_PIECE, _READERS = 1 << 22, 8
_LEAST = 1 << 18  # bytes that are worth a piece of their own
SHOWN = 6  # names that an error lists


class Part(NamedTuple):
    """Rows of a file's tensor, and where they lie in a parameter; elements of a vector are rows."""

    name: str  # as the file has it
    shape: Shape  # of the whole tensor
    rows: int  # how many
    first: int  # in the parameter, where maps of a gated pair follow one another
    begin: int = 0  # in the tensor
    transposed: bool = False  # the tensor is (in, out)


class _Memory:
    """Tensors in memory, read as those of a `TensorFile` are."""

    def __init__(self, arrays: Mapping[str, Array]):
        self._arrays = arrays

    def shape(self, name: str) -> Shape:
        return self._arrays[name].shape

    def kind(self, name: str) -> str:
        return "F32"  # all are of a floating type

    def get_tensor(self, name: str) -> Array:
        return self._arrays[name]

    def rows(self, name: str, begin: int, end: int) -> Array:
        return self._arrays[name][begin:end]


class _Adapted(_Memory):
    """A tensor of a file with a product of two narrow matrices, read when it is asked for."""

    def __init__(self, file: Any, pair: tuple[Array, Array]):
        self._file, self._pair = file, pair

    def shape(self, name: str) -> Shape:
        found: Shape = self._file.shape(name)
        return found

    def get_tensor(self, name: str) -> Array:
        return self.rows(name, 0, self.shape(name)[0])

    def rows(self, name: str, begin: int, end: int) -> Array:
        one, other = self._pair
        product: Array = one[begin:end] @ other
        product += self._file.rows(name, begin, end)
        return product


class Tensors:
    """A model's tensors by name, read when they are asked for.

    `stored` is the type that weights are kept in. A tensor that is not finite in it is refused.
    """

    _stack: ExitStack | None = None

    def __init__(
        self, where: str, stored: str, files: Mapping[str, TensorFile | GgufFile | Mxfp4Expert | _Memory]
    ):
        self.where, self.stored, self._files = where, stored, files  # `where` is for messages
        self._pool: ThreadPoolExecutor | None = None

    @classmethod
    def of_folder(cls, folder: Path, stored: str, stack: ExitStack) -> Tensors:
        """Tensors of the folder's safetensors files, or of a GGUF file, which `stack` closes."""
        if is_gguf(folder):
            return cls.of_gguf(folder, _gguf.opened(folder, stack), stored, stack)
        # A single file comes first, as in transformers: an index beside it may be left over.
        is_indexed = not (folder / WEIGHTS).exists() and (folder / INDEX).exists()
        path = folder / (INDEX if is_indexed else WEIGHTS)
        files = (_indexed if is_indexed else _single)(path, stack)
        tensors = cls(str(path), stored, _mxfp4.experts_apart(files))
        tensors._stack = stack
        return tensors

    @classmethod
    def of_gguf(cls, path: Path, file: GgufFile, stored: str, stack: ExitStack) -> Tensors:
        """Tensors of a GGUF file, which is open until `stack` closes it."""
        tensors = cls(str(path), stored, dict.fromkeys(file.names, file))
        tensors._stack = stack
        return tensors

    @classmethod
    def of_state(cls, state: Mapping[str, Array], stored: str) -> Tensors:
        """Tensors in memory."""
        return cls("()", stored, dict.fromkeys(state, _Memory(state)))

    def adapted(self, pairs: Mapping[str, tuple[Array, Array]]) -> Tensors:
        """These tensors, some with the product of a pair of matrices added."""
        for name, (one, other) in pairs.items():
            if self.shape(name) != (len(one), other.shape[-1]) or one.shape[-1] != len(other):
                came = f"matrices of shapes {one.shape} and {other.shape} for {name!r}"
                raise ModelError(f"{self.where}: an adapter has {came}; expected {self.shape(name)}")
        files = {name: _Adapted(self._files[name], pair) for name, pair in pairs.items()}
        return Tensors(self.where, self.stored, {**self._files, **files})

    @property
    def names(self) -> list[str]:
        """The names in the files."""
        return list(self._files)

    def shape(self, name: str) -> Shape:
        """The shape of a tensor."""
        return self._files[name].shape(name)

    def kind(self, name: str) -> str:
        """The type of a tensor, as safetensors calls it."""
        return self._files[name].kind(name)

    def whole(self, name: str, over: Array | None = None) -> Array:
        """A tensor in its own type, in new memory or written to `over`."""
        file = self._files[name]
        if isinstance(file, _Memory):
            found = file.get_tensor(name)
            array = np.empty_like(found) if over is None else over
            array[...] = found
        else:
            array = file.empty(name, file.shape(name))
            flat, of, unit = array.reshape(-1), file, file.unit(name)
            step = max(1, _PIECE // array.itemsize // unit) * unit
            self._each(lambda at: of.fill(flat[at : at + step], name, at), range(0, flat.size, step))
        if not is_finite(array, self.stored):
            raise self._not_finite(name, self.stored)
        return array

    def rows(self, name: str, which: Sequence[int]) -> Array:
        """Read some rows of a matrix, in its own type, and no others."""
        rows = np.concatenate([self._files[name].rows(name, i, i + 1) for i in which])
        if not is_finite(rows, self.stored):
            raise self._not_finite(name, self.stored)
        return rows

    def same(self, name: str, other: str) -> bool:
        """Tell whether two tensors have one shape, and the same numbers."""
        shape = self.shape(name)
        if shape != self.shape(other):
            return False
        if "BF16" in (self.kind(name), self.kind(other)):
            require("ml_dtypes")
        n, step = math.prod(shape[:1]), max(1, _PIECE // max(1, math.prod(shape[1:])))
        one, two = self._files[name], self._files[other]
        pieces = ((i, min(i + step, n)) for i in range(0, n, step))
        return all(np.array_equal(one.rows(name, *at), two.rows(other, *at)) for at in pieces)

    def pack(self, parts: Sequence[Part], args: PackArgs) -> PackedLinear:
        """Pack `parts`, the gate of a gated pair first, into the panels of `args`.

        They are read in pieces of whole panels, each of which is packed at once. All axes of a tensor but the
        first count as one. Transposed tensors are read whole.
        """
        n, first = args.out_features, parts[0]
        layouts = self._layouts(parts, args.dtype)
        if layouts:
            minima = STORED[args.dtype].has_minima or any(x.minimum is not None for x in layouts)
            args.set_blocks(min(x.shared for x in layouts), minima)
        read = self._blocks if layouts else self._read
        step = n
        if not (isinstance(self._files[first.name], _Memory) or first.transposed):
            panel = columns(args.dtype)
            size = panel * args.maps * read(first, 0, 1).nbytes
            shared = -(-n // (panel * min(args.num_threads, _READERS)))  # if each thread has as many panels
            step = panel * max(1, min(_PIECE // size, max(_LEAST // size, shared)))

        def pack(begin: int) -> None:
            end, blocks = min(begin + step, n), []
            for part, layout in zip(parts, layouts or (None,) * len(parts), strict=True):
                gated, at = divmod(part.first, n)
                here = slice(max(begin - at, 0), min(end - at, part.rows))
                if here.start < here.stop:
                    array = native(read(part, here.start, here.stop))
                    blocks.append(RowBlock(part.name, array, at + here.start - begin, gated, layout))
            piece = args.part(blocks, begin, end, 1 if step < n else args.num_threads)
            dispatch.run(piece)
            wrong = piece.not_finite()
            if wrong is not None:
                raise self._not_finite(wrong, args.dtype)

        self._each(pack, range(0, n, step))
        return args.packed()

    def own_dtype(self, parts: Sequence[Part], usual: str) -> str:
        """The type of weights that loses nothing of what the file has of `parts`, or next to nothing.

        Parts in blocks become blocks of the one type that holds them all; numbers of other types, `usual`.
        """
        formats = self._formats(parts)
        if formats:
            return _joined(*(x.packed for x in formats))
        return "bfloat16" if {self.kind(part.name) for part in parts} <= {*FORMATS, "BF16"} else usual

    def _formats(self, parts: Sequence[Part]) -> list[Format]:
        """The formats of matrices in blocks, whose codes can be copied; none if a part is no such matrix."""
        found = [FORMATS.get(self.kind(part.name)) for part in parts]
        if any(part.transposed or len(part.shape) != 2 for part in parts):
            return []
        return [x for x in found if x is not None] if None not in found else []

    def _layouts(self, parts: Sequence[Part], dtype: str) -> list[Layout]:
        """The layouts of matrices in blocks, if `dtype` holds the codes of all; else none."""
        formats = self._formats(parts)
        held = formats and _joined(dtype, *(x.packed for x in formats)) == dtype
        return [x.layout for x in formats] if held else []

    def _blocks(self, part: Part, begin: int, end: int) -> Array:
        """Rows `begin` to `end` of a part as a file has its blocks: (rows, bytes)."""
        file: Any = self._files[part.name]
        blocks: Array = file.blocks(part.name, part.begin + begin, part.begin + end)
        return blocks

    def _read(self, part: Part, begin: int, end: int) -> Array:
        """Rows `begin` to `end` of a part, as a matrix."""
        file = self._files[part.name]
        if part.transposed:
            array = file.get_tensor(part.name)
            return array.reshape(len(array), -1).T[begin:end]
        array = file.rows(part.name, part.begin + begin, part.begin + end)
        return array.reshape(len(array), -1)

    def _each(self, function: Callable[[int], None], pieces: range) -> None:
        """Call the function with each of `pieces`, by several threads."""
        if len(pieces) < 2 or self._stack is None:
            for piece in pieces:
                function(piece)
            return
        if self._pool is None:
            readers = min(get_num_threads(), _READERS)
            self._pool = self._stack.enter_context(ThreadPoolExecutor(readers))
        for _ in self._pool.map(function, pieces):
            pass

    def _not_finite(self, name: str, stored: str) -> ModelError:
        what = f"values that are not finite as {stored}"
        return ModelError(f"{self.where}: {name!r} has {what}; expected finite ones")


def _joined(*types: str) -> str:
    """The type of packed weights that holds the codes, scales and minima of all these types of blocks."""
    found = set(types)
    if found == {"int4", "uint4"}:
        return "uint4"
    return types[0] if len(found) == 1 else "q8" if found <= {*BLOCKED} else ""


def _single(path: Path, stack: ExitStack) -> dict[str, TensorFile]:
    if not path.exists():
        kinds = (".bin", ".safetensors", ".gguf")
        found = sorted(file.name for file in path.parent.iterdir() if file.suffix in kinds)
        there = ", ".join(found[:SHOWN]) or "no other file of weights"
        if any(name.endswith(".bin") for name in found):
            how = "from_pretrained(), save_pretrained(..., safe_serialization=True)"
            there += f"; transformers converts: {how}"
        if any(name.endswith(".gguf") for name in found):
            there += "; a GGUF file is loaded by its own path"
        raise ModelError(f"{path} is missing, and so is {INDEX}; there is {there}")
    file = opened(path, stack)
    return dict.fromkeys(file.names, file)


def _indexed(path: Path, stack: ExitStack) -> dict[str, TensorFile]:
    file_of = read_json(path).get("weight_map")
    if not isinstance(file_of, dict) or not all(isinstance(file, str) for file in file_of.values()):
        raise ModelError(f"{path}: 'weight_map' is no table of file names")
    files: dict[str, TensorFile] = {}
    for file in sorted(set(file_of.values())):
        if not is_name(file):
            raise ModelError(f"{path}: 'weight_map' has {short(file)}; expected a file beside it")
        files[file] = opened(path.parent / file, stack)
    held = {file: set(handle.names) for file, handle in files.items()}
    absent = sorted(name for name, file in file_of.items() if name not in held[file])
    if absent:
        name = absent[0]
        raise ModelError(f"{path}: {name!r} is to be in {file_of[name]}, and is not there")
    return {name: files[file] for name, file in file_of.items()}


def opened(path: Path, stack: ExitStack) -> TensorFile:
    """A file of tensors, which `stack` closes."""
    safetensors = require("safetensors")
    try:
        with in_folder(path):
            return stack.enter_context(TensorFile(path, ModelError))
    except safetensors.SafetensorError as error:
        what = lfs_hint(path) or f"{path} is truncated or no safetensors file: {error}"
        raise ModelError(what) from error
