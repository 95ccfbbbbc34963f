"""Relative positions whose scores depend on the query's or the key's content, too."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from fastattn._args.errors import wrong_shape
from fastattn._args.options import RelativeOptions
from fastattn._args.types import AXES, Array, ArrayLike, AttentionArgs, Ints, Unpack, lane_dtype
from fastattn._args.values import float_array, integer, require_broadcast
from fastattn._args.variants import variant_args
from fastattn._engine import dispatch
from fastattn._reference.modifiers import add_to
from fastattn.functional._composed_gradients import ComposedGradients, cotangents, shown
from fastattn.functional._differentiable import Steps, differentiable

_SOURCES = ("q", "k", "v", "position_keys", "position_queries")


@differentiable(*_SOURCES, options=RelativeOptions, without=("scale",), own_bias=False)
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
) -> Steps[Any]:
    """DeBERTa's attention: scores ``scale * (q_i @ k_j + q_i @ kr_b + k_j @ qr_b)``, b the bucket of i - j.

    Parameters
    ----------
    q, k, v, return_lse
        As in `attention`, also for results and errors.
    position_keys, position_queries : array_like, (heads_q, 2 * span, head_dim)
        kr (content to position) and qr (position to content): projected embeddings of relative positions, by
        bucket. At least one of them.
    max_distance : int, optional
        Share buckets logarithmically beyond ``span // 2``, up to this distance, as in version 2
        (``max_relative_positions``; span is ``position_buckets``). By default distance d is in bucket
        ``clip(d + span, 0, 2 * span - 1)``.
    **options
        Keyword arguments of `attention` except softcap and stats, with one q_offset for all. Scale defaults
        to ``1 / sqrt(head_dim * terms)``, with 2 or 3 terms.

    Notes
    -----
    Both terms are gathered into a bias for some queries at a time, about 2**18 scores per head. Time is that
    of a dense bias, of two gathers of len_q * len_k numbers per head, and of the products with the tables.
    Source: P. He et al., "DeBERTa: Decoding-enhanced BERT with Disentangled Attention", 2020,
    arXiv:2006.03654.
    """
    args = variant_args(q, k, v, options, RelativeOptions, return_lse)
    tables = {"position_keys": position_keys, "position_queries": position_queries}
    x = _disentangled(args, tables, max_distance, options)
    if args.out.size and args.len_k:
        for _, _, part in x.parts():
            dispatch.run(part, options.get("backend"))
    else:
        dispatch.run(args, options.get("backend"))
    request = yield args.result

    found = ComposedGradients(request, options)
    dout, dlse = cotangents(args, request)
    scale = x.lane.type(args.scale)
    group, keys = args.heads_q // args.heads_kv, np.arange(args.len_k)
    n = len(next(iter(x.tables.values()))[0])
    sums = {name: np.zeros(table.shape, x.lane) for name, table in x.tables.items()}
    uses = {"dbias": ("dbias", "dq", "dk", *(f"d{name}" for name in sums))}
    dq = np.zeros(x.queries.shape, x.lane)
    of_heads = (*args.batch_shape, args.heads_kv, args.len_k)
    dk, dk_of_tables = (np.zeros((*of_heads, args.head_dim), x.lane) for _ in range(2))
    dv = np.zeros((*of_heads, args.head_dim_v), x.lane)
    dbias = np.zeros(args.bias.shape, x.lane) if args.bias is not None and found.wants("dbias") else None
    of_keys = np.zeros((args.heads_q, args.len_k * n) if "position_queries" in sums else 0)
    if not args.len_k:  # sinks alone
        found.attend(args, dout, dlse)
    for b, rows, part in x.parts() if args.len_k else ():
        place: Any = (*b, slice(None), rows)
        own = None if dlse is None else dlse[place]
        call = found.attend(part, dout[place], own, (b, args.batch_shape), uses)
        for total, dx in ((dk, call.dk), (dv, call.dv)):
            if dx is not None:
                total[b] += dx
        if dbias is not None:
            add_to(dbias, b, (slice(None), rows, slice(None)), call.dbias)
        if call.dq is not None:
            dq[place] = call.dq
        if call.dbias is None:
            continue
        places = x.places(rows)
        if "position_keys" in sums:
            n_rows = rows.stop - rows.start
            of_rows = np.zeros((args.heads_q, n_rows * n))
            _add_by_bin(of_rows, places + np.arange(n_rows)[:, None] * n, call.dbias)
            dproducts = of_rows.reshape(args.heads_q, n_rows, n).astype(x.lane)
            dq[place] += scale * (dproducts @ x.tables["position_keys"])
            queries = shown(x.scaled(x.queries[b][:, rows]), dproducts)
            sums["position_keys"] += dproducts.swapaxes(-1, -2) @ queries
        if "position_queries" in sums:
            _add_by_bin(of_keys, places + keys * n, call.dbias)
            if rows.stop == args.len_q:  # the last of this item
                dproducts = of_keys.reshape(args.heads_q, args.len_k, n).astype(x.lane)
                sums["position_queries"] += dproducts.swapaxes(-1, -2) @ shown(x.scaled_keys(b), dproducts)
                dkeys = scale * (dproducts @ x.tables["position_queries"])
                dk_of_tables[b] = dkeys.reshape(args.heads_kv, group, *dkeys.shape[-2:]).sum(axis=1)
                of_keys[...] = 0
    of_tables = ((f"d{name}", total) for name, total in sums.items())
    for name, dx in (("dk", dk), ("dv", dv), ("dbias", dbias), ("dk", dk_of_tables), ("dq", dq), *of_tables):
        found.add(name, dx)
    return found.results()


# The pieces of a call: this many scores of one head, and at least this many query rows. Only lengths decide,
# so that a row's bits do not depend on the batch.
_PIECE_SCORES, _LEAST_ROWS = 2**18, 32


@dataclass(slots=True)
class _Disentangled:
    """A call with biases of both content and position."""

    args: AttentionArgs
    queries: Array  # (*batch, heads_q, len_q, head_dim)
    keys: Array  # (*batch, heads_kv, len_k, head_dim)
    tables: dict[str, Array]  # (heads_q, n, head_dim), lane dtype
    buckets: Ints  # of distances in falling order, from that of the last query and key 0 on
    lane: np.dtype[Any]
    of_keys: dict[tuple[int, ...], Array] = field(default_factory=dict)

    def index(self, rows: slice) -> Ints:
        """The bucket of each distance of these rows."""
        n_rows = rows.stop - rows.start
        return self.buckets[self.args.len_q - rows.stop :][: n_rows + self.args.len_k - 1]

    def places(self, rows: slice) -> Ints:
        """The bucket of each of these rows and each key, (rows, len_k)."""
        index = self.index(rows)
        return _by_distance(np.broadcast_to(index, (rows.stop - rows.start, len(index))), self.args.len_k)

    def scaled(self, x: Array) -> Array:
        """`x` times the scale, in the lane dtype."""
        found: Array = x.astype(self.lane) * self.lane.type(self.args.scale)
        return found

    def scaled_keys(self, b: tuple[int, ...]) -> Array:
        """The keys of all query heads, scaled."""
        return np.repeat(self.scaled(self.keys[b]), self.args.heads_q // self.args.heads_kv, axis=0)

    def parts(self) -> Iterator[tuple[tuple[int, ...], slice, AttentionArgs]]:
        """The calls for some rows of one batch item each, whose bias is made and then dropped."""
        args = self.args
        n_rows = max(_LEAST_ROWS, _PIECE_SCORES // max(1, args.len_k) // _LEAST_ROWS * _LEAST_ROWS)
        for b in np.ndindex(args.batch_shape):
            item = _item_of(args, b)
            for first in range(0, args.len_q, n_rows):
                rows = slice(first, min(first + n_rows, args.len_q))
                part = item.cut(len_q=rows)
                if item.q_position is not None:
                    part.q_position = np.asarray(item.q_position + first)
                _add_bias(part, self.bias_of(b, rows))
                yield b, rows, part

    def bias_of(self, b: tuple[int, ...], rows: slice) -> Array:
        """Bias of these rows, (heads_q, rows, len_k)."""
        args, terms = self.args, []
        if "position_keys" in self.tables:
            products = self.scaled(self.queries[b][:, rows]) @ self.tables["position_keys"].swapaxes(-1, -2)
            terms.append(_by_distance(np.take(products, self.index(rows), axis=-1), args.len_k))
        if "position_queries" in self.tables:
            table = self.tables["position_queries"]
            if b not in self.of_keys:
                self.of_keys.clear()
                products = self.scaled_keys(b) @ table.swapaxes(-1, -2)
                self.of_keys[b] = products.reshape(args.heads_q, -1)
            place = self.places(rows) + np.arange(args.len_k) * table.shape[-2]
            terms.append(np.take(self.of_keys[b], place, axis=-1))
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]


def _disentangled(
    args: AttentionArgs, tables: dict[str, Any], max_distance: int | None, options: RelativeOptions
) -> _Disentangled:
    """Check what DeBERTa's attention takes beside `args`, those of attention."""
    lane = lane_dtype(args.q.dtype)
    offset = args.len_k - args.len_q
    if options.get("q_offset") is not None:
        offset = integer("q_offset", options["q_offset"], -(2**53), 2**53)
    elif options.get("kv_lengths") is not None:
        expected = "both: one position of the first query for all sequences"
        raise ValueError(f"(): kv_lengths is given without q_offset; expected {expected}")
    given = {name: float_array(name, x, 2) for name, x in tables.items() if x is not None}
    if not given:
        raise ValueError("(): position_keys and position_queries are None; expected at least one")
    name, n = next((name, x.shape[-2]) for name, x in given.items())
    if n < 2 or n % 2:
        raise ValueError(f"(): {name} has {n} rows; expected 2 * span, 2 or more")
    shape, dims = (args.heads_q, n, args.head_dim), "(heads_q, 2 span, head_dim)"
    for each, x in given.items():
        require_broadcast(each, x.shape, shape, dims)
        if x.shape[-3:] != shape:
            raise wrong_shape(each, x, f"{dims} = {shape}")
    found = {name: np.asarray(x, lane) for name, x in given.items()}
    if max_distance is not None:
        if n < 4:
            raise ValueError(f"(): max_distance is given, and {name} has {n} rows; expected 4 or more")
        max_distance = integer("max_distance", max_distance, n // 4 + 2, 2**53)
    if options.get("scale") is None:
        args.scale = (args.head_dim * (1 + len(found))) ** -0.5
    # Distances in falling order: first that of the last query and key 0.
    distances = np.arange(offset + args.len_q - 1, offset - args.len_k, -1)
    buckets = deberta_buckets(distances, n // 2, max_distance)
    queries, keys = (np.broadcast_to(x, (*args.batch_shape, *x.shape[-3:])) for x in (args.q, args.k))
    return _Disentangled(args, queries, keys, found, buckets, lane)


def deberta_buckets(distances: Ints, span: int, max_distance: int | None) -> Ints:
    """Row of the tables, in [0, 2 span), of each distance i - j."""
    if max_distance is not None:
        middle = span // 2
        far = np.maximum(abs(distances), middle)
        steps = np.log(far / middle) / np.log((max_distance - 1) / middle) * (middle - 1)
        bucket = np.sign(distances) * (np.ceil(steps - 1e-9).astype(np.int64) + middle)
        distances = np.where(abs(distances) <= middle, distances, bucket)
    return np.clip(distances + span, 0, 2 * span - 1)


def _add_by_bin(sums: Array, bins: Array, x: Array) -> None:
    """Add x (heads, rows, keys) to sums (heads, n), by the number in bins (rows, keys), in float64."""
    for total, each in zip(sums, x, strict=True):
        total += np.bincount(bins.ravel(), each.ravel(), len(total))


def _item_of(args: AttentionArgs, b: tuple[int, ...]) -> AttentionArgs:
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
            whole = np.broadcast_to(x, (*args.batch_shape, *x.shape[x.ndim - n :]))
            setattr(part, name, np.asarray(whole[b]))
    return part


def _add_bias(args: AttentionArgs, computed: Array) -> None:
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


def _by_distance(x: Array, n_keys: int) -> Array:
    """View (..., rows, n_keys) of x (..., rows, rows + n_keys - 1): row i without its first rows - 1 - i.

    Columns of x are distances, from the largest (the last query and key 0) down to the smallest (the first
    query and the last key). Nothing is copied.
    """
    *lead, row, column = x.strides
    n_rows = x.shape[-2]
    shape = (*x.shape[:-1], n_keys)
    return as_strided(x[..., n_rows - 1 :], shape, (*lead, row - column, column), writeable=False)
