"""The arguments of what goes along the tokens channel by channel: checked and normalised."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from fastattn._args.errors import wrong_shape
from fastattn._args.grad import needed
from fastattn._args.grad_types import ConvGradArgs, ScanGradArgs
from fastattn._args.ops import data, like, result, vector
from fastattn._args.recurrent_types import ConvArgs, ScanArgs
from fastattn._args.results import result_array
from fastattn._args.types import ACTIVATIONS, Activation, Array, Ints, Shape, lane_dtype
from fastattn._args.values import (
    choice,
    flag,
    float_array,
    is_ready,
    readable,
    sequence_begins,
    short,
)
from fastattn._engine.settings import require_backend, threads

MOST_WIDTH = 8  # FA_MOST_WIDTH of interface/channels.h


def _tokens(name: str, x: Any, turned: bool = False) -> Array:
    """`x` (..., length, channels), rows contiguous; if `turned`, its columns may be so instead."""
    if is_ready(x, 2):
        return x
    array = float_array(name, x)
    if array.ndim < 2:
        raise wrong_shape(name, array, "(..., length, channels)")
    by_channels = turned and array.shape[-2] > 1 and array.strides[-2] == array.itemsize
    return readable(array, name, [], "" if by_channels else "the last axis")


def _sequences(x: Array, begins: Any) -> tuple[Shape, Ints]:
    """The batch, and where its sequences begin among all tokens of x (..., length, channels)."""
    if begins is None:
        batch, length = x.shape[:-2], x.shape[-2]
        return batch, np.arange(math.prod(batch) + 1, dtype=np.int64) * length
    if x.ndim != 2:
        raise wrong_shape("x", x, "(tokens, channels), as begins is given")
    found = sequence_begins("begins", begins, "x", len(x))
    return (len(found) - 1,), found


def _given(name: str, x: Any, shape: Shape, dtype: np.dtype[Any]) -> Array:
    """`x` as an array of `shape` and `dtype`, those of the argument x."""
    array = like(name, x, shape, dtype, "x")
    if array is None:
        raise TypeError(f"(): {name} is None; expected an array")
    return array


def _lanes(x: Array, lane: np.dtype[Any]) -> Array:
    """`x`, parameters, side by side as `lane`, a lane type."""
    return x if x.dtype is lane and x.flags.c_contiguous else np.require(x, lane, ("C", "ALIGNED"))


def conv_args(
    x: Any,
    weight: Any,
    bias: Any = None,
    activation: Activation | None = None,
    state: Any = None,
    begins: Any = None,
    out: Any = None,
    num_threads: int | None = None,
    backend: str | None = None,
) -> ConvArgs:
    """Check the arguments of `ops.causal_conv1d`."""
    require_backend(backend)
    array = _tokens("x", x, turned=True)
    dtype, lane, channels = array.dtype, lane_dtype(array.dtype), array.shape[-1]
    taps = data("weight", weight)
    if taps.ndim != 2 or len(taps) != channels or not 1 <= taps.shape[1] <= MOST_WIDTH:
        expected = f"(channels, width) = ({channels}, 1 to {MOST_WIDTH})"
        raise wrong_shape("weight", taps, expected)
    width = taps.shape[1]
    taps = _lanes(taps, lane)
    bias_array = vector("bias", bias, (channels,), lane)
    if activation is not None:
        choice("activation", activation, ACTIVATIONS)
    batch, starts = _sequences(array, begins)
    before = like("state", state, (*batch, width - 1, channels), dtype)
    inputs: list[Any] = [("x", x, array), ("weight", weight, taps), ("bias", bias, bias_array)]
    inputs.append(("state", state, before))
    whole = result_array(out, array.shape, dtype, "x", inputs)
    return ConvArgs(
        batch, starts, begins is not None, array, whole, taps, bias_array, before, activation,
        threads(num_threads),
    )  # fmt: skip


def next_inputs(args: ConvArgs, out_state: Any, given: Any) -> Array:
    """Array for the inputs that a later call begins after: `out_state`, or a new one.

    It may be the state that was `given`.
    """
    shape = (*args.batch_shape, args.weight.shape[1] - 1, args.x.shape[-1])
    inputs: list[Any] = [
        (name, x, x) for name in ("x", "weight", "bias", "out") for x in (getattr(args, name),)
    ]
    if out_state is not given:
        inputs.append(("state", given, args.state))
    return result_array(out_state, shape, args.x.dtype, "x", inputs, "out_state")


def conv_grad_args(
    dout: Any, need: Any, dstate_out: Any, forward: dict[str, Any]
) -> tuple[ConvGradArgs, Array | None]:
    """Check the arguments of `grad.causal_conv1d`; also returns the gradient of the state after the last."""
    args = conv_args(**forward)
    names = needed(need, ("dx", "dweight", "dbias", "dstate"))
    cotangent = _given("dout", dout, args.x.shape, args.x.dtype)
    width, channels = args.weight.shape[1], args.x.shape[-1]
    state = (*args.batch_shape, width - 1, channels)
    after = like("dstate_out", dstate_out, state, args.x.dtype)
    sums = {"dweight", "dbias"} & set(names)
    return ConvGradArgs(
        args,
        cotangent,
        np.empty(args.x.shape, args.x.dtype) if "dx" in names else None,
        np.zeros(state, args.x.dtype) if "dstate" in names else None,
        np.empty((width + 1, channels), args.weight.dtype) if sums else None,
    ), after


def scan_args(
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    dt_softplus: bool = False,
    state: Any = None,
    begins: Any = None,
    return_state: bool = False,
    out_state: Any = None,
    out: Any = None,
    num_threads: int | None = None,
    backend: str | None = None,
) -> tuple[ScanArgs, Array | None]:
    """Check the arguments of `functional.selective_scan`; also returns the gate.

    With one, the scan's own result is not what the caller gets, but what the gate is multiplied with.
    """
    require_backend(backend)
    array = _tokens("x", x)
    dtype, lane, channels = array.dtype, lane_dtype(array.dtype), array.shape[-1]
    steps = _given("dt", dt, array.shape, dtype)
    rates = data("A", A)
    if rates.ndim != 2 or len(rates) != channels or not rates.shape[1]:
        raise wrong_shape("A", rates, f"(channels, states) = ({channels}, at least 1)")
    rates = _lanes(rates, lane)
    if np.isnan(rates).any():
        raise ValueError("(): A has NaN; expected numbers")
    states = rates.shape[1]
    b, c = (_given(name, given, (*array.shape[:-1], states), dtype) for name, given in (("B", B), ("C", C)))
    skip, bias = vector("D", D, (channels,), lane), vector("dt_bias", dt_bias, (channels,), lane)
    softplus = flag("dt_softplus", dt_softplus)
    batch, starts = _sequences(array, begins)
    shape = (*batch, channels, states)
    before = like("state", state, shape, lane)
    inputs: list[Any] = [("x", x, array), ("dt", dt, steps), ("A", A, rates), ("B", B, b), ("C", C, c)]
    gate = like("z", z, array.shape, dtype, "x")
    inputs += [("D", D, skip), ("dt_bias", dt_bias, bias), ("z", z, gate)]
    whole = result(out, array.shape, dtype, [*inputs, ("state", state, before)])
    others = [*inputs, ("out", whole, whole)]
    if out_state is not state:
        others.append(("state", state, before))
    after = result_array(out_state, shape, lane, "the state", others, "out_state")
    with_state = flag("return_state", return_state) or out_state is not None
    scanned = whole if gate is None else np.empty(array.shape, dtype)
    return ScanArgs(
        batch, starts, begins is not None, array, steps, scanned, b, c, rates, skip, bias, before, after,
        softplus, threads(num_threads), (whole, after) if with_state else whole,
    ), gate  # fmt: skip


def step_limits(dt_limits: Any) -> tuple[float, float]:
    """`dt_limits`, the range that steps of a scan are cut to."""
    expected = "a pair of numbers, 0 <= first <= second"
    if not isinstance(dt_limits, tuple) or len(dt_limits) != 2:
        raise ValueError(f"(): dt_limits is {short(dt_limits)}; expected {expected}")
    numbers = all(isinstance(x, (int, float, np.floating)) and not isinstance(x, bool) for x in dt_limits)
    if not numbers or not 0 <= dt_limits[0] <= dt_limits[1]:
        raise ValueError(f"(): dt_limits is {short(dt_limits)}; expected {expected}")
    return dt_limits


def scan_grad_args(args: ScanArgs, dout: Array, need: Collection[str], dstate_out: Any) -> ScanGradArgs:
    """The arguments of its gradient, of a checked `dout`."""
    lane = args.rates.dtype

    def room(name: str, shape: Shape, dtype: Any = lane) -> Array | None:
        return np.empty(shape, dtype) if name in need else None

    x, state = args.x, args.state_out.shape
    return ScanGradArgs(
        args, dout, dstate_out,
        room("dx", x.shape, x.dtype), room("ddt", x.shape, x.dtype), room("dB", args.b.shape),
        room("dC", args.c.shape), room("dA", args.rates.shape), room("dD", x.shape[-1:]),
        room("ddt_bias", x.shape[-1:]), room("dstate", state),
    )  # fmt: skip
