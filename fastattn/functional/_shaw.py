"""Shaw's relative positions, which are added to keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastattn._args.backward import summed_to
from fastattn._args.options import ShawOptions
from fastattn._args.types import Array, ArrayLike, AttentionArgs, Ints, Shape, Unpack
from fastattn._args.values import float_array
from fastattn._args.variants import relative_args, with_shape
from fastattn.functional._composed_gradients import ComposedGradients, add_up, cotangents, product_sums, shown
from fastattn.functional._differentiable import Steps, differentiable
from fastattn.functional._split_calls import (
    add_bias,
    apart,
    band_of,
    has_keys,
    join,
    keys_of,
    narrowed,
    rows_in,
    rows_of,
    run,
    sum_in,
)

# Query rows whose near keys Shaw's attention takes at a time.
_NEAR_ROWS = 128


@differentiable("q", "k", "v", "key_table", "value_table", options=ShawOptions, own_bias=False)
def shaw_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    key_table: ArrayLike,
    value_table: ArrayLike | None = None,
    *,
    return_lse: bool = False,
    **options: Unpack[ShawOptions],
) -> Steps[Any]:
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
    x = _shaw_args(q, k, v, key_table, value_table, options, return_lse)
    x.attend(options)
    request = yield x.args.result

    found = ComposedGradients(request, options)
    _Gradients(found, x, *cotangents(x.args, request)).add(options)
    return found.results()


@dataclass(slots=True)
class _Shaw:
    """A call whose keys and values have something added that depends on the distance."""

    args: AttentionArgs
    offset: int  # the position of query 0
    of_keys: Array  # (2 clip + 1, head_dim), lane dtype
    of_values: Array | None  # (2 clip + 1, head_dim_v)

    def attend(self, options: ShawOptions) -> None:
        """Fill the results of `args`."""
        parts = [self.near()]
        for piece in self.pieces(parts[0]):
            run(piece.args, options)
            if self.of_values is not None:
                weights = piece.probabilities()
                run(weights, options)
                probs = piece.columns(weights.out.shape[:-2], self.of_values.dtype)
                probs[..., piece.inside] = weights.out
                shifts = band_of(probs, piece.n) @ self.of_values[1:-1]
                piece.args.out += shifts.astype(piece.args.out.dtype)
        for _, part in self.far():
            run(part, options)
            parts.append(part)
        join(parts, self.args)

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

    def pieces(self, near: AttentionArgs) -> Iterator[_Piece]:
        """The calls of some rows of `near`, with a bias: as many keys to either side."""
        of_keys, lane = self.of_keys[1:-1], self.of_keys.dtype
        n = len(of_keys)
        for first in range(0, near.len_q, _NEAR_ROWS):
            rows = slice(first, min(first + _NEAR_ROWS, near.len_q))
            n_rows = rows.stop - rows.start
            start = self.offset + first - n // 2  # the key of column 0
            keys = slice(*np.clip((start, start + n_rows + n - 1), 0, near.len_k).tolist())
            part = keys_of(rows_of(near, rows), keys)
            piece = _Piece(part, rows, keys, slice(keys.start - start, keys.stop - start), n)
            columns = piece.columns(part.q.shape[:-2], lane)
            band_of(columns, n)[...] = part.q.astype(lane) * lane.type(part.scale) @ of_keys.T
            add_bias(part, columns[..., piece.inside])
            yield piece


@dataclass(slots=True)
class _Piece:
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


def _shaw_args(
    q: Any, k: Any, v: Any, key_table: Any, value_table: Any, options: ShawOptions, return_lse: bool
) -> _Shaw:
    """Check the arguments of Shaw's attention."""
    args, lane, offset = relative_args(q, k, v, options, ShawOptions, return_lse)
    n = len(float_array("key_table", key_table, least_dims=1))
    if n < 3 or n % 2 == 0:
        raise ValueError(f"(): key_table has {n} rows; expected an odd number, 3 or more")
    of_keys = with_shape("key_table", key_table, (n, args.head_dim), "(2 clip + 1, head_dim)", 2, lane)
    of_values = None
    if value_table is not None:
        shape = (n, args.head_dim_v)
        of_values = with_shape("value_table", value_table, shape, "(2 clip + 1, head_dim_v)", 2, lane)
    return _Shaw(args, offset, of_keys, of_values)


class _Gradients:
    """Sums over the parts of a call, in the lane dtype."""

    def __init__(self, found: ComposedGradients, x: _Shaw, dout: Array, dlse: Array | None) -> None:
        self.found, self.x, self.dout, self.dlse = found, x, dout, dlse
        args, self.lane = x.args, x.of_keys.dtype
        keys = (*args.batch_shape, args.heads_kv, args.len_k)
        self.dq = np.zeros((*args.out.shape[:-1], args.head_dim), self.lane)
        self.dk, self.dv = (np.zeros((*keys, n), self.lane) for n in (args.head_dim, args.head_dim_v))
        self.dbias: Array | None = None
        if args.bias is not None and found.wants("dbias"):
            self.dbias = np.zeros(args.bias.shape, self.lane)
        self.dkey_table = np.zeros(x.of_keys.shape, self.lane)
        self.dvalue_table = None if x.of_values is None else np.zeros(x.of_values.shape, self.lane)

    def add(self, options: ShawOptions) -> None:
        """Add the gradients of all parts to those of the call."""
        uses = {"dk": ("dk", "dkey_table"), "dv": ("dv", "dvalue_table")}
        for row, part in self.x.far():
            part.out, part.lse = self.x.args.out, self.x.args.lse
            call = self.found.attend(part, self.dout, self.dlse, uses=uses)
            for name in ("dq", "dk", "dv", "dbias"):
                if getattr(call, name) is not None:
                    add_up(getattr(self, name), getattr(call, name))
            for table, dx in ((self.dkey_table, call.dk), (self.dvalue_table, call.dv)):
                if table is not None and dx is not None:
                    table[row] += dx.reshape(-1, dx.shape[-1]).sum(axis=0)
        near = self.x.near()
        near.q = np.broadcast_to(near.q, (*near.batch_shape, *near.q.shape[-3:]))
        near.out, near.lse = self.x.args.out, self.x.args.lse
        for piece in self.x.pieces(near):
            self._add_near(piece, options)
        for name in ("dq", "dk", "dv", "dbias", "dkey_table", "dvalue_table"):
            self.found.add(name, getattr(self, name))

    def _add_near(self, piece: _Piece, options: ShawOptions) -> None:
        part, width, lane = piece.args, piece.args.head_dim_v, self.lane
        part.q, part.k, part.v, part.out = (rows_in(lane, x) for x in (part.q, part.k, part.v, part.out))
        dout = self.dout[..., piece.rows, :].astype(lane)
        uses: Any = {"dbias": ("dbias", "dq", "dkey_table", "dscale")}
        dlse = None if self.dlse is None else self.dlse[..., piece.rows]
        if self.dvalue_table is not None:
            if self.found.wants("dvalue_table"):
                self._add_values(piece, dout, options)
            dout = self._with_values(piece, dout)
        call = self.found.attend(part, dout, dlse, uses=uses)
        if call.dq is not None:
            self.dq[..., piece.rows, :] += call.dq
        if call.dk is not None:
            self.dk[..., piece.keys, :] += call.dk
        if call.dv is not None:
            self.dv[..., piece.keys, :] += call.dv[..., :width]
        if call.dbias is None:
            return
        if self.dbias is not None:
            rows = piece.rows if self.dbias.shape[-2] > 1 else slice(None)
            keys = piece.keys if self.dbias.shape[-1] > 1 else slice(None)
            place: Any = (..., rows, keys)
            to = self.dbias[place]
            to += summed_to(to.shape, call.dbias)
        columns = piece.columns(call.dbias.shape[:-2], lane)
        columns[..., piece.inside] = call.dbias
        band = band_of(columns, piece.n)
        dqueries = band @ self.x.of_keys[1:-1]
        queries = shown(part.q, band)
        self.found.add("dscale", product_sums(queries, dqueries).sum())
        scale = lane.type(part.scale)
        self.dq[..., piece.rows, :] += scale * dqueries
        self.dkey_table[1:-1] += _sum(band.swapaxes(-1, -2) @ (scale * queries))

    def _with_values(self, piece: _Piece, dout: Array) -> Array:
        """Make values of `piece` longer by the identity matrix, and dout by its product with the table.

        Then their products are those of dout and ``v + b``.
        """
        part, of_values = piece.args, self.x.of_values
        assert of_values is not None
        columns = piece.columns(dout.shape[:-2], self.lane)
        band_of(columns, piece.n)[...] = dout @ of_values[1:-1].T
        each = np.broadcast_to(np.eye(part.len_k, dtype=self.lane), (*part.v.shape[:-1], part.len_k))
        part.v = np.concatenate([part.v, each], axis=-1)
        part.out = np.concatenate([part.out, np.zeros((*part.out.shape[:-1], part.len_k), self.lane)], -1)
        part.head_dim_v += part.len_k
        return np.concatenate([dout, columns[..., piece.inside]], axis=-1)

    def _add_values(self, piece: _Piece, dout: Array, options: ShawOptions) -> None:
        """Add the gradient of the value table: probabilities times dout."""
        weights, lse = piece.probabilities(), piece.args.lse
        run(weights, options)
        own: Any = weights.lse
        # From probabilities among the near keys to those among all.
        share = np.where((own == -np.inf) | (lse == -np.inf), 0, np.exp(own - lse))[..., None]
        columns = piece.columns(weights.out.shape[:-2], self.lane)
        columns[..., piece.inside] = np.where(weights.out == 0, 0, share * weights.out)
        band = band_of(columns, piece.n)
        assert self.dvalue_table is not None
        self.dvalue_table[1:-1] += _sum(band.swapaxes(-1, -2) @ shown(dout, band))


def _sum(x: Array) -> Array:
    """The sum of all matrices (..., n, m)."""
    found: Array = x.reshape(-1, *x.shape[-2:]).sum(axis=0)
    return found
