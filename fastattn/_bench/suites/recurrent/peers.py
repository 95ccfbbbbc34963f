"""The peer of linear attention: the torch code of Qwen3-Next in transformers."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._bench import runtimes
from fastattn._bench.suites.recurrent.problem import SOFTMAX, RecurrentProblem
from fastattn._bench.ways import Unsupported, Way


def torch_rules(problem: RecurrentProblem, threads: int) -> Way:
    """Chunks for a text and a function of its own for one step, as transformers runs them on CPUs."""
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    torch = runtimes.torch_inference(threads)
    q, k, v = runtimes.torch_tensors(threads, *problem.arrays())
    if problem.variant == SOFTMAX:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return Way(lambda: sdpa(q, k, v, is_causal=True))
    if problem.variant != "gated_delta" or problem.dtype != "float32":
        raise Unsupported("transformers has the gated delta rule in float32")
    gates = (torch.from_numpy(problem.gates()[name]) for name in ("log_decay", "beta"))
    inputs = [x.transpose(1, 2).contiguous() for x in (q, k, v, *gates)]
    state = torch.from_numpy(problem.state()) if problem.is_step else None
    name = "torch_recurrent_gated_delta_rule" if problem.is_step else "torch_chunk_gated_delta_rule"
    rule: Any = getattr(qwen3_next, name)

    def call() -> Any:
        return rule(*inputs, initial_state=state, output_final_state=problem.is_step)[0]

    return Way(call, lambda out: np.ascontiguousarray(out.transpose(1, 2).numpy()))
