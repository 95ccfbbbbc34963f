"""Which implementation runs, on which instruction set, with how many threads; all of it can be asked and set.

The environment is read once, when this module is imported: FASTATTN_BACKEND, FASTATTN_ISA,
FASTATTN_NUM_THREADS.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.values import integer, short
from fastattn._version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

core: Any = None  # the compiled layer, fastattn/_engine/core/_core.pyx
_WHY_NOT_COMPILED = ""
try:
    core = import_module("fastattn._engine.core._core")
except ImportError as error:
    _WHY_NOT_COMPILED = str(error)

BACKENDS = ("compiled", "numpy")
MAX_THREADS = 4096  # more than any machine has; beyond, a number is a mistake
# Where the system refuses to create a thread, OpenMP ends the process: so no more than the CPUs can use, and
# 64 on any machine, on which a call with many threads can then be tried.
_MOST_USED = max(64, os.cpu_count() or 1)


class FallbackWarning(RuntimeWarning):
    """Attention runs on NumPy, several times slower, because the compiled kernels are missing."""


class Report(dict[str, Any]):
    """A dict that prints as a table, one entry a line."""

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{key:<{width}}  {_printed(value)}" for key, value in self.items())


def _printed(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


@dataclass(slots=True)
class _Settings:
    """What is in force in this process."""

    backend: str
    asked_by: str  # what asked for this backend; if anything did, there is nothing to warn of
    num_threads: int
    threads_from: str


def available_cpus() -> int:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cgroup_quota(root: str = "/") -> int | None:
    """CPUs' worth of time that the process's cgroups (v2 or v1) allow, rounded up; None without a quota."""
    try:
        with open(os.path.join(root, "proc/self/cgroup")) as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, names = "sys/fs/cgroup", ["cpu.max"]
        elif "cpu" in controllers.split(","):
            mount, names = "sys/fs/cgroup/cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        # Every ancestor's quota counts. In a container the path may be the host's: then only the mount itself
        # is there.
        levels = [level for level in path.split("/") if level]
        quotas += [_read_quota(os.path.join(root, mount, *levels[:n]), names) for n in range(len(levels) + 1)]
    return min((ceil(quota) for quota in quotas if quota), default=None)


def _read_quota(folder: str, names: list[str]) -> float | None:
    """CPUs that the files `names` of one cgroup allow: a quota of time, and the period it is for."""
    try:
        words = []
        for name in names:
            with open(os.path.join(folder, name)) as file:
                words += file.read().split()
        quota, period = map(int, words)
    except (OSError, ValueError):  # no such file, or "max" for no quota
        return None
    return quota / period if quota > 0 and period > 0 else None


def _default_threads() -> tuple[int, str]:
    """How many threads by default, and what says so."""
    name = "FASTATTN_NUM_THREADS"
    if value := os.environ.get(name):
        if not value.isdecimal() or not 1 <= int(value) <= MAX_THREADS:
            raise ValueError(f"{name} is {value!r}; expected an integer, 1 to {MAX_THREADS}")
        return min(int(value), _MOST_USED), name
    name = "OMP_NUM_THREADS"  # a list, maybe: one number a nesting level; what OpenMP would ignore is ignored
    value = os.environ.get(name, "").split(",")[0].strip()
    if value.isdecimal() and 1 <= int(value) <= MAX_THREADS:
        return min(int(value), _MOST_USED), name
    cpus, quota = available_cpus(), _cgroup_quota()
    return (cpus, "CPU affinity") if quota is None or cpus <= quota else (quota, "cgroup quota")


def _from_environment() -> _Settings:
    """What the environment asks for; where that cannot be had, an error and never something else."""
    backend, isa = os.environ.get("FASTATTN_BACKEND"), os.environ.get("FASTATTN_ISA")
    if backend and backend not in BACKENDS:
        raise ValueError(f"FASTATTN_BACKEND is {backend!r}; expected one of {', '.join(BACKENDS)}")
    if backend == "compiled" and core is None:
        raise ImportError(f"FASTATTN_BACKEND is 'compiled', but there are no kernels: {_WHY_NOT_COMPILED}")
    if isa and (backend != "numpy" or core is not None):  # on NumPy, too: a call may ask for the kernels
        if isa not in available_isas():
            available = ", ".join(available_isas()) or f"none ({_WHY_NOT_COMPILED})"
            raise ValueError(f"FASTATTN_ISA is {isa!r}; available here: {available}")
        core.set_isa(isa)
    default = "numpy" if core is None else "compiled"
    return _Settings(backend or default, "FASTATTN_BACKEND" if backend else "", *_default_threads())


def available_isas() -> tuple[str, ...]:
    """Names of the compiled instruction sets that this CPU runs, best first; none if nothing was compiled."""
    return () if core is None else core.available_isas()


def get_num_threads() -> int:
    """Threads that a call uses unless it says otherwise with ``num_threads=``."""
    return 1 if _forked else _settings.num_threads


def set_num_threads(num_threads: int) -> None:
    """Set the threads that a call uses unless it says otherwise, for the whole process.

    A forked process keeps its one thread: OpenMP would hang there with more. No more are used than the
    machine has CPUs, or 64 if it has fewer: where a thread cannot be created, OpenMP ends the process.

    Raises
    ------
    TypeError, ValueError
        If `num_threads` is not an integer from 1 to 4096.
    """
    asked = integer("set_num_threads", "num_threads", num_threads, 1, MAX_THREADS)
    _settings.num_threads = min(asked, _MOST_USED)
    _settings.threads_from = "set_num_threads()"


def threads(func: str, num_threads: int) -> int:
    """`num_threads`, checked, as far as they are of use; 1 in a forked process."""
    checked = integer(func, "num_threads", num_threads, 1, MAX_THREADS)
    return 1 if _forked else min(checked, _MOST_USED)


def default_backend() -> str:
    """What runs unless a call says otherwise: "compiled" or "numpy"."""
    return _settings.backend


def require_backend(func: str, backend: str) -> None:
    """Raise unless `backend` can be had: one that is asked for never falls back."""
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(
            f"{func}(): backend is {short(backend)}; expected one of {', '.join(BACKENDS)}, or None"
        )
    if backend == "compiled" and core is None:
        raise ValueError(f"{func}(): backend is 'compiled', but there are no kernels: {_WHY_NOT_COMPILED}")


@contextmanager
def forced(
    isa: str | None = None, num_threads: int | None = None, backend: str | None = None
) -> Iterator[None]:
    """Force an instruction set, a thread count, a backend inside a ``with`` block; for tests and benches.

    The settings are the process's: its other threads see them, too.
    """
    global _settings
    if backend is not None:
        require_backend("forced", backend)
    if isa is not None and isa not in available_isas():
        raise ValueError(f"forced(): isa is {isa!r}; available here: {', '.join(available_isas()) or 'none'}")
    settings = replace(_settings)
    if num_threads is not None:
        asked = integer("forced", "num_threads", num_threads, 1, MAX_THREADS)
        settings.num_threads = min(asked, _MOST_USED)
        settings.threads_from = "forced()"
    if backend is not None:
        settings.backend, settings.asked_by = backend, "forced()"
    before, _settings = _settings, settings
    isa_before = isa and core.get_isa()
    try:
        if isa:
            core.set_isa(isa)
        yield
    finally:
        _settings = before
        if isa_before:
            core.set_isa(isa_before)


def warn_of_fallback() -> None:
    """Warn, once in a process, on the line that called the public function; not where NumPy was asked for."""
    global _warned
    if _warned or _settings.asked_by:
        return
    _warned = True
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "fastattn":
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"fastattn runs on NumPy, several times slower: there are no compiled kernels ({_WHY_NOT_COMPILED})."
        f" Install it again where there is a C compiler (FASTATTN_REQUIRE_EXT=1 makes pip say what fails), or"
        f" set FASTATTN_BACKEND=numpy to stay with NumPy and hear no more of this.",
        FallbackWarning,
        stacklevel=level,
    )


def why_numpy(backend: str | None = None) -> str | None:
    """Why a call with `backend` runs on NumPy; None if it does not."""
    if backend == "numpy":
        return "asked for by backend='numpy'"
    if (backend or _settings.backend) == "compiled":
        return None
    if _settings.asked_by:
        return f"asked for by {_settings.asked_by}"
    return f"there are no compiled kernels: {_WHY_NOT_COMPILED}"


def show_config() -> Report:
    """Say what this installation is and what a call would use.

    Returns
    -------
    Report
        A dict that prints as a table: ``version``, ``backend`` ("compiled" or "numpy"), ``why_numpy`` (None
        if it is compiled), ``isa`` in use (None on NumPy), ``isas_available`` on this CPU, ``isas_compiled``,
        ``openmp``, ``num_threads`` and ``num_threads_from`` (which variable or limit says so), ``compiler``,
        and the versions of NumPy and Python.
    """
    compiled = core is not None
    return Report(
        version=__version__,
        backend=_settings.backend,
        why_numpy=why_numpy(),
        isa=core.get_isa() if _settings.backend == "compiled" else None,
        isas_available=available_isas(),
        isas_compiled=core.compiled_isas() if compiled else (),
        openmp=compiled and core.openmp(),
        num_threads=get_num_threads(),
        num_threads_from="forked process" if _forked else _settings.threads_from,
        compiler=core.compiler() if compiled else None,
        numpy=np.__version__,
        python=sys.version.split()[0],
    )


def _after_fork_in_child() -> None:
    """libgomp's threads do not survive a fork: the child would wait for them for ever."""
    global _forked
    _forked = True


_forked = False
_warned = False
try:
    _settings = _from_environment()
except (ImportError, ValueError) as error:
    if sys.argv[:1] == ["-m"] and "fastattn" in sys.orig_argv:
        # `python -m fastattn` gets here before there is a __main__ that could say it.
        print(f"fastattn: {error}", file=sys.stderr)
        sys.exit(2)
    raise
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
