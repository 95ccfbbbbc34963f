"""The suite "attention": softmax and sigmoid attention, with masks and grouped heads."""

from __future__ import annotations

from fastattn._bench.cases import DTYPES
from fastattn._bench.suite import Suite
from fastattn._bench.suites.attention.engines import ENGINES
from fastattn._bench.suites.attention.problem import AttentionProblem, plan

SUITE = Suite(
    ENGINES,
    plan,
    AttentionProblem,
    DTYPES,
    "batch, heads, len_q, len_k, head_dim",
    "about a quarter of an hour",
)
