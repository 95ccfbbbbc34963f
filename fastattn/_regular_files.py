"""Regular files: read without being mapped, and written whole.

What the package safetensors 0.8 does not do, and other formats have no library for:

- To touch what was cut off a mapped file ends the process, and `safe_open` maps files. With
  ``backend="pread"`` it does not, but then each slice reads the whole tensor.
- It opens pipes, and waits for a writer; a device may have no end.
- `save_file` renames a whole file, but with mode 0600, over a symbolic link, and before it is on the disk.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from threading import Lock

from fastattn._args.types import Array, Self, Shape

BEGUN = ".begun"  # ends the name of a file that is not whole
_OWNER = stat.S_IRUSR | stat.S_IWUSR
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_AT_ONCE = getattr(os, "O_NONBLOCK", 0)  # Windows has no pipes among files


def irregular(path: str | os.PathLike[str]) -> str:
    """A word for a thing at `path` that no file can replace, such as "a pipe"; else ""."""
    try:
        return _KINDS.get(stat.S_IFMT(os.stat(path).st_mode), "")
    except FileNotFoundError:
        return ""


def regular(path: str | os.PathLike[str]) -> FileIO:
    """The regular file at `path`, open for reading; an OSError for anything else."""
    file = open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | _AT_ONCE))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        kind = irregular(path) or "no file"
        raise OSError(errno.EINVAL, f"it is {kind}; expected a regular file", os.fsdecode(path))
    return file


class Tensors:
    """Tensors by name, of which `fill` reads a part into an array that `empty` makes."""

    shape: Callable[[str], Shape]
    empty: Callable[[str, Shape], Array]
    fill: Callable[[Array, str, int], None]

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


class OpenFile(Tensors):
    """A file whose bytes several threads may read.

    `error` makes an exception of a message, for a file that does not have what its header says.
    """

    def __init__(self, path: str | os.PathLike[str], error: Callable[[str], Exception]):
        self._path, self._error, self._lock = path, error, Lock()
        self._file = regular(path)  # `__exit__` closes it
        try:
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def _read_header(self) -> None:
        """Read what the file says of itself."""
        raise NotImplementedError

    def _bytes(self, begin: int, count: int) -> bytes:
        data = bytearray(count)
        self._read(memoryview(data), begin)
        return bytes(data)

    def _read(self, to: memoryview, begin: int) -> None:
        """Fill `to` with the bytes from `begin` on."""
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


def destination(path: Path, func: str = "") -> Path:
    """The file that a program writes which is told `path`: where that is a symbolic link, its target.

    Raise where something else than a regular file is there, or no folder; `func` begins the message.
    """
    if kind := irregular(path):
        raise ValueError(f"{func}{path} is {kind}; expected a regular file, or the name of a new one")
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if not target.absolute().parent.is_dir():
        came = f"the folder {target.parent} is missing"
        raise FileNotFoundError(f"{func}{came}; expected one to write {target.name} to")
    return target


@contextmanager
def replaced(path: Path, func: str = "") -> Iterator[Path]:
    """An empty file beside `destination(path)`, which takes its place unless the block raises.

    A new file has the mode that the umask leaves, whatever mode the block gives it; one in the place of
    another has that one's, and is seen until then by nobody who may not see the other.
    """
    target = destination(path, func)
    new = target.with_name(f".{target.name}.{secrets.token_hex(8)}{BEGUN}")
    try:
        try:
            new.touch(exist_ok=False)
            if target.exists():
                new.chmod(_mode(target) | _OWNER)
            mode = _mode(new)
            yield new
            new.chmod(mode)
            with new.open("rb+") as file:
                os.fsync(file.fileno())
            if target.exists():
                new.chmod(_mode(target))
            os.replace(new, target)
        finally:
            new.unlink(missing_ok=True)
    finally:  # Ctrl-C may have ended the line before this one
        new.unlink(missing_ok=True)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode) & 0o777
