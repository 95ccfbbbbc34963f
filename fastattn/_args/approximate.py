"""The arguments of approximate attention, checked and normalised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._args.attention import attention_args
from fastattn._args.types import lane_dtype
from fastattn._args.values import MOST_SIZE, flag, float_array, integer

if TYPE_CHECKING:
    from fastattn._args.types import Array


class LinformerArgs(NamedTuple):
    """k, v (..., heads, length, d) and their projections e, f (n, length), or with leading axes of theirs."""

    k: Array
    v: Array
    e: Array
    f: Array


def linformer_args(
    func: str, q: Any, k: Any, v: Any, e: Any, f: Any, scale: Any, out: Any, num_threads: Any, backend: Any
) -> LinformerArgs:
    """Check those of `linformer_attention`."""
    attention_args(func, q, k, v, scale=scale, out=out, num_threads=num_threads, backend=backend)
    keys, values = float_array(func, "k", k), float_array(func, "v", v)
    first = _projection(func, "e", e, "k", keys)
    second = first if f is None else _projection(func, "f", f, "v", values)
    if f is None:
        _require_leading(func, "e", first, "v", values)
    elif first.shape[-2] != second.shape[-2]:
        raise ValueError(
            f"{func}(): f has shape {second.shape}; expected (..., n, len_k) with e's n = {first.shape[-2]}"
        )
    return LinformerArgs(keys, values, first, second)


def _projection(func: str, name: str, x: Any, of: str, other: Array) -> Array:
    """`x` as a matrix (n, length) for each head of `other`, which is called `of`."""
    matrix, length = float_array(func, name, x), other.shape[-2]
    if matrix.ndim < 2 or matrix.shape[-1] != length or matrix.shape[-2] < 1:
        raise ValueError(
            f"{func}(): {name} has shape {matrix.shape}; expected (..., n, {length}), as many columns as"
            f" {of} has rows, shape {other.shape}"
        )
    _require_leading(func, name, matrix, of, other)
    return matrix


def _require_leading(func: str, name: str, matrix: Array, of: str, other: Array) -> None:
    """Raise unless there is one matrix, or one for each head of `other`, which is called `of`."""
    try:
        fits = np.broadcast_shapes(matrix.shape[:-2], other.shape[:-2]) == other.shape[:-2]
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"{func}(): {name} has shape {matrix.shape}; expected (n, len_k), or leading axes that broadcast"
            f" to {of}'s, shape {other.shape}"
        )


class NystromArgs(NamedTuple):
    """q, k and v as arrays of three axes or more, or all of two."""

    q: Array
    k: Array
    v: Array
    len_q: int
    len_k: int
    n_landmarks: int
    scale: float
    num_threads: int


def nystrom_args(
    func: str,
    q: Any,
    k: Any,
    v: Any,
    n_landmarks: Any,
    n_iterations: Any,
    scale: Any,
    num_threads: Any,
    backend: Any,
) -> NystromArgs:
    """Check those of `nystrom_attention`."""
    args = attention_args(func, q, k, v, scale=scale, num_threads=num_threads, backend=backend)
    if args.heads_q != args.heads_kv:
        raise ValueError(
            f"{func}(): q has {args.heads_q} heads and k {args.heads_kv}; expected the same number of both"
        )
    integer(func, "n_iterations", n_iterations, 0)
    q, k, v = (float_array(func, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    n = integer(func, "n_landmarks", n_landmarks, 1)
    return NystromArgs(q, k, v, args.len_q, args.len_k, n, args.scale, args.num_threads)


class LshArgs(NamedTuple):
    """q (..., heads, length, head_dim) and v in the dtype in which they are accumulated."""

    q: Array
    v: Array
    dtype: np.dtype[Any]
    chunk: int
    n_rounds: int
    rotations: Array
    causal: bool
    scale: float
    num_threads: int
    backend: Any


def lsh_args(
    func: str,
    qk: Any,
    v: Any,
    n_buckets: Any,
    chunk: Any,
    n_rounds: Any,
    seed: Any,
    rotations: Any,
    causal: Any,
    scale: Any,
    num_threads: Any,
    backend: Any,
) -> LshArgs:
    """Check those of `lsh_attention`."""
    q, values = float_array(func, "qk", qk, least_dims=3), float_array(func, "v", v, least_dims=3)
    if q.shape[:-1] != values.shape[:-1]:
        raise ValueError(
            f"{func}(): qk has shape {q.shape} and v {values.shape}; expected the same but for the last axis"
        )
    if q.dtype != values.dtype:
        raise TypeError(f"{func}(): v has dtype {values.dtype}; expected qk's, {q.dtype}")
    args = attention_args(func, q, q, values, scale=scale, num_threads=num_threads, backend=backend)
    n = integer(func, "n_buckets", n_buckets, 2, MOST_SIZE)
    if n % 2:
        raise ValueError(f"{func}(): n_buckets is {n}; expected an even number")
    rounds, lane = integer(func, "n_rounds", n_rounds, 1, MOST_SIZE), lane_dtype(q.dtype)
    shape = (args.heads_q, rounds, args.head_dim, n // 2)
    if rotations is None:
        r = np.random.default_rng(integer(func, "seed", seed, 0)).standard_normal(shape).astype(lane)
    else:
        r = float_array(func, "rotations", rotations).astype(lane)
        if r.shape != shape:
            raise ValueError(
                f"{func}(): rotations has shape {r.shape}; expected {shape},"
                f" (heads, n_rounds, head_dim, n_buckets // 2)"
            )
    length = min(integer(func, "chunk", chunk, 1), max(1, q.shape[-2]))  # a longer one would only be padded
    return LshArgs(
        q.astype(lane), values.astype(lane), args.out.dtype, length, rounds, r,
        flag(func, "causal", causal), args.scale, args.num_threads, backend,
    )  # fmt: skip
