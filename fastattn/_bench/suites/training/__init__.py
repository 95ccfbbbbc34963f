"""The suite "training": gradients of attention, and whole steps of training."""

from __future__ import annotations

from fastattn._bench.cases import DTYPES
from fastattn._bench.suite import Suite
from fastattn._bench.suites.training.engines import ENGINES
from fastattn._bench.suites.training.problem import GradientProblem, plan

SUITE = Suite(
    ENGINES,
    plan,
    GradientProblem,
    DTYPES,
    "batch, heads, len_q, len_k, head_dim",
    "about ten minutes",
    memory=True,
)
