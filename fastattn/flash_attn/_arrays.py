"""The functions for arrays: attention, and attention to a cache that is written, after all checks."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._args.attention import attention_args
from fastattn._args.errors import wrong_shape, wrong_type
from fastattn._args.results import overlaps_itself, require_apart
from fastattn._args.types import Array
from fastattn._args.values import CONTIGUOUS, WRITEABLE, flag, float_array, integer_array, integers, is_ready
from fastattn._engine import dispatch
from fastattn.flash_attn._check import require_shapes, same_kind, scale_of, sides
from fastattn.flash_attn._rotate import rows_of, tables_of, turned
from fastattn.functional._attention import attention
from fastattn.functional._varlen import varlen_attention


def attend(
    arrays: tuple[Any, ...], more: dict[str, Any], options: dict[str, Any], return_lse: bool,
    num_threads: int | None = None, seed: int | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Out and lse of q, k and v, with the heads inside; `more` has other arrays, by name."""
    options = {**more, **options, "window": sides(options["window"]), "return_lse": return_lse}
    if "dropout" in options:
        # flash-attn takes no seed: it draws from the generator of the whole process.
        options["seed"] = int(np.random.randint(2**63 - 1, dtype=np.int64)) if seed is None else seed  # noqa: NPY002
    if "cu_seqlens_q" in more:
        found: Any = varlen_attention(*arrays, **options, num_threads=num_threads)
        return found if return_lse else (found, None)
    found = attention(*[x.swapaxes(1, 2) for x in arrays], **options, num_threads=num_threads)
    out, lse = found if return_lse else (found, None)
    return out.swapaxes(1, 2), lse


def cached(
    q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, rotary_cos: Any = None,
    rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None,
    block_table: Any = None, alibi_slopes: Any = None, *, softmax_scale: float | None = None,
    causal: bool = False, window: tuple[int, int] | None = None, softcap: Any = None,
    rotary_interleaved: bool = True, return_lse: bool = False, num_threads: int | None = None,
    compute: bool = True,
) -> tuple[Any, Any]:  # fmt: skip
    """Out and lse of `flash_attn_with_kvcache`: its tensors, and its options as `attention` takes them.

    Without `compute`, check shapes and types alone: values are not those of the call.
    """
    if not (type(q) is type(k_cache) is type(v_cache) is np.ndarray):
        for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
            if k is not None and not isinstance(x, np.ndarray):
                raise wrong_type(name, x, "an ndarray, as k is given: it is written in place")
        q, k_cache, v_cache = same_kind(q, q=q, k_cache=k_cache, v_cache=v_cache)
    names = "q", "k_cache", "v_cache"
    require_shapes(names, q, k_cache, v_cache)
    (batch, len_q), (held, page) = q.shape[:2], k_cache.shape[:2]
    parts = _new_rows(k, v, q, k_cache, v_cache)
    new = parts[0].shape[1] if parts else 0
    table, capacity = _table(block_table, cache_batch_idx, batch, held, page)
    if table is None and held != batch:
        if held < batch:
            raise wrong_shape("k_cache", k_cache, f"at least {batch} sequences, as q has")
        k_cache, v_cache = k_cache[:batch], v_cache[:batch]
    lengths = _lengths(cache_seqlens, batch, new, capacity, parts is not None)
    causal, interleaved = flag("causal", causal), flag("rotary_interleaved", rotary_interleaved)
    if rotary_cos is not None or rotary_sin is not None:
        if rotary_cos is None or rotary_sin is None or parts is None:
            missing = "rotary_cos" if rotary_cos is None else "rotary_sin" if rotary_sin is None else "k"
            raise ValueError(f"(): {missing} is None; expected rotary_cos, rotary_sin, k and v, or no rotary")
        tables = tables_of(rotary_cos, rotary_sin, q.shape[-1], "rotary_")
        by = "rotary_cos", "cache_seqlens"
        steps = len_q if causal or window is not None else 1
        rows = rows_of(tables, lengths, steps, *by)
        if steps < len_q:
            cos, sin = (np.broadcast_to(x, (*x.shape[:-2], len_q, x.shape[-1])) for x in rows)
            rows = cos, sin
        q = turned("q", q, rows, interleaved)
        parts = turned("k", parts[0], rows_of(tables, lengths, new, *by), interleaved), parts[1]

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
    args = attention_args(
        q.swapaxes(1, 2), keys, values, None, None, causal, sides(window), scale_of(softmax_scale),
        softcap, alibi_slopes, None, total, offset, ranges, None, return_lse, num_threads, names=names,
        block_table=table,
    )  # fmt: skip
    # Of one query, the same memory without an axis whose strides other libraries would not expect.
    shape = batch, len_q, *args.out.shape[1::2]
    out = args.out.reshape(shape) if len_q == 1 else np.empty(shape, args.out.dtype)
    args.out = out.swapaxes(1, 2)
    if not compute:
        return out, None
    if parts is not None and new:
        _require_writable("k_cache", k_cache, args.k is keys)
        _require_writable("v_cache", v_cache, args.v is values)
        require_apart([("k_cache", k_cache), ("v_cache", v_cache)])
        place = _places(lengths, new, batch, page, held, table, block_table is None)
        args.q = _apart(args.q, k_cache, v_cache)
        k_cache[place], v_cache[place] = [_apart(x, k_cache, v_cache) for x in parts]
    dispatch.run(args)
    return out, args.result[1] if return_lse else None


def _apart(x: Array, *caches: Array) -> Array:
    """`x`, or a copy of it if it may be a view of what is written."""
    return x.copy() if x.base is not None and any(np.may_share_memory(x, c) for c in caches) else x


def _require_writable(name: str, cache: Array, is_read: bool) -> None:
    """Raise unless the kernel reads `cache` itself, and writing a row of it writes no other."""
    flags = cache.flags.num
    apart = flags & CONTIGUOUS or not overlaps_itself(cache.shape, cache.strides, cache.itemsize)
    if apart and is_read and flags & WRITEABLE:
        return
    why = "it is read-only, not contiguous along head_dim, or overlaps itself"
    raise ValueError(f"(): {name} cannot be written in place: {why}")


def _new_rows(k: Any, v: Any, q: Array, k_cache: Array, v_cache: Array) -> tuple[Array, Array] | None:
    """New keys and values, checked."""
    if k is None and v is None:
        return None
    if k is None or v is None:
        given, missing = ("v", "k") if k is None else ("k", "v")
        raise ValueError(f"(): {given} is given without {missing}; expected both, or neither")
    if not (is_ready(k, 4) and is_ready(v, 4)):
        k, v = float_array("k", k), float_array("v", v)
    rows = len(q), k.shape[1] if k.ndim > 1 else "length"
    if k.shape != rows + k_cache.shape[2:]:
        raise wrong_shape("k", k, f"{(*rows, *k_cache.shape[2:])}, as q and k_cache have")
    if v.shape != rows + v_cache.shape[2:]:
        raise wrong_shape("v", v, f"{(*rows, *v_cache.shape[2:])}, as k and v_cache have")
    return k, v


def _table(block_table: Any, chosen: Any, batch: int, held: int, page: int) -> tuple[Array | None, int]:
    """The pages of each sequence, or None, and its rows. Sequences that cache_batch_idx chose are pages."""
    if block_table is not None and chosen is not None:
        raise ValueError("(): cache_batch_idx and block_table are given; expected one of them")
    if block_table is not None:
        table = integer_array("block_table", block_table)
        if table.ndim != 2 or len(table) != batch:
            raise wrong_shape("block_table", table, f"({batch}, pages of a sequence)")
        return table, table.shape[1] * page
    if chosen is None:
        return None, page
    chosen = integers("cache_batch_idx", chosen, low=0, high=held - 1)
    if chosen.shape != (batch,):
        raise wrong_shape("cache_batch_idx", chosen, f"({batch},), one number a sequence")
    return chosen[:, None], page


def _lengths(cache_seqlens: Any, batch: int, new: int, capacity: int, appends: bool) -> Any:
    """How many rows are filled: None for all, one number for all sequences, or one for each."""
    if cache_seqlens is None:
        if appends:
            raise ValueError("(): cache_seqlens is None; expected where the new keys go, as k is given")
        return None
    lengths = least = most = cache_seqlens
    if type(lengths) is not int:
        array = integer_array("cache_seqlens", lengths)
        if array.shape not in ((), (batch,)):
            raise wrong_shape("cache_seqlens", array, f"({batch},), or one number")
        each = array.reshape(-1).tolist()
        least, most = min(each, default=0), max(each, default=0)
        lengths = most if most == least else array.astype(np.int64)
    if least < 0 or most > capacity - new:
        came = f"cache_seqlens has {least if least < 0 else most}"
        came += f" and k {new} new keys" if new else ""
        raise ValueError(f"(): {came}; expected at least 0, and at most the {capacity} rows of a sequence")
    return lengths


def _places(
    lengths: Any, new: int, batch: int, page: int, held: int, table: Array | None, chosen: bool
) -> tuple[Any, Any]:
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
    places = [] if type(pages) is int else (pages * page + rows).ravel().tolist()
    if len(set(places)) < len(places):
        number, row = divmod(next(place for i, place in enumerate(places) if place in places[:i]), page)
        what = f"cache_batch_idx has {number}" if chosen else f"block_table has row {row} of page {number}"
        raise ValueError(f"(): {what} for two new keys; expected each row to be written once")
    return pages, rows
