"""Files of texts that commands read, and of vectors that they write, a part at a time."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.values import short
from fastattn.models._files import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from typing import BinaryIO, TextIO

    from fastattn._args.types import Array

_COLUMN = "text"
_BLOCK = 8192  # rows of a Parquet file that are read or written at a time
_MOST_CHARACTERS = 2**31 - 1  # of a field in a CSV file; the module's own limit is 131072


@dataclass(frozen=True)
class Texts:
    """The texts of a file, or of the standard input; the file's suffix says what it holds."""

    path: Path | None
    column: str | None  # in files that have columns
    option: str = "--column"  # that names it

    def __post_init__(self) -> None:
        kind = "the standard input" if self.path is None else f"a file {self.path.suffix!r}"
        if self.column is not None and self._columns is None:
            expected = f"it for {', '.join(_COLUMNS)}"
            raise ValueError(
                f"{self.option} is {self.column!r} for {kind}, which is lines of text; expected {expected}"
            )
        if self.path is not None and not self.path.exists():
            expected = (
                "a file of texts (a text itself comes by the standard input: echo TEXT | python -m ...)"
            )
            raise ValueError(f"FILE {str(self.path)!r} is not there; expected {expected}")

    @property
    def again(self) -> bool:
        """Whether they can be read a second time, which a pipe cannot."""
        return self.path is not None and self.path.is_file()

    @property
    def _columns(self) -> Callable[[BinaryIO, str], Iterator[Any]] | None:
        return None if self.path is None else _COLUMNS.get(self.path.suffix.lower())

    def __iter__(self) -> Iterator[str]:
        name, number = "the standard input" if self.path is None else str(self.path), 0
        read, unit = (_lines, "line") if self._columns is None else (self._columns, "row")
        try:
            with _binary(self.path) as file:
                for text in map(_text, read(file, self.column or _COLUMN)):
                    yield text
                    number += 1
        except OSError as error:
            raise ValueError(f"FILE {name!r} cannot be read, {error.strerror or error}") from error
        except UnicodeError as error:
            raise ValueError(f"{name} is not UTF-8 in {unit} {number + 1}: {error}") from error
        except _NotThere as error:
            raise ValueError(f"{name}: {error}") from None
        except ValueError as error:
            raise ValueError(f"{name}, {unit} {number + 1}: {error}") from error

    def require_other(self, output: Path) -> None:
        """Raise if the file is the one that will be written."""
        if self.path is not None and output.exists() and output.samefile(self.path):
            raise ValueError(f"FILE {str(self.path)!r} is written by --output; expected another file")


class _NotThere(ValueError):
    """A column is not in a file, or is there twice."""


@contextmanager
def _binary(path: Path | None) -> Iterator[BinaryIO]:
    if path is None:
        yield sys.stdin.buffer
        return
    with path.open("rb") as file:
        yield file


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{short(value)} is no text; expected a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON may hold such
        what = f"{value[error.start : error.end]!r}, half of a surrogate pair"
        raise ValueError(f"the text has {what}; expected whole characters") from None
    return value


def _lines(file: BinaryIO, column: str) -> Iterator[str]:
    """Lines of text; only a line feed ends one, or a carriage return before it."""
    for line in file:
        yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")


def _json_lines(file: BinaryIO, column: str) -> Iterator[Any]:
    for i, line in enumerate(_lines(file, column)):
        line = line if i else line.removeprefix("\ufeff")
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except RecursionError as error:
            raise ValueError(str(error)) from None
        if not isinstance(row, dict) or column not in row:
            raise ValueError(f"{short(row)} has no {column!r}; expected it (--column names another)")
        yield row[column]


def _csv(file: BinaryIO, column: str) -> Iterator[str]:
    csv.field_size_limit(_MOST_CHARACTERS)
    lines = (line.decode("utf-8") for line in file)
    rows = csv.reader(chain((line.removeprefix("\ufeff") for line in islice(lines, 1)), lines), strict=True)
    try:
        names = next(rows, [])
        index = _index(column, names)
        for row in filter(None, rows):  # without empty lines
            if len(row) != len(names):
                raise ValueError(f"{len(row)} fields; expected {len(names)}, as in the first line")
            yield row[index]
    except csv.Error as error:
        raise ValueError(f"no CSV: {error}") from error


def _parquet(file: BinaryIO, column: str) -> Iterator[Any]:
    parquet = parquet_library().ParquetFile(file)
    _index(column, parquet.schema_arrow.names)
    for batch in parquet.iter_batches(_BLOCK, columns=[column]):
        yield from batch.column(0).to_pylist()


def _index(column: str, names: list[str]) -> int:
    """Index of the column with this name."""
    if column not in names:
        there = ", ".join(map(short, names)) or "none"
        raise _NotThere(f"column {column!r} is not there; expected one of {there} (--column names it)")
    if names.count(column) > 1:
        raise _NotThere(f"{names.count(column)} columns are called {column!r}; expected one of this name")
    return names.index(column)


_COLUMNS: dict[str, Callable[[BinaryIO, str], Iterator[Any]]] = {
    ".jsonl": _json_lines,
    ".csv": _csv,
    ".parquet": _parquet,
}


def parquet_library() -> Any:
    require("pyarrow")
    return importlib.import_module("pyarrow.parquet")


def write_json_lines(blocks: Iterable[Array], file: TextIO) -> None:
    """One JSON list of numbers a line, each with as many digits as tell it from its neighbours."""
    for vectors in blocks:
        for vector in vectors:
            file.write(f"[{', '.join(map(str, vector))}]\n")
        file.flush()


def _write_json(path: Path, blocks: Iterable[Array], empty: Array) -> None:
    with path.open("w", encoding="utf-8") as file:
        write_json_lines(blocks, file)


def _write_npy(path: Path, blocks: Iterable[Array], empty: Array) -> None:
    """An array, whose header is written again when its rows are counted; NumPy leaves room for any number."""
    header = {"descr": empty.dtype.str, "fortran_order": False, "shape": empty.shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        rows = 0
        for vectors in blocks:
            file.write(np.ascontiguousarray(vectors).data)
            rows += len(vectors)
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, {**header, "shape": (rows, *empty.shape[1:])})


def _write_parquet(path: Path, blocks: Iterable[Array], empty: Array) -> None:
    """One column, "embedding", of lists of one length."""
    parquet, arrow = parquet_library(), require("pyarrow")
    kind = arrow.list_(arrow.from_numpy_dtype(empty.dtype), empty.shape[1])
    schema = arrow.schema([("embedding", kind)])
    with parquet.ParquetWriter(path, schema) as writer:
        held: list[Array] = []

        def write() -> None:
            values = arrow.array(np.concatenate([empty, *held]).reshape(-1))
            column = arrow.FixedSizeListArray.from_arrays(values, type=kind)
            writer.write_table(arrow.table([column], schema=schema))
            held.clear()

        for block in blocks:
            held.append(block)
            if sum(map(len, held)) >= _BLOCK:
                write()
        if held:
            write()


# By suffix: what writes blocks of vectors to a path, given none, `empty`, for their length and type.
WRITERS: dict[str, Callable[[Path, Iterable[Array], Array], None]] = {
    ".npy": _write_npy,
    ".jsonl": _write_json,
    ".parquet": _write_parquet,
}
