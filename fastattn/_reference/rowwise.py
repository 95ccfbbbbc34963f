"""Attention with other normalisers and scores in NumPy: the readable twin of the kernels, and the fallback.

Some query rows against all their keys at a time, as sparsemax, entmax and the k largest need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._reference.attention import _TILE_SCORES, _Call, _exp, _Task

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastattn._args.types import Array, RowwiseArgs

# Dimensions that are summed before they are added, as in the kernel: some BLASes sum one after another.
_ADDITIVE_DEPTH = 64


@np.errstate(all="ignore")
def rowwise(args: RowwiseArgs) -> None:
    """Fill args.attention.out."""
    attend = _talking_heads if args.kind == "talking_heads" else _one_head
    for where, out in attend(args):
        args.attention.out[where] = out


class _Additive(_Task):
    """Scores are weight . tanh(q + k)."""

    weight: Array  # (group, head_dim)

    def products(self, keys: slice) -> Array:
        k = np.ascontiguousarray(self.k[keys], dtype=self.call.dtype)
        group, rows, head_dim = self.q.shape
        step = max(1, _TILE_SCORES // (group * rows * head_dim))
        depths = [slice(d, d + _ADDITIVE_DEPTH) for d in range(0, head_dim, _ADDITIVE_DEPTH)]
        parts = []
        for j in range(0, len(k), step):
            tangents = np.tanh(self.q[:, :, None] + k[j : j + step])
            parts.append(sum(tangents[..., d] @ self.weight[:, None, d, None] for d in depths))
        return np.concatenate(parts, axis=2)[..., 0]


class _Mixed(_Task):
    """Scores are given: those of all heads, mixed."""

    mixed: Array  # (group, rows, len_k)

    def products(self, keys: slice) -> Array:
        return self.mixed[..., keys].copy()


def _one_head(args: RowwiseArgs) -> Iterator[tuple[Any, Array]]:
    """Where results go, and they: every head on its own."""
    a = args.attention
    call, group = _Call(a), a.heads_q // a.heads_kv
    step = max(1, _TILE_SCORES // (group * max(1, a.len_k)))
    for b in np.ndindex(a.batch_shape):
        for h in range(a.heads_kv):
            for i in range(0, a.len_q, step):
                kind = _Additive if args.kind == "additive" else _Task
                task = kind(call, b, h, slice(i, min(i + step, a.len_q)))
                if args.weight is not None:
                    task.weight = args.weight[h * group : (h + 1) * group]  # type: ignore[attr-defined]
                yield task.where, _attend(task, args)


def _attend(task: _Task, args: RowwiseArgs) -> Array:
    """Result (group, rows, head_dim_v)."""
    keys = task.keys()
    allowed = task.allowed(keys)
    if allowed is False:
        return np.zeros((*task.q.shape[:2], task.v.shape[-1]), task.q.dtype)
    scores = task.scores(keys, allowed)
    some = allowed if allowed is True else allowed.any(axis=-1, keepdims=True)
    if args.kind == "top_k":
        scores = _largest(scores, args.k_keys)
    row_max = scores.max(axis=-1, keepdims=True)
    if args.kind in ("sparsemax", "entmax15"):  # a probability of 0 hides as a mask does
        probs = _entmax(scores - np.where(row_max == -np.inf, 0, row_max), squared=args.kind == "entmax15")
        attended: Any = probs != 0
    else:
        probs = _exp(scores, row_max)
        attended = allowed if args.kind == "additive" else scores != -np.inf
    row_sum = probs.sum(axis=-1, keepdims=True)
    row_sum[some & (row_sum == 0)] = np.nan  # every score is -inf, by computation and no mask
    acc = task.weighted_values(probs, keys, attended)
    out: Array = np.divide(acc, row_sum, out=np.zeros_like(acc), where=row_sum != 0)
    return out


def _largest(scores: Array, k: int) -> Array:
    """`scores` with -inf in place of all but the `k` largest of a row; of equal ones the first stay."""
    place = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    stays = np.isnan(scores)
    np.put_along_axis(stays, place, True, axis=-1)
    return np.where(stays, scores, -np.inf)


def _entmax(z: Array, squared: bool) -> Array:
    """max(z - tau, 0), or with `squared` max(z / 2 - tau, 0) ** 2, with each row's tau that sums it to 1."""
    # Newton's method from tau = -1, where the sum is 1 or more, as the largest z is 0. The sum is convex and
    # falls, so tau only rises; it rises by a rounding at least until it rises for no row.
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


def _talking_heads(args: RowwiseArgs) -> Iterator[tuple[Any, Array]]:
    """Where results go, and they: all heads at a time."""
    a = args.attention
    call, group = _Call(a), a.heads_q // a.heads_kv
    step = max(1, _TILE_SCORES // (a.heads_q * max(1, a.len_k)))
    every = slice(0, a.len_k)
    for b in np.ndindex(a.batch_shape):
        for i in range(0, a.len_q, step):
            rows = slice(i, min(i + step, a.len_q))
            tasks = [_Mixed(call, b, h, rows) for h in range(a.heads_kv)]
            mixed = _mix(np.concatenate([_Task.products(task, every) for task in tasks]), args.pre)
            probs, attends = np.zeros_like(mixed), np.zeros(mixed.shape, bool)
            for h, task in enumerate(tasks):
                heads = slice(h * group, (h + 1) * group)
                task.mixed = mixed[heads]
                _softmax(task, probs[heads], attends[heads])
            probs = _mix(probs, args.post)
            for h, task in enumerate(tasks):
                heads = slice(h * group, (h + 1) * group)
                allowed = attends[heads] if args.post is None else attends.any(axis=0)
                allowed = np.broadcast_to(allowed, probs[heads].shape)
                yield task.where, task.weighted_values(probs[heads], every, allowed)


def _mix(x: Array, matrix: Array | None) -> Array:
    """x (heads, rows, keys) mixed: what head h gives to head g is matrix[h, g]."""
    if matrix is None:
        return x
    mixed: Array = (matrix.T @ x.reshape(len(x), -1)).reshape(x.shape)
    return mixed


def _softmax(task: _Task, probs: Array, attends: Array) -> None:
    """Fill both, (group, rows, len_k), at the keys that some row attends."""
    keys = task.keys()
    allowed = task.allowed(keys)
    if allowed is False:
        return
    scores = task.scores(keys, allowed)
    some = _exp(scores, scores.max(axis=-1, keepdims=True))
    row_sum = some.sum(axis=-1, keepdims=True)
    row_sum[(allowed if allowed is True else allowed.any(axis=-1, keepdims=True)) & (row_sum == 0)] = np.nan
    probs[..., keys] = np.where(allowed & (row_sum != 0), some / row_sum, 0)
    attends[..., keys] = allowed
