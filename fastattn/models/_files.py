"""A model's folder: config.json and safetensors files. Errors say what is wrong, and in which file."""

from __future__ import annotations

import importlib
import json
import math
import mmap
import re
import sys
from copy import copy
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fastattn._args.pack import blocks_args
from fastattn._args.packed import is_finite
from fastattn._args.values import short
from fastattn._engine import dispatch
from fastattn._engine.settings import get_num_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import ExitStack
    from types import ModuleType

    from fastattn._args.packed import PackedLinear
    from fastattn._args.types import Array, Shape

    Tensor = tuple["_File", str]  # and the tensor's name in it

_T = TypeVar("_T")

PACKAGES = ("safetensors", "tokenizers", "ml_dtypes", "tqdm")  # the extra "models" of pyproject.toml
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # as safetensors calls them, and NumPy
_PIECE = 1 << 23  # bytes that are copied at a time
_SHOWN = 6  # names that an error lists
_MOST = 2**62  # of an integer in config.json: sums and products with a float still hold it
NOTHING = re.compile("(?!)")  # matches no name
_REQUIRED: Any = object()
_EXPECTED = {bool: "true or false", str: "a string", dict: "a table"}


class ModelError(ValueError):
    """A model cannot be loaded: the message names the file, what is there, and what was expected."""


def require(package: str) -> ModuleType:
    """The imported package; an error says how to install it, and what else of `PACKAGES` is missing."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        package = package.partition(".")[0]
        missing = [package] + [p for p in PACKAGES if p != package and find_spec(p) is None]
        how = f"pip install {' '.join(missing)}"
        raise ImportError(f"models need {', '.join(missing)}: {how} ({error})") from error


def read_json(path: Path, kind: type = dict) -> Any:
    """What the JSON file holds, a `kind`."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, kind):
        raise ModelError(f"{path} holds a {type(values).__name__}; expected a {kind.__name__}")
    return values


def is_name(x: Any) -> bool:
    """Whether `x` is a name without a folder's, of characters that a message can show."""
    return isinstance(x, str) and Path(x).name == x != ".." and x.isprintable()


def lfs_hint(path: Path) -> str:
    """How to fetch a file that is only a pointer of git-lfs; empty for any other file."""
    with path.open("rb") as file:
        is_pointer = file.read(40).startswith(b"version https://git-lfs")
    return f"{path} is a git-lfs pointer, not the file: `git lfs pull` fetches it" if is_pointer else ""


class Config:
    """Values of config.json, each checked when it is asked for.

    A value that is missing or null is the default; without a default, that is an error.
    """

    def __init__(self, path: Path, optional: bool = False):
        """Read the file `path`, which may be missing if it is `optional`."""
        self.path: Path | str = path  # as messages say it
        self.values: dict[str, Any] = {} if optional and not path.is_file() else read_json(path)

    def _value(self, name: str, kind: Any, expected: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ModelError(f"{self.path}: {name!r} is missing; expected {expected}")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ModelError(f"{self.path}: {name!r} is {short(value)}; expected {expected}")
        return value

    def get(self, name: str, kind: type[_T], default: _T = _REQUIRED) -> _T:
        """A value of type `kind`: bool, str or dict."""
        value: _T = self._value(name, kind, _EXPECTED[kind], default)
        return value

    def inner(self, name: str, usual: Mapping[str, Any]) -> Config:
        """The table `name`, in which what is missing or null is as in `usual`."""
        inner = copy(self)
        inner.path = f"{self.path}: {name!r}"
        given = {key: value for key, value in self.get(name, dict, {}).items() if value is not None}
        inner.values = {**usual, **given}
        return inner

    def size(self, name: str, default: int = _REQUIRED, low: int = 1) -> int:
        """An integer of at least `low`."""
        expected = f"an integer of at least {low}"
        value: int = self._value(name, int, expected, default)
        if value < low:
            raise ModelError(f"{self.path}: {name!r} is {short(value)}; expected {expected}")
        if value > _MOST:
            raise ModelError(f"{self.path}: {name!r} is above 2**62; expected a size")
        return value

    def optional_size(self, name: str, default: int | None = None) -> int | None:
        """An integer of at least 1; None if it is null, `default` if it is missing."""
        if name not in self.values:
            return default
        return None if self.values[name] is None else self.size(name)

    def number(self, name: str, default: float = _REQUIRED) -> float:
        """A number above 0."""
        value: float = self._value(name, (int, float), "a number above 0", default)
        if not 0 < value <= sys.float_info.max:
            shown = math.inf if value > 0 else value  # not an integer of hundreds of digits
            raise ModelError(f"{self.path}: {name!r} is {short(shown)}; expected a number above 0")
        return float(value)

    def choice(self, name: str, table: Mapping[str, _T], default: str = _REQUIRED) -> _T:
        """What `table` has for the value."""
        value = self.get(name, str, default)
        if value not in table:
            raise ModelError(f"{self.path}: {name!r} is {short(value)}; expected one of {', '.join(table)}")
        return table[value]

    def words(self, name: str, allowed: Sequence[str], count: int) -> list[str] | None:
        """A list of `count` words, each one of `allowed`; None if it is missing."""
        expected = f"a list of {count} of {', '.join(allowed)}"
        values: list[str] | None = self._value(name, list, expected, None)
        if values is not None and (len(values) != count or any(value not in allowed for value in values)):
            raise ModelError(f"{self.path}: {name!r} is {short(values)}; expected {expected}")
        return values

    def divided(self, name: str, by: str) -> int:
        """One size divided by another, without remainder."""
        size, parts = self.size(name), self.size(by)
        if size % parts:
            raise ModelError(f"{self.path}: {name!r} is {size}; expected a multiple of {by!r}, {parts}")
        return size // parts

    def refuse(self, **supported: Any) -> None:
        """Raise unless each of these values is missing, null, or the one that is supported."""
        for name, wanted in supported.items():
            value = self.values.get(name)
            if value is not None and value != wanted:
                raise ModelError(f"{self.path}: {name!r} is {short(value)}; only {wanted!r} is supported")

    def refuse_others(self, **names: str) -> None:
        """Raise if a key is there and differs from the one, of another name, that stands for it."""
        self.refuse(**{name: self.values.get(other) for name, other in names.items() if other in self.values})


def stop_ids(config: Config, folder: Path) -> tuple[int, ...]:
    """Ids that end a text: `eos_token_id` of generation_config.json, or if that has none, of config.json."""
    name, expected = "eos_token_id", "an id or a list of ids"
    for source in (Config(folder / "generation_config.json", optional=True), config):
        value = source._value(name, (int, list), expected, [])
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and abs(i) <= _MOST for i in ids):
            raise ModelError(f"{source.path}: {name!r} is {short(value)}; expected {expected}")
        if ids:
            return tuple(ids)
    return ()


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


class Tensors:
    """The tensors of a model's safetensors files by name, read one at a time, until `stack` closes them.

    `stored` is the type that weights are kept in. A tensor that is not finite in it is refused.
    """

    def __init__(self, folder: Path, stored: str, stack: ExitStack):
        self._stored, self._open, self._prefix = stored, stack, ""
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

    def __getitem__(self, name: str) -> Array:
        file, stored = self._tensors[name]
        array = file.copied(stored)
        if not is_finite(array, self._stored):
            raise self._not_finite(stored)
        return array

    def pack(self, *maps: Sequence[str], transposed: bool = False) -> PackedLinear:
        """The tensors of a linear map, one after another, or of a gated pair, up and gate, packed.

        They are packed from the file's memory, and copied nowhere else. A `transposed` one is (in, out). All
        axes of one of more than two, as of a convolution, but the first count as one.
        """
        held = [[self._tensors[name] for name in names] for names in maps]
        arrays = [[(stored, _matrix(file.mapped(stored))) for file, stored in each] for each in held]
        if transposed:
            arrays = [[(stored, array.T) for stored, array in each] for each in arrays]
        packed = self._packed(arrays)
        for file, stored in (tensor for each in held for tensor in each):
            file.release(stored)
        return packed

    def pack_pair(self, name: str, gate_first: bool) -> PackedLinear:
        """The tensor of a gated pair, one map's rows behind the other's, packed as `pack` does."""
        file, stored = self._tensors[name]
        first, second = np.split(file.mapped(stored), 2)
        up, gate = (second, first) if gate_first else (first, second)
        packed = self._packed([[(stored, up)], [(stored, gate)]])
        file.release(stored)
        return packed

    def _packed(self, arrays: Sequence[Sequence[tuple[str, Array]]]) -> PackedLinear:
        args = blocks_args(arrays, self._stored, get_num_threads())
        dispatch.run(args)
        wrong = args.not_finite()
        if wrong is not None:
            raise self._not_finite(wrong)
        return args.packed()

    def _not_finite(self, stored: str) -> ModelError:
        what = f"values that are not finite as {self._stored}"
        return ModelError(f"{self.path}: {stored!r} has {what}; expected finite ones")


def _matrix(array: Array) -> Array:
    return array if array.ndim == 2 else array.reshape(len(array), -1)
