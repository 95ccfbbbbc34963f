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
from fastattn._bench import oracle
from fastattn._bench.cases import SHAPES, fresh_shapes, grouped
from fastattn._bench.engines import ENGINES
from fastattn._bench.pool import Crash, WorkerProcess
from fastattn._bench.problem import TINY, Problem

Json = dict[str, Any]


class Section(NamedTuple):
    """Rows of the table that belong together."""

    title: str
    problems: list[Problem]


class Effort(NamedTuple):
    """How much time goes where."""

    seconds: float  # of one measurement
    rounds: int  # measurements of one engine on one problem
    most: float  # seconds of those together, after which an engine gets no more of them
    budget: float  # seconds of the whole run, after which no new problem is begun


FULL = Effort(seconds=0.15, rounds=5, most=8.0, budget=float("inf"))
QUICK = Effort(seconds=0.02, rounds=2, most=0.25, budget=50.0)


def plan(dtype: str | None, quick: bool, seed: int) -> list[Section]:
    """What is measured, in float32 unless `dtype` says otherwise; with `quick` a part of it."""
    main = dtype or "float32"

    def section(title: str, shapes: Any, variant: str = "plain", dtype: str = main) -> Section:
        return Section(f"{title}, {dtype}", [Problem(shape, variant, dtype, seed) for shape in shapes])

    prefill = [shape for shape in SHAPES if not shape.decode]
    decode = [shape for shape in SHAPES if shape.decode]
    if quick:
        small = [s for s in fresh_shapes(seed) if s.flops < 4e9 and s.kv_bytes(main) < 5e7]
        short, middle, long = prefill[1], prefill[2], prefill[3]
        return [
            section("no mask", [short, middle, long, *decode]),
            section("causal", [long], "causal"),
            section("padding mask", [short], "padding_mask"),
            section("grouped heads", [grouped(middle), grouped(decode[0])]),
            section("tiny call", [TINY]),
            section(f"fresh shapes (seed {seed})", small[:2]),
        ]
    sections = [
        section("no mask", SHAPES),
        section("causal", prefill, "causal"),
        section("padding mask", SHAPES, "padding_mask"),
        section("grouped heads", map(grouped, SHAPES)),
        section(f"fresh shapes (seed {seed})", fresh_shapes(seed)),
        section("tiny call", [TINY]),
    ]
    if dtype is None and has_bfloat16():
        sections.insert(4, section("no mask", [s for s in prefill if s.len_q >= 2048], dtype="bfloat16"))
    return sections


def has_bfloat16() -> bool:
    try:
        import ml_dtypes  # noqa: F401
    except ImportError:
        return False
    return True


def run(sections: list[Section], *, threads: int, effort: Effort, command: str, seed: int) -> Json:
    """Measure everything; tables, picture and ``--json`` are made of the result."""
    problems = [(section.title, problem) for section in sections for problem in section.problems]
    dtypes = sorted({problem.dtype for _, problem in problems})
    start = time.monotonic()
    with started(threads) as workers, progress(len(problems) * (effort.rounds + 1)) as bar:
        versions = {name: worker.ask("hello")["version"] for name, worker in workers.items()}
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
                    "unit": "bytes" if problem.shape.decode else "flops",
                    "work": problem.work,
                    "engines": compare(workers, problem, threads, effort, bar.update),
                }
            )
        for dtype, again in measure_limits(
            workers, dtypes
        ).items():  # a disturbed measurement is too low, never too high
            limits[dtype] = {unit: max(value, again[unit]) for unit, value in limits[dtype].items()}
    return {
        "command": command,
        "quick": effort is QUICK,
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith("FASTATTN_")
        },
        "seed": seed,
        "threads": threads,
        "machine": {"cpu": cpu_name(), "cpus": os.cpu_count(), "system": platform.platform()},
        "config": dict(fastattn.show_config()),
        "engines": {
            name: {"what": ENGINES[name].what, "version": version} for name, version in versions.items()
        },
        "limits": limits,
        "rows": rows,
        "left_out": left_out,
    }


def compare(
    workers: dict[str, WorkerProcess], problem: Problem, threads: int, effort: Effort, tick: Any
) -> dict[str, Json]:
    """Every engine on one problem: who can do it, then rounds in which each is timed once."""

    def ask(name: str, do: str, **arguments: Any) -> Json:
        try:
            return workers[name].ask(do, **arguments)
        except Crash as crash:
            workers[name].close()
            workers[name] = WorkerProcess(name, threads)
            return {"failed": str(crash)}

    with TemporaryDirectory() as folder:
        reference = str(Path(folder, "reference.npz"))
        rows = np.random.default_rng(problem.seed).permutation(problem.shape.len_q)[:16]
        out, _ = oracle.attention(*problem.inputs(), rows=rows, **problem.options())
        np.savez(reference, rows=rows, out=out)
        answers = {name: ask(name, "prepare", problem=list(problem), reference=reference) for name in workers}
    tick()
    timings: dict[str, list[float]] = {name: [] for name, answer in answers.items() if "seconds" in answer}
    for index in range(effort.rounds):
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
    """FLOP/s and bytes/s that the machine can reach, by dtype; empty without the extension."""
    if "fastattn" not in workers:
        return {}
    return {dtype: workers["fastattn"].ask("limits", dtype=dtype) for dtype in dtypes}


@contextmanager
def started(threads: int) -> Iterator[dict[str, WorkerProcess]]:
    """A worker for every engine that is installed."""
    workers = {name: WorkerProcess(name, threads) for name, engine in ENGINES.items() if engine.installed()}
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
    return tqdm(
        total=total, leave=False, bar_format="{percentage:3.0f}% {bar:30} {elapsed}<{remaining}  {desc}"
    )


def cpu_name() -> str:
    """As the kernel has it; platform.processor() is empty on most Linux machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
