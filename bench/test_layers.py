"""The layers of ``python -m fastattn bench --suite layers`` under pytest-benchmark."""

from pathlib import Path

from fastattn._bench.suites.layers.problem import plan

suite = "layers"


def problems(dtype):
    for section in plan(dtype, quick=False, seed=0, folder=Path()):
        yield from section.problems


def test_layer(time_problem):
    time_problem()
