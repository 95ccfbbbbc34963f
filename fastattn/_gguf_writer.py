"""Writing of GGUF files: keys with their values, and then tensors, each made when it is its turn."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._gguf import MAGIC, Strings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from fastattn._args.types import Array, Shape

_VERSION, _ALIGNMENT = 3, 32
_OF_ARRAYS = {
    "u1": 0,
    "i1": 1,
    "u2": 2,
    "i2": 3,
    "u4": 4,
    "i4": 5,
    "f4": 6,
    "b1": 7,
    "u8": 10,
    "i8": 11,
    "f8": 12,
}


class Encoded(bytes):
    """A value as it lies in a file, behind its type."""


class Entry(NamedTuple):
    """A tensor that is written."""

    name: str
    shape: Shape
    number: int  # of its type
    nbytes: int
    parts: Callable[[], Iterable[Array]]  # makes what is written one after another


def write(path: Path, values: Mapping[str, Any], entries: Iterable[Entry]) -> None:
    """Write a file over `path`. Values are bools, ints, floats, strings, `Strings`, arrays or `Encoded`."""
    entries = list(entries)
    header = [MAGIC, struct.pack("<IQQ", _VERSION, len(entries), len(values))]
    for name, value in values.items():
        header += [_string(name), _value(value)]
    at = 0
    for entry in entries:
        axes = entry.shape[::-1]
        header += [_string(entry.name), struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, entry.number, at)]
        at += _aligned(entry.nbytes)
    with path.open("wb") as file:
        begin = b"".join(header)
        file.write(begin.ljust(_aligned(len(begin)), b"\0"))
        for entry in entries:
            begun = file.tell()
            for part in entry.parts():
                file.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
            if file.tell() != begun + entry.nbytes:
                raise AssertionError(f"fastattn: {entry.name} has not the size that its header says")
            file.write(bytes(_aligned(entry.nbytes) - entry.nbytes))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _string(x: str) -> bytes:
    data = x.encode()
    return struct.pack("<Q", len(data)) + data


def _value(x: Any) -> bytes:
    """The type and the bytes of a value."""
    if isinstance(x, Encoded):
        return x
    if isinstance(x, bool):
        return struct.pack("<I?", 7, x)
    if isinstance(x, int):
        return struct.pack("<II", 4, x) if 0 <= x < 1 << 32 else struct.pack("<Iq", 11, x)
    if isinstance(x, float):
        return struct.pack("<If", 6, x)
    if isinstance(x, str):
        return struct.pack("<I", 8) + _string(x)
    if isinstance(x, Strings):
        return struct.pack("<IIQ", 9, 8, x.number) + x.raw
    kind = _OF_ARRAYS[x.dtype.str[1:]]
    return struct.pack("<IIQ", 9, kind, len(x)) + bytes(x.astype(x.dtype.newbyteorder("<")).tobytes())
