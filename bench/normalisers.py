"""The suite "normalisers": other normalisers and other scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import fastattn
from bench.suite import (
    Request,
    Suite,
    refuse_dense,
    scores,
)
from fastattn import functional
from fastattn._bench import runtimes
from fastattn._bench.attention import NUMBERS, AttentionProblem, shape_of
from fastattn._bench.cases import Array
from fastattn._bench.harness import Engine, Sections, Unsupported, Way, own_engines

DTYPES = ("float32", "float64")
SOFTMAX = "softmax"  # attention on the same arrays: the others are compared with it
VARIANTS = (SOFTMAX, "sparsemax", "entmax15", "top_k", "talking_heads", "additive")
K_KEYS = 32


class NormaliserProblem(AttentionProblem):
    """`variant` is one of `VARIANTS`."""

    @property
    def name(self) -> str:
        return f"{self.variant} {self.shape.name}"

    def matrices(self) -> list[Array]:
        """The other arrays that the variant takes: two mixtures of heads, or additive attention's weights."""
        heads, dim = self.shape.heads_q, self.shape.head_dim
        shapes = {"talking_heads": [(heads, heads)] * 2, "additive": [(heads, dim)]}.get(self.variant, [])
        rng = self.rng(1)
        return [(rng.standard_normal(shape) / shape[1] ** 0.5).astype(self.dtype) for shape in shapes]

    def dense(self, q: Array, k: Array, v: Array, matrices: list[Array]) -> Array:
        """Definition in NumPy: all scores at a time, in the arrays' dtype."""
        if self.variant == "additive":
            scores = np.einsum("bhijd,hd->bhij", np.tanh(q[..., None, :] + k[..., None, :, :]), matrices[0])
        else:
            scores = q @ k.swapaxes(-1, -2) * q.dtype.type(self.shape.head_dim**-0.5)
        if self.variant == "talking_heads":
            scores = np.einsum("bhij,hg->bgij", scores, matrices[0], optimize=True)
        if self.variant in ("sparsemax", "entmax15"):
            probs = _by_sorting(scores, squared=self.variant == "entmax15")
        else:
            if self.variant == "top_k":
                least = np.partition(scores, -K_KEYS, axis=-1)[..., -K_KEYS, None]
                scores = np.where(scores >= least, scores, -np.inf)
            probs = np.exp(scores - scores.max(-1, keepdims=True))
            probs /= probs.sum(-1, keepdims=True)
        if self.variant == "talking_heads":
            probs = np.einsum("bgij,gf->bfij", probs, matrices[1], optimize=True)
        out: Array = probs @ v
        return out

    def reference(self) -> tuple[Array, Array]:
        """Eight queries of the last sequence, all heads."""
        s = self.shape
        q, k, v = (x[-1:].astype(np.float64) for x in self.arrays())
        queries = np.linspace(0, s.len_q - 1, 8).astype(int)
        out = self.dense(q[:, :, queries], k, v, [x.astype(np.float64) for x in self.matrices()])
        heads = (s.batch - 1) * s.heads_q + np.arange(s.heads_q)
        rows = heads[:, None] * s.len_q + queries
        return rows.ravel(), out.reshape(-1, s.head_dim)

    @property
    def work(self) -> float:
        """Operations of the two products and of mixing heads, or for one query row the bytes of k and v.

        Additive scores count as a product.
        """
        if self.decode:
            return super().work
        mixing = 4.0 * self.shape.heads_q * scores(self.shape) if self.variant == "talking_heads" else 0.0
        return super().work + mixing

    def refuse_dense(self) -> None:
        """Refuse it to plain NumPy and torch, whose additive scores hold a number for each feature."""
        refuse_dense(self.shape, self.dtype, 4 * (self.shape.head_dim if self.variant == "additive" else 1))


def _by_sorting(scores: Array, squared: bool) -> Array:
    """Sparsemax of rows, or entmax-1.5 (`squared`), by the algorithms of their papers."""
    x = (scores - scores.max(-1, keepdims=True)) / (2 if squared else 1)
    z = -np.sort(-x, axis=-1)
    n = np.arange(1, z.shape[-1] + 1, dtype=z.dtype)
    mean = np.cumsum(z, axis=-1) / n
    if squared:
        spread = np.cumsum(z * z, axis=-1) - n * mean * mean
        tau = mean - np.sqrt(np.maximum((1 - spread) / n, 0))
    else:
        tau = mean - 1 / n
    support = np.count_nonzero(tau <= z, axis=-1, keepdims=True)
    above = np.maximum(x - np.take_along_axis(tau, support - 1, axis=-1), 0)
    probs: Array = above * above if squared else above
    return probs


SHAPES = (shape_of(1, 12, 512, 512, 64), shape_of(1, 8, 2048, 2048, 64))
ONE_QUERY = (shape_of(8, 12, 1, 1024, 64),)
ADDITIVE = (shape_of(1, 8, 256, 256, 64),)


def plan(request: Request) -> Sections:
    """Short texts, or with `full` longer ones and more variants of one query."""

    def section(title: str, shapes: Any, variants: Any) -> Sections:
        return request.section(NormaliserProblem, title, shapes, request.dtype or "float32", variants)

    *products, additive = VARIANTS
    return {
        **section("other normalisers", SHAPES if request.full else SHAPES[:1], products),
        **section("one query", ONE_QUERY, products if request.full else products[::2]),
        **section("additive", ADDITIVE, [additive]),
    }


def torch_formulas(problem: NormaliserProblem, threads: int) -> Way:
    """The formulas in torch's operations, as the code of models has them."""
    problem.refuse_dense()
    torch = runtimes.torch_inference(threads)
    q, k, v, *matrices = runtimes.tensors(torch, *problem.arrays(), *problem.matrices())
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


FUNCTIONS: dict[str, Callable[..., Any]] = {
    SOFTMAX: fastattn.attention,
    "sparsemax": functional.sparsemax_attention,
    "entmax15": functional.entmax15_attention,
    "top_k": functional.top_k_attention,
    "talking_heads": functional.talking_heads_attention,
    "additive": functional.additive_attention,
}


def _own(problem: NormaliserProblem, backend: str) -> Way:
    q, k, v = problem.arrays()
    options: dict[str, Any] = {"out": np.empty_like(q)}
    if problem.variant == "top_k":
        options["top_k"] = K_KEYS
    function, matrices = FUNCTIONS[problem.variant], problem.matrices()
    return Way(lambda: function(q, k, v, *matrices, **options))


def _numpy(problem: NormaliserProblem, threads: int) -> Way:
    problem.refuse_dense()
    arrays, matrices = problem.arrays(), problem.matrices()
    return Way(lambda: problem.dense(*arrays, matrices))


ENGINES = {
    **own_engines(_own),
    "numpy": Engine(("numpy",), _numpy, "plain NumPy, all scores at once"),
    "torch": Engine(
        ("torch",), torch_formulas, "the formulas in torch, all scores at once; SDPA for softmax"
    ),
}


SUITE = Suite(ENGINES, plan, DTYPES, NUMBERS, "about five minutes")
