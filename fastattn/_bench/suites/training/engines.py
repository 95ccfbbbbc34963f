"""What the suite "training" times: fastattn, its fallback, torch's autograd and JAX's."""

from __future__ import annotations

from typing import Any

import numpy as np

import fastattn
from fastattn._bench.suite import Engine, own_engines
from fastattn._bench.suites.training import peers
from fastattn._bench.suites.training.problem import BACKWARD, GradientProblem, joined
from fastattn._bench.suites.training.steps import StepProblem, own_step
from fastattn._bench.ways import Way
from fastattn.functional import attention_backward


def _own(problem: GradientProblem | StepProblem, backend: str) -> Way:
    if isinstance(problem, StepProblem):
        return own_step(problem)
    arrays, dout, options = problem.arrays(), problem.dout(), problem.attention.options()
    into = tuple(np.empty_like(x) for x in arrays)

    def forward() -> Any:
        return fastattn.attention(*arrays, return_lse=True, **options)

    def backward(out: Any, lse: Any) -> Any:
        return attention_backward(dout, *arrays, out, lse, into=into, **options)

    if problem.kind == BACKWARD:
        out, lse = forward()
        return Way(lambda: backward(out, lse), joined)
    return Way(lambda: backward(*forward()), joined)


ENGINES = {
    **own_engines(_own),
    "torch": Engine(("torch",), peers.torch_autograd, "torch's SDPA and its gradient by autograd"),
    "jax": Engine(("jax",), peers.jax_vjp, "jax.nn.dot_product_attention and jax.vjp, compiled"),
}
