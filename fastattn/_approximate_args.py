"""The arguments of approximate attention, checked and normalised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._args import lane_dtype
from fastattn._check import attention_args
from fastattn._inputs import flag, float_array, integer

if TYPE_CHECKING:
    from fastattn._args import Array


def projected(func: str, name: str, matrix: Any, of: str, x: Any) -> Array:
    """matrix (n, length) @ x (..., length, d), in x's dtype."""
    m, array = float_array(func, name, matrix), float_array(func, of, x, least_dims=2)
    if m.ndim < 2 or m.shape[-1] != array.shape[-2] or m.shape[-2] < 1:
        raise ValueError(
            f"{func}(): {name} has shape {m.shape}; expected (..., n, {array.shape[-2]}), as many columns as"
            f" {of} has rows, shape {array.shape}"
        )
    lane = lane_dtype(array.dtype)
    try:
        product = m.astype(lane) @ array.astype(lane)
    except ValueError:
        raise ValueError(
            f"{func}(): {name} has shape {m.shape}; expected one that broadcasts to {of}, shape {array.shape}"
        ) from None
    result: Array = product.astype(array.dtype)
    return result


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
    args = attention_args(func, q, q, values, scale=scale, num_threads=num_threads, backend=backend)
    if q.shape[:-1] != values.shape[:-1]:
        raise ValueError(
            f"{func}(): qk has shape {q.shape} and v {values.shape}; expected the same but for the last axis"
        )
    n = integer(func, "n_buckets", n_buckets, 2)
    if n % 2:
        raise ValueError(f"{func}(): n_buckets is {n}; expected an even number")
    rounds, lane = integer(func, "n_rounds", n_rounds, 1), lane_dtype(q.dtype)
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
    return LshArgs(
        q.astype(lane), values.astype(lane), args.out.dtype, integer(func, "chunk", chunk, 1), rounds, r,
        flag(func, "causal", causal), args.scale, args.num_threads, backend,
    )  # fmt: skip
