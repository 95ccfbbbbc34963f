"""A call of each variant of attention, defined once for the tests and for the bench."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import fastattn
from fastattn import functional, layers
from fastattn._bench.cases import VARIANTS, Array, Shape
from fastattn.layers import TransformerEncoderLayer


class Inputs(NamedTuple):
    """The inputs of a call: q is (B, H, L, D), k and v are (B, Hkv, L, D); `draw` gives more arrays."""

    shape: Shape
    q: Array
    k: Array
    v: Array
    draw: Callable[..., Array]


Call = Callable[[], Array]
Make = Callable[[Inputs], Call]


def _options(name: str) -> Make:
    """A call of `attention` with the arguments of a variant in `cases.VARIANTS`."""

    def make(x: Inputs) -> Call:
        options = VARIANTS[name](x.shape, np.random.default_rng(1))
        return lambda: fastattn.attention(x.q, x.k, x.v, **options)

    return make


def _function(name: str, more: Callable[[Inputs], tuple[Array, ...]], **options: Any) -> Make:
    """A call of a function in `fastattn.variants`; `more` gives the arrays that it takes after q, k and v."""

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
    """The latent cache has a rank of four times head_dim, as in DeepSeek-V2."""

    def make(x: Inputs) -> Call:
        shape, rank = x.shape, 4 * x.shape.head_dim
        rope_dim = shape.head_dim // 2
        q = x.draw(shape.batch, shape.heads_q, shape.len_q, shape.head_dim + rope_dim)
        cache = x.draw(shape.batch, shape.len_k, rank + rope_dim)
        weights = [x.draw(shape.heads_q, n, rank) / 16 for n in (shape.head_dim, shape.dim_v)]
        return lambda: functional.latent_attention(q, cache, *weights, absorbed=absorbed, causal=True)

    return make


def _induced(x: Inputs) -> Call:
    """ISAB of width heads * head_dim with 32 inducing points; its layers compute in float32 or float64."""
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
    """K and v repeated, so that they have as many heads as q."""
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
    return lambda: functional.lsh_attention(x.q, v, num_buckets=64, num_rounds=2)


def _statistics(x: Inputs) -> Call:
    stats = ("row_max", "entropy", "top_k:8", "key_sums", "mean_weights")
    return lambda: fastattn.attention(x.q, x.k, x.v, stats=stats)[0]


def _dropout(x: Inputs) -> Call:
    return lambda: fastattn.attention(x.q, x.k, x.v, dropout=0.1, seed=1)


# Variants that are arguments of `attention`: the name here, and the name in `cases.VARIANTS`.
OPTIONS = {
    **{name: name for name in ("plain", "causal", "alibi", "softcap", "sinks", "off_by_one", "t5_bias")},
    "dense_bias": "bias_heads",
}

# For each variant a function that lays out the inputs and returns the call to time. "plain" comes first: the
# other variants are compared with it.
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
    "dropout": _dropout,
}
