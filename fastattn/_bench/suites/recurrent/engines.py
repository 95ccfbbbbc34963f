"""What the suite "recurrent" times: fastattn, its fallback, plain NumPy, and torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn import attention
from fastattn._bench.suite import Engine, own_engines
from fastattn._bench.suites.recurrent import peers
from fastattn._bench.suites.recurrent.problem import SOFTMAX, RecurrentProblem
from fastattn._bench.ways import Unsupported, Way
from fastattn.functional import linear_attention


def _own(problem: RecurrentProblem, backend: str) -> Way:
    q, k, v = problem.arrays()
    out = np.empty_like(q)
    if problem.variant == SOFTMAX:
        if backend == "numpy":
            raise Unsupported("is timed by the suite attention")
        return Way(lambda: attention(q, k, v, causal=True, out=out))
    options: dict[str, Any] = {"rule": problem.variant, "out": out, **problem.gates()}
    if not problem.is_step:
        return Way(lambda: linear_attention(q, k, v, **options))
    state = problem.state()
    # A step of the gated delta rule may be repeated on its own state (see `gates`). Any other rule adds to
    # the state at every call, so it writes to another array.
    options["out_state"] = state if problem.variant == "gated_delta" else np.empty_like(state)
    return Way(lambda: linear_attention(q, k, v, state=state, **options)[0])


def _numpy(problem: RecurrentProblem, threads: int) -> Way:
    """Token by token, all heads at a time."""
    if problem.variant == SOFTMAX or problem.shape.len_q > 4096:
        raise Unsupported("takes too long, or too much memory")
    return Way(lambda: problem.recurrence(np.dtype(problem.dtype).type))


ENGINES = {
    **own_engines(_own),
    "numpy": Engine(("numpy",), _numpy, "plain NumPy, token by token"),
    "torch": Engine(
        ("torch", "transformers"), peers.torch_rules, "transformers' torch code of Qwen3-Next; SDPA"
    ),
}
