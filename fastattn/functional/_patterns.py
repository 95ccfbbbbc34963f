"""Patterns of single keys, at the cost of the keys: dilated windows and strides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastattn._args.attention import attention_args
from fastattn._args.options import StridedOptions
from fastattn._args.types import Array, ArrayLike, AttentionArgs, Unpack, lane_dtype
from fastattn._args.values import integer
from fastattn._args.variants import variant_args
from fastattn._engine import dispatch
from fastattn.functional._composed_gradients import ComposedGradients, cotangents
from fastattn.functional._differentiable import Steps, differentiable
from fastattn.functional._split_calls import apart, join


@differentiable("q", "k", "v", options=StridedOptions)
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
) -> Steps[Any]:
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
    args = _self_args(q, k, v, options, return_lse)
    width, step = integer("window", window, 0), integer("dilation", dilation, 1)
    parts = _Interleaved(args, step, options, {"causal": causal, "window": (width, width)})
    parts.attend()
    request = yield args.result

    found = ComposedGradients(request, options)
    parts.add_gradients(found, *cotangents(args, request))
    return found.results()


@differentiable("q", "k", "v", options=StridedOptions)
def strided_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    stride: int,
    return_lse: bool = False,
    **options: Unpack[StridedOptions],
) -> Steps[Any]:
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
    args = _self_args(q, k, v, options, return_lse)
    step = integer("stride", stride, 1)
    near = apart(attention_args(q, k, v, **options, window=(step, 0)))
    dispatch.run(near, options.get("backend"))
    row = np.arange(-(-args.len_q // step))  # the window has the row itself and the one before
    far = _Interleaved(apart(args), step, {**options, "sinks": None}, {"row_ranges": (row * 0, row - 1)})
    far.attend()
    join((near, far.args), args)
    request = yield args.result

    found = ComposedGradients(request, options)
    near.out, near.lse, far.args = args.out, args.lse, args  # both parts have the whole's out and lse
    found.add_all(found.attend(near, *cotangents(args, request)))
    far.add_gradients(found, *cotangents(args, request))
    return found.results()


def _self_args(q: Any, k: Any, v: Any, options: StridedOptions, return_lse: bool) -> AttentionArgs:
    """The arguments of attention of a sequence to itself."""
    args = variant_args(q, k, v, options, StridedOptions, return_lse)
    if args.len_q != args.len_k:
        raise ValueError(f"(): k has a length of {args.len_k}; expected q's, {args.len_q}")
    return args


@dataclass(slots=True)
class _Interleaved:
    """Attention within each of the `step` sequences of every step-th token: calls on views of `args`."""

    args: AttentionArgs  # the whole, whose results the calls fill
    step: int
    options: Any
    places: dict[str, Any]  # more arguments; row_ranges are those of the longest sequence

    def attend(self) -> None:
        """Compute all results."""
        for tokens, part in self._calls():
            dispatch.run(part, self.options.get("backend"))
            if self.args.lse is not None:
                self.args.lse[..., tokens] = part.lse

    def add_gradients(self, found: ComposedGradients, dout: Array, dlse: Array | None) -> None:
        """Add the gradients of all calls."""
        args, lse = self.args, self.args.lse
        lead, lane = args.batch_shape, lane_dtype(args.q.dtype)
        sums = {
            "dq": np.zeros((*lead, args.heads_q, args.len_q, args.head_dim), lane),
            "dk": np.zeros((*lead, args.heads_kv, args.len_q, args.head_dim), lane),
            "dv": np.zeros((*lead, args.heads_kv, args.len_q, args.head_dim_v), lane),
        }
        assert lse is not None
        for tokens, part in self._calls():
            part.lse = lse[..., tokens]
            own = None if dlse is None else dlse[..., tokens]
            call = found.attend(part, dout[..., tokens, :], own)
            for name, x in sums.items():
                if found.wants(name):
                    x[..., tokens, :] = getattr(call, name)
        for name, x in sums.items():
            found.add(name, x)

    def _calls(self) -> Iterator[tuple[slice, AttentionArgs]]:
        """Yield tokens and their call, whose `out` is a part of the whole one's."""
        args, more = self.args, dict(self.places)
        rest = {name: x for name, x in self.options.items() if name != "out"}
        for first in range(min(self.step, args.len_q)):
            tokens = slice(first, None, self.step)
            q, k, v, out = (x[..., tokens, :] for x in (args.q, args.k, args.v, args.out))
            if "row_ranges" in more:
                more["row_ranges"] = tuple(x[: q.shape[-2]] for x in self.places["row_ranges"])
            with_lse = args.lse is not None
            yield tokens, attention_args(q, k, v, out=out, return_lse=with_lse, **rest, **more)
