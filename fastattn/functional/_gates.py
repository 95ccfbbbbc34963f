"""Gates: on what a head gives, and on what it remembers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np

from fastattn import ops
from fastattn._args.errors import wrong_dtype
from fastattn._args.options import ForgettingOptions, VariantOptions
from fastattn._args.types import FLOAT64
from fastattn._args.values import float_array, real_array, require_broadcast
from fastattn._args.variants import how, offsets, variant_args, with_shape
from fastattn._engine import dispatch
from fastattn.functional._pieces import add_bias, rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.options import ComputeOptions, PlaceOptions
    from fastattn._args.types import Array, AttentionArgs, Ints

# Query rows that share a point of reference for the sums of `forgetting_attention`.
_ROWS = 512


@overload
def gated_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    gate: ArrayLike,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[VariantOptions],
) -> Array: ...
@overload
def gated_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    gate: ArrayLike,
    *,
    return_lse: Literal[True],
    **options: Unpack[VariantOptions],
) -> tuple[Array, Array]: ...
def gated_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    gate: ArrayLike,
    *,
    return_lse: bool = False,
    **options: Unpack[VariantOptions],
) -> Any:
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
    func = "gated_attention"
    args = variant_args(func, q, k, v, options, VariantOptions, return_lse)
    share = gate_shares(func, args, gate, options)
    dispatch.run(args, options.get("backend"))
    np.multiply(args.out, share, out=args.out)
    return args.result


def gate_shares(func: str, args: AttentionArgs, gate: Any, options: ComputeOptions) -> Array:
    """What the gates leave of the result, which they broadcast to."""
    logits = float_array(func, "gate", gate)
    if logits.dtype.newbyteorder("=") != args.q.dtype:
        raise wrong_dtype(func, "gate", logits, f"q's, {args.q.dtype}")
    dims = "(..., heads_q, len_q, head_dim_v), or 1 for the last,"
    require_broadcast(func, "gate", logits.shape, args.out.shape, dims)
    return ops.activate(np.atleast_1d(logits), "sigmoid", **how(options))


@overload
def forgetting_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    log_forget: ArrayLike,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[ForgettingOptions],
) -> Array: ...
@overload
def forgetting_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    log_forget: ArrayLike,
    *,
    return_lse: Literal[True],
    **options: Unpack[ForgettingOptions],
) -> tuple[Array, Array]: ...
def forgetting_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    log_forget: ArrayLike,
    *,
    return_lse: bool = False,
    **options: Unpack[ForgettingOptions],
) -> Any:
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
    func = "forgetting_attention"
    args = variant_args(func, q, k, v, options, ForgettingOptions, return_lse, causal=True)
    for part in forgetting_parts(func, args, log_forget, options):
        dispatch.run(part.args, options.get("backend"))
        if part.args.lse is not None:
            part.args.lse += part.own
    if not args.len_k:
        dispatch.run(args, options.get("backend"))
    return args.result


class ForgettingPart(NamedTuple):
    """Some query rows, as a call of attention with a bias of keys."""

    args: AttentionArgs
    rows: slice
    own: Array  # (..., heads_q, rows): what is missing in its lse
    position: Ints  # the same shape: the keys that rows stand at


def forgetting_parts(
    func: str, args: AttentionArgs, log_forget: Any, options: PlaceOptions
) -> Iterator[ForgettingPart]:
    """The calls of attention that forgetting attention is; of no keys none."""
    shape = (*args.batch_shape, args.heads_q, args.len_k)
    given = real_array(func, "log_forget", log_forget).astype(FLOAT64)
    given = with_shape(func, "log_forget", given, shape, "(..., heads_q, len_k)", 1, FLOAT64)
    if given.size and not (given.max() <= 0 and np.isfinite(given).all()):
        raise ValueError(f"{func}(): log_forget is above 0 or not finite; expected finite numbers, 0 or less")
    sums = np.broadcast_to(np.cumsum(given, axis=-1), shape)
    position = offsets(args, options)[..., None, None] + np.arange(args.len_q)
    position = np.clip(position, 0, max(args.len_k - 1, 0))  # what is beyond attends all keys or none
    position = np.broadcast_to(position, (*shape[:-1], args.len_q))

    def parts() -> Iterator[ForgettingPart]:
        for first in range(0, args.len_q if args.len_k else 0, _ROWS):
            rows = slice(first, min(first + _ROWS, args.len_q))
            part = rows_of(args, rows)
            at = position[..., rows]
            own = np.take_along_axis(sums, at, -1)
            middle = own[..., own.shape[-1] // 2, None]
            add_bias(part, (middle - sums)[..., None, :])
            yield ForgettingPart(part, rows, own - middle, at)

    return parts()
