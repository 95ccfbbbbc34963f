"""Files of the command ``embed``: texts to read, vectors to write, and what an interrupted run has done.

Texts are read one at a time, and vectors are written as they come, so memory does not grow with their number.
"""

from __future__ import annotations

import csv
import hashlib
import importlib
import json
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

try:
    import fcntl
except ImportError:  # Windows has none: nothing tells two runs of one output there
    fcntl = None  # type: ignore[assignment]

from fastattn._args.values import short
from fastattn.models._files import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from typing import BinaryIO, TextIO

    from fastattn._args.types import Array


SUFFIXES = (".npy", ".jsonl", ".parquet")
_SAID = ".part.json"  # what a file ends in that says of which run the rows beside it are
_COLUMN = "text"
_BLOCK = 8192  # rows of a Parquet file that are read or written at a time
_MOST_CHARACTERS = 2**31 - 1  # of a field in a CSV file; the module's own limit is 131072
_PREFIX = 1 << 20  # bytes of a file that are read at a time


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
            raise ValueError(f"FILE {str(self.path)!r} is not there; expected a file of texts")

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

    def survey(self) -> tuple[int, str]:
        """How many there are, and a digest of them all; what is no text is an error."""
        count, digest = 0, hashlib.sha256()
        for text in self:
            _add(digest, text)
            count += 1
        return count, digest.hexdigest()

    def surveyed(self, digest: str) -> Iterator[str]:
        """The texts; `Changed` at the end if their digest is another."""
        found = hashlib.sha256()
        for text in self:
            _add(found, text)
            yield text
        if found.hexdigest() != digest:
            raise Changed(f"FILE {str(self.path)!r} was changed while it was read; expected it to stay")

    def require_other(self, output: Path) -> None:
        """Raise if the file is one of those that `Unfinished` writes."""
        for path in _files(output):
            if self.path is not None and path.exists() and path.samefile(self.path):
                raise ValueError(f"FILE {str(self.path)!r} is written by --output; expected another file")


def _add(digest: Any, text: str) -> None:
    data = text.encode()
    digest.update(len(data).to_bytes(8, "little") + data)


class Changed(ValueError):
    """Texts are not those of the survey."""


class _NotThere(ValueError):
    """A column is not in a file."""


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
    rows = csv.reader((line.decode("utf-8") for line in file), strict=True)
    try:
        names = [name.removeprefix("\ufeff") for name in next(rows, [])]
        place = _place(column, names)
        for row in filter(None, rows):  # without empty lines
            if len(row) != len(names):
                raise ValueError(f"{len(row)} fields; expected {len(names)}, as in the first line")
            yield row[place]
    except csv.Error as error:
        raise ValueError(f"no CSV: {error}") from error


def _parquet(file: BinaryIO, column: str) -> Iterator[Any]:
    parquet = _parquet_library().ParquetFile(file)
    _place(column, parquet.schema_arrow.names)
    for batch in parquet.iter_batches(_BLOCK, columns=[column]):
        yield from batch.column(0).to_pylist()


def _place(column: str, names: list[str]) -> int:
    """Which of the columns is called so."""
    if column not in names:
        there = ", ".join(map(short, names)) or "none"
        raise _NotThere(f"column {column!r} is not there; expected one of {there} (--column names it)")
    return names.index(column)


_COLUMNS: dict[str, Callable[[BinaryIO, str], Iterator[Any]]] = {
    ".jsonl": _json_lines,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _parquet_library() -> Any:
    require("pyarrow")
    return importlib.import_module("pyarrow.parquet")


def digest_of_model(folder: Path) -> str:
    """A digest of the files that a model is loaded from."""
    digest = hashlib.sha256()
    found = (*folder.glob("*"), *folder.glob("*/*"))
    files = (path for path in found if path.suffix in (".json", ".safetensors") and path.is_file())
    for path in sorted(
        path for path in files if not path.name.endswith(_SAID)
    ):  # an output may lie there, too
        digest.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while data := file.read(_PREFIX):
                digest.update(data)
    return digest.hexdigest()


def _files(output: Path) -> tuple[Path, Path, Path, Path]:
    """OUTPUT, and what is beside it for now: rows, what run they are of, and OUTPUT in the making."""
    part, said, made = (output.with_name(output.name + end) for end in (".part", _SAID, ".part.out"))
    return output, part, said, made


def require_writable(suffix: str) -> None:
    """Raise unless what writes such a file is installed."""
    if suffix == ".parquet":
        _parquet_library()


@dataclass
class Unfinished:
    """The vectors of a run until all are there: rows of a .npy file, in OUTPUT.part.

    OUTPUT.part.json says what run it is. A run that was interrupted has whole rows, the first ones; a run of
    the same texts, model and options goes on behind them. OUTPUT itself appears when all are there.
    """

    output: Path
    features: int
    dtype: np.dtype[Any]
    run: dict[str, Any] | None  # what tells it from others; None: it cannot be repeated, and nothing stays
    rows: int = 0
    _file: BinaryIO = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _, self._part, self._said, self._made = _files(self.output)
        try:
            self._file, goes_on = self._part.open("x+b"), False
        except FileExistsError:
            self._file, goes_on = self._part.open("r+b"), True
        try:
            self._lock()
            if goes_on:
                self._require_same_run()
        except ValueError:
            self._file.close()
            raise
        if not goes_on and self.run is not None:
            self._said.write_text(json.dumps(self.run, indent=1) + "\n", encoding="utf-8")
        self._write_header()
        self._start, size = self._file.tell(), self.features * self.dtype.itemsize
        self.rows = (self._file.seek(0, os.SEEK_END) - self._start) // size
        self._file.truncate(self._start + self.rows * size)  # a row of which only a part was written
        self._file.seek(0, os.SEEK_END)

    def _lock(self) -> None:
        """Keep OUTPUT.part for this run until it is closed."""
        alone = True
        try:
            if fcntl is not None:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            alone = False
        except OSError:  # a file system without locks
            pass
        try:
            there = os.path.samestat(os.fstat(self._file.fileno()), self._part.stat())
        except FileNotFoundError:  # it has just become OUTPUT
            there = False
        if not alone or not there:
            raise ValueError(f"another run is writing {self._part}; expected to be alone")

    def _require_same_run(self) -> None:
        remedy = f"remove {self._part} to begin again"
        if self.run is None:
            raise ValueError(f"{self._part} is of a run with a file of texts; {remedy}")
        try:
            said = json.loads(self._said.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise ValueError(
                f"{self._part} is of a run that {self._said.name} does not tell; {remedy}"
            ) from None
        names = [
            name for name, value in self.run.items() if not isinstance(said, dict) or said.get(name) != value
        ]
        if names:
            raise ValueError(f"{self._part} is of a run with another {', '.join(names)}; {remedy}")

    def _write_header(self) -> None:
        """Of as many rows as there are: NumPy leaves room for any number."""
        self._file.seek(0)
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.rows, self.features)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def write(self, vectors: Array) -> None:
        """Append vectors (n, features)."""
        self._file.write(np.ascontiguousarray(vectors).data)
        self._file.flush()
        self.rows += len(vectors)

    def finish(self) -> None:
        """Make OUTPUT of the rows."""
        self._write_header()
        made = self._part
        if self.output.suffix != ".npy":
            made = self._made
            _CONVERTERS[self.output.suffix](self._blocks(), made, self)
        if fcntl is None:  # Windows renames no open file
            self._file.close()
        self._said.unlink(missing_ok=True)
        os.replace(made, self.output)
        if made is not self._part:
            self._part.unlink()
        self._file.close()  # which ends the lock: from now on, what is called OUTPUT.part is another run's

    def _blocks(self) -> Iterator[Array]:
        """The rows, a block at a time."""
        left = self.rows
        with self._part.open("rb") as file:
            file.seek(self._start)
            while left:
                count = min(left, _BLOCK)
                block = np.fromfile(file, self.dtype, count * self.features)
                yield block.reshape(count, self.features)
                left -= count

    def discard(self) -> None:
        """Leave no rows: they are of other texts than `run` says."""
        self.run = None
        self._said.unlink(missing_ok=True)

    def close(self) -> None:
        """Leave the rows for a run that goes on; if there can be none, leave nothing."""
        if self._file.closed:
            return
        if fcntl is None:
            self._file.close()
        if self.run is None:
            self._part.unlink(missing_ok=True)
        elif self._part.exists() and self.rows:
            print(
                f"{self.rows} vectors are in {self._part}: the same command goes on from there",
                file=sys.stderr,
            )
        self._file.close()


def write_json_lines(blocks: Iterable[Array], file: TextIO) -> None:
    """One JSON list of numbers a line, each with as many digits as tell it from its neighbours."""
    for vectors in blocks:
        for vector in vectors:
            file.write(f"[{', '.join(map(str, vector))}]\n")
        file.flush()


def _make_json_lines(blocks: Iterable[Array], path: Path, unfinished: Unfinished) -> None:
    with path.open("w", encoding="utf-8") as file:
        write_json_lines(blocks, file)


def _make_parquet(blocks: Iterable[Array], path: Path, unfinished: Unfinished) -> None:
    """One column, "embedding", of lists of one length; row i is the vector of text i."""
    parquet, arrow = _parquet_library(), require("pyarrow")
    kind = arrow.list_(arrow.from_numpy_dtype(unfinished.dtype), unfinished.features)
    schema = arrow.schema([("embedding", kind)])
    with parquet.ParquetWriter(path, schema) as writer:
        for block in blocks:
            column = arrow.FixedSizeListArray.from_arrays(arrow.array(block.reshape(-1)), type=kind)
            writer.write_table(arrow.table([column], schema=schema))


_CONVERTERS: dict[str, Callable[[Iterable[Array], Path, Unfinished], None]] = {
    ".jsonl": _make_json_lines,
    ".parquet": _make_parquet,
}
