"""The arguments of linear attention's gradient, checked and normalised."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._args.errors import wrong_dtype, wrong_shape
from fastattn._args.grad import needed
from fastattn._args.ops import like
from fastattn._args.recurrent import pair, recurrent_args
from fastattn._args.recurrent_types import RecurrentBackwardArgs
from fastattn._args.types import Array, lane_dtype
from fastattn._args.values import operand

# Gradients that can be asked for.
GRADIENTS = ("dq", "dk", "dv", "dlog_decay", "dbeta", "derase", "dstate", "dscale")


def recurrent_backward_args(
    dout: Any, q: Any, k: Any, v: Any, need: Any, dstate_out: Any, **forward: Any
) -> RecurrentBackwardArgs:
    """Check the arguments of a gradient; `forward` are those of `recurrent_args` without results."""
    args = recurrent_args(q, k, v, **forward)
    normalize = forward.get("normalize", False)
    wanted = needed(need, GRADIENTS)
    for name in ("dlog_decay", "dbeta", "derase"):
        if name in wanted and forward.get(name[1:]) is None:
            raise ValueError(f"(): need has {name}, but {name[1:]} is not given")
    lane, dtype = lane_dtype(args.q.dtype), args.out.dtype
    cotangent = operand("dout", dout, [])
    if cotangent.dtype != dtype:
        raise wrong_dtype("dout", cotangent, f"{dtype}, that of the result")
    if cotangent.shape != args.out.shape:
        raise wrong_shape("dout", cotangent, args.out.shape)
    states = pair("dmore", dstate_out, normalize)
    shape = args.state_out.shape
    dstate = like("dmore", states[0], shape, lane)
    dnorm = like("dmore[1]", states[1], shape[:-1], lane)

    scaled = "dscale" not in wanted

    def room(name: str, x: Array | None, heads: int, *sizes: int) -> Array | None:
        """Memory for a gradient of each state: in x's dtype if nothing is to be added up, else in lanes."""
        full = (*(args.batch_shape if name == "dstate" else args.out.shape[:-3]), heads, *sizes)
        if name not in wanted and (name != "dq" or scaled):
            return None
        return np.empty(full, x.dtype if x is not None and x.shape == full else lane)

    heads, len_k = args.heads, args.len_k
    return RecurrentBackwardArgs(
        args, cotangent, dstate, dnorm,
        room("dq", args.q if scaled else None, max(args.heads_q, heads), args.len_q, args.head_dim),
        room("dk", args.k, heads, len_k, args.head_dim),
        room("dv", args.v, heads, len_k, args.head_dim_v),
        room("dlog_decay", None, heads, len_k, *((args.head_dim,) if args.gated else ())),
        room("dbeta", None, heads, len_k),
        room("derase", args.erase, heads, len_k, args.head_dim),
        room("dstate", None, heads, args.head_dim, args.head_dim_v),
        room("dstate", None, heads, args.head_dim) if normalize else None,
        args.scale if scaled else 1.0,
    )  # fmt: skip
