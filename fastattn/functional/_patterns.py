"""Patterns of single keys, at the cost of the keys: dilated windows and strides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from fastattn._args.attention import attention_args
from fastattn._args.options import StridedOptions
from fastattn._args.values import integer
from fastattn._args.variants import variant_args
from fastattn._engine import dispatch
from fastattn.functional._pieces import apart, join

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.options import StridedInnerOptions
    from fastattn._args.types import Array, AttentionArgs, Ints


@overload
def dilated_window_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    window: int,
    dilation: int,
    causal: bool = False,
    return_lse: Literal[False] = False,
    **options: Unpack[StridedOptions],
) -> Array: ...
@overload
def dilated_window_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    window: int,
    dilation: int,
    causal: bool = False,
    return_lse: Literal[True],
    **options: Unpack[StridedOptions],
) -> tuple[Array, Array]: ...
def dilated_window_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    window: int,
    dilation: int,
    causal: bool = False,
    return_lse: bool = False,
    **options: Unpack[StridedOptions],
) -> Any:
    """Longformer's dilated sliding window: keys with ``abs(i - j) <= window * dilation``, every dilation-th.

    What ``attention(mask=masks.dilated(window, dilation))`` gives, at the cost of the keys attended.

    Parameters
    ----------
    q, k, v, return_lse
        As in `attention`, like the results and errors; k as long as q.
    window : int
        How many keys are attended to either side.
    dilation : int
        Their distance.
    causal : bool, default False
        Only keys up to the query's own.
    **options
        scale, softcap, sinks, out, num_threads and backend of `attention`.

    Notes
    -----
    Keys at multiples of the distance are another sequence, ``k[..., r::dilation, :]``, in which the window
    has no gaps: as many calls of `attention` on views, O(len_q * window * head_dim) a head together. Source:
    I. Beltagy, M. E. Peters, A. Cohan, "Longformer: The Long-Document Transformer", 2020, arXiv:2004.05150.
    """
    func = "dilated_window_attention"
    args = self_args(func, q, k, v, options, StridedOptions, return_lse)
    window, step = integer(func, "window", window, 0), integer(func, "dilation", dilation, 1)
    _attend_interleaved(args, func, step, options, causal=causal, window=(window, window))
    return args.result


@overload
def strided_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    stride: int,
    return_lse: Literal[False] = False,
    **options: Unpack[StridedOptions],
) -> Array: ...
@overload
def strided_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    stride: int,
    return_lse: Literal[True],
    **options: Unpack[StridedOptions],
) -> tuple[Array, Array]: ...
def strided_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    stride: int,
    return_lse: bool = False,
    **options: Unpack[StridedOptions],
) -> Any:
    """The strided pattern of Sparse Transformers: the last ``stride`` keys, and every stride-th before.

    What ``attention(mask=masks.strided(stride))`` gives, at the cost of the keys attended. Causal.

    Parameters
    ----------
    q, k, v, return_lse, **options
        As in `dilated_window_attention`, like the results and errors.
    stride : int
        Query i attends keys j <= i with ``i - j <= stride`` or ``i - j`` a multiple of it.

    Notes
    -----
    A window, and what is further away, of ``stride`` interleaved sequences, on views: two results that are
    joined by their lse. O(len_q * (stride + len_k / stride) * head_dim) a head.
    Source: R. Child et al., "Generating Long Sequences with Sparse Transformers", 2019, arXiv:1904.10509.
    """
    func = "strided_attention"
    args = self_args(func, q, k, v, options, StridedOptions, return_lse)
    step = integer(func, "stride", stride, 1)
    near = apart(attention_args(func, q, k, v, **options, window=(step, 0)))
    far = apart(args)
    dispatch.run(near, options.get("backend"))
    ranges = far_ranges(args.len_q, step)
    _attend_interleaved(far, func, step, {**options, "sinks": None}, row_ranges=ranges)
    join((near, far), args)
    return args.result


def self_args(
    func: str, q: Any, k: Any, v: Any, options: StridedInnerOptions, taken: type, return_lse: bool
) -> AttentionArgs:
    """The arguments of attention of a sequence to itself."""
    args = variant_args(func, q, k, v, options, taken, return_lse)
    if args.len_q != args.len_k:
        raise ValueError(f"{func}(): k has a length of {args.len_k}; expected q's, {args.len_q}")
    return args


def interleaved(
    args: AttentionArgs,
    func: str,
    step: int,
    options: StridedInnerOptions,
    row_ranges: Any = None,
    **more: Any,
) -> Iterator[tuple[slice, AttentionArgs]]:
    """Attention within each of the `step` sequences of every step-th token: which these are, and the call.

    Its `out` is a part of that of `args`.
    """
    rest: Any = {name: x for name, x in options.items() if name != "out"}
    for first in range(min(step, args.len_q)):
        tokens = slice(first, None, step)
        q, k, v, out = (x[..., tokens, :] for x in (args.q, args.k, args.v, args.out))
        if row_ranges is not None:
            more["row_ranges"] = tuple(x[: q.shape[-2]] for x in row_ranges)
        with_lse = args.lse is not None
        yield tokens, attention_args(func, q, k, v, out=out, return_lse=with_lse, **rest, **more)


def far_ranges(len_q: int, step: int) -> tuple[Ints, Ints]:
    """Range of each query of an interleaved sequence: the window has itself and the one before."""
    row = np.arange(-(-len_q // step))
    return row * 0, row - 1


def _attend_interleaved(
    args: AttentionArgs, func: str, step: int, options: StridedOptions, **more: Any
) -> None:
    """Fill the results of `args`."""
    for tokens, part in interleaved(args, func, step, options, **more):
        dispatch.run(part, options.get("backend"))
        if args.lse is not None:
            args.lse[..., tokens] = part.lse
