"""Whether other programs hold the CPUs while something is measured."""

from __future__ import annotations

import time

from fastattn._engine.settings import core

# The least share of CPU time that busy threads get on a quiet machine. On two CPUs they got 0.89 to 0.99, and
# 0.3 to 0.6 beside one other program that computed.
QUIET_SHARE = 0.8


def fma_peak(dtype: str, threads: int) -> tuple[float, float]:
    """FLOP/s of multiply-adds, and the share of the CPU time that the threads got meanwhile."""
    wall, cpu = time.perf_counter(), time.process_time()
    flops: float = core.fma_peak(dtype, threads)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return flops, cpu / (threads * wall)
