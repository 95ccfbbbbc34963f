"""Attention to a cache of arrays, into which new rows are written: checked as a whole before that."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._args.attention import attention_args
from fastattn._args.errors import wrong_dtype, wrong_shape, wrong_type
from fastattn._args.types import FLOAT32, Array, Ints
from fastattn._args.values import WRITEABLE, as_array, flag, float_array, integers, is_ready, number
from fastattn._engine import dispatch
from fastattn.flash_attn._check import raise_shape, require_shapes, same_kind, sides
from fastattn.flash_attn._rotate import rows_of, tables_of, turned

_NAMES = ("q", "k_cache", "v_cache")


def cached(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    cos: Any,
    sin: Any,
    cache_seqlens: Any,
    cache_batch_idx: Any,
    cache_leftpad: Any,
    block_table: Any,
    alibi_slopes: Any,
    softmax_scale: Any,
    causal: Any,
    window: Any,
    softcap: Any,
    interleaved: Any,
    return_lse: Any,
    num_threads: int | None = None,
    compute: bool = True,
) -> tuple[Any, Any]:
    """Out, (batch, len_q, heads_q, head_dim), and lse.

    Without `compute`, check shapes and types alone: values are not those of the call.
    """
    if not (type(q) is type(k_cache) is type(v_cache) is np.ndarray):
        for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
            if k is not None and not isinstance(x, np.ndarray):
                raise wrong_type(name, x, "an ndarray, as k is given: it is written in place")
        q, k_cache, v_cache = same_kind(q, q=q, k_cache=k_cache, v_cache=v_cache)
    require_shapes(_NAMES, q.shape, k_cache.shape, v_cache.shape)
    batch, len_q = q.shape[:2]
    held, page = k_cache.shape[:2]
    parts = _new_rows(k, v, q, k_cache, v_cache)
    table, capacity = _table(block_table, cache_batch_idx, batch, held, page)
    if table is None and held != batch:
        if held < batch:
            raise_shape("k_cache", k_cache.shape, f"at least {batch} sequences, as q has")
        k_cache, v_cache = k_cache[:batch], v_cache[:batch]
    new = parts[0].shape[1] if parts else 0
    lengths = _lengths(cache_seqlens, batch, new, capacity, parts is not None)
    causal = flag("causal", causal)
    if cos is not None or sin is not None:
        if cos is None or sin is None or parts is None:
            missing = "rotary_cos" if cos is None else "rotary_sin" if sin is None else "k"
            raise ValueError(f"(): {missing} is None; expected rotary_cos, rotary_sin, k and v, or no rotary")
        tables = tables_of(cos, sin, q.shape[-1], "rotary_")
        steps = len_q if causal or window is not None else 1
        more = "rotary_cos", "cache_seqlens"
        rows = rows_of(tables, lengths, steps, *more)
        if steps < len_q:
            cos, sin = (np.broadcast_to(x, (*x.shape[:-2], len_q, x.shape[-1])) for x in rows)
            rows = cos, sin
        interleaved = flag("rotary_interleaved", interleaved)
        q = turned("q", q, rows, interleaved)
        parts = turned("k", parts[0], rows_of(tables, lengths, new, *more), interleaved), parts[1]

    total = lengths + new if new else lengths
    keys, values = k_cache.swapaxes(1, 2), v_cache.swapaxes(1, 2)
    causal = causal and len_q > 1  # one query is at the last key
    offset = ranges = None
    if table is None and type(total) is int:
        keys, values, total = keys[:, :, :total], values[:, :, :total], None
    elif total is not None and (causal or window is not None or alibi_slopes is not None):
        offset = total - len_q
    if cache_leftpad is not None:
        first = integers("cache_leftpad", cache_leftpad, low=0)
        if first.shape != (batch,):
            raise wrong_shape("cache_leftpad", first, f"({batch},), one number a sequence")
        ranges = first[:, None, None], capacity
    scale = None if softmax_scale is None else number("softmax_scale", softmax_scale, FLOAT32)
    args = attention_args(
        q.swapaxes(1, 2), keys, values, None, None, causal, sides(window), scale, softcap, alibi_slopes, None,
        total, offset, ranges, None, return_lse, num_threads, names=_NAMES, block_table=table,
    )  # fmt: skip
    if len_q != 1:
        args.out = np.empty((batch, len_q, *args.out.shape[1::2]), args.out.dtype).swapaxes(1, 2)
    lse = args.result[1] if return_lse else None
    if not compute:
        return None, lse
    if parts is not None and new:
        for name, x, made in (("k_cache", keys, args.k), ("v_cache", values, args.v)):
            if x is not made or not x.flags.num & WRITEABLE or (0 in x.strides and _overlaps(x)):
                why = "it is read-only, not contiguous along head_dim, or overlaps itself"
                raise ValueError(f"(): {name} cannot be written in place: {why}")
        place = _places(lengths, new, batch, page, held, table, block_table is None)
        k_cache[place], v_cache[place] = parts
    dispatch.run(args)
    # Of one query, the same memory without an axis whose strides other libraries would not expect.
    return args.out.swapaxes(1, 2) if len_q != 1 else args.out.reshape(batch, 1, *args.out.shape[1::2]), lse


def _overlaps(x: Array) -> bool:
    """Whether rows of `x` are one row, as `broadcast_to` makes them."""
    return any(n > 1 and not stride for n, stride in zip(x.shape, x.strides, strict=True))


def _new_rows(k: Any, v: Any, q: Array, k_cache: Array, v_cache: Array) -> tuple[Array, Array] | None:
    """New keys and values, checked."""
    if k is None and v is None:
        return None
    if k is None or v is None:
        given, missing = ("v", "k") if k is None else ("k", "v")
        raise ValueError(f"(): {given} is given without {missing}; expected both, or neither")
    k, v = (x if is_ready(x, 4) else float_array(name, x) for name, x in (("k", k), ("v", v)))
    expected = len(q), k.shape[1] if k.ndim > 1 else "length"
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if x.shape != expected + cache.shape[2:]:
            raise_shape(name, x.shape, f"{(*expected, *cache.shape[2:])}, as q and {name}_cache have")
    return k, v


def _table(
    block_table: Any, cache_batch_idx: Any, batch: int, held: int, page: int
) -> tuple[Ints | None, int]:
    """The pages of each sequence, if there are some, and the rows of a sequence.

    With `cache_batch_idx`, the rows that it chooses are the pages.
    """
    if block_table is None and cache_batch_idx is None:
        return None, page
    if cache_batch_idx is None:
        table = block_table if type(block_table) is np.ndarray else as_array("block_table", block_table)
        if table.dtype.kind not in "iu":
            raise wrong_dtype("block_table", table, "integers")
        if table.ndim != 2 or len(table) != batch:
            raise wrong_shape("block_table", table, f"({batch}, pages of a sequence)")
        return table, table.shape[1] * page
    if block_table is not None:
        raise ValueError("(): cache_batch_idx and block_table are given; expected one of them")
    chosen = integers("cache_batch_idx", cache_batch_idx, low=0, high=held - 1)
    if chosen.shape != (batch,):
        raise wrong_shape("cache_batch_idx", chosen, f"({batch},), one number a sequence")
    return chosen[:, None], page


def _lengths(cache_seqlens: Any, batch: int, new: int, capacity: int, appends: bool) -> Any:
    """How many rows are filled: None for all, one number for all sequences, or one for each."""
    if cache_seqlens is None:
        if appends:
            raise ValueError("(): cache_seqlens is None; expected where the new keys go, as k is given")
        return None
    lengths = cache_seqlens
    if type(lengths) is int:
        most = least = lengths
    else:
        array = as_array("cache_seqlens", lengths) if type(lengths) is not np.ndarray else lengths
        if array.dtype.kind not in "iu":
            raise wrong_dtype("cache_seqlens", array, "integers")
        if array.shape not in ((), (batch,)):
            raise wrong_shape("cache_seqlens", array, f"({batch},), or one number")
        each = array.reshape(-1).tolist()
        most, least = max(each, default=0), min(each, default=0)
        lengths = most if most == least else array.astype(np.int64)
    if least < 0 or most > capacity - new:
        came = f"cache_seqlens has {least if least < 0 else most}"
        if new and least >= 0:
            came += f" and k {new} new keys"
        raise ValueError(f"(): {came}; expected at least 0, and at most the {capacity} rows of a sequence")
    return lengths


def _places(
    lengths: Any, new: int, batch: int, page: int, held: int, table: Ints | None, by_index: bool
) -> Any:
    """Index of the rows of a cache that are written."""
    if table is None and type(lengths) is int:
        return slice(None), slice(lengths, lengths + new)
    if table is not None and batch == new == 1:  # a decode step: NumPy takes longer for one number
        pages, rows = int(table[0, lengths // page]), lengths % page
        least = most = pages
    else:
        rows, sequence = np.reshape(lengths, (-1, 1)) + np.arange(new), np.arange(batch)[:, None]
        if table is None:
            return sequence, rows
        pages, rows = table[sequence, rows // page].astype(np.int64), rows % page
        least, most = pages.min(initial=0), pages.max(initial=0)
    if least < 0 or most >= held:
        came = f"block_table has {least if least < 0 else most}"
        raise ValueError(f"(): {came}; expected 0 to {held - 1}, the pages of k_cache")
    if type(pages) is int:
        return pages, rows
    places = (pages * page + rows).ravel().tolist()
    if len(set(places)) < len(places):
        twice = next(i for i, place in enumerate(places) if place in places[:i])
        number, row = divmod(places[twice], page)
        what = f"cache_batch_idx has {number}" if by_index else f"block_table has row {row} of page {number}"
        raise ValueError(f"(): {what} for two new keys; expected each row to be written once")
    return pages, rows
