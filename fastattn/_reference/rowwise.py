"""Attention with other normalisers and scores in NumPy: the readable twin of the kernels, and the fallback.

A task has all keys of its query rows at once, as sparsemax, entmax and the k largest scores need them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fastattn._args.types import Array, RowwiseArgs
from fastattn._reference.attention import TILE_SCORES, Call, Task, attending, exp_below, normalised, tasks

# Additive scores are summed over blocks of this many dimensions, as in the kernel, to keep the error small:
# some BLAS libraries sum one dimension after another.
ADDITIVE_DEPTH = 64


@np.errstate(all="ignore")
def rowwise(args: RowwiseArgs) -> None:
    """Fill args.attention.out."""
    attend = _talking_heads if args.kind == "talking_heads" else _one_head
    for where, out in attend(args):
        args.attention.out[where] = out


class Additive(Task):
    """Scores are weight @ tanh(q + k)."""

    weight: Array  # (group, head_dim)

    def products(self, keys: slice) -> Array:
        k = np.ascontiguousarray(self.k[keys], dtype=self.call.dtype)
        group, rows, head_dim = self.q.shape
        step = max(1, TILE_SCORES // (group * rows * head_dim))
        depths = [slice(d, d + ADDITIVE_DEPTH) for d in range(0, head_dim, ADDITIVE_DEPTH)]
        parts = []
        for j in range(0, len(k), step):
            tangents = np.tanh(self.q[:, :, None] + k[j : j + step])
            parts.append(sum(tangents[..., d] @ self.weight[:, None, d, None] for d in depths))
        return np.concatenate(parts, axis=2)[..., 0]


class Mixed(Task):
    """The products q @ k.T have been mixed over all heads."""

    mixed: Array  # (group, rows, len_k)

    def products(self, keys: slice) -> Array:
        return self.mixed[..., keys].copy()


def _one_head(args: RowwiseArgs) -> Iterator[tuple[Any, Array]]:
    """Each head on its own: results, and where they go in the output."""
    a = args.attention
    group = a.heads_q // a.heads_kv
    step = max(1, TILE_SCORES // (group * max(1, a.len_k)))
    for task in tasks(Call(a), step, Task if args.weight is None else Additive):
        if isinstance(task, Additive):
            task.weight = args.weight[task.h_kv * group : (task.h_kv + 1) * group]  # type: ignore[index]
        yield task.where, _attend(task, args)


def _attend(task: Task, args: RowwiseArgs) -> Array:
    """Result (group, rows, head_dim_v)."""
    keys = task.keys()
    allowed = task.allowed(keys)
    if allowed is False:
        return np.zeros((*task.q.shape[:2], task.v.shape[-1]), task.q.dtype)
    scores = task.scores(keys, allowed)
    if args.kind == "top_k":
        scores = largest(scores, args.top_k)
    row_max = scores.max(axis=-1, keepdims=True)
    if args.kind in ("sparsemax", "entmax15"):  # a probability of 0 hides a value as a mask does
        probs = entmax(scores - np.where(row_max == -np.inf, 0, row_max), squared=args.kind == "entmax15")
        attended: Any = probs != 0
    else:
        probs = exp_below(scores, row_max)
        attended = allowed if args.kind == "additive" else scores != -np.inf
    acc = task.weighted_values(probs, keys, attended)
    return normalised(acc, probs.sum(axis=-1, keepdims=True), attending(allowed))


def largest(scores: Array, k: int) -> Array:
    """Keep the `k` largest scores of each row, of equal ones the first, and NaN; the others become -inf."""
    place = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    stays = np.isnan(scores)
    np.put_along_axis(stays, place, True, axis=-1)
    return np.where(stays, scores, -np.inf)


def entmax(z: Array, squared: bool) -> Array:
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


def _talking_heads(args: RowwiseArgs) -> Iterator[tuple[Any, Array]]:
    """Compute all heads at once: results, and their place in the output."""
    a = args.attention
    call, group = Call(a), a.heads_q // a.heads_kv
    step = max(1, TILE_SCORES // (a.heads_q * max(1, a.len_k)))
    every, own = slice(0, a.len_k), [slice(h * group, (h + 1) * group) for h in range(a.heads_kv)]
    for b in np.ndindex(a.batch_shape):
        for i in range(0, a.len_q, step):
            rows = slice(i, min(i + step, a.len_q))
            heads = [Mixed(call, b, h, rows) for h in range(a.heads_kv)]
            _, probs, attends = mixed_probs(heads, own, args.pre)
            probs = mix(probs, args.post)
            if args.post is not None:  # each head may get weights from every other
                attends[:] = attends.any(axis=0)
            for task, of in zip(heads, own, strict=True):
                yield task.where, task.weighted_values(probs[of], every, attends[of])


def mixed_probs(
    heads: Sequence[Mixed], own: Sequence[slice], pre: Array | None
) -> tuple[Array, Array, Array]:
    """Products, probabilities and who attends whom, (heads_q, rows, len_k), where scores are mixed by `pre`.

    `own` are the query heads of each KV head.
    """
    products = np.concatenate([Task.products(task, slice(0, len(task.k))) for task in heads])
    mixed = mix(products, pre)
    probs, attends = np.zeros_like(mixed), np.zeros(mixed.shape, bool)
    for task, of in zip(heads, own, strict=True):
        task.mixed, keys = mixed[of], task.keys()
        if (allowed := task.allowed(keys)) is not False:
            attends[of][..., keys] = allowed
            probs[of][..., keys] = task.weights(task.scores(keys, allowed), allowed)
    return products, probs, attends


def mix(x: Array, matrix: Array | None) -> Array:
    """x (heads, rows, keys) mixed over the heads: head h contributes to head g with factor matrix[h, g]."""
    if matrix is None:
        return x
    mixed: Array = (matrix.T @ x.reshape(len(x), -1)).reshape(x.shape)
    return mixed
