"""Files that are written whole: a reader finds the old file or the new one, after a crash, too."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BEGUN = ".begun"  # ends the name of a file that is not whole
_OWNER = stat.S_IRUSR | stat.S_IWUSR
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def irregular(path: str | os.PathLike[str]) -> str:
    """A word for a thing at `path` that no file can replace, such as "a pipe"; else ""."""
    try:
        return _KINDS.get(stat.S_IFMT(os.stat(path).st_mode), "")
    except FileNotFoundError:
        return ""


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


def begin(new: Path, target: Path) -> None:
    """Make the empty file `new`, for nobody's eyes but those that may see `target`, if that is there."""
    new.touch(exist_ok=False)
    if target.exists():
        new.chmod(_mode(target) | _OWNER)


def put(new: Path, target: Path) -> None:
    """Rename `new` to `target`; it gets the mode of a file that it replaces."""
    with new.open("rb+") as file:
        os.fsync(file.fileno())
    if target.exists():
        new.chmod(_mode(target))
    os.replace(new, target)


@contextmanager
def replaced(path: Path, func: str = "") -> Iterator[Path]:
    """An empty file beside `destination(path)`, which takes its place unless the block raises.

    A new file has the mode that the umask leaves, whatever mode the block gives it.
    """
    target = destination(path, func)
    new = target.with_name(f".{target.name}.{secrets.token_hex(8)}{BEGUN}")
    try:
        try:
            begin(new, target)
            mode = _mode(new)
            yield new
            new.chmod(mode)
            put(new, target)
        finally:
            new.unlink(missing_ok=True)
    finally:  # Ctrl-C may have ended the line before this one
        new.unlink(missing_ok=True)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode) & 0o777
