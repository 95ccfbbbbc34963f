"""The argument objects of gradients; as those of `types.py`, checked, normalised, cheap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fastattn._args.packed import PackedLinear
from fastattn._args.recurrent_types import ConvArgs, ScanArgs
from fastattn._args.types import Activation, Array, DeformableArgs, Ints, KernelArgs


@dataclass(slots=True, eq=False)
class RowsGradArgs(KernelArgs):
    """The gradient of one pass over rows (m, n): `kind` says of which. What is None takes no part.

    Arrays (m, n) have x's dtype and contiguous rows at one distance; those of n elements the lane dtype.
    """

    kind: str  # "layer_norm", "rms_norm", "softmax", "activate"
    dout: Array  # (m, n)
    x: Array  # (m, n); of "softmax" its result
    num_threads: int
    dx: Array | None = None  # (m, n), written
    residual: Array | None = None  # (m, n): of the norms, added to x first
    dsum: Array | None = None  # (m, n): of the norms, added to dx
    up: Array | None = None  # (m, n), or (m / h, h n): as RowsArgs has it
    dup: Array | None = None  # likewise, written
    weight: Array | None = None  # (n)
    dweight: Array | None = None  # (n), written
    dbias: Array | None = None  # (n), written
    eps: float = 0.0
    activation: Activation | None = None
    gate_first: bool = False

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute but sums of nothing: NumPy does that."""
        return not self.x.size


def rounds(dtype: np.dtype[Any], weight: PackedLinear) -> bool:
    """Whether x, of this dtype, and dout may be rounded to bfloat16 for the gradient of the weight."""
    return "bfloat16" in (dtype.name, weight.dtype)


@dataclass(slots=True, eq=False)
class OuterArgs(KernelArgs):
    """out (n, k) = a^T b: the sum over rows of outer products. sums (n) = the sum of the rows of a.

    a and b are both float64, or neither is.
    """

    a: Array  # (m, n); contiguous rows at one distance, as those of b and out
    b: Array  # (m, k)
    out: Array | None  # (n, k), lane dtype
    sums: Array | None  # (n), lane dtype
    num_threads: int
    more: bool = False  # out and sums are added to
    pairs: bool = False  # a and b may be rounded to bfloat16, as `rounds` says of a map's gradient

    @property
    def empty(self) -> bool:
        """Whether there is nothing to sum."""
        return not (self.a.size and self.b.size)


@dataclass(slots=True, eq=False)
class LogitsArgs(KernelArgs):
    """The cross-entropy of rows of logits (m, n), lane dtype, and its gradient in their place."""

    logits: Array  # (m, n); rows at one distance. Becomes the gradient, if `factor` is not None
    targets: Ints  # (m), in [0, n)
    loss: Array  # (m), lane dtype, written
    factor: Array | None  # (m), lane dtype: what each row's gradient is times
    label_smoothing: float
    num_threads: int

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.logits.size


@dataclass(slots=True, eq=False)
class DropoutArgs(KernelArgs):
    """out = x (m, n), each element either 0 or times `scale`, as a counter-based generator says."""

    x: Array  # (m, n); contiguous rows at one distance
    out: Array  # the same, x's dtype; may be x
    rate: float  # the share that becomes 0
    scale: float
    seed: int  # 64 bits
    stream: int  # 32 bits
    num_threads: int

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.x.size


@dataclass(slots=True, eq=False)
class ScatterArgs(KernelArgs):
    """Rows order[firsts[p]:firsts[p + 1]] of x are added to row places[p] of out; no place comes twice."""

    x: Array  # (m, n); contiguous rows at one distance
    order: Ints  # (m)
    firsts: Ints  # (number of places + 1)
    places: Ints
    out: Array  # (rows, n), lane dtype; contiguous rows at one distance
    num_threads: int

    @property
    def empty(self) -> bool:
        """Whether there is nothing to add."""
        return not self.x.size


@dataclass(slots=True, eq=False)
class ConvGradArgs(KernelArgs):
    """The gradient of a ConvArgs, whose result is neither read nor written. None is not wanted."""

    forward: ConvArgs
    dout: Array  # of forward.out: its shape and dtype
    dx: Array | None  # x's shape and dtype
    dstate: Array | None  # as forward.state, whether that is None or not; 0 before
    sums: Array | None  # (width + 1, channels), lane dtype, written: dweight transposed, and dbias

    @property
    def empty(self) -> bool:
        """Whether there is nothing to sum."""
        return not self.forward.x.size


@dataclass(slots=True, eq=False)
class ScanGradArgs(KernelArgs):
    """The gradient of a ScanArgs, whose results are neither read nor written. None is not wanted."""

    forward: ScanArgs
    dout: Array  # of forward.out: its shape and dtype
    dstate_out: Array | None  # of forward.state_out; None is 0
    dx: Array | None  # x's shape and dtype, as ddt
    ddt: Array | None
    # Lane dtype, of the shapes of b, c, rates, skip, dt_bias and state_out.
    db: Array | None
    dc: Array | None
    drates: Array | None
    dskip: Array | None
    dbias: Array | None
    dstate: Array | None

    @property
    def empty(self) -> bool:
        """Whether there is no token: a state's gradient passes, and the others are 0."""
        return not self.forward.x.size


@dataclass(slots=True, eq=False)
class DeformableGradArgs(KernelArgs):
    """The gradient of a DeformableArgs, whose result is neither read nor written. None is not wanted.

    Arrays have all items of the batch.
    """

    forward: DeformableArgs
    dout: Array  # of forward.out: its shape and dtype
    # Lane dtype, of the shapes of v, locations and weights.
    dv: Array | None  # added to
    dlocations: Array | None
    dweights: Array | None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to sum."""
        return not self.dout.size
