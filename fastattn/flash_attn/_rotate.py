"""Rotary positions of arrays with the heads inside, as (batch, length, heads, head_dim)."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._args.errors import wrong_shape
from fastattn._args.types import Array, RopeArgs, lane_dtype
from fastattn._args.values import flag, float_array, is_ready, of_sequences, operand, sequence_begins
from fastattn._engine import dispatch, settings

Tables = tuple[Array, Array]


def tables_of(cos: Any, sin: Any, head_dim: int, prefix: str = "") -> Tables:
    """Tables of positions, the arguments cos and sin with `prefix`, checked."""
    if not (is_ready(cos, 2) and is_ready(sin, 2)):
        cos, sin = float_array(f"{prefix}cos", cos), float_array(f"{prefix}sin", sin)
    if cos.ndim != 2 or not 2 * cos.shape[1] <= head_dim:
        expected = f"(positions, rotary_dim / 2), at most half of a head_dim of {head_dim}"
        raise wrong_shape(f"{prefix}cos", cos, expected)
    if sin.shape != cos.shape:
        raise wrong_shape(f"{prefix}sin", sin, f"{cos.shape}, as {prefix}cos")
    return cos, sin


def rows_of(tables: Tables, first: Any, count: int, name: str, by: str) -> Tables:
    """Rows of `count` tokens from position `first` on, a number or (batch,), as the argument `by` says."""
    if type(first) is int:
        end, at = first + count, slice(first, first + count)
    else:
        end, at = int(first.max(initial=0)) + count, first[:, None] + np.arange(count)
    if end > len(tables[0]):
        came = f"{name} has {len(tables[0])} positions"
        raise ValueError(f"(): {came}; expected at least {end}, by {by} and the {count} tokens from there on")
    return tables[0][at], tables[1][at]


def turned(name: str, x: Array, rows: Tables, interleaved: bool) -> Array:
    """`x`, the argument `name`, turned by the rows of its tokens: those of all batch items, or of each."""
    source = operand(name, x, [])
    out, lane = np.empty(source.shape, source.dtype), lane_dtype(source.dtype)
    cos, sin = [np.ascontiguousarray(t, lane)[..., None, :, :] for t in rows]
    if out.size:
        by_head = source.swapaxes(-3, -2), out.swapaxes(-3, -2)
        dispatch.run(RopeArgs(*by_head, cos, sin, interleaved, settings.get_num_threads()))
    return out


def rotate_by_offsets(
    x: Any, cos: Any, sin: Any, offsets: Any, cu_seqlens: Any, interleaved: Any, inplace: bool,
    conjugate: bool,
) -> Array:  # fmt: skip
    """The result of `apply_rotary_emb` for arrays, or its gradient, the conjugate."""
    x = float_array("x", x)
    expected = "(batch, length, heads, head_dim)" if cu_seqlens is None else "(tokens, heads, head_dim)"
    if x.ndim != expected.count(",") + 1:
        raise wrong_shape("x", x, expected)
    tables = tables_of(cos, sin, x.shape[-1])
    begins = None if cu_seqlens is None else sequence_begins("cu_seqlens", cu_seqlens, "x", len(x))
    batch = len(x) if begins is None else len(begins) - 1
    first: Any = of_sequences("seqlen_offsets", offsets, (batch,), 0)
    if begins is None:
        first = first if first.ndim else int(first)
        rows = rows_of(tables, first, x.shape[1], "cos", "seqlen_offsets")
    else:
        lengths = np.diff(begins)
        position = np.arange(len(x)) + np.repeat(first - begins[:-1], lengths)
        end = int(position.max(initial=-1)) + 1
        rows_of(tables, 0, end, "cos", "seqlen_offsets")
        rows = tables[0][position], tables[1][position]
    if conjugate:
        rows = rows[0], -rows[1]
    found = turned("x", x, rows, flag("interleaved", interleaved))
    if inplace:
        x[...] = found
    return x if inplace else found
