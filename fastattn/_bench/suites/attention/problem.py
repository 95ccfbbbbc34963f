"""One problem of the bench: shape, variant, dtype and seed, of which every process makes the same arrays."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fastattn import masks
from fastattn._bench import oracle
from fastattn._bench.cases import STRUCTURES, VARIANTS, Array, Shape, as_dtype, make_inputs
from fastattn._bench.suite import TOLERANCE

# Below this a call is all overhead: it is reported in microseconds.
TINY = Shape("1,1,8,8,16", 1, 1, 1, 8, 8, 16)
SIGMOID = "sigmoid"  # the variant that is another function


class Problem(NamedTuple):
    """q is (B, H, Lq, D), k and v are (B, Hkv, Lk, D or Dv)."""

    shape: Shape
    variant: str
    dtype: str
    seed: int

    @classmethod
    def from_list(cls, fields: list[Any]) -> Problem:
        """The inverse of ``list(problem)`` after a trip through JSON."""
        shape, variant, dtype, seed = fields
        return cls(Shape(*shape), variant, dtype, seed)

    def inputs(self) -> tuple[Array, Array, Array]:
        return make_inputs(self.shape, self.dtype, np.random.default_rng([self.seed, 0]))

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `fastattn.attention`, or of `sigmoid_attention`."""
        rng = np.random.default_rng([self.seed, 1])
        if self.variant == SIGMOID:
            return {}
        if self.variant in STRUCTURES:
            return {"mask": masks.compile(STRUCTURES[self.variant](self.shape, rng), self.scores_shape)}
        return VARIANTS[self.variant](self.shape, rng)

    @property
    def scores_shape(self) -> tuple[int, int, int, int]:
        return (self.shape.batch, self.shape.heads_q, self.shape.len_q, self.shape.len_k)

    def attended(self) -> Array | None:
        """Who attends whom, (Lq, Lk), of a structural mask; None if there is none."""
        if self.variant not in STRUCTURES:
            return None
        mask = STRUCTURES[self.variant](self.shape, np.random.default_rng([self.seed, 1]))
        return mask.to_array(self.shape.len_q, self.shape.len_k)

    @property
    def causal(self) -> bool:
        return self.variant == "causal"

    def kept_keys(self) -> Array | None:
        """Which keys are no padding, (B, Lk); None if all of them."""
        options = self.options()
        if "kv_lengths" in options:
            return np.asarray(np.arange(self.shape.len_k) < options["kv_lengths"][:, None])
        if "mask" not in options or self.variant in STRUCTURES:
            return None
        keep: Array = options["mask"][:, 0, 0, :]
        return keep

    @property
    def group(self) -> int:
        return self.shape.heads_q // self.shape.heads_kv

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return (self.shape.batch, self.shape.heads_q, self.shape.len_q, self.shape.dim_v)

    @property
    def stacked_shape(self) -> tuple[int, int, int, int]:
        """q with the query heads of a group as more rows of one head: the same, unless it is causal."""
        return (self.shape.batch, self.shape.heads_kv, self.group * self.shape.len_q, self.shape.head_dim)

    @property
    def scores_bytes(self) -> int:
        """What an engine needs that stores the whole score matrix, 16-bit types being widened."""
        shape = self.shape
        size = max(4, as_dtype(self.dtype).itemsize)
        return shape.batch * shape.heads_q * shape.len_q * shape.len_k * size

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    def reference(self) -> tuple[Array, Array]:
        """16 query rows of every head, in float64."""
        shape = self.shape
        chosen = np.random.default_rng(self.seed).permutation(shape.len_q)[:16]
        sigmoid_bias = -math.log(shape.len_k) if self.variant == SIGMOID else None
        out, _ = oracle.attention(*self.inputs(), rows=chosen, sigmoid_bias=sigmoid_bias, **self.options())
        rows = np.arange(shape.batch * shape.heads_q)[:, None] * shape.len_q + chosen
        return rows.ravel(), out.reshape(-1, shape.dim_v)

    @property
    def unit(self) -> str:
        return "bytes" if self.shape.decode else "flops"

    @property
    def work(self) -> float:
        """FLOP of the two matrix products, or for one query row the bytes of k and v, less what is masked."""
        kept = self.attended() if self.variant in STRUCTURES else self.kept_keys()
        share = 0.5 if self.causal else 1.0 if kept is None else float(kept.mean())
        return share * (self.shape.kv_bytes(self.dtype) if self.shape.decode else self.shape.flops)
