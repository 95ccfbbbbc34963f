"""All problems of ``python -m fastattn bench --full`` under pytest-benchmark, of one suite or of all."""

import atexit
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from fastattn._bench.cases import SHAPES
from fastattn._bench.suite import Request
from fastattn._bench.suites import SUITES
from fastattn._bench.suites.attention.problem import AttentionProblem
from fastattn._bench.suites.models.problem import DECODER, SMALL_DECODER


@cache
def folder():
    """For the files of models, until pytest ends."""
    made = TemporaryDirectory()
    atexit.register(made.cleanup)
    return Path(made.name)


def problems(suite, dtype):
    """The suite's problems in `dtype`, with a short Llama; attention also with key lengths."""
    if dtype not in SUITES[suite].dtypes:
        return
    for section in SUITES[suite].plan(Request(dtype, full=True, folder=folder())):
        for problem in section.problems:
            yield replace(problem, shape=SMALL_DECODER) if problem.shape == DECODER else problem
    if suite == "attention":
        yield from (AttentionProblem(shape, "kv_lengths", dtype, 0) for shape in SHAPES)


def test_suite(time_problem):
    time_problem()
