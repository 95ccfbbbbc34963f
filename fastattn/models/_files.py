"""A model's folder: config.json and safetensors files, read with errors that say what is wrong where."""

from __future__ import annotations

import importlib
import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fastattn._args.packed import is_finite
from fastattn._args.values import short

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType

    from fastattn._args.types import Array, Shape

    Tensor = tuple[Any, str]  # an open safetensors file, and the tensor's name in it

_T = TypeVar("_T")

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("F32", "F16", "BF16")  # as safetensors calls them
_SHOWN = 6  # names that an error lists
_MOST = 2**62  # of an integer in config.json: sums and products with a float still hold it
_REQUIRED: Any = object()


class ModelError(ValueError):
    """A model cannot be loaded: the message names the file, what is there, and what was expected."""


def require(package: str) -> ModuleType:
    """The package of that name, imported; where it is missing, an error that says how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"models need {package}: pip install {package} ({error})") from error


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
    """Whether `x` names a file or a folder, in no other folder; what no message could show is no name."""
    return isinstance(x, str) and Path(x).name == x != ".." and x.isprintable()


def lfs_hint(path: Path) -> str:
    """What to do about a file that git-lfs has not fetched; empty for any other."""
    with path.open("rb") as file:
        is_pointer = file.read(40).startswith(b"version https://git-lfs")
    return f"{path} is a git-lfs pointer, not the file: `git lfs pull` fetches it" if is_pointer else ""


class Config:
    """Values of config.json, each checked when it is asked for.

    What is missing, or null, is its default, or an error where there is none.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]):
        self.path, self.values = path, values

    def _value(self, name: str, kind: Any, expected: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ModelError(f"{self.path}: {name!r} is missing; expected {expected}")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ModelError(f"{self.path}: {name!r} is {short(value)}; expected {expected}")
        return value

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
        try:
            number = float(value)
        except OverflowError:  # an integer of hundreds of digits
            number = float("inf")
        if not 0 < number < float("inf"):
            shown = value if number < float("inf") else number
            raise ModelError(f"{self.path}: {name!r} is {short(shown)}; expected a number above 0")
        return number

    def flag(self, name: str, default: bool) -> bool:
        """True or False."""
        value: bool = self._value(name, bool, "true or false", default)
        return value

    def text(self, name: str, default: str = _REQUIRED) -> str:
        """A string."""
        value: str = self._value(name, str, "a string", default)
        return value

    def choice(self, name: str, table: Mapping[str, _T], default: str = _REQUIRED) -> _T:
        """What `table` has for the value."""
        value = self.text(name, default)
        if value not in table:
            raise ModelError(f"{self.path}: {name!r} is {short(value)}; expected one of {', '.join(table)}")
        return table[value]

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id or a list of them; none if it is missing."""
        value = self._value(name, (int, list), "an id or a list of ids", [])
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and abs(i) <= _MOST for i in ids):
            raise ModelError(f"{self.path}: {name!r} is {short(value)}; expected an id or a list of ids")
        return tuple(ids)

    def words(self, name: str, allowed: Sequence[str], count: int) -> list[str] | None:
        """A list of `count` words, each one of `allowed`; None if it is missing."""
        expected = f"a list of {count} of {', '.join(allowed)}"
        values: list[str] | None = self._value(name, list, expected, None)
        if values is not None and (len(values) != count or any(value not in allowed for value in values)):
            raise ModelError(f"{self.path}: {name!r} is {short(values)}; expected {expected}")
        return values

    def table(self, name: str) -> dict[str, Any]:
        """A table of values; empty if it is missing."""
        values: dict[str, Any] = self._value(name, dict, "a table", {})
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


def stop_ids(config: Config, folder: Path) -> tuple[int, ...]:
    """Ids that end a text: `eos_token_id` of generation_config.json, or if that has none, of config.json."""
    path = folder / "generation_config.json"
    said = Config(path, read_json(path)).token_ids("eos_token_id") if path.is_file() else ()
    return said or config.token_ids("eos_token_id")


class Tensors:
    """The tensors of a model's safetensors files by name, read one at a time; a context manager.

    Those with values that are not finite as `stored`, how weights are kept, are refused.
    """

    def __init__(self, folder: Path, stored: str):
        self._stored, self._prefix = stored, ""
        self._open = ExitStack()
        # The one file first, as transformers has it: an index beside it may be left over.
        is_indexed = not (folder / WEIGHTS).is_file() and (folder / INDEX).is_file()
        self.path = folder / (INDEX if is_indexed else WEIGHTS)
        try:
            self._tensors = self._indexed(folder) if is_indexed else self._single(folder)
        except BaseException:
            self._open.close()
            raise

    def __enter__(self) -> Tensors:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def _file(self, path: Path) -> Any:
        safetensors = require("safetensors")
        try:
            path.open("rb").close()  # to say why: for safe_open, what cannot be opened is missing
            return self._open.enter_context(safetensors.safe_open(path, framework="np"))
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
            how = "; transformers converts: from_pretrained(), save_pretrained(..., safe_serialization=True)"
            raise ModelError(
                f"{self.path} is missing, and so is {INDEX}; there is"
                f" {', '.join(found[:_SHOWN]) or 'no other file of weights'}"
                f"{how if any(name.endswith('.bin') for name in found) else ''}"
            )
        file = self._file(self.path)
        return {name: (file, name) for name in file.keys()}  # noqa: SIM118  (no mapping)

    def _indexed(self, folder: Path) -> dict[str, Tensor]:
        places = read_json(self.path).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise ModelError(f"{self.path}: 'weight_map' is no table of file names")
        files: dict[str, Any] = {}
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
        """Know each tensor by another name from now on."""
        renamed: dict[str, Tensor] = {}
        for name, held in self._tensors.items():
            other = renamed.setdefault(new(name), held)
            if other is not held:
                both = f"{other[1]!r} and {held[1]!r}"
                raise ModelError(f"{self.path}: {both} name one tensor; expected one of them")
        self._tensors = renamed

    def drop_prefix(self, *prefixes: str) -> None:
        """Drop the first of `prefixes` that a name begins with from all names that have it."""
        found = (prefix for prefix in prefixes if any(name.startswith(prefix) for name in self._tensors))
        self._prefix = next(found, "")
        self.rename(lambda name: name.removeprefix(self._prefix))

    def depth(self, config: Config, key: str) -> int:
        """How many layers the configuration has under `key`; each is several tensors.

        More than there are tensors are refused before names are made for them, which could fill the memory.
        """
        depth = config.size(key, low=0)
        if depth > len(self._tensors):
            held = f"the {len(self._tensors)} tensors of {self.path.name} allow"
            raise ModelError(f"{config.path}: {key!r} is {depth}; expected no more layers than {held}")
        return depth

    def expect(self, shapes: Mapping[str, Shape], own: tuple[str, ...], ignored: re.Pattern[str]) -> None:
        """Raise one error on all that is missing, of another shape, or not floating.

        A name that begins with one of `own` and is not asked for is wrong, too: what it holds would be left
        out of the computation. Those that `ignored` finds hold nothing that has been learned.
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

    def __getitem__(self, name: str) -> Array:
        file, stored = self._tensors[name]
        array: Array = file.get_tensor(stored)
        if not is_finite(array, self._stored):
            what = f"values that are not finite as {self._stored}"
            raise ModelError(f"{self.path}: {stored!r} has {what}; expected finite ones")
        return array
