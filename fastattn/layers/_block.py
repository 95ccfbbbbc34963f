"""The block that encoders and decoders consist of, layers and models alike, as steps of a program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from fastattn._args import key_ranges
from fastattn._args.types import Activation, Array, Ints, ModifiersArgs, Rounding
from fastattn._engine.experts import Experts, ExpertsStep
from fastattn._engine.program import Program, build
from fastattn._engine.steps import (
    INPUTS,
    OUT,
    AddStep,
    AttendStep,
    GateStep,
    LinearStep,
    NormStep,
    ScaleStep,
    Sequences,
    Step,
    Values,
    X,
)
from fastattn.layers._mixers import MixStep

if TYPE_CHECKING:
    from fastattn._args.packed import PackedLinear
    from fastattn._engine.tape import Tape
    from fastattn.layers._mixers import Mixer

Window = tuple[int, int] | None

_NONE: Any = None
_UNSCALED = ModifiersArgs(0.0)


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


class LayerInput(NamedTuple):
    """Maps of a part of the inputs: a block adds ``norm(outer(activation(gate(y)) * inputs))`` last."""

    gate: Projection
    outer: Projection
    norm: Norm
    begin: int  # the part's first feature in `Sequences.inputs`


class BesideExperts(NamedTuple):
    """Experts of the same rows as a feed-forward, whose results are added before the norm of both."""

    experts: Experts
    norm: Norm  # of the experts' input
    router_norm: Norm  # of what their router sees
    own: Norm  # of what the feed-forward gives
    theirs: Norm  # of what the experts give


class Kept(NamedTuple):
    """The keys and values of blocks that a cache keeps together."""

    head_dim: int
    left: int | None  # so many keys before a query are attended; None: all


@dataclass(frozen=True, slots=True, eq=False)
class LayerStep(Step):
    """``out = residual + layer(x)`` of a `MultiHeadAttention`, in Python: with options that steps lack.

    The call says what else the layer is given, in `Sequences.attentions`.
    """

    op = None
    along = True
    sources = ("x", "residual")

    layer: Any
    residual: str
    number: int  # in the call's `attentions`
    over_memory: bool  # it attends the call's memory
    given: str  # the name of the keys and values that it gives, or attends if that is `keys`, too
    keys: str | None
    gives: bool  # later steps attend its keys and values

    @property
    def columns(self) -> int:
        return self.layer.out_proj.out_features  # type: ignore[no-any-return]

    def run(self, tape: Tape, values: Values, call: Sequences, out: Array | None = None) -> Any:
        given = call.attentions[self.number]
        if self.over_memory:
            given = {**given, "key": call.memory}
        elif self.keys is not None:
            given = {**given, "keys_values": values[self.given]}
        x, residual = values[self.x], values[self.residual]
        found, _, keys = self.layer._attend(tape, x, residual=residual, share=self.gives, out=out, **given)
        if self.gives:
            values[self.given] = keys
        return found


class Place(NamedTuple):
    """Where a block and its keys are in a model."""

    number: int  # of the block
    layer: int = 0  # see `MixStep`
    ranges: int = 0  # see `AttendStep`, as of the next two
    first_kv: int = 0
    size: int = 0
    giver: Any = None  # the step whose keys it attends
    gives: str | None = None  # the buffer where later blocks find its keys


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Attention to itself, or a mixer, and a feed-forward, each with a norm and a residual.

    With `norm_first`, ``y = x + attend(norm(x))`` and then ``y + feed_forward(norm(y))``. Without it, as in
    the first paper, ``y = norm(x + attend(x))`` and then ``norm(y + feed_forward(y))``. With `norm_first`
    there may be two more norms, of what attention and the feed-forward give, before it is added, beside the
    first ones or in their place. Experts may be the feed-forward, without these two norms. A mixer is between
    the maps `qkv` and `attended`, in place of attention.
    """

    norm_first: bool
    attention_norm: Norm | None  # None, with `norm_first`: x is attended as it is
    qkv: Projection = _NONE  # to queries, keys and values, side by side
    heads: int = 0
    heads_kv: int = 0
    head_dim: int = 0
    modifiers: ModifiersArgs = _UNSCALED
    attended: Projection = _NONE  # what follows attention
    layer: Any = None  # a `MultiHeadAttention`, in place of the maps and heads above: see `LayerStep`
    over_memory: bool = False  # only with a `layer`
    inner_norm: Norm | None = None  # None, as above
    inner: Projection | Experts | None = None  # a gated pair where the activation multiplies; None: nothing
    activation: Activation = "relu"
    outer: Projection | None = None  # None with experts
    head_norms: tuple[Norm, ...] = ()  # of heads side by side, from the first query's on: see `NormStep`
    window: Window = None  # keys before and after a query that it attends; None: all
    rotation: int | None = None  # of queries and keys, as `bias` of scores: see `AttendStep`
    bias: int | None = None
    post_norms: tuple[Norm, Norm] | None = None
    sinks: Array | None = None  # (heads,): see `AttendStep`, as of the next one
    query_rotation: int | None = None
    mixer: Mixer | None = None  # only with `norm_first`
    gated: bool = False  # `qkv` has a gate of each of attention's results, too, after the values
    # The number of the block whose keys and values it attends: `qkv` maps to queries alone. None: its own.
    keys_from: int | None = None
    beside: BesideExperts | None = None  # only with `post_norms`
    layer_input: LayerInput | None = None  # only with `norm_first`
    scale_of_all: Array | None = None  # of its result, (features,): see `ScaleStep`; as above
    # Without `norm_first`: of the sum of x and what the norm after attention gives, before the feed-forward.
    second_norm: Norm | None = None

    @property
    def kept(self) -> Kept:
        """How a cache keeps its keys and values."""
        return Kept(self.head_dim, None if self.window is None else self.window[0])

    def steps(self, x: str, out: str, total: str, place: Place) -> list[Step]:
        """Steps from buffer `x` to `out`, which may be the same. Sums that wait for a norm go to `total`."""
        steps: list[Step] = []
        attended = x
        if self.norm_first and self.attention_norm is not None:
            attended = "normed"
            steps.append(NormStep(x, attended, *self.attention_norm))
        summed = out if self.norm_first else total
        if self.layer is not None:
            theirs = None if place.giver is None else place.giver.given
            own = (self.layer, x, place.number, self.over_memory, theirs or f"given {place.number}", theirs)
            step = LayerStep(attended, summed, *own, place.gives is not None)
            return [*steps, step, *self._rest(x, out, total)]
        # A buffer has one width, and blocks may differ.
        product = place.gives or f"product {self.qkv.weight.out_features}"
        features = self.heads * self.head_dim if self.mixer is None else self.mixer.columns
        context = f"context {features}"
        steps.append(LinearStep(attended, product, *self.qkv))
        begin = 0
        for norm in self.head_norms:
            steps.append(NormStep(product, product, *norm, begin))
            begin += norm.weight.size
        if self.mixer is None:
            giver = place.giver
            heads_kv = self.heads_kv if giver is None else giver.heads_kv
            heads = (self.heads, heads_kv, self.head_dim, self.modifiers)
            which = (place.first_kv, place.ranges, self.rotation, self.bias)
            others = (self.sinks, self.query_rotation, place.size)
            keys: Any = {"gives": place.gives is not None}
            if giver is not None:
                keys |= {"keys": giver.x, "keys_begin": giver.heads * giver.head_dim}
            steps.append(AttendStep(product, context, *heads, *which, *others, **keys))
            if self.gated:
                begin = (self.heads + 2 * self.heads_kv) * self.head_dim
                steps.append(GateStep(context, context, product, begin, features))
        else:
            steps.append(MixStep(product, context, self.mixer, place.layer))
        post_norm, _ = self.post_norms or (None, None)
        steps += _added(context, self.attended, post_norm, x, summed)
        return [*steps, *self._rest(x, out, total)]

    def _rest(self, x: str, out: str, total: str) -> list[Step]:
        """Steps after attention was added to buffer `x`, as in `steps`."""
        steps: list[Step] = []
        _, inner_post = self.post_norms or (None, None)
        inner, end = out, out  # what the feed-forward reads, and where it is added
        if self.norm_first:
            if self.inner_norm is not None:
                inner = "normed"
                steps.append(NormStep(out, inner, *self.inner_norm))
        else:
            assert self.attention_norm is not None
            end = total
            if self.second_norm is None:
                steps.append(NormStep(total, out, *self.attention_norm))
            else:
                steps.append(NormStep(total, total, *self.attention_norm))
                steps.append(AddStep(total, total, x, self.attended.weight.out_features))
                steps.append(NormStep(total, out, *self.second_norm))
        if self.inner is None:
            return steps
        if isinstance(self.inner, Experts):
            steps.append(ExpertsStep(inner, end, self.inner, self.activation, out))
        else:
            assert self.outer is not None
            wide = f"inner {self.inner.weight.out_features}"
            steps.append(LinearStep(inner, wide, *self.inner, self.activation))
            if self.beside is None:
                steps += _added(wide, self.outer, inner_post, out, end)
            else:
                assert inner_post is not None
                steps += self._with_experts(wide, self.outer, self.beside, inner_post, out)
        if self.norm_first:
            return [*steps, *self._ending(out)]
        assert self.inner_norm is not None
        return [*steps, NormStep(total, out, *self.inner_norm)]

    def _with_experts(
        self, x: str, outer: Projection, beside: BesideExperts, norm: Norm, out: str
    ) -> list[Step]:
        """Steps for ``out = out + norm(own(outer(x)) + theirs(experts(out)))``."""
        experts, *norms = beside
        (before, router, own, theirs), n = norms, outer.weight.out_features
        return [
            LinearStep(x, "normed", *outer),
            NormStep("normed", "normed", *own),
            NormStep(out, "routed", *router),
            NormStep(out, "expert rows", *before),
            ExpertsStep("expert rows", "mixed", experts, self.activation, None, "routed"),
            NormStep("mixed", "mixed", *theirs),
            AddStep("mixed", "normed", "normed", n),
            NormStep("normed", "normed", *norm),
            AddStep("normed", out, out, n),
        ]

    def _ending(self, out: str) -> Iterator[Step]:
        """Steps that add the layer's input to buffer `out`, and scale all of it."""
        if self.layer_input is not None:
            gate, outer, norm, begin = self.layer_input
            n = gate.weight.out_features
            yield LinearStep(out, "gate", *gate, self.activation)
            yield GateStep("gate", "gate", INPUTS, begin, n, None)
            yield from _added("gate", outer, norm, out, out)
        if self.scale_of_all is not None:
            yield ScaleStep(out, out, self.scale_of_all)


def _added(x: str, linear: Projection, norm: Norm | None, residual: str, out: str) -> list[Step]:
    """Steps for ``out = residual + norm(linear(x))``, or without the norm."""
    if norm is None:
        return [LinearStep(x, out, *linear, residual=residual)]
    return [
        LinearStep(x, "normed", *linear),
        NormStep("normed", "normed", *norm),
        AddStep("normed", out, residual, norm.weight.size),
    ]


def program_of_blocks(
    blocks: Sequence[Block],
    first: Norm | None = None,
    last: Norm | None = None,
    widened: Projection | None = None,
    before: Sequence[Step] = (),
    keeps_input: bool = False,
    rounds: bool = False,
    shares_cache: bool = True,
) -> tuple[Program, tuple[Window, ...]]:
    """The blocks of a model, stack or layer, between the norms `first` and `last`; and their windows.

    The map `widened` follows the first norm. A call gives the ranges of each window, in this order. The
    program may overwrite its input, unless it `keeps_input`. Steps `before` all others write to `INPUTS`. See
    `build` for `rounds`. With `shares_cache`, blocks of one `Kept` have `Slots` together, else each has some.
    """
    windows = tuple(dict.fromkeys(block.window for block in blocks))
    sizes, last_readers = list(held_heads(blocks)), {block.keys_from: i for i, block in enumerate(blocks)}
    first_kv, attends = dict[int, int](), dict[int | None, Step]()
    in_use: dict[str, int] = {}  # buffers of keys, and the last block that reads them
    steps: list[Step] = []
    if first is not None:
        steps.append(NormStep(X, OUT if widened is None else X, *first))
    if widened is not None:
        steps.append(LinearStep(X, OUT, *widened))
    for i, block in enumerate(blocks):
        free = steps and widened is None and not keeps_input
        x, total = (OUT if steps else X), (X if free else "total")
        layer = sum(each.mixer is not None for each in blocks[:i])
        place = Place(i, layer, windows.index(block.window), giver=attends.get(block.keys_from))
        if block.layer is not None:
            place = place._replace(gives="" if i in last_readers else None)
        elif (giver := place.giver) is not None:
            place = place._replace(first_kv=giver.first_kv, size=giver.size)
        elif block.mixer is None:
            size, gives = sizes.index(block.kept) if shares_cache else len(first_kv), None
            if i in last_readers:
                names = (f"keys {n} of {block.qkv.weight.out_features}" for n in count())
                gives = next(name for name in names if in_use.get(name, -1) < i)
                in_use[gives] = last_readers[i]
            place = place._replace(first_kv=first_kv.get(size, 0), size=size, gives=gives)
            first_kv[size] = place.first_kv + block.heads_kv
        own = block.steps(x, OUT, total, place)
        if block.mixer is None:
            attends[i] = next(step for step in own if isinstance(step, (AttendStep, LayerStep)))
        steps += own
    if last is not None:
        steps.append(NormStep(OUT if steps else X, OUT, *last))
    return build("model", [*before, *steps], rounds), windows


def held_heads(blocks: Sequence[Block]) -> dict[Kept, int]:
    """How many heads of keys a cache holds for all blocks, of each size and window."""
    found: dict[Kept, int] = {}
    for block in blocks:
        if block.mixer is None and block.keys_from is None:
            found[block.kept] = found.get(block.kept, 0) + block.heads_kv
    return found


def visible(
    windows: Sequence[Window],
    positions: Ints,
    causal: bool,
    shared: Sequence[key_ranges.Range],
    len_k: int | Ints,
) -> tuple[key_ranges.Range, ...]:
    """Ranges of the `len_k` keys that the queries at `positions` attend, for each window and all `shared`."""
    every = [*shared, key_ranges.causal(positions)] if causal else [*shared]
    sliding = ([] if window is None else [key_ranges.window(positions, *window)] for window in windows)
    return tuple(key_ranges.intersect(every + own, len_k) for own in sliding)
