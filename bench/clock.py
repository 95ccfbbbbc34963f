"""The clock of the measurements that have one engine, and their inputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from fastattn._bench.cases import Array, as_dtype

Call = Callable[[], Any]


def normal(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> Array:
    """Standard normal numbers of a dtype that may be bfloat16."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(as_dtype(dtype))


def seconds(call: Call, clock: Callable[[], float] = time.perf_counter) -> float:
    """The time of one call."""
    begin = clock()
    call()
    return clock() - begin


def shortest(
    *calls: Call, during: float = 2.0, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """The shortest time of each call, in seconds; they take turns for so long each, and warm up before."""
    times = [float("inf")] * len(calls)
    for call in calls:
        call()
    end = time.perf_counter() + during * len(calls)
    while times[0] == float("inf") or time.perf_counter() < end:
        times = [min(best, seconds(call, clock)) for best, call in zip(times, calls, strict=True)]
    return times


def rounds_of(count: int, *calls: Call) -> list[tuple[float, ...]]:
    """The times of all calls in each of so many rounds, in which they take turns; they warm up before."""
    for call in calls:
        call()
    return [tuple(seconds(call) for call in calls) for _ in range(count)]
