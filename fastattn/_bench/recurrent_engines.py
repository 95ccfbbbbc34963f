"""What the bench of linear attention times, by name."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn import attention
from fastattn._bench.recurrent_problem import SOFTMAX, RecurrentProblem
from fastattn._bench.suite import Engine
from fastattn._bench.ways import Unsupported, Way, enter_for_good
from fastattn._engine import settings
from fastattn.functional import linear_attention


def _compiled(problem: RecurrentProblem, threads: int) -> dict[str, Way]:
    return _own(problem, "compiled")


def _fallback(problem: RecurrentProblem, threads: int) -> dict[str, Way]:
    if problem.variant == SOFTMAX:
        raise Unsupported("is the attention suite's to time")
    return _own(problem, "numpy")


def _own(problem: RecurrentProblem, backend: str) -> dict[str, Way]:
    """Threads are those that the worker's environment says."""
    enter_for_good(settings.forced(backend=backend))
    q, k, v = problem.arrays()
    out = np.empty_like(q)
    if problem.variant == SOFTMAX:
        return {"": Way(lambda: attention(q, k, v, causal=True, out=out))}
    options: dict[str, Any] = {"rule": problem.variant, "out": out, **problem.gates()}
    if problem.shape.length > 1:
        return {"": Way(lambda: linear_attention(q, k, v, **options))}
    state = problem.state()
    if problem.variant != "gated_delta":  # which may be repeated in place; what others add would grow
        options |= {"out_state": np.empty_like(state)}
    else:
        options |= {"out_state": state}
    return {"": Way(lambda: linear_attention(q, k, v, state=state, **options)[0])}


def _numpy(problem: RecurrentProblem, threads: int) -> dict[str, Way]:
    """Token by token, all heads at a time."""
    if problem.variant == SOFTMAX or problem.shape.length > 4096:
        raise Unsupported("takes too long, or too much memory")
    return {"": Way(lambda: problem.recurrence(np.dtype(problem.dtype).type))}


def _torch(problem: RecurrentProblem, threads: int) -> dict[str, Way]:
    """transformers' own fallbacks of Qwen3-Next: chunks, and one step."""
    import torch
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    torch.set_num_threads(threads)
    enter_for_good(torch.inference_mode())
    q, k, v = (torch.from_numpy(x) for x in problem.arrays())
    if problem.variant == SOFTMAX:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return {"": Way(lambda: sdpa(q, k, v, is_causal=True))}
    if problem.variant != "gated_delta" or problem.dtype != "float32":
        raise Unsupported("transformers has the gated delta rule in float32")
    gates = (torch.from_numpy(problem.gates()[name]) for name in ("log_decay", "beta"))
    inputs = [x.transpose(1, 2).contiguous() for x in (q, k, v, *gates)]
    state = torch.from_numpy(problem.state()) if problem.shape.length == 1 else None
    name = "torch_chunk_gated_delta_rule" if state is None else "torch_recurrent_gated_delta_rule"
    rule: Any = getattr(qwen3_next, name)

    def call() -> Any:
        return rule(*inputs, initial_state=state, output_final_state=state is not None)[0]

    return {"": Way(call, lambda out: np.ascontiguousarray(out.transpose(1, 2).numpy()))}


ENGINES = {
    "fastattn": Engine(("fastattn._engine.core._core",), _compiled, "the compiled kernels"),
    "fallback": Engine(("fastattn",), _fallback, "fastattn without its extension"),
    "numpy": Engine(("numpy",), _numpy, "plain NumPy, token by token"),
    "torch": Engine(("torch", "transformers"), _torch, "transformers' torch code of Qwen3-Next; SDPA"),
}
