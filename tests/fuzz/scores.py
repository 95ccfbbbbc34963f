"""Shapes of scores, and for each option of `attention` values that fit them."""

from typing import NamedTuple

import numpy as np

from fastattn import masks
from fastattn._args.types import lane_dtype


class Scores(NamedTuple):
    """q is (*batch, heads_q, len_q, head_dim), or without batch and heads if `one_head`."""

    batch: tuple[int, ...]
    heads_q: int
    heads_kv: int
    len_q: int
    len_k: int
    head_dim: int
    head_dim_v: int
    one_head: bool
    dtype: np.dtype

    @classmethod
    def draw(cls, d, grouped=True, equal=False, most_heads=3):
        one_head = d.chance(0.1)
        heads_kv = 1 if one_head else int(d.rng.integers(1, most_heads + 1))
        group = 1 if one_head or not grouped else d.choose(1, 1, 2, 3)
        len_q, head_dim = d.choose(1, d.length(), d.length()), d.size()
        len_k = len_q if equal or d.chance(0.3) else d.length()
        dim_v = head_dim if d.chance(0.6) else d.size()
        batch = () if one_head else d.batch()
        return cls(batch, heads_kv * group, heads_kv, len_q, len_k, head_dim, dim_v, one_head, d.dtype)

    @property
    def shape(self):
        return (*self.batch, self.heads_q, self.len_q, self.len_k)

    @property
    def out(self):
        return (*((self.len_q,) if self.one_head else self.shape[:-1]), self.head_dim_v)

    def q(self, d, dim=None):
        return self._rows(d, self.heads_q, self.len_q, dim or self.head_dim, self.dtype)

    def kv(self, d):
        """k and v, which may lack batch dimensions, and be in 16 bits for float32 queries."""
        half = self.dtype == np.float32 and d.chance(0.1)
        dtype = np.dtype(np.float16) if half else self.dtype
        dims = self.head_dim, self.head_dim_v
        return [self._rows(d, self.heads_kv, self.len_k, dim, dtype, d.chance(0.15)) for dim in dims]

    def _rows(self, d, heads, length, dim, dtype, fewer=False):
        if self.one_head:
            return d.floats(length, dim, dtype=dtype)
        batch = tuple(1 for _ in self.batch) if fewer else self.batch
        return d.floats(*batch, heads, length, dim, dtype=dtype)

    def qkv(self, d):
        k, v = self.kv(d)
        return {"q": self.q(d), "k": k, "v": v}


def dense_mask(d, s):
    return d.rng.random(d.broadcast(*s.shape)) < d.choose(0.3, 0.7, 1.0)


def bias(d, s):
    x = d.floats(*d.broadcast(*s.shape), dtype=d.choose(lane_dtype(s.dtype), lane_dtype(s.dtype), s.dtype))
    if isinstance(x, np.ndarray) and x.flags.writeable and d.chance(0.3):
        x[d.rng.random(x.shape) < 0.3] = -np.inf
    return x


def per_head(d, s, low=None):
    x = d.floats(*d.broadcast(*s.batch, s.heads_q), dtype=d.choose(np.float32, s.dtype, np.float64))
    return x if low is None else abs(np.asarray(x))


def lengths(d, s, most):
    return d.choose(d.integers(0, most + 1, *s.batch), int(d.rng.integers(most + 1)))


def offset(d, s):
    return d.choose(0, int(d.rng.integers(-5, s.len_k + 5)), d.rng.integers(-5, s.len_k + 5, s.batch))


def row_ranges(d, s):
    shape = (*s.batch, s.heads_q, s.len_q)
    return tuple(d.rng.integers(-3, s.len_k + 4, d.broadcast(*shape)) for _ in range(2))


def window(d, s):
    return tuple(d.choose(None, int(d.rng.integers(0, 6))) for _ in range(2))


def out(d, s):
    return d.laid_out_to_write(np.full(s.out, 9, s.dtype))


def stats(d, s):
    names = ("row_max", "entropy", f"top_k:{d.size()}", "key_sums", "mean_weights")
    return tuple(name for name in names if d.chance(0.5))


def any_mask(d, s):
    """A structural mask, or two of them joined."""
    first, second = (kind(**MASKS[kind](d, s)) for kind in (d.choose(*MASKS), d.choose(*MASKS)))
    return first if d.chance(0.7) else d.choose(first & second, first | second, ~first, first & ~second)


def grid(d, n):
    """`n` places, along one, two or three axes."""
    divisors = [i for i in range(1, n + 1) if n % i == 0] or [1]
    first = d.choose(*divisors)
    return d.choose((n,), (first, n // first), (1, first, n // first)) if n else (1, 1)


def swin(d, s):
    shape = grid(d, s.len_k)
    windows = tuple(int(d.rng.integers(1, n + 2)) for n in shape)
    return {"shape": shape, "window": windows, "shift": tuple(int(d.rng.integers(w)) for w in windows)}


def tree(d, s):
    nodes = int(d.rng.integers(1, max(2, s.len_k + 1)))
    return {"parents": [int(d.rng.integers(-1, i)) for i in range(nodes)]}


PREDICATES = (lambda b, h, i, j: i >= j, lambda b, h, i, j: (i + j + h) % 3 > 0)
# Each mask's arguments.
MASKS = {
    masks.causal: lambda d, s: {},
    masks.window: lambda d, s: dict(zip(("left", "right"), window(d, s), strict=True)),
    masks.first_keys: lambda d, s: {"n": d.choose(d.size(), lengths(d, s, s.len_k))},
    masks.chunked: lambda d, s: {"size": d.size()},
    masks.documents: lambda d, s: {"ids": d.integers(-1, 4, *d.broadcast(*s.batch), s.len_k), **d.some(
        0.2, query_ids=lambda: d.integers(-1, 4, *s.batch, s.len_q))},
    masks.dilated: lambda d, s: {"window": d.size(0), "dilation": d.size()},
    masks.strided: lambda d, s: {"stride": d.size()},
    masks.fixed: lambda d, s: {"stride": d.size(3), "summary": d.choose(1, 2, 3)},
    masks.tree: tree,
    masks.dense: lambda d, s: {"array": dense_mask(d, s)},
    masks.block_sparse: lambda d, s: {
        "bitmap": d.rng.random((d.size(), d.size())) < 0.5, "block": d.choose(d.size(), (2, 4))},
    masks.global_tokens: lambda d, s: {"index": d.integers(0, 9, 3)},
    masks.bigbird: lambda d, s: {
        "block": d.size(), "window": d.choose(1, 3), "random": d.choose(0, 1, 3), "rng": 5},
    masks.axial: lambda d, s: {"shape": grid(d, s.len_k), "axis": d.choose(0, -1)},
    masks.swin: swin,
    masks.neighborhood: lambda d, s: {
        "shape": (max(1, s.len_k),), "kernel": d.choose(1, max(1, s.len_k // 2)), **d.some(
            0.2, causal=lambda: True)},
    masks.compile: lambda d, s: {"mask": d.choose(*PREDICATES), "shape": s.shape},
}  # fmt: skip

OPTIONS = {
    "mask": lambda d, s: d.choose(dense_mask, any_mask)(d, s),
    "bias": bias,
    "causal": lambda d, s: d.choose(True, True, False),
    "window": window,
    "scale": lambda d, s: d.choose(0.3, 1, -0.5, np.float32(0.7)),
    "softcap": lambda d, s: d.choose(2.0, 8.0),
    "alibi_slopes": lambda d, s: per_head(d, s, 0),
    "sinks": per_head,
    "kv_lengths": lambda d, s: lengths(d, s, s.len_k),
    "q_offset": offset,
    "row_ranges": row_ranges,
    "out": out,
    "return_lse": lambda d, s: d.choose(True, False),
    "num_threads": lambda d, s: d.choose(1, 2, 3),
    "backend": lambda d, s: None,
    "stats": stats,
}


def options(d, s, *without, only=None):
    """Some of attention's options, right for these scores."""
    names = [name for name in only or OPTIONS if name not in without]
    p = d.choose(0.0, 0.1, 0.25)
    drawn = {name: OPTIONS[name](d, s) for name in names if d.chance(p)}
    if "kv_lengths" in drawn and "q_offset" in names:
        drawn.setdefault("q_offset", 0)
    return drawn
