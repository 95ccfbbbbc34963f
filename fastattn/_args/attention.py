"""The arguments of attention, checked and normalised to one object.

`values.py` looks at one value at a time, this file at how they fit together: shapes, dtypes, positions. All
of it happens before anything is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from fastattn._args import key_ranges
from fastattn._args.errors import wrong_dtype, wrong_shape, wrong_type
from fastattn._args.pages import page_table, read_pages
from fastattn._args.results import result_array
from fastattn._args.statistics import statistics_args
from fastattn._args.types import (
    FLOAT32,
    FLOAT64,
    Array,
    ArrayLike,
    AttentionArgs,
    Ints,
    Shape,
    dtype_name,
    lane_dtype,
    shape_of,
)
from fastattn._args.values import (
    MAX_POSITION,
    as_array,
    broadcast_batch,
    choice,
    flag,
    float_array,
    head_values,
    int8_operand,
    integer,
    integers,
    is_int4,
    keys_operand,
    number,
    of_sequences,
    operand,
    readable,
    real_values,
    require_broadcast,
    require_dtypes,
    short,
)
from fastattn._engine.settings import require_backend, threads
from fastattn.masks import Mask
from fastattn.masks._mask import ScoreShape

_ROWS = "(..., heads_q, len_q)"


def attention_args(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    mask: ArrayLike | Mask | None = None,
    bias: ArrayLike | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    q_offset: ArrayLike | None = None,
    row_ranges: tuple[ArrayLike, ArrayLike] | None = None,
    out: Array | None = None,
    return_lse: bool = False,
    num_threads: int | None = None,
    backend: str | None = None,
    stats: Sequence[str] | None = None,
    names: tuple[str, str, str] = ("q", "k", "v"),
    scales: str = "",
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    block_table: ArrayLike | None = None,
    products: str | None = None,
    cached: bool = False,
) -> AttentionArgs:
    """Check and normalise the arguments of `attention`, or of what computes with it.

    Messages call q, k and v by `names`: two of them are equal if they are one argument. They say that int8
    goes with the arguments `scales`, where the function takes some; it then takes int4, too, as where keys
    are `cached`.
    On tiny arrays this is most of a call: an option that is not given costs one comparison.
    """
    args = AttentionArgs()
    copies: list[str] = []
    args.q = q_array = operand(names[0], q, copies)
    dtype = q_array.dtype
    lane, in_blocks = lane_dtype(dtype), False
    if k_scale is None and v_scale is None:
        hint = scales and f", or int8 with {scales}"
        keys = keys_operand if scales or cached else operand
        args.k = k_array = keys(names[1], k, copies, hint)
        args.v = v_array = keys(names[2], v, copies, hint)
        if not (k_array.dtype is dtype and v_array.dtype is dtype):
            in_blocks = is_int4(k_array)
            if in_blocks != is_int4(v_array):
                kinds = dtype_name(k_array.dtype), dtype_name(v_array.dtype)
                came = f"{names[1]} has dtype {kinds[0]} and {names[2]} {kinds[1]}"
                raise TypeError(f"(): {came}; expected both in int4, or neither")
            if not in_blocks:
                arrays = dict(zip(names, (q_array, k_array, v_array), strict=True))
                require_dtypes(arrays, scales and f", or int8 for all others with {scales}", (q, k, v))
    else:
        _require_both(k_scale, v_scale)
        args.k = k_array = int8_operand(names[1], "k_scale", k, copies)
        args.v = v_array = int8_operand(names[2], "v_scale", v, copies)
        args.k_scale = real_values("k_scale", k_scale, lane, copies)
        args.v_scale = real_values("v_scale", v_scale, lane, copies)

    q_shape, k_shape, v_shape = shapes = q_array.shape, k_array.shape, v_array.shape
    if in_blocks:
        k_shape, v_shape = shape_of(k_array), shape_of(v_array)
        shapes = q_shape, k_shape, v_shape
    one_head = False
    if len(q_shape) == 2 or len(k_shape) == 2 or len(v_shape) == 2:
        one_head = len(q_shape) == len(k_shape) == len(v_shape)
        args.q, args.k, args.v = (x if x.ndim > 2 else x[None] for x in (q_array, k_array, v_array))
        q_shape, k_shape, v_shape = (x if len(x) > 2 else (1, *x) for x in shapes)
    heads_q, len_q, head_dim = q_shape[-3:]
    heads_kv, len_k, k_head_dim = k_shape[-3:]
    v_heads, v_len, head_dim_v = v_shape[-3:]
    if k_head_dim != head_dim or v_heads != heads_kv or v_len != len_k:
        raise_shapes(names, shapes)
    if not (heads_q and heads_kv and head_dim and head_dim_v) or heads_q % heads_kv:
        raise_shapes(names, shapes)
    batch_shape = q_shape[:-3]
    table = None
    if block_table is not None:
        table = page_table(block_table, k_array.shape, v_array.shape, batch_shape, names[1:])
        len_k *= table.shape[-1]
    elif k_shape[:-3] != batch_shape or v_shape[:-3] != batch_shape:
        batches = (batch_shape, k_shape[:-3], v_shape[:-3])
        batch_shape = broadcast_batch(**dict(zip(names, batches, strict=True)))
    args.batch_shape, args.heads_q, args.heads_kv = batch_shape, heads_q, heads_kv
    args.len_q, args.len_k, args.head_dim, args.head_dim_v = len_q, len_k, head_dim, head_dim_v
    if args.k_scale is not None and args.v_scale is not None:
        args.k_scale = _for_keys(args, "k_scale", args.k_scale, one_head, paged=table is not None)
        args.v_scale = _for_keys(args, "v_scale", args.v_scale, one_head, paged=table is not None)

    args.scale = head_dim**-0.5 if scale is None else number("scale", scale, lane)
    if softcap is not None:
        args.softcap = number("softcap", softcap, lane, positive=True)
    structure = None
    if isinstance(mask, Mask):
        structure, mask = mask, None
    if not (mask is None and bias is None and alibi_slopes is None and sinks is None):
        if mask is not None:
            add_mask(args, "mask", mask)
        if bias is not None:
            add_bias(args, "bias", bias, copies, " (a bool array goes to mask=)")
        if alibi_slopes is not None:
            args.alibi_slopes = head_values(
                "alibi_slopes", alibi_slopes, (*batch_shape, heads_q), lane, copies
            )
        if sinks is not None:
            args.sinks = head_values("sinks", sinks, (*batch_shape, heads_q), lane, copies)
    if type(dropout) is not float or dropout != 0 or seed is not None:
        args.dropout, args.seed = dropout_of(dropout, seed)
    if products is not None:
        choice("products", products, ("int8",))
        if args.dropout:
            raise ValueError(f"(): dropout is {args.dropout}; expected 0 with products")
        if in_blocks:
            raise_not_int8(names[1], "is in int4")
        if table is not None and args.k_scale is None:
            raise_not_int8(names[1], f"has pages of {k_array.dtype}")
        args.integers = True
    ranges_given = not (window is None and kv_lengths is None and q_offset is None and row_ranges is None)
    if causal is not False or ranges_given or alibi_slopes is not None or structure is not None:
        _add_ranges(args, causal, window, kv_lengths, q_offset, row_ranges, structure)
    if table is not None:
        args.block_table = read_pages(table, *_attended(args), len(k_array), k_shape[-2], names[1])
    args.num_threads = threads(num_threads)
    if backend is not None:
        require_backend(backend)
    with_lse = return_lse is not False and flag("return_lse", return_lse)

    rows = (len_q,) if one_head else (*batch_shape, heads_q, len_q)
    if out is None:
        out = np.empty((*rows, head_dim_v), dtype)
    else:
        inputs: list[tuple[str, Any, Any]]
        inputs = [(names[0], q, q_array), (names[1], k, k_array), (names[2], v, v_array)]
        inputs += [("mask", mask, args.mask), ("bias", bias, args.bias), ("sinks", sinks, args.sinks)]
        inputs += [("alibi_slopes", alibi_slopes, args.alibi_slopes)]
        inputs += [("k_scale", k_scale, args.k_scale), ("v_scale", v_scale, args.v_scale)]
        inputs += [("kv_lengths", kv_lengths, None), ("q_offset", q_offset, None)]
        inputs += [("row_ranges", x, None) for x in row_ranges or ()]
        inputs += [("block_table", block_table, None)]
        result_array(out, (*rows, head_dim_v), dtype, names[0], inputs)
    args.out, args.result = out[None] if one_head else out, out
    if with_lse:
        lse = np.empty(rows, lane)
        args.lse, args.result = lse[None] if one_head else lse, (out, lse)
    if stats is not None:
        heads = (*batch_shape, heads_q)
        args.statistics, found = statistics_args(stats, heads, len_q, len_k, lane, one_head)
        args.result = (*args.result, found) if with_lse else (out, found)
    args.copies = tuple(copies)
    return args


def raise_not_int8(name: str, came: str) -> NoReturn:
    """Refuse floats where products of int8 round none."""
    raise ValueError(f"(): {name} {came}; expected int8, with k_scale and v_scale, for products")


def dropout_of(dropout: Any, seed: Any, name: str = "dropout") -> tuple[float, int]:
    """The share that is dropped, the argument `name`, and the seed: 0 where none is needed or given."""
    share = number(name, dropout, FLOAT64)
    if not 0 <= share < 1:
        raise ValueError(f"(): {name} is {share}; expected at least 0 and less than 1")
    if seed is None and share > 0:
        expected = f"0 to {2**64 - 1}, as {name} is {share}"
        raise ValueError(f"(): seed is None; expected an integer, {expected}")
    return share, 0 if seed is None else integer("seed", seed, 0, 2**64 - 1)


def raise_shapes(
    names: tuple[str, str, str], shapes: tuple[Shape, Shape, Shape], heads_axis: int = -3
) -> NoReturn:
    """Say which of the last three axes do not fit: (heads, length, head_dim), or the first two exchanged."""
    length_axis = -5 - heads_axis
    q, k, v = named = tuple(zip(names, shapes, strict=True))

    def size(shape: Shape, axis: int) -> int:
        return shape[axis] if len(shape) > 2 or axis != heads_axis else 1  # (length, head_dim) has one head

    def has(shape: Shape, axis: int) -> str:
        n = size(shape, axis)
        heads = f"{n} head{'s' * (n != 1)}"
        return heads if axis == heads_axis else f"a {'length' if axis == length_axis else 'head_dim'} of {n}"

    for name, shape in named:
        for axis in (heads_axis, -1):
            if size(shape, axis) < 1:
                raise ValueError(f"(): {name} has {has(shape, axis)}, shape {shape}; expected at least 1")
    hint = layout_hint(*shapes) if heads_axis == -3 else ""
    for (name, shape), axis, (other, wanted) in ((k, -1, q), (v, heads_axis, k), (v, length_axis, k)):
        if size(shape, axis) != size(wanted, axis):
            expected = f"{has(wanted, axis)}, as {other} has, shape {wanted}{hint}"
            raise ValueError(f"(): {name} has {has(shape, axis)}, shape {shape}; expected {expected}")
    (name, shape), (other, wanted) = q, k
    expected = f"a multiple of {other}'s {has(wanted, heads_axis)}, shape {wanted}{hint}"
    raise ValueError(f"(): {name} has {has(shape, heads_axis)}, shape {shape}; expected {expected}")


def layout_hint(*shapes: Shape) -> str:
    """Hint of a message to one whose q, k and v would fit as (..., length, heads, head_dim)."""
    if min(map(len, shapes)) < 3:
        return ""
    (_, heads_q, dim), (len_k, heads_k, k_dim), (len_v, heads_v, _) = (shape[-3:] for shape in shapes)
    heads = heads_q, heads_k, heads_v
    if 0 in heads or any(max(heads) % n for n in heads) or (len_k, dim) != (len_v, k_dim):
        return ""
    turned = "x.transpose(0, 2, 1, 3)" if set(map(len, shapes)) == {4} else "x.swapaxes(-3, -2)"
    return f" (of arrays (..., length, heads, head_dim): {turned})"


def _require_both(k_scale: Any, v_scale: Any) -> None:
    if k_scale is None or v_scale is None:
        given, missing = ("v_scale", "k_scale") if k_scale is None else ("k_scale", "v_scale")
        raise ValueError(f"(): {given} is given without {missing}; expected both, or neither")


def _for_keys(args: AttentionArgs, name: str, scale: Array, one_head: bool, paged: bool) -> Array:
    """`scale`, which has to broadcast to the keys, with at least their axes (heads_kv, len_k)."""
    if paged:
        require_broadcast(name, scale.shape, args.k.shape[:-1], "(pages, heads_kv, page)")
        return np.broadcast_to(scale, args.k.shape[:-1])
    shape = (args.len_k,) if one_head else (*args.batch_shape, args.heads_kv, args.len_k)
    require_broadcast(name, scale.shape, shape, "(..., heads_kv, len_k)")
    return scale if scale.ndim >= 2 else scale[(None,) * (2 - scale.ndim)]


def add_mask(args: AttentionArgs, name: str, mask: ArrayLike) -> None:
    """Check `mask`, the argument `name`, and add it to `args`."""
    if isinstance(mask, type):
        expected = "a bool array or a mask, such as masks.causal()"
        raise TypeError(f"(): {name} is {mask.__name__}, not called; expected {expected}")
    if callable(mask):
        expected = "a bool array or a mask, as masks.compile(f, shape) makes of f(b, h, i, j)"
        raise TypeError(f"(): {name} is a function; expected {expected}")
    array = as_array(name, mask)
    if array.dtype != np.bool_:
        hint = "numbers to add to the scores go to bias="
        if array.dtype.kind in "iu":  # as Hugging Face's attention_mask
            hint = f"{name} != 0, where 1 attends"
        raise wrong_dtype(name, array, f"bool, True where a query attends ({hint})")
    args.mask = _for_scores(args, name, array)


def add_bias(args: AttentionArgs, name: str, bias: ArrayLike, copies: list[str], or_bool: str) -> None:
    """Likewise `bias`; the message to one who passes bools or integers ends with `or_bool`."""
    array = as_array(name, bias)
    native = array.dtype.newbyteorder("=") if array.dtype.kind == "f" else array.dtype
    if native not in (FLOAT32, args.q.dtype):
        expected = " or ".join(dict.fromkeys((str(FLOAT32), str(args.q.dtype))))
        hint = or_bool if array.dtype.kind in "biu" else ""
        raise wrong_dtype(name, array, expected + hint)
    args.bias = readable(_for_scores(args, name, array), name, copies)


def _for_scores(args: AttentionArgs, name: str, array: Array) -> Array:
    """`array`, which has to broadcast to the scores, with at least their last three axes."""
    batch_shape, len_q, len_k = args.batch_shape, args.len_q, args.len_k
    hint, batch_axes = "", ":, " * len(batch_shape)
    if array.shape == (*batch_shape, len_k):
        hint = f" (one row of keys a sequence: {name}[{batch_axes}None, None, :])"
    elif array.shape == (*batch_shape, len_q, len_k):
        hint = f" (the same for all heads: {name}[{batch_axes}None, :, :])"
    shape = (*batch_shape, args.heads_q, len_q, len_k)
    require_broadcast(name, array.shape, shape, "(..., heads_q, len_q, len_k)", hint)
    return array if array.ndim >= 3 else array[(None,) * (3 - array.ndim)]


def _add_ranges(
    args: AttentionArgs,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    kv_lengths: ArrayLike | None,
    q_offset: ArrayLike | None,
    row_ranges: tuple[ArrayLike, ArrayLike] | None,
    structure: Mask | None,
) -> None:
    """Check what selects keys by their place, and make ranges of it; O(rows), or of a mask, O(its ranges)."""
    len_q, len_k, batch_shape = args.len_q, args.len_k, args.batch_shape
    causal = flag("causal", causal)
    left, right = window_sides(window)
    windowed = left is not None or right is not None
    ranges: list[key_ranges.Range] = []

    distances = args.has_distances
    positional = causal or windowed or distances or structure is not None
    length, offset = lengths_of(kv_lengths, q_offset, batch_shape, len_q, len_k, positional)
    if kv_lengths is not None:
        ranges.append(key_ranges.lengths(length))
    if causal or windowed:
        position = key_ranges.positions(offset, len_q)
        if causal:
            ranges.append(key_ranges.causal(position))
        if windowed:
            ranges.append(key_ranges.window(position, left, right))
    if row_ranges is not None:
        ranges.append(_both_ends(row_ranges, (*batch_shape, args.heads_q, len_q)))
    if structure is not None:
        shape = ScoreShape(batch_shape, args.heads_q, len_q, len_k, offset)
        begin, end, lists = structure.resolve(shape)
        ranges.append((begin, end))
        if lists is not None:
            args.ranges, args.range_first, args.range_last = lists.ranges, lists.first, lists.last
    args.row_begin, args.row_end = key_ranges.intersect(ranges, len_k)
    if distances:
        args.q_position = offset


def _attended(args: AttentionArgs) -> tuple[Ints | None, Ints]:
    """The first key of each sequence that some row attends by the ranges, or None, and the end of these."""
    begin, end = key_ranges.closed(args.row_begin, args.row_end, args.len_k)
    if args.row_begin is None:
        return None, end.max(axis=(-2, -1), initial=0)
    some = begin < end
    first = np.where(some, begin, args.len_k).min(axis=(-2, -1), initial=args.len_k)
    return first, np.where(some, end, 0).max(axis=(-2, -1), initial=0)


def lengths_of(
    kv_lengths: Any, q_offset: Any, batch_shape: Shape, len_q: int, len_k: int, positional: bool
) -> tuple[Ints, Ints]:
    """How many keys count, and the position of the first query: one for all sequences, or one for each."""
    length = np.array(len_k)
    if kv_lengths is not None:
        length = of_sequences("kv_lengths", kv_lengths, batch_shape, 0, len_k)
    if q_offset is not None:
        return length, of_sequences("q_offset", q_offset, batch_shape, -MAX_POSITION, MAX_POSITION)
    offset = np.asarray(length - len_q)
    if kv_lengths is not None and positional and (offset < 0).any():
        raise ValueError(
            f"(): kv_lengths has {length.min()} for {len_q} queries, and without q_offset the last"
            f" query is at the last key, the first at {offset.min()}; expected q_offset=0 (padded"
            f" self-attention: query i is at key i) or another q_offset"
        )
    return length, offset


def window_sides(window: Any) -> tuple[int | None, int | None]:
    """The sides of the argument `window`."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        if isinstance(window, np.ndarray) and window.shape == (2,):
            return window_sides(window.tolist())
        expected = "a pair (left, right) of integers or None"
        if type(window) is int and window > 0:  # Hugging Face's sliding_window, which counts the query's key
            expected += f", as ({window - 1}, 0) for the last {window} keys"
        raise TypeError(f"(): window is {short(window)}; expected {expected}")
    try:
        left, right = (None if n is None else integer(f"window[{i}]", n, 0) for i, n in enumerate(window))
    except ValueError as error:
        also = ", where flash-attn has -1" if "is -1;" in str(error) else ""
        raise ValueError(f"{error}, or None for no bound{also}") from None
    return left, right


def _both_ends(row_ranges: Any, shape: Shape) -> key_ranges.Range:
    if not isinstance(row_ranges, (tuple, list)):
        raise wrong_type("row_ranges", row_ranges, "(begin, end)")
    if len(row_ranges) != 2:
        raise TypeError(f"(): row_ranges has length {len(row_ranges)}; expected 2, (begin, end)")
    begin, end = (integers(f"row_ranges[{i}]", x, shape, _ROWS) for i, x in enumerate(row_ranges))
    return begin, end


def partial_states(outs: Any, lses: Any) -> tuple[list[Array], list[Array], Array, Array]:
    """Partial results and their lses, all of one shape and dtype, and where the merged ones go."""
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, (tuple, list)) and not (isinstance(parts, np.ndarray) and parts.ndim):
            raise wrong_type(name, parts, "a list of arrays")
    if len(outs) != len(lses) or len(outs) == 0:
        came = f"outs has length {len(outs)} and lses {len(lses)}"
        raise ValueError(f"(): {came}; expected the same, and at least 1")
    copies: list[str] = []
    out_parts = [operand(f"outs[{i}]", x, copies) for i, x in enumerate(outs)]
    dtype, shape = out_parts[0].dtype, out_parts[0].shape
    lane = lane_dtype(dtype)
    lse_parts = [float_array(f"lses[{i}]", x).astype(lane) for i, x in enumerate(lses)]
    for i, (out, lse) in enumerate(zip(out_parts, lse_parts, strict=True)):
        if out.dtype != dtype:
            raise wrong_dtype(f"outs[{i}]", out, f"{dtype}, as outs[0] has")
        if out.shape != shape:
            raise wrong_shape(f"outs[{i}]", out, f"{shape}, as outs[0] has")
        if lse.shape != shape[:-1]:
            raise wrong_shape(f"lses[{i}]", lse, f"{shape[:-1]}, one a row")
    return out_parts, lse_parts, np.empty(shape, dtype), np.empty(shape[:-1], lane)
