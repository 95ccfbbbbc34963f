"""The argument object that goes down to the kernels, and what its makers and its readers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastattn._args.statistics import StatisticsArgs

    Array = NDArray[Any]
    Bools = NDArray[np.bool_]
    Ints = NDArray[np.int64]
    Shape = tuple[int, ...]

FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)


@dataclass(slots=True, init=False, eq=False)
class AttentionArgs:
    """One attention call, checked and normalised: all that the compiled layer and its NumPy twin read.

    What is None or 0.0 is an option that is off. Values of the lane dtype are in the accumulator's: float64
    for float64, else float32.
    """

    batch_shape: Shape  # of the result: those of q, k and v broadcast
    heads_q: int
    heads_kv: int
    len_q: int
    len_k: int
    head_dim: int
    head_dim_v: int
    # Native byte order, aligned, last axis contiguous, ndim >= 3; own batch dimensions broadcast to
    # batch_shape.
    q: Array
    k: Array
    v: Array
    out: Array  # (*batch_shape, heads_q, len_q, head_dim_v), q's dtype
    lse: Array | None  # (*batch_shape, heads_q, len_q), lane dtype
    scale: float
    softcap: float
    # These broadcast to (*batch_shape, heads_q, len_q, len_k), with ndim >= 3.
    mask: Bools | None
    bias: Array | None  # float32 or q's dtype
    # These broadcast to (*batch_shape, heads_q), with ndim >= 1, in the lane dtype.
    alibi_slopes: Array | None
    sinks: Array | None
    # Row i attends keys row_begin[i] <= j < row_end[i]; values in [0, len_k]; None is an open side. These
    # broadcast to (*batch_shape, heads_q, len_q), with ndim >= 2.
    row_begin: Ints | None
    row_end: Ints | None
    # And of those, the keys in ranges[range_first[i] : range_last[i]]: pairs (begin, end) in [0, len_k], of a
    # row not empty, sorted, none touching the next. Shapes as above, and (n, 2), C-contiguous.
    ranges: Ints | None
    range_first: Ints | None
    range_last: Ints | None
    q_position: Ints | None  # of query row 0, where ALiBi needs it; broadcasts to batch_shape
    sigmoid_bias: float | None  # sigmoid(score + that) in place of the softmax: no lse, sinks, statistics
    statistics: StatisticsArgs | None
    num_threads: int
    copies: tuple[str, ...]  # what was copied, and why
    result: Any  # what the caller gets: out[, lse][, stats]; without the heads axis where there was none


def plain_args(q: Array, k: Array, v: Array, out: Array, num_threads: int) -> AttentionArgs:
    """Attention without any option, of arrays (batch, heads, length, head_dim) that are known to fit."""
    args = AttentionArgs()
    batch, args.heads_q, args.len_q, args.head_dim = q.shape
    _, args.heads_kv, args.len_k, args.head_dim_v = v.shape
    args.batch_shape = (batch,)
    args.q, args.k, args.v, args.out, args.result = q, k, v, out, out
    args.scale, args.softcap = args.head_dim**-0.5, 0.0
    args.lse = args.mask = args.bias = args.alibi_slopes = args.sinks = None
    args.row_begin = args.row_end = args.q_position = None
    args.ranges = args.range_first = args.range_last = None
    args.sigmoid_bias = args.statistics = None
    args.num_threads, args.copies = num_threads, ()
    return args


def lane_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Type in which results of `dtype` are accumulated."""
    return FLOAT64 if dtype == FLOAT64 else FLOAT32
