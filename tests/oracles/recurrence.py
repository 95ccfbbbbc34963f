"""Linear attention token by token in float64, and its gradient by the same recurrence backwards.

q, k and v are (heads of each, len, dim); a state is (heads, head_dim, head_dim_v), the sum of the keys
(heads, head_dim).
"""

import numpy as np
from precisions import BF16

RULES = ["linear", "decay", "gated", "delta", "gated_delta", "kimi_delta"]


def problem(rule, heads, n, head_dim, head_dim_v, dtype=np.float32, seed=0, strong=False,
            erase=False):  # fmt: skip
    """q, k, v and what else the rule needs. Keys have length 1 where the delta rule needs it to be stable."""
    rng = np.random.default_rng(seed)
    heads_q, heads_k, heads_v = heads if isinstance(heads, tuple) else (heads,) * 3
    states = max(heads_k, heads_v)
    q, k = rng.standard_normal((heads_q, n, head_dim)), rng.standard_normal((heads_k, n, head_dim))
    v = rng.standard_normal((heads_v, n, head_dim_v))
    if "delta" in rule:
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
    lane = np.float64 if dtype == np.float64 else np.float32
    more = {}
    if rule in ("decay", "gated_delta", "gated", "kimi_delta"):
        shape = (states, n, head_dim) if rule in ("gated", "kimi_delta") else (states, n)
        more["log_decay"] = -np.exp(rng.standard_normal(shape) - 2).astype(lane)
        if strong:
            more["log_decay"] = rng.choice([-np.inf, -20.0, -1e-3, 0.0, -3.0], shape).astype(lane)
    if "delta" in rule:
        more["beta"] = rng.uniform(0, 1, (states, n)).astype(lane)
    if erase:  # keys between 0 and those to write by: the state does not grow
        more["erase"] = (k * rng.uniform(0, 1, k.shape)).astype(dtype)
    return q.astype(dtype), k.astype(dtype), v.astype(dtype), more


def close(actual, expected, factor=64, floor=0.0, share=4):
    """Errors are at most `factor` roundings, as accumulated, of the largest of each row, or a part of all.

    `share` is what the largest of all is divided by.
    """
    if isinstance(expected, tuple):
        for a, e in zip(actual, expected, strict=True):
            close(a, e, factor, floor, share)
        return
    if isinstance(actual, float):
        return
    assert actual.shape == expected.shape
    if not expected.size:
        return
    unit = 2.0**-52 if actual.dtype == np.float64 else 2.0**-23
    own = {np.dtype(np.float16): 2.0**-10, BF16: 2.0**-7}.get(actual.dtype, 0)
    most = np.abs(expected).max(axis=-1, keepdims=True) + np.abs(expected).max() / share
    bound = factor * unit * most + own * np.abs(expected) + 1e-7 * (own > 0)
    far = np.abs(actual.astype(np.float64) - expected) / (bound + floor + np.finfo(np.float32).tiny)
    assert (far <= 1).all(), f"{far.max():.3g} of the bound"


def gates(heads, n, head_dim, log_decay, beta):
    """Decays (heads, n, head_dim) and strengths (heads, n), of what the call was given."""
    a = np.ones((heads, n, head_dim)) if log_decay is None else np.exp(np.asarray(log_decay, np.float64))
    a = a[:, None, None] if a.ndim == 1 else a[..., None] if a.ndim == 2 else a
    b = np.ones((heads, n)) if beta is None else np.asarray(beta, np.float64)
    return np.broadcast_to(a, (heads, n, head_dim)), np.broadcast_to(b, (heads, n))


def wide(x, heads):
    """x in float64, each of its heads repeated for the states that share one."""
    return np.repeat(np.asarray(x, np.float64), heads // len(x), axis=0)


class Recurrence:
    """One call's out, all states s and all sums of keys z, with those before the first token."""

    def __init__(self, q, k, v, rule, log_decay=None, beta=None, causal=True, scale=1.0, normalize=False,
                 eps=1e-6, state=None, erase=None):  # fmt: skip
        self.shapes, self.heads = [x.shape for x in (q, k, v)], max(len(k), len(v))
        self.q = wide(q, max(self.heads, len(q)))
        self.k, self.v = wide(k, self.heads), wide(v, self.heads)
        self.own_erase, self.e = erase is not None, wide(k if erase is None else erase, self.heads)
        self.delta, self.causal, self.scale, self.normalize, self.eps = (
            "delta" in rule,
            causal,
            scale,
            normalize,
            eps,
        )
        n, head_dim, head_dim_v = *self.k.shape[1:], self.v.shape[-1]
        self.a, self.b = gates(self.heads, n, head_dim, log_decay, beta)
        s, z = np.zeros((self.heads, head_dim, head_dim_v)), np.zeros((self.heads, head_dim))
        if state is not None:
            s, z = (np.asarray(x, np.float64) for x in state)
        self.s, self.z = [s], [z]
        for t in range(n):
            s = self.a[:, t, :, None] * s
            s = s + np.einsum("hd,hv->hdv", self.k[:, t], self.b[:, t, None] * self.missing(t, s))
            self.s.append(s)
            self.z.append(self.a[:, t] * self.z[-1] + self.k[:, t])
        answers = [self.answer(t)[0] for t in range(self.q.shape[1])]
        self.out = np.stack(answers, 1) if answers else np.zeros((len(self.q), 0, head_dim_v))

    def missing(self, t, s):
        """Return what token t writes, but for its strength, to the decayed state s."""
        return self.v[:, t] - np.einsum("hdv,hd->hv", s, self.e[:, t]) if self.delta else self.v[:, t]

    def answer(self, t):
        """The result of token t, its divisor, and the state and the sum that each query head reads."""
        group, at = len(self.q) // self.heads, t + 1 if self.causal else -1
        s, z = np.repeat(self.s[at], group, axis=0), np.repeat(self.z[at], group, axis=0)
        sums = (
            self.scale * np.einsum("hd,hd->h", z, self.q[:, t])[:, None] + self.eps if self.normalize else 1.0
        )
        return self.scale * np.einsum("hdv,hd->hv", s, self.q[:, t]) / sums, sums, s, z

    def gradients(self, dout, ds=0.0, dz=0.0):
        """All gradients by name, from those of out, of the last state and of the last sum of keys.

        Those of q, k, v and erase have their heads; "dlog_decay" is (heads, n, head_dim), "dbeta" (heads, n).
        """
        dout, n = np.asarray(dout, np.float64), self.k.shape[1]
        dq, dk, dv, da, db, de = (np.zeros(x.shape) for x in (self.q, self.k, self.v, self.a, self.b, self.e))
        ds, dz = ds + np.zeros(self.s[0].shape), dz + np.zeros(self.z[0].shape)

        def read(t, ds, dz):
            result, sums, s, z = self.answer(t)
            d = dout[:, t] / sums
            dsum = -(d * result).sum(-1, keepdims=True) * self.normalize
            dq[:, t] = self.scale * (np.einsum("hdv,hv->hd", s, d) + dsum * z)
            q = self.scale * self.q[:, t]
            more = np.einsum("hd,hv->hdv", q, d), q * dsum
            more = [x.reshape(self.heads, -1, *x.shape[1:]).sum(1) for x in more]
            return ds + more[0], dz + more[1]

        for t in range(0 if self.causal else self.q.shape[1]):
            ds, dz = read(t, ds, dz)
        for t in reversed(range(n)):
            if self.causal:
                ds, dz = read(t, ds, dz)
            faded = self.a[:, t, :, None] * self.s[t]
            r = self.missing(t, faded)
            dk[:, t] = np.einsum("hdv,hv->hd", ds, self.b[:, t, None] * r) + dz
            du = np.einsum("hdv,hd->hv", ds, self.k[:, t])
            db[:, t] = (du * r).sum(-1)
            dv[:, t] = self.b[:, t, None] * du
            if self.delta:
                de[:, t] = -np.einsum("hdv,hv->hd", faded, dv[:, t])
                dk[:, t] += 0 if self.own_erase else de[:, t]
                ds = ds - np.einsum("hd,hv->hdv", self.e[:, t], dv[:, t])
            da[:, t] = (ds * faded).sum(-1) + dz * self.a[:, t] * self.z[t]
            ds, dz = self.a[:, t, :, None] * ds, self.a[:, t] * dz
        own = [
            x.reshape(len_, len(x) // len_, *x.shape[1:]).sum(1)
            for x, (len_, *_) in zip((dq, dk, dv, de), (*self.shapes, self.shapes[1]), strict=True)
        ]
        names = ("dq", "dk", "dv", "derase", "dlog_decay", "dbeta", "dstate", "dnorm")
        return dict(zip(names, (*own, da, db, ds, dz), strict=True))
