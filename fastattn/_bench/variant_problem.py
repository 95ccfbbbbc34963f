"""A call of each variant, stated once: the tests and ``bench --suite variants`` take it from here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fastattn
from fastattn import functional, layers
from fastattn._bench.cases import VARIANTS, Array, Rng, Shape, as_dtype, make_inputs
from fastattn._bench.suite import TOLERANCE, Section
from fastattn._engine import settings
from fastattn.layers import TransformerEncoderLayer

DTYPES = ("float32", "float64", "float16", "bfloat16")


class Inputs(NamedTuple):
    """What a call is made of: q is (B, H, L, D), k and v (B, Hkv, Lk, D); `draw` gives more numbers."""

    shape: Shape
    q: Array
    k: Array
    v: Array
    draw: Callable[..., Array]


Call = Callable[[], Array]
Make = Callable[[Inputs], Call]


def _options(name: str) -> Make:
    """A variant that is an argument of attention."""

    def make(x: Inputs) -> Call:
        options = VARIANTS[name](x.shape, np.random.default_rng(1))
        return lambda: fastattn.attention(x.q, x.k, x.v, **options)

    return make


def _function(name: str, more: Callable[[Inputs], tuple[Array, ...]], **options: Any) -> Make:
    """A function of `fastattn.functional` of q, k, v and more arrays."""

    def make(x: Inputs) -> Call:
        arrays = more(x)
        return lambda: getattr(functional, name)(x.q, x.k, x.v, *arrays, **options)

    return make


def _shaw(x: Inputs) -> tuple[Array, ...]:
    return x.draw(33, x.shape.head_dim), x.draw(33, x.shape.dim_v)


def _transformer_xl(x: Inputs) -> tuple[Array, ...]:
    heads, dim = x.shape.heads_q, x.shape.head_dim
    return x.draw(heads, x.shape.len_k, dim), x.draw(heads, dim), x.draw(heads, dim)


def _deberta(x: Inputs) -> tuple[Array, ...]:
    return tuple(x.draw(x.shape.heads_q, 512, x.shape.head_dim) / 8 for _ in range(2))


def _latent(absorbed: bool) -> Make:
    """As many heads as the shape has, of a rank of four times head_dim, as in DeepSeek-V2."""

    def make(x: Inputs) -> Call:
        shape, rank = x.shape, 4 * x.shape.head_dim
        rope_dim = shape.head_dim // 2
        q = x.draw(shape.batch, shape.heads_q, shape.len_q, shape.head_dim + rope_dim)
        cache = x.draw(shape.batch, shape.len_k, rank + rope_dim)
        weights = [x.draw(shape.heads_q, n, rank) / 16 for n in (shape.head_dim, shape.dim_v)]
        return lambda: functional.latent_attention(q, cache, *weights, absorbed=absorbed, causal=True)

    return make


def _induced(x: Inputs) -> Call:
    """ISAB of width heads * head_dim, with 32 inducing points, of layers in float32."""
    width, lane = x.shape.heads_q * x.shape.head_dim, "float64" if x.q.dtype == np.float64 else "float32"
    first, second = (
        TransformerEncoderLayer(
            width, x.shape.heads_q, width, weights_dtype=lane, rng=np.random.default_rng(n)
        )
        for n in (0, 1)
    )
    points, tokens = x.draw(32, width), x.draw(x.shape.batch, x.shape.len_q, width)
    return lambda: layers.induced_set_attention(first, second, points, tokens)


def _each_head(x: Inputs) -> tuple[Array, Array]:
    """k and v with as many heads as q."""
    group = x.q.shape[-3] // x.k.shape[-3]
    return np.repeat(x.k, group, axis=-3), np.repeat(x.v, group, axis=-3)


def _location(x: Inputs) -> Call:
    logits = x.draw(x.shape.batch, x.shape.heads_q, x.shape.len_q, x.shape.len_k)
    return lambda: functional.location_attention(logits, x.v)


def _linformer(x: Inputs) -> Call:
    e, f = (x.draw(64, x.shape.len_k) / 32 for _ in range(2))
    return lambda: functional.linformer_attention(x.q, x.k, x.v, e, f)


def _nystrom(x: Inputs) -> Call:
    k, v = _each_head(x)
    return lambda: functional.nystrom_attention(x.q, k, v)


def _reformer(x: Inputs) -> Call:
    v = _each_head(x)[1]
    return lambda: functional.lsh_attention(x.q, v, n_buckets=64, n_rounds=2)


def _statistics(x: Inputs) -> Call:
    stats = ("row_max", "entropy", "topk:8", "key_sums", "mean_weights")
    return lambda: fastattn.attention(x.q, x.k, x.v, stats=stats)[0]


# The variants that are arguments of attention, by the names of their shared cases; the first is "plain".
OPTIONS = {
    **{name: name for name in ("plain", "causal", "alibi", "softcap", "sinks", "off_by_one", "t5_bias")},
    "dense_bias": "bias_heads",
}

# Of each a function that lays out the inputs and returns the call; "plain" is what others are compared with.
CALLS: dict[str, Make] = {
    **{name: _options(case) for name, case in OPTIONS.items()},
    "shaw": _function("shaw_attention", _shaw),
    "transformer_xl": _function("transformer_xl_attention", _transformer_xl, causal=True),
    "deberta": _function("disentangled_attention", _deberta, max_distance=512),
    "forgetting": _function(
        "forgetting_attention", lambda x: (-abs(x.draw(x.shape.batch, x.shape.heads_q, x.shape.len_k)),)
    ),
    "cosine": _function("cosine_attention", lambda x: (), scale=10.0),
    "qk_norm": _function("qk_norm_attention", lambda x: (x.draw(x.shape.head_dim), x.draw(x.shape.head_dim))),
    "luong_general": _function(
        "general_attention", lambda x: (x.draw(x.shape.head_dim, x.shape.head_dim) / 64,)
    ),
    "differential": lambda x: (
        lambda: functional.differential_attention(x.q, x.k, x.v[:, : x.v.shape[1] // 2], 0.5)
    ),
    "gated": _function(
        "gated_attention", lambda x: (x.draw(x.shape.batch, x.shape.heads_q, x.shape.len_q, x.shape.dim_v),)
    ),
    "latent_plain": _latent(absorbed=False),
    "latent_absorbed": _latent(absorbed=True),
    "memory": _function(
        "memory_attention",
        lambda x: (
            x.draw(x.shape.heads_kv, 64, x.shape.head_dim),
            x.draw(x.shape.heads_kv, 64, x.shape.dim_v),
        ),
    ),
    "dilated_window": _function("dilated_window_attention", lambda x: (), window=32, dilation=4),
    "strided": _function("strided_attention", lambda x: (), stride=45),
    "induced_set": _induced,
    "location": _location,
    "linformer": _linformer,
    "nystrom": _nystrom,
    "reformer": _reformer,
    "all_statistics": _statistics,
}


class VariantProblem(NamedTuple):
    """A shape whose lengths are equal, and an even number of heads."""

    shape: Shape
    variant: str
    dtype: str
    seed: int

    @classmethod
    def from_list(cls, fields: list[Any]) -> VariantProblem:
        """The inverse of ``list(problem)`` after a trip through JSON."""
        shape, variant, dtype, seed = fields
        return cls(Shape(*shape), variant, dtype, seed)

    def arrays(self) -> tuple[Array, Array, Array]:
        """q, k and v."""
        return make_inputs(self.shape, self.dtype, np.random.default_rng([self.seed, 0]))

    def call(self, dtype: str | None = None) -> Call:
        """Inputs in `dtype`, of the values that they have in the problem's."""
        held, wanted = as_dtype(self.dtype), as_dtype(dtype or self.dtype)
        rng: Rng = np.random.default_rng([self.seed, 1])

        def draw(*shape: int) -> Array:
            return rng.standard_normal(shape, np.float32).astype(held).astype(wanted)

        q, k, v = (x.astype(wanted) for x in self.arrays())
        return CALLS[self.variant](Inputs(self.shape, q, k, v, draw))

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    def reference(self) -> tuple[Array, Array]:
        """All rows, by the fallback in float64; the tests hold that against the formulas."""
        with settings.forced(backend="numpy"):
            out = self.call("float64")()
        out = out.reshape(-1, out.shape[-1])
        return np.arange(len(out)), out

    @property
    def unit(self) -> str:
        return "flops"

    @property
    def work(self) -> float:
        """Of plain attention with this shape, whatever the variant: rates compare as times do."""
        return self.shape.flops


LONG = Shape("1,8,2048,2048,64", 1, 8, 8, 2048, 2048, 64)
SHORT = Shape("8,12,128,128,64", 8, 12, 12, 128, 128, 64)


def plan(dtype: str | None, quick: bool, seed: int, folder: Path) -> list[Section]:
    """What is measured, in float32 or in `dtype`; with `quick` a part of it."""
    name = dtype or "float32"
    return [
        Section(
            f"{shape.name}, {name}",
            [
                VariantProblem(shape._replace(name=variant), variant, name, seed)
                for variant in (list(CALLS)[:8] if quick else CALLS)
            ],
        )
        for shape in ((LONG,) if quick else (LONG, SHORT))
    ]
