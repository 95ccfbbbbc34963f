"""Which implementation runs, on which instruction set, with how many threads; all of it can be asked and set.

The environment is read once, here: FASTATTN_BACKEND, FASTATTN_ISA, FASTATTN_NUM_THREADS.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn import reference
from fastattn._inputs import integer

try:
    import fastattn._core as _core
except ImportError as error:
    _core = None  # type: ignore[assignment]
    WHY_NOT_COMPILED = str(error)
else:
    WHY_NOT_COMPILED = ""

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastattn._check import AttentionArgs

BACKENDS = ("compiled", "numpy")
MAX_THREADS = 4096  # far above any machine: a larger number is a mistake, and would be threads that the system must start


class FallbackWarning(RuntimeWarning):
    """Attention runs on NumPy, several times slower, because the compiled kernels are missing."""


class Report(dict[str, Any]):
    """A dict that prints as a table, one entry a line."""

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{key:<{width}}  {_printed(value)}" for key, value in self.items())


def _printed(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value)) or "none"
    return {None: "none", True: "yes", False: "no"}.get(value, str(value)) if value in (None, True, False) else str(value)


class _Settings:
    """What is in force in this process."""

    backend: str
    asked: bool  # for this backend, by the environment or forced(): then there is nothing to warn of
    num_threads: int
    threads_from: str
    max_threads: int = MAX_THREADS
    warned: bool = False


def affinity_threads() -> int:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cgroup_threads(root: str = "/") -> int | None:
    """CPUs' worth of time that the cgroup's quota (v2 or v1) allows, rounded up; None without a quota."""
    quotas = []
    try:
        lines = Path(root, "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, files = Path(root, "sys/fs/cgroup"), ("cpu.max",)
        elif "cpu" in controllers.split(","):
            mount, files = Path(root, "sys/fs/cgroup", controllers), ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        else:
            continue
        # Every ancestor's quota counts; in a container the path may be the host's, and only the mount itself be there.
        folder = mount / path.lstrip("/")
        for level in (folder, *folder.parents):
            quotas.append(_quota(level, files))
            if level == mount:
                break
    return min((ceil(quota) for quota in quotas if quota), default=None)


def _quota(folder: Path, files: tuple[str, ...]) -> float | None:
    """CPUs that the quota in one cgroup's `files` allows; None where there is none."""
    try:
        quota, period = " ".join((folder / file).read_text() for file in files).split()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max": unlimited
        return None


def _default_threads() -> tuple[int, str]:
    """How many threads by default, and where that number comes from."""
    name = "FASTATTN_NUM_THREADS"
    if value := os.environ.get(name):
        if not value.isdecimal() or not 1 <= int(value) <= MAX_THREADS:
            raise ValueError(f"{name} is {value!r}; expected an integer, 1 to {MAX_THREADS}")
        return int(value), name
    # OpenMP's own variable may be a list, one number a nesting level; what OpenMP would ignore is ignored here.
    value = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if value.isdecimal() and 1 <= int(value) <= MAX_THREADS:
        return int(value), "OMP_NUM_THREADS"
    cpus, quota = affinity_threads(), cgroup_threads()
    if quota is not None and quota < cpus:
        return quota, "cgroup CPU quota"
    return cpus, "CPU affinity"


def _configure() -> None:
    """Read the environment; what it asks for and cannot be had is an error, never something else."""
    _settings.num_threads, _settings.threads_from = _default_threads()
    backend, isa = os.environ.get("FASTATTN_BACKEND"), os.environ.get("FASTATTN_ISA")
    if backend and backend not in BACKENDS:
        raise ValueError(f"FASTATTN_BACKEND is {backend!r}; expected one of {', '.join(BACKENDS)}")
    if backend == "compiled" and _core is None:
        raise ImportError(f"FASTATTN_BACKEND is 'compiled', but the extension is missing: {WHY_NOT_COMPILED}")
    _settings.asked = bool(backend)
    _settings.backend = backend or ("numpy" if _core is None else "compiled")
    if isa and backend != "numpy":
        if isa not in available_isas():
            raise ValueError(f"FASTATTN_ISA is {isa!r}; available here: {', '.join(available_isas()) or 'none'}")
        _core.set_isa(isa)


def _after_fork_in_child() -> None:
    """libgomp's threads do not survive a fork, and a parallel region of the child would wait for them for ever."""
    _settings.max_threads = _settings.num_threads = 1
    _settings.threads_from = "forked process, where OpenMP hangs with more"


def available_isas() -> tuple[str, ...]:
    """Names of the compiled instruction sets that this CPU runs, best first; empty if nothing was compiled."""
    return () if _core is None else _core.available_isas()


def get_num_threads() -> int:
    """Threads that a call uses unless it says otherwise with `num_threads=`."""
    return _settings.num_threads


def set_num_threads(num_threads: int) -> None:
    """Set the threads that a call uses unless it says otherwise; for this process.

    A process made by `fork` stays with one thread: OpenMP would hang there with more.

    Raises
    ------
    TypeError, ValueError
        If `num_threads` is not an integer of at least 1.
    """
    _settings.num_threads = threads("set_num_threads", num_threads)
    _settings.threads_from = "set_num_threads()"


def threads(func: str, num_threads: int | None) -> int:
    """`num_threads`, or the default for None, checked; one in a forked process."""
    if num_threads is None:
        return _settings.num_threads
    return min(integer(func, "num_threads", num_threads, 1, MAX_THREADS), _settings.max_threads)


@contextmanager
def forced(isa: str | None = None, num_threads: int | None = None, backend: str | None = None) -> Iterator[None]:
    """Force an instruction set, a thread count, a backend inside a `with` block; for tests and benches.

    The settings are the process's: other threads see them as well.
    """
    before = _settings.backend, _settings.asked, _settings.num_threads, _settings.threads_from
    isa_before = None if isa is None or _core is None else _core.get_isa()
    try:
        if isa is not None:
            if _core is None:
                raise ValueError(f"isa {isa!r} is not available: nothing was compiled ({WHY_NOT_COMPILED})")
            _core.set_isa(isa)
        if num_threads is not None:
            _settings.num_threads, _settings.threads_from = threads("forced", num_threads), "forced()"
        if backend is not None:
            _settings.backend, _settings.asked = backend_name("forced", backend), True
        yield
    finally:
        _settings.backend, _settings.asked, _settings.num_threads, _settings.threads_from = before
        if isa_before is not None:
            _core.set_isa(isa_before)


def backend_name(func: str, backend: str | None) -> str:
    """`backend`, or the default for None; an explicit one that cannot be had is an error."""
    if backend is None:
        return _settings.backend
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"{func}(): backend is {backend!r}; expected None, 'compiled' or 'numpy'")
    if backend == "compiled" and _core is None:
        raise ValueError(f"{func}(): backend is 'compiled', but the extension is missing: {WHY_NOT_COMPILED}")
    return backend


def run(args: AttentionArgs, backend: str | None) -> None:
    """Compute `args` with the implementation called `backend`, a checked name, or with the default one."""
    if (backend or _settings.backend) == "compiled":
        _core.attention(args)
        return
    if backend is None and not _settings.asked and not _settings.warned:
        _settings.warned = True
        warnings.warn(
            f"fastattn runs on NumPy, several times slower: its compiled kernels are missing ({WHY_NOT_COMPILED})."
            f" To get them, install it where there is a C compiler: FASTATTN_REQUIRE_EXT=1 pip install --no-cache-dir"
            f" --force-reinstall fastattn then says what is wrong. To keep NumPy and hear no more of it, set"
            f" FASTATTN_BACKEND=numpy.",
            FallbackWarning,
            stacklevel=3,
        )
    reference.attention(args)


def plan(args: AttentionArgs, backend: str) -> dict[str, Any]:
    """What `backend` would run on `args`: kernel, ISA, block sizes."""
    if backend == "compiled":
        return _core.plan(args)
    block_q, block_k = reference.block_sizes(args)
    group = args.heads_q // args.heads_kv
    return {"kernel": "numpy", "isa": None, "block_q": block_q * group, "block_k": block_k}


def why_numpy(backend: str | None = None) -> str | None:
    """Why a call with `backend` runs on NumPy; None if it does not."""
    if backend == "numpy":
        return "backend='numpy' was asked for"
    if backend is None and _settings.backend == "numpy":
        return "FASTATTN_BACKEND=numpy was asked for" if _settings.asked else f"not compiled: {WHY_NOT_COMPILED}"
    return None


def show_config() -> Report:
    """What this installation is and does: a dict that prints as a table.

    Returns
    -------
    Report
        ``version``, ``backend`` ("compiled" or "numpy"), ``why_numpy`` (None if it is not), ``isa`` in use,
        ``isas_available`` on this CPU, ``isas_compiled``, ``openmp``, ``num_threads`` and ``num_threads_from`` (which
        variable or limit gave that number), ``compiler``, and the versions of ``numpy`` and ``python``.

    Examples
    --------
    >>> import fastattn
    >>> fastattn.show_config()["backend"] in ("compiled", "numpy")
    True
    """
    from fastattn import __version__

    compiled = _core is not None
    return Report(
        version=__version__,
        backend=_settings.backend,
        why_numpy=why_numpy(),
        isa=_core.get_isa() if compiled else None,
        isas_available=available_isas(),
        isas_compiled=_core.compiled_isas() if compiled else (),
        openmp=compiled and _core.openmp(),
        num_threads=_settings.num_threads,
        num_threads_from=_settings.threads_from,
        compiler=_core.compiler() if compiled else None,
        numpy=np.__version__,
        python=sys.version.split()[0],
    )


_settings = _Settings()
_configure()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
