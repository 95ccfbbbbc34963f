"""The gradients of relative positions whose scores depend on the query's or the key's content, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.options import RelativeInnerOptions
from fastattn._args.types import lane_dtype
from fastattn._reference.backward import add_to
from fastattn.functional._chain import NEED, Chain, add_up, shown
from fastattn.functional._pieces import by_distance, parts_by_rows
from fastattn.functional._relative_args import disentangled_args, transformer_xl_args

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.types import Array, AttentionArgs


@np.errstate(all="ignore")  # as in the kernels
def transformer_xl_attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    relative_keys: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    content_bias: ArrayLike | None = None,
    position_bias: ArrayLike | None = None,
    *,
    dlse: ArrayLike | None = None,
    need: Sequence[str] = (*NEED, "drelative_keys"),
    **options: Unpack[RelativeInnerOptions],
) -> tuple[Any, ...]:
    """Gradients of `transformer_xl_attention`.

    Parameters
    ----------
    dout, out, lse, dlse
        As in `attention_backward`: out and lse are what the forward pass returned with ``return_lse=True``.
    q, k, v, relative_keys, content_bias, position_bias, **options
        As they were given to `transformer_xl_attention`, but for `out`.
    need : tuple of str, default ("dq", "dk", "dv", "drelative_keys")
        As in `attention_backward`, with ``"drelative_keys"``, ``"dcontent_bias"`` and ``"dposition_bias"``,
        without ``"dscale"`` and ``"dbias_diagonals"``.

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
    `attention_backward` with a dense bias and its gradient, made for a run of queries at a time, about 2**18
    scores a head, and two products with `relative_keys` in NumPy.
    """
    func = "transformer_xl_attention_backward"
    arrays = (q, k, v, relative_keys, content_bias, position_bias)
    names = ("q", "k", "v", "relative_keys", "content_bias", "position_bias")
    given = dict(zip(names, arrays, strict=True))
    chain = Chain(func, need, given, options, RelativeInnerOptions, bias=False, scale=False)
    x = transformer_xl_args(func, *arrays, options, RelativeInnerOptions, True)
    saved = chain.saved(x.args, dout, out, lse, dlse)
    lane = x.w.dtype
    dq = np.zeros(x.queries.shape, lane)
    drelative = np.zeros(x.relative.shape, lane)
    dw = np.zeros(x.w.shape, lane)

    def add(b: tuple[int, ...], rows: slice, call: Any) -> None:
        columns = x.columns(rows)
        heads: Any = (*b, slice(None))
        n_rows = rows.stop - rows.start
        if call.dq is not None:
            chain.add("dcontent_bias", call.dq.sum(axis=-2))
            dq[(*heads, rows)] = call.dq
        if call.dbias is None:
            return
        dcolumns = np.zeros((x.args.heads_q, n_rows, n_rows + x.args.len_k - 1), lane)
        by_distance(dcolumns, x.args.len_k, writeable=True)[...] = call.dbias
        dcolumns = dcolumns[..., : columns.stop - columns.start]
        drelative[(*heads, columns)] += dcolumns.swapaxes(-1, -2) @ shown(x.shifted(b, rows), dcolumns)
        dshifted = lane.type(x.args.scale) * (dcolumns @ x.table(b, rows))
        dw[...] += dshifted.sum(axis=-2, keepdims=True)
        dq[(*heads, rows)] += dshifted

    uses = {"dq": ("dq", "dcontent_bias"), "dbias": ("dbias", "dq", "drelative_keys", "dposition_bias")}
    _by_rows(chain, x.args, x.bias_of, saved, add, uses)
    chain.add("dq", dq)
    chain.add("drelative_keys", drelative)
    chain.add("dposition_bias", dw[:, 0])
    chain.add("dcontent_bias", np.zeros_like(dw[:, 0]))  # for a call without queries or keys
    return chain.results()


@np.errstate(all="ignore")  # as in the kernels
def disentangled_attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    position_keys: ArrayLike | None = None,
    position_queries: ArrayLike | None = None,
    *,
    max_distance: int | None = None,
    dlse: ArrayLike | None = None,
    need: Sequence[str] | None = None,
    **options: Unpack[RelativeInnerOptions],
) -> tuple[Any, ...]:
    """Gradients of `disentangled_attention`, DeBERTa's.

    Parameters
    ----------
    dout, out, lse, dlse
        As in `attention_backward`.
    q, k, v, position_keys, position_queries, max_distance, **options
        As they were given to `disentangled_attention`, but for `out`.
    need : tuple of str, optional
        As in `attention_backward`, with ``"dposition_keys"`` and ``"dposition_queries"``, without
        ``"dscale"`` and ``"dbias_diagonals"``. Default "dq", "dk", "dv" and those of the tables given.

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
    `attention_backward` with a dense bias and its gradient, made for a run of queries at a time, about 2**18
    scores a head; sums by bucket, in float64, and products with the tables in NumPy. With `position_queries`
    it holds ``heads_q * len_k * len(position_queries)`` sums, of 8 bytes each, for one item of the batch.
    """
    func = "disentangled_attention_backward"
    given = {"q": q, "k": k, "v": v, "position_keys": position_keys, "position_queries": position_queries}
    if need is None:
        need = (
            *NEED,
            *(f"d{name}" for name in ("position_keys", "position_queries") if given[name] is not None),
        )
    chain = Chain(func, need, given, options, RelativeInnerOptions, bias=False, scale=False)
    tables = (position_keys, position_queries, max_distance)
    x = disentangled_args(func, q, k, v, *tables, options, RelativeInnerOptions, True)
    saved = chain.saved(x.args, dout, out, lse, dlse)
    args, scale = x.args, x.lane.type(x.args.scale)
    group, keys = args.heads_q // args.heads_kv, np.arange(args.len_k)
    n = len(next(iter(x.tables.values()))[0])
    dq = np.zeros(x.queries.shape, x.lane)
    sums = {name: np.zeros(table.shape, x.lane) for name, table in x.tables.items()}
    dk = np.zeros((*args.batch_shape, args.heads_kv, args.len_k, args.head_dim), x.lane)
    of_keys = np.zeros((args.heads_q, args.len_k * n) if "position_queries" in sums else 0)

    def add(b: tuple[int, ...], rows: slice, call: Any) -> None:
        places = x.places(rows)
        place: Any = (*b, slice(None), rows)
        if call.dq is not None:
            dq[place] = call.dq
        if call.dbias is None:
            return
        if "position_keys" in sums:
            table = x.tables["position_keys"]
            n_rows = rows.stop - rows.start
            of_rows = np.zeros((args.heads_q, n_rows * n))
            _add_by_bin(of_rows, places + np.arange(n_rows)[:, None] * n, call.dbias)
            dproducts = of_rows.reshape(args.heads_q, n_rows, n).astype(x.lane)
            dq[place] += scale * (dproducts @ table)
            queries = shown(x.scaled(x.queries[b][:, rows]), dproducts)
            sums["position_keys"] += dproducts.swapaxes(-1, -2) @ queries
        if "position_queries" in sums:
            _add_by_bin(of_keys, places + keys * n, call.dbias)
            if rows.stop == args.len_q:  # the last of this item
                dproducts = of_keys.reshape(args.heads_q, args.len_k, n).astype(x.lane)
                sums["position_queries"] += dproducts.swapaxes(-1, -2) @ shown(x.scaled_keys(b), dproducts)
                dkeys = scale * (dproducts @ x.tables["position_queries"])
                dk[b] = dkeys.reshape(args.heads_kv, group, *dkeys.shape[-2:]).sum(axis=1)
                of_keys[...] = 0

    uses = {"dbias": ("dbias", "dq", "dk", *(f"d{name}" for name in sums))}
    _by_rows(chain, args, x.bias_of, saved, add, uses)
    chain.add("dk", dk)
    chain.add("dq", dq)
    for name, total in sums.items():
        chain.add(f"d{name}", total)
    return chain.results()


def _add_by_bin(sums: Array, bins: Array, x: Array) -> None:
    """Add x (heads, rows, keys) to sums (heads, n), by the number in bins (rows, keys), in float64."""
    for total, each in zip(sums, x, strict=True):
        total += np.bincount(bins.ravel(), each.ravel(), len(total))


def _by_rows(
    chain: Chain,
    args: AttentionArgs,
    bias_of: Callable[[tuple[int, ...], slice], Array],
    saved: tuple[Array, Any],
    add: Callable[[tuple[int, ...], slice, Any], None],
    uses: Mapping[str, Sequence[str]],
) -> None:
    """Differentiate the calls of `attend_by_rows`; `add` takes the gradients of q and of the bias.

    `uses` is as in `Chain.attend`.
    """
    dout, dlse = saved
    lane = lane_dtype(args.q.dtype)
    keys = (*args.batch_shape, args.heads_kv, args.len_k)
    dk, dv = (np.zeros((*keys, n), lane) for n in (args.head_dim, args.head_dim_v))
    dbias = np.zeros(args.bias.shape, lane) if args.bias is not None and chain.wants("dbias") else None
    if args.len_k:
        for b, rows, part in parts_by_rows(args, bias_of):
            place: Any = (*b, slice(None), rows)
            own = None if dlse is None else dlse[place]
            call = chain.attend(part, dout[place], own, (b, args.batch_shape), uses)
            add_up(dk[b], call.dk)
            add_up(dv[b], call.dv)
            if dbias is not None:
                add_to(dbias, b, (slice(None), rows, slice(None)), call.dbias)
            add(b, rows, call)
    else:  # of sinks alone
        chain.attend(args, dout, dlse)
    for name, x in (("dk", dk), ("dv", dv), ("dbias", dbias)):
        chain.add(name, x)
