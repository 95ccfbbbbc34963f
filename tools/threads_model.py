"""Simulate what more cores do with the tasks of a call, from their times on one thread.

    python tools/threads_model.py {cores,order,cut,hybrid,memory} [--cores 2 8 16 ...] [--only WORD]

For each number of cores the call is cut as for so many threads, and its tasks run on one thread of a
build that notes them (see tools/threads.py). Then every core takes the next task when it is free.
`cores` says how much longer that takes than if all cores ended together, and how many tasks there are.
`order` compares the queue, the longest tasks first, and tasks shared out beforehand. `cut` says how much
longer the tasks take together than cut for the first number. `hybrid` makes half of the cores slower
(the queue, shared out). `memory` says how many times as fast as one core, without a limit and at 50, 200
and 400 GB/s. Caches are those of the machine at hand.
"""

import argparse
import heapq
from collections.abc import Callable

import numpy as np
from threads import CALLS, Call, Runtime, runs_of, task_seconds

from fastattn._engine import settings
from fastattn._engine.core import _core

Simulation = Callable[[np.ndarray, np.ndarray], float]

SLOW = 0.55  # speed of a slow core of a hybrid processor
GIGABYTES = {  # that a call reads and writes at least, if nothing is in a cache
    "attention 8 x 2048 x 64": 16.8e-3, "decode 32 x 4096 x 128": 134.2e-3,
    "decode 32:8 x 4096 x 128": 33.6e-3, "decode 8 x 12 x 1024 x 64": 50.3e-3,
    "linear 128, 384, 1536": 3.3e-3, "linear 2048, 2048, 2048": 50.3e-3, "linear 4096, 384, 1536": 33.8e-3,
    "linear 1, 2048, 8192": 67.1e-3, "norm 4096, 384": 12.6e-3,
}  # fmt: skip


def queue(tasks: np.ndarray, speeds: np.ndarray) -> float:
    """Compute when the last core ends: whoever is free takes the next task, the fastest first."""
    free = [(0.0, -speed) for speed in speeds]
    heapq.heapify(free)
    for seconds in tasks:
        when, speed = heapq.heappop(free)
        heapq.heappush(free, (when + seconds / -speed, speed))
    return max(when for when, _ in free)


def shared_out(tasks: np.ndarray, speeds: np.ndarray) -> float:
    """Compute the time where every core gets its tasks beforehand, as many as every other."""
    ends = np.arange(len(speeds) + 1) * len(tasks) // len(speeds)
    return max(tasks[a:b].sum() / v for a, b, v in zip(ends, ends[1:], speeds, strict=False))


def measured(call: Call, cores: int, runtime: Runtime) -> list[tuple[np.ndarray, bool]]:
    """Time the tasks of each loop of a call cut for so many threads, and tell whether it is parallel."""
    with runtime.one_thread():
        runs = runs_of(call, cores, runtime, 0.25)
    return [(task_seconds(runs, i), loop.threads > 1) for i, loop in enumerate(runs[0].loops)]


def excess(loops: list[tuple[np.ndarray, bool]], speeds: np.ndarray, run: Simulation = queue) -> float:
    """Time of all loops over what it would be if all cores ended together."""
    ends = sum(run(x, speeds if parallel else speeds[:1]) for x, parallel in loops)
    ideal = sum(float(x.sum()) for x, _ in loops) / speeds.sum()
    return float(ends / ideal)


def describe(name: str, what: str, call: Call, many: list[int], runtime: Runtime) -> str:
    """One line of the table."""
    cells = []
    first = 0.0
    for n in many:
        loops, even = measured(call, n, runtime), np.ones(n)
        total = sum(float(x.sum()) for x, _ in loops)
        first = first or total
        if what == "cores":
            cells.append(f"{excess(loops, even):.2f} ({sum(len(x) for x, _ in loops)})")
        elif what == "cut":
            cells.append(f"{total / first:.2f}")
        elif what == "hybrid":
            mixed = np.where(np.arange(n) < n / 2, 1, SLOW)
            cells.append(f"{excess(loops, mixed):.2f} {excess(loops, mixed, shared_out):.2f}")
        elif what == "order":
            largest = [(np.sort(x)[::-1], parallel) for x, parallel in loops]
            ratios = excess(loops, even), excess(largest, even), excess(loops, even, shared_out)
            cells.append(" ".join(f"{x:.2f}" for x in ratios))
        else:  # how many times one core's speed, without a limit and with those of memory
            alone = total
            ends = sum(queue(x, even if parallel else even[:1]) for x, parallel in loops)
            limits = [GIGABYTES.get(name, 0) / rate for rate in (50, 200, 400)]
            cells.append(" ".join(f"{alone / max(ends, limit):.1f}" for limit in (0, *limits)))
    return f"{name:28} " + "   ".join(f"{cell:>12}" for cell in cells)


def main() -> None:
    """Parse the command line, measure and simulate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("cores", "order", "cut", "hybrid", "memory"))
    parser.add_argument("--cores", type=int, nargs="+", default=[2, 8, 16, 32, 64, 128])
    parser.add_argument("--only", default="", help="calls whose names contain this")
    arguments = parser.parse_args()
    settings._most_used = max(arguments.cores)  # all of them run on one thread
    runtime = Runtime()
    print(_core.get_isa(), arguments.what, *arguments.cores, "cores")
    for name, make in CALLS.items():
        if arguments.only in name:
            print(describe(name, arguments.what, make(), arguments.cores, runtime), flush=True)


if __name__ == "__main__":
    main()
