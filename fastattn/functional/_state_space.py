"""State space models: Mamba's scan by channels, Mamba-2's by heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn import grad, ops
from fastattn._args.backward import of_source
from fastattn._args.channels import scan_args, scan_grad_args, step_limits
from fastattn._args.errors import wrong_dtype, wrong_shape
from fastattn._args.ops import like, vector
from fastattn._args.options import Backend
from fastattn._args.recurrent import recurrent_args
from fastattn._args.results import result_array
from fastattn._args.types import Array, ArrayLike, lane_dtype
from fastattn._args.values import flag, operand, real_array, sequence_begins
from fastattn._engine import dispatch
from fastattn._reference.channels import softplus
from fastattn.functional._differentiable import Request, Steps, differentiable
from fastattn.functional._recurrent import gradients_of

if TYPE_CHECKING:
    Result = Array | tuple[Array, Array]  # the state where it is asked for


@differentiable("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "state")
def selective_scan(
    x: ArrayLike,
    dt: ArrayLike,
    A: ArrayLike,
    B: ArrayLike,
    C: ArrayLike,
    D: ArrayLike | None = None,
    *,
    z: ArrayLike | None = None,
    dt_bias: ArrayLike | None = None,
    dt_softplus: bool = False,
    state: ArrayLike | None = None,
    begins: ArrayLike | None = None,
    return_state: bool = False,
    out_state: Array | None = None,
    out: Array | None = None,
    num_threads: int | None = None,
    backend: Backend | None = None,
) -> Steps[Result]:
    r"""Selective scan of Mamba: ``h_t = exp(s_t A) h_{t-1} + s_t x_t B_t``, ``out_t = h_t @ C_t + D x_t``.

    Each channel has a state of a few numbers. The step s_t is ``dt_t + dt_bias``, or its softplus.

    Parameters
    ----------
    x : array_like, (..., length, channels) or, with `begins`, (tokens, channels)
        float32, float64, float16 or bfloat16.
    dt : array_like, x's shape
    A : array_like, (channels, states)
        In the paper ``-exp(A_log)``; above 0, states grow without bound.
    B, C : array_like, (..., length, states) or, with `begins`, (tokens, states)
        In x's dtype.
    D : array_like, (channels,), optional
    z : array_like, x's shape, optional
        Gates: the result is multiplied by ``silu(z)``.
    dt_bias : array_like, (channels,), optional
    dt_softplus : bool, default False
    state : array_like, (..., channels, states) or, with `begins`, (sequences, channels, states), optional
        Initial state, default 0: float32, or float64 for float64 x.
    begins, return_state, out_state
        As in `linear_attention`.
    out, num_threads, backend
        As in `attention`; out has x's shape and dtype.

    Returns
    -------
    out : ndarray
        In x's shape and dtype.
    state : ndarray, `state`'s shape
        Only with `return_state` or `out_state`.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    One exponential and three multiply-adds per number of a state. A result has the same bits whatever the
    other sequences. Gradients recompute the states from one kept for every 32 tokens. Source: A. Gu and T.
    Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023, arXiv:2312.00752.

    Examples
    --------
    >>> import numpy as np
    >>> from fastattn.functional import selective_scan
    >>> x = np.ones((2, 10, 6), np.float32)
    >>> A, B = -np.ones((6, 4), np.float32), np.ones((2, 10, 4), np.float32)
    >>> out, state = selective_scan(x, x, A, B, B, return_state=True)
    >>> out.shape, state.shape
    ((2, 10, 6), (2, 6, 4))
    """
    args, gate = scan_args(
        x, dt, A, B, C, D, z, dt_bias, dt_softplus, state, begins, return_state, out_state, out, num_threads,
        backend,
    )  # fmt: skip
    compute: Any = {"num_threads": num_threads, "backend": backend}
    dispatch.run(args, backend)
    scanned = args.out
    if gate is not None:
        whole = args.result[0] if isinstance(args.result, tuple) else args.result
        ops.activate(gate, "silu", up=scanned, out=whole, **compute)
    request = yield args.result

    dout = request.dout
    found: dict[str, Any] = {}
    if gate is not None:
        found["dz"], dout = grad.activate(dout, gate, "silu", up=scanned, **compute)
    back = scan_grad_args(args, dout, request.need, request.dmore)
    dispatch.run_grad(back, backend)
    found |= {
        "dx": back.dx, "ddt": back.ddt, "dA": back.drates, "dB": back.db, "dC": back.dc, "dD": back.dskip,
        "ddt_bias": back.dbias, "dstate": back.dstate,
    }  # fmt: skip
    return tuple(of_source(request.given[name[1:]], found[name]) for name in request.need)


@differentiable("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "state")
def mamba2_scan(
    x: ArrayLike,
    dt: ArrayLike,
    A: ArrayLike,
    B: ArrayLike,
    C: ArrayLike,
    D: ArrayLike | None = None,
    *,
    z: ArrayLike | None = None,
    dt_bias: ArrayLike | None = None,
    dt_softplus: bool = False,
    dt_limits: tuple[float, float] = (0.0, np.inf),
    state: ArrayLike | None = None,
    begins: ArrayLike | None = None,
    return_state: bool = False,
    out_state: Array | None = None,
    num_threads: int | None = None,
    backend: Backend | None = None,
) -> Steps[Result]:
    r"""Scan of Mamba-2: ``S_t = exp(s_t A) S_{t-1} + B_t (s_t x_t)^T``, ``out_t = S_t^T C_t + D x_t``.

    Each head has one decay and a matrix as its state. The step s_t is ``dt_t + dt_bias``, or its softplus,
    clipped to `dt_limits`. Equals `linear_attention` with rule "decay", queries C, keys B and values s_t x_t.

    Parameters
    ----------
    x : array_like, (..., heads, length, head_dim) or, with `begins`, (heads, tokens, head_dim)
        float32, float64, float16 or bfloat16.
    dt : array_like, (..., heads, length)
    A : array_like, (heads,)
        At most 0; in the paper ``-exp(A_log)``.
    B, C : array_like, (..., groups, length, states)
        In x's dtype. Head h reads group ``h // (heads // groups)``.
    D : array_like, (heads,), optional
    z : array_like, x's shape, optional
        Gates: the result is multiplied by ``silu(z)``.
    dt_bias : array_like, (heads,), optional
    dt_softplus : bool, default False
    dt_limits : (float, float), default (0, inf)
    state : array_like, (..., heads, states, head_dim), optional
        Initial state, default 0: float32, or float64 for float64 x. Other libraries store
        (..., heads, head_dim, states). With `begins`, (sequences, heads, states, head_dim).
    begins, return_state, out_state
        As in `linear_attention`.
    num_threads, backend
        As in `attention`.

    Returns
    -------
    out : ndarray, x's shape
    state : ndarray, `state`'s shape
        Only with `return_state` or `out_state`.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    Costs as much as `linear_attention`, and with z a pass over x. Source: T. Dao and A. Gu, "Transformers are
    SSMs", 2024, arXiv:2405.21060.

    Examples
    --------
    >>> import numpy as np
    >>> from fastattn.functional import mamba2_scan
    >>> x, B = np.ones((4, 10, 8), np.float32), np.ones((1, 10, 16), np.float32)
    >>> out, state = mamba2_scan(x, x[..., 0], -np.ones(4, np.float32), B, B, return_state=True)
    >>> out.shape, state.shape
    ((4, 10, 8), (4, 16, 8))
    """
    h = _heads(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limits)
    compute: Any = {"num_threads": num_threads, "backend": backend}
    decays = without_nan(h.step * h.rates[:, None])
    with_state = flag("return_state", return_state) or out_state is not None
    if begins is not None:
        if h.x.ndim != 3:
            raise wrong_shape("x", h.x, "(heads, tokens, head_dim), as begins is given")
        begins = sequence_begins("begins", begins, "x", h.x.shape[1])
    options: dict[str, Any] = {
        "rule": "decay", "log_decay": decays, "scale": 1.0, "state": state, "begins": begins, **compute,
    }  # fmt: skip
    inputs: list[Any] = [
        ("x", x, h.x), ("dt", dt, h.raw), ("A", A, h.rates), ("B", B, h.b), ("C", C, h.c), ("D", D, h.skip),
        ("z", z, h.gate), ("dt_bias", dt_bias, None),
    ]  # fmt: skip
    if isinstance(out_state, np.ndarray):
        result_array(out_state, out_state.shape, out_state.dtype, "the state", inputs, "out_state")
    args = recurrent_args(h.c, h.b, h.x, **options, return_state=True, out_state=out_state)
    args.strength, args.skip = h.step, h.skip
    dispatch.run(args, backend)
    scanned, after = args.result
    whole = scanned if h.gate is None else ops.activate(h.gate, "silu", up=scanned, **compute)
    request = yield (whole, after) if with_state else whole

    dout = request.dout
    found: dict[str, Any] = {}
    if h.gate is not None:
        found["dz"], dout = grad.activate(dout, h.gate, "silu", up=scanned, **compute)
    need = tuple(n for n, of in _OF_RECURRENCE.items() if {*of} & {*request.need})
    values = (h.x * h.step[..., None]).astype(h.x.dtype, copy=False)
    inner = Request(dout, request.dmore, need), recurrent_args(h.c, h.b, values, **options)
    parts = dict(zip(need, gradients_of(*inner, options, backend), strict=True))
    found |= {"dB": parts.get("dk"), "dC": parts.get("dq"), "dstate": parts.get("dstate")}
    lane = h.step.dtype
    if "dv" in parts:
        dv, wide = parts["dv"].astype(lane), dout.astype(lane)
        found["dx"] = dv * h.step[..., None]
        if h.skip is not None:
            found["dx"] += h.skip[:, None, None] * wide
            found["dD"] = _sum_to_heads((wide * h.x).sum(-1))
        dstep = (dv * h.x).sum(-1)
        if "dlog_decay" in parts:
            found["dA"] = _sum_to_heads(parts["dlog_decay"] * h.step)
            dstep = dstep + parts["dlog_decay"] * h.rates[:, None]
        found["ddt"] = dstep * _slopes(h, dt_softplus, dt_limits)
        found["ddt_bias"] = _sum_to_heads(found["ddt"])
    return tuple(of_source(request.given[name[1:]], found[name]) for name in request.need)


# Which gradients of the recurrence those of `mamba2_scan` are made of.
_OF_RECURRENCE = {
    "dq": ("dC",),
    "dk": ("dB",),
    "dv": ("dx", "ddt", "dA", "dD", "ddt_bias"),
    "dlog_decay": ("ddt", "dA", "ddt_bias"),
    "dstate": ("dstate",),
}


class _Heads(NamedTuple):
    """Checked arguments of `mamba2_scan`; numbers of heads and tokens in lanes."""

    x: Array
    b: Array
    c: Array
    raw: Array  # (..., heads, length): what softplus is applied to
    step: Array  # the same
    rates: Array  # (heads,)
    skip: Array | None
    gate: Array | None


def _heads(
    x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any, dt_bias: Any, dt_softplus: Any, dt_limits: Any
) -> _Heads:
    """Check the arguments of `mamba2_scan`, except those that `linear_attention` checks."""
    values = operand("x", x, [])
    if values.ndim < 3:
        raise wrong_shape("x", values, "(..., heads, length, head_dim)")
    lane, heads = lane_dtype(values.dtype), values.shape[-3]
    given = real_array("dt", dt)
    if given.shape != values.shape[:-1]:
        raise wrong_shape("dt", given, f"(..., heads, length) = {values.shape[:-1]}")
    rates = vector("A", A, (heads,), lane)
    if rates is None:
        raise TypeError("(): A is None; expected an array")
    if not rates.max(initial=0) <= 0:
        raise ValueError(f"(): A has {rates.max()}; expected 0 or less")
    skip, bias = vector("D", D, (heads,), lane), vector("dt_bias", dt_bias, (heads,), lane)
    gate = like("z", z, values.shape, values.dtype, "x")
    limits = step_limits(dt_limits)
    b, c = operand("B", B, []), operand("C", C, [])
    groups = b.shape[-3] if b.ndim > 2 else 0
    if b.ndim != values.ndim or b.shape[:-3] != values.shape[:-3] or b.shape[-2] != values.shape[-2]:
        raise wrong_shape("B", b, f"(..., groups, length, states), as x, {values.shape}, has them")
    if not groups or heads % groups:
        raise wrong_shape("B", b, f"(..., groups, length, states), groups a divisor of {heads}")
    if c.shape != b.shape:
        raise wrong_shape("C", c, f"B's, {b.shape}")
    for name, array in (("B", b), ("C", c)):
        if array.dtype != values.dtype:
            raise wrong_dtype(name, array, f"x's, {values.dtype}")
    raw = given.astype(lane, copy=False)
    if bias is not None:
        raw = raw + bias[:, None]
    step = softplus(raw) if flag("dt_softplus", dt_softplus) else raw
    step = np.clip(step, *map(lane.type, limits))
    return _Heads(values, b, c, raw, step, rates, skip, gate)


def _slopes(h: _Heads, by_softplus: bool, limits: tuple[float, float]) -> Array:
    """Derivative of each step with respect to its dt; 0 where the step was clipped."""
    given = softplus(h.raw) if by_softplus else h.raw
    slopes: Array = 0.5 + 0.5 * np.tanh(0.5 * h.raw) if by_softplus else np.ones_like(h.raw)
    return slopes * ((given >= limits[0]) & (given <= limits[1]))


def without_nan(log_decay: Array) -> Array:
    """`log_decay` with 0 for NaN; the values of that token carry the NaN on."""
    found: Array = np.where(np.isnan(log_decay), log_decay.dtype.type(0), log_decay)
    return found


def _sum_to_heads(x: Array) -> Array:
    """Sums (heads,) of x (..., heads, length) over tokens and batch."""
    total: Array = x.sum((*range(x.ndim - 2), -1))
    return total
