"""The gradients of gates: of that on what a head gives, and of that on what it remembers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.backward import summed_to
from fastattn._args.options import ForgettingInnerOptions, InnerOptions
from fastattn._args.types import lane_dtype
from fastattn._args.variants import variant_args
from fastattn.functional._chain import NEED, Chain, add_up
from fastattn.functional._gates import forgetting_parts, gate_shares

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.types import Array, Ints


@np.errstate(all="ignore")  # as in the kernels
def gated_attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    gate: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    dlse: ArrayLike | None = None,
    need: Sequence[str] = (*NEED, "dgate"),
    **options: Unpack[InnerOptions],
) -> tuple[Any, ...]:
    """Gradients of `gated_attention`.

    Parameters
    ----------
    dout, out, lse, dlse
        As in `attention_backward`: out and lse are what the forward pass returned with ``return_lse=True``.
    q, k, v, gate, **options
        As they were given to `gated_attention`, but for `out`.
    need : tuple of str, default ("dq", "dk", "dv", "dgate")
        As in `attention_backward`, with ``"dgate"``.

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
    `attention_backward`, and passes over the result in NumPy.
    """
    func = "gated_attention_backward"
    args = variant_args(func, q, k, v, options, InnerOptions, True)
    chain = Chain(func, need, {"q": q, "k": k, "v": v, "gate": gate}, options, InnerOptions)
    cotangent, slope = chain.saved(args, dout, out, lse, dlse)
    lane = lane_dtype(args.q.dtype)
    share = gate_shares(func, args, gate, options).astype(lane)
    cotangent, gated = cotangent.astype(lane), args.out.astype(lane)
    terms = np.where(gated == 0, 0, cotangent * gated)  # a row without keys has no gradient
    chain.add("dgate", terms * (1 - share))
    # What attention gave is not there, but its sum with its gradient, which alone is needed, is that of both.
    # A row of zeros for all: the last axis is one that kernels read.
    args.out = np.broadcast_to(np.zeros(args.out.shape[-1], args.out.dtype), args.out.shape)
    slope = (0 if slope is None else slope) - terms.sum(axis=-1)
    call = chain.attend(args, cotangent * share, slope)
    for name in NEED:
        chain.add(name, getattr(call, name))
    return chain.results()


@np.errstate(all="ignore")  # as in the kernels
def forgetting_attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    log_forget: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    dlse: ArrayLike | None = None,
    need: Sequence[str] = (*NEED, "dlog_forget"),
    **options: Unpack[ForgettingInnerOptions],
) -> tuple[Any, ...]:
    """Gradients of `forgetting_attention`.

    Parameters
    ----------
    dout, out, lse, dlse
        As in `attention_backward`.
    q, k, v, log_forget, **options
        As they were given to `forgetting_attention`, but for `out`.
    need : tuple of str, default ("dq", "dk", "dv", "dlog_forget")
        As in `attention_backward`, with ``"dlog_forget"``, without ``"dbias_diagonals"``.

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
    `attention_backward` of 512 queries at a time. The gradient of a sum of gates is that of a key's bias, and
    that of a gate the sum of those behind it, taken in float64.
    """
    func = "forgetting_attention_backward"
    args = variant_args(func, q, k, v, options, ForgettingInnerOptions, True, causal=True)
    given = {"q": q, "k": k, "v": v, "log_forget": log_forget}
    chain = Chain(func, need, given, options, ForgettingInnerOptions, bias=False)
    cotangent, slope = chain.saved(args, dout, out, lse, dlse)
    heads, lane = (*args.batch_shape, args.heads_q), lane_dtype(args.q.dtype)
    queries, keys = (*heads, args.len_q), (*args.batch_shape, args.heads_kv, args.len_k)
    dq = np.zeros((*queries, args.head_dim), lane)
    dk, dv = (np.zeros((*keys, n), lane) for n in (args.head_dim, args.head_dim_v))
    dbias = np.zeros(args.bias.shape, lane) if args.bias is not None and chain.wants("dbias") else None
    dsums = np.zeros((*heads, args.len_k))
    for part in forgetting_parts(func, args, log_forget, options):
        rows: Any = part.args.lse
        part.args.lse = (rows - part.own).astype(lane)
        own = None if slope is None else slope[..., part.rows]
        uses = {"dbias": ("dbias", "dlog_forget")}
        call = chain.attend(part.args, cotangent[..., part.rows, :], own, uses=uses)
        if call.dq is not None:
            dq[..., part.rows, :] = call.dq
        for total, x in ((dk, call.dk), (dv, call.dv)):
            add_up(total, x)
        dscores: Any = call.dbias
        if dscores is None:
            continue
        dsums -= dscores.sum(axis=-2, dtype=float)
        if dbias is not None:
            of_rows = slice(None) if dbias.shape[-2] == 1 else part.rows
            dbias[..., of_rows, :] += summed_to(dbias[..., of_rows, :].shape, dscores)
        if own is not None:  # of the query's own sum, which lse has and the bias has not
            _add_at(dsums, part.position, np.where(rows == -np.inf, 0, own))
    chain.add("dlog_forget", np.cumsum(dsums[..., ::-1], axis=-1)[..., ::-1])
    for name, x in (("dq", dq), ("dk", dk), ("dv", dv), ("dbias", dbias)):
        chain.add(name, x)
    return chain.results()


def _add_at(sums: Array, position: Ints, x: Array) -> None:
    """sums[..., position] += x, row by row; positions may come again."""
    for row in np.ndindex(sums.shape[:-1]):
        np.add.at(sums[row], position[row], x[row])
