"""GGUF files: what they say of a model, and tensors by name, decoded as they are asked for.

A file is a magic number, a version, the counts of tensors and of keys; keys, each a name, a type and a value;
for each tensor its name, its shape (reversed), its type and where it lies; and then the tensors. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

import numpy as np

from fastattn._args.types import Array, Shape
from fastattn._args.values import short
from fastattn._formats import FORMATS, Format
from fastattn._regular_files import OpenFile

MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9  # types of values; the others are numbers
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8",
    12: "<f8",
}  # fmt: skip
_PLAIN = {0: ("F32", "<f4"), 1: ("F16", "<f2"), 28: ("F64", "<f8"), 30: ("BF16", "bfloat16")}
_BLOCKS = {x.number: x for x in FORMATS.values()}
# Names of types that are not read, for messages: https://github.com/ggml-org/ggml/blob/master/include/ggml.h
_OTHERS = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip
_MOST_AXES, _MOST_NAME = 4, 64
# What a header may have, whatever the file's size, which may be a hole: bytes, elements of all arrays (the
# vocabulary of Gemma has 1.3 million, in 16 MB), tensors, keys, and bytes of a name.
_MOST_BYTES, _MOST_ELEMENTS, _MOST_TENSORS, _MOST_KEYS, _LONGEST = 1 << 27, 1 << 22, 1 << 16, 1 << 12, 1 << 16
_LENGTH = struct.Struct("<Q").unpack_from
_PIECE = 1 << 20  # bytes of a header that are read at once


class _Tensor(NamedTuple):
    """Where a tensor lies, and what it is of."""

    shape: Shape
    kind: str
    block: Format | None  # None: numbers as NumPy has them
    begin: int  # in the file
    nbytes: int


class Strings(NamedTuple):
    """An array of strings, which is decoded when it is asked for: there may be hundreds of thousands."""

    raw: bytes  # each string behind its length
    number: int

    def decoded(self) -> list[str]:
        """The strings; a UnicodeDecodeError if one is no UTF-8."""
        return [data.decode() for data in self._each()]

    def places(self, texts: Iterable[str]) -> dict[str, int]:
        """Where each of `texts` is that is one of the strings."""
        wanted = {text.encode(): text for text in texts}
        return {wanted[data]: i for i, data in enumerate(self._each()) if data in wanted}

    def _each(self) -> Iterator[bytes]:
        at, raw = 0, self.raw
        for _ in range(self.number):
            begin = at + 8
            at = begin + int.from_bytes(raw[at:begin], "little")
            yield raw[begin:at]


class GgufFile(OpenFile):
    """An open file; everything that its header says is checked.

    `metadata` holds the keys; arrays of numbers are NumPy's, those of strings `Strings`. Rows of tensors in
    `interleaved`, whose heads are of so many rows, come in halves: row 0, 2, ... of a head, then 1, 3, ...
    """

    def _read_header(self) -> None:
        self._size = os.fstat(self._file.fileno()).st_size
        self._at, self._buffer, self._buffered = 0, b"", 0
        self._elements = 0  # of all arrays so far
        self.metadata: dict[str, Any] = {}
        self.interleaved: dict[str, int] = {}
        self._tensors: dict[str, _Tensor] = {}
        if self._take(4) != MAGIC:
            self._wrong("does not begin with 'GGUF'; expected a GGUF file")
        version = self._integer("<u4")
        if version not in (2, 3):
            hint = ", of a machine with the other order of bytes" if version in (2 << 24, 3 << 24) else ""
            self._wrong(f"has version {version}{hint}; expected 2 or 3")
        n_tensors, n_keys = self._count("tensors", 24, _MOST_TENSORS), self._count("keys", 13, _MOST_KEYS)
        for _ in range(n_keys):
            name = self._string("the name of a key", _LONGEST)
            if name in self.metadata:
                self._wrong(f"has the key {short(name)} twice")
            self.metadata[name] = self._value(name, self._integer("<u4"))
        infos = [self._info() for _ in range(n_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not (type(alignment) is int and 0 < alignment <= 1 << 20 and not alignment & (alignment - 1)):
            came = alignment if isinstance(alignment, (int, float, str)) else type(alignment).__name__
            self._wrong(f"has 'general.alignment' {short(came)}; expected a power of two up to 2**20")
        start = -(-self._at // alignment) * alignment
        end = start
        for name, shape, number, offset in sorted(infos, key=lambda info: info[3]):
            tensor = self._placed(name, shape, number, start + offset)
            if offset % alignment:
                self._wrong(f"has {short(name)} at {offset}; expected a multiple of {alignment}")
            if tensor.begin < end:
                self._wrong(f"has {short(name)} at {offset}, where the tensor before it has not ended")
            end = tensor.begin + tensor.nbytes
            if end > self._size:
                self._wrong(f"is truncated: {short(name)} ends at byte {end} of {self._size}")
            self._tensors[name] = tensor
        self.names = [name for name, *_ in infos]
        self._buffer = b""

    def shape(self, name: str) -> Shape:
        """The shape of a tensor, as NumPy has it."""
        return self._tensors[name].shape

    def kind(self, name: str) -> str:
        """The type of a tensor, as the format calls it."""
        return self._tensors[name].kind

    def empty(self, name: str, shape: Shape) -> Array:
        """An uninitialised array for a tensor's numbers, float32 where they are blocks."""
        tensor = self._tensors[name]
        return np.empty(shape, np.float32 if tensor.block else _type_of(tensor.kind))

    def unit(self, name: str) -> int:
        """Elements of a tensor that are read together: those of a block, or of an interleaved head."""
        tensor = self._tensors[name]
        if (head := self.interleaved.get(name)) is not None:
            return head * math.prod(tensor.shape[1:])
        return 1 if tensor.block is None else tensor.block.features

    def split(self, name: str) -> list[str]:
        """Make matrices of the tensor `STEM.weight`, which has three axes; return `STEM.0.weight` and so on.

        The caller puts them into `names`.
        """
        whole = self._tensors.pop(name)
        stem, _, kind = name.rpartition(".")
        count, shape = whole.shape[0], whole.shape[1:]
        size = whole.nbytes // count
        parts = [f"{stem}.{i}.{kind}" for i in range(count)]
        for i, part in enumerate(parts):
            self._tensors[part] = _Tensor(shape, whole.kind, whole.block, whole.begin + i * size, size)
        return parts

    def as_row(self, name: str) -> None:
        """Make a matrix of one row of a vector."""
        tensor = self._tensors[name]
        self._tensors[name] = tensor._replace(shape=(1, *tensor.shape))

    def rows(self, name: str, begin: int, end: int) -> Array:
        """Some rows of a tensor that follow one another."""
        head = self.interleaved.get(name, 1)  # whole heads are read: their rows are put in order together
        first = begin // head * head
        array = self.empty(name, (-(-end // head) * head - first, *self.shape(name)[1:]))
        self.fill(array, name, first * math.prod(array.shape[1:]))
        return array[begin - first : end - first]

    def blocks(self, name: str, begin: int, end: int) -> Array:
        """Rows of a matrix of blocks as they lie there: (rows, bytes)."""
        tensor, head = self._tensors[name], self.interleaved.get(name, 1)
        assert tensor.block is not None
        first, last = begin // head * head, -(-end // head) * head
        row = tensor.shape[-1] // tensor.block.features * tensor.block.nbytes
        data: Array = np.empty((last - first, row), np.uint8)
        self._read(data.data, tensor.begin + first * row)
        if name in self.interleaved:
            data = data.reshape(-1, head // 2, 2, row).swapaxes(1, 2).reshape(-1, row)
        return data[begin - first : end - first]

    def fill(self, array: Array, name: str, begin: int) -> None:
        """Read a contiguous `array` from a tensor, from its element `begin` on.

        That begins a block, and a head if the tensor is interleaved: then the array is of whole heads.
        """
        tensor, flat = self._tensors[name], array.reshape(-1)
        if tensor.block is None:
            self._read(flat.view(np.uint8).data, tensor.begin + begin * array.itemsize)
        else:
            data = np.empty(flat.size // tensor.block.features * tensor.block.nbytes, np.uint8)
            self._read(data.data, tensor.begin + begin // tensor.block.features * tensor.block.nbytes)
            flat[:] = tensor.block.decoded(data)
        if (head := self.interleaved.get(name)) is not None:
            pairs = flat.reshape(-1, head // 2, 2, math.prod(tensor.shape[1:]))
            flat[:] = pairs.swapaxes(1, 2).reshape(-1)

    def _info(self) -> tuple[str, Shape, int, int]:
        """A tensor's name, shape, number of the type, and place."""
        name = self._string("the name of a tensor", _LONGEST)
        axes = self._integer("<u4")
        if not (name and name.isprintable() and len(name) < _MOST_NAME):
            self._wrong(f"has a tensor {short(name)}; expected a name of 1 to {_MOST_NAME - 1} characters")
        if not 1 <= axes <= _MOST_AXES:
            self._wrong(f"has {short(name)} with {axes} axes; expected 1 to {_MOST_AXES}")
        shape = tuple(self._integer("<u8") for _ in range(axes))[::-1]
        if 0 in shape:  # no bytes of the file would bound the other axes
            self._wrong(f"has {short(name)} with shape {shape}; expected axes of at least 1")
        return name, shape, self._integer("<u4"), self._integer("<u8")

    def _placed(self, name: str, shape: Shape, number: int, begin: int) -> _Tensor:
        """The tensor, whose numbers make whole blocks."""
        if name in self._tensors:
            self._wrong(f"has the tensor {short(name)} twice")
        size = math.prod(shape)
        if number in _PLAIN:
            kind, nbytes = _PLAIN[number][0], size * (2 if number in (1, 30) else 8 if number == 28 else 4)
            return _Tensor(shape, kind, None, begin, nbytes)
        block = _BLOCKS.get(number)
        if block is None:
            called = _OTHERS.get(number, f"number {number}")
            expected = ", ".join([kind for kind, _ in _PLAIN.values()] + list(FORMATS))
            self._wrong(f"has {short(name)} of type {called}; expected one of {expected}")
        if shape[-1] % block.features:
            self._wrong(
                f"has {short(name)} with rows of {shape[-1]} in {block.name};"
                f" expected multiples of {block.features}"
            )
        return _Tensor(shape, block.name, block, begin, size // block.features * block.nbytes)

    def _value(self, name: str, kind: int) -> Any:
        """The value of the key `name`, of a `kind` of values."""
        if kind in _NUMBERS:
            return np.frombuffer(self._take(np.dtype(_NUMBERS[kind]).itemsize), _NUMBERS[kind])[0].item()
        if kind == _STRING:
            return self._string(short(name))
        if kind != _ARRAY:
            self._wrong(f"has {short(name)} of type {kind}; expected a number, a string or an array")
        kind = self._integer("<u4")
        if kind in _NUMBERS:
            size = np.dtype(_NUMBERS[kind]).itemsize
            return np.frombuffer(self._take(self._elements_of(name, size) * size), _NUMBERS[kind])
        if kind != _STRING:
            self._wrong(f"has {short(name)}, an array of type {kind}; expected one of numbers or strings")
        return self._strings(self._elements_of(name, 8))

    def _elements_of(self, name: str, least: int) -> int:
        """The number of elements of the array `name`, within the bound of those of all arrays."""
        count = self._count(short(name), least, _MOST_ELEMENTS - self._elements)
        self._elements += count
        return count

    def _count(self, what: str, least: int, most: int) -> int:
        """A number of things, each of at least so many bytes: no more than the file can hold, and `most`."""
        count = self._integer("<u8")
        if count * least > self._size - self._at:
            self._wrong(
                f"counts {count} in {what}; expected no more than the file's {self._size} bytes can hold"
            )
        if count > most:
            self._wrong(f"counts {count} in {what}; expected at most {most}")
        return count

    def _string(self, what: str, most: int = _MOST_BYTES) -> str:
        length = self._integer("<u8")
        self._require(length)
        if length > most:
            self._wrong(f"has {length} bytes in {what}; expected at most {most}")
        data = self._take(length)
        try:
            return data.decode()
        except UnicodeDecodeError:
            self._wrong(f"has bytes in {what} that are no UTF-8: {data[:20]!r}")

    def _strings(self, count: int) -> Strings:
        """The next strings, of which the lengths alone are read."""
        begin, left = self._at, count
        while left:
            self._take(8)  # so much is in the buffer now
            first, buffer = self._at - 8 - self._buffered, self._buffer
            last = len(buffer) - 8
            while left and first <= last:
                first += 8 + _LENGTH(buffer, first)[0]
                left -= 1
            self._at = self._buffered + first
            self._require(0)
        return Strings(self._bytes(begin, self._at - begin), count)

    def _integer(self, kind: str) -> int:
        return int.from_bytes(self._take(int(kind[2])), "little")

    def _take(self, count: int) -> bytes:
        """The next bytes of the header."""
        self._require(count)
        first = self._at - self._buffered
        if first + count > len(self._buffer):
            self._buffered = self._at
            self._buffer = self._bytes(self._at, min(max(count, _PIECE), self._size - self._at))
            first = 0
        self._at += count
        return self._buffer[first : first + count]

    def _require(self, count: int) -> None:
        """Raise unless the header may have so many more bytes."""
        end = self._at + count
        if end > self._size:
            self._wrong(f"is truncated: its header needs byte {end} of {self._size}")
        if end > _MOST_BYTES:
            self._wrong(f"has a header that needs byte {end}; expected at most {_MOST_BYTES}")

    def _wrong(self, what: str) -> NoReturn:
        raise self._error(f"{self._path} {what}")


def _type_of(kind: str) -> np.dtype[Any]:
    """NumPy's type of plain numbers."""
    return np.dtype(next(dtype for name, dtype in _PLAIN.values() if name == kind))
