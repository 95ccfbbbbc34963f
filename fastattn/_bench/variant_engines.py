"""What the bench of variants times, by name."""

from __future__ import annotations

from fastattn._bench import flex_peer
from fastattn._bench.suite import Engine
from fastattn._bench.variant_problem import VariantProblem
from fastattn._bench.ways import Way, enter_for_good
from fastattn._engine import settings


def _compiled(problem: VariantProblem, threads: int) -> dict[str, Way]:
    return _own(problem, "compiled")


def _fallback(problem: VariantProblem, threads: int) -> dict[str, Way]:
    return _own(problem, "numpy")


def _own(problem: VariantProblem, backend: str) -> dict[str, Way]:
    """Threads are those that the worker's environment says."""
    enter_for_good(settings.forced(backend=backend))
    return {"": Way(problem.call(), lambda out: out.reshape(-1, out.shape[-1]))}


ENGINES = {
    "fastattn": Engine(("fastattn._engine.core._core",), _compiled, "the compiled kernels"),
    "fallback": Engine(("fastattn",), _fallback, "fastattn without its extension"),
    "torch": Engine(("torch",), flex_peer.sdpa_biased, "torch's scaled_dot_product_attention, a dense mask"),
    "flex": Engine(("torch",), flex_peer.flex_modified, "torch's FlexAttention, compiled"),
}
