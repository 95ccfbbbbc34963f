"""A ragged call of attention, sequence by sequence."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from itertools import pairwise

import numpy as np

from fastattn._args.types import AttentionArgs, BackwardArgs


def sequences(args: AttentionArgs) -> Iterator[AttentionArgs]:
    """A call of its own for each sequence of a ragged one."""
    assert args.begins is not None
    bounds = list(zip(*(pairwise(begins.tolist()) for begins in args.begins), strict=True))
    of_heads = {
        name: np.broadcast_to(x, (len(bounds), x.shape[-1]))
        for name in ("sinks", "alibi_slopes")
        if (x := getattr(args, name)) is not None
    }
    for i, ((q0, q1), (k0, k1)) in enumerate(bounds):
        part = args.cut(len_q=slice(q0, q1), len_k=slice(k0, k1))
        part.first, part.begins, part.batch_shape = args.first + i, None, ()
        part.bias = None if args.bias is None else args.bias[:, : part.len_q, : part.len_k]
        for name, x in of_heads.items():
            setattr(part, name, x[i])
        part.q_position = None if args.q_position is None else args.q_position[i]
        yield part


def backward_sequences(args: BackwardArgs) -> Iterator[BackwardArgs]:
    """The gradients of each sequence of a ragged call."""
    forward = args.attention
    assert forward.begins is not None
    bounds = zip(*(pairwise(begins) for begins in forward.begins), strict=True)
    for i, (sequence, ((q0, q1), (k0, k1))) in enumerate(zip(sequences(forward), bounds, strict=True)):
        part = copy(args)
        part.attention, part.dout = sequence, args.dout[:, q0:q1]
        part.dlse = None if args.dlse is None else args.dlse[:, q0:q1]
        part.dq = None if args.dq is None else args.dq[:, q0:q1]
        part.dk = None if args.dk is None else args.dk[:, k0:k1]
        part.dv = None if args.dv is None else args.dv[:, k0:k1]
        part.dsinks = None if args.dsinks is None else args.dsinks[i]
        part.dalibi_slopes = None if args.dalibi_slopes is None else args.dalibi_slopes[i]
        part.dsoftcap = None if args.dsoftcap is None else args.dsoftcap[i]
        yield part
