"""Files that the command ``embed`` writes: vectors as they come, and what an interrupted run has done."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

try:
    import fcntl
except ImportError:  # Windows has none: nothing tells two runs of one output there
    fcntl = None  # type: ignore[assignment]

from fastattn._atomic import begin, put
from fastattn._cli_texts import parquet_library
from fastattn.models._files import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from typing import BinaryIO, TextIO

    from fastattn._args.types import Array

SUFFIXES = (".npy", ".jsonl", ".parquet")
_SAID = ".part.json"  # what a file ends in that says of which run the rows beside it are
_BLOCK = 8192  # rows of a Parquet file that are written at a time
_PREFIX = 1 << 20  # bytes of a file that are read at a time


def digest_of_model(folder: Path) -> str:
    """A digest of the files that a model is loaded from."""
    digest = hashlib.sha256()
    found = (*folder.glob("*"), *folder.glob("*/*"))
    files = (path for path in found if path.suffix in (".json", ".safetensors") and path.is_file())
    for path in sorted(path for path in files if not path.name.endswith(_SAID)):  # OUTPUT may lie there, too
        digest.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while data := file.read(_PREFIX):
                digest.update(data)
    return digest.hexdigest()


def files_of(output: Path) -> tuple[Path, Path, Path, Path]:
    """OUTPUT, and what is beside it for now: rows, what run they are of, and OUTPUT in the making."""
    part, said, made = (output.with_name(output.name + end) for end in (".part", _SAID, ".part.out"))
    return output, part, said, made


def require_writable(suffix: str) -> None:
    """Raise unless what writes such a file is installed."""
    if suffix == ".parquet":
        parquet_library()


@dataclass
class Unfinished:
    """The vectors of a run until all are there: rows of a .npy file, in OUTPUT.part.

    OUTPUT.part.json says what run it is. A run that was interrupted has whole rows, the first ones; a run of
    the same texts, model and options goes on after them. OUTPUT itself appears when all are there.
    """

    output: Path
    features: int
    dtype: np.dtype[Any]
    run: dict[str, Any] | None  # what tells it from others; None: it cannot be repeated, and nothing stays
    rows: int = 0
    _file: BinaryIO = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _, self._part, self._said, self._made = files_of(self.output)
        try:
            begin(self._part, self.output)
            goes_on = False
        except FileExistsError:
            goes_on = True
        self._file = self._part.open("r+b")
        try:
            self._lock()
            if goes_on:
                self._require_same_run()
            elif self.run is not None:
                self._said.write_text(json.dumps(self.run, indent=1) + "\n", encoding="utf-8")
        except BaseException:
            self._file.close()
            if not goes_on:  # Ctrl-C: nothing says yet what run this is
                self._part.unlink(missing_ok=True)
            raise
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
        names = _others(said, self.run)
        if names:
            raise ValueError(f"{self._part} is of a run with another {', '.join(names)}; {remedy}")

    def _write_header(self) -> None:
        """Header of an array with so many rows; NumPy leaves room for any number."""
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
            made.unlink(missing_ok=True)  # of a run that ended here
            begin(made, self.output)
            _CONVERTERS[self.output.suffix](self._blocks(), made, self)
        if fcntl is None:  # Windows renames no open file
            self._file.close()
        self._said.unlink(missing_ok=True)
        put(made, self.output)
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


def _others(said: Any, run: dict[str, Any]) -> list[str]:
    """The names under which a run differs from what is `said`; of options, each one's."""
    held = said if isinstance(said, dict) else {}
    names = []
    for name, value in run.items():
        if isinstance(value, dict):
            names += _others(held.get(name), value)
        elif name not in held or held[name] != value:
            names.append(name)
    return names


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
    parquet, arrow = parquet_library(), require("pyarrow")
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
