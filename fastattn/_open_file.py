"""Files open for reading. None is mapped: to touch what is cut off a mapped file ends the process.

Only regular files are opened: a pipe would be waited for, and a device may have no end.
"""

from __future__ import annotations

import errno
import os
import stat
from threading import Lock
from typing import TYPE_CHECKING

from fastattn._atomic import irregular

if TYPE_CHECKING:
    from collections.abc import Callable
    from io import FileIO

    from typing_extensions import Self

_AT_ONCE = getattr(os, "O_NONBLOCK", 0)  # Windows has no pipes among files


def regular(path: str | os.PathLike[str]) -> FileIO:
    """The regular file at `path`, open for reading; an OSError for anything else."""
    file = open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | _AT_ONCE))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        kind = irregular(path) or "no file"
        raise OSError(errno.EINVAL, f"it is {kind}; expected a regular file", os.fsdecode(path))
    return file


class OpenFile:
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
