"""Causal convolution and the selective scan by their definitions, token by token in float64."""

import numpy as np


def softplus(x):
    return np.logaddexp(0, x)


def silu(x):
    return x * (0.5 + 0.5 * np.tanh(x / 2))


def conv(x, weight, bias=None, activation=None, state=None):
    """Results (..., length, channels) and the last width - 1 inputs."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    channels, width = weight.shape
    before = (
        np.zeros((*x.shape[:-2], width - 1, channels)) if state is None else np.asarray(state, np.float64)
    )
    whole = np.concatenate([before, x], axis=-2)
    out = np.zeros(x.shape)
    for t in range(x.shape[-2]):
        for w in range(width):
            out[..., t, :] += weight[:, w] * whole[..., t + w, :]
    if bias is not None:
        out += np.asarray(bias, np.float64)
    return (silu(out) if activation == "silu" else out), whole[..., whole.shape[-2] - (width - 1) :, :]


def scan(x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state=None):
    """Results (..., length, channels) and the state after the last token."""
    x, dt, A, B, C = (np.asarray(y, np.float64) for y in (x, dt, A, B, C))
    h = np.zeros((*x.shape[:-2], *A.shape)) if state is None else np.array(state, np.float64)
    step = dt if dt_bias is None else dt + np.asarray(dt_bias, np.float64)
    step = softplus(step) if dt_softplus else step
    out = np.zeros(x.shape)
    for t in range(x.shape[-2]):
        s, value = step[..., t, :, None], x[..., t, :, None]
        h = np.exp(s * A) * h + s * value * B[..., t, None, :]
        out[..., t, :] = (h * C[..., t, None, :]).sum(-1)
    if D is not None:
        out += np.asarray(D, np.float64) * x
    return (out if z is None else out * silu(np.asarray(z, np.float64))), h


def mamba2(
    x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, dt_limits=(0, np.inf), state=None
):
    """Results (..., heads, length, head_dim) and the last state (..., heads, states, head_dim)."""
    x, dt, A, B, C = (np.asarray(y, np.float64) for y in (x, dt, A, B, C))
    B, C = (np.repeat(y, x.shape[-3] // y.shape[-3], axis=-3) for y in (B, C))
    shape = (*x.shape[:-2], B.shape[-1], x.shape[-1])
    h = np.zeros(shape) if state is None else np.array(state, np.float64)
    step = dt if dt_bias is None else dt + np.asarray(dt_bias, np.float64)[:, None]
    step = np.clip(softplus(step) if dt_softplus else step, *dt_limits)
    out = np.zeros(x.shape)
    for t in range(x.shape[-2]):
        s = step[..., t, None, None]
        h = np.exp(s * A[:, None, None]) * h + B[..., t, :, None] * (s * x[..., t, None, :])
        out[..., t, :] = (h * C[..., t, :, None]).sum(-2)
    if D is not None:
        out += np.asarray(D, np.float64)[:, None, None] * x
    return (out if z is None else out * silu(np.asarray(z, np.float64))), h
