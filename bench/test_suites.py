"""All problems of ``python -m bench`` under pytest-benchmark, of one suite or of all."""

import atexit
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import SUITES
from bench.attention import MaskedProblem
from bench.models import SMALL
from bench.suite import SHAPES, Request


@cache
def folder():
    """Folder for the files of models, until pytest ends."""
    made = TemporaryDirectory()
    atexit.register(made.cleanup)
    return Path(made.name)


def problems(suite, dtype):
    """The suite's problems in `dtype`, with a short Llama; attention also with key lengths."""
    if dtype not in SUITES[suite].dtypes:
        return
    for of_section in SUITES[suite].plan(Request(dtype, folder=folder())).values():
        for problem in of_section:
            yield replace(problem, shape=SMALL.get(problem.shape, problem.shape))
    if suite == "attention":
        yield from (MaskedProblem(shape, "kv_lengths", dtype) for shape in SHAPES)


def test_suite(time_problem):
    time_problem()
