"""Rows rounded to int8, as caches and integer products of attention have them."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np

from fastattn._args.types import INT4, Array, AttentionArgs, RopeArgs, columns, lane_dtype
from fastattn._args.values import readable
from fastattn._engine import dispatch, settings


def rounded(
    x: Array,
    lane: np.dtype[Any],
    num_threads: int | None = None,
    backend: str | None = None,
    hadamard: bool = False,
) -> tuple[Array, Array]:
    """`x` (..., heads, tokens, head_dim) in int8, and the scales of its rows in `lane`."""
    x = readable(x, "x", [], "the head dimension")  # lane_dtype knows native types
    if lane_dtype(x.dtype) != lane:
        x = x.astype(lane)
    codes, scale = np.empty(x.shape, np.int8), np.empty(x.shape[:-1], lane)
    nothing = np.empty((1, 1, 0), lane)  # no positions
    threads = num_threads or settings.get_num_threads()
    dispatch.run(RopeArgs(x, codes, nothing, nothing, False, threads, scale, hadamard), backend)
    return codes, scale


def in_blocks(x: Array) -> Array:
    """`x` (..., heads, tokens, head_dim) in INT4, multiplied by a Hadamard matrix: (..., bytes)."""
    x = readable(x, "x", [], "the head dimension")
    lane = lane_dtype(x.dtype)
    out = np.empty((*x.shape[:-1], columns(INT4, x.shape[-1])), INT4)
    nothing = np.empty((1, 1, 0), lane)  # no positions
    dispatch.run(RopeArgs(x, out, nothing, nothing, False, settings.get_num_threads()))
    return out


def by_integers(args: AttentionArgs, backend: str | None) -> AttentionArgs:
    """Round keys and values of a call with ``products="int8"``, where its kernel has such products.

    Keys are multiplied by a Hadamard matrix before, as the kernel multiplies queries: see src/hadamard.inc.h.
    """
    if not args.integers or args.k_scale is not None or not dispatch.plan(args, backend)["int8_products"]:
        return args
    made, lane = copy(args), lane_dtype(args.q.dtype)
    made.hadamard = True
    made.k, made.k_scale = rounded(args.k, lane, args.num_threads, backend, hadamard=True)
    made.v, made.v_scale = rounded(args.v, lane, args.num_threads, backend)
    return made
