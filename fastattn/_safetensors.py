"""Safetensors files: tensors by name, read as they are asked for."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._open_file import OpenFile

if TYPE_CHECKING:
    from fastattn._args.types import Array, Shape

# As the format calls types, and NumPy; the last ones with ml_dtypes.
_TYPES = {
    f"{kind}{bits}": f"{name}{bits}"
    for kind, name in (("I", "int"), ("U", "uint"))
    for bits in (8, 16, 32, 64)
}
_TYPES |= {"F64": "float64", "F32": "float32", "F16": "float16", "BOOL": "bool", "C64": "complex64"}
_TYPES |= {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


class TensorFile(OpenFile):
    """An open file, whose header the library safetensors has checked."""

    def _read_header(self) -> None:
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

    def get_tensor(self, name: str) -> Array:
        """A whole tensor."""
        array = self.empty(name, self.shape(name))
        self.fill(array, name, 0)
        return array

    def rows(self, name: str, begin: int, end: int) -> Array:
        """Some rows of a tensor that follow one another."""
        array = self.empty(name, (end - begin, *self.shape(name)[1:]))
        self.fill(array, name, begin * math.prod(array.shape[1:]))
        return array

    def fill(self, array: Array, name: str, begin: int) -> None:
        """Read a contiguous `array` from a tensor, from its element `begin` on."""
        first = self._start + self._header[name]["data_offsets"][0] + begin * array.itemsize
        self._read(array.reshape(-1).view(np.uint8).data, first)
