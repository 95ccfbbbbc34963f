"""Sizes of tasks that suit this machine, src/tuning.inc: a small file, read before the first compiled call.

``python -m fastattn tune`` measures and writes it, with the instruction set, cache and number of threads.
While the process has others, the file is ignored. No bit of a result depends on any size.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fastattn._atomic import replaced
from fastattn._engine import settings

VARIABLE = "FASTATTN_TUNING"
FORMAT = 1
MOST_BYTES = 1 << 16  # of a file; those that are written have a few hundred


class _File(NamedTuple):
    """Sizes that were found, once in a process."""

    name: str
    content: Any = None
    wrong: str = ""  # why there is no content, of which a warning is due
    said: str = ""  # what `said` says, where nothing is wrong and there is no content


_file: _File | None = None  # None until it was looked for
_said = "defaults"  # what `said` returns
_warned = False
_held = False  # inside `forced`


class _AnotherMachine(Exception):
    """A file that is in order, but of a machine with another instruction set, cache or number of threads."""


def path() -> Path | None:
    """Path of the file, which need not exist; None if FASTATTN_TUNING is "off"."""
    if value := os.environ.get(VARIABLE):
        return None if value == "off" else Path(value)
    return usual_path()


def usual_path() -> Path:
    """Path of the file unless FASTATTN_TUNING says another one."""
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    home = folder if os.path.isabs(folder) else os.path.expanduser("~/.config")
    return Path(home, "fastattn", "tuning.json")


def machine() -> dict[str, Any]:
    """The machine that a file was measured on."""
    return {
        "isa": settings.core.get_isa(),
        "level2_cache": settings.core.LEVEL2_CACHE,
        "num_threads": settings.get_num_threads(),
    }


def defaults() -> dict[str, int]:
    """The value of each size that is used without a file."""
    return {name: default for name, (_, default, _, _) in settings.core.SIZES.items()}


def load() -> None:
    """Use the sizes of the file if it is of this machine as it is set now, and the defaults otherwise."""
    global _file, _said, _warned
    settings.core.before_next_plan(None)
    if _held:
        return
    if _file is None:
        _file = _read()
    sizes, _said, warning = _choice(_file)
    settings.core.set_sizes(defaults() | sizes)
    if warning and not _warned:
        _warned = True
        settings.warn(f"fastattn: {warning}; sizes are the defaults", RuntimeWarning)


def said() -> str:
    """Sizes that are not the defaults, and where they come from."""
    load()
    return _said


def _read() -> _File:
    """The contents of the file, or why there are none."""
    file, asked = path(), os.environ.get(VARIABLE)
    if file is None:
        return _File("", said=f"defaults: {VARIABLE} is off")
    name = f"{VARIABLE}={file}" if asked else str(file)
    try:
        return _File(name, content=json.loads(_text(file)))
    except OSError as error:
        reason = error.strerror or str(error)
        if not asked:  # nobody has said that there is one
            missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
            return _File(name, said="defaults" if missing else f"defaults: {name}: {reason}")
    except json.JSONDecodeError as error:
        reason = f"it is not JSON: {error}"
    except (ValueError, RecursionError) as error:
        reason = str(error)
    return _File(name, wrong=reason)


def _choice(file: _File) -> tuple[dict[str, int], str, str]:
    """The sizes that `file` changes, what `said` says, and a warning or ""."""
    if file.said:
        return {}, file.said, ""
    reason, sizes = file.wrong, {}
    try:
        sizes = {} if reason else _sizes_of(file.content)
    except _AnotherMachine as error:
        return {}, f"defaults: {file.name} is ignored, {error}", ""
    except ValueError as error:
        reason = str(error)
    if reason:
        return {}, f"defaults: {file.name}: {reason}", f"{file.name}: {reason}"
    usual = defaults()
    changed = [f"{name} {value} (not {usual[name]})" for name, value in sizes.items() if value != usual[name]]
    return sizes, f"{file.name}: {', '.join(changed) or 'all are the defaults'}", ""


def _text(file: Path) -> str:
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
    with replaced(file) as new:
        new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@contextmanager
def forced(**sizes: int) -> Iterator[None]:
    """Force sizes inside a ``with`` block, for tests and measurements; every thread sees them."""
    global _held
    held, before = _held, settings.core.get_sizes()
    settings.core.set_sizes(sizes)
    _held = True
    try:
        yield
    finally:
        _held = held
        settings.core.set_sizes(before)
        settings.core.before_next_plan(load)


settings.load_sizes_by(load)
