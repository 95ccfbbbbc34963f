"""The arguments of attention over sequences that are packed into one array."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._args import key_ranges
from fastattn._args.attention import attention_args, raise_not_int8, raise_shapes, window_sides
from fastattn._args.errors import wrong_shape
from fastattn._args.pages import page_table, read_pages
from fastattn._args.results import result_array
from fastattn._args.types import ARRAYS_OF_HEADS, Array, ArrayLike, AttentionArgs, Ints, lane_dtype, shape_of
from fastattn._args.values import as_array, flag, head_values, require_broadcast, sequence_begins


def varlen_args(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    block_table: ArrayLike | None = None,
    out: Array | None = None,
    return_lse: bool = False,
    **options: Any,
) -> AttentionArgs:
    """Check and normalise the arguments of `fastattn.varlen_attention`."""
    given = {"q": q, "k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}
    arrays = {name: as_array(name, x) for name, x in given.items() if x is not None or name in "qkv"}
    for name, array in arrays.items():
        rows = "tokens" if name == "q" or block_table is None else "pages, page"
        dims = f"({rows}, heads)" if name.endswith("scale") else f"({rows}, heads, head_dim)"
        if array.ndim != dims.count(",") + 1:
            raise wrong_shape(name, array, dims)
    begins_q = sequence_begins("cu_seqlens_q", cu_seqlens_q, "q", len(arrays["q"]))
    tokens_k = len(arrays["k"]) if block_table is None else None
    begins_k = sequence_begins("cu_seqlens_k", cu_seqlens_k, "k", tokens_k)
    if len(begins_q) != len(begins_k):
        came = f"cu_seqlens_q is of {len(begins_q) - 1} sequences and cu_seqlens_k of {len(begins_k) - 1}"
        raise ValueError(f"(): {came}; expected the same number")
    lengths_q, lengths_k = begins_q[1:] - begins_q[:-1], begins_k[1:] - begins_k[:-1]  # faster than np.diff
    _require_shapes(arrays)
    of_heads = [(name, options.pop(name)) for name in ARRAYS_OF_HEADS if name in options]
    causal = flag("causal", causal)
    left, right = window_sides(window)
    by_head: dict[str, Any] = {  # (heads, tokens, head_dim)
        name: x.swapaxes(-2, -1) if name.endswith("scale") else x.swapaxes(-3, -2)
        for name, x in arrays.items()
    }
    table = None
    if block_table is not None:
        shapes = by_head["k"].shape, by_head["v"].shape
        table = page_table(block_table, *shapes, (len(begins_k) - 1,))
        longest, room = lengths_k.max(initial=0), table.shape[-1] * shapes[0][2]
        if longest > room:
            came = f"block_table has room for {room} keys of a sequence"
            raise ValueError(f"(): {came}; expected at least {longest}, the most of cu_seqlens_k")
        # For all queries, until ranges are known.
        by_head["block_table"] = np.zeros(table.shape[-1], np.int64)
    args = attention_args(return_lse=return_lse, scales="k_scale and v_scale", **by_head, **options)
    if args.integers and args.k_scale is None:
        raise_not_int8("k", f"has dtype {args.k.dtype}")

    if out is not None:
        shape = (args.len_q, args.heads_q, args.head_dim_v)
        inputs = [(name, given[name], array) for name, array in arrays.items()]
        args.out = result_array(out, shape, args.q.dtype, "q", inputs).swapaxes(0, 1)
    else:
        out = np.empty((args.len_q, args.heads_q, args.head_dim_v), args.q.dtype)
        args.out = out.swapaxes(0, 1)
    args.result = out if args.lse is None else (out, args.lse)

    n_sequences, copies, lane = len(begins_q) - 1, list(args.copies), lane_dtype(args.q.dtype)
    args.batch_shape, args.begins = (n_sequences,), (begins_q, begins_k)
    offset = lengths_k - lengths_q  # the last query is at the last key
    heads = (n_sequences, args.heads_q)
    for name, x in of_heads:
        if x is not None:
            setattr(args, name, head_values(name, x, heads, lane, copies))
    if args.has_distances:
        args.q_position = offset
    args.copies = tuple(copies)
    if causal or left is not None or right is not None:
        sequence = np.repeat(np.arange(n_sequences), lengths_q)  # of each query
        position = np.arange(args.len_q) + (offset - begins_q[:-1])[sequence]
        ranges = [key_ranges.window(position, left, right)]
        if causal:
            ranges.append(key_ranges.causal(position))
        args.row_begin, args.row_end = key_ranges.intersect(ranges, lengths_k[sequence])
    if table is not None:
        args.block_table, args.len_k = _read_pages(args, table, begins_q, begins_k), int(begins_k[-1])
    return args


def _read_pages(args: AttentionArgs, table: Ints, begins_q: Ints, begins_k: Ints) -> Array:
    """`table`, without pages that no query attends: with a window, keys before the first query's."""
    some = np.diff(begins_q) > 0
    first, last = np.zeros(len(some), np.int64), np.diff(begins_k) * some
    if args.row_begin is not None:
        first[some] = args.row_begin[0, begins_q[:-1][some]]
    if args.row_end is not None:
        last[some] = args.row_end[0, begins_q[1:][some] - 1]
    return read_pages(table, first, last, len(args.k), args.k.shape[-2])


def _require_shapes(arrays: dict[str, Array]) -> None:
    """Raise if shapes do not fit, as the caller has them: the attention below has heads before tokens."""
    q, k, v = (shape_of(arrays[name])[-3:] for name in "qkv")
    (_, heads_q, head_dim), (tokens, heads, k_dim) = q, k
    odd = 0 in (heads_q, heads, head_dim, v[2]) or heads_q % heads
    if odd or (k_dim, *v[:2]) != (head_dim, tokens, heads):
        raise_shapes(("q", "k", "v"), (q, k, v), heads_axis=-2)
    for name in ("k_scale", "v_scale"):
        if name in arrays:
            require_broadcast(name, arrays[name].shape, arrays["k"].shape[:-1], "(tokens_k, heads_kv)")
