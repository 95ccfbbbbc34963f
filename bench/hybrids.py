"""The suite "hybrids": linear attention, and what hybrid models compute, beside transformers on torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.suite import Request, Suite
from fastattn import ops
from fastattn._bench import runtimes
from fastattn._bench.attention import AttentionProblem, shape_of
from fastattn._bench.cases import Array, as_dtype
from fastattn._bench.harness import Engine, Sections, Unsupported, Way, own_engines
from fastattn.functional import linear_attention, mamba2_scan, selective_scan

DTYPES = ("float32", "bfloat16")
RULES = ("linear", "decay", "gated", "delta", "gated_delta", "kimi_delta")  # of `linear_attention`
VARIANTS = ("conv", "mamba2", "mamba", *RULES)
WIDTH, STATES, HEAD_STATES = 4, 16, 128  # of convolutions; of Mamba's states, a channel; of Mamba-2's, a head
# transformers' functions: of a text, and of one token. The module has them by these names.
NAMES = {
    "conv": ("mamba2", "causal_conv1d_fn", "causal_conv1d_update"),
    "gated_delta": ("qwen3_next", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    "kimi_delta": ("kimi_linear", "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
    "mamba2": ("mamba2", "mamba2_chunk_scan", "mamba2_selective_state_update"),
    "mamba": ("mamba", "mamba_selective_scan", "mamba_selective_state_update"),
}


class HybridProblem(AttentionProblem):
    """`variant` is one of `VARIANTS`; channels are those of all heads. A length of 1 is one token.

    One token leaves the state before it as it is, so that every call has the same result: by a decay and a
    beta of 1 from the second call on, by steps of 0, or as the inputs before it were the same.
    """

    @property
    def name(self) -> str:
        s = self.shape
        return f"{self.variant} {s.batch},{s.heads_q},{s.len_q},{s.head_dim}"

    def inputs(self) -> dict[str, Array]:
        """Arrays as models have them in memory: tokens before heads and channels; parameters in float32."""
        s, normal, uniform = self.shape, self.rng(0).standard_normal, self.rng(1).uniform
        tokens, channels = (s.batch, s.len_q), s.heads_q * s.head_dim
        rates = {"mamba": (channels, STATES), "mamba2": (s.heads_q,)}.get(self.variant, ())
        heads: dict[str, Any] = dict.fromkeys("qkv", (s.heads_q, s.head_dim))
        known: dict[str, dict[str, Any]] = {
            "conv": {"x": (channels,)},
            "mamba": {"x": (channels,), "dt": (channels,), "B": (STATES,), "C": (STATES,)},
            "mamba2": {"x": s[2:3] + s[6:7], "dt": s[2:3], "B": (1, HEAD_STATES), "C": (1, HEAD_STATES)},
        }
        sizes = known.get(self.variant, heads)
        arrays = {name: normal((*tokens, *size)).astype(as_dtype(self.dtype)) for name, size in sizes.items()}
        more: dict[str, Array] = {}
        if self.variant in RULES:
            k = arrays["k"].astype(np.float32)
            arrays["k"] = (k / np.linalg.norm(k, axis=-1, keepdims=True)).astype(arrays["k"].dtype)
            heads_of = (*tokens, s.heads_q)
            if self.variant not in ("linear", "delta"):
                gates = (*heads_of, s.head_dim) if self.variant in ("gated", "kimi_delta") else heads_of
                more["log_decay"] = np.zeros(gates) if self.decode else -np.exp(normal(gates) - 2)
            if "delta" in self.variant:
                more["beta"] = np.ones(heads_of) if self.decode else uniform(0, 1, heads_of)
        elif self.variant == "conv":
            more = {"weight": normal((channels, WIDTH)), "bias": normal(channels)}
        else:
            more = {"A": -uniform(0.1, 2, rates), "D": normal(rates[0]), "dt_bias": normal(rates[0])}
            arrays["C"] = (arrays["C"].astype(np.float32) / arrays["C"].shape[-1] ** 0.5).astype(
                arrays["C"].dtype
            )
            if self.decode:
                arrays["dt"][:] = -200
        return arrays | {name: np.ascontiguousarray(x, np.float32) for name, x in more.items()}

    def state(self) -> Array:
        """The state before one token."""
        s, normal = self.shape, self.rng(2).standard_normal
        channels = s.heads_q * s.head_dim
        if self.variant == "conv":
            return np.repeat(self.inputs()["x"][:, :1], WIDTH - 1, axis=1)
        if self.variant == "mamba":
            return normal((s.batch, channels, STATES)).astype(np.float32)
        states = HEAD_STATES if self.variant == "mamba2" else s.head_dim
        return normal((s.batch, s.heads_q, states, s.head_dim)).astype(np.float32)

    def definition(self, dtype: Any) -> Array:
        """Results (batch, length, channels) of the last sequence in NumPy, token by token."""
        x = {n: y.astype(dtype)[-1:] if n in ("x", "dt", "B", "C", "q", "k", "v", "log_decay", "beta")
             else y.astype(dtype) for n, y in self.inputs().items()}  # fmt: skip
        length = self.shape.len_q
        state = self.state()[-1:].astype(dtype) if self.decode else np.zeros_like(self.state()[-1:], dtype)
        out = []
        if self.variant == "conv":
            whole = np.concatenate([state, x["x"]], axis=1)
            total = sum(x["weight"][:, w] * whole[:, w : w + length] for w in range(WIDTH)) + x["bias"]
            return np.asarray(total / (1 + np.exp(-total)), dtype)
        step = np.logaddexp(0, x["dt"] + x["dt_bias"]) if "dt" in x else None
        for t in range(length):
            if step is not None and self.variant == "mamba":
                s, given, b, c = step[:, t, :, None], x["x"][:, t], x["B"][:, t, None], x["C"][:, t, None]
                state = np.exp(s * x["A"]) * state + s * given[..., None] * b
                out.append((state * c).sum(-1) + x["D"] * given)
                continue
            if step is not None:
                s, key, query = step[:, t, :, None, None], x["B"][:, t, :, :, None], x["C"][:, t]
                value = s * x["x"][:, t, :, None]
                state = np.exp(s * x["A"][:, None, None]) * state + key * value
                read = (query[:, :, None] @ state)[:, :, 0] + x["D"][:, None] * x["x"][:, t]
            else:
                if "log_decay" in x:
                    state = np.exp(x["log_decay"][:, t]).reshape(*state.shape[:2], -1, 1) * state
                key, value = x["k"][:, t, :, :, None], x["v"][:, t, :, None]
                if "beta" in x:
                    value = x["beta"][:, t, :, None, None] * (value - key.swapaxes(-1, -2) @ state)
                state = state + key * value
                read = dtype(self.shape.head_dim**-0.5) * (x["q"][:, t, :, None] @ state)[:, :, 0]
            out.append(read.reshape(1, -1))
        return np.stack(out, axis=1)

    def reference(self) -> tuple[Array, Array]:
        """The tokens of the last sequence."""
        total = self.shape.batch * self.shape.len_q
        return np.arange(total - self.shape.len_q, total), self.definition(np.float64)[0]

    @property
    def work(self) -> float:
        """Operations, or of one token the bytes of states read and written."""
        s = self.shape
        if self.decode:
            return 2.0 * self.state().nbytes
        tokens, channels = s.batch * s.len_q, s.heads_q * s.head_dim
        each = {"conv": 2 * WIDTH, "mamba": 8 * STATES, "mamba2": 4 * HEAD_STATES}
        rule = 6 if "delta" in self.variant else 4
        return float(tokens * channels * each.get(self.variant, rule * s.head_dim))


# Channels of 1024 tokens as in Qwen3-Next (32 heads of 128), Kimi Linear, Mamba-2 2.7B and Mamba 2.8B.
SHAPES = {
    "conv": (64, 128),
    "gated_delta": (32, 128),
    "kimi_delta": (32, 128),
    "mamba2": (80, 64),
    "mamba": (80, 64),
}


def plan(request: Request) -> Sections:
    """A text of 1024 tokens, one token, and one of each of 64 sequences; with `full` 8192, and all rules."""
    sizes = {"text": (1, 1024), "one token": (1, 1), "one token of 64": (64, 1)}
    if request.full:
        sizes["long text"] = (1, 8192)
    sections: Sections = {}
    for title, (batch, length) in sizes.items():
        rows = [
            problem
            for variant, (heads, dim) in SHAPES.items()
            for problem in request.section(
                HybridProblem, "", [shape_of(batch, heads, length, length, dim)], request.dtype or "float32",
                [variant],
            ).popitem()[1]
        ]  # fmt: skip
        sections[f"{title}, {request.dtype or 'float32'}"] = rows
    if request.full:
        shapes = [shape_of(1, 8, 4096, 4096, dim) for dim in (64, 128)]
        sections |= request.section(HybridProblem, "length 4096", shapes, request.dtype or "float32", RULES)
        shapes = [shape_of(1, 8, length, length, 64) for length in (1024, 2048, 8192, 16384, 32768)]
        rules = ("linear", "gated_delta")
        sections |= request.section(HybridProblem, "lengths", shapes, request.dtype or "float32", rules)
    return sections


def _by_heads(x: Array) -> Array:
    return x.swapaxes(1, 2)


def _own(problem: HybridProblem, backend: str) -> Way:
    if backend == "numpy" and problem.shape.len_q > 1024:
        raise Unsupported("takes too long")
    x: dict[str, Any] = problem.inputs()
    state = problem.state() if problem.decode else None
    options: dict[str, Any] = {} if state is None else {"state": state}
    variant: Any = problem.variant
    softplus: Any = {"dt_softplus": True}
    if variant == "conv":
        x = {**x, "activation": "silu"}
        return Way(lambda: ops.causal_conv1d(**x, **options))
    if state is not None:  # a rule that adds to its state would let it grow
        options["out_state"] = np.empty_like(state) if variant in RULES[:3] else state

    def first(result: Any) -> Array:
        out: Array = result if state is None else result[0]
        return out

    if variant == "mamba":
        return Way(lambda: first(selective_scan(**x, **softplus, **options)))
    turned: dict[str, Any] = {n: _by_heads(y) if y.ndim > 2 else y for n, y in x.items()}

    def read(out: Array) -> Array:
        return np.ascontiguousarray(_by_heads(out)).reshape(*out.shape[::2][:1], out.shape[2], -1)

    if variant == "mamba2":
        return Way(lambda: first(mamba2_scan(**turned, **softplus, **options)), read)
    return Way(lambda: first(linear_attention(**turned, rule=variant, **options)), read)


def _torch(problem: HybridProblem, threads: int) -> Way:
    """Transformers' own functions."""
    from importlib import import_module

    torch = runtimes.torch_inference(threads)
    if problem.variant not in NAMES:
        raise Unsupported("has no such function in transformers")
    family, text, token = NAMES[problem.variant]
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    function: Any = getattr(module, token if problem.decode else text)
    given = problem.inputs()
    x = dict(zip(given, runtimes.tensors(torch, *given.values()), strict=True))
    state = runtimes.tensors(torch, problem.state())[0] if problem.decode else None
    s = problem.shape
    tensors: list[Any]

    def read(out: Any) -> Array:
        result: Array = out.float().reshape(s.batch, s.len_q, -1).numpy()
        return result

    if problem.variant == "conv":
        turned, weight, bias = (
            x["x"].transpose(1, 2),
            x["weight"].to(x["x"].dtype),
            x["bias"].to(x["x"].dtype),
        )
        across = lambda out: read(out.transpose(1, 2))  # noqa: E731
        if state is None:
            return Way(lambda: function(turned, weight, bias, activation="silu"), across)
        kept = state.transpose(1, 2).contiguous()
        return Way(lambda: function(turned, kept, weight, bias, "silu"), across)
    if "delta" in problem.variant:
        tensors = [x[n] for n in ("q", "k", "v", "log_decay", "beta")]
        more = {"initial_state": state, "output_final_state": problem.decode}
        return Way(lambda: function(*tensors, **more)[0], read)
    if problem.variant == "mamba":
        names = ("x", "dt", "A", "B", "C", "D")
        if state is None:
            tensors = [x[n].transpose(1, 2) if x[n].ndim == 3 else x[n] for n in names]
            more = {"delta_bias": x["dt_bias"], "delta_softplus": True}
            return Way(lambda: function(*tensors, **more), lambda out: read(out.transpose(1, 2)))
        tensors = [x[n][:, 0] if x[n].ndim == 3 else x[n] for n in names]
        more = {"dt_bias": x["dt_bias"], "dt_softplus": True}
        return Way(lambda: function(state, *tensors, **more), read)
    more = {"dt_bias": x["dt_bias"], "dt_softplus": True, "D": x["D"]}
    if state is None:
        tensors = [x[n] for n in ("x", "dt", "A", "B", "C")]
        return Way(lambda: function(*tensors, chunk_size=256, **more), read)

    def wide(y: Any) -> Any:
        return y[..., None].expand(*y.shape, s.head_dim)

    kept = state.transpose(-1, -2).contiguous()
    more = {"dt_bias": wide(x["dt_bias"]), "dt_softplus": True, "D": wide(x["D"])}
    rates = wide(x["A"])[..., None].expand(-1, -1, HEAD_STATES)
    tensors = [x["x"][:, 0], wide(x["dt"][:, 0]), rates, x["B"][:, 0], x["C"][:, 0]]
    return Way(lambda: function(kept, *tensors, **more), read)


def _numpy(problem: HybridProblem, threads: int) -> Way:
    """Token by token, all heads at a time."""
    if problem.shape.len_q > 4096 or problem.shape.batch > 1 or problem.dtype != "float32":
        raise Unsupported("takes too long, or is another type")
    return Way(lambda: problem.definition(np.float32))


ENGINES = {
    **own_engines(_own),
    "numpy": Engine(("numpy",), _numpy, "plain NumPy, token by token"),
    "torch": Engine(("torch", "transformers"), _torch, "transformers' own functions"),
}

SUITE = Suite(ENGINES, plan, DTYPES, "batch, heads, length, head_dim", "about ten minutes")
