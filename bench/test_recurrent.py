"""The calls of ``python -m fastattn bench --suite recurrent`` under pytest-benchmark."""

from pathlib import Path

from fastattn._bench.suites.recurrent.problem import plan

suite = "recurrent"


def problems(dtype):
    for section in plan(dtype, quick=False, seed=0, folder=Path()):
        yield from section.problems


def test_recurrent(time_problem):
    time_problem()
