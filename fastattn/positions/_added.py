"""Positions that are added: sinusoidal vectors to inputs, ALiBi slopes and T5 biases to scores."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fastattn._args.dtypes import float_dtype
from fastattn._args.errors import named
from fastattn._args.types import FLOAT64, Array, ArrayLike, DTypeLike, Ints, NDArray
from fastattn._args.values import MAX_POSITION, MOST_SIZE, flag, float_array, integer, number


@named("sinusoidal")
def sinusoidal(
    length: int, d_model: int, *, offset: int = 0, dtype: DTypeLike = np.float32, base: float = 10000.0
) -> NDArray[Any]:
    """Sinusoidal position vectors, to be added to inputs [1]_.

    Parameters
    ----------
    length : int
        Number of positions.
    d_model : int
        Features; if odd, the last cosine is left out.
    offset : int, default 0
        The first position.
    dtype : dtype, default float32
        dtype of the result; computed in float64.
    base : float, default 10000
        Sets the frequencies ``w_k = base ** (-2 k / d_model)``.

    Returns
    -------
    ndarray, (length, d_model)
        ``x[t, 2k] = sin((offset + t) w_k)`` and ``x[t, 2k + 1] = cos((offset + t) w_k)``.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, before anything is computed.

    References
    ----------
    .. [1] A. Vaswani et al., "Attention Is All You Need", 2017, arXiv:1706.03762, section 3.5.
    """
    length = integer("length", length, 0, MOST_SIZE)
    d_model = integer("d_model", d_model, 1, MOST_SIZE)
    offset = integer("offset", offset, -MAX_POSITION, MAX_POSITION)
    dtype = float_dtype(dtype)
    base = number("base", base, FLOAT64, positive=True)
    angles = np.arange(offset, offset + length)[:, None] * base ** -(np.arange(0, d_model, 2) / d_model)
    vectors = np.empty((length, d_model), dtype)
    vectors[:, 0::2] = np.sin(angles)
    vectors[:, 1::2] = np.cos(angles[:, : d_model // 2])
    return vectors


@named("alibi_slopes")
def alibi_slopes(num_heads: int) -> NDArray[np.float32]:
    """ALiBi slopes for ``attention(alibi_slopes=...)``, one per head, from steep to flat.

    Parameters
    ----------
    num_heads : int
        Number of query heads.

    Returns
    -------
    ndarray of float32, (num_heads,)
        ``2 ** (-8 i / n)``, i from 1 to n, for n heads, a power of two. Otherwise the slopes of the next
        lower power of two n, then every second slope of 2 n, as in the authors' code [1]_, BLOOM and MPT.

    Raises
    ------
    TypeError, ValueError
        If `num_heads` is not a positive integer.

    References
    ----------
    .. [1] O. Press, N. A. Smith, M. Lewis, "Train Short, Test Long: Attention with Linear Biases Enables
       Input Length Extrapolation", 2022, arXiv:2108.12409, section 3.
    """
    num_heads = integer("num_heads", num_heads, 1, MOST_SIZE)
    n = 1 << (num_heads.bit_length() - 1)
    exponents = np.concatenate([np.arange(1, n + 1) / n, np.arange(1, 2 * (num_heads - n), 2) / (2 * n)])
    slopes: NDArray[np.float32] = np.exp2(-8 * exponents).astype(np.float32)
    return slopes


@named("t5_buckets")
def t5_buckets(
    len_q: int,
    len_k: int,
    *,
    num_buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = True,
    q_offset: int | None = None,
) -> NDArray[np.int64]:
    """T5 bucket of each query and key, by their distance.

    Parameters
    ----------
    len_q, len_k : int
        Numbers of queries and of keys.
    num_buckets : int, default 32
        Number of buckets: at least 2, or 4 if `bidirectional`.
    max_distance : int, default 128
        Distances from here on share the last bucket. It exceeds the distances with separate buckets.
    bidirectional : bool, default True
        True, as in encoders: the upper half of the buckets is for keys after the query. False, as in
        decoders: all keys after the query are in bucket 0.
    q_offset : int, optional
        Position of the first query, as in `attention`; default ``len_k - len_q``, for the last query at the
        last key: 0 in an encoder, the length of the cache in a decoder.

    Returns
    -------
    ndarray of int64, (len_q, len_k)
        In ``[0, num_buckets)``: a read-only view of ``len_q + len_k - 1`` integers, one per diagonal.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, before anything is computed.

    Notes
    -----
    Of the n buckets of one direction, the first ``n // 2`` are single distances; the others are spaced
    logarithmically up to `max_distance` [1]_.

    References
    ----------
    .. [1] C. Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
       Transformer", 2020, arXiv:1910.10683, section 2.1.
    """
    num_buckets = integer("num_buckets", num_buckets, 1, MOST_SIZE)
    diagonals, len_q, len_k = _t5_diagonals(len_q, len_k, num_buckets, max_distance, bidirectional, q_offset)
    return toeplitz(diagonals, len_q, len_k)


@named("t5_bias")
def t5_bias(
    table: ArrayLike,
    len_q: int,
    len_k: int,
    *,
    max_distance: int = 128,
    bidirectional: bool = True,
    q_offset: int | None = None,
) -> NDArray[Any]:
    """T5 relative bias for ``attention(bias=...)``, in O(heads * (len_q + len_k)) memory.

    Parameters
    ----------
    table : array_like, (num_buckets, heads)
        The model's ``relative_attention_bias.weight``; float32, float64, float16 or bfloat16.
    len_q, len_k, max_distance, bidirectional, q_offset
        As in `t5_buckets`.

    Returns
    -------
    ndarray, (heads, len_q, len_k)
        ``table[t5_buckets(...)]`` with heads first, in table's dtype: a read-only view of an array
        (heads, len_q + len_k - 1), which `attention` reads in place.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, before anything is computed.

    Notes
    -----
    T5 does not scale scores: ``attention(q, k, v, bias=bias, scale=1.0)``. Its cross-attention has no bias.
    """
    rows = float_array("table", table)
    if rows.ndim != 2:
        raise ValueError(f"(): table has shape {rows.shape}; expected (num_buckets, heads)")
    diagonals, len_q, len_k = _t5_diagonals(len_q, len_k, len(rows), max_distance, bidirectional, q_offset)
    # Convert to native byte order here, where it is O(length): `attention` would copy the whole view.
    return toeplitz(np.array(rows[diagonals].T, rows.dtype.newbyteorder("="), order="C"), len_q, len_k)


def _t5_diagonals(
    len_q: Any, len_k: Any, num_buckets: int, max_distance: Any, bidirectional: Any, q_offset: Any
) -> tuple[Ints, int, int]:
    """Bucket of each diagonal, from (last query, first key) to (first query, last key); checked lengths."""
    len_q = integer("len_q", len_q, 0, MOST_SIZE)
    len_k = integer("len_k", len_k, 0, MOST_SIZE)
    both = flag("bidirectional", bidirectional)
    if num_buckets < (least := 4 if both else 2):
        expected = f"at least {least} with bidirectional={both}"
        raise ValueError(f"(): num_buckets is {num_buckets}; expected {expected}")
    n = num_buckets // 2 if both else num_buckets
    exact = n // 2
    max_distance = integer("max_distance", max_distance, exact + 1, MAX_POSITION)
    first = len_k - len_q
    if q_offset is not None:
        first = integer("q_offset", q_offset, -MAX_POSITION, MAX_POSITION)
    behind = np.arange(first + max(len_q, 1) - 1, first - len_k, -1)  # query - key
    distance = np.abs(behind) if both else np.maximum(behind, 0)
    steps = np.log(np.maximum(distance, exact) / exact) / math.log(max_distance / exact)
    # 1e-9: where the exact value is an integer, rounding of the logarithms must not push it below.
    log_bucket = np.minimum(exact + (steps * (n - exact) + 1e-9).astype(np.int64), n - 1)
    bucket = np.where(distance < exact, distance, log_bucket)
    return bucket + n * (behind < 0) if both else bucket, len_q, len_k


def toeplitz(diagonals: Array, len_q: int, len_k: int) -> Array:
    """View (..., len_q, len_k) of `diagonals`, (..., max(len_q, 1) + len_k - 1), the lower left one first."""
    return sliding_window_view(diagonals, len_k, axis=-1)[..., ::-1, :][..., :len_q, :]
