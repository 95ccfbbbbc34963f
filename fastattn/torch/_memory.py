"""The setting of glibc's allocator by which a process keeps the memory that it frees."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from fastattn._undo import Shared


def _usual(name: str, most: int) -> int:
    """The user's setting, or the most that glibc raises it to by itself."""
    text = os.environ.get(f"MALLOC_{name}_THRESHOLD_", "")
    return int(text) if text.isdigit() else most


# From glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = (-1, _usual("TRIM", 64 << 20)), (-3, _usual("MMAP", 32 << 20))
_KEPT = 2**31 - 1


def _keep() -> Callable[[], None]:
    """Keep freed memory for what is allocated next; return what gives it back."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_TRIM_THRESHOLD[0], _KEPT)
    if not libc.mallopt(_MMAP_THRESHOLD[0], _KEPT):
        libc.mallopt(*_MMAP_THRESHOLD)  # the most that some versions take

    def give_back() -> None:
        libc.mallopt(*_TRIM_THRESHOLD)
        libc.mallopt(*_MMAP_THRESHOLD)
        libc.malloc_trim(0)

    return give_back


_SETTING = Shared(_keep)


def keep_freed() -> tuple[Callable[[], None], str]:
    """Keep up to 2 GB of freed memory until all users have ended; return what ends this use, and a text."""
    try:
        return _SETTING.use(), "kept by the process, up to 2 GB"
    except (AttributeError, OSError, TypeError):  # the last on Windows
        return (lambda: None), "returned to the system: only glibc's allocator can keep it"
