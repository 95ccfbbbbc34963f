"""torch's threads, which do our work, too.

They wait awake between torch's operators. A second pool beside them gets half of each core.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from fastattn._engine import settings


def borrow() -> bool:
    """Let torch's OpenMP threads do what our own would; False where they cannot be found."""
    folder = Path(torch.__file__).parent / "lib"
    library = next((path for path in folder.glob("libtorch_cpu.*") if path.suffix != ".lib"), None)
    if settings.core is None or library is None or "OpenMP" not in torch.__config__.parallel_info():
        return False
    try:
        # A search from there finds the OpenMP that torch runs on, whatever others there are in the process.
        parallel = ctypes.CDLL(str(library), mode=os.RTLD_NOW | getattr(os, "RTLD_NOLOAD", 0)).GOMP_parallel
    except (OSError, AttributeError):
        return False
    settings.core.borrow_threads(ctypes.cast(parallel, ctypes.c_void_p).value)
    return True


def give_back() -> None:
    """Let our own threads work again."""
    if settings.core is not None:
        settings.core.borrow_threads(0)
