"""``python -m fastattn bench``: every engine on every problem, interleaved, each in a process of its own."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

import fastattn
from fastattn._bench.pool import Crash, WorkerProcess
from fastattn._bench.suite import AnyProblem, Section
from fastattn._bench.suites import SUITES

Json = dict[str, Any]


class Effort(NamedTuple):
    """How much time goes where."""

    seconds: float  # of one measurement
    rounds: int  # measurements of one engine on one problem
    most: float  # seconds of those together, after which an engine gets no more of them
    budget: float  # seconds of the whole run, after which no new problem is begun


FULL = Effort(seconds=0.15, rounds=5, most=8.0, budget=float("inf"))
QUICK = Effort(seconds=0.02, rounds=2, most=0.25, budget=50.0)


class NoRows(Exception):
    """Nothing is called what was asked for; the message lists what there is."""


def chosen(sections: list[Section], only: str) -> list[Section]:
    """The sections with those rows whose title or name holds `only`."""
    kept = [
        section._replace(problems=[x for x in section.problems if only in f"{section.title} {x.shape.name}"])
        for section in sections
    ]
    if any(section.problems for section in kept):
        return [section for section in kept if section.problems]
    names = "\n".join(f"  {x.title}: {'; '.join(y.shape.name for y in x.problems)}" for x in sections)
    raise NoRows(f"--only {only} is in no row; there are\n{names}")


def run(
    suite: str, *, dtype: str | None, only: str, quick: bool, threads: int, command: str, seed: int
) -> Json:
    """Plan and measure; tables, picture and ``--json`` are made of the result."""
    with TemporaryDirectory() as folder:
        sections = chosen(SUITES[suite].plan(dtype, quick, seed, Path(folder)), only)
        with started(suite, threads) as workers:
            measured = measure(workers, sections, QUICK if quick else FULL, Path(folder))
    return {
        "command": command,
        "suite": suite,
        "quick": quick,
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith("FASTATTN_")
        },
        "seed": seed,
        "threads": threads,
        "machine": {"cpu": cpu_name(), "cpus": os.cpu_count(), "system": platform.platform()},
        "config": dict(fastattn.show_config()),
        **measured,
    }


def measure(workers: dict[str, WorkerProcess], sections: list[Section], effort: Effort, folder: Path) -> Json:
    """Everything that is known only from the workers."""
    problems = [(section.title, problem) for section in sections for problem in section.problems]
    dtypes = sorted({problem.dtype for _, problem in problems})
    start = time.monotonic()
    with progress(len(problems) * (effort.rounds + 1)) as bar:
        engines = {name: worker.ask("hello") for name, worker in workers.items()}
        limits = measure_limits(workers, dtypes)
        rows = []
        left_out = []
        for title, problem in problems:
            if time.monotonic() - start > effort.budget:
                left_out.append(f"{title} {problem.shape.name}")
                continue
            bar.set_description(f"{title} {problem.shape.name}")
            rows.append(
                {
                    "section": title,
                    "shape": problem.shape._asdict(),
                    "variant": problem.variant,
                    "dtype": problem.dtype,
                    "unit": problem.unit,
                    "work": problem.work,
                    "engines": compare(workers, problem, effort, folder, bar.update, start + effort.budget),
                }
            )
        again = measure_limits(workers, dtypes)
    shares = [limit["cpu_share"] for found in (limits, again) for limit in found.values()]
    return {
        "engines": engines,
        "limits": {  # a disturbed measurement is too low, never too high
            dtype: {unit: max(limits[dtype][unit], again[dtype][unit]) for unit in ("flops", "bytes")}
            for dtype in limits
        },
        "cpu_share": min(shares, default=1.0),
        "rows": rows,
        "left_out": left_out,
    }


def compare(
    workers: dict[str, WorkerProcess],
    problem: AnyProblem,
    effort: Effort,
    folder: Path,
    tick: Any,
    end: float,
) -> dict[str, Json]:
    """Every engine on one problem: who can do it, then rounds of one time each, but one after `end`."""

    def ask(name: str, do: str, **arguments: Any) -> Json:
        try:
            return workers[name].ask(do, **arguments)
        except Crash as crash:
            workers[name] = workers[name].another()
            return {"failed": str(crash)}

    reference = str(folder / "reference.npz")
    rows, want = problem.reference()
    np.savez(reference, rows=rows, want=want)
    answers = {name: ask(name, "prepare", problem=list(problem), reference=reference) for name in workers}
    tick()
    timings: dict[str, list[float]] = {name: [] for name, answer in answers.items() if "seconds" in answer}
    for index in range(effort.rounds):
        if index and time.monotonic() > end:
            break
        for name, times in timings.items():
            if times and index * max(times[-1], effort.seconds) > effort.most:
                continue  # a slow engine gets fewer rounds
            reply = ask(name, "measure", seconds=effort.seconds)
            if "failed" in reply:
                answers[name] = reply
            else:
                times.append(reply["seconds"])
        timings = {name: times for name, times in timings.items() if "failed" not in answers[name]}
        tick()
    for name, times in timings.items():
        answers[name] = {**answers[name], "seconds": median(times), "rounds": times}
    return answers


def measure_limits(workers: dict[str, WorkerProcess], dtypes: list[str]) -> dict[str, Json]:
    """FLOP/s, bytes/s and the share of CPU time to be had here, by dtype; empty without the extension."""
    if "fastattn" not in workers:
        return {}
    return {dtype: workers["fastattn"].ask("limits", dtype=dtype) for dtype in dtypes}


@contextmanager
def started(suite: str, threads: int) -> Iterator[dict[str, WorkerProcess]]:
    """A worker for every engine that is installed."""
    engines = SUITES[suite].engines
    installed = [name for name, engine in engines.items() if engine.installed()]
    workers = {name: WorkerProcess(suite, name, threads) for name in installed}
    try:
        yield workers
    finally:
        for worker in workers.values():
            worker.close()


def progress(total: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        sys.exit(
            "The bench shows its progress with tqdm, which is not installed: pip install 'fastattn[bench]'"
        )
    form = "{percentage:3.0f}% {bar:30} {elapsed}<{remaining}  {desc}"
    return tqdm(total=total, leave=False, bar_format=form, disable=None)  # None: unless it is a terminal


def cpu_name() -> str:
    """As the kernel has it; platform.processor() is empty on most Linux machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
