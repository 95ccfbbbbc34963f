"""A process that runs one engine when told: ``python -m fastattn._bench.worker SUITE ENGINE THREADS``.

Requests and replies are lines of JSON on standard input and output. Every engine has a process of its own:
in one process, the spinning thread pools of several engines slow each other down.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from fastattn._bench.cases import Array
from fastattn._bench.suites import SUITES
from fastattn._bench.ways import Unsupported, Way

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

# Seconds. A process that was stopped wakes with all its threads on one core, and computes at the speed of one
# until the scheduler has parted them.
WARM_UP = 0.1


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def largest_error(out: Array, rows: Array, want: Array) -> float:
    """Of those rows of `out` (..., n), counted over all its leading axes."""
    got = out.reshape(-1, out.shape[-1])[rows].astype(np.float64)
    return float(np.abs(got - want).max(initial=0))


def time_call(call: Callable[[], Any], seconds: float) -> float:
    """The median over samples of at least a millisecond, after warming up; of very long calls, one."""
    begin = time.perf_counter()
    once = 0.0
    while once == 0.0 or time.perf_counter() < begin + WARM_UP:
        start = time.perf_counter()
        call()
        once = time.perf_counter() - start
    if once > 10 * WARM_UP:
        return once
    repeat = max(1, round(1e-3 / once))
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while not samples or time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(repeat):
            call()
        samples.append((time.perf_counter() - start) / repeat)
    return median(samples)


class Worker:
    """Answers requests about one engine; holds the problem prepared last."""

    def __init__(self, suite: str, engine: str, threads: int) -> None:
        self.suite = SUITES[suite]
        self.engine = self.suite.engines[engine]
        self.threads = threads
        self.way: Way | None = None

    def hello(self) -> dict[str, Any]:
        return {"what": self.engine.what, "version": self.engine.version()}

    def prepare(self, problem: list[Any], reference: str) -> dict[str, Any]:
        """Try every way to compute the problem, keep the fastest of those whose result is right.

        `reference` is a file with the numbers of some rows and their float64 result.
        """
        self.way = None  # before the next problem takes memory
        task = self.suite.problem(problem)
        ways = self.engine.ways(task, self.threads)
        with np.load(reference) as saved:
            rows, want = saved["rows"], saved["want"]
        best: dict[str, Any] = {}
        reasons = []
        for name, way in ways.items():
            try:
                start = time.perf_counter()
                result = way.call()
                seconds = time.perf_counter() - start
                error = largest_error(way.read(result), rows, want)
                if not error <= task.tolerance:
                    raise ArithmeticError(f"wrong result, off by {error:.2g}")
                if len(ways) > 1 and seconds < 1:
                    seconds = time_call(way.call, 0.02)
            except Exception as reason:
                reasons.append(f"{name} {describe(reason)}".strip())
                continue
            if not best or seconds < best["seconds"]:
                self.way, best = way, {"seconds": seconds, "error": error, "way": name}
        return best or {"failed": "; ".join(reasons)}

    def measure(self, seconds: float) -> dict[str, Any]:
        assert self.way is not None
        return {"seconds": time_call(self.way.call, seconds)}

    def limits(self, dtype: str) -> dict[str, Any]:
        """What the machine can do at most, as measured by the extension."""
        from fastattn._engine.settings import core

        # Narrow types are computed in float32 where there are no instructions for their products.
        narrow = dtype in ("float16", "int8") or not core.fma_peak(dtype, self.threads)
        bandwidth = core.read_bandwidth(self.threads)
        wall, cpu = time.perf_counter(), time.process_time()  # now that all threads are awake
        flops = core.fma_peak("float32" if narrow else dtype, self.threads)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return {"flops": flops, "bytes": bandwidth, "cpu_share": cpu / (self.threads * wall)}


def main(suite: str, engine: str, threads: str) -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not end up between the replies
    if sys.platform == "linux":  # a stopped process would not notice that the bench is gone
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if hasattr(os, "sched_setaffinity"):  # for the pools that size themselves by it
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(threads)])
    worker = Worker(suite, engine, int(threads))
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = getattr(worker, request.pop("do"))(**request)
        except Unsupported as reason:
            reply = {"unsupported": str(reason)}
        except Exception as error:
            reply = {"failed": describe(error)}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
