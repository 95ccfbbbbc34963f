"""What the suite "variants" times: fastattn, its fallback, and torch."""

from __future__ import annotations

from fastattn._bench.suite import Engine, own_engines
from fastattn._bench.suites.variants import peers
from fastattn._bench.suites.variants.problem import VariantProblem
from fastattn._bench.ways import Way


def _own(problem: VariantProblem, backend: str) -> Way:
    return Way(problem.call())


ENGINES = {
    **own_engines(_own),
    "torch": Engine(("torch",), peers.sdpa_biased, "torch's scaled_dot_product_attention, a dense mask"),
    "flex": Engine(("torch",), peers.flex_modified, "torch's FlexAttention, compiled"),
}
