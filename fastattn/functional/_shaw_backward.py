"""The gradients of Shaw's relative positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.backward import summed_to
from fastattn._args.options import ShawInnerOptions
from fastattn.functional._chain import NEED, Chain, add_up, product_sums, shown
from fastattn.functional._pieces import band_of, run
from fastattn.functional._relative_args import shaw_args

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.types import Array
    from fastattn.functional._relative_args import Shaw, ShawPiece


@np.errstate(all="ignore")  # as in the kernels
def shaw_attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    key_table: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    value_table: ArrayLike | None = None,
    *,
    dlse: ArrayLike | None = None,
    need: Sequence[str] | None = None,
    **options: Unpack[ShawInnerOptions],
) -> tuple[Any, ...]:
    """Gradients of `shaw_attention`.

    Parameters
    ----------
    dout, out, lse, dlse
        As in `attention_backward`: out and lse are what the forward pass returned with ``return_lse=True``.
    q, k, v, key_table, value_table, **options
        As they were given to `shaw_attention`, but for `out`.
    need : tuple of str, optional
        As in `attention_backward`, with ``"dkey_table"`` and ``"dvalue_table"``, without
        ``"dbias_diagonals"``. Default "dq", "dk", "dv", and those of the tables that are given.

    Returns
    -------
    tuple
        A gradient for each name in `need`, with the shape and dtype of what it is the gradient of.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    `attention_backward` of the three parts of the forward pass, which share out and lse. With a value table,
    values of the near keys are longer by a number for each of up to ``126 + 2 * clip`` keys: that is how the
    gradient of a probability gets what the table adds.
    """
    func = "shaw_attention_backward"
    given = {"q": q, "k": k, "v": v, "key_table": key_table, "value_table": value_table}
    if need is None:
        need = (*NEED, "dkey_table", *(("dvalue_table",) if value_table is not None else ()))
    chain = Chain(func, need, given, options, ShawInnerOptions, bias=False)
    x = shaw_args(func, q, k, v, key_table, value_table, options, ShawInnerOptions, True)
    _Gradients(chain, x, *chain.saved(x.args, dout, out, lse, dlse)).add(options)
    return chain.results()


class _Gradients:
    """Sums over the parts of a call, in the lane dtype."""

    def __init__(self, chain: Chain, x: Shaw, dout: Array, dlse: Array | None) -> None:
        self.chain, self.x, self.dout, self.dlse = chain, x, dout, dlse
        args, self.lane = x.args, x.of_keys.dtype
        keys = (*args.batch_shape, args.heads_kv, args.len_k)
        self.dq = np.zeros((*args.out.shape[:-1], args.head_dim), self.lane)
        self.dk, self.dv = (np.zeros((*keys, n), self.lane) for n in (args.head_dim, args.head_dim_v))
        self.dbias: Array | None = None
        if args.bias is not None and chain.wants("dbias"):
            self.dbias = np.zeros(args.bias.shape, self.lane)
        self.dkey_table = np.zeros(x.of_keys.shape, self.lane)
        self.dvalue_table = None if x.of_values is None else np.zeros(x.of_values.shape, self.lane)

    def add(self, options: ShawInnerOptions) -> None:
        """Add the gradients of all parts to those of the call."""
        uses = {"dk": ("dk", "dkey_table"), "dv": ("dv", "dvalue_table")}
        for row, part in self.x.far():
            part.out, part.lse = self.x.args.out, self.x.args.lse
            call = self.chain.attend(part, self.dout, self.dlse, uses=uses)
            for name, found in (("dq", call.dq), ("dk", call.dk), ("dv", call.dv), ("dbias", call.dbias)):
                if found is not None:
                    add_up(getattr(self, name), found)
            for table, found in ((self.dkey_table, call.dk), (self.dvalue_table, call.dv)):
                if table is not None and found is not None:
                    table[row] += found.reshape(-1, found.shape[-1]).sum(axis=0)
        near = self.x.near()
        near.q = np.broadcast_to(near.q, (*near.batch_shape, *near.q.shape[-3:]))
        near.out, near.lse = self.x.args.out, self.x.args.lse
        for piece in self.x.pieces(near):
            self._add_near(piece, options)
        for name in ("dq", "dk", "dv", "dbias", "dkey_table", "dvalue_table"):
            self.chain.add(name, getattr(self, name))

    def _add_near(self, piece: ShawPiece, options: ShawInnerOptions) -> None:
        part, width, lane = piece.args, piece.args.head_dim_v, self.lane
        part.q, part.k, part.v, part.out = (x.astype(lane) for x in (part.q, part.k, part.v, part.out))
        dout = self.dout[..., piece.rows, :].astype(lane)
        uses: Any = {"dbias": ("dbias", "dq", "dkey_table", "dscale")}
        dlse = None if self.dlse is None else self.dlse[..., piece.rows]
        if self.dvalue_table is not None:
            if self.chain.wants("dvalue_table"):
                self._add_values(piece, dout, options)
            dout = self._with_values(piece, dout)
        call = self.chain.attend(part, dout, dlse, uses=uses)
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
        self.chain.add("dscale", product_sums(queries, dqueries).sum())
        scale = lane.type(part.scale)
        self.dq[..., piece.rows, :] += scale * dqueries
        self.dkey_table[1:-1] += _sum(band.swapaxes(-1, -2) @ (scale * queries))

    def _with_values(self, piece: ShawPiece, dout: Array) -> Array:
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

    def _add_values(self, piece: ShawPiece, dout: Array, options: ShawInnerOptions) -> None:
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
