"""Sizes of tasks that suit this machine, src/tuning.inc: a small file, read before the first compiled call.

``python -m fastattn tune`` measures and writes it. It says of what machine it is: elsewhere, it is ignored.
No bit of a result depends on any size.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastattn._engine import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLE = "FASTATTN_TUNING"
FORMAT = 1
MOST_BYTES = 1 << 16  # of a file; those that are written have a few hundred

_said: str | None = None  # what `said` returns; None until the file was looked for


class _AnotherMachine(Exception):
    """A file that is in order, but of a machine with another instruction set, cache or number of threads."""


def path() -> Path | None:
    """Where the file is, or would be; None if FASTATTN_TUNING is "off"."""
    if value := os.environ.get(VARIABLE):
        return None if value == "off" else Path(value)
    return usual_path()


def usual_path() -> Path:
    """Where the file is unless FASTATTN_TUNING says another place."""
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    home = folder if os.path.isabs(folder) else os.path.expanduser("~/.config")
    return Path(home, "fastattn", "tuning.json")


def machine() -> dict[str, Any]:
    """What a file says of the machine it was measured on."""
    return {
        "isa": settings.core.get_isa(),
        "level2_cache": settings.core.LEVEL2_CACHE,
        "num_threads": settings.current.num_threads,
    }


def defaults() -> dict[str, int]:
    """The value of each size that is used without a file."""
    return {name: default for name, (_, default, _, _) in settings.core.SIZES.items()}


def load(read: bool = True) -> None:
    """Read the file, once in a process; without `read`, have it never read."""
    global _said
    if _said is not None:
        return
    settings.core.on_first_use(None)
    _said = "defaults"  # also if a warning is raised as an error
    if read:
        _said, warning = _read()
        if warning:
            settings.warn(f"fastattn: {warning}; sizes are the defaults", RuntimeWarning)


def said() -> str:
    """Which sizes are not the defaults, and where they come from."""
    load()
    return _said or ""


def _read() -> tuple[str, str]:
    """Use what the file says. Returns what `said` says, and a warning or ""."""
    file = path()
    if file is None:
        return f"defaults: {VARIABLE} is off", ""
    try:
        sizes = _sizes_of(json.loads(_content(file)))
    except _AnotherMachine as error:
        return f"defaults: {file} is ignored, {error}", ""
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"it is not JSON: {reason}"
        if isinstance(error, OSError) and file == usual_path():  # which nobody has asked for
            missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
            return "defaults" if missing else f"defaults: {file}: {reason}", ""
        return f"defaults: {file}: {reason}", f"{file}: {reason}"
    settings.core.set_sizes(sizes)
    usual = defaults()
    changed = [f"{name} {value} (not {usual[name]})" for name, value in sizes.items() if value != usual[name]]
    return f"{file}: {', '.join(changed) or 'all are the defaults'}", ""


def _content(file: Path) -> str:
    """The text of a small regular file: a pipe would never end, or never begin."""
    if file.exists() and not file.is_file():
        raise ValueError("it is not a regular file")
    with file.open(encoding="utf-8") as opened:
        text = opened.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    return text


def _sizes_of(content: Any) -> dict[str, int]:
    """{name: value} of a file's content, checked; raise if it is of another machine or wrong."""
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}; expected an object")
    for name, here in {"format": FORMAT, **machine()}.items():
        if name not in content:
            raise ValueError(f"it has no {name!r}")
        if content[name] != here:
            raise _AnotherMachine(f"its {name} is {content[name]!r} and not {here!r}")
    sizes, known = content.get("sizes"), settings.core.SIZES
    if not isinstance(sizes, dict):
        raise ValueError("it has no object 'sizes'")
    for name, value in sizes.items():
        if name not in known:
            raise ValueError(f"there is no size {name!r}; expected some of {', '.join(known)}")
        _, _, least, most = known[name]
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{name} is {value!r}; expected an integer, {least} to {most}")
    return sizes


def write(file: Path, sizes: dict[str, int]) -> None:
    """Write `sizes`, the others being the defaults, for this machine. No reader sees half a file."""
    content = {"format": FORMAT, **machine(), "sizes": sizes}
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    new.replace(file)


@contextmanager
def forced(**sizes: int) -> Iterator[None]:
    """Force sizes inside a ``with`` block, for tests and measurements; every thread sees them."""
    load()
    before = settings.core.get_sizes()
    settings.core.set_sizes(sizes)
    try:
        yield
    finally:
        settings.core.set_sizes(before)
