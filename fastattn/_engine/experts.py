"""A step of experts: of several feed-forwards, a router chooses a few for each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._args.packed import LinearArgs
from fastattn._args.types import Activation, Array, Rounding, lane_dtype
from fastattn._engine import dispatch, settings
from fastattn._engine.steps import Step

if TYPE_CHECKING:
    from fastattn._args.packed import PackedLinear
    from fastattn._engine.steps import Sequences, Values
    from fastattn._engine.tape import Tape

# Rows of experts that are computed at a time: each has a copy of its input and two results.
_EXPERT_ROWS = 8192


class Bounds(NamedTuple):
    """Bounds of gate and up, which plain first maps give: ``activation(gate) * (up + 1)`` of what is kept.

    A gate is at most `limit`, up between -`limit` and `limit`.
    """

    limit: float
    interleaved: bool  # gate and up in turn, not one after the other


class Shared(NamedTuple):
    """An expert of every row."""

    share: PackedLinear | None  # to one number, whose sigmoid is its weight; None: that is 1
    inner: PackedLinear  # gated
    outer: PackedLinear


class Experts(NamedTuple):
    """The parameters of a mixture of experts."""

    router: PackedLinear  # to a logit for each expert; their softmax is the weights
    maps: tuple[
        tuple[PackedLinear, ...], tuple[PackedLinear, ...]
    ]  # the first maps, gated or not; the second
    chosen: int  # experts for a row
    normalised: bool  # divide the weights of those that are chosen by their sum
    activations: Rounding | None = None  # what inputs of maps are rounded to
    router_bias: Array | None = None
    biases: tuple[tuple[Array | None, ...], tuple[Array | None, ...]] | None = None  # as `maps`
    bounds: Bounds | None = None
    shared: Shared | None = None
    scales: Array | None = None  # (experts,), lane type: factors of the weights
    added: Array | None = None  # (features,), lane type: what is added to the sum


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsStep(Step):
    """A mixture of experts: a few feed-forwards for each row, chosen by a linear map, in a weighted sum.

    The rows are sorted by expert; each expert that has some computes them together. It runs in Python, and
    has no gradients.
    """

    op = None
    has_gradients = False
    sources = ("x", "residual", "router_x")

    experts: Experts
    activation: Activation
    residual: str | None  # a buffer; it may be `out`
    router_x: str | None = None  # what the router sees: a buffer of as many features; None: x

    @property
    def columns(self) -> int:
        return self.experts.maps[1][0].out_features

    def run(self, tape: Tape, values: Values, call: Sequences, out: Array | None = None) -> Any:
        if tape.recording or out is None:
            raise NotImplementedError("fastattn: experts have no gradients")
        x, seen = values[self.x], values[self.router_x or self.x]
        residual = None if self.residual is None else values[self.residual]
        rows = max(1, _EXPERT_ROWS // self.experts.chosen)
        for begin in range(0, len(x), rows):
            part = slice(begin, begin + rows)
            mixed = self._mixed(tape, x[part], seen[part])
            np.add(0 if residual is None else residual[part], mixed, out=out[part], casting="same_kind")
        return out

    def _mixed(self, tape: Tape, x: Array, seen: Array) -> Array:
        """The weighted sums of the experts' results for rows x (n, features); the router sees others."""
        router, (inner, outer), k, normalised, how, bias, biases, bounds, shared, scales, added = self.experts
        lane, activation = lane_dtype(x.dtype), self.activation if bounds is None else None
        first_bias, second_bias = (None, None) if biases is None else biases
        logits = tape.linear(seen, router, bias).astype(lane, copy=False)
        chances = np.exp(logits - logits.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        best = np.argsort(-chances, axis=1, kind="stable")[:, :k]  # of equal ones, those of lower numbers
        weights = np.take_along_axis(chances, best, axis=1)
        if normalised:
            weights /= weights.sum(axis=1, keepdims=True)
        if scales is not None:
            weights *= scales[best]
        order = np.argsort(best, axis=None, kind="stable")
        counts = np.bincount(best.ravel(), minlength=len(inner))
        hidden = np.empty((len(order), inner[0].out_features), x.dtype)
        result = np.empty((len(order), self.columns), x.dtype)
        threads = settings.get_num_threads()
        first = LinearArgs(x[order // k], inner[0], None, activation, None, hidden, threads, how)
        dispatch.run_groups(first, inner, counts, None, first_bias)
        if bounds is not None:
            hidden = self._within(tape, hidden, *bounds)
        second = LinearArgs(hidden, outer[0], None, None, None, result, threads, how)
        dispatch.run_groups(second, outer, counts, None, second_bias)
        by_row = np.empty(result.shape, lane)
        by_row[order] = result
        # A sum in the order of the weights: no row depends on others.
        mixed: Array = np.einsum("nkd,nk->nd", by_row.reshape(len(x), k, -1), weights)
        if shared is not None:
            each = tape.linear(x, shared.inner, None, how, activation)
            each = tape.linear(each, shared.outer, None, how)
            if shared.share is not None:
                share = tape.linear(x, shared.share, None).astype(lane, copy=False)
                each = each * (0.5 + 0.5 * np.tanh(0.5 * share))
            mixed += each
        if added is not None:
            mixed += added
        return mixed

    def _within(self, tape: Tape, x: Array, limit: float, interleaved: bool) -> Array:
        """Gate and up, side by side in the rows of x, within `Bounds` and multiplied."""
        n, wide = x.shape[1] // 2, x.astype(lane_dtype(x.dtype), copy=False)
        gate, up = (wide[:, ::2], wide[:, 1::2]) if interleaved else (wide[:, :n], wide[:, n:])
        kept = np.clip(up, -limit, limit)
        kept += 1
        found: Array = tape.gate(np.minimum(gate, limit), kept, self.activation)
        return found.astype(x.dtype, copy=False)
