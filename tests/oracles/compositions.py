"""Variants of attention that take several lines over fastattn: as a user writes them."""

import numpy as np

from fastattn import attention, ops
from fastattn import functional as F
from fastattn.grad import vjp


def rebased_features(x, gamma, beta):
    """Squares and products of normalised x: ``(q . k)^2``, but for a factor that `normalize` takes out."""
    return F.feature_maps.taylor(ops.layer_norm(x, gamma, beta))[..., 1 + x.shape[-1] :]


def slot_scores(q, k, write, log_decay):
    """Products of q with each slot's key: the state times q, as a gradient of q is the state times dout."""
    _, pullback = vjp(F.gated_linear_attention, write, write, k, log_decay, scale=1.0)  # of any queries
    return pullback(q, need=("dq",))[0]


def slot_scores_by_heads(q, k, write, log_decay):
    """Products as in `slot_scores`, but with gradients: each slot is a head, whose values are its writes."""

    def each_slot(x):  # (..., heads * slots, len)
        return x.swapaxes(-1, -2).reshape(*x.shape[:-3], -1, x.shape[-2])

    decay, values = each_slot(log_decay), each_slot(write)[..., None]
    out = F.linear_attention(q, k, values, rule="decay", log_decay=decay, scale=1.0)
    return out.reshape(*write.shape[:-2], write.shape[-1], write.shape[-2]).swapaxes(-1, -2)


def gated_slots(q, k, v, write, log_decay, scores=slot_scores):
    """Gated slot attention; `write` and `log_decay` are (..., heads, len, slots)."""
    p = ops.softmax(scores(q, k, write, log_decay))
    return F.gated_linear_attention(p, write, v, log_decay, scale=1.0)


def bounded_memory(q, k, v, control):
    """ABC: slots hold means of keys and of values by exp(control), (..., heads, len, slots)."""
    total = np.logaddexp.accumulate(control, axis=-2, dtype=np.float64)
    log_decay = np.full_like(control, -np.inf)
    log_decay[..., 1:, :] = np.minimum(total[..., :-1, :] - total[..., 1:, :], 0)
    write = np.exp(control - total).astype(control.dtype)
    return gated_slots(q, k, v, write, log_decay)


def rwkv4(k, v, w, u):
    """RWKV-4's mean of values, for k and v (..., len, channels); w >= 0 and u are (channels,).

    Each channel is a head. Its keys are divided by the largest weight so far, exp(top): none overflows.
    """
    fade = w * np.arange(k.shape[-2], dtype=np.float64)[:, None]
    top = np.maximum.accumulate(k + fade, axis=-2) - fade
    before = np.concatenate([np.full_like(top[..., :1, :], -np.inf), top[..., :-1, :]], axis=-2)
    key, log_decay = np.exp(k - top), np.minimum(before - w - top, 0)
    keys, values, decays = (x.swapaxes(-1, -2).astype(k.dtype)[..., None] for x in (key, v, log_decay))
    values = np.concatenate([values, np.ones_like(values)], axis=-1)
    ones, decays = np.ones_like(keys), decays[..., 0]
    sums = F.linear_attention(ones, keys, values, rule="decay", log_decay=decays, scale=1.0)
    past = np.zeros((*k.shape, 2), k.dtype)  # what stood before each token
    past[..., 1:, :, :] = sums.swapaxes(-2, -3)[..., :-1, :, :]
    most = np.maximum(before, u + k)
    old, own = np.exp(before - most), np.exp(u + k - most)
    return ((old * past[..., 0] + own * v) / (old * past[..., 1] + own)).astype(k.dtype)


def rwkv6(r, k, v, log_w, u):
    """RWKV-6: the state before a token, and the token itself with a bonus u (heads, head_dim).

    `log_w` is (..., heads, len, head_dim), and (heads, 1, head_dim) in RWKV-5.
    """
    out = (r * u[:, None] * k).sum(-1, keepdims=True) * v
    gates = log_w if log_w.shape[-2] == 1 else log_w[..., :-1, :]
    out[..., 1:, :] += F.gated_linear_attention(
        r[..., 1:, :], k[..., :-1, :], v[..., :-1, :], gates, scale=1.0
    )
    return out


def hopfield(state, stored, beta, steps):
    """Modern Hopfield network: states (..., heads, n, d) move towards what is stored (..., heads, m, d)."""
    for _ in range(steps):
        state = attention(state, stored, stored, scale=beta)
    return state


def grouped_latent(q, caches, key_weights, value_weights, **options):
    """Grouped latent attention: every group of q (batch, groups, heads, len, d) has a cache of its own."""
    parts = zip(q.swapaxes(0, 1), caches, key_weights, value_weights, strict=True)
    return np.concatenate([F.latent_attention(*part, **options) for part in parts], axis=1)
