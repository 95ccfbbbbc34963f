"""The arguments of a cache of keys and values, checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._args.dtypes import float_dtype
from fastattn._args.types import FLOAT32, FLOAT64, INT4, INT4_BLOCK, Array, Ints, shape_of
from fastattn._args.values import MOST_SIZE, float_array, integer, is_ready, of_sequences

_ROUNDS = " (KVCache rounds to int8 and int4)"


def cache_args(capacity: Any, dtype: Any) -> tuple[int, np.dtype[Any] | None]:
    """Check the arguments of `KVCache`."""
    room = integer("capacity", capacity, 0, MOST_SIZE)
    return room, None if dtype is None else float_dtype(dtype, of_cache=True)


def append_args(
    k: Any, v: Any, lengths: Any, held: tuple[Array, ...], kept_as: np.dtype[Any] | None
) -> tuple[Array, Array, Ints | None]:
    """Check the arguments of `KVCache.append`; lengths become (batch,).

    The cache holds keys and values `held`, and in int8 their scales; it may be empty. If `kept_as` is None,
    it keeps the type of the first keys.
    """
    k = k if is_ready(k, 4) else float_array("k", k, hint=_ROUNDS)
    v = v if is_ready(v, 4) else float_array("v", v, hint=_ROUNDS)
    held_shapes = tuple(map(shape_of, held[:2]))
    if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]:
        expected = "(batch, heads_kv, tokens, head_dim) for both"
        raise ValueError(f"(): k and v have shapes {k.shape} and {v.shape}; expected {expected}")
    if k.dtype.newbyteorder("=") != v.dtype.newbyteorder("="):
        raise TypeError(f"(): v has dtype {v.dtype}; expected k's, {k.dtype}")
    for name, x, there in zip("kv", (k, v), held_shapes, strict=False):
        if x.shape[:2] != there[:2] or x.shape[3] != there[3]:
            expected = f"({there[0]}, {there[1]}, tokens, {there[3]})"
            raise ValueError(f"(): {name} has shape {x.shape}; expected {expected} as before")
        if kept_as is None and x.dtype.newbyteorder("=") != held[0].dtype:
            raise TypeError(f"(): {name} has dtype {x.dtype}; expected {held[0].dtype} as before")
    for name, x in (("k", k), ("v", v)):
        require_blocks(f"{name} has a head_dim of", x.shape[3], kept_as)
    counts = None if lengths is None else counts_of(lengths, k.shape[0], k.shape[2])
    if kept_as == np.int8 and held and k.dtype.newbyteorder("=") == FLOAT64 and held[2].dtype == FLOAT32:
        for name, x in (("k", k), ("v", v)):
            _require_float32(name, x, counts)
    return k, v, counts


def require_blocks(came: str, head_dim: int, kept_as: np.dtype[Any] | None) -> None:
    """Raise where rows of `head_dim` numbers are to be kept in int4 and are not of whole blocks."""
    if kept_as == INT4 and head_dim % INT4_BLOCK:
        raise ValueError(f"(): {came} {head_dim}; expected a multiple of {INT4_BLOCK} in int4")


def counts_of(lengths: Any, batch: int, tokens: int) -> Ints:
    """Check how many of the new tokens of each sequence are not padding."""
    return np.broadcast_to(of_sequences("lengths", lengths, (batch,), 0, tokens), (batch,))


def _require_float32(name: str, x: Array, counts: Ints | None) -> None:
    """Raise if float32 makes a finite number of x (batch, heads, tokens, head_dim) infinite.

    Padding, the tokens behind the first `counts` (batch,), may hold anything.
    """
    with np.errstate(over="ignore"):
        lost = np.isfinite(x) & np.isinf(x.astype(FLOAT32))
    if counts is not None:
        lost &= (np.arange(x.shape[2]) < counts[:, None])[:, None, :, None]
    if lost.any():
        expected = "numbers that are finite in float32, as the scales of this cache are"
        raise ValueError(f"(): {name} has {x[lost][0]}; expected {expected}")
