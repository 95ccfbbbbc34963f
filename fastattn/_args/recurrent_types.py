"""Arguments of recurrences: linear attention, causal convolutions and scans, as kernels read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastattn._args.types import Activation, Array, Ints, KernelArgs, Shape


@dataclass(slots=True, eq=False)
class RecurrentArgs(KernelArgs):
    """One call: all that the compiled layer and its NumPy twin read.

    The lane dtype is float64 for float64, else float32. There are `heads` states; heads_k and heads_v divide
    them, heads_q does or is a multiple.
    """

    batch_shape: Shape
    heads: int
    heads_q: int
    heads_k: int
    heads_v: int
    len_q: int
    len_k: int
    head_dim: int
    head_dim_v: int
    # As in AttentionArgs: last axis contiguous; own batch dimensions broadcast to batch_shape.
    q: Array
    k: Array
    v: Array
    out: Array  # (*batch_shape, max(heads_q, heads), len_q, head_dim_v), q's dtype
    # Lane dtype; these broadcast to (*batch_shape, heads, len_k), and with `gated` to (..., len_k, head_dim).
    log_decay: Array | None
    beta: Array | None  # not None: the delta rule
    erase: Array | None  # as k: what the delta rule reads the state by; None is k
    # Lane dtype, exactly (*batch_shape, heads, head_dim, head_dim_v).
    state: Array | None  # None is 0
    state_out: Array  # may be `state` itself
    # Lane dtype, exactly (*batch_shape, heads, head_dim): the decayed sum of keys, to
    # normalise by.
    norm: Array | None  # None is 0; apart from norm_out
    norm_out: Array | None
    gated: bool
    causal: bool
    scale: float
    eps: float
    num_threads: int
    result: Any  # what the caller gets
    # Lane dtype, of a forward pass without beta: v is written times this, (*batch_shape, heads, len_k); out
    # has v times `skip`, (heads,), added.
    strength: Array | None = None
    skip: Array | None = None
    # (sequences + 1): sequences lie end to end. Then batch_shape, of states alone, is (sequences,), all else
    # has no batch, and len_q = len_k are the tokens of all.
    begins: Ints | None = None


@dataclass(slots=True, eq=False)
class RecurrentBackwardArgs(KernelArgs):
    """The gradient of a RecurrentArgs, whose results are neither read nor written.

    Results are those of each state: heads that states share are added up by the caller. None is not wanted.
    """

    forward: RecurrentArgs
    dout: Array  # of forward.out: its shape and dtype
    dstate_out: Array | None  # of forward.state_out, as it is; None is 0
    dnorm_out: Array | None  # of forward.norm_out
    # Any dtype that kernels write: (*batch_shape, heads_q or if more heads, len_q, head_dim), and
    # (*batch_shape, heads, len_k, head_dim or head_dim_v).
    dq: Array | None
    dk: Array | None
    dv: Array | None
    # Lane dtype: (*batch_shape, heads, len_k), with `gated` (..., len_k, head_dim).
    dlog_decay: Array | None
    dbeta: Array | None
    derase: Array | None  # as dk
    dstate: Array | None  # as forward.state, whether that is None or not
    dnorm: Array | None
    dq_factor: float  # what dq is multiplied by: the scale, or 1 to find dscale

    @property
    def num_threads(self) -> int:
        """Result of the forward call."""
        return self.forward.num_threads

    @property
    def out(self) -> Array:
        """The forward call's, by whose size empty calls of other kernels are known."""
        return self.forward.out


@dataclass(slots=True, eq=False)
class ConvArgs(KernelArgs):
    """A causal depthwise convolution along the tokens of some sequences.

    Arrays of tokens are (*batch_shape, length, channels), with one sequence for each item of the batch; or
    (tokens, channels) if `ragged`, with the sequences end to end and batch_shape (sequences,). Last axes are
    contiguous.
    """

    batch_shape: Shape
    begins: Ints  # (sequences + 1): of the tokens of all sequences, in order, the first of each; and the end
    ragged: bool
    x: Array
    out: Array  # x's shape and dtype
    weight: Array  # (channels, width), lane dtype
    bias: Array | None  # (channels), lane dtype
    state: (
        Array | None
    )  # (*batch_shape, width - 1, channels), x's dtype: the inputs before the first; None: 0
    activation: Activation | None
    num_threads: int


@dataclass(slots=True, eq=False)
class ScanArgs(KernelArgs):
    """A selective scan along the tokens of some sequences, whose arrays are those of a `ConvArgs`."""

    batch_shape: Shape
    begins: Ints
    ragged: bool
    x: Array
    dt: Array  # x's shape and dtype, as out
    out: Array
    b: Array  # (*batch_shape, length, states) or (tokens, states), x's dtype, as c
    c: Array
    # Lane dtype: (channels, states); (channels); and states (*batch_shape, channels, states).
    rates: Array
    skip: Array | None
    dt_bias: Array | None
    state: Array | None
    state_out: Array  # may be `state` itself
    softplus: bool
    num_threads: int
    result: Any  # what the caller gets


def each_sequence(args: ConvArgs | ScanArgs) -> Iterator[tuple[Any, Any]]:
    """Indices of arrays of tokens and of arrays of sequences: of the batch at once, or of each if ragged."""
    if not args.ragged:
        yield ..., ...
        return
    for s, (begin, end) in enumerate(zip(args.begins[:-1], args.begins[1:], strict=True)):
        yield slice(begin, end), s
