"""The suite "variants": variants of attention."""

from __future__ import annotations

from fastattn._bench.cases import DTYPES
from fastattn._bench.suite import Suite
from fastattn._bench.suites.variants.engines import ENGINES
from fastattn._bench.suites.variants.problem import VariantProblem, plan

SUITE = Suite(
    ENGINES,
    plan,
    VariantProblem,
    DTYPES,
    "batch, heads, len_q, len_k, head_dim, and variants of attention below them",
    "about five minutes",
)
