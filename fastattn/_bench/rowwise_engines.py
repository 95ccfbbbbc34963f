"""What the bench of other normalisers and scores times, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import fastattn
from fastattn import functional
from fastattn._bench.rowwise_problem import K_KEYS, SOFTMAX, RowwiseProblem
from fastattn._bench.suite import Engine
from fastattn._bench.ways import Unsupported, Way, enter_for_good, refuse_dense
from fastattn._engine import settings

FUNCTIONS: dict[str, Callable[..., Any]] = {
    SOFTMAX: fastattn.attention,
    "sparsemax": functional.sparsemax_attention,
    "entmax15": functional.entmax15_attention,
    "top_k": functional.topk_attention,
    "talking_heads": functional.talking_heads_attention,
    "additive": functional.additive_attention,
}


def _compiled(problem: RowwiseProblem, threads: int) -> dict[str, Way]:
    return _own(problem, "compiled")


def _fallback(problem: RowwiseProblem, threads: int) -> dict[str, Way]:
    return _own(problem, "numpy")


def _own(problem: RowwiseProblem, backend: str) -> dict[str, Way]:
    """Threads are those that the worker's environment says."""
    enter_for_good(settings.forced(backend=backend))
    q, k, v = problem.arrays()
    options: dict[str, Any] = {"out": np.empty_like(q)}
    if problem.variant == "top_k":
        options["k_keys"] = K_KEYS
    function, matrices = FUNCTIONS[problem.variant], problem.matrices()
    return {"": Way(lambda: function(q, k, v, *matrices, **options))}


def _numpy(problem: RowwiseProblem, threads: int) -> dict[str, Way]:
    refuse_dense(problem, 4)
    arrays, matrices = problem.arrays(), problem.matrices()
    return {"": Way(lambda: problem.dense(*arrays, matrices))}


def _torch(problem: RowwiseProblem, threads: int) -> dict[str, Way]:
    """The formulas in torch's operations, as models have them."""
    import torch

    refuse_dense(problem, 4)
    torch.set_num_threads(threads)
    enter_for_good(torch.inference_mode())
    q, k, v = (torch.from_numpy(x) for x in problem.arrays())
    matrices = [torch.from_numpy(x) for x in problem.matrices()]
    scale = problem.shape.head_dim**-0.5
    if problem.variant == SOFTMAX:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return {"": Way(lambda: sdpa(q, k, v))}
    if problem.variant == "additive":
        [w] = matrices

        def additive() -> Any:
            scores = (torch.tanh(q[..., None, :] + k[..., None, :, :]) * w[:, None, None]).sum(-1)
            return scores.softmax(-1) @ v

        return {"": Way(additive)}
    if problem.variant == "talking_heads":
        pre, post = matrices

        def talking() -> Any:
            scores = torch.einsum("bhij,hg->bgij", scale * q @ k.mT, pre)
            return torch.einsum("bgij,gf->bfij", scores.softmax(-1), post) @ v

        return {"": Way(talking)}
    if problem.variant == "top_k":

        def top_k() -> Any:
            scores = scale * q @ k.mT
            best = scores.topk(K_KEYS, dim=-1)
            return torch.full_like(scores, -torch.inf).scatter(-1, best.indices, best.values).softmax(-1) @ v

        return {"": Way(top_k)}
    if problem.variant == "sparsemax":

        def sparsemax() -> Any:
            x = scale * q @ k.mT
            z = x.sort(-1, descending=True).values
            tau = (z.cumsum(-1) - 1) / torch.arange(1, z.shape[-1] + 1)
            support = (tau <= z).sum(-1, keepdim=True)
            return (x - tau.gather(-1, support - 1)).clamp(0) @ v

        return {"": Way(sparsemax)}
    raise Unsupported("is not timed in torch")


ENGINES = {
    "fastattn": Engine(("fastattn._engine.core._core",), _compiled, "the compiled kernels"),
    "fallback": Engine(("fastattn",), _fallback, "fastattn without its extension"),
    "numpy": Engine(("numpy",), _numpy, "plain NumPy, all scores at once"),
    "torch": Engine(("torch",), _torch, "the formulas in torch, all scores at once; SDPA for softmax"),
}
