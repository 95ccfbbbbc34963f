"""The models of ``python -m fastattn bench --suite models`` under pytest-benchmark; of Llama a short one."""

import atexit
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from fastattn._bench.suites.models.problem import DECODER, SMALL_DECODER, plan

suite = "models"


@cache
def folder():
    """For the files that are made, until pytest ends."""
    made = TemporaryDirectory()
    atexit.register(made.cleanup)
    return Path(made.name)


def problems(dtype):
    for section in plan(dtype, quick=False, seed=0, folder=folder()):
        for problem in section.problems:
            yield problem._replace(shape=SMALL_DECODER) if problem.shape == DECODER else problem


def test_model(time_problem):
    time_problem()
