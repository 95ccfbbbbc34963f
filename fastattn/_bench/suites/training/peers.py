"""The peers of the gradients: torch's autograd over its fused attention, and JAX's."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._bench.cases import STRUCTURES, Array
from fastattn._bench.suites.training.problem import BACKWARD, GradientProblem, joined
from fastattn._bench.suites.training.steps import StepProblem, torch_step
from fastattn._bench.ways import Unsupported, Way, refuse_dense


def torch_autograd(problem: GradientProblem | StepProblem, threads: int) -> Way | dict[str, Way]:
    """torch's fused attention on (B, H, L, D) tensors in the arrays' memory, and torch.autograd.grad."""
    if isinstance(problem, StepProblem):
        return torch_step(problem, threads)
    import torch

    torch.set_num_threads(threads)
    forward, shape = problem.attention, problem.shape
    sdpa: Any = torch.nn.functional.scaled_dot_product_attention
    options: dict[str, Any] = {}
    if forward.variant == "causal":
        options["is_causal"] = True
    elif forward.variant in STRUCTURES:
        options["attn_mask"] = torch.from_numpy(forward.attended())
    elif forward.variant == "bias_heads":
        options["attn_mask"] = torch.from_numpy(forward.options()["bias"])[None]
    elif forward.variant != "plain":
        raise Unsupported(f"has no {forward.variant} in its fused attention")
    if shape.heads_q != shape.heads_kv:
        options["enable_gqa"] = True

    def tensor(x: Array) -> Any:
        if problem.dtype == "bfloat16":  # torch.from_numpy does not know NumPy's bfloat16
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(x)

    inputs = [tensor(x).requires_grad_() for x in problem.arrays()]
    dout = tensor(problem.dout())

    def read(gradients: Any) -> Array:
        return joined([(x if x.element_size() >= 4 else x.float()).numpy() for x in gradients])

    if problem.kind == BACKWARD:
        out = sdpa(*inputs, **options)
        return Way(lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True), read)
    return Way(lambda: torch.autograd.grad(sdpa(*inputs, **options), inputs, dout), read)


def jax_vjp(problem: GradientProblem | StepProblem, threads: int) -> Way:
    """jax.nn.dot_product_attention on (B, L, H, D), its gradient compiled; it holds every score at once."""
    if isinstance(problem, StepProblem):
        raise Unsupported("is asked for gradients of attention only")
    import jax

    forward = problem.attention
    if forward.variant not in ("plain", "causal"):
        raise Unsupported("is asked without masks or causal only")
    if problem.dtype in ("float16", "float64"):
        raise Unsupported(f"computes {problem.dtype} in another type")
    refuse_dense(problem.scores_bytes, 4)
    if problem.dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")
    causal = forward.variant == "causal"

    def attention(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="xla")

    arrays = [jax.device_put(x.swapaxes(1, 2).copy()) for x in (*problem.arrays(), problem.dout())]
    *inputs, dout = arrays

    def read(gradients: Any) -> Array:
        return joined([np.asarray(x).swapaxes(1, 2).copy() for x in gradients])

    if problem.kind == BACKWARD:
        pullback: Any = jax.jit(lambda *inputs: jax.vjp(attention, *inputs)[1])(*inputs)
        backward = jax.jit(lambda pullback, dout: pullback(dout))
        return Way(lambda: jax.block_until_ready(backward(pullback, dout)), read)
    both = jax.jit(lambda dout, *inputs: jax.vjp(attention, *inputs)[1](dout))
    return Way(lambda: jax.block_until_ready(both(dout, *inputs)), read)
