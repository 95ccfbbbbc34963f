"""The gradients of attention that needs a whole row of scores at a time: their arguments, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.backward import gradient_names, gradients, like_result
from fastattn._args.types import RowwiseArgs, RowwiseBackwardArgs, lane_dtype

if TYPE_CHECKING:
    from fastattn._args.backward import Gradients


def rowwise_backward_args(
    args: RowwiseArgs, dout: Any, given: Mapping[str, Any], need: Sequence[str]
) -> Gradients:
    """Check dout and need; `given` holds by name what the caller passed, of all that can have a gradient."""
    names = gradient_names(need, given)
    forward = args.attention
    shape = np.shape(forward.result)
    cotangent = like_result("dout", dout, forward, shape, [])
    scale = 1.0 if "dscale" in names else forward.scale
    backward = RowwiseBackwardArgs(forward, cotangent, dq_factor=scale, rowwise=args)
    found = gradients(backward, names, given)
    lane = lane_dtype(forward.q.dtype)
    for each in found.wanted:
        if each.name in ("dk", "dv"):
            if each.sums.dtype != lane:
                each.sums = np.empty(each.sums.shape, lane)
            each.sums[...] = 0
            setattr(backward, each.name, each.sums)
    return found
