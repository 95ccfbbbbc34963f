"""Shapes and variants of attention, defined once for the tests, the self-test and the bench.

A shape says how large q, k and v are. A variant is a function ``(shape, rng) -> dict`` that returns keyword
arguments for :func:`fastattn.attention`. `combine` merges the arguments of several variants into one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from fastattn import masks, positions

Array = np.ndarray[Any, Any]
Arguments = dict[str, Any]
Rng = np.random.Generator

DTYPES = ("float32", "float64", "float16", "bfloat16")


class Shape(NamedTuple):
    """q is (batch, heads_q, len_q, head_dim), k and v are (batch, heads_kv, len_k, head_dim[_v])."""

    name: str
    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_k: int
    head_dim: int
    head_dim_v: int | None = None

    @property
    def dim_v(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def scores(self) -> int:
        """How many pairs of a query and a key there are, over all heads."""
        return self.batch * self.heads_q * self.len_q * self.len_k

    @property
    def flops(self) -> int:
        """Floating-point operations of the two matrix products, without any mask."""
        return 2 * self.scores * (self.head_dim + self.dim_v)

    def kv_bytes(self, dtype: str) -> int:
        """How many bytes k and v hold together."""
        size = as_dtype(dtype).itemsize
        return self.batch * self.heads_kv * self.len_k * (self.head_dim + self.dim_v) * size

    @property
    def decode(self) -> bool:
        """Whether there is one query row: memory then limits the speed, which is reported in GB/s."""
        return self.len_q == 1


def shape_of(batch: int, heads: int, len_q: int, len_k: int, head_dim: int) -> Shape:
    """A shape whose name is its numbers and whose keys have as many heads as its queries."""
    return Shape(f"{batch},{heads},{len_q},{len_k},{head_dim}", batch, heads, heads, len_q, len_k, head_dim)


SHAPES = (
    shape_of(1, 12, 128, 128, 64),
    shape_of(8, 12, 128, 128, 32),
    shape_of(1, 12, 512, 512, 64),
    shape_of(1, 8, 2048, 2048, 64),
    shape_of(1, 8, 2048, 2048, 128),
    shape_of(1, 4, 8192, 8192, 64),
    shape_of(1, 32, 1, 4096, 128),
    shape_of(8, 12, 1, 1024, 64),
)

# For structural masks: long enough for a mask to save time.
STRUCTURED = (shape_of(1, 4, 4096, 4096, 64),)


def grouped(shape: Shape, heads_q: int = 32, heads_kv: int = 8) -> Shape:
    """The same shape with grouped heads."""
    name = f"{shape.batch},{heads_q}:{heads_kv},{shape.len_q},{shape.len_k},{shape.head_dim}"
    return shape._replace(name=name, heads_q=heads_q, heads_kv=heads_kv)


def fresh_shapes(seed: int, n: int = 12) -> list[Shape]:
    """Random shapes with about the work of `SHAPES`, to catch a kernel that was tuned to that list.

    Lengths are on no grid; head dimensions are multiples of 8, as in models. Every fourth shape is a decode
    step. The bench compares their medians with those of the fixed shapes of the same kind.
    """
    rng = np.random.default_rng(seed)

    def log_uniform(low: int, high: int) -> int:
        return int(np.exp(rng.uniform(np.log(low), np.log(high))))

    shapes = []
    for index in range(n):
        batch, heads, head_dim = log_uniform(1, 8), int(rng.integers(4, 33)), 8 * int(rng.integers(4, 21))
        if index % 4 == 3:
            shape = shape_of(batch, heads, 1, log_uniform(512, 8192), head_dim)
        else:
            len_q = log_uniform(128, 4096)
            len_k = len_q if index % 2 else log_uniform(128, 4096)
            shape = shape_of(1 if len_q > 512 else batch, heads, len_q, len_k, head_dim)
        shapes.append(shape)
    return shapes


def as_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a name in `DTYPES`; bfloat16 needs the package ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return dtype
    return np.dtype(name)


def make_inputs(
    shape: Shape, dtype: str, rng: Rng, *, kv_dtype: str | None = None, layout: str = "bhld"
) -> tuple[Array, Array, Array]:
    """q, k, v of standard normal numbers, all shaped (batch, heads, length, dim).

    ``layout="blhd"`` makes them transposed views of (batch, length, heads, dim) arrays, which is what a
    linear projection returns. `kv_dtype` is the dtype of k and v if it differs from that of q (a 16-bit
    cache).
    """
    if layout not in ("bhld", "blhd"):
        raise ValueError(f"layout must be 'bhld' or 'blhd', got {layout!r}")

    def normal(heads: int, length: int, dim: int, name: str) -> Array:
        if layout == "bhld":
            return rng.standard_normal((shape.batch, heads, length, dim), np.float32).astype(as_dtype(name))
        array = rng.standard_normal((shape.batch, length, heads, dim), np.float32).astype(as_dtype(name))
        return array.swapaxes(1, 2)

    return (
        normal(shape.heads_q, shape.len_q, shape.head_dim, dtype),
        normal(shape.heads_kv, shape.len_k, shape.head_dim, kv_dtype or dtype),
        normal(shape.heads_kv, shape.len_k, shape.dim_v, kv_dtype or dtype),
    )


def _lengths(shape: Shape, rng: Rng) -> Array:
    """One key length for each sequence, between half of the keys and all of them."""
    return rng.integers((shape.len_k + 1) // 2, shape.len_k + 1, shape.batch)


def _plain(shape: Shape, rng: Rng) -> Arguments:
    return {}


def _scale(shape: Shape, rng: Rng) -> Arguments:
    return {"scale": 0.1}


def _causal(shape: Shape, rng: Rng) -> Arguments:
    return {"causal": True}


def _window(shape: Shape, rng: Rng) -> Arguments:
    return {"window": (max(1, shape.len_k // 4), max(1, shape.len_k // 8))}


def _q_offset(shape: Shape, rng: Rng) -> Arguments:
    """The first query stands at the first key. Alone it changes nothing: no other argument uses positions."""
    return {"q_offset": 0}


def _kv_lengths(shape: Shape, rng: Rng) -> Arguments:
    return {"kv_lengths": _lengths(shape, rng)}


def _documents(shape: Shape, rng: Rng) -> Arguments:
    """Four documents of different lengths in one row of keys; a query attends its own document only."""
    edges = np.concatenate([[0], np.sort(rng.integers(0, shape.len_k + 1, 3)), [shape.len_k]])
    position = np.arange(shape.len_q) + max(0, shape.len_k - shape.len_q)
    index = np.clip(np.searchsorted(edges, position, side="right"), 1, 4)
    return {"row_ranges": (edges[index - 1], edges[index])}


def _padding_mask(shape: Shape, rng: Rng) -> Arguments:
    return {"mask": (np.arange(shape.len_k) < _lengths(shape, rng)[:, None])[:, None, None, :]}


def _mask(shape: Shape, rng: Rng) -> Arguments:
    return {"mask": rng.random((shape.batch, 1, shape.len_q, shape.len_k), np.float32) < 0.7}


def _block_mask(shape: Shape, rng: Rng) -> Arguments:
    """Blocks of 64 queries by 64 keys, half of them empty: a kernel may skip those."""
    blocks = rng.random((shape.len_q // 64 + 1, shape.len_k // 64 + 1)) < 0.5
    mask = np.repeat(np.repeat(blocks, 64, axis=0), 64, axis=1)
    return {"mask": mask[: shape.len_q, : shape.len_k]}


def _bias(shape: Shape, rng: Rng) -> Arguments:
    return {"bias": rng.standard_normal((shape.len_q, shape.len_k), np.float32)}


def _bias_heads(shape: Shape, rng: Rng) -> Arguments:
    return {"bias": rng.standard_normal((shape.heads_q, shape.len_q, shape.len_k), np.float32)}


def _bias_masking(shape: Shape, rng: Rng) -> Arguments:
    """A bias whose -inf masks keys."""
    bias = rng.standard_normal((shape.batch, 1, 1, shape.len_k), np.float32)
    bias[rng.random(bias.shape) < 0.3] = -np.inf
    return {"bias": bias}


def _softcap(shape: Shape, rng: Rng) -> Arguments:
    return {"softcap": 8.0}


def _alibi(shape: Shape, rng: Rng) -> Arguments:
    return {"alibi_slopes": 2.0 ** (-8.0 * np.arange(1, shape.heads_q + 1, dtype=np.float32) / shape.heads_q)}


def _sinks(shape: Shape, rng: Rng) -> Arguments:
    return {"sinks": rng.standard_normal(shape.heads_q, np.float32)}


def _off_by_one(shape: Shape, rng: Rng) -> Arguments:
    return {"sinks": np.zeros(1, np.float32)}


def _t5_bias(shape: Shape, rng: Rng) -> Arguments:
    table = rng.standard_normal((32, shape.heads_q), np.float32)
    return {"bias": positions.t5_bias(table, shape.len_q, shape.len_k)}


VARIANTS: dict[str, Callable[[Shape, Rng], Arguments]] = {
    "plain": _plain,
    "scale": _scale,
    "causal": _causal,
    "window": _window,
    "q_offset": _q_offset,
    "kv_lengths": _kv_lengths,
    "documents": _documents,
    "padding_mask": _padding_mask,
    "mask": _mask,
    "block_mask": _block_mask,
    "bias": _bias,
    "bias_heads": _bias_heads,
    "bias_masking": _bias_masking,
    "softcap": _softcap,
    "alibi": _alibi,
    "sinks": _sinks,
    "off_by_one": _off_by_one,
    "t5_bias": _t5_bias,
}


def _block_bitmap(shape: Shape, rng: Rng) -> Array:
    """A tenth of the blocks of 64; the diagonal's blocks too, so that every query has keys."""
    n = -(-max(shape.len_q, shape.len_k) // 64)
    return (rng.random((n, n)) < 0.1) | np.eye(n, dtype=bool)


def _mixed_ids(shape: Shape, rng: Rng) -> Array:
    """Ten documents, each cut into pieces of 32 tokens; the pieces are in any order."""
    return rng.integers(0, 10, shape.len_k // 32 + 1).repeat(32)[: shape.len_k]


# Structural masks by name: a function ``(shape, rng)`` that returns the mask for `mask=`.
STRUCTURES: dict[str, Callable[[Shape, Rng], masks.Mask]] = {
    "sliding_window": lambda shape, rng: masks.window(max(1, shape.len_k // 8 - 1)),
    "streaming": lambda shape, rng: masks.causal() & (masks.window(shape.len_k // 8) | masks.first_keys(4)),
    "prefix": lambda shape, rng: masks.causal() | masks.first_keys(shape.len_k // 4),
    "chunked": lambda shape, rng: masks.causal() & masks.chunked(max(1, shape.len_k // 8)),
    "packed_documents": lambda shape, rng: masks.documents(np.sort(rng.integers(0, 10, shape.len_k))),
    "mixed_documents": lambda shape, rng: masks.documents(_mixed_ids(shape, rng)),
    "block_sparse": lambda shape, rng: masks.block_sparse(_block_bitmap(shape, rng), 64),
    "longformer": lambda shape, rng: (
        masks.window(shape.len_k // 16, shape.len_k // 16) | masks.global_tokens([0])
    ),
    "bigbird": lambda shape, rng: masks.bigbird(64),
    "dilated": lambda shape, rng: masks.dilated(shape.len_k // 32, 4),
    "strided": lambda shape, rng: masks.strided(max(1, int(shape.len_k**0.5))),
}

_POSITIONAL = {"causal", "window", "alibi_slopes"}


def combine(names: Iterable[str], shape: Shape, rng: Rng) -> Arguments:
    """The keyword arguments of several variants in one call."""
    arguments: Arguments = {}
    for name in names:
        arguments.update(VARIANTS[name](shape, rng))
    # Where a padded sequence is shorter than its queries, q_offset has no default and must be given.
    if "kv_lengths" in arguments and _POSITIONAL & arguments.keys():
        arguments.setdefault("q_offset", 0)
    return arguments


def pairs() -> list[tuple[str, str]]:
    """All pairs of variants that set different arguments."""
    rng = np.random.default_rng(0)
    keys = {name: set(make(shape_of(1, 1, 1, 1, 1), rng)) for name, make in VARIANTS.items()}
    return [(a, b) for a, b in combinations(VARIANTS, 2) if keys[a] and keys[b] and not keys[a] & keys[b]]
