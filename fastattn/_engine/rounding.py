"""Rows rounded to int8, as caches and integer products of attention have them."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np

from fastattn._args.quiet import quiet
from fastattn._args.types import Array, AttentionArgs, RopeArgs, lane_dtype
from fastattn._args.values import readable
from fastattn._engine import dispatch, settings


def rounded(x: Array, lane: np.dtype[Any], hadamard: int = 0) -> tuple[Array, Array]:
    """`x` (..., heads, tokens, head_dim) in int8, and the scales of its rows in `lane`."""
    x = readable(x, "x", [], "the head dimension")  # lane_dtype knows native types
    if lane_dtype(x.dtype) != lane:
        x = x.astype(lane)
    codes, scale = np.empty(x.shape, np.int8), np.empty(x.shape[:-1], lane)
    _fill(x, codes, lane, hadamard, scale)
    return codes, scale


def _fill(x: Array, out: Array, lane: np.dtype[Any], hadamard: int, scale: Array | None = None) -> None:
    nothing = np.empty((1, 1, 0), lane)  # no positions
    threads = settings.get_num_threads()
    dispatch.run(RopeArgs(x, out, nothing, nothing, False, threads, scale, hadamard))


@quiet  # products with the matrix may overflow
def by_integers(args: AttentionArgs, backend: str | None) -> AttentionArgs:
    """The call, with its keys and values rounded to int8 where its kernel multiplies these, as it is asked to.

    Keys are multiplied by a Hadamard matrix before, and queries by its inverse, which changes no score:
    it spreads dimensions that stand out, as those of language models do.
    """
    if not args.integers or args.k_scale is not None or not dispatch.plan(args, backend)["int8_products"]:
        return args
    made, lane = copy(args), lane_dtype(args.q.dtype)
    made.q = np.empty_like(args.q)
    _fill(args.q, made.q, lane, -1)
    made.k, made.k_scale = rounded(args.k, lane, 1)
    made.v, made.v_scale = rounded(args.v, lane)
    return made
