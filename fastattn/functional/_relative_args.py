"""The calls that Shaw's, Transformer-XL's and DeBERTa's attention are: for these, and for their gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.values import float_array, integer
from fastattn._args.variants import relative_args, with_shape
from fastattn.functional._pieces import (
    add_bias,
    apart,
    band_of,
    by_distance,
    has_keys,
    keys_of,
    narrowed,
    rows_of,
    sum_in,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastattn._args.options import RelativeInnerOptions, ShawInnerOptions
    from fastattn._args.types import Array, AttentionArgs, Ints, Shape


# Query rows whose near keys Shaw's attention takes at a time.
_NEAR_ROWS = 128


@dataclass(slots=True)
class Shaw:
    """A call whose keys and values have something added that depends on the distance."""

    args: AttentionArgs
    offset: int  # the position of query 0
    of_keys: Array  # (2 clip + 1, head_dim), lane dtype
    of_values: Array | None  # (2 clip + 1, head_dim_v)

    def near(self) -> AttentionArgs:
        """The call over keys at the distances of the tables' inner rows."""
        position, clip = self._positions()
        return narrowed(self.args, position - clip + 1, position + clip)

    def far(self) -> Iterator[tuple[int, AttentionArgs]]:
        """The calls over the keys that have the first row of the tables, and that have the last one."""
        args, (position, clip) = self.args, self._positions()
        for row, begin, end in ((0, None, position - clip + 1), (-1, position + clip, None)):
            part = narrowed(args, begin, end)
            if has_keys(part):
                part.sinks = None  # of the parts, the near one carries them
                part.k = sum_in(args.k.dtype, args.k, self.of_keys[row])
                if self.of_values is not None:
                    part.v = sum_in(args.v.dtype, args.v, self.of_values[row])
                yield row, part

    def _positions(self) -> tuple[Ints, int]:
        return self.offset + np.arange(self.args.len_q)[None], len(self.of_keys) // 2

    def pieces(self, near: AttentionArgs) -> Iterator[ShawPiece]:
        """The calls of some rows of `near`, with a bias: as many keys to either side."""
        of_keys, lane = self.of_keys[1:-1], self.of_keys.dtype
        n = len(of_keys)
        for first in range(0, near.len_q, _NEAR_ROWS):
            rows = slice(first, min(first + _NEAR_ROWS, near.len_q))
            n_rows = rows.stop - rows.start
            start = self.offset + first - n // 2  # the key of column 0
            keys = slice(*np.clip((start, start + n_rows + n - 1), 0, near.len_k).tolist())
            part = keys_of(rows_of(near, rows), keys)
            piece = ShawPiece(part, rows, keys, slice(keys.start - start, keys.stop - start), n)
            columns = piece.columns(part.q.shape[:-2], lane)
            band_of(columns, n)[...] = part.q.astype(lane) * lane.type(part.scale) @ of_keys.T
            add_bias(part, columns[..., piece.inside])
            yield piece


@dataclass(slots=True)
class ShawPiece:
    """A call of some rows and their near keys, and where these are."""

    args: AttentionArgs
    rows: Any
    keys: slice
    inside: slice  # which columns are keys
    n: int  # columns of a row's band

    def columns(self, lead: Shape, lane: np.dtype[Any]) -> Array:
        """0 for each row and column.

        Column t of a row's band is the key at distance t - n // 2; what is not in the band, no row attends.
        """
        n_rows = self.rows.stop - self.rows.start
        return np.zeros((*lead, n_rows, n_rows + self.n - 1), lane)

    def probabilities(self) -> AttentionArgs:
        """The call whose results are the probabilities: its values are the identity matrix."""
        part, width = apart(self.args), self.args.len_k
        part.v = np.broadcast_to(np.eye(width, dtype=part.v.dtype), (part.heads_kv, width, width))
        part.head_dim_v, part.out = width, np.empty((*part.out.shape[:-1], width), part.out.dtype)
        return part


def shaw_args(
    func: str,
    q: Any,
    k: Any,
    v: Any,
    key_table: Any,
    value_table: Any,
    options: ShawInnerOptions,
    taken: type,
    return_lse: bool,
) -> Shaw:
    """Check the arguments of Shaw's attention."""
    args, lane, offset = relative_args(func, q, k, v, options, taken, return_lse)
    n = len(float_array(func, "key_table", key_table, least_dims=1))
    if n < 3 or n % 2 == 0:
        raise ValueError(f"{func}(): key_table has {n} rows; expected an odd number, 3 or more")
    of_keys = with_shape(func, "key_table", key_table, (n, args.head_dim), "(2 clip + 1, head_dim)", 2, lane)
    of_values = None
    if value_table is not None:
        shape = (n, args.head_dim_v)
        of_values = with_shape(func, "value_table", value_table, shape, "(2 clip + 1, head_dim_v)", 2, lane)
    return Shaw(args, offset, of_keys, of_values)


@dataclass(slots=True)
class TransformerXL:
    """A call with a bias of positions, (q + w) . r."""

    args: AttentionArgs
    queries: Array  # (*batch, heads_q, len_q, head_dim)
    relative: Array  # r, (*batch, heads_q, n, head_dim), lane dtype
    w: Array  # (heads_q, 1, head_dim)

    def shifted(self, b: tuple[int, ...], rows: slice) -> Array:
        """scale * (q + w) of these rows."""
        lane = self.w.dtype
        found: Array = (self.queries[b][:, rows].astype(lane) + self.w) * lane.type(self.args.scale)
        return found

    def columns(self, rows: slice) -> slice:
        """Which of the vectors these rows read."""
        first = self.args.len_q - rows.stop
        n = rows.stop - rows.start + self.args.len_k - 1
        return slice(first, min(first + n, self.relative.shape[-2]))

    def table(self, b: tuple[int, ...], rows: slice) -> Array:
        """The vectors of the columns of these rows: of distances from the largest one on."""
        place: Any = (*b, slice(None), self.columns(rows))
        found: Array = self.relative[place]
        return found

    def bias_of(self, b: tuple[int, ...], rows: slice) -> Array:
        """Bias of these rows, (heads_q, rows, len_k)."""
        args, table, n_rows = self.args, self.table(b, rows), rows.stop - rows.start
        columns = np.zeros((args.heads_q, n_rows, n_rows + args.len_k - 1), self.w.dtype)
        np.matmul(self.shifted(b, rows), table.swapaxes(-1, -2), out=columns[..., : table.shape[-2]])
        return by_distance(columns, args.len_k)


def transformer_xl_args(
    func: str,
    q: Any,
    k: Any,
    v: Any,
    relative_keys: Any,
    content_bias: Any,
    position_bias: Any,
    options: RelativeInnerOptions,
    taken: type,
    return_lse: bool,
) -> TransformerXL:
    """Check the arguments of Transformer-XL's attention; queries get the bias of the content."""
    args, lane, offset = relative_args(func, q, k, v, options, taken, return_lse)
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
    return TransformerXL(args, queries, relative, w)


@dataclass(slots=True)
class Disentangled:
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
        return by_distance(np.broadcast_to(index, (rows.stop - rows.start, len(index))), self.args.len_k)

    def scaled(self, x: Array) -> Array:
        """`x` times the scale, in the lane dtype."""
        found: Array = x.astype(self.lane) * self.lane.type(self.args.scale)
        return found

    def scaled_keys(self, b: tuple[int, ...]) -> Array:
        """The keys of all query heads, scaled."""
        return np.repeat(self.scaled(self.keys[b]), self.args.heads_q // self.args.heads_kv, axis=0)

    def bias_of(self, b: tuple[int, ...], rows: slice) -> Array:
        """Bias of these rows, (heads_q, rows, len_k)."""
        args, terms = self.args, []
        if "position_keys" in self.tables:
            products = self.scaled(self.queries[b][:, rows]) @ self.tables["position_keys"].swapaxes(-1, -2)
            terms.append(by_distance(np.take(products, self.index(rows), axis=-1), args.len_k))
        if "position_queries" in self.tables:
            table = self.tables["position_queries"]
            if b not in self.of_keys:
                self.of_keys.clear()
                products = self.scaled_keys(b) @ table.swapaxes(-1, -2)
                self.of_keys[b] = products.reshape(args.heads_q, -1)
            place = self.places(rows) + np.arange(args.len_k) * table.shape[-2]
            terms.append(np.take(self.of_keys[b], place, axis=-1))
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]


def disentangled_args(
    func: str,
    q: Any,
    k: Any,
    v: Any,
    position_keys: Any,
    position_queries: Any,
    max_distance: int | None,
    options: RelativeInnerOptions,
    taken: type,
    return_lse: bool,
) -> Disentangled:
    """Check the arguments of DeBERTa's attention."""
    args, lane, offset = relative_args(func, q, k, v, options, taken, return_lse)
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
    return Disentangled(args, queries, keys, found, buckets, lane)


def _deberta_buckets(distances: Ints, span: int, max_distance: int | None) -> Ints:
    """Row of the tables, in [0, 2 span), of each distance i - j."""
    if max_distance is not None:
        middle = span // 2
        far = np.maximum(abs(distances), middle)
        steps = np.log(far / middle) / np.log((max_distance - 1) / middle) * (middle - 1)
        bucket = np.sign(distances) * (np.ceil(steps - 1e-9).astype(np.int64) + middle)
        distances = np.where(abs(distances) <= middle, distances, bucket)
    return np.clip(distances + span, 0, 2 * span - 1)
