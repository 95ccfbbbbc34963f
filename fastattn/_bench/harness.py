"""Engines timed in turn on the same problems, each in a process of its own: for the minute and for bench/."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import metadata, util
from math import inf
from multiprocessing import resource_tracker
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

import fastattn
from fastattn._bench.cases import Array
from fastattn._engine import settings
from fastattn._engine.cpus import CPUS

Json = dict[str, Any]
Keep = Callable[[Json, dict[str, Json]], None]
CONTEXT = multiprocessing.get_context("spawn")

# The largest error of a right answer: several times what any engine shows on standard normal inputs.
TOLERANCE = {"float64": 1e-10, "float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1, "int8": 1e-1, "int4": 1e-1}
# The least share of CPU time that busy threads get on a quiet machine. On two CPUs they got 0.89 to 0.99, and
# 0.3 to 0.6 beside one other program that computed.
QUIET_SHARE = 0.8
# Seconds before a measurement. A stopped process wakes up with all its threads on one core. Until the
# scheduler has spread them over the cores, it computes at the speed of one thread.
WARM_UP = 0.1
# Engines whose products are NumPy's. Threads of its BLAS meet at each one: with small ones, one is faster.
ON_BLAS = ("fallback", "numpy")
SINGLE = "in one thread"  # after an engine's name: a second process of it
PAUSE = 0.2  # seconds in which threads fall asleep, on systems that cannot stop a process
COUNTS = (
    *(f"{x}_NUM_THREADS" for x in ("FASTATTN", "OMP", "OPENBLAS", "MKL")),
    "VECLIB_MAXIMUM_THREADS",
    "PJRT_NPROC",
)
# With the last two, malloc keeps freed memory. Otherwise a result of a few megabytes would take as long to
# get its pages from the system as to compute, and not every engine can reuse its output.
SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}


class Unsupported(Exception):
    """The engine cannot compute this problem; the message says why."""


class Way(NamedTuple):
    """`call` is timed, after `load`, which is timed apart. `read` turns its result into an array."""

    call: Callable[[], Any]
    read: Callable[[Any], Array] = np.asarray
    load: Callable[[], Any] = lambda: None


Ways = Way | dict[str, Way]


@dataclass(frozen=True)
class Problem:
    """A row of the table. Every process makes the same arrays from these fields.

    A problem also has `work`, in floating-point operations or bytes, and `reference()`: indices of some rows
    of the result, and these rows in float64; leading axes count as one.
    """

    shape: Any  # a NamedTuple of sizes, and the name that the table shows
    variant: str
    dtype: str  # of the inputs; of the weights in layers and models, whose inputs are float32
    seed: int = 0

    name = property(lambda self: self.shape.name)
    tolerance = property(lambda self: TOLERANCE[self.dtype])  # the largest error of a right answer
    limit = property(lambda self: self.dtype)  # of the products, whose multiply-adds are the limit
    unit = property(lambda self: "flops")  # of `work`: "bytes" where memory is the limit
    alone = False  # whether an engine gets a new process for its fastest way, in which memory is measured

    def rng(self, stream: int) -> np.random.Generator:
        """A generator of random numbers; each `stream` gives other numbers."""
        return np.random.default_rng([self.seed, stream])

    def quality(self, got: Array, want: Array) -> Json:
        """More to say of these rows than their largest error."""
        return {}


Sections = dict[str, list[Any]]  # problems by the title above their rows


class Engine(NamedTuple):
    """A column of the table; `packages` must be importable, the first of them gives the version.

    `ways(problem, threads)` returns one or several ways to compute a problem, each laid out and ready: the
    worker tries them all and times the fastest.
    """

    packages: tuple[str, ...]
    ways: Callable[[Any, int], Ways]
    what: str

    def missing(self) -> list[str]:
        """Packages of the engine that are not installed."""
        return [package for package in self.packages if util.find_spec(package) is None]

    def version(self) -> str:
        name = self.packages[0]
        if name == "fastattn":
            return fastattn.__version__
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:  # what is installed has another name, as faiss-cpu
            return metadata.version(metadata.packages_distributions()[name][0])


FOR_GOOD = ExitStack()  # contexts entered until the process ends, so that the timed call need not enter them


def _own(way: Callable[[Any, str], Way], backend: str, problem: Any, threads: int) -> Way:
    FOR_GOOD.enter_context(settings.forced(backend=backend, num_threads=threads))
    return way(problem, backend)


def own_engines(way: Callable[[Any, str], Way], *packages: str) -> dict[str, Engine]:
    """fastattn and its fallback: `way(problem, backend)` is called where that backend is in force."""
    needs, kernels = ("fastattn", *packages), bool(fastattn.show_config()["isas_available"])
    compiled = {"fastattn": Engine(needs, partial(_own, way, "compiled"), "the compiled kernels")}
    fallback = Engine(needs, partial(_own, way, "numpy"), "fastattn without its extension")
    return {**(compiled if kernels else {}), "fallback": fallback}


def some_rows(out: Array, rows: Array) -> Array:
    """The `rows` of `out` in float64; the leading axes of `out` (..., n) count as one."""
    got: Array = out.reshape(-1, out.shape[-1])[rows].astype(np.float64)
    return got


def time_call(call: Callable[[], Any], seconds: float) -> float:
    """Seconds of a call: the median of samples of at least a millisecond, after warming up.

    A call of more than a second is timed once.
    """
    begin, once, samples = time.perf_counter(), 0.0, list[float]()
    while once == 0.0 or time.perf_counter() < begin + WARM_UP:
        once = sample(call, 1)
    end, repeat = time.perf_counter() + seconds, max(1, round(1e-3 / once))
    while once <= 10 * WARM_UP and (not samples or time.perf_counter() < end):
        samples.append(sample(call, repeat))
    return median(samples or [once])


def sample(call: Callable[[], Any], repeat: int) -> float:
    """Seconds of a call, the mean of so many."""
    begin = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - begin) / repeat


class _Worker:
    """Answers requests about one engine, in its process. It holds the problem that it prepared last."""

    def __init__(self, engine: Engine, threads: int) -> None:
        self.engine, self.threads, self.way = engine, threads, Way(lambda: None)

    def hello(self) -> Json:
        return {}

    def prepare(self, problem: Any, rows: Array, want: Array, only: str | None = None) -> Json:
        """Try every way to compute the problem, or one; keep the fastest whose result is right."""
        self.way = Way(lambda: None)  # frees memory before the next problem needs some
        found = self.engine.ways(problem, self.threads)
        ways = {"": found} if isinstance(found, Way) else found
        best, reasons = Json(), []
        for name, way in ways.items() if only is None else [(only, ways[only])]:
            try:
                load = sample(way.load, 1)
                begin = time.perf_counter()
                result = way.call()
                seconds, out = time.perf_counter() - begin, way.read(result)
                error = float(np.abs(some_rows(out, rows) - want).max(initial=0))
                if not error <= problem.tolerance:
                    raise ArithmeticError(f"wrong result, off by {error:.2g}")
                if len(ways) > 1 and seconds < 1:
                    seconds = time_call(way.call, 0.02)
            except Exception as reason:
                reasons.append(f"{name} {_described(reason)}".strip())
                continue
            if not best or seconds < best["seconds"]:
                self.way, best = way, {"seconds": seconds, "error": error, "way": name, "load": load}
                best |= problem.quality(some_rows(out, rows), want)
        return best or {"failed": "; ".join(reasons)}

    def measure(self, seconds: float) -> Json:
        return {"seconds": time_call(self.way.call, seconds)}

    def limits(self, dtype: str) -> Json:
        """The most that the machine can do, and the share of the CPU time that busy threads get."""
        # Where the CPU has no instruction for products of a narrow type, the limit is that of float32.
        narrow = dtype == "float16" or not settings.core.fma_peak(dtype, self.threads)
        bandwidth = settings.core.read_bandwidth(self.threads)
        # Now that all threads are awake:
        wall, cpu = time.perf_counter(), time.process_time()
        flops = settings.core.fma_peak("float32" if narrow else dtype, self.threads)
        share = (time.process_time() - cpu) / (self.threads * (time.perf_counter() - wall))
        return {"flops": flops, "bytes": bandwidth, "cpu_share": share}


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _mask(how: str, signals: Iterable[int]) -> set[Any]:
    """Signals that were blocked before, where a system can block them."""
    if not hasattr(signal, "pthread_sigmask"):
        return set()
    resource_tracker.ensure_running()  # else the first start of a process starts it, which unblocks Ctrl-C
    return signal.pthread_sigmask(getattr(signal, how), signals)


def _serve(pipe: Any, engine: Engine, threads: int) -> None:
    """The life of a worker: requests and replies, until the pipe is closed."""
    for output in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)  # libraries say much
    if sys.platform == "linux":  # end with the bench: a stopped process would not notice that it is gone
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    worker = _Worker(engine, threads)
    while True:
        try:
            do, arguments = pipe.recv()
        except EOFError:
            return
        try:
            reply = getattr(worker, do)(**arguments)
        except Exception as error:
            unsupported = isinstance(error, Unsupported)
            reply = {"unsupported": str(error)} if unsupported else {"failed": _described(error)}
        pipe.send(reply)


class WorkerProcess:
    """The bench's side of a worker: ask it, wait, and stop it while other engines are timed.

    Threads that spin while they wait for work would disturb the engine that is timed next. Those of a stopped
    process cannot.
    """

    def __init__(self, engine: Engine, threads: int) -> None:
        self.arguments, (self.pipe, other), self.broken = (engine, threads), CONTEXT.Pipe(), False
        self.process = CONTEXT.Process(target=_serve, args=(other, engine, threads))
        before, cpus = dict(os.environ), getattr(os, "sched_getaffinity", lambda _: None)(0)
        blocked = _mask("SIG_BLOCK", [signal.SIGINT])  # Ctrl-C is for the bench, which ends its workers
        os.environ.pop("FASTATTN_BACKEND", None)
        os.environ.update(dict.fromkeys(COUNTS, str(threads)) | SETTINGS)
        if cpus:  # some libraries start as many threads as the process has CPUs
            os.sched_setaffinity(0, CPUS[:threads])
        try:
            self.process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
            _mask("SIG_SETMASK", blocked)
            if cpus:
                os.sched_setaffinity(0, cpus)
        other.close()

    def ask(self, do: str, **arguments: Any) -> Json:
        """Wake the worker up, wait for its answer to one request, and stop it again."""
        self._signal("SIGCONT")
        try:
            self.pipe.send((do, arguments))
            self.broken = not self.pipe.poll(600)
            answer: Json = {"failed": "took too long"} if self.broken else self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            self.broken, answer = True, {"failed": f"process ended with code {self.process.exitcode}"}
        if not self._signal("SIGSTOP"):
            time.sleep(PAUSE)
        return answer

    def _signal(self, name: str) -> bool:
        """Send a signal, if this system has it."""
        if hasattr(signal, name) and self.process.is_alive() and self.process.pid:
            os.kill(self.process.pid, getattr(signal, name))
        return hasattr(signal, name)

    def another(self) -> WorkerProcess:
        """A new process that takes the place of this one."""
        self.close()
        return WorkerProcess(*self.arguments)

    def close(self) -> None:
        """End the process, which cleans up after itself if it is not busy."""
        self._signal("SIGCONT")
        self.pipe.close()
        self.process.join(5)
        self.process.kill()
        self.process.join()


class Effort(NamedTuple):
    """Plan of a run's time."""

    seconds: float  # for one measurement
    rounds: int  # the most measurements of one engine on one problem
    most: float  # seconds of these together, after which an engine is measured no more
    total: float  # seconds of the whole run, shared by all problems; after them no problem is begun


def brief(seconds: float) -> Effort:
    """Plan as many rounds as `seconds` allow: more of them where there are no peers."""
    return Effort(seconds=0.05, rounds=15, most=1.0, total=seconds)


def run(
    engines: dict[str, Engine],
    sections: Sections,
    effort: Effort,
    threads: int,
    keep: Keep = lambda row, limits: None,
    **more: Any,
) -> Json:
    """Measure all problems. Text and ``--json`` are made from the result, which has `more`, too.

    `keep` is called with each row as soon as it is measured, and the limits by dtype.
    """
    missing = {package for engine in engines.values() for package in engine.missing()}
    engines = {name: engine for name, engine in engines.items() if not engine.missing()}
    workers: dict[str, WorkerProcess] = {}
    try:
        for name, engine in engines.items():
            workers[name] = WorkerProcess(engine, threads)
            if name in ON_BLAS and threads > 1:
                workers[f"{name} {SINGLE}"] = WorkerProcess(engine, 1)
        for worker in workers.values():
            worker.ask("hello")  # from here on one process runs at a time
        measured = _measure(workers, sections, effort, keep)
    except BaseException:  # Ctrl-C, while some may still be importing
        for worker in workers.values():
            worker.process.kill()
        raise
    finally:
        for worker in workers.values():
            worker.close()
    both = f"; {SINGLE} and in {threads}, the faster counts" * (threads > 1)
    return {
        "command": " ".join([f"python -m {sys.modules['__main__'].__package__}", *sys.argv[1:]]),
        "environment": {key: value for key, value in sorted(os.environ.items()) if key[:9] == "FASTATTN_"},
        "threads": threads,
        "machine": {"cpu": cpu_name(), "cpus": os.cpu_count(), "system": platform.platform()},
        "config": dict(fastattn.show_config()),
        "missing": sorted(missing),
        "engines": {
            name: {"what": x.what + both * (name in ON_BLAS), "version": x.version()}
            for name, x in engines.items()
        },
        **more,
        **measured,
    }


def _measure(workers: dict[str, WorkerProcess], sections: Sections, effort: Effort, keep: Keep) -> Json:
    """Facts that only the workers can tell."""
    try:
        from tqdm import tqdm as progress
    except ImportError:
        progress = partial(lambda rows, **_: rows)
    start, rows, left_out = time.monotonic(), list[Json](), []
    problems = [(title, problem) for title, of_title in sections.items() for problem in of_title]
    dtypes = list(dict.fromkeys(problem.limit for _, problem in problems))
    limits = [_limits(workers, dtypes)]
    for title, problem in progress(problems, leave=False, disable=None):  # None: on terminals
        left = start + effort.total - time.monotonic()
        if left < 0 and rows:
            left_out.append(f"{title} {problem.name}")
            continue
        end = time.monotonic() + left / (len(problems) - len(rows))
        shape = {**problem.shape._asdict(), "name": problem.name}
        row = {name: getattr(problem, name) for name in ("variant", "dtype", "limit", "unit", "work")}
        rows.append(
            {"section": title, "shape": shape, **row, "engines": compare(workers, problem, effort, end)}
        )
        keep(rows[-1], limits[0])
    limits.append(_limits(workers, dtypes))
    return {
        "limits": {  # other programs can only make a measured limit too low, so the higher one counts
            dtype: {unit: max(found[dtype][unit] for found in limits) for unit in ("flops", "bytes")}
            for dtype in limits[0]
        },
        "cpu_share": min((x["cpu_share"] for found in limits for x in found.values()), default=1.0),
        "rows": rows,
        "left_out": left_out,
    }


def _limits(workers: dict[str, WorkerProcess], dtypes: list[str]) -> dict[str, Json]:
    """The machine's limits for each dtype; empty without the extension, which measures them."""
    return {
        dtype: workers["fastattn"].ask("limits", dtype=dtype) for dtype in dtypes if "fastattn" in workers
    }


def compare(workers: dict[str, WorkerProcess], problem: Any, effort: Effort, end: float) -> dict[str, Json]:
    """Every engine on one problem. First each engine prepares it, then rounds measure all engines in turn.

    After the time `end` no round begins but the first one.
    """

    def ask(name: str, do: str, **arguments: Any) -> Json:
        answer = workers[name].ask(do, **arguments)
        if workers[name].broken:
            workers[name] = workers[name].another()
        return answer

    rows, want = problem.reference()
    prepared = {"problem": problem, "rows": rows, "want": want}
    answers = {name: ask(name, "prepare", **prepared) for name in workers}
    for name, answer in answers.items():
        if problem.alone and "way" in answer:
            workers[name] = workers[name].another()
            answers[name] = ask(name, "prepare", **prepared, only=answer["way"])
    timings: dict[str, list[float]] = {name: [] for name, answer in answers.items() if "seconds" in answer}
    for index in range(effort.rounds):
        if index and time.monotonic() > end:
            break
        for name, times in list(timings.items()):
            if times and index * max(times[-1], effort.seconds) > effort.most:
                continue  # a slow engine gets fewer rounds
            reply = ask(name, "measure", seconds=effort.seconds)
            if "failed" in reply:
                answers[name] = reply
                del timings[name]
            else:
                times.append(reply["seconds"])
    for name, times in timings.items():
        answers[name] |= {"seconds": median(times), "rounds": times}
    for name in [name for name in answers if f"{name} {SINGLE}" in answers]:
        single = answers.pop(f"{name} {SINGLE}")
        if single.get("seconds", inf) < answers[name].get("seconds", inf):
            answers[name] = single | {"way": f"{single['way']} {SINGLE}".strip()}
    return answers


def cpu_name() -> str:
    """The kernel's name of the CPU: that of `platform.processor` is empty on most Linux machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
