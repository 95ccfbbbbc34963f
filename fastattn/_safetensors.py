"""Safetensors files: tensors by name, read as they are asked for, and values beside them as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

from fastattn._args.errors import needed, wrong_type
from fastattn._args.types import Array, Shape
from fastattn._args.values import short
from fastattn._regular_files import OpenFile, replaced

AnyPath = str | os.PathLike[str]
_HOW = "pip install safetensors"

# As the format calls types, and NumPy; the last ones with ml_dtypes.
_TYPES = {
    f"{kind}{bits}": f"{name}{bits}"
    for kind, name in (("I", "int"), ("U", "uint"))
    for bits in (8, 16, 32, 64)
}
_TYPES |= {"F64": "float64", "F32": "float32", "F16": "float16", "BOOL": "bool", "C64": "complex64"}
_TYPES |= {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


class TensorFile(OpenFile):
    """An open file, whose header the library safetensors checks."""

    def _read_header(self) -> None:
        from safetensors import safe_open

        with safe_open(self._path, framework="numpy"):
            pass
        length = int.from_bytes(self._bytes(0, 8), "little")
        self._header: dict[str, Any] = json.loads(self._bytes(8, length))
        self._start = 8 + length
        self.metadata: dict[str, str] = self._header.pop("__metadata__", None) or {}
        self.names = list(self._header)

    def shape(self, name: str) -> Shape:
        """The shape of a tensor."""
        return tuple(self._header[name]["shape"])

    def kind(self, name: str) -> str:
        """The type of a tensor, as the format calls it."""
        return str(self._header[name]["dtype"])

    def empty(self, name: str, shape: Shape) -> Array:
        """An uninitialised array of a tensor's type."""
        try:
            return np.empty(shape, _TYPES[self.kind(name)])
        except (KeyError, TypeError):
            expected = f"one of {', '.join(_TYPES)}, the last three with the package ml_dtypes"
            raise self._error(
                f"{self._path}: {name!r} is of type {self.kind(name)}; expected {expected}"
            ) from None

    def unit(self, name: str) -> int:
        """Elements of a tensor that are read together."""
        return 1

    def split(self, name: str, count: int | None = None) -> list[str]:
        """Make tensors, `NAME.0` and so on, of the rows of the tensor `NAME`, and return their names.

        With a `count`, which divides the rows, they are so many tensors, of as many rows each.
        """
        whole = self._header.pop(name)
        rows, *shape = whole["shape"]
        if count is not None:
            shape = [rows // count, *shape]
        count = rows if count is None else count
        begin, end = whole["data_offsets"]
        size, parts = (end - begin) // max(1, count), [f"{name}.{i}" for i in range(count)]
        for i, part in enumerate(parts):
            offsets = [begin + i * size, begin + (i + 1) * size]
            self._header[part] = {**whole, "shape": shape, "data_offsets": offsets}
        at = self.names.index(name)
        self.names[at : at + 1] = parts
        return parts

    def fill(self, array: Array, name: str, begin: int) -> None:
        """Read a contiguous `array` from a tensor, from its element `begin` on."""
        first = self._start + self._header[name]["data_offsets"][0] + begin * array.itemsize
        self._read(array.reshape(-1).view(np.uint8).data, first)


# Other files of parameters, and what makes a mapping of them.
_READERS = {".npz": "np.load({!r})"}
_READERS |= dict.fromkeys((".pt", ".pth", ".bin"), "torch.load({!r}, weights_only=True)")


def opened(file: str, stack: ExitStack) -> TensorFile:
    """The safetensors file `file`, open, which `stack` closes. It reads a tensor when asked for it."""
    reader = _READERS.get(os.path.splitext(file)[1])
    or_read = f", or what {reader.format(file)} returns" if reader else ""
    try:
        file.encode()
    except UnicodeEncodeError:  # the library takes no bytes of other encodings
        raise ValueError(f"(): state_dict is the path {file!r}; expected one in UTF-8") from None
    if os.path.isdir(file):
        raise ValueError(f"(): {file} is a folder; expected a safetensors file")
    if not os.path.exists(file):
        raise FileNotFoundError(f"(): {file} is missing; expected a safetensors file{or_read}")
    library = needed("safetensors", f"(): reading {file} needs the safetensors package", _HOW)
    with suppress(ImportError):  # gives NumPy bfloat16, which files may hold
        import ml_dtypes  # noqa: F401
    try:
        return stack.enter_context(TensorFile(file, lambda message: ValueError(f"(): {message}")))
    except library.SafetensorError as error:
        if reader:  # by its name it is another kind
            raise ValueError(f"(): {file} is not a safetensors file; expected one{or_read}") from None
        raise ValueError(f"(): {file} is not a sound safetensors file: {error}") from error


def write(path: AnyPath, arrays: Mapping[str, Array], values: Any, key: str) -> None:
    """Write arrays, and values for the header's `key`.

    Whoever reads meanwhile, or after a crash, finds the old file or the new one.
    """
    where = _decoded(path)
    library = needed("safetensors.numpy", f"(): writing {where} needs the safetensors package", _HOW)
    with replaced(Path(where), "(): ") as file:
        library.save_file(dict(arrays), file, {key: json.dumps(values, allow_nan=False)})


def read(path: AnyPath, key: str, kind: str, number: int) -> tuple[dict[str, Array], dict[str, Any]]:
    """Read what `write` wrote, a table whose "format" is `number`; messages call it `kind`."""
    where = _decoded(path)
    with ExitStack() as stack:
        file = opened(where, stack)
        values = header(path, file, key)
        if values is None:
            raise ValueError(f"(): {where} holds no {kind}; expected a file that save() wrote")
        came = values.get("format") if isinstance(values, dict) else None
        if came != number:
            raise ValueError(f"(): the format of the {kind} in {where} is {short(came)}; expected {number}")
        return {name: file.get_tensor(name) for name in file.names}, values


def header(path: AnyPath, file: TensorFile, key: str) -> Any:
    """The values in `file`, open; None if it has none for `key`."""
    text = file.metadata.get(key)
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"(): the header of {os.fsdecode(path)} is not JSON: {error}") from error


def _decoded(path: AnyPath) -> str:
    if not isinstance(path, (str, os.PathLike)):
        raise wrong_type("path", path, "the path of a file")
    return os.fsdecode(path)
