"""The cases of ``python -m fastattn bench`` under pytest-benchmark, grouped by shape and variant."""

import numpy as np
import pytest

from fastattn._bench import oracle
from fastattn._bench.engines import ENGINES
from fastattn._bench.ways import Unsupported
from fastattn._bench.worker import TOLERANCE, time_call


def test_attention(benchmark, engine, problem, threads):
    benchmark.group = f"{problem.variant} {problem.shape.name} {problem.dtype}"
    try:
        ways = ENGINES[engine].ways(problem, threads)
    except Unsupported as reason:
        pytest.skip(f"{engine} {reason}")
    name, way = min(ways.items(), key=lambda item: time_call(item[1].call, 0.02) if len(ways) > 1 else 0)

    rows = np.random.default_rng(0).permutation(problem.shape.len_q)[:16]
    want, _ = oracle.attention(*problem.inputs(), rows=rows, **problem.options())
    error = np.abs(way.read(way.call())[..., rows, :].astype(np.float64) - want).max()
    assert error <= TOLERANCE[problem.dtype]

    benchmark(way.call)
    rate = "GB/s" if problem.shape.decode else "GFLOP/s"
    benchmark.extra_info.update({"way": name, "error": float(error)})
    if benchmark.stats:  # none with --benchmark-disable
        benchmark.extra_info[rate] = round(problem.work / benchmark.stats.stats.median / 1e9, 1)
