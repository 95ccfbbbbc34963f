"""``python -m fastattn bench``: every engine on every problem, interleaved, each in a process of its own."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

import fastattn
from fastattn._args.errors import naming
from fastattn._bench.pool import Crash, WorkerProcess
from fastattn._bench.suite import Problem, Request, Section
from fastattn._bench.suites import SUITES

Json = dict[str, Any]
Row = tuple[str, Problem[Any]]  # the title of a section, and one of its problems


class Effort(NamedTuple):
    """How the time of a run is spent."""

    seconds: float  # for one measurement
    rounds: int  # the most measurements of one engine on one problem
    most: float  # seconds of these together, after which an engine is measured no more
    total: float  # seconds of the whole run, shared by all problems; after them no problem is begun


FULL = Effort(seconds=0.15, rounds=5, most=8.0, total=float("inf"))


def brief(seconds: float) -> Effort:
    """As many rounds as `seconds` allow: more of them where there are no peers."""
    return Effort(seconds=0.05, rounds=15, most=1.0, total=seconds)


class NoRows(Exception):
    """No row has the name that was asked for; the message lists all names."""


def chosen(sections: list[Section], only: str) -> list[Section]:
    """The sections, reduced to the rows whose title or name contains `only`."""
    kept = [
        section._replace(problems=[x for x in section.problems if only in f"{section.title} {x.name}"])
        for section in sections
    ]
    if any(section.problems for section in kept):
        return [section for section in kept if section.problems]
    names = "\n".join(f"  {x.title}: {'; '.join(y.name for y in x.problems)}" for x in sections)
    raise NoRows(f"--only {only} is in no row; there are\n{names}")


def run(
    suite: str, *, dtype: str | None, only: str, effort: Effort, threads: int, command: str, seed: int
) -> Json:
    """Plan and measure. The text, the picture and ``--json`` are made from the result."""
    full = effort == FULL
    engines = [
        name
        for name, engine in SUITES[suite].engines.items()
        if engine.installed() and (full or name != "fallback" or not fastattn.available_isas())
    ]
    with TemporaryDirectory() as folder, naming(folder):
        request = Request(dtype, full or only != "", seed, Path(folder))
        sections = chosen(SUITES[suite].plan(request), only)
        with started(suite, engines, threads) as workers:
            measured = measure(workers, sections, effort, Path(folder), memory=SUITES[suite].memory)
    return {
        "command": command,
        "suite": suite,
        "full": full,
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith("FASTATTN_")
        },
        "seed": seed,
        "threads": threads,
        "machine": {"cpu": cpu_name(), "cpus": os.cpu_count(), "system": platform.platform()},
        "config": dict(fastattn.show_config()),
        "shapes": SUITES[suite].shapes,
        "missing": missing_packages(suite),
        **measured,
    }


def measure(
    workers: dict[str, WorkerProcess], sections: list[Section], effort: Effort, folder: Path, *, memory: bool
) -> Json:
    """All that only the workers can tell; `memory`: of each engine, too, as a suite may ask."""
    start = time.monotonic()
    problems = [(section.title, problem) for section in sections for problem in section.problems]
    dtypes = list(dict.fromkeys(problem.limit for _, problem in problems))
    engines = {name: worker.ask("hello") for name, worker in workers.items()}
    limits = measure_limits(workers, dtypes)
    rows: list[Json] = []
    left_out = []
    for title, problem in with_progress(problems):
        left = start + effort.total - time.monotonic()
        if left < 0 and rows:
            left_out.append(f"{title} {problem.name}")
            continue
        share = left / (len(problems) - len(rows))
        rows.append(
            {
                "section": title,
                "shape": {**problem.shape._asdict(), "name": problem.name},
                "variant": problem.variant,
                "dtype": problem.dtype,
                "limit": problem.limit,
                "unit": problem.unit,
                "work": problem.work,
                "engines": compare(workers, problem, effort, folder, time.monotonic() + share, memory=memory),
            }
        )
    again = measure_limits(workers, dtypes)
    shares = [limit["cpu_share"] for found in (limits, again) for limit in found.values()]
    return {
        "engines": engines,
        "limits": {  # other programs can only make a measured limit too low, so the higher one counts
            dtype: {unit: max(limits[dtype][unit], again[dtype][unit]) for unit in ("flops", "bytes")}
            for dtype in limits
        },
        "cpu_share": min(shares, default=1.0),
        "rows": rows,
        "left_out": left_out,
    }


def compare(
    workers: dict[str, WorkerProcess],
    problem: Problem[Any],
    effort: Effort,
    folder: Path,
    end: float,
    *,
    memory: bool = False,
) -> dict[str, Json]:
    """Every engine on one problem. First each engine prepares it, then rounds measure all engines in turn.

    After the time `end` no round begins but the first one. With `memory`, an engine that has found its
    fastest way takes it in a new process.
    """

    def ask(name: str, do: str, **arguments: Any) -> Json:
        try:
            return workers[name].ask(do, **arguments)
        except Crash as crash:
            workers[name] = workers[name].another()
            return {"failed": str(crash)}

    def prepare(name: str, **more: Any) -> Json:
        return ask(name, "prepare", problem=problem.to_json(), reference=reference, **more)

    reference = str(folder / "reference.npz")
    rows, want = problem.reference()
    np.savez(reference, rows=rows, want=want)
    answers = {}
    for name in workers:
        answer = prepare(name)
        if memory and "way" in answer:
            workers[name] = workers[name].another()
            answer = prepare(name, only=answer["way"])
        answers[name] = answer
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
                answers[name] |= {"peak": reply["peak"]} if memory else {}
        timings = {name: times for name, times in timings.items() if "failed" not in answers[name]}
    for name, times in timings.items():
        answers[name] = {**answers[name], "seconds": median(times), "rounds": times}
    return answers


def measure_limits(workers: dict[str, WorkerProcess], dtypes: list[str]) -> dict[str, Json]:
    """The machine's FLOP/s and bytes/s, and the share of CPU time to be had, for each dtype.

    Empty without the extension, which measures them.
    """
    if "fastattn" not in workers:
        return {}
    return {dtype: workers["fastattn"].ask("limits", dtype=dtype) for dtype in dtypes}


@contextmanager
def started(suite: str, engines: list[str], threads: int) -> Iterator[dict[str, WorkerProcess]]:
    """A worker for each engine."""
    workers = {name: WorkerProcess(suite, name, threads) for name in engines}
    try:
        yield workers
    finally:
        for worker in workers.values():
            worker.close()


def missing_packages(suite: str) -> list[str]:
    """What to install to compare with all peers."""
    peers = [
        engine for engine in SUITES[suite].engines.values() if not engine.packages[0].startswith("fastattn")
    ]
    return sorted({package for engine in peers for package in engine.missing()})


def with_progress(problems: list[Row]) -> Iterator[Row]:
    """The same problems, while a bar shows how many are done, if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield from problems
        return
    form = "{percentage:3.0f}% {bar:30} {elapsed}<{remaining}  {desc}"
    with tqdm(total=len(problems), leave=False, bar_format=form, disable=None) as bar:  # None: on terminals
        for title, problem in problems:
            bar.set_description(f"{title} {problem.name}")
            yield title, problem
            bar.update()


def cpu_name() -> str:
    """The kernel's name of the CPU: that of `platform.processor` is empty on most Linux machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
