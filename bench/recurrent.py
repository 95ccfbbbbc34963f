"""The suite "recurrent": linear attention."""

from __future__ import annotations

from typing import Any

import numpy as np

import fastattn
from bench.suite import (
    Request,
    Suite,
)
from fastattn._bench import runtimes
from fastattn._bench.attention import AttentionProblem, shape_of
from fastattn._bench.cases import Array
from fastattn._bench.harness import Engine, Sections, Unsupported, Way, own_engines
from fastattn.functional import linear_attention

DTYPES = ("float32", "float64")
RULES = ("linear", "decay", "gated", "delta", "gated_delta", "kimi_delta")
SOFTMAX = "softmax"  # causal attention on the same arrays: the others have to be faster


class RecurrentProblem(AttentionProblem):
    """`variant` is the rule. A length of 1 is a decoding step with a state."""

    @property
    def name(self) -> str:
        shape = self.shape
        return f"{self.variant} {shape.batch},{shape.heads_q},{shape.len_q},{shape.head_dim}"

    def arrays(self) -> tuple[Array, Array, Array]:
        """Queries, keys of length 1, and values."""
        q, k, v = super().arrays()
        return q, k / np.linalg.norm(k, axis=-1, keepdims=True), v

    def gates(self) -> dict[str, Array]:
        """The other arrays that the rule takes.

        A decoding step has a decay of 1 and a beta of 1. With the gated delta rule it can then be timed on
        one state again and again: after the first call, the state already returns the value for the key.
        """
        rng, s, step = self.rng(1), self.shape, self.decode
        shape = (s.batch, s.heads_q, s.len_q)
        gates = {}
        if self.variant not in ("linear", "delta", SOFTMAX):
            full = (*shape, s.head_dim) if self.variant in ("gated", "kimi_delta") else shape
            decay = np.exp(rng.standard_normal(full) - 2)
            gates["log_decay"] = (0 * decay if step else -decay).astype(self.dtype)
        if "delta" in self.variant:
            gates["beta"] = (np.ones(shape) if step else rng.uniform(0, 1, shape)).astype(self.dtype)
        return gates

    def state(self) -> Array:
        """The state before a decoding step."""
        s = self.shape
        return self.rng(2).standard_normal((s.batch, s.heads_q, s.head_dim, s.head_dim)).astype(self.dtype)

    def recurrence(self, dtype: Any, batch: slice = slice(None), heads: slice = slice(None)) -> Array:
        """Definition in NumPy: token by token."""
        at = (batch, heads)
        q, k, v = (x[at].astype(dtype) for x in self.arrays())
        scale = dtype(self.shape.head_dim**-0.5)
        if self.variant == SOFTMAX:
            scores = scale * q @ k.swapaxes(-1, -2)
            scores[..., ~np.tri(self.shape.len_q, dtype=bool)] = -np.inf
            probs = np.exp(scores - scores.max(-1, keepdims=True))
            attended: Array = probs / probs.sum(-1, keepdims=True) @ v
            return attended
        gates = {name: x[at].astype(dtype) for name, x in self.gates().items()}
        a = np.exp(gates["log_decay"]) if "log_decay" in gates else np.ones(k.shape[:-1], dtype)
        a = a if a.ndim == k.ndim else a[..., None]
        s = self.state()[at].astype(dtype) if self.decode else None
        s = np.zeros((*k.shape[:2], k.shape[-1], v.shape[-1]), dtype) if s is None else s
        out = np.empty_like(v)
        for t in range(self.shape.len_q):
            key, value = k[:, :, t, :, None], v[:, :, t, None, :]
            s = a[:, :, t, :, None] * s
            if "beta" in gates:
                value = gates["beta"][:, :, t, None, None] * (value - key.swapaxes(-1, -2) @ s)
            s += key * value
            out[:, :, t] = scale * (q[:, :, t, None, :] @ s)[:, :, 0]
        return out

    def reference(self) -> tuple[Array, Array]:
        """The last head."""
        s = self.shape
        last = slice(s.batch - 1, s.batch), slice(s.heads_q - 1, s.heads_q)
        total = s.batch * s.heads_q * s.len_q
        return np.arange(total - s.len_q, total), self.recurrence(np.float64, *last)[0, 0]

    @property
    def work(self) -> float:
        """Operations of the recurrence without decays; of a step the bytes of states read and written."""
        s = self.shape
        n, state = s.batch * s.heads_q * s.len_q, s.head_dim**2
        if self.decode:
            return 2.0 * n * state * np.dtype(self.dtype).itemsize
        if self.variant == SOFTMAX:
            return 2.0 * n * s.len_q * s.head_dim
        return (6.0 if "delta" in self.variant else 4.0) * n * state


TEXTS = (shape_of(1, 8, 4096, 4096, 64), shape_of(1, 8, 4096, 4096, 128))
LENGTHS = tuple(shape_of(1, 8, length, length, 64) for length in (1024, 2048, 8192, 16384, 32768))
STEPS = (shape_of(1, 32, 1, 1, 128), shape_of(64, 32, 1, 1, 64), shape_of(64, 32, 1, 1, 128))


def plan(request: Request) -> Sections:
    """A few rules and lengths, or with `full` all of them."""

    def section(title: str, shapes: Any, *rules: str) -> Sections:
        return request.section(RecurrentProblem, title, shapes, request.dtype or "float32", rules)

    if not request.full:
        long = [shape_of(1, 4, length, length, 64) for length in (8192, 16384)]
        return {
            **section("length 4096", [shape_of(1, 4, 4096, 4096, 64)], *RULES[::2], SOFTMAX),
            **section("lengths", long, "decay"),
            **section("decoding step", [shape_of(16, 32, 1, 1, 128)], "gated_delta"),
        }
    return {
        **section("length 4096", TEXTS, *RULES, SOFTMAX),
        **section("lengths", LENGTHS, "linear", "gated_delta"),
        **section("decoding step", STEPS, "linear", "gated_delta"),
    }


def torch_rules(problem: RecurrentProblem, threads: int) -> Way:
    """Chunks for a text and a function of its own for one step, as transformers runs them on CPUs."""
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    torch = runtimes.torch_inference(threads)
    q, k, v = runtimes.tensors(torch, *problem.arrays())
    if problem.variant == SOFTMAX:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return Way(lambda: sdpa(q, k, v, is_causal=True))
    if problem.variant != "gated_delta" or problem.dtype != "float32":
        raise Unsupported("transformers has the gated delta rule in float32")
    gates = (torch.from_numpy(problem.gates()[name]) for name in ("log_decay", "beta"))
    inputs = [x.transpose(1, 2).contiguous() for x in (q, k, v, *gates)]
    state = torch.from_numpy(problem.state()) if problem.decode else None
    name = "torch_recurrent_gated_delta_rule" if problem.decode else "torch_chunk_gated_delta_rule"
    rule: Any = getattr(qwen3_next, name)

    def call() -> Any:
        return rule(*inputs, initial_state=state, output_final_state=problem.decode)[0]

    return Way(call, lambda out: np.ascontiguousarray(out.transpose(1, 2).numpy()))


def _own(problem: RecurrentProblem, backend: str) -> Way:
    q, k, v = problem.arrays()
    out = np.empty_like(q)
    if problem.variant == SOFTMAX:
        if backend == "numpy":
            raise Unsupported("is timed by the suite attention")
        return Way(lambda: fastattn.attention(q, k, v, causal=True, out=out))
    options: dict[str, Any] = {"rule": problem.variant, "out": out, **problem.gates()}
    if not problem.decode:
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
    "torch": Engine(("torch", "transformers"), torch_rules, "transformers' torch code of Qwen3-Next; SDPA"),
}


SUITE = Suite(ENGINES, plan, DTYPES, "batch, heads, length, head_dim", "about five minutes")
