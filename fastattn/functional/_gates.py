"""Gates: on the result of a head, and on what it remembers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn import ops
from fastattn._args.backward import summed_to
from fastattn._args.errors import wrong_dtype
from fastattn._args.options import ForgettingOptions, VariantOptions
from fastattn._args.types import FLOAT64, Array, ArrayLike, AttentionArgs, Ints, Unpack, lane_dtype
from fastattn._args.values import float_array, real_array, require_broadcast
from fastattn._args.variants import how, offsets, variant_args, with_shape
from fastattn._engine import dispatch
from fastattn.functional._composed_gradients import ComposedGradients, add_up, cotangents
from fastattn.functional._differentiable import Steps, differentiable
from fastattn.functional._split_calls import add_bias, rows_of

if TYPE_CHECKING:
    from fastattn._args.options import ComputeOptions, PlaceOptions

# Query rows that share a point of reference for the sums of `forgetting_attention`.
_ROWS = 512


@differentiable("q", "k", "v", "gate", options=VariantOptions)
def gated_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    gate: ArrayLike,
    *,
    return_lse: bool = False,
    **options: Unpack[VariantOptions],
) -> Steps[Any]:
    """Gated attention: ``attention(q, k, v) * sigmoid(gate)``.

    Parameters
    ----------
    q, k, v, return_lse
        As in `attention`, like the results and errors.
    gate : array_like, (..., heads_q, len_q, head_dim_v) or (..., heads_q, len_q, 1)
        Logits, of the layer's input; the second form is one gate a head. q's dtype.
    **options
        Keyword arguments of `attention`, but stats.

    Notes
    -----
    `attention`, and one pass over the result. `layers.MultiHeadAttention` has it as ``output_gate=True``.
    Source: Z. Qiu et al., "Gated Attention for Large Language Models", 2025, arXiv:2505.06708.
    """
    args = variant_args(q, k, v, options, VariantOptions, return_lse)
    share = _shares(args, gate, options)
    dispatch.run(args, options.get("backend"))
    np.multiply(args.out, share, out=args.out)
    request = yield args.result

    found = ComposedGradients(request, options)
    dout, dlse = cotangents(args, request)
    lane = lane_dtype(args.q.dtype)
    share, dout, gated = share.astype(lane), dout.astype(lane), args.out.astype(lane)
    terms = np.where(gated == 0, 0, dout * gated)  # a row without keys has no gradient
    found.add("dgate", terms * (1 - share))
    # The kernels need the sum over features of dout * out of attention itself: it is that of `terms`, which
    # dlse carries. A row of zeros stands for out; its last axis is one that kernels read.
    args.out = np.broadcast_to(np.zeros(args.out.shape[-1], args.out.dtype), args.out.shape)
    dlse = (0 if dlse is None else dlse) - terms.sum(axis=-1)
    found.add_all(found.attend(args, dout * share, dlse))
    return found.results()


def _shares(args: AttentionArgs, gate: Any, options: ComputeOptions) -> Array:
    """Sigmoids of the gates, which broadcast to the result."""
    logits = float_array("gate", gate)
    if logits.dtype.newbyteorder("=") != args.q.dtype:
        raise wrong_dtype("gate", logits, f"q's, {args.q.dtype}")
    dims = "(..., heads_q, len_q, head_dim_v), or 1 for the last,"
    require_broadcast("gate", logits.shape, args.out.shape, dims)
    return ops.activate(np.atleast_1d(logits), "sigmoid", **how(options))


@differentiable("q", "k", "v", "log_forget", options=ForgettingOptions, own_bias=False)
def forgetting_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    log_forget: ArrayLike,
    *,
    return_lse: bool = False,
    **options: Unpack[ForgettingOptions],
) -> Steps[Any]:
    """Attention of the Forgetting Transformer: ``softmax(scale * q_i k_j + sum of log f_t, j < t <= i) @ v``.

    Parameters
    ----------
    q, k, v, return_lse
        As in `attention`, which is causal here.
    log_forget : array_like, (..., heads_q, len_k)
        Logarithms of the forget gates, ``log_sigmoid(x W)``: finite, 0 or less. Of all keys, those of a cache
        included.
    **options
        Keyword arguments of `attention`, but causal, sinks and stats.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    The bias is a difference of two sums from the first key on, c_i - c_j, and c_i, the same for all keys,
    changes lse alone. So it is a bias of keys, O(len_k), and nothing of the size of the scores. Sums are
    taken in float64, and relative to one of the middle of 512 queries: what rounding to float32 adds to a
    score that counts is about ``256 * max(-log_forget)`` times 6e-8, whatever the length. Source: Z. Lin et
    al., "Forgetting Transformer: Softmax Attention with a Forget Gate", 2025, arXiv:2503.02130.
    """
    args = variant_args(q, k, v, options, ForgettingOptions, return_lse, causal=True)
    sums, position = _sums_of_gates(args, log_forget, options)
    for part in _parts(args, sums, position):
        dispatch.run(part.args, options.get("backend"))
        if part.args.lse is not None:
            part.args.lse += part.own
    if not args.len_k:
        dispatch.run(args, options.get("backend"))
    request = yield args.result

    found = ComposedGradients(request, options)
    dout, dlse = cotangents(args, request)
    heads, lane = (*args.batch_shape, args.heads_q), lane_dtype(args.q.dtype)
    keys = (*args.batch_shape, args.heads_kv, args.len_k)
    dq = np.zeros((*heads, args.len_q, args.head_dim), lane)
    dk, dv = (np.zeros((*keys, n), lane) for n in (args.head_dim, args.head_dim_v))
    dbias = np.zeros(args.bias.shape, lane) if args.bias is not None and found.wants("dbias") else None
    dsums = np.zeros((*heads, args.len_k))
    for part in _parts(args, sums, position):
        lse: Any = part.args.lse
        part.args.lse = (lse - part.own).astype(lane)
        own = None if dlse is None else dlse[..., part.rows]
        call = found.attend(part.args, dout[..., part.rows, :], own, uses={"dbias": ("dbias", "dlog_forget")})
        if call.dq is not None:
            dq[..., part.rows, :] = call.dq
        add_up(dk, call.dk)
        add_up(dv, call.dv)
        if call.dbias is None:
            continue
        dsums -= call.dbias.sum(axis=-2, dtype=float)
        if dbias is not None:
            place = (..., slice(None) if dbias.shape[-2] == 1 else part.rows, slice(None))
            dbias[place] += summed_to(dbias[place].shape, call.dbias)
        if own is not None:  # lse has the query's own sum, which the bias has not
            _add_at(dsums, part.position, np.where(lse == -np.inf, 0, own))
    # A gate is in the sums of its own key and of all later ones.
    found.add("dlog_forget", np.cumsum(dsums[..., ::-1], axis=-1)[..., ::-1])
    for name, x in (("dq", dq), ("dk", dk), ("dv", dv), ("dbias", dbias)):
        found.add(name, x)
    return found.results()


class _Part(NamedTuple):
    """Some query rows, as a call of attention with a bias of keys."""

    args: AttentionArgs
    rows: slice
    own: Array  # (..., heads_q, rows): what is missing in its lse
    position: Ints  # the same shape: the keys that rows stand at


def _sums_of_gates(args: AttentionArgs, log_forget: Any, options: PlaceOptions) -> tuple[Array, Ints]:
    """Sums of gates up to each key (..., heads_q, len_k); the key at each query (..., heads_q, len_q)."""
    shape = (*args.batch_shape, args.heads_q, args.len_k)
    given = real_array("log_forget", log_forget).astype(FLOAT64)
    given = with_shape("log_forget", given, shape, "(..., heads_q, len_k)", 1, FLOAT64)
    if given.size and not (given.max() <= 0 and np.isfinite(given).all()):
        raise ValueError("(): log_forget is above 0 or not finite; expected finite numbers, 0 or less")
    sums = np.broadcast_to(np.cumsum(given, axis=-1), shape)
    position = offsets(args, options)[..., None, None] + np.arange(args.len_q)
    position = np.clip(position, 0, max(args.len_k - 1, 0))  # queries beyond attend all keys or none
    return sums, np.broadcast_to(position, (*shape[:-1], args.len_q))


def _parts(args: AttentionArgs, sums: Array, position: Ints) -> Iterator[_Part]:
    """The calls of attention that forgetting attention is; none without keys."""
    for first in range(0, args.len_q if args.len_k else 0, _ROWS):
        rows = slice(first, min(first + _ROWS, args.len_q))
        part = rows_of(args, rows)
        own = np.take_along_axis(sums, position[..., rows], -1)
        middle = own[..., own.shape[-1] // 2, None]
        add_bias(part, (middle - sums)[..., None, :])
        yield _Part(part, rows, own - middle, position[..., rows])


def _add_at(sums: Array, position: Ints, x: Array) -> None:
    """sums[..., position] += x, row by row; a position may come again."""
    for row in np.ndindex(sums.shape[:-1]):
        np.add.at(sums[row], position[row], x[row])
