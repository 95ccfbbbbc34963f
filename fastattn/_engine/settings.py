"""The settings of this process: implementation, instruction set, threads and their number.

The environment variables FASTATTN_BACKEND, FASTATTN_ISA, FASTATTN_THREADING and FASTATTN_NUM_THREADS are
read once, when this module is imported.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from fastattn._args.errors import named, put_name
from fastattn._args.values import integer, short
from fastattn._engine.beside_torch import shares_openmp
from fastattn._engine.cpus import CPUS, cgroup_quota

core: Any = None  # the compiled layer, fastattn/_engine/core/_core.pyx
_IMPORT_ERROR = ""
try:
    core = import_module("fastattn._engine.core._core")
except ImportError as error:
    _IMPORT_ERROR = str(error)

BACKENDS = ("compiled", "numpy")
MAX_THREADS = 4096  # no machine has more; a larger number is a mistake
# More threads than CPUs gain nothing. 64 are allowed on every machine, for tests of calls with many.
_MOST_USEFUL = max(64, os.cpu_count() or 1)


class FallbackWarning(RuntimeWarning):
    """Warning: the best kernels for this CPU were not compiled; NumPy or a lesser instruction set runs."""


class Report(dict[str, Any]):
    """A dict that prints as a table, one entry per line."""

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
    """The present settings of this process."""

    backend: str
    asked_by: str  # what asked for this backend, or ""; then running on NumPy deserves a warning
    wanted_threads: int  # before limits
    wanted_from: str  # what set their number

    @property
    def threads_from(self) -> str:
        if self.wanted_threads <= _most_used:
            return self.wanted_from
        if _most_used < _MOST_USEFUL:
            return "OMP_THREAD_LIMIT"
        return f"{self.wanted_from}: {self.wanted_threads}, of which {_most_used} are used"


def available_threadings() -> tuple[str, ...]:
    """Return the thread pools of this build, the default first: "openmp", "team" (fastattn's)."""
    if core is None:
        return ()
    return ("openmp", "team") if core.openmp_threads()[0] else ("team",)


def _use_threading(what: str, threading: str) -> None:
    """Use the threads for which `what` asks."""
    global _most_used
    if not isinstance(threading, str) or threading not in available_threadings():
        available = ", ".join(available_threadings()) or f"none ({_missing().why})"
        raise ValueError(f"{what} is {short(threading)}; available in this build: {available}")
    core.use_openmp(threading == "openmp")
    _most_used = min(_MOST_USEFUL, core.openmp_threads()[0]) if threading == "openmp" else _MOST_USEFUL


def _beside_torch() -> None:
    """Leave OpenMP to torch where both run on the same one, unless somebody has asked for it.

    libgomp lets waiting threads spin for a shorter time where it has more of them than processors. Small
    layers of torch then took 1.4 to 1.8 times as long.
    """
    if (shared := shares_openmp(core.__file__)) is None:
        return
    with _threading_lock:
        if core.watches_for_torch() and shared:
            _use_threading("beside torch", "team")
        core.watch_for_torch(False)


def _thread_count(text: str) -> int:
    """The number of threads that `text` says, or 0; Python refuses to read thousands of digits."""
    digits = text.lstrip("0")
    count = int(digits) if digits.isdecimal() and len(digits) <= len(str(MAX_THREADS)) else 0
    return count if count <= MAX_THREADS else 0


def _wanted_threads() -> tuple[int, str]:
    """Number of threads by the environment, or of CPUs that this process may use; and what says so."""
    name = "FASTATTN_NUM_THREADS"
    if value := os.environ.get(name):
        if not (count := _thread_count(value)):
            raise ValueError(f"{name} is {short(value)}; expected an integer, 1 to {MAX_THREADS}")
        return count, name
    # This may be a list, with a number for each nesting level. Invalid values are ignored, as OpenMP does.
    name = "OMP_NUM_THREADS"
    if count := _thread_count(os.environ.get(name, "").split(",")[0].strip()):
        return count, name
    quota = cgroup_quota()
    # Where OpenMP binds threads, this one may be bound to a single CPU by now; OpenMP remembers the others.
    cpus = max(len(CPUS), core.openmp_threads()[1] if core is not None else 1)
    return (cpus, "CPU affinity") if quota is None or cpus <= quota else (quota, "cgroup quota")


def _from_environment() -> _Settings:
    """Settings that the environment asks for; raise if one of them is not available."""
    backend, isa = os.environ.get("FASTATTN_BACKEND"), os.environ.get("FASTATTN_ISA")
    if backend and backend not in BACKENDS:
        raise ValueError(f"FASTATTN_BACKEND is {backend!r}; expected one of {', '.join(BACKENDS)}")
    if backend == "compiled" and core is None:
        raise ImportError(f"FASTATTN_BACKEND is 'compiled', but {_no_kernels()}")
    if isa and (backend != "numpy" or core is not None):  # also with "numpy": a call may ask for "compiled"
        _use_isa("FASTATTN_ISA", isa)
    if core is not None:
        asked = os.environ.get("FASTATTN_THREADING")
        _use_threading("FASTATTN_THREADING", asked or available_threadings()[0])
        core.watch_for_torch(not asked, _beside_torch)
        if not isa and backend != "numpy" and (better := core.isa_left_out()):
            _warn_of_lesser(better)
    default = "numpy" if core is None else "compiled"
    return _Settings(backend or default, "FASTATTN_BACKEND" if backend else "", *_wanted_threads())


def _warn_of_lesser(better: str) -> None:
    """Warn that this build lacks `better`, the best instruction set of this CPU: it was built elsewhere."""
    used = core.get_isa()
    warn(
        f"fastattn was built without {better}, the best instruction set of this CPU, and uses {used}: slower."
        f" Install it on this machine, or build it with FASTATTN_ISAS=all. Or set FASTATTN_ISA={used} to use"
        " that without this warning.",
        FallbackWarning,
    )


def _use_isa(what: str, isa: str) -> None:
    """Use the instruction set `isa`, for which `what` asks."""
    if isa not in available_isas():
        available = ", ".join(available_isas()) or f"none ({_missing().why})"
        raise ValueError(f"{what} is {isa!r}; available here: {available}")
    before = core.get_isa()
    core.set_isa(isa)
    if core.get_isa() != isa:
        core.set_isa(before)
        raise ValueError(f"{what} is {isa!r}; {core.isa_refused}")


def available_isas() -> tuple[str, ...]:
    """Return the compiled instruction sets that this CPU supports, best first; () without the extension."""
    return () if core is None else core.AVAILABLE_ISAS


def get_num_threads() -> int:
    """Return the number of threads of calls without ``num_threads=``."""
    wanted = current.wanted_threads
    return wanted if wanted < _most_used else _most_used  # min() takes three times as long


@named("set_num_threads")
def set_num_threads(num_threads: int) -> None:
    """Set the number of threads of calls without ``num_threads=``, for the whole process.

    Limited to the number of CPUs, or 64 if there are fewer, and to OMP_THREAD_LIMIT; `show_config` reports
    the limit. Fewer threads run if the system cannot create more (``ulimit -u``).

    Raises
    ------
    TypeError, ValueError
        If `num_threads` is not an integer from 1 to 4096.
    """
    current.wanted_threads = integer("num_threads", num_threads, 1, MAX_THREADS)
    current.wanted_from = "set_num_threads()"


def set_threading(threading: str) -> None:
    """Choose the thread pool of all later calls, for the whole process.

    Results do not depend on it, bit for bit. While `fastattn.torch` is imported, torch's threads compute
    instead. By default (without this call and FASTATTN_THREADING), the pool becomes "team" once torch is
    imported and uses the OpenMP of this build, as builds from source do: two pools in one OpenMP slow each
    other down.

    Parameters
    ----------
    threading : {"openmp", "team"}
        "openmp", the default if built in, is subject to OpenMP's environment variables (OMP_THREAD_LIMIT,
        OMP_PROC_BIND, OMP_PLACES, OMP_DISPLAY_AFFINITY and others); "team" is fastattn's own pool.

    Raises
    ------
    ValueError
        If `threading` is not one of ``show_config()["threading_available"]``.
    """
    with _threading_lock:
        _use_threading("set_threading(): threading", threading)
        core.watch_for_torch(False)


def threads(num_threads: int | None) -> int:
    """`num_threads`, checked, up to the limit of `set_num_threads`; None is the default."""
    return get_num_threads() if num_threads is None else _usable(num_threads)


def _usable(num_threads: int) -> int:
    return min(integer("num_threads", num_threads, 1, MAX_THREADS), _most_used)


def default_backend() -> str:
    """Return what calls without ``backend=`` run: "compiled" or "numpy"."""
    return current.backend


def require_backend(backend: str | None) -> None:
    """Raise unless `backend` is available or None: an explicit request never falls back."""
    if backend is None:
        return
    if not isinstance(backend, str) or backend not in BACKENDS:
        expected = f"one of {', '.join(BACKENDS)}, or None"
        raise ValueError(f"(): backend is {short(backend)}; expected {expected}")
    if backend == "compiled" and core is None:
        raise ValueError(f"(): backend is 'compiled', but {_no_kernels()}")


@contextmanager
def forced(
    isa: str | None = None, num_threads: int | None = None, backend: str | None = None
) -> Iterator[None]:
    """Force settings inside a ``with`` block, for tests and benchmarks; every thread sees them."""
    global current
    before, isa_before = current, core and core.get_isa()
    try:
        settings = replace(current)
        if backend is not None:
            require_backend(backend)
            settings.backend, settings.asked_by = backend, "forced()"
        if num_threads is not None:
            settings.wanted_threads, settings.wanted_from = _usable(num_threads), "forced()"
    except Exception as error:
        put_name("forced", error)
        raise
    if isa is not None:
        _use_isa("forced(): isa", isa)
    try:
        current = settings
        yield
    finally:
        current = before
        if isa is not None:
            core.set_isa(isa_before)


def warn_of_fallback() -> None:
    """Warn once that calls run on NumPy, unless something asked for that."""
    global _warned
    if _warned or current.asked_by:
        return
    _warned = True
    warn(
        f"fastattn runs on NumPy, several times slower: there are no compiled kernels ({_missing().why})."
        f" {_missing().remedy}. Or set FASTATTN_BACKEND=numpy to use NumPy without this warning.",
        FallbackWarning,
    )


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line that called a public function."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and (package := frame.f_globals.get("__name__", "").partition(".")[0]) in _OURS:
        frame, level = frame.f_back, level + (package == "fastattn")  # warnings skips frames of imports
    warnings.warn(message, category, stacklevel=level)


def _missing() -> Any:
    """Why there are no kernels, and what to do."""
    return import_module("fastattn._engine.missing").missing(_IMPORT_ERROR)


def _no_kernels() -> str:
    """The end of a message to one who asked for the kernels."""
    return f"there are no kernels: {_missing().why}. {_missing().remedy}"


def why_numpy(backend: str | None = None) -> str | None:
    """Return why a call with `backend` runs on NumPy; None if it does not."""
    if backend == "numpy":
        return "set by backend='numpy'"
    if (backend or current.backend) == "compiled":
        return None
    if current.asked_by:
        return f"set by {current.asked_by}"
    return f"there are no compiled kernels: {_missing().why}"


_warned = False
_OURS = "fastattn", "importlib"  # the latter where fastattn is just being imported
_threading_lock = threading.Lock()
_most_used = _MOST_USEFUL  # or fewer, where OpenMP has a limit
try:
    current = _from_environment()
except (ImportError, ValueError) as error:
    if sys.argv[:1] == ["-m"] and "fastattn" in sys.orig_argv:
        # `python -m fastattn` imports the package first, so no code of __main__ can report the error.
        print(f"fastattn: {error}", file=sys.stderr)
        sys.exit(2)
    raise
