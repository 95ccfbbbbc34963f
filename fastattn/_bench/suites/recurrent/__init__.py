"""The suite "recurrent": linear attention."""

from __future__ import annotations

from fastattn._bench.suite import Suite
from fastattn._bench.suites.recurrent.engines import ENGINES
from fastattn._bench.suites.recurrent.problem import DTYPES, RecurrentProblem, plan

SUITE = Suite(
    ENGINES,
    plan,
    RecurrentProblem,
    DTYPES,
    "batch, heads, length, head_dim",
    "about five minutes",
)
