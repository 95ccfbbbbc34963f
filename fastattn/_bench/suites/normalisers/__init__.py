"""The suite "normalisers": attention with other normalisers and other scores."""

from __future__ import annotations

from fastattn._bench.suite import Suite
from fastattn._bench.suites.normalisers.engines import ENGINES
from fastattn._bench.suites.normalisers.problem import DTYPES, NormaliserProblem, plan

SUITE = Suite(
    ENGINES,
    plan,
    NormaliserProblem,
    DTYPES,
    "batch, heads, len_q, len_k, head_dim",
    "about five minutes",
)
