"""Safetensors files, of which every byte is read: to touch what is cut off a mapped file ends the process."""

from __future__ import annotations

import json
import math
import os
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastattn._args.types import Array, Shape

# As the format calls types, and NumPy; the last ones with ml_dtypes.
_TYPES = {
    f"{kind}{bits}": f"{name}{bits}"
    for kind, name in (("I", "int"), ("U", "uint"))
    for bits in (8, 16, 32, 64)
}
_TYPES |= {"F64": "float64", "F32": "float32", "F16": "float16", "BOOL": "bool", "C64": "complex64"}
_TYPES |= {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


class TensorFile:
    """An open file, whose header the library safetensors has checked.

    `error` makes an exception of a message, for a file that does not have what its header says.
    """

    def __init__(self, path: str | os.PathLike[str], error: Callable[[str], Exception]):
        self._path, self._error, self._lock = path, error, Lock()
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (`__exit__` closes it)
        try:
            length = int.from_bytes(self._bytes(0, 8), "little")
            self._header: dict[str, Any] = json.loads(self._bytes(8, length))
        except BaseException:
            self._file.close()
            raise
        self._start = 8 + length
        self.metadata: dict[str, str] = self._header.pop("__metadata__", None) or {}
        self.names = list(self._header)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

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

    def _bytes(self, begin: int, count: int) -> bytes:
        data = bytearray(count)
        self._read(memoryview(data), begin)
        return bytes(data)

    def _read(self, to: memoryview, begin: int) -> None:
        """Fill `to` with the bytes from `begin` on; several threads may do so."""
        done = 0
        while done < len(to):
            try:
                count = self._read_some(to[done:], begin + done)
            except OSError as error:
                raise self._error(f"{self._path} cannot be read: {error}") from error
            if not count:
                came = f"{self._path} has become shorter, and has no byte {begin + done}"
                raise self._error(f"{came}; expected it to stay as it was when it was opened")
            done += count

    def _read_some(self, to: memoryview, begin: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [to], begin)
        with self._lock:  # Windows has one place in a file for all threads
            self._file.seek(begin)
            return self._file.readinto(to)
