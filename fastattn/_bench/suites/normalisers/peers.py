"""The peer of other normalisers and scores: their formulas in torch."""

from __future__ import annotations

from typing import Any

from fastattn._bench import runtimes
from fastattn._bench.suites.normalisers.problem import K_KEYS, SOFTMAX, NormaliserProblem
from fastattn._bench.ways import Unsupported, Way, refuse_dense


def torch_formulas(problem: NormaliserProblem, threads: int) -> Way:
    """The formulas in torch's operations, as the code of models has them."""
    refuse_dense(problem.scores_bytes, 4)
    torch = runtimes.torch_inference(threads)
    q, k, v, *matrices = runtimes.torch_tensors(threads, *problem.arrays(), *problem.matrices())
    scale = problem.shape.head_dim**-0.5
    if problem.variant == SOFTMAX:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return Way(lambda: sdpa(q, k, v))
    if problem.variant == "additive":
        [w] = matrices

        def additive() -> Any:
            scores = (torch.tanh(q[..., None, :] + k[..., None, :, :]) * w[:, None, None]).sum(-1)
            return scores.softmax(-1) @ v

        return Way(additive)
    if problem.variant == "talking_heads":
        pre, post = matrices

        def talking() -> Any:
            scores = torch.einsum("bhij,hg->bgij", scale * q @ k.mT, pre)
            return torch.einsum("bgij,gf->bfij", scores.softmax(-1), post) @ v

        return Way(talking)
    if problem.variant == "top_k":

        def top_k() -> Any:
            scores = scale * q @ k.mT
            best = scores.topk(K_KEYS, dim=-1)
            return torch.full_like(scores, -torch.inf).scatter(-1, best.indices, best.values).softmax(-1) @ v

        return Way(top_k)
    if problem.variant == "sparsemax":

        def sparsemax() -> Any:
            x = scale * q @ k.mT
            z = x.sort(-1, descending=True).values
            tau = (z.cumsum(-1) - 1) / torch.arange(1, z.shape[-1] + 1)
            support = (tau <= z).sum(-1, keepdim=True)
            return (x - tau.gather(-1, support - 1)).clamp(0) @ v

        return Way(sparsemax)
    raise Unsupported("is not timed in torch")
