"""Attention with other normalisers and scores in NumPy: the readable twins of the kernels, and the fallback.

A task has all keys of its query rows at once, as sparsemax, entmax and the k largest scores need them. Words
of gradients are those of `backward.py`. With weights w of a row's keys, which are its probabilities for
softmax, their square roots for entmax-1.5, and for sparsemax 1 where they are above 0,

    dscores = w (dprobs - sum(w dprobs) / sum(w))

A weight of exactly 0 hides whatever it would be multiplied by, as a mask does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fastattn._args.quiet import quiet
from fastattn._args.types import Array, AttentionArgs, RowwiseArgs, RowwiseBackwardArgs
from fastattn._reference.attention import TILE_SCORES, Call, Task, attending, exp_below, normalised, tasks
from fastattn._reference.backward import BackwardTask, flat, weighted

# Additive scores are summed over blocks of this many dimensions, as in the kernel, to keep the error small:
# some BLAS libraries sum one dimension after another.
_ADDITIVE_DEPTH = 64


@quiet
def rowwise(args: RowwiseArgs) -> None:
    """Fill args.attention.out."""
    out = args.attention.out
    if args.kind == "talking_heads":
        for heads in _all_heads(args.attention):
            for head, result in _attend_mixed(heads, args):
                out[head.where] = result
        return
    for task in _one_head(args):
        out[task.where] = _attend(task, args)


@quiet
def rowwise_backward(args: RowwiseBackwardArgs) -> None:
    """Fill the gradients that `args` asks for."""
    forward: Any = args.rowwise
    if forward.kind == "talking_heads":
        for heads in _all_heads(args.attention):
            _mixed_heads(heads, args, forward)
        return
    for task in _one_head(forward):
        _gradients(task, args, forward)


class Additive(BackwardTask):
    """Scores are weight @ tanh(q + k)."""

    weight: Array  # (group, head_dim)

    def products(self, keys: slice) -> Array:
        k = np.ascontiguousarray(self.k[keys], dtype=self.call.dtype)
        group, rows, head_dim = self.q.shape
        step = max(1, TILE_SCORES // (group * rows * head_dim))
        depths = [slice(d, d + _ADDITIVE_DEPTH) for d in range(0, head_dim, _ADDITIVE_DEPTH)]
        parts = []
        for j in range(0, len(k), step):
            tangents = np.tanh(self.q[:, :, None] + k[j : j + step])
            parts.append(sum(tangents[..., d] @ self.weight[:, None, d, None] for d in depths))
        return np.concatenate(parts, axis=2)[..., 0]

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


class Mixed(BackwardTask):
    """The products q @ k.T have been mixed over all heads."""

    mixed: Array  # (group, rows, len_k)

    def products(self, keys: slice) -> Array:
        return self.mixed[..., keys].copy()


def _one_head(args: RowwiseArgs) -> Iterator[BackwardTask]:
    """Tasks of each head on its own."""
    a = args.attention
    group = a.heads_q // a.heads_kv
    step = max(1, TILE_SCORES // (group * max(1, a.len_k)))
    for task in tasks(Call(a), step, BackwardTask if args.weight is None else Additive):
        if isinstance(task, Additive):
            task.weight = args.weight[task.h_kv * group : (task.h_kv + 1) * group]  # type: ignore[index]
        yield task


def _all_heads(a: AttentionArgs) -> Iterator[list[Mixed]]:
    """Tasks of all heads at once."""
    call = Call(a)
    step = max(1, TILE_SCORES // (a.heads_q * max(1, a.len_k)))
    for b in np.ndindex(a.batch_shape):
        for i in range(0, a.len_q, step):
            rows = slice(i, min(i + step, a.len_q))
            yield [Mixed(call, b, h, rows) for h in range(a.heads_kv)]


def _attend(task: Task, args: RowwiseArgs) -> Array:
    """Result (group, rows, head_dim_v)."""
    keys = task.keys()
    allowed = task.allowed(keys)
    if allowed is False:
        return np.zeros((*task.q.shape[:2], task.v.shape[-1]), task.q.dtype)
    scores, probs = _probs(task.scores(keys, allowed), args)
    if args.kind in ("sparsemax", "entmax15"):  # a probability of 0 hides a value as a mask does
        attended: Any = probs != 0
    else:
        attended = allowed if args.kind == "additive" else scores != -np.inf
    acc = task.weighted_values(probs, keys, attended)
    return normalised(acc, probs.sum(axis=-1, keepdims=True), attending(allowed))


def _probs(scores: Array, args: RowwiseArgs) -> tuple[Array, Array]:
    """The scores that count, and the probabilities; those of a softmax are not yet divided by their sum."""
    if args.kind == "top_k":
        scores = _largest(scores, args.top_k)
    row_max = scores.max(axis=-1, keepdims=True)
    if args.kind in ("top_k", "additive"):
        return scores, exp_below(scores, row_max)
    below = scores - np.where(row_max == -np.inf, 0, row_max)
    return scores, _entmax(below, squared=args.kind == "entmax15")


def _largest(scores: Array, k: int) -> Array:
    """Keep the `k` largest scores of each row, of equal ones the first, and NaN; the others become -inf."""
    place = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    stays = np.isnan(scores)
    np.put_along_axis(stays, place, True, axis=-1)
    return np.where(stays, scores, -np.inf)


def _entmax(z: Array, squared: bool) -> Array:
    """max(z - tau, 0), or if `squared` max(z / 2 - tau, 0) ** 2, with the tau of each row whose sum is 1."""
    # Newton's method from tau = -1. There the sum is at least 1, as the largest z is 0. The sum is convex and
    # falls with tau, so tau only rises. The loop ends when rounding lets no row's tau rise any more.
    z = z / 2 if squared else z
    tau = np.full_like(z[..., :1], -1)
    while True:
        above = np.maximum(z - tau, 0)
        if squared:
            step = ((above * above).sum(-1, keepdims=True) - 1) / (2 * above.sum(-1, keepdims=True))
        else:
            step = (above.sum(-1, keepdims=True) - 1) / np.count_nonzero(above, axis=-1, keepdims=True)
        raised = (tau + step).astype(tau.dtype)
        if not (raised > tau).any():
            return above * above if squared else above
        tau = np.where(raised > tau, raised, tau)


def _attend_mixed(heads: list[Mixed], args: RowwiseArgs) -> Iterator[tuple[Mixed, Array]]:
    """Result (group, rows, head_dim_v) of each head."""
    _, probs, attends = _mixed_probs(heads, args.pre)
    probs = _mix(probs, args.post)
    if args.post is not None:  # each head may get weights from every other
        attends[:] = attends.any(axis=0)
    for task in heads:
        of = task.where[-2]
        yield task, task.weighted_values(probs[of], slice(0, args.attention.len_k), attends[of])


def _mixed_probs(heads: Sequence[Mixed], pre: Array | None) -> tuple[Array, Array, Array]:
    """Products, probabilities and who attends whom, (heads_q, rows, len_k); scores are mixed by `pre`."""
    products = np.concatenate([Task.products(task, slice(0, len(task.k))) for task in heads])
    mixed = _mix(products, pre)
    probs, attends = np.zeros_like(mixed), np.zeros(mixed.shape, bool)
    for task in heads:
        of, keys = task.where[-2], task.keys()
        task.mixed = mixed[of]
        if (allowed := task.allowed(keys)) is not False:
            attends[of][..., keys] = allowed
            probs[of][..., keys] = task.weights(task.scores(keys, allowed), allowed)
    return products, probs, attends


def _mix(x: Array, matrix: Array | None) -> Array:
    """x (heads, rows, keys) mixed over the heads: head h contributes to head g with factor matrix[h, g]."""
    if matrix is None:
        return x
    mixed: Array = (matrix.T @ x.reshape(len(x), -1)).reshape(x.shape)
    return mixed


def _shielded(weights: Array, x: Array) -> Array:
    """weights * x, and 0 where a weight is 0."""
    return np.where(weights == 0, 0, weights * x)


def _gradients(task: BackwardTask, args: RowwiseBackwardArgs, forward: RowwiseArgs) -> None:
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
    if (by_products := task.slopes_of_scores(keys)) is not None:
        dscores = _shielded(dscores, by_products)
    if isinstance(task, Additive):
        task.add_scores(args, keys, dscores)
    else:
        _add_products(task, args, keys, dscores)


def _weights(scores: Array, forward: RowwiseArgs) -> tuple[Array, Array]:
    """Probabilities and w of all keys; both are 0 where a row attends nothing."""
    _, probs = _probs(scores, forward)
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


def _mixed_heads(heads: list[Mixed], args: RowwiseBackwardArgs, forward: RowwiseArgs) -> None:
    """Fill the rows' dq of one batch item, and add to the other gradients."""
    # mixed = _mix(scale q k^T, pre);  probs = softmax(mixed);  out = _mix(probs, post) v
    a, b, pre, post = args.attention, heads[0].batch, forward.pre, forward.post
    every = slice(0, a.len_k)
    products, probs, attends = _mixed_probs(heads, pre)
    some = attends.any(axis=0)
    douts = [np.asarray(args.dout[task.where], task.call.dtype) for task in heads]
    dweights = np.concatenate([_times_values(*x, every) for x in zip(heads, douts, strict=True)])
    dweights = np.where(attends if post is None else some, dweights, 0)
    if args.dpost is not None:
        args.dpost[b] += _over_rows(probs, dweights)
    dprobs = _mix(dweights, None if post is None else post.T)
    delta = _shielded(probs, dprobs).sum(axis=-1, keepdims=True)
    dmixed = _shielded(probs, dprobs - delta)
    for task in heads:
        of = task.where[-2]
        task.add_modifiers(args, every, dmixed[of])
        if (by_products := task.slopes_of_scores(every)) is not None:
            dmixed[of] = _shielded(dmixed[of], by_products)
    if args.dpre is not None:
        args.dpre[b] += a.scale * _over_rows(dmixed, np.where(some, products, 0)).T
    dscores = _mix(dmixed, None if pre is None else pre.T)
    for task in heads:
        _add_products(task, args, every, dscores[task.where[-2]])
    if args.dv is not None:
        weights = _mix(probs, post)
        for task, dout in zip(heads, douts, strict=True):
            args.dv[(*b, task.h_kv)] += weighted(flat(weights[task.where[-2]]).T, flat(dout))


def _over_rows(weights: Array, x: Array) -> Array:
    """Sums over rows and keys of the products of each head of weights with each of x, (heads, heads).

    A weight of 0 hides what is in x.
    """
    if np.isfinite(x).all():
        return sum((weights[:, i] @ x[:, i].T for i in range(x.shape[1])), np.zeros((len(x), len(x))))
    return np.array([[_shielded(weight, y).sum(dtype=float) for y in x] for weight in weights])
