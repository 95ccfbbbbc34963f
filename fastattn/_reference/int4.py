"""Blocks of 4 bits: the twin of src/int4.inc.h and src/hadamard.inc.h."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._args.types import FLOAT32, INT4, INT4_BLOCK, INT4_BYTES, Array

_MOST = 256  # elements that one Hadamard matrix multiplies


def round_rows(x: Array, out: Array) -> None:
    """Fill out (..., bytes) with the rows of x (..., head_dim), turned: NaN for a row that does not fit."""
    rows = hadamard(x).reshape(*x.shape[:-1], -1, INT4_BLOCK)
    most, least = rows.max(axis=-1), rows.min(axis=-1)
    scale = (np.where(most >= -least, most, least) / -8).astype(FLOAT32).astype("<f2")
    fits = np.isfinite(scale).all(axis=-1)
    scale[~fits] = np.nan
    by = np.where((scale != 0) & fits[..., None], scale.astype(x.dtype), np.inf)[..., None]
    codes = np.rint(np.clip(np.where(fits[..., None, None], rows, 0) / by + 8, 0, 15)).astype(np.uint8)
    halves = codes[..., : INT4_BLOCK // 2] | codes[..., INT4_BLOCK // 2 :] << 4
    parts = (scale.view(np.uint8), halves.reshape(*x.shape[:-1], -1))
    out[...] = np.concatenate(parts, axis=-1).view(INT4)


def lanes(x: Array, dtype: np.dtype[Any]) -> Array:
    """The rows (..., head_dim) of x (..., bytes), turned back."""
    blocks, data = x.shape[-1] // INT4_BYTES, np.ascontiguousarray(x).view(np.uint8)
    scale = data[..., : 2 * blocks].copy().view("<f2").astype(dtype)
    scale[~np.isfinite(scale).all(axis=-1)] = np.nan
    halves = data[..., 2 * blocks :].reshape(*scale.shape, INT4_BLOCK // 2)
    codes = np.concatenate((halves & 15, halves >> 4), axis=-1)
    numbers = (codes.astype(dtype) - 8) * scale[..., None]
    return hadamard(numbers.reshape(*x.shape[:-1], blocks * INT4_BLOCK))


def hadamard(x: Array) -> Array:
    """x (..., n) times Hadamard matrices of the largest powers of two that fit: its own inverse."""
    out, first = np.empty_like(x), 0
    while first < x.shape[-1]:
        size = min(_MOST, 1 << (x.shape[-1] - first).bit_length() - 1)
        part = x[..., first : first + size]
        half = 1
        while half < size:
            pairs = part.reshape(*x.shape[:-1], size // (2 * half), 2, half)
            a, b = pairs[..., 0, :], pairs[..., 1, :]
            part, half = np.stack((a + b, a - b), axis=-2).reshape(*x.shape[:-1], size), 2 * half
        out[..., first : first + size] = part * x.dtype.type(size**-0.5)
        first += size
    return out
