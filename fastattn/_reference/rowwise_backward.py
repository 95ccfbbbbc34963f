"""The gradients of attention with other normalisers and scores in NumPy: the twin of the C kernels.

Words are those of `backward.py`. With weights w of a row's keys, which are its probabilities for softmax,
their square roots for entmax-1.5, and for sparsemax 1 where they are above 0,

    dscores = w (dprobs - sum(w dprobs) / sum(w))

A weight of exactly 0 hides whatever it would be multiplied by, as a mask does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._args.types import Array, RowwiseArgs, RowwiseBackwardArgs
from fastattn._reference.attention import TILE_SCORES, Call, Task, exp_below, tasks
from fastattn._reference.backward import BackwardTask, flat, weighted
from fastattn._reference.rowwise import Additive, Mixed, entmax, largest, mix, mixed_probs


@np.errstate(all="ignore")
def rowwise_backward(args: RowwiseBackwardArgs) -> None:
    """Fill the gradients that `args` asks for."""
    forward: Any = args.rowwise
    if forward.kind == "talking_heads":
        _talking_heads(args, forward)
        return
    a = args.attention
    group = a.heads_q // a.heads_kv
    step = max(1, TILE_SCORES // (group * max(1, a.len_k)))
    for task in tasks(Call(a), step, BackwardTask if forward.weight is None else _Additive):
        if isinstance(task, _Additive):
            task.weight = forward.weight[task.h_kv * group : (task.h_kv + 1) * group]
        _one_head(task, args, forward)


class _Additive(Additive, BackwardTask):
    """Scores are weight @ tanh(q + k)."""

    def add_scores(self, args: RowwiseBackwardArgs, keys: slice, dscores: Array) -> None:
        """Fill dq, and add to dk and dweight, what dscores of the sums weight @ tanh(q + k) make of them."""
        k = np.ascontiguousarray(self.k[keys], dtype=self.call.dtype)
        group, rows, head_dim = self.q.shape
        step = max(1, TILE_SCORES // (group * rows * head_dim))
        dq = np.zeros_like(self.q)
        dweight = np.zeros((group, head_dim))
        scale = self.call.dtype.type(self.call.args.scale)
        for j in range(0, len(k), step):
            tangents = np.tanh(self.q[:, :, None] + k[j : j + step])
            weights = dscores[..., j : j + step, None]
            dweight += _shielded(weights, tangents).sum(axis=(1, 2), dtype=float)
            slopes = _shielded(weights, 1 - tangents * tangents)
            dq += slopes.sum(axis=2)
            if args.dk is not None:
                dk = (slopes.sum(axis=1) * self.weight[:, None]).sum(axis=0)
                args.dk[(*self.batch, self.h_kv)][keys][j : j + step] += scale * dk
        if args.dq is not None:
            args.dq[self.where] = scale * self.weight[:, None] * dq
        if args.dweight is not None:
            args.dweight[self.where[:-1]] += self.call.args.scale * dweight


def _shielded(weights: Array, x: Array) -> Array:
    """weights * x, and 0 where a weight is 0."""
    return np.where(weights == 0, 0, weights * x)


def _one_head(task: BackwardTask, args: RowwiseBackwardArgs, forward: RowwiseArgs) -> None:
    """Fill the task's rows of dq, and add to the other gradients."""
    keys = task.keys()
    allowed = task.allowed(keys)
    if allowed is False:
        if args.dq is not None:
            args.dq[task.where] = 0
        return
    probs, weights = _weights(task.scores(keys, allowed), forward)
    probs, weights = (np.where(allowed, x, 0) for x in (probs, weights))
    dout = np.asarray(args.dout[task.where], task.call.dtype)
    dprobs = _times_values(task, dout, keys)
    total = weights.sum(axis=-1, keepdims=True)
    delta = _shielded(weights, dprobs).sum(axis=-1, keepdims=True) / total
    dscores = _shielded(weights, dprobs - delta)
    if args.dv is not None:
        args.dv[(*task.batch, task.h_kv)][keys] += weighted(flat(probs).T, flat(dout))
    task.add_modifiers(args, keys, dscores)
    if task.call.args.softcap:
        dscores = _shielded(dscores, task.softcap_slopes(keys)[0])
    if isinstance(task, _Additive):
        task.add_scores(args, keys, dscores)
    else:
        _add_products(task, args, keys, dscores)


def _weights(scores: Array, forward: RowwiseArgs) -> tuple[Array, Array]:
    """Probabilities and w of all keys; both are 0 where a row attends nothing."""
    if forward.kind == "top_k":
        scores = largest(scores, forward.top_k)
    row_max = scores.max(axis=-1, keepdims=True)
    if forward.kind in ("top_k", "additive"):
        probs = exp_below(scores, row_max)
    else:
        probs = entmax(scores - np.where(row_max == -np.inf, 0, row_max), squared=forward.kind == "entmax15")
    row_sum = probs.sum(axis=-1, keepdims=True)
    probs /= np.where(row_sum == 0, 1, row_sum)
    if forward.kind == "entmax15":
        return probs, np.sqrt(probs)
    if forward.kind == "sparsemax":
        return probs, np.where(probs == 0, 0, probs * 0 + 1)  # NaN stays
    return probs, probs


def _add_products(task: Task, args: RowwiseBackwardArgs, keys: slice, dscores: Array) -> None:
    """Fill dq, and add to dk, what dscores of scale * q @ k.T make of them."""
    dtype = task.call.dtype
    if args.dk is not None:
        dk = weighted(flat(dscores).T, flat(task.q))
        args.dk[(*task.batch, task.h_kv)][keys] += dtype.type(task.call.args.scale) * dk
    if args.dq is not None:
        k = np.ascontiguousarray(task.k[keys], dtype=dtype)
        dq = weighted(flat(dscores), k).reshape(task.q.shape)
        args.dq[task.where] = dq * dtype.type(args.dq_factor)


def _times_values(task: Task, dout: Array, keys: slice) -> Array:
    """dout @ v.T, (group, rows, keys)."""
    v = np.ascontiguousarray(task.v[keys], dtype=task.call.dtype)
    products: Array = (flat(dout) @ v.T).reshape(*dout.shape[:2], len(v))
    return products


class _Mixed(Mixed, BackwardTask):
    """The products q @ k.T have been mixed over all heads."""


def _talking_heads(args: RowwiseBackwardArgs, forward: RowwiseArgs) -> None:
    """Compute all heads at once."""
    a = args.attention
    call = Call(a)
    step = max(1, TILE_SCORES // (a.heads_q * max(1, a.len_k)))
    for b in np.ndindex(a.batch_shape):
        for i in range(0, a.len_q, step):
            rows = slice(i, min(i + step, a.len_q))
            _mixed_heads([_Mixed(call, b, h, rows) for h in range(a.heads_kv)], args, forward)


def _mixed_heads(heads: list[_Mixed], args: RowwiseBackwardArgs, forward: RowwiseArgs) -> None:
    """Fill the rows' dq of one batch item, and add to the other gradients."""
    # mixed = mix(scale q k^T, pre);  probs = softmax(mixed);  out = mix(probs, post) v
    a, b, pre, post = args.attention, heads[0].batch, forward.pre, forward.post
    group, every = a.heads_q // a.heads_kv, slice(0, a.len_k)
    own = [slice(h * group, (h + 1) * group) for h in range(a.heads_kv)]
    products, probs, attends = mixed_probs(heads, own, pre)
    some = attends.any(axis=0)
    douts = [np.asarray(args.dout[task.where], task.call.dtype) for task in heads]
    dweights = np.concatenate([_times_values(*x, every) for x in zip(heads, douts, strict=True)])
    dweights = np.where(attends if post is None else some, dweights, 0)
    if args.dpost is not None:
        args.dpost[b] += _over_rows(probs, dweights)
    dprobs = mix(dweights, None if post is None else post.T)
    delta = _shielded(probs, dprobs).sum(axis=-1, keepdims=True)
    dmixed = _shielded(probs, dprobs - delta)
    for task, of in zip(heads, own, strict=True):
        task.add_modifiers(args, every, dmixed[of])
        if task.call.args.softcap:
            dmixed[of] = _shielded(dmixed[of], task.softcap_slopes(every)[0])
    if args.dpre is not None:
        args.dpre[b] += a.scale * _over_rows(dmixed, np.where(some, products, 0)).T
    dscores = mix(dmixed, None if pre is None else pre.T)
    for task, of in zip(heads, own, strict=True):
        _add_products(task, args, every, dscores[of])
    if args.dv is not None:
        weights = mix(probs, post)
        for task, of, dout in zip(heads, own, douts, strict=True):
            args.dv[(*b, task.h_kv)] += weighted(flat(weights[of]).T, flat(dout))


def _over_rows(weights: Array, x: Array) -> Array:
    """Sums over rows and keys of the products of each head of weights with each of x, (heads, heads).

    A weight of 0 hides what is in x.
    """
    if np.isfinite(x).all():
        return sum((weights[:, i] @ x[:, i].T for i in range(x.shape[1])), np.zeros((len(x), len(x))))
    return np.array([[_shielded(weight, y).sum(dtype=float) for y in x] for weight in weights])
