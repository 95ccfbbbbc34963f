"""The parts of models in plain NumPy, one sequence at a time."""

import math

import numpy as np


def layer_norm(x, t, name, eps=1e-5):
    z = x - x.mean(-1, keepdims=True)
    z = z / np.sqrt((z * z).mean(-1, keepdims=True) + eps)
    return z * t[f"{name}.weight"] + t.get(f"{name}.bias", 0.0)


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def linear(x, t, name):
    return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", 0.0)


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x):
    return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + np.exp(-x))


def rotated(x, theta, slower=1.0):
    """x (L, heads, D), rotated by its position."""
    n, half = len(x), x.shape[-1] // 2
    angles = np.outer(np.arange(n), theta ** -(np.arange(half) / half) / slower)
    cos, sin = (np.concatenate([f(angles)] * 2, axis=1)[:, None] for f in (np.cos, np.sin))
    return x * cos + np.concatenate([-x[..., half:], x[..., :half]], axis=-1) * sin


def attend(q, k, v, allowed, bias=0.0, scale=None, cap=None, sinks=None):
    """q is (L, heads, D), k and v (L, heads_kv, D), allowed (L, L); result (L, heads * D).

    Scores are kept within `cap`; `sinks` (heads,) enter the denominator alone.
    """
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = capped(np.einsum("ihd,jhd->hij", q, k) * scale + bias, cap)
    most = scores.max(-1, keepdims=True)
    probs = np.exp(scores - most) * allowed
    total = probs.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - most)
    return np.einsum("hij,jhd->ihd", probs / total, v).reshape(len(q), -1)


def capped(x, cap):
    return x if cap is None else cap * np.tanh(x / cap)
