"""The calls of ``python -m fastattn bench --suite variants`` under pytest-benchmark."""

from pathlib import Path

from fastattn._bench.suites.variants.problem import plan

suite = "variants"


def problems(dtype):
    for section in plan(dtype, quick=False, seed=0, folder=Path()):
        yield from section.problems


def test_variants(time_problem):
    time_problem()
