"""Relative positions whose scores depend on the query's or the key's content, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from fastattn._args.options import RelativeOptions, ShawOptions
from fastattn._args.types import lane_dtype
from fastattn._args.values import float_array, integer
from fastattn._args.variants import relative_args, with_shape
from fastattn.functional._pieces import (
    add_bias,
    apart,
    attend_by_rows,
    band_of,
    by_distance,
    has_keys,
    join,
    keys_of,
    narrowed,
    rows_of,
    run,
    sum_in,
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.types import Array, AttentionArgs, Ints

# Query rows whose near keys `shaw_attention` takes at a time.
_NEAR_ROWS = 128


@overload
def shaw_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    key_table: ArrayLike,
    value_table: ArrayLike | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[ShawOptions],
) -> Array: ...
@overload
def shaw_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    key_table: ArrayLike,
    value_table: ArrayLike | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[ShawOptions],
) -> tuple[Array, Array]: ...
def shaw_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    key_table: ArrayLike,
    value_table: ArrayLike | None = None,
    *,
    return_lse: bool = False,
    **options: Unpack[ShawOptions],
) -> Any:
    """Attention with Shaw's relative positions: to ``k_j + a_r``, of ``v_j + b_r``, r the clipped ``j - i``.

    Parameters
    ----------
    q, k, v, return_lse
        As in `attention`, like the results and errors.
    key_table : array_like, (2 * clip + 1, head_dim)
        a: of the distances -clip to clip of a key from the query, in this order; clip is at least 1.
    value_table : array_like, (2 * clip + 1, head_dim_v), optional
        b; 0 if left out.
    **options
        Keyword arguments of `attention`, but softcap, alibi_slopes and stats, with one q_offset for all.

    Notes
    -----
    Keys at a distance of clip and more have one row of the tables on either side: they are attended with that
    added to them, and what is between with a bias, of 128 queries at a time; three results that are joined by
    their lse. Beside `attention`'s cost O(len_q * (128 + clip) * head_dim) a head in NumPy, a copy of k and v
    for either side, and no array of len_q x len_k. Source: P. Shaw, J. Uszkoreit, A. Vaswani, "Self-Attention
    with Relative Position Representations", 2018, arXiv:1803.02155.
    """
    func = "shaw_attention"
    args, lane, offset = relative_args(func, q, k, v, options, ShawOptions, return_lse)
    n = len(float_array(func, "key_table", key_table, least_dims=1))
    if n < 3 or n % 2 == 0:
        raise ValueError(f"{func}(): key_table has {n} rows; expected an odd number, 3 or more")
    of_keys = with_shape(func, "key_table", key_table, (n, args.head_dim), "(2 clip + 1, head_dim)", 2, lane)
    of_values = None
    if value_table is not None:
        shape = (n, args.head_dim_v)
        of_values = with_shape(func, "value_table", value_table, shape, "(2 clip + 1, head_dim_v)", 2, lane)
    clip = n // 2
    position = offset + np.arange(args.len_q)[None]

    near = narrowed(args, position - clip + 1, position + clip)
    _attend_near(near, offset, of_keys[1:-1], None if of_values is None else of_values[1:-1], options)
    parts = [near]
    for row, begin, end in ((0, None, position - clip + 1), (-1, position + clip, None)):
        part = narrowed(args, begin, end)
        if has_keys(part):
            part.sinks = None  # of the parts, the near one carries them
            part.k = sum_in(args.k.dtype, args.k, of_keys[row])
            part.v = args.v if of_values is None else sum_in(args.v.dtype, args.v, of_values[row])
            run(part, options)
            parts.append(part)
    join(parts, args)
    return args.result


def _attend_near(
    near: AttentionArgs, offset: int, of_keys: Array, of_values: Array | None, options: ShawOptions
) -> None:
    """Attend to keys at the distances of the tables' rows: as many to either side."""
    n, lane = len(of_keys), lane_dtype(near.q.dtype)
    for first in range(0, near.len_q, _NEAR_ROWS):
        rows = slice(first, min(first + _NEAR_ROWS, near.len_q))
        n_rows = rows.stop - rows.start
        start = offset + first - n // 2  # the key of column 0
        keys = slice(*np.clip((start, start + n_rows + n - 1), 0, near.len_k).tolist())
        inside = slice(keys.start - start, keys.stop - start)
        part = keys_of(rows_of(near, rows), keys)
        # Column t of a row's band is the key at distance t - n // 2; what is not in the band, no row attends.
        columns = np.zeros((*part.q.shape[:-1], n_rows + n - 1), lane)
        band_of(columns, n)[...] = part.q.astype(lane) * lane.type(part.scale) @ of_keys.T
        add_bias(part, columns[..., inside])
        run(part, options)
        if of_values is not None:
            # With the identity matrix for values, the results are the probabilities of the near keys.
            weights = apart(part)
            width = part.len_k
            weights.v = np.broadcast_to(np.eye(width, dtype=part.v.dtype), (part.heads_kv, width, width))
            weights.head_dim_v, weights.out = width, np.empty((*part.out.shape[:-1], width), part.out.dtype)
            run(weights, options)
            probs = np.zeros((*part.out.shape[:-1], n_rows + n - 1), lane)
            probs[..., inside] = weights.out
            part.out += (band_of(probs, n) @ of_values).astype(part.out.dtype)


@overload
def transformer_xl_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    relative_keys: ArrayLike,
    content_bias: ArrayLike | None = None,
    position_bias: ArrayLike | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[RelativeOptions],
) -> Array: ...
@overload
def transformer_xl_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    relative_keys: ArrayLike,
    content_bias: ArrayLike | None = None,
    position_bias: ArrayLike | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[RelativeOptions],
) -> tuple[Array, Array]: ...
def transformer_xl_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    relative_keys: ArrayLike,
    content_bias: ArrayLike | None = None,
    position_bias: ArrayLike | None = None,
    *,
    return_lse: bool = False,
    **options: Unpack[RelativeOptions],
) -> Any:
    """Transformer-XL's attention: scores ``scale * ((q_i + u) . k_j + (q_i + w) . r_d)``, ``d = i - j``.

    Parameters
    ----------
    q, k, v, return_lse
        As in `attention`, like the results and errors; k and v begin with the memory of the segment before.
    relative_keys : array_like, (n, head_dim) or (..., heads_q, n, head_dim)
        r: projected vectors, one for each distance, in falling order from ``q_offset + len_q - 1``, that of
        the last query and the first key: ``len_q + len_k - 1`` of them. With causal those down to distance 0
        are enough, by default len_k of them, as in the paper.
    content_bias, position_bias : array_like, (heads_q, head_dim), optional
        u and w (the paper's v); 0 if left out.
    **options
        Keyword arguments of `attention`, but softcap and stats, with one q_offset for all.

    Notes
    -----
    The relative shift is a view with another stride, and the term of positions is made for a run of queries
    at a time, about 2**18 scores a head. Time is that of a dense bias and of ``q @ relative_keys.T`` in
    NumPy, O(len_q * (len_q + len_k) * head_dim) a head. Source: Z. Dai et al., "Transformer-XL: Attentive
    Language Models beyond a Fixed-Length Context", 2019, arXiv:1901.02860.
    """
    func = "transformer_xl_attention"
    args, lane, offset = relative_args(func, q, k, v, options, RelativeOptions, return_lse)
    n = float_array(func, "relative_keys", relative_keys, least_dims=2).shape[-2]
    shape = (*args.batch_shape, args.heads_q, n, args.head_dim)
    relative = with_shape(func, "relative_keys", relative_keys, shape, "(..., heads_q, n, head_dim)", 2, lane)
    needed = args.len_q + args.len_k - 1
    if options.get("causal"):  # distances below 0 are of no key that is attended
        needed = min(needed, args.len_q + offset)
    if n < needed and args.len_q and args.len_k:
        raise ValueError(f"{func}(): relative_keys has {n} rows; expected {needed}, one a distance")
    none = np.zeros((args.heads_q, args.head_dim), lane)
    u, w = (
        with_shape(func, name, none if x is None else x, none.shape, "(heads_q, head_dim)", 2, lane)[:, None]
        for name, x in (("content_bias", content_bias), ("position_bias", position_bias))
    )
    relative = np.broadcast_to(relative, shape)
    queries = np.broadcast_to(args.q, (*args.batch_shape, *args.q.shape[-3:]))
    args.q = sum_in(args.q.dtype, args.q, u)

    def bias_of(b: tuple[int, ...], rows: slice) -> Array:
        n_rows = rows.stop - rows.start
        columns = np.zeros((args.heads_q, n_rows, n_rows + args.len_k - 1), lane)
        first = args.len_q - rows.stop  # the table's row for column 0
        table = relative[b][:, first : first + columns.shape[-1]]
        shifted = (queries[b][:, rows].astype(lane) + w) * lane.type(args.scale)
        np.matmul(shifted, table.swapaxes(-1, -2), out=columns[..., : table.shape[-2]])
        return by_distance(columns, args.len_k)

    attend_by_rows(args, options.get("backend"), bias_of)
    return args.result


@overload
def disentangled_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    position_keys: ArrayLike | None = None,
    position_queries: ArrayLike | None = None,
    *,
    max_distance: int | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[RelativeOptions],
) -> Array: ...
@overload
def disentangled_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    position_keys: ArrayLike | None = None,
    position_queries: ArrayLike | None = None,
    *,
    max_distance: int | None = None,
    return_lse: Literal[True],
    **options: Unpack[RelativeOptions],
) -> tuple[Array, Array]: ...
def disentangled_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    position_keys: ArrayLike | None = None,
    position_queries: ArrayLike | None = None,
    *,
    max_distance: int | None = None,
    return_lse: bool = False,
    **options: Unpack[RelativeOptions],
) -> Any:
    """DeBERTa's attention: scores ``scale * (q_i . k_j + q_i . kr_b + k_j . qr_b)``, b of i - j.

    Parameters
    ----------
    q, k, v, return_lse
        As in `attention`, like the results and errors.
    position_keys, position_queries : array_like, (heads_q, 2 * span, head_dim)
        kr (content to position) and qr (position to content): the projected embeddings of relative
        positions, by their bucket b. At least one of both.
    max_distance : int, optional
        With it distances beyond ``span // 2`` share buckets, logarithmically up to this one, as in version 2
        (``max_relative_positions``, where span is ``position_buckets``). Without, distance d is in bucket
        ``clip(d + span, 0, 2 * span - 1)``.
    **options
        Keyword arguments of `attention`, but softcap and stats, with one q_offset for all.
        Scale is by default ``1 / sqrt(head_dim * terms)``, of 2 or 3 terms.

    Notes
    -----
    Both terms depend on content and position: they are gathered into a bias for a run of queries at a time,
    about 2**18 scores a head. Time is that of a dense bias, of two gathers of len_q * len_k numbers a head,
    and of the products with the tables. Source: P. He et al., "DeBERTa: Decoding-enhanced BERT with
    Disentangled Attention", 2020, arXiv:2006.03654.
    """
    func = "disentangled_attention"
    args, lane, offset = relative_args(func, q, k, v, options, RelativeOptions, return_lse)
    tables = {"position_keys": position_keys, "position_queries": position_queries}
    given = {name: float_array(func, name, x, 2) for name, x in tables.items() if x is not None}
    if not given:
        raise ValueError(f"{func}(): position_keys and position_queries are None; expected at least one")
    name, n = next((name, x.shape[-2]) for name, x in given.items())
    if n < 2 or n % 2:
        raise ValueError(f"{func}(): {name} has {n} rows; expected 2 * span, 2 or more")
    shape, dims = (args.heads_q, n, args.head_dim), "(heads_q, 2 span, head_dim)"
    found = {name: with_shape(func, name, x, shape, dims, 3, lane) for name, x in given.items()}
    if max_distance is not None:
        if n < 4:
            raise ValueError(f"{func}(): max_distance is given, and {name} has {n} rows; expected 4 or more")
        max_distance = integer(func, "max_distance", max_distance, n // 4 + 2, 2**53)
    if options.get("scale") is None:
        args.scale = (args.head_dim * (1 + len(found))) ** -0.5
    # Distances in falling order: first that of the last query and key 0.
    distances = np.arange(offset + args.len_q - 1, offset - args.len_k, -1)
    buckets = _deberta_buckets(distances, n // 2, max_distance)
    queries, keys = (np.broadcast_to(x, (*args.batch_shape, *x.shape[-3:])) for x in (args.q, args.k))
    group, columns = args.heads_q // args.heads_kv, np.arange(args.len_k)
    of_keys: dict[tuple[int, ...], Array] = {}

    def bias_of(b: tuple[int, ...], rows: slice) -> Array:
        n_rows = rows.stop - rows.start
        index = buckets[args.len_q - rows.stop :][: n_rows + args.len_k - 1]
        terms = []
        if "position_keys" in found:
            scaled = queries[b][:, rows].astype(lane) * lane.type(args.scale)
            products = scaled @ found["position_keys"].swapaxes(-1, -2)
            terms.append(by_distance(np.take(products, index, axis=-1), args.len_k))
        if "position_queries" in found:
            if b not in of_keys:
                of_keys.clear()
                scaled = np.repeat(keys[b].astype(lane) * lane.type(args.scale), group, axis=0)
                of_keys[b] = (scaled @ found["position_queries"].swapaxes(-1, -2)).reshape(args.heads_q, -1)
            place = by_distance(np.broadcast_to(index, (n_rows, len(index))), args.len_k) + columns * n
            terms.append(np.take(of_keys[b], place, axis=-1))
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    attend_by_rows(args, options.get("backend"), bias_of)
    return args.result


def _deberta_buckets(distances: Ints, span: int, max_distance: int | None) -> Ints:
    """Row of the tables, in [0, 2 span), of each distance i - j."""
    if max_distance is not None:
        middle = span // 2
        far = np.maximum(abs(distances), middle)
        steps = np.log(far / middle) / np.log((max_distance - 1) / middle) * (middle - 1)
        bucket = np.sign(distances) * (np.ceil(steps - 1e-9).astype(np.int64) + middle)
        distances = np.where(abs(distances) <= middle, distances, bucket)
    return np.clip(distances + span, 0, 2 * span - 1)
