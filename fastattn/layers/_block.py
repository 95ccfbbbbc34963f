"""The block that encoders and decoders consist of, layers and models alike, as steps of a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from fastattn._args.types import Activation, Array, Rounding
from fastattn._engine.experts import Experts, ExpertsStep
from fastattn._engine.program import (
    OUT,
    AddStep,
    AttendStep,
    GateStep,
    LinearStep,
    NormStep,
    Program,
    X,
    build,
)
from fastattn.layers._mixers import MixStep

if TYPE_CHECKING:
    from fastattn._args.packed import PackedLinear
    from fastattn._engine.program import Step
    from fastattn.layers._mixers import Mixer

    Window = tuple[int, int] | None


class Norm(NamedTuple):
    """The parameters of a norm."""

    kind: str  # "layer_norm" or "rms_norm"
    weight: Array
    bias: Array | None
    eps: float


class Projection(NamedTuple):
    """The parameters of a linear map."""

    weight: PackedLinear
    bias: Array | None
    activations: Rounding | None = None  # what its input is rounded to


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Attention to itself, or a mixer, and a feed-forward, each with a norm and a residual.

    With `norm_first`, ``y = x + attend(norm(x))`` and then ``y + feed_forward(norm(y))``. Without it, as in
    the first paper, ``y = norm(x + attend(x))`` and then ``norm(y + feed_forward(y))``. With `norm_first`
    there may be two more norms, of what attention and the feed-forward give, before it is added, beside the
    first ones or in their place; or experts, without these norms, as the feed-forward. A mixer is between the
    maps `qkv` and `attended`, in place of attention.
    """

    norm_first: bool
    attention_norm: Norm | None  # None, with `norm_first`: x is attended as it is
    qkv: Projection  # to queries, keys and values, side by side
    heads: int
    heads_kv: int
    head_dim: int
    scale: float
    attended: Projection  # what follows attention
    inner_norm: Norm | None  # None, likewise
    inner: Projection | Experts  # a gated pair where the activation multiplies
    activation: Activation
    outer: Projection | None  # None with experts
    head_norms: tuple[Norm, ...] = ()  # of heads side by side, from the first query's on: see `NormStep`
    window: Window = None  # keys before and after a query that it attends; None: all
    rotation: int | None = None  # of queries and keys, as `bias` of scores: see `AttendStep`
    bias: int | None = None
    post_norms: tuple[Norm, Norm] | None = None
    softcap: float = 0.0  # of scores; 0: none
    sinks: Array | None = None  # (heads,): see `AttendStep`, as of the next one
    query_rotation: int | None = None
    mixer: Mixer | None = None  # only with `norm_first`
    gated: bool = False  # `qkv` has a gate of each of attention's results, too, after the values

    def steps(self, x: str, out: str, total: str = "total", layer: int = 0, ranges: int = 0) -> list[Step]:
        """Steps from buffer `x` to `out`, which may be the same buffer.

        Sums that wait for a norm go to `total`. `layer` and `ranges` are those of `AttendStep`; `layer` is
        that of `MixStep`, too.
        """
        steps: list[Step] = []
        attended = x
        if self.norm_first and self.attention_norm is not None:
            attended = "normed"
            steps.append(NormStep(x, attended, *self.attention_norm))
        # Buffers have one width: attention's and those of a mixer differ.
        product, context = ("qkv", "context") if self.mixer is None else ("product", "mixed")
        steps.append(LinearStep(attended, product, *self.qkv))
        begin = 0
        for norm in self.head_norms:
            steps.append(NormStep(product, product, *norm, begin))
            begin += norm.weight.size
        if self.mixer is None:
            heads = (self.heads, self.heads_kv, self.head_dim, self.scale)
            which = (layer, ranges, self.rotation, self.bias)
            others: Any = {
                "softcap": self.softcap,
                "sinks": self.sinks,
                "query_rotation": self.query_rotation,
            }
            steps.append(AttendStep(product, context, *heads, *which, **others))
            if self.gated:
                steps.append(GateStep(context, context, product, self.heads * self.head_dim))
        else:
            steps.append(MixStep(product, context, self.mixer, layer))
        if self.norm_first:
            attention_post, inner_post = self.post_norms or (None, None)
            steps += _added(context, self.attended, attention_post, x, out)
            inner = out
            if self.inner_norm is not None:
                inner = "normed"
                steps.append(NormStep(out, inner, *self.inner_norm))
            if isinstance(self.inner, Experts):
                return [*steps, ExpertsStep(inner, out, self.inner, self.activation, out)]
            assert self.outer is not None
            steps.append(LinearStep(inner, "inner", *self.inner, self.activation))
            return [*steps, *_added("inner", self.outer, inner_post, out, out)]
        assert self.attention_norm is not None
        assert self.inner_norm is not None
        assert isinstance(self.inner, Projection)
        assert self.outer is not None
        return [
            *steps,
            LinearStep(context, total, *self.attended, residual=x),
            NormStep(total, out, *self.attention_norm),
            LinearStep(out, "inner", *self.inner, self.activation),
            LinearStep("inner", total, *self.outer, residual=out),
            NormStep(total, out, *self.inner_norm),
        ]


def _added(x: str, linear: Projection, norm: Norm | None, residual: str, out: str) -> list[Step]:
    """Steps for ``out = residual + norm(linear(x))``, or without the norm."""
    if norm is None:
        return [LinearStep(x, out, *linear, residual=residual)]
    return [
        LinearStep(x, "normed", *linear),
        NormStep("normed", "normed", *norm),
        AddStep("normed", out, residual, norm.weight.size),
    ]


def model_program(
    blocks: Sequence[Block],
    first: Norm | None = None,
    last: Norm | None = None,
    widened: Projection | None = None,
) -> tuple[Program, tuple[Window, ...]]:
    """A model's blocks one after another, between the norms `first` and `last`; and their windows.

    The map `widened` follows the first norm. A call gives the ranges of each window, in this order. The
    program may overwrite its input.
    """
    windows = tuple(dict.fromkeys(block.window for block in blocks))
    steps: list[Step] = []
    if first is not None:
        steps.append(NormStep(X, OUT if widened is None else X, *first))
    if widened is not None:
        steps.append(LinearStep(X, OUT, *widened))
    for i, block in enumerate(blocks):
        x, total = (OUT if steps else X), (X if steps and widened is None else "total")
        layer = sum((each.mixer is None) == (block.mixer is None) for each in blocks[:i])
        steps += block.steps(x, OUT, total, layer, windows.index(block.window))
    if last is not None:
        steps.append(NormStep(OUT if steps else X, OUT, *last))
    return build("model", steps), windows
