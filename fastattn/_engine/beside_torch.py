"""torch's OpenMP, where torch is loaded: calls may borrow its threads, and it may be this build's."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path


def gomp_parallel() -> int | None:
    """Return the address of the GOMP_parallel that torch runs on; None if it has none or is not loaded."""
    file = getattr(sys.modules.get("torch"), "__file__", None)
    folder = Path(file or "").parent / "lib"
    library = next((path for path in folder.glob("libtorch_cpu.*") if path.suffix != ".lib"), None)
    # A search from there finds the OpenMP that torch runs on, whatever others there are in the process.
    return _gomp_parallel_of(library) if file and library else None


def shares_openmp(core_file: str) -> bool | None:
    """Whether torch runs on the OpenMP of the compiled layer; None where that cannot be told yet."""
    torch_s = gomp_parallel()
    return None if torch_s is None else torch_s == _gomp_parallel_of(core_file)


def _gomp_parallel_of(library: str | Path) -> int | None:
    try:
        loaded = ctypes.CDLL(str(library), mode=os.RTLD_NOW | getattr(os, "RTLD_NOLOAD", 0))
        return ctypes.cast(loaded.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):  # it is not loaded, or has no such function
        return None
