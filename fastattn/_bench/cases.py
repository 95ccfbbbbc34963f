"""Shapes and variants of attention, defined once for the tests, the self-test and the bench.

A variant is a function ``(shape, rng) -> dict`` that returns keyword arguments for `fastattn.attention`.
`combine` merges the arguments of several variants into one call; `definition` is of its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from fastattn import masks, positions
from fastattn._args.quiet import quiet

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

    def normal(heads: int, length: int, dim: int, name: str) -> Array:
        sizes = (heads, length) if layout == "bhld" else (length, heads)
        x = rng.standard_normal((shape.batch, *sizes, dim), np.float32).astype(as_dtype(name))
        return x if layout == "bhld" else x.swapaxes(1, 2)

    return (
        normal(shape.heads_q, shape.len_q, shape.head_dim, dtype),
        normal(shape.heads_kv, shape.len_k, shape.head_dim, kv_dtype or dtype),
        normal(shape.heads_kv, shape.len_k, shape.dim_v, kv_dtype or dtype),
    )


def _lengths(shape: Shape, rng: Rng) -> Array:
    """One key length for each sequence, between half of the keys and all of them."""
    return rng.integers((shape.len_k + 1) // 2, shape.len_k + 1, shape.batch)


def _documents(shape: Shape, rng: Rng) -> Arguments:
    """Four documents of different lengths in one row of keys; a query attends its own document only."""
    edges = np.concatenate([[0], np.sort(rng.integers(0, shape.len_k + 1, 3)), [shape.len_k]])
    position = np.arange(shape.len_q) + max(0, shape.len_k - shape.len_q)
    index = np.clip(np.searchsorted(edges, position, side="right"), 1, 4)
    return {"row_ranges": (edges[index - 1], edges[index])}


def _block_mask(shape: Shape, rng: Rng) -> Array:
    """Blocks of 64 queries by 64 keys, half of them empty: a kernel may skip those."""
    blocks = rng.random((shape.len_q // 64 + 1, shape.len_k // 64 + 1)) < 0.5
    return blocks.repeat(64, axis=0).repeat(64, axis=1)[: shape.len_q, : shape.len_k]


def _bias_masking(shape: Shape, rng: Rng) -> Array:
    """A bias whose -inf masks keys."""
    bias = rng.standard_normal((shape.batch, 1, 1, shape.len_k), np.float32)
    bias[rng.random(bias.shape) < 0.3] = -np.inf
    return bias


def _normal(rng: Rng, *shape: int) -> Array:
    return rng.standard_normal(shape, np.float32)


VARIANTS: dict[str, Callable[[Shape, Rng], Arguments]] = {
    "plain": lambda s, rng: {},
    "scale": lambda s, rng: {"scale": 0.1},
    "causal": lambda s, rng: {"causal": True},
    "window": lambda s, rng: {"window": (max(1, s.len_k // 4), max(1, s.len_k // 8))},
    "q_offset": lambda s, rng: {"q_offset": 0},  # alone it changes nothing: no other argument uses positions
    "kv_lengths": lambda s, rng: {"kv_lengths": _lengths(s, rng)},
    "documents": _documents,
    "padding_mask": lambda s, rng: {
        "mask": (np.arange(s.len_k) < _lengths(s, rng)[:, None])[:, None, None, :]
    },
    "mask": lambda s, rng: {"mask": rng.random((s.batch, 1, s.len_q, s.len_k), np.float32) < 0.7},
    "block_mask": lambda s, rng: {"mask": _block_mask(s, rng)},
    "bias": lambda s, rng: {"bias": _normal(rng, s.len_q, s.len_k)},
    "bias_heads": lambda s, rng: {"bias": _normal(rng, s.heads_q, s.len_q, s.len_k)},
    "bias_masking": lambda s, rng: {"bias": _bias_masking(s, rng)},
    "softcap": lambda s, rng: {"softcap": 8.0},
    "alibi": lambda s, rng: {
        "alibi_slopes": 2.0 ** (-8.0 * np.arange(1, s.heads_q + 1, dtype=np.float32) / s.heads_q)
    },
    "sinks": lambda s, rng: {"sinks": _normal(rng, s.heads_q)},
    "off_by_one": lambda s, rng: {"sinks": np.zeros(1, np.float32)},
    "t5_bias": lambda s, rng: {"bias": positions.t5_bias(_normal(rng, 32, s.heads_q), s.len_q, s.len_k)},
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
    "sliding_window": lambda s, rng: masks.window(max(1, s.len_k // 8 - 1)),
    "streaming": lambda s, rng: masks.causal() & (masks.window(s.len_k // 8) | masks.first_keys(4)),
    "prefix": lambda s, rng: masks.causal() | masks.first_keys(s.len_k // 4),
    "chunked": lambda s, rng: masks.causal() & masks.chunked(max(1, s.len_k // 8)),
    "packed_documents": lambda s, rng: masks.documents(np.sort(rng.integers(0, 10, s.len_k))),
    "mixed_documents": lambda s, rng: masks.documents(_mixed_ids(s, rng)),
    "block_sparse": lambda s, rng: masks.block_sparse(_block_bitmap(s, rng), 64),
    "longformer": lambda s, rng: masks.window(s.len_k // 16, s.len_k // 16) | masks.global_tokens([0]),
    "bigbird": lambda s, rng: masks.bigbird(64),
    "dilated": lambda s, rng: masks.dilated(s.len_k // 32, 4),
    "strided": lambda s, rng: masks.strided(max(1, int(s.len_k**0.5))),
}


def combine(names: Iterable[str], shape: Shape, rng: Rng) -> Arguments:
    """The keyword arguments of several variants in one call."""
    arguments: Arguments = {}
    for name in names:
        arguments.update(VARIANTS[name](shape, rng))
    # Where a padded sequence is shorter than its queries, q_offset has no default and must be given.
    if "kv_lengths" in arguments and {"causal", "window", "alibi_slopes"} & arguments.keys():
        arguments.setdefault("q_offset", 0)
    return arguments


def pairs() -> list[tuple[str, str]]:
    """All pairs of variants that set different arguments."""
    rng, one = np.random.default_rng(0), Shape("", 1, 1, 1, 1, 1, 1)
    keys = {name: set(make(one, rng)) for name, make in VARIANTS.items()}
    return [(a, b) for a, b in combinations(VARIANTS, 2) if keys[a] and keys[b] and not keys[a] & keys[b]]


@quiet
def definition(
    q: Array, k: Array, v: Array, *, dtype: Any, mask: Any = None, bias: Any = None, causal: bool = False,
    window: tuple[int, int] | None = None, scale: float | None = None, softcap: float | None = None,
    alibi_slopes: Any = None, kv_lengths: Any = None, q_offset: Any = None, row_ranges: Any = None,
    sinks: Any = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Out and lse by definition, dense: q is (..., H, Lq, D), k and v are (..., Hkv, Lk, D or Dv).

    With a `dtype` below float64 it is the plain computation from which error bounds are derived: matrix
    products in float32; scores, probabilities and output rounded to the dtype.
    """
    dtype = np.dtype(dtype)
    work: Any = dtype.type if dtype in (np.float64, np.longdouble) else np.float32
    (*batch, num_heads, len_q, _), len_k = q.shape, k.shape[-2]
    heads = np.arange(num_heads) // (num_heads // k.shape[-3])
    length = np.asarray(len_k if kv_lengths is None else kv_lengths)
    offset = length - len_q if q_offset is None else q_offset
    key, position = np.arange(len_k), np.asarray(offset)[..., None, None, None] + np.arange(len_q)[:, None]
    attend = key < length[..., None, None, None]
    if causal:
        attend = attend & (key <= position)
    if window is not None:
        attend = attend & (key >= position - window[0]) & (key <= position + window[1])
    if row_ranges is not None:
        attend = attend & (key >= row_ranges[0][..., None]) & (key < row_ranges[1][..., None])
    if isinstance(mask, masks.Mask):
        mask = mask.to_array(len_q, len_k, batch_shape=tuple(batch), num_heads=num_heads, q_offset=q_offset)
    if mask is not None:
        attend = attend & mask
    scores = q.astype(work) @ k.astype(work)[..., heads, :, :].swapaxes(-1, -2)
    scores *= work(q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = work(softcap) * np.tanh(scores / work(softcap))
    if bias is not None:
        scores, attend = scores + bias.astype(work), attend & (bias != -np.inf)
    if alibi_slopes is not None:
        scores = scores - np.asarray(alibi_slopes, work)[..., None, None] * abs(position - key).astype(work)
    scores = np.where(attend, scores.astype(dtype).astype(work), -np.inf)
    sink = np.asarray(-np.inf if sinks is None else sinks, work)[..., None]
    row_max = np.maximum(scores.max(-1, initial=-np.inf), sink)
    row_max[row_max == -np.inf] = 0
    probs = np.exp(scores - row_max[..., None])
    row_sum = probs.sum(-1) + np.exp(sink - row_max)
    probs = np.where(row_sum[..., None] > 0, probs / row_sum[..., None], 0).astype(dtype).astype(work)
    return (probs @ v.astype(work)[..., heads, :, :]).astype(dtype), row_max + np.log(row_sum)
