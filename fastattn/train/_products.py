"""Products of small matrices by our own kernels: their bits depend on no number of threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fastattn import ops
from fastattn._args.grad_types import OuterArgs
from fastattn._engine import dispatch
from fastattn._engine.settings import get_num_threads

if TYPE_CHECKING:
    from fastattn._args.types import Array


def product(a: Array, b: Array, added: Array | None = None) -> Array:
    """``a @ b``, plus `added`; all are float32, or all float64."""
    return ops.linear(a, ops.pack(b.T), residual=added)


def outer(a: Array, b: Array) -> Array:
    """``a.T @ b``."""
    out = np.zeros((a.shape[1], b.shape[1]), a.dtype)
    args = OuterArgs(np.ascontiguousarray(a), np.ascontiguousarray(b), out, None, get_num_threads())
    if not args.empty:
        dispatch.run_grad(args)
    return out
