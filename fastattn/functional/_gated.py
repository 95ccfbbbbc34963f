"""Gates of the results of heads."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn import ops
from fastattn._args.errors import wrong_dtype
from fastattn._args.options import VariantOptions
from fastattn._args.types import Array, ArrayLike, AttentionArgs, Unpack, lane_dtype
from fastattn._args.values import float_array, require_broadcast
from fastattn._args.variants import how, variant_args
from fastattn._engine import dispatch
from fastattn.functional._composed_gradients import ComposedGradients, cotangents
from fastattn.functional._differentiable import Steps, differentiable


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
    """Gated attention, ``attention(q, k, v) * sigmoid(gate)``.

    Parameters
    ----------
    q, k, v, return_lse
        As in `attention`, also for results and errors.
    gate : array_like, (..., heads_q, len_q, head_dim_v) or (..., heads_q, len_q, 1)
        Logits, computed from the layer's input; per feature or per head. q's dtype.
    **options
        Keyword arguments of `attention` except stats.

    Notes
    -----
    `attention` and one pass over the result; ``output_gate=True`` in `layers.MultiHeadAttention`. Source: Z.
    Qiu et al., "Gated Attention for Large Language Models", 2025, arXiv:2505.06708.
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


def _shares(args: AttentionArgs, gate: Any, options: VariantOptions) -> Array:
    """Sigmoids of the gates, which broadcast to the result."""
    logits = float_array("gate", gate)
    if logits.dtype.newbyteorder("=") != args.q.dtype:
        raise wrong_dtype("gate", logits, f"q's, {args.q.dtype}")
    dims = "(..., heads_q, len_q, head_dim_v), or 1 for the last,"
    require_broadcast("gate", logits.shape, args.out.shape, dims)
    return ops.activate(np.atleast_1d(logits), "sigmoid", **how(options))
