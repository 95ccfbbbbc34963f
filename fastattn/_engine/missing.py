"""Why there are no compiled kernels, and what to do: no compiler, or Python found another folder first."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

_OWN = Path(__file__).resolve().parents[1]  # this package


class Missing(NamedTuple):
    """Reason and remedy for missing kernels, as messages say them."""

    why: str
    remedy: str


@cache
def missing(error: str) -> Missing:
    """The import of the kernels failed with `error`."""
    installed, clone = list(_installed()), _OWN.parent
    is_clone = error.startswith("No module named") and (clone / "setup.py").is_file()
    if _OWN in installed or not is_clone:
        remedy = (
            "Install it again where there is a C compiler (FASTATTN_REQUIRE_EXT=1 makes pip say what fails)"
        )
        return Missing(error, remedy)
    why, build = f"{error}; {clone} was not built", f"pip install -e {clone}"
    if not installed:
        return Missing(why, f"Compile its kernels: {build}")
    elsewhere = (
        "Start Python in another folder" if _stands_in(clone) else f"Take {clone} out of Python's path"
    )
    why = f"{why}, and hides the package that is installed, {installed[0]}"
    return Missing(why, f"{elsewhere}, or compile its kernels: {build}")


def _installed() -> Iterator[Path]:
    """The packages of this name that pip knows; of an editable one, where it lies."""
    from importlib.metadata import distributions  # 20 ms, for nothing but this

    for found in distributions(name="fastattn"):
        if found.read_text("RECORD") is None:  # what a build left in a clone
            continue
        origin = json.loads(found.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            package = Path(url2pathname(urlsplit(origin["url"]).path), "fastattn")
        else:
            package = Path(str(found.locate_file("fastattn")))
        if (package / "__init__.py").is_file():
            yield package.resolve()


def _stands_in(folder: Path) -> bool:
    try:
        return os.path.samefile(os.curdir, folder)
    except OSError:  # the current folder was removed
        return False
