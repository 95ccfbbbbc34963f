"""One call of attention with another normaliser, or other scores; and which calls are measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastattn._bench.cases import Array
from fastattn._bench.suite import TOLERANCE, Section

DTYPES = ("float32", "float64")
SOFTMAX = "softmax"  # attention on the same arrays: what the others are compared with
VARIANTS = (SOFTMAX, "sparsemax", "entmax15", "top_k", "talking_heads", "additive")
K_KEYS = 32


class RowwiseShape(NamedTuple):
    """q, k and v are (batch, heads, length, head_dim)."""

    name: str
    batch: int
    heads: int
    len_q: int
    len_k: int
    head_dim: int


class RowwiseProblem(NamedTuple):
    """`variant` is one of `VARIANTS`."""

    shape: RowwiseShape
    variant: str
    dtype: str
    seed: int

    @classmethod
    def from_list(cls, fields: list[Any]) -> RowwiseProblem:
        """The inverse of ``list(problem)`` after a trip through JSON."""
        shape, variant, dtype, seed = fields
        return cls(RowwiseShape(*shape), variant, dtype, seed)

    def arrays(self) -> tuple[Array, Array, Array]:
        """Of standard normal numbers."""
        rng, s = np.random.default_rng([self.seed, 0]), self.shape
        q = rng.standard_normal((s.batch, s.heads, s.len_q, s.head_dim))
        k, v = (rng.standard_normal((s.batch, s.heads, s.len_k, s.head_dim)) for _ in range(2))
        return q.astype(self.dtype), k.astype(self.dtype), v.astype(self.dtype)

    def matrices(self) -> list[Array]:
        """What the variant takes besides: pre and post, or w."""
        rng, s = np.random.default_rng([self.seed, 1]), self.shape
        if self.variant == "talking_heads":
            return [
                (rng.standard_normal((s.heads, s.heads)) / s.heads**0.5).astype(self.dtype) for _ in range(2)
            ]
        if self.variant == "additive":
            return [(rng.standard_normal((s.heads, s.head_dim)) / s.head_dim**0.5).astype(self.dtype)]
        return []

    def dense(self, q: Array, k: Array, v: Array, matrices: list[Array]) -> Array:
        """By the formula, all scores at a time, in the arrays' dtype."""
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

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    def reference(self) -> tuple[Array, Array]:
        """Eight queries of the last sequence, all heads, in float64."""
        s = self.shape
        q, k, v = (x[-1:].astype(np.float64) for x in self.arrays())
        queries = np.linspace(0, s.len_q - 1, 8).astype(int)
        out = self.dense(q[:, :, queries], k, v, [x.astype(np.float64) for x in self.matrices()])
        heads = (s.batch - 1) * s.heads + np.arange(s.heads)
        rows = heads[:, None] * s.len_q + queries
        return rows.ravel(), out.reshape(-1, s.head_dim)

    @property
    def unit(self) -> str:
        return "flops"

    @property
    def work(self) -> float:
        """FLOP of the two products, of the heads' mixing, and of the scores' sum where they are none."""
        s = self.shape
        n = float(s.batch * s.heads * s.len_q * s.len_k)
        return n * (4 * s.head_dim + (4 * s.heads if self.variant == "talking_heads" else 0))

    @property
    def scores_bytes(self) -> int:
        s = self.shape
        size = s.batch * s.heads * s.len_q * s.len_k * np.dtype(self.dtype).itemsize
        return size * s.head_dim if self.variant == "additive" else size


def _by_sorting(scores: Array, squared: bool) -> Array:
    """sparsemax, or entmax-1.5, of rows, as their papers' algorithms."""
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


SIZES = ((1, 12, 512, 512, 64), (1, 8, 2048, 2048, 64))
STEP = ((8, 12, 1, 1024, 64),)
ADDITIVE = ((1, 8, 256, 256, 64),)


def plan(dtype: str | None, quick: bool, seed: int, folder: Path) -> list[Section]:
    """What is measured, in float32 or in `dtype`; with `quick` a part of it."""
    name = dtype or "float32"

    def section(title: str, sizes: Any, variants: Any) -> Section:
        problems = [
            RowwiseProblem(RowwiseShape(f"{variant} {','.join(map(str, size))}", *size), variant, name, seed)
            for size in sizes
            for variant in variants
        ]
        return Section(f"{title}, {name}", problems)

    return [
        section("other normalisers", SIZES[:1] if quick else SIZES, VARIANTS[:-1]),
        section("one query", STEP, VARIANTS[:-1:2] if quick else VARIANTS[:-1]),
        section("additive", ADDITIVE, VARIANTS[-1:]),
    ]
