"""Tensors of safetensors files: read and packed one at a time."""

from __future__ import annotations

import json
import mmap
import re
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fastattn._args.pack import blocks_args
from fastattn._args.packed import is_finite
from fastattn._args.values import short
from fastattn._engine import dispatch
from fastattn._engine.settings import get_num_threads
from fastattn.models._files import Config, ModelError, is_name, lfs_hint, read_json, require
from fastattn.models._origins import Origins, Part

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from contextlib import ExitStack
    from pathlib import Path

    from fastattn._args.packed import PackedLinear
    from fastattn._args.types import Array, Shape

    Tensor = tuple["_File | _Memory", str]  # and the tensor's name in it

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # as safetensors calls them, and NumPy
_PIECE = 1 << 23  # bytes that are copied at a time
_SHOWN = 6  # names that an error lists
NOTHING = re.compile("(?!)")  # matches no name
_Made = TypeVar("_Made", bound="Array | PackedLinear")


class _File:
    """An open safetensors file: its header, which its library has checked, and tensors of floating types."""

    def __init__(self, handle: Any, path: Path):
        self.get_slice, self.keys = handle.get_slice, handle.keys
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._start = 8 + int.from_bytes(self._map[:8], "little")
        self._header = json.loads(self._map[8 : self._start])

    def _ends(self, name: str) -> tuple[int, int]:
        begin, end = self._header[name]["data_offsets"]
        return self._start + begin, self._start + end

    def mapped(self, name: str) -> Array:
        """A tensor in the file's memory; it may not be aligned."""
        begin, end = self._ends(name)
        entry = self._header[name]
        return self._bytes[begin:end].view(_FLOATS[entry["dtype"]]).reshape(entry["shape"])

    def copied(self, name: str) -> Array:
        """A tensor in memory of its own, without the whole of it in the file's memory, too."""
        tensor = np.empty(self.mapped(name).shape, self.mapped(name).dtype)
        begin, end = self._ends(name)
        there = tensor.reshape(-1).view(np.uint8)
        for at in range(begin, end, _PIECE):
            piece = self._bytes[at : min(at + _PIECE, end)]
            there[at - begin : at - begin + len(piece)] = piece
            self._release(at, at + len(piece))
        return tensor

    def release(self, name: str) -> None:
        """Give back the memory of a tensor that has been read, which would count until the file is closed."""
        self._release(*self._ends(name))

    def _release(self, begin: int, end: int) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):
            begin -= begin % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)


class _Memory:
    """Tensors in memory, as `_File` has them in a file."""

    def __init__(self, arrays: Mapping[str, Array]):
        self._arrays = arrays

    def get_slice(self, name: str) -> _Memory:
        return _Memory({"": self._arrays[name]})

    def get_shape(self) -> Shape:
        return self._arrays[""].shape

    def get_dtype(self) -> str:
        return "F32"  # all that are there are of a floating type

    def mapped(self, name: str) -> Array:
        return self._arrays[name]

    def copied(self, name: str) -> Array:
        return self._arrays[name].copy()

    def release(self, name: str) -> None:
        """There is nothing to give back."""


class Tensors:
    """The tensors of a model's safetensors files by name, read one at a time, until `stack` closes them.

    `stored` is the type that weights are kept in. A tensor that is not finite in it is refused. `state` has
    tensors in place of those of the files; of a model made `before`, what holds none of `changed` is kept.
    """

    def __init__(
        self,
        folder: Path,
        stored: str,
        stack: ExitStack,
        state: Mapping[str, Array] | None = None,
        before: Origins | None = None,
        changed: Collection[str] = (),
    ):
        self._stored, self._open, self._prefix = stored, stack, ""
        self._before, self._changed = before, changed
        self.origins, self.state = Origins(), state
        if state is not None:
            memory = _Memory(state)
            self.path = folder / WEIGHTS
            self._tensors: dict[str, Tensor] = {name: (memory, name) for name in state}
            return
        # A single file comes first, as in transformers: an index beside it may be left over.
        is_indexed = not (folder / WEIGHTS).is_file() and (folder / INDEX).is_file()
        self.path = folder / (INDEX if is_indexed else WEIGHTS)
        self._tensors = self._indexed(folder) if is_indexed else self._single(folder)

    def _file(self, path: Path) -> _File:
        safetensors = require("safetensors")
        try:
            path.open("rb").close()  # safe_open calls every file that it cannot open missing
            return _File(self._open.enter_context(safetensors.safe_open(path, framework="np")), path)
        except FileNotFoundError:
            raise ModelError(f"{path} is missing") from None
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        except safetensors.SafetensorError as error:
            what = lfs_hint(path) or f"{path} is truncated or no safetensors file: {error}"
            raise ModelError(what) from error

    def _single(self, folder: Path) -> dict[str, Tensor]:
        if not self.path.is_file():
            kinds = (".bin", ".safetensors", ".gguf")
            found = sorted(path.name for path in folder.iterdir() if path.suffix in kinds)
            there = ", ".join(found[:_SHOWN]) or "no other file of weights"
            if any(name.endswith(".bin") for name in found):
                how = "from_pretrained(), save_pretrained(..., safe_serialization=True)"
                there += f"; transformers converts: {how}"
            raise ModelError(f"{self.path} is missing, and so is {INDEX}; there is {there}")
        file = self._file(self.path)
        return {name: (file, name) for name in file.keys()}  # noqa: SIM118  (no mapping)

    def _indexed(self, folder: Path) -> dict[str, Tensor]:
        places = read_json(self.path).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise ModelError(f"{self.path}: 'weight_map' is no table of file names")
        files: dict[str, _File] = {}
        for file in sorted(set(places.values())):
            if not is_name(file):
                raise ModelError(f"{self.path}: 'weight_map' has {short(file)}; expected a file beside it")
            files[file] = self._file(folder / file)
        held = {file: set(handle.keys()) for file, handle in files.items()}
        absent = sorted(name for name, file in places.items() if name not in held[file])
        if absent:
            name = absent[0]
            raise ModelError(f"{self.path}: {name!r} is to be in {places[name]}, and is not there")
        return {name: (files[file], name) for name, file in places.items()}

    def rename(self, new: Callable[[str], str]) -> None:
        """Give each tensor another name."""
        renamed: dict[str, Tensor] = {}
        for name, held in self._tensors.items():
            other = renamed.setdefault(new(name), held)
            if other is not held:
                both = f"{other[1]!r} and {held[1]!r}"
                raise ModelError(f"{self.path}: {both} name one tensor; expected one of them")
        self._tensors = renamed

    def drop_prefix(self, *prefixes: str) -> None:
        """Drop a prefix from all names that have it: the first of `prefixes` that any name has."""
        found = (prefix for prefix in prefixes if any(name.startswith(prefix) for name in self._tensors))
        self._prefix = next(found, "")
        self.rename(lambda name: name.removeprefix(self._prefix))

    def depth(self, config: Config, key: str) -> int:
        """How many layers config.json has under `key`; each is several tensors.

        More layers than tensors are refused at once: making names for all of them could fill the memory.
        """
        depth = config.size(key, low=0)
        if depth > len(self._tensors):
            held = f"the {len(self._tensors)} tensors of {self.path.name} allow"
            raise ModelError(f"{config.path}: {key!r} is {depth}; expected no more layers than {held}")
        return depth

    def expect(
        self, shapes: Mapping[str, Shape], own: tuple[str, ...], ignored: re.Pattern[str] = NOTHING
    ) -> None:
        """Raise one error with all tensors that are missing, of another shape, or not floating.

        A name that begins with one of `own` but is not in `shapes` is an error, too, as the computation would
        leave it out; unless `ignored` matches, whose tensors were not learned.
        """
        wrong = []
        for name, shape in shapes.items():
            if name not in self._tensors:
                wrong.append(f"{(self._prefix if name.startswith(own) else '') + name!r} is missing")
                continue
            file, stored = self._tensors[name]
            view = file.get_slice(stored)
            if tuple(view.get_shape()) != shape:
                wrong.append(f"{stored!r} has shape {tuple(view.get_shape())}; expected {shape}")
            elif view.get_dtype() not in _FLOATS:
                wrong.append(f"{stored!r} has dtype {view.get_dtype()}; expected one of {', '.join(_FLOATS)}")
            elif view.get_dtype() == "BF16":
                require("ml_dtypes")
        wrong += [
            f"{stored!r} is not known"
            for name, (_, stored) in self._tensors.items()
            if name.startswith(own) and name not in shapes and not ignored.search(name)
        ]
        if wrong:
            more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise ModelError(f"{self.path} does not fit config.json: {'; '.join(wrong[:_SHOWN])}{more}")

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def _made(self, asked: Any, make: Callable[[], tuple[_Made, list[Part]]]) -> _Made:
        """What `make` makes, and of which parts; or what the same made before, if no part has changed."""
        held: Any = None if self._before is None else self._before.made.get(asked)
        parts = [] if self._before is None or held is None else list(self._before.of(held))
        if held is None or any(part.name in self._changed for part in parts):
            held, parts = make()
        if not self.origins.of(held):  # asked for twice, it is noted once: its gradient counts once
            self.origins.note(held, parts)
        self.origins.made[asked] = held
        made: _Made = held
        return made

    def __getitem__(self, name: str) -> Array:
        file, stored = self._tensors[name]

        def read() -> tuple[Array, list[Part]]:
            array = file.copied(stored)
            if not is_finite(array, self._stored):
                raise self._not_finite(stored)
            return array, [Part(stored, array.shape, len(array) if array.ndim else 1, 0)]

        return self._made(stored, read)

    def rows(self, name: str, which: Sequence[int]) -> Array:
        """Some rows of a matrix, in its own type; the others are not read."""
        file, stored = self._tensors[name]
        rows: Array = file.mapped(stored)[list(which)]
        if not is_finite(rows, self._stored):
            raise self._not_finite(stored)
        return rows

    def pack(self, *maps: Sequence[str], transposed: bool = False) -> PackedLinear:
        """The tensors of a linear map, one after another, or of a gated pair, up and gate, packed.

        They are packed from the file's memory, and copied nowhere else. A `transposed` one is (in, out). All
        axes of one of more than two, as of a convolution, but the first count as one.
        """
        held = [[self._tensors[name] for name in names] for names in maps]
        asked = tuple(tuple(stored for _, stored in each) for each in held), transposed
        return self._made(asked, lambda: self._mapped(held, transposed))

    def _mapped(self, held: Sequence[Sequence[Tensor]], transposed: bool) -> tuple[PackedLinear, list[Part]]:
        arrays = [[(stored, _matrix(file.mapped(stored))) for file, stored in each] for each in held]
        if transposed:
            arrays = [[(stored, array.T) for stored, array in each] for each in arrays]
        packed = self._packed(arrays)
        parts = []
        for i, each in enumerate(reversed(arrays)):  # the gate comes first in a pair
            first = i * packed.out_features
            for (file, stored), (_, array) in zip(held[-1 - i], each, strict=True):
                shape = file.mapped(stored).shape
                parts.append(Part(stored, shape, len(array), first, transposed=transposed))
                first += len(array)
                file.release(stored)
        return packed, parts

    def pack_pair(self, name: str, gate_first: bool) -> PackedLinear:
        """The tensor of a gated pair, one map's rows behind the other's, packed as `pack` does."""
        file, stored = self._tensors[name]

        def packed() -> tuple[PackedLinear, list[Part]]:
            first, second = np.split(file.mapped(stored), 2)
            up, gate = (second, first) if gate_first else (first, second)
            pair = self._packed([[(stored, up)], [(stored, gate)]])
            parts = pair_parts(stored, file.mapped(stored).shape, gate_first)
            file.release(stored)
            return pair, parts

        return self._made((stored, gate_first), packed)

    def _packed(self, arrays: Sequence[Sequence[tuple[str, Array]]]) -> PackedLinear:
        args = blocks_args(arrays, self._stored, get_num_threads())
        dispatch.run(args)
        wrong = args.not_finite()
        if wrong is not None:
            raise self._not_finite(wrong)
        return args.packed()

    def _not_finite(self, stored: str) -> ModelError:
        what = f"values that are not finite as {self._stored}"
        where = self.path if self.state is None else "with_state_dict()"
        return ModelError(f"{where}: {stored!r} has {what}; expected finite ones")


def _matrix(array: Array) -> Array:
    return array if array.ndim == 2 else array.reshape(len(array), -1)


def pair_parts(name: str, shape: Shape, gate_first: bool) -> list[Part]:
    """The parts of a gated pair, gate and up, that are halves of one tensor."""
    n = shape[0] // 2
    begins = (0, n) if gate_first else (n, 0)
    return [Part(name, shape, n, i * n, begin) for i, begin in enumerate(begins)]
