"""A model's folder: config.json, and what is said of files. Errors say what is wrong, and in which file."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from fastattn._args.values import short
from fastattn._gguf import MAGIC, GgufFile
from fastattn._regular_files import regular

_T = TypeVar("_T")

GGUF = ".gguf"  # the suffix of such files
PACKAGES = ("safetensors", "tokenizers", "ml_dtypes", "tqdm", "jinja2")  # the extra "models"
_MOST_BYTES = 2**26  # of a text file: that of the largest tokenizers is half of it
_MOST = 2**62  # of an integer in config.json: sums and products with a float still hold it
_REQUIRED: Any = object()
_EXPECTED = {bool: "true or false", str: "a string", dict: "a table"}


class ModelError(ValueError):
    """Error in a model's files: the message names the file, its content and what was expected."""


def require(package: str) -> ModuleType:
    """The imported package; an error says how to install it, and what else of `PACKAGES` is missing."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        package = package.partition(".")[0]
        missing = [package] + [p for p in PACKAGES if p != package and find_spec(p) is None]
        how = f"pip install {' '.join(missing)}"
        raise ImportError(f"models need {', '.join(missing)}: {how} ({error})") from error


@contextmanager
def opened(path: Path) -> Iterator[FileIO]:
    """A file of a model's folder, open for reading. Every one is opened here, and only regular files are."""
    try:
        with regular(path) as file:
            yield file
    except FileNotFoundError:
        raise ModelError(f"{path.absolute()} is missing") from None
    except OSError as error:
        if error.errno is None:  # not of the system: a signal's handler raised it
            raise
        raise ModelError(f"{path} cannot be read: {error}") from error


def read_bytes(path: Path) -> bytes:
    """Content of a file of a model's folder, which is bounded."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MOST_BYTES:
            raise ModelError(f"{path} has {size} bytes; expected at most {_MOST_BYTES}")
        return file.read(size)


def read_json(path: Path, kind: type = dict) -> Any:
    """Content of a JSON file, which must be a `kind`."""
    data = read_bytes(path)
    try:
        values = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    except MemoryError as error:
        raise ModelError(f"{path} holds more than there is memory for") from error
    if not isinstance(values, kind):
        raise ModelError(f"{path} holds a {type(values).__name__}; expected a {kind.__name__}")
    return values


def is_name(x: Any) -> bool:
    """Tell whether `x` is a file's name without a folder, of characters that a message can show."""
    return isinstance(x, str) and Path(x).name == x != ".." and x.isprintable()


def lfs_hint(path: Path) -> str:
    """Advice on how to fetch a file that is only a pointer of git-lfs; empty for any other file."""
    with opened(path) as file:
        is_pointer = file.read(40).startswith(b"version https://git-lfs")
    return f"{path} is a git-lfs pointer, not the file: `git lfs pull` fetches it" if is_pointer else ""


def is_gguf(path: Path) -> bool:
    """Tell whether the path is that of a GGUF file, by its name or its first bytes."""
    if not os.path.isfile(path):  # unlike Path.is_file(), it raises nothing for a name that is too long
        return False
    if path.suffix.lower() == GGUF:
        return True
    try:
        with open(path, "rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def opened_gguf(path: Path) -> GgufFile:
    """The file, which the caller closes; its tensors are as the file has them."""
    try:
        return GgufFile(path, ModelError)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}; expected a GGUF file") from error
    except ModelError as error:
        raise ModelError(lfs_hint(path) or str(error)) from None


class Config:
    """Values of config.json, each checked when it is read.

    A value that is missing or null is the default; without a default, that is an error.
    """

    prefix = ""  # of names, as messages say them

    def __init__(self, path: Path, optional: bool = False):
        """Read the file `path`, which may be missing if it is `optional`."""
        self.path: Path | str = path  # as messages say it
        self.values: dict[str, Any] = {} if optional and not path.exists() else read_json(path)

    @classmethod
    def of(cls, path: Path | str, values: dict[str, Any], prefix: str = "") -> Config:
        """Values that another file has, `path`, each under its name with the prefix."""
        config = cls.__new__(cls)
        config.path, config.values, config.prefix = path, values, prefix
        return config

    def wrong(self, name: str, value: Any, expected: str) -> ModelError:
        """The error of a `value` of `name`."""
        return ModelError(f"{self.path}: {self.prefix + name!r} is {short(value)}; expected {expected}")

    def _value(self, name: str, kind: Any, expected: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ModelError(f"{self.path}: {self.prefix + name!r} is missing; expected {expected}")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.wrong(name, value, expected)
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
            raise self.wrong(name, value, expected)
        if value > _MOST:
            raise ModelError(f"{self.path}: {self.prefix + name!r} is above 2**62; expected a size")
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
            shortened = math.inf if value > 0 else value  # not an integer of hundreds of digits
            raise self.wrong(name, shortened, "a number above 0")
        return float(value)

    def numbers(self) -> dict[str, float]:
        """All values, which are numbers."""
        for name, value in self.values.items():
            if type(value) not in (int, float):
                raise self.wrong(name, value, "a number")
        return self.values

    def choice(self, name: str, table: Mapping[str, _T], default: str = _REQUIRED) -> _T:
        """Entry of `table` for the value."""
        value = self.get(name, str, default)
        if value not in table:
            raise self.wrong(name, value, f"one of {', '.join(table)}")
        return table[value]

    def one_of(self, name: str, words: Iterable[str], default: str = _REQUIRED) -> str:
        """One of these words."""
        return self.choice(name, {word: word for word in words}, default)

    @property
    def architecture(self) -> str:
        """The first name of `architectures`; "" without one."""
        said = self.values.get("architectures")
        return said[0] if isinstance(said, list) and said and isinstance(said[0], str) else ""

    def token(self, name: str) -> str | None:
        """A special token, by itself or in a table with its content; None if there is none."""
        said = self.values.get(name)
        said = said.get("content") if isinstance(said, dict) else said
        return said if isinstance(said, str) else None

    def words(self, name: str, allowed: Sequence[str], count: int) -> list[str] | None:
        """A list of `count` words, each one of `allowed`; None if it is missing."""
        expected = f"a list of {count} of {', '.join(allowed)}"
        values: list[str] | None = self._value(name, list, expected, None)
        if values is not None and (len(values) != count or any(value not in allowed for value in values)):
            raise self.wrong(name, values, expected)
        return values

    def divided(self, name: str, by: str) -> int:
        """Quotient of two sizes, without remainder."""
        size, parts = self.size(name), self.size(by)
        if size % parts:
            raise self.wrong(name, size, f"a multiple of {self.prefix + by!r}, {parts}")
        return size // parts

    def refuse(self, **supported: Any) -> None:
        """Raise unless each of these values is missing, null, or the one that is supported."""
        for name, wanted in supported.items():
            value = self.values.get(name)
            if value is not None and (isinstance(value, np.ndarray) or value != wanted):
                came = f"{self.path}: {self.prefix + name!r} is {short(value)}"
                raise ModelError(f"{came}; only {wanted!r} is supported")

    def refuse_any(self, names: Iterable[str], expected: str) -> None:
        """Raise if there is one of these values."""
        if found := [name for name in names if name in self.values]:
            raise ModelError(f"{self.path}: there is a '{self.prefix}{found[0]}'; expected {expected}")

    def refuse_others(self, **names: str) -> None:
        """Raise if a key differs from the one, of another name, that replaces it."""
        self.refuse(**{name: self.values.get(other) for name, other in names.items() if other in self.values})


def tokenizer_config(folder: Path) -> Config:
    """Settings of transformers for the tokenizer; the file may be missing."""
    return Config(folder / "tokenizer_config.json", optional=True)


def sentences_config(folder: Path) -> Config:
    """Settings of sentence-transformers for the whole folder; the file may be missing."""
    return Config(folder / "config_sentence_transformers.json", optional=True)


# Options of a draw in generation_config.json, and what transformers takes where they are missing.
_DRAWN = {"temperature": 1.0, "top_k": 50, "top_p": None, "min_p": None}


def usual_sampling(folder: Path) -> dict[str, Any]:
    """Options of `generate` that generation_config.json has; those of a draw if it says `do_sample`."""
    config = Config(folder / "generation_config.json", optional=True)
    draws = config.get("do_sample", bool, False)
    config.refuse(**{"typical_p": 1.0} if draws else {})
    names = ("repetition_penalty", *(_DRAWN if draws else ()))
    given = {**_DRAWN, **{name: x for name, x in config.values.items() if x is not None}}
    found = {name: given[name] for name in names if given.get(name) is not None}
    return Config.of(config.path, found).numbers()


def stop_ids(config: Config, folder: Path) -> tuple[int, ...]:
    """Ids that end a text: `eos_token_id` of generation_config.json, or if that has none, of config.json."""
    name, expected = "eos_token_id", "an id or a list of ids"
    for source in (Config(folder / "generation_config.json", optional=True), config):
        value = source._value(name, (int, list), expected, [])
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and abs(i) <= _MOST for i in ids):
            raise source.wrong(name, value, expected)
        if ids:
            return tuple(ids)
    return ()
