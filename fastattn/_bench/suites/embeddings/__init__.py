"""The suite "embeddings": texts in, vectors out."""

from __future__ import annotations

from fastattn._bench.suite import Suite
from fastattn._bench.suites.embeddings.engines import ENGINES
from fastattn._bench.suites.embeddings.problem import TextProblem, plan
from fastattn._bench.suites.models.problem import DTYPES

SUITE = Suite(
    ENGINES,
    plan,
    TextProblem,
    DTYPES,
    "texts, and their order",
    "about half an hour",
    memory=True,
)
