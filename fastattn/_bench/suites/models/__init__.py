"""The suite "models": whole models."""

from __future__ import annotations

from fastattn._bench.suite import Suite
from fastattn._bench.suites.models.engines import ENGINES
from fastattn._bench.suites.models.problem import DTYPES, ModelProblem, plan

SUITE = Suite(
    ENGINES,
    plan,
    ModelProblem,
    DTYPES,
    "batch, length",
    "about a quarter of an hour",
)
