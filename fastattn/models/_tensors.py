"""Tensors of safetensors files: read and packed one at a time."""

from __future__ import annotations

import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fastattn._args.pack import blocks_args, native
from fastattn._args.packed import PackArgs, RowBlock, columns, is_finite
from fastattn._args.values import short
from fastattn._engine import dispatch
from fastattn._engine.settings import get_num_threads
from fastattn._safetensors import TensorFile
from fastattn.models._files import Config, ModelError, is_name, lfs_hint, read_json, require
from fastattn.models._origins import Origins, Part

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from contextlib import ExitStack
    from pathlib import Path

    from fastattn._args.packed import PackedLinear
    from fastattn._args.types import Array, Shape

    Tensor = tuple["TensorFile | _Memory", str]  # and the tensor's name in it

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("F32", "F16", "BF16")  # as safetensors calls them
# Bytes that a thread reads at a time and packs at once, while they are in a cache; and threads that do so.
_PIECE, _READERS = 1 << 22, 8
_SHOWN = 6  # names that an error lists
NOTHING = re.compile("(?!)")  # matches no name
_Made = TypeVar("_Made", bound="Array | PackedLinear")


class _Memory:
    """Tensors in memory, as `TensorFile` has them in a file."""

    def __init__(self, arrays: Mapping[str, Array]):
        self._arrays = arrays

    def shape(self, name: str) -> Shape:
        return self._arrays[name].shape

    def kind(self, name: str) -> str:
        return "F32"  # all that are there are of a floating type

    def rows(self, name: str, begin: int, end: int) -> Array:
        return self._arrays[name][begin:end]

    def get_tensor(self, name: str) -> Array:
        return self._arrays[name].copy()


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a matrix, whose axes but for the first count as one; they are read when they are needed."""

    file: TensorFile | _Memory
    name: str
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    def read(self, begin: int, end: int) -> Array:
        """Rows `begin` to `end` of these, as a matrix."""
        array = self.file.rows(self.name, self.begin + begin, self.begin + end)
        return array.reshape(len(array), -1)


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
        self._pool: ThreadPoolExecutor | None = None
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

    def _file(self, path: Path) -> TensorFile:
        safetensors = require("safetensors")
        try:
            path.open("rb").close()  # safe_open calls every file that it cannot open missing
            with safetensors.safe_open(path, framework="np"):
                return self._open.enter_context(TensorFile(path, ModelError))
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
            if any(name.endswith(".gguf") for name in found):
                there += "; GGUF is not read yet"
            raise ModelError(f"{self.path} is missing, and so is {INDEX}; there is {there}")
        file = self._file(self.path)
        return {name: (file, name) for name in file.names}

    def _indexed(self, folder: Path) -> dict[str, Tensor]:
        places = read_json(self.path).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise ModelError(f"{self.path}: 'weight_map' is no table of file names")
        files: dict[str, TensorFile] = {}
        for file in sorted(set(places.values())):
            if not is_name(file):
                raise ModelError(f"{self.path}: 'weight_map' has {short(file)}; expected a file beside it")
            files[file] = self._file(folder / file)
        held = {file: set(handle.names) for file, handle in files.items()}
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
            kind = file.kind(stored)
            if file.shape(stored) != shape:
                wrong.append(f"{stored!r} has shape {file.shape(stored)}; expected {shape}")
            elif kind not in _FLOATS:
                wrong.append(f"{stored!r} has dtype {kind}; expected one of {', '.join(_FLOATS)}")
            elif kind == "BF16":
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
            array = self._whole(file, stored)
            if not is_finite(array, self._stored):
                raise self._not_finite(stored)
            return array, [Part(stored, array.shape, len(array) if array.ndim else 1, 0)]

        return self._made(stored, read)

    def rows(self, name: str, which: Sequence[int]) -> Array:
        """Some rows of a matrix, in its own type; the others are not read."""
        file, stored = self._tensors[name]
        rows = np.concatenate([file.rows(stored, i, i + 1) for i in which])
        if not is_finite(rows, self._stored):
            raise self._not_finite(stored)
        return rows

    def pack(self, *maps: Sequence[str], transposed: bool = False) -> PackedLinear:
        """The tensors of a linear map, one after another, or of a gated pair, up and gate, packed.

        They are read in pieces, each of which is packed at once. A `transposed` one is (in, out), and read
        whole. All axes of one of more than two, as of a convolution, but the first count as one.
        """
        held = [[self._tensors[name] for name in names] for names in maps]
        asked = tuple(tuple(stored for _, stored in each) for each in held), transposed

        def made() -> tuple[PackedLinear, list[Part]]:
            rows = [[_Rows(file, name, 0, file.shape(name)[0]) for file, name in each] for each in held]
            packed = self._transposed(rows) if transposed else self._packed(rows)
            parts = []
            for i, each in enumerate(reversed(held)):  # the gate comes first in a pair
                first = i * packed.out_features
                for file, stored in each:
                    shape = file.shape(stored)
                    count = math.prod(shape[1:]) if transposed else shape[0]
                    parts.append(Part(stored, shape, count, first, transposed=transposed))
                    first += count
            return packed, parts

        return self._made(asked, made)

    def pack_pair(self, name: str, gate_first: bool) -> PackedLinear:
        """The tensor of a gated pair, one map's rows behind the other's, packed as `pack` does."""
        file, stored = self._tensors[name]

        def packed() -> tuple[PackedLinear, list[Part]]:
            shape = file.shape(stored)
            half = shape[0] // 2
            first, second = _Rows(file, stored, 0, half), _Rows(file, stored, half, shape[0])
            up, gate = (second, first) if gate_first else (first, second)
            return self._packed([[up], [gate]]), pair_parts(stored, shape, gate_first)

        return self._made((stored, gate_first), packed)

    def _packed(self, maps: Sequence[Sequence[_Rows]]) -> PackedLinear:
        """Rows of a map, or of a gated pair: up, gate; in pieces of whole panels."""
        n, example = sum(map(len, maps[0])), maps[0][0].read(0, 1)
        whole = PackArgs([], example.size, n, len(maps), self._stored, get_num_threads())
        panel = columns(self._stored)
        step = panel * max(1, _PIECE // (panel * len(maps) * example.nbytes))

        def pack(begin: int) -> None:
            end, blocks = min(begin + step, n), []
            for i, each in enumerate(maps):
                first = 0
                for rows in each:
                    here = slice(max(begin - first, 0), min(end - first, len(rows)))
                    if here.start < here.stop:
                        array = native(rows.read(here.start, here.stop))
                        at = first + here.start - begin
                        blocks.append(RowBlock(rows.name, array, at, len(maps) - 1 - i))
                    first += len(rows)
            self._run(whole.part(blocks, begin, end, 1 if step < n else whole.num_threads))

        self._each(pack, range(0, n, step))
        return whole.packed()

    def _transposed(self, maps: Sequence[Sequence[_Rows]]) -> PackedLinear:
        arrays = [[(rows.name, rows.read(0, len(rows)).T) for rows in each] for each in maps]
        args = blocks_args(arrays, self._stored, get_num_threads())
        self._run(args)
        return args.packed()

    def _run(self, args: PackArgs) -> None:
        dispatch.run(args)
        wrong = args.not_finite()
        if wrong is not None:
            raise self._not_finite(wrong)

    def _whole(self, file: TensorFile | _Memory, name: str) -> Array:
        """A tensor in memory of its own."""
        if isinstance(file, _Memory):
            return file.get_tensor(name)
        array = file.empty(name, file.shape(name))
        flat, step = array.reshape(-1), _PIECE // array.itemsize
        self._each(lambda at: file.fill(flat[at : at + step], name, at), range(0, flat.size, step))
        return array

    def _each(self, function: Callable[[int], None], pieces: range) -> None:
        """Call the function with each of `pieces`, by several threads."""
        if len(pieces) < 2:
            for piece in pieces:
                function(piece)
            return
        if self._pool is None:
            readers = min(get_num_threads(), _READERS)
            self._pool = self._open.enter_context(ThreadPoolExecutor(readers))
        for _ in self._pool.map(function, pieces):
            pass

    def _not_finite(self, stored: str) -> ModelError:
        what = f"values that are not finite as {self._stored}"
        where = self.path if self.state is None else "with_state_dict()"
        return ModelError(f"{where}: {stored!r} has {what}; expected finite ones")


def pair_parts(name: str, shape: Shape, gate_first: bool) -> list[Part]:
    """The parts of a gated pair, gate and up, that are halves of one tensor."""
    n = shape[0] // 2
    begins = (0, n) if gate_first else (n, 0)
    return [Part(name, shape, n, i * n, begin) for i, begin in enumerate(begins)]
