"""Causal convolution and the selective scan in NumPy: the readable twins of the kernels, and the fallback."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from fastattn._args.blocks import BLOCK
from fastattn._args.grad_types import ConvGradArgs, ScanGradArgs
from fastattn._args.quiet import quiet
from fastattn._args.recurrent_types import ConvArgs, ScanArgs, each_sequence
from fastattn._args.types import Array
from fastattn._reference.activations import activate, slope


def _blocks(x: Array, width: int = 1) -> Iterator[tuple[int, int]]:
    """Ranges of the tokens of x (..., length, channels), with up to BLOCK numbers of `width` each."""
    length = x.shape[-2]
    step = max(1, BLOCK // max(1, x.size // max(1, length) * width))
    for begin in range(0, length, step):
        yield begin, min(begin + step, length)


def _inputs(x: Array, state: Array | None, begin: int, end: int, before: int, lane: Any) -> Array:
    """Tokens begin - `before` to `end` of x, in lanes; those before the first are of the state, or 0."""
    missing = max(0, before - begin)
    found: Array = x[..., max(0, begin - before) : end, :].astype(lane)
    if not missing:
        return found
    if state is None:
        head = np.zeros((*x.shape[:-2], missing, x.shape[-1]), lane)
    else:
        head = state[..., state.shape[-2] - missing :, :].astype(lane)
    return np.concatenate([head, found], axis=-2)


def _pre(args: ConvArgs, x: Array, state: Array | None, begin: int, end: int) -> Array:
    """Sums of tokens [begin, end), before the activation."""
    lane, width = args.weight.dtype, args.weight.shape[1]
    inputs = _inputs(x, state, begin, end, width - 1, lane)
    total = np.zeros((*x.shape[:-2], end - begin, x.shape[-1]), lane)
    if args.bias is not None:
        total += args.bias
    for w in range(width):
        total += args.weight[:, w] * inputs[..., w : w + end - begin, :]
    return total


@quiet
def conv(args: ConvArgs) -> None:
    """Fill args.out."""
    for tokens, s in each_sequence(args):
        x, state = args.x[tokens], None if args.state is None else args.state[s]
        for begin, end in _blocks(x):
            args.out[tokens][..., begin:end, :] = activate(_pre(args, x, state, begin, end), args.activation)


@quiet
def conv_grad(args: ConvGradArgs) -> None:
    """Fill args.dx, args.dstate and args.sums, those that are there."""
    a = args.forward
    lane, width = a.weight.dtype, a.weight.shape[1]
    if args.sums is not None:
        args.sums[...] = 0
    for tokens, s in each_sequence(a):
        x, state, length = a.x[tokens], None if a.state is None else a.state[s], a.x[tokens].shape[-2]
        for begin, end in _blocks(x):
            last = min(length, end + width - 1)  # dx needs dpre of later tokens
            dpre = args.dout[tokens][..., begin:last, :].astype(lane)
            if a.activation is not None:
                dpre = dpre * slope(_pre(a, x, state, begin, last), a.activation)
            # dx of tokens from begin - (width - 1) on; those before the first are of the state.
            first = begin if begin else 1 - width
            dx = np.zeros((*x.shape[:-2], end - first, x.shape[-1]), lane)
            for w in range(width):  # token t gets from dpre of token t + width - 1 - w
                shift = width - 1 - w
                low, high = max(first, begin - shift), min(end, last - shift)
                if low < high:
                    part = dpre[..., low + shift - begin : high + shift - begin, :]
                    dx[..., low - first : high - first, :] += a.weight[:, w] * part
            if args.dx is not None:
                args.dx[tokens][..., begin:end, :] = dx[..., begin - first :, :]
            if args.dstate is not None and not begin:
                args.dstate[s] = dx[..., : width - 1, :]
            if args.sums is not None:
                _add_parameters(
                    args.sums, dpre[..., : end - begin, :], _inputs(x, state, begin, end, width - 1, lane)
                )


def _add_parameters(sums: Array, dpre: Array, inputs: Array) -> None:
    """sums (width + 1, channels) += the sums over tokens of dpre times its inputs, and of dpre."""
    axes, n = tuple(range(dpre.ndim - 1)), dpre.shape[-2]
    for w in range(len(sums) - 1):
        sums[w] += (dpre * inputs[..., w : w + n, :]).sum(axes)
    sums[-1] += dpre.sum(axes)


class _Steps(NamedTuple):
    """Numbers of some tokens, all (..., tokens, channels) in lanes."""

    x: Array
    raw: Array  # what softplus is applied to
    step: Array


def softplus(x: Array) -> Array:
    """log(1 + e^x), without its overflow."""
    result: Array = np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
    return result


def _steps(a: ScanArgs, tokens: Any, begin: int, end: int) -> _Steps:
    lane = a.rates.dtype
    x, raw = (y[tokens][..., begin:end, :].astype(lane) for y in (a.x, a.dt))
    if a.dt_bias is not None:
        raw = raw + a.dt_bias
    return _Steps(x, raw, softplus(raw) if a.softplus else raw)


def _flush(h: Array) -> Array:
    """0 for denormal numbers, as the kernels have it."""
    h[np.abs(h) < np.finfo(h.dtype).tiny] = 0
    return h


@quiet
def scan(a: ScanArgs) -> None:
    """Fill args.out and args.state_out."""
    lane = a.rates.dtype
    for tokens, s in each_sequence(a):
        out, c = a.out[tokens], a.c[tokens]
        h = np.zeros(a.state_out[s].shape, lane) if a.state is None else a.state[s].copy()
        for begin, end in _blocks(a.x[tokens], 2 * a.rates.shape[1]):
            x, states = a.x[tokens], _states(a, tokens, begin, end, h)[0]
            for t, h in enumerate(states[1:], begin):
                total = (h * c[..., t, None, :].astype(lane)).sum(-1)
                out[..., t, :] = total if a.skip is None else total + a.skip * x[..., t, :].astype(lane)
        a.state_out[s] = h


@quiet
def scan_grad(args: ScanGradArgs) -> None:
    """Fill the gradients of `args` that are there."""
    a = args.forward
    lane = a.rates.dtype
    for x in (args.drates, args.dskip, args.dbias):
        if x is not None:
            x[...] = 0
    for tokens, s in each_sequence(a):
        h = np.zeros(a.state_out[s].shape, lane) if a.state is None else a.state[s].copy()
        dh = np.zeros_like(h) if args.dstate_out is None else args.dstate_out[s].copy()
        before, ranges = [], list(_blocks(a.x[tokens], 2 * a.rates.shape[1]))
        for begin, end in ranges:  # forth, to keep the states before the blocks
            before.append(h)
            h = _states(a, tokens, begin, end, h)[0][-1]
        for (begin, end), h in zip(reversed(ranges), reversed(before), strict=True):
            dh = _scan_back(args, tokens, begin, end, h, dh)
        if args.dstate is not None:
            args.dstate[s] = dh


def _states(a: ScanArgs, tokens: Any, begin: int, end: int, h: Array) -> tuple[list[Array], list[Array]]:
    """The states after each token, from the one before the first, which leads the list; and the decays."""
    y, b = _steps(a, tokens, begin, end), a.b[tokens]
    states, decays = [h], []
    for t in range(begin, end):
        step, x = y.step[..., t - begin, :, None], y.x[..., t - begin, :, None]
        decays.append(np.exp(step * a.rates))
        states.append(_flush(decays[-1] * states[-1] + step * x * b[..., t, None, :].astype(a.rates.dtype)))
    return states, decays


def _scan_back(args: ScanGradArgs, tokens: Any, begin: int, end: int, h: Array, dh: Array) -> Array:
    """Gradients of tokens [begin, end), before which the state is h; dh is that of the state after them."""
    a, lane = args.forward, args.forward.rates.dtype
    states, decays = _states(a, tokens, begin, end, h)
    y = _steps(a, tokens, begin, end)
    b, c, dout = (x[tokens][..., begin:end, :].astype(lane) for x in (a.b, a.c, args.dout))
    batch = tuple(range(dh.ndim - 2))
    for i in reversed(range(end - begin)):
        given, x, step = dout[..., i, :, None], y.x[..., i, :, None], y.step[..., i, :, None]
        dh = dh + given * c[..., i, None, :]
        of_written = (dh * b[..., i, None, :]).sum(-1)
        of_decay = dh * decays[i] * states[i]
        ddt = x[..., 0] * of_written + (of_decay * a.rates).sum(-1)
        if a.softplus:
            ddt = ddt * (0.5 + 0.5 * np.tanh(0.5 * y.raw[..., i, :]))
        if args.dx is not None:
            dx = step[..., 0] * of_written
            args.dx[tokens][..., begin + i, :] = dx if a.skip is None else dx + a.skip * given[..., 0]
        if args.ddt is not None:
            args.ddt[tokens][..., begin + i, :] = ddt
        if args.db is not None:
            args.db[tokens][..., begin + i, :] = (dh * step * x).sum(-2)
        if args.dc is not None:
            args.dc[tokens][..., begin + i, :] = (given * states[i + 1]).sum(-2)
        if args.drates is not None:
            args.drates += (of_decay * step).sum(batch)
        if args.dskip is not None:
            args.dskip += (given * x)[..., 0].sum(batch)
        if args.dbias is not None:
            args.dbias += ddt.sum(batch)
        dh = _flush(dh * decays[i])
    return dh
