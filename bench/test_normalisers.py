"""The calls of ``python -m fastattn bench --suite normalisers`` under pytest-benchmark."""

from pathlib import Path

from fastattn._bench.suites.normalisers.problem import plan

suite = "normalisers"


def problems(dtype):
    for section in plan(dtype, quick=False, seed=0, folder=Path()):
        yield from section.problems


def test_rowwise(time_problem):
    time_problem()
