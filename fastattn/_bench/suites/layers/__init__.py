"""The suite "layers": linear maps, passes over memory, and Transformer layers."""

from __future__ import annotations

from fastattn._bench.suite import Suite
from fastattn._bench.suites.layers.engines import ENGINES
from fastattn._bench.suites.layers.problem import DTYPES, LayerProblem, plan

SUITE = Suite(
    ENGINES,
    plan,
    LayerProblem,
    DTYPES,
    "rows, in, out of a weight; batch, length, width of a layer",
    "about five minutes",
)
