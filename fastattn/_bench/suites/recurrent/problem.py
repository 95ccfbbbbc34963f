"""One call of linear attention in the bench: its inputs and its answer, and which calls are measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastattn._bench.cases import Array
from fastattn._bench.suite import TOLERANCE, Section

DTYPES = ("float32", "float64")
RULES = ("linear", "decay", "gated", "delta", "gated_delta")
SOFTMAX = "softmax"  # causal attention on the same arrays: what the others are to be faster than


class RecurrentShape(NamedTuple):
    """q, k and v are (batch, heads, length, head_dim). A length of 1 is a decoding step with a state."""

    name: str
    batch: int
    heads: int
    length: int
    head_dim: int


class RecurrentProblem(NamedTuple):
    """`variant` is the rule."""

    shape: RecurrentShape
    variant: str
    dtype: str
    seed: int

    @classmethod
    def from_list(cls, fields: list[Any]) -> RecurrentProblem:
        """The inverse of ``list(problem)`` after a trip through JSON."""
        shape, variant, dtype, seed = fields
        return cls(RecurrentShape(*shape), variant, dtype, seed)

    def arrays(self) -> tuple[Array, Array, Array]:
        """Queries, keys of length 1, and values."""
        rng, s = np.random.default_rng([self.seed, 0]), self.shape
        q, k, v = (rng.standard_normal((s.batch, s.heads, s.length, s.head_dim)) for _ in range(3))
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        return q.astype(self.dtype), k.astype(self.dtype), v.astype(self.dtype)

    def gates(self) -> dict[str, Array]:
        """What the rule takes besides.

        A decoding step neither forgets nor writes by halves: it may then be repeated with its own state, as
        what it writes is what the state answers already.
        """
        rng, s = np.random.default_rng([self.seed, 1]), self.shape
        shape, step = (s.batch, s.heads, s.length), s.length == 1
        gates = {}
        if self.variant in ("decay", "gated", "gated_delta"):
            full = (*shape, s.head_dim) if self.variant == "gated" else shape
            decay = np.exp(rng.standard_normal(full) - 2)
            gates["log_decay"] = (0 * decay if step else -decay).astype(self.dtype)
        if "delta" in self.variant:
            gates["beta"] = (np.ones(shape) if step else rng.uniform(0, 1, shape)).astype(self.dtype)
        return gates

    def state(self) -> Array:
        """Before a decoding step."""
        s = self.shape
        rng = np.random.default_rng([self.seed, 2])
        return rng.standard_normal((s.batch, s.heads, s.head_dim, s.head_dim)).astype(self.dtype)

    def recurrence(self, dtype: Any, batch: slice = slice(None), heads: slice = slice(None)) -> Array:
        """Token by token in NumPy, by definition."""
        at = (batch, heads)
        q, k, v = (x[at].astype(dtype) for x in self.arrays())
        scale = dtype(self.shape.head_dim**-0.5)
        if self.variant == SOFTMAX:
            scores = scale * q @ k.swapaxes(-1, -2)
            scores[..., ~np.tri(self.shape.length, dtype=bool)] = -np.inf
            probs = np.exp(scores - scores.max(-1, keepdims=True))
            attended: Array = probs / probs.sum(-1, keepdims=True) @ v
            return attended
        gates = {name: x[at].astype(dtype) for name, x in self.gates().items()}
        a = np.exp(gates["log_decay"]) if "log_decay" in gates else np.ones(k.shape[:-1], dtype)
        a = a if a.ndim == k.ndim else a[..., None]
        s = self.state()[at].astype(dtype) if self.shape.length == 1 else None
        s = np.zeros((*k.shape[:2], k.shape[-1], v.shape[-1]), dtype) if s is None else s
        out = np.empty_like(v)
        for t in range(self.shape.length):
            key, value = k[:, :, t, :, None], v[:, :, t, None, :]
            s = a[:, :, t, :, None] * s
            if "beta" in gates:
                value = gates["beta"][:, :, t, None, None] * (value - key.swapaxes(-1, -2) @ s)
            s += key * value
            out[:, :, t] = scale * (q[:, :, t, None, :] @ s)[:, :, 0]
        return out

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    def reference(self) -> tuple[Array, Array]:
        """The last head, in float64."""
        s = self.shape
        last = slice(s.batch - 1, s.batch), slice(s.heads - 1, s.heads)
        total = s.batch * s.heads * s.length
        return np.arange(total - s.length, total), self.recurrence(np.float64, *last)[0, 0]

    @property
    def unit(self) -> str:
        return "bytes" if self.shape.length == 1 else "flops"

    @property
    def work(self) -> float:
        """FLOP of the recurrence, without decays; the states' bytes, read and written, of a step."""
        s = self.shape
        n, state = s.batch * s.heads * s.length, s.head_dim**2
        if s.length == 1:
            return 2.0 * n * state * np.dtype(self.dtype).itemsize
        if self.variant == SOFTMAX:
            return 2.0 * n * s.length * s.head_dim
        return (6.0 if "delta" in self.variant else 4.0) * n * state


HEADS = ((1, 8, 4096, 64), (1, 8, 4096, 128))
LENGTHS = tuple((1, 8, length, 64) for length in (1024, 2048, 8192, 16384, 32768))
STEPS = ((1, 32, 1, 128), (64, 32, 1, 64), (64, 32, 1, 128))
QUICK = ((1, 4, 4096, 64),), ((1, 4, 8192, 64), (1, 4, 16384, 64)), ((16, 32, 1, 128),)


def plan(dtype: str | None, quick: bool, seed: int, folder: Path) -> list[Section]:
    """What is measured, in float32 or in `dtype`; with `quick` a part of it."""
    name = dtype or "float32"

    def section(title: str, sizes: Any, rules: Any) -> Section:
        problems = [
            RecurrentProblem(RecurrentShape(f"{rule} {','.join(map(str, size))}", *size), rule, name, seed)
            for size in sizes
            for rule in rules
        ]
        return Section(f"{title}, {name}", problems)

    heads, lengths, steps = QUICK if quick else (HEADS, LENGTHS, STEPS)
    return [
        section("length 4096", heads, (*(RULES[::2] if quick else RULES), SOFTMAX)),
        section("lengths", lengths, ("decay",) if quick else ("linear", "gated_delta")),
        section("decoding step", steps, ("gated_delta",) if quick else ("linear", "gated_delta")),
    ]
