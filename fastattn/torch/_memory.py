"""Use by C's allocator of the memory of tensors that nobody needs any more."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from fastattn.torch._undo import Undo

# Of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT = 2**31 - 1
# What glibc itself raises both to, at most, while a process runs.
_USUAL = {_MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 64 << 20}
_lock = threading.Lock()
_users = 0


def keep_freed() -> Undo | None:
    """Let the process keep memory that is freed, up to 2 GB, for what it allocates next.

    Large blocks go back to the system otherwise, which clears every page of the next one: the results of a
    model's layers are such blocks. Other allocators than glibc's have no such setting: then None.
    """
    global _users
    glibc = _glibc()
    if glibc is None:
        return None
    with _lock:
        _users += 1
        kept = _keep(glibc)
    return Undo([_end], lambda: f"memory that is freed: {kept}")


def _keep(glibc: Any) -> str:
    """Setting that glibc grants: it answers 0 where it refuses."""
    if not glibc.mallopt(_TRIM_THRESHOLD, _KEPT):
        return "not kept, since glibc refuses it"
    if glibc.mallopt(_MMAP_THRESHOLD, _KEPT):
        return "kept by the process, up to 2 GB"
    glibc.mallopt(_MMAP_THRESHOLD, _USUAL[_MMAP_THRESHOLD])  # the most that some versions take
    return "kept by the process, up to 2 GB, in blocks of up to 32 MB"


def _end() -> None:
    global _users
    glibc = _glibc()
    with _lock:
        _users -= 1
        if not _users:
            for which, size in _USUAL.items():
                glibc.mallopt(which, size)
            glibc.malloc_trim(0)  # which gives back what was kept


def _glibc() -> Any:
    """The library, if its allocator is the one of this process."""
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version, library.mallopt, library.malloc_trim  # noqa: B018 - are they there?
    except (AttributeError, OSError, TypeError):  # TypeError: on Windows
        return None
    return library
