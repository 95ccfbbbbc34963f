"""Cut a checked call into pieces and join their results: no piece holds a whole bias, len_q x len_k."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from fastattn._args.types import AXES, Array, AttentionArgs, lane_dtype
from fastattn._args.values import operand
from fastattn._engine import dispatch

if TYPE_CHECKING:
    from fastattn._args.options import ComputeOptions

# The pieces of `attend_by_rows`: this many scores of one head, and at least this many query rows. Only
# lengths decide, so that a row's bits do not depend on the batch.
_PIECE_SCORES, _LEAST_ROWS = 2**18, 32


def run(args: AttentionArgs, options: ComputeOptions) -> Any:
    """Run `args`, on the backend of `options` if there is one, and return the result."""
    dispatch.run(args, options.get("backend"))
    return args.result


def rows_of(args: AttentionArgs, rows: slice) -> AttentionArgs:
    """The call of some query rows; its results are views of the whole one's."""
    part = args.cut(len_q=rows)
    if args.q_position is not None:
        part.q_position = args.q_position + rows.start
    return part


def item_of(args: AttentionArgs, b: tuple[int, ...]) -> AttentionArgs:
    """The call of one batch item."""
    part = copy(args)
    part.batch_shape = ()
    for name, axes in AXES.items():
        x, n = getattr(args, name), len(axes)
        if x is None or x.ndim == n:
            continue
        if name in ("out", "lse"):  # to be written
            setattr(part, name, x[b])
        else:
            setattr(part, name, np.broadcast_to(x, (*args.batch_shape, *x.shape[x.ndim - n :]))[b])
    return part


def attend_by_rows(
    args: AttentionArgs, backend: str | None, bias_of: Callable[[tuple[int, ...], slice], Array]
) -> None:
    """Run the call with a bias that is made for some rows of one batch item at a time, and then dropped.

    bias_of(b, rows) is (heads_q, rows, len_k): of the batch item at index b.
    """
    if not (args.out.size and args.len_k):
        dispatch.run(args, backend)
        return
    for _, _, part in parts_by_rows(args, bias_of):
        dispatch.run(part, backend)


def parts_by_rows(
    args: AttentionArgs, bias_of: Callable[[tuple[int, ...], slice], Array]
) -> Iterator[tuple[tuple[int, ...], slice, AttentionArgs]]:
    """The calls of `attend_by_rows`: which batch item, which rows."""
    n_rows = max(_LEAST_ROWS, _PIECE_SCORES // max(1, args.len_k) // _LEAST_ROWS * _LEAST_ROWS)
    for b in np.ndindex(args.batch_shape):
        item = item_of(args, b)
        for first in range(0, args.len_q, n_rows):
            rows = slice(first, min(first + n_rows, args.len_q))
            part = rows_of(item, rows)
            bias = bias_of(b, rows)
            add_bias(part, bias)
            yield b, rows, part


def add_bias(args: AttentionArgs, computed: Array) -> None:
    """Add a bias that was computed to the one that the caller gave.

    Only the caller's -inf hides a key. A computed -inf is raised to the lowest finite number, and a computed
    NaN at a hidden key is ignored.
    """
    lane = lane_dtype(args.q.dtype)
    bias, least = computed.astype(lane, copy=False), np.finfo(lane).min
    if args.bias is None:
        args.bias = np.maximum(bias, least)
        return
    given = args.bias.astype(lane, copy=False)
    args.bias = np.where(given == -np.inf, given, np.maximum(bias + given, least))


def by_distance(x: Array, n_keys: int) -> Array:
    """View (..., rows, n_keys) of x (..., rows, rows + n_keys - 1): row i without its first rows - 1 - i.

    Columns of x are distances, from the largest (the last query and key 0) down to the smallest (the first
    query and the last key). Nothing is copied.
    """
    *lead, row, column = x.strides
    n_rows = x.shape[-2]
    shape = (*x.shape[:-1], n_keys)
    return as_strided(x[..., n_rows - 1 :], shape, (*lead, row - column, column), writeable=False)


def rows_in(dtype: np.dtype[Any], x: Array) -> Array:
    """`x` as `dtype`, its rows contiguous, as kernels read them.

    What NumPy computes or casts has the memory order of its inputs: that of broadcast ones has strided rows.
    """
    return operand("x", np.asarray(x, dtype), [])


def weighted(share: Array, x: Array) -> Array:
    """``share * x``, and 0 where the share is 0, whatever x is."""
    return np.where(share == 0, 0, share * x)
