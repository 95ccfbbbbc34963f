"""Mixers: what lies between the two maps of a recurrent layer; and the step of a program that runs one.

A mixer is a convolution along the tokens, perhaps with a recurrence after it. Layers and models share it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fastattn import grad, ops
from fastattn._args.types import Activation, Array, Ints, Shape, lane_dtype
from fastattn._engine.program import Program, build
from fastattn._engine.steps import OUT, Sequences, Step, Values, X
from fastattn.functional._differentiable import Steps, differentiable

if TYPE_CHECKING:
    from fastattn._engine.tape import Tape

Sizes = tuple[int, ...]  # batch and length of a call; or the tokens, of sequences end to end
Carried = Sequence[dict[str, Any]]  # arguments for states, of the convolution and of the recurrence
Kind = tuple[Shape, np.dtype[Any]]


@differentiable("x", "weight", "bias")
def _convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    *,
    activation: Activation | None,
    begins: Ints | None = None,
    **states: Any,
) -> Steps[Any]:
    """`ops.causal_conv1d` with a weight (channels, 1, width), as torch has it; gradients without states."""
    taps, options = weight[:, 0], dict[str, Any](activation=activation, begins=begins)
    request = yield ops.causal_conv1d(x, taps, bias, **options, **states)
    dx, dweight, *dbias = grad.causal_conv1d(request.dout, x, taps, bias, **options, need=request.need)
    return dx, dweight[:, None], *dbias


def convolved(
    tape: Tape,
    x: Any,
    weight: Array,
    bias: Array | None,
    carried: Carried,
    activation: Activation | None = "silu",
) -> Any:
    """The convolution of x (*sizes, channels) with a weight (channels, 1, width)."""
    given = {"x": x, "weight": weight, "bias": bias}
    return tape.call(_convolution, given, activation=activation, **carried[0])


def split(tape: Tape, x: Any, sizes: Sizes, parts: Sequence[Any]) -> Sequence[Any]:
    """The columns of x, which lie side by side, as `parts` say.

    An integer n means n columns as rows; (n,) means (*sizes, n), (heads, n) means the same with heads before
    tokens, ([batch,] heads, tokens, n), and (heads, None) that without the last axis.
    """
    widths = [part if isinstance(part, int) else math.prod(n or 1 for n in part) for part in parts]

    def views(array: Array) -> list[Array]:
        rows, found = array.reshape(-1, sum(widths)), []
        for part, width, end in zip(parts, widths, accumulate(widths), strict=True):
            view = rows[:, end - width : end]
            if not isinstance(part, int):
                view = view.reshape(*sizes, *(n for n in part if n is not None))
                view = view.swapaxes(len(sizes) - 1, len(sizes)) if len(part) == 2 else view
            found.append(view)
        return found

    return tape.views(x, views)


def state_kinds(dtype: np.dtype[Any], width: int, channels: int, recurrences: Sequence[Shape]) -> list[Kind]:
    """Shapes and dtypes of a sequence's states: the convolution's last inputs, and the recurrence's."""
    lane = lane_dtype(dtype)
    return [((width - 1, channels), dtype), *((shape, lane) for shape in recurrences)]


@dataclass(frozen=True, slots=True, eq=False)
class Mixer:
    """Parameters of a mixer, of which a subclass has more: its sizes, and those of a recurrence."""

    kind: ClassVar[str]  # its name in ``core/mixers.pxi``
    conv_weight: Array  # (channels, 1, width)
    conv_bias: Array | None

    @property
    def columns(self) -> int:
        """Features of a token's result."""
        raise NotImplementedError

    @property
    def recurrences(self) -> tuple[Shape, ...]:
        """The shapes of a sequence's states in the recurrence, one or none."""
        return ()

    @property
    def held(self) -> int:
        """Features between the convolution and the recurrence."""
        return len(self.conv_weight) if self.recurrences else 0

    def kinds(self, dtype: np.dtype[Any]) -> list[Kind]:
        """Shapes and dtypes of a sequence's states, where rows are of `dtype`."""
        channels, _, width = self.conv_weight.shape
        return state_kinds(dtype, width, channels, self.recurrences)

    def decays(self, a: Array) -> tuple[Array, Array | None]:
        """Logarithms of decays of a recurrence and, if they make them, steps, of its rows (tokens, heads)."""
        raise NotImplementedError

    def mixed(self, tape: Tape, product: Any, sizes: Sizes, carried: Carried) -> Any:
        """From rows `product` of the map in to those of the map out."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class ConvolutionMixer(Mixer):
    """LFM2's: ``C * conv(B * x)`` of rows B, C, x."""

    kind = "convolution"

    @property
    def columns(self) -> int:
        return len(self.conv_weight)

    def mixed(self, tape: Tape, product: Any, sizes: Sizes, carried: Carried) -> Any:
        d = self.columns
        first, second, x = split(tape, product, sizes, [d, d, d])
        (tokens,) = split(tape, tape.gate(first, x, None), sizes, [(d,)])
        found = convolved(tape, tokens, self.conv_weight, self.conv_bias, carried, None)
        (rows,) = split(tape, found, sizes, [d])
        return tape.gate(second, rows, None)


@dataclass(frozen=True, slots=True, eq=False)
class MixStep(Step):
    """A mixer of the rows of `x`, which it may overwrite."""

    op = "mix"
    along = True

    mixer: Mixer
    layer: int = 0  # of those that carry states, in order

    @property
    def columns(self) -> int:
        return self.mixer.columns

    @property
    def scratch(self) -> dict[str, int]:
        return {"convolved": self.mixer.held} if self.mixer.held else {}

    def run(self, tape: Tape, values: Values, call: Sequences, out: Array | None = None) -> Any:
        x = values[self.x]
        n = len(tape.array(x))
        carried: Carried = [{}, {}] if call.states is None else call.states[self.layer]
        if call.begins is None:
            sizes: Sizes = call.batch, n // call.batch
        else:
            sizes, carried = (n,), [{**given, "begins": call.begins} for given in carried]
        mixed = self.mixer.mixed(tape, x, sizes, carried)
        if out is None:
            return mixed
        out[...] = mixed
        return out


@dataclass(frozen=True, slots=True, eq=False)
class _RowMixStep(Step):
    """A mixer of rows that are tokens of one sequence: each begins with the states after the one before."""

    op = None
    along = True

    program: Program  # the mixer alone
    layer: int

    @property
    def columns(self) -> int:
        return self.program.columns

    def run(self, tape: Tape, values: Values, call: Sequences, out: Array | None = None) -> Any:
        assert out is not None
        assert call.states is not None
        for i in range(len(out)):  # one by one, which gives the bits of steps of one token
            row = slice(i, i + 1)
            states = [{name: each[row] for name, each in of.items()} for of in call.states[self.layer]]
            out[row] = self.program.run(values[self.x][row], Sequences(1, states=[states]))
        return out


def by_rows(program: Program) -> Program:
    """`program` for rows that are tokens of one sequence: mixers run row by row, the rest at once."""
    steps = [
        _RowMixStep(step.x, step.out, build("mix", [MixStep(X, OUT, step.mixer)]), step.layer)
        if isinstance(step, MixStep)
        else step
        for step in program.steps
    ]
    return build(program.use, steps, program.rounds)
