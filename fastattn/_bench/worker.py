"""A process that runs one engine: ``python -m fastattn._bench.worker SUITE ENGINE THREADS``.

Requests and replies are lines of JSON on standard input and output. Every engine has a process of its own,
because the spinning thread pools of several engines in one process slow each other down.
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

from fastattn._bench.busy import fma_peak
from fastattn._bench.cases import Array
from fastattn._bench.suites import SUITES
from fastattn._bench.ways import Unsupported, Way, peak_memory
from fastattn._engine.settings import core

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

# Seconds before a measurement. A stopped process wakes up with all its threads on one core. Until the
# scheduler has spread them over the cores, it computes at the speed of one thread.
WARM_UP = 0.1


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def some_rows(out: Array, rows: Array) -> Array:
    """The `rows` of `out` in float64; the leading axes of `out` (..., n) count as one."""
    got: Array = out.reshape(-1, out.shape[-1])[rows].astype(np.float64)
    return got


def largest_error(out: Array, rows: Array, want: Array) -> float:
    """How far the `rows` of `out` are from `want`."""
    return float(np.abs(some_rows(out, rows) - want).max(initial=0))


def time_call(call: Callable[[], Any], seconds: float) -> float:
    """Seconds of a call: the median of samples of at least a millisecond, after warming up.

    A call of more than a second is timed once.
    """
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
    """Answers requests about one engine. It holds the problem that it prepared last."""

    def __init__(self, suite: str, engine: str, threads: int) -> None:
        self.suite = SUITES[suite]
        self.engine = self.suite.engines[engine]
        self.threads = threads
        self.way: Way | None = None

    def hello(self) -> dict[str, Any]:
        return {"what": self.engine.what, "version": self.engine.version()}

    def prepare(self, problem: list[Any], reference: str, only: str | None = None) -> dict[str, Any]:
        """Try every way to compute the problem, or one; keep the fastest whose result is right.

        `reference` is a file with the indices of some rows and these rows in float64.
        """
        self.way = None  # frees its memory before the next problem needs some
        task = self.suite.problem.from_json(problem)
        ways = self.engine.named_ways(task, self.threads)
        if only is not None:
            ways = {only: ways[only]}
        with np.load(reference) as saved:
            rows, want = saved["rows"], saved["want"]
        best: dict[str, Any] = {}
        reasons = []
        for name, way in ways.items():
            try:
                start = time.perf_counter()
                way.load()
                load = time.perf_counter() - start
                start = time.perf_counter()
                result = way.call()
                seconds = time.perf_counter() - start
                out = way.read(result)
                error = largest_error(out, rows, want)
                if not error <= task.tolerance:
                    raise ArithmeticError(f"wrong result, off by {error:.2g}")
                if len(ways) > 1 and seconds < 1:
                    seconds = time_call(way.call, 0.02)
            except Exception as reason:
                reasons.append(f"{name} {describe(reason)}".strip())
                continue
            if not best or seconds < best["seconds"]:
                self.way, best = way, {"seconds": seconds, "error": error, "way": name, "load": load}
                best |= task.quality(some_rows(out, rows), want)
        return best or {"failed": "; ".join(reasons)}

    def measure(self, seconds: float) -> dict[str, Any]:
        assert self.way is not None
        return {"seconds": time_call(self.way.call, seconds), "peak": peak_memory()}

    def limits(self, dtype: str) -> dict[str, Any]:
        """The most that the machine can do, as the extension measures it."""
        # Where the CPU has no instruction for products of a narrow type, the limit is that of float32.
        narrow = dtype == "float16" or not core.fma_peak(dtype, self.threads)
        bandwidth = core.read_bandwidth(self.threads)
        # Now that all threads are awake:
        flops, share = fma_peak("float32" if narrow else dtype, self.threads)
        return {"flops": flops, "bytes": bandwidth, "cpu_share": share}


def main(suite: str, engine: str, threads: str) -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard error now, not between the replies
    if sys.platform == "linux":  # end with the bench: a stopped process would not notice that it is gone
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
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
