"""The gradients of attention in NumPy, blocked: the twin of the C kernels, and the fallback.

Words are those of `attention.py`. In the order of its forward pass: ``probs`` are computed again, from the
lse; ``dprobs = dout v^T``; ``dscores = probs (dprobs - delta)`` with ``delta = sum(dout * out) - dlse``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from itertools import pairwise
from typing import Any

import numpy as np

from fastattn._args.quiet import quiet
from fastattn._args.types import OF_HEADS, Array, BackwardArgs
from fastattn._reference.attention import Call, Task, block_sizes, sequences

# Up to so many queries, probabilities are normalised again: few_queries() of the kernels.
_FEW = 8


@quiet
def attention_backward(
    args: BackwardArgs,
    score_mod: Callable[..., Array] | None = None,
    score_mod_backward: Callable[..., Array] | None = None,
) -> None:
    """Fill the gradients that `args` asks for; see flex_attention_backward for the functions."""
    if args.attention.begins is not None:
        for sequence in _sequences(args):
            attention_backward(sequence)
        return
    forward = args.attention
    block_q, block_k = block_sizes(forward)
    call = Call(forward, score_mod, score_mod_backward)
    for b in np.ndindex(forward.batch_shape):
        for h in range(forward.heads_kv):
            dk, dv = (np.zeros(x[(*b, h)].shape, call.dtype) for x in (call.arrays["k"], call.arrays["v"]))
            for i in range(0, forward.len_q, block_q):
                rows = slice(i, min(i + block_q, forward.len_q))
                BackwardTask(call, b, h, rows).backward(args, block_k, dk, dv)
            for to, x in ((args.dk, dk), (args.dv, dv)):
                if to is not None:
                    to[(*b, h)] = x


def _sequences(args: BackwardArgs) -> Iterator[BackwardArgs]:
    """The gradients of each sequence of a ragged call."""
    begins: Any = args.attention.begins
    bounds = zip(*(pairwise(each.tolist()) for each in begins), strict=True)
    for i, (forward, (q, k)) in enumerate(zip(sequences(args.attention), bounds, strict=True)):
        part = copy(args)
        part.attention = forward
        of_queries, of_keys = ((slice(None), slice(*each)) for each in (q, k))
        places: dict[str, Any] = {
            **dict.fromkeys(("dout", "dlse", "dq"), of_queries),
            **dict.fromkeys(("dk", "dv"), of_keys),
            **dict.fromkeys((f"d{name}" for name in OF_HEADS), i),
        }
        for name, place in places.items():
            x = getattr(args, name)
            setattr(part, name, None if x is None else x[place])
        yield part


class BackwardTask(Task):
    """A block of query rows and the gradients that come of them."""

    def backward(self, args: BackwardArgs, block_k: int, dk: Array, dv: Array) -> None:
        """Fill the rows' gradients; add to dk and dv, (len_k, dim), and to the others of `args`."""
        # for each block of keys that some row attends:
        #     probs   = exp(scores - lse)             of few queries times norm, so that their sum is 1
        #     dv     += probs^T dout
        #     dscores = probs (dout v^T - delta)
        #     dk     += scale dscores^T q
        #     dq     += scale dscores k
        dtype, forward = self.call.dtype, args.attention
        dout = np.asarray(args.dout[self.where], dtype)
        lse, delta = self._saved(args, dout)
        norm = self._norm(lse, block_k)
        dq, attends = np.zeros_like(self.q), np.zeros(dout.shape[:-1], bool)
        for keys, allowed in self.blocks(block_k):
            attends |= True if allowed is True else allowed.any(axis=-1)
            scores = self.scores(keys, allowed)
            if self.call.score_mod is not None:  # a result of -inf masks, as in the forward pass
                allowed = allowed & (scores != -np.inf)
            if forward.sigmoid_bias is None:
                probs = slopes = _exp_from(scores, lse) * norm
            else:
                probs = 1 / (1 + np.exp(-scores - dtype.type(forward.sigmoid_bias)))
                slopes = probs / (1 + np.exp(scores + dtype.type(forward.sigmoid_bias)))  # probs (1 - probs)
            k, v = (self.lanes(x, None, keys) for x in (self.k, self.v))
            dprobs = (dout.reshape(-1, dout.shape[-1]) @ v.T).reshape(probs.shape)
            dprobs = self.dropped(dprobs, keys)
            dscores = slopes * (dprobs - delta)
            if allowed is not True:
                probs, dscores = (np.where(allowed, x, 0) for x in (probs, dscores))
            if args.dv is not None:
                dv[keys] += weighted(flat(self.dropped(probs, keys)).T, flat(dout), _transposed(allowed))
            self.add_modifiers(args, keys, dscores)
            if (by_products := self.slopes_of_scores(keys)) is not None:
                dscores *= by_products
                if allowed is not True:
                    dscores = np.where(allowed, dscores, 0)
            if self.call.score_mod_backward is not None:
                dscores = np.where(allowed, self.of_scores(dscores, keys), 0)
            if args.dk is not None:
                dk[keys] += dtype.type(forward.scale) * weighted(
                    flat(dscores).T, flat(self.q), _transposed(allowed)
                )
            if args.dq is not None:
                rows = None if allowed is True else flat(np.broadcast_to(allowed, dscores.shape))
                dq += weighted(flat(dscores), k, rows).reshape(dq.shape)
        if args.dq is not None:
            args.dq[self.where] = dq * dtype.type(args.dq_factor)
        if args.dsinks is not None:
            weight = _exp_from(self.sinks[..., None], lse) * norm
            # Where the sink is all that a row attends, out is 0, whatever stands in dout. Not where these
            # keys are a part of all: there lse and out are those of the whole.
            alone = ~attends[..., None] & (lse == self.sinks[..., None])
            if alone.any():
                dlse = 0 if args.dlse is None else args.dlse[self.where][..., None]
                delta = np.where(alone & np.isnan(delta), -dlse, delta)
            terms = np.where(weight == 0, 0, -weight * delta)  # a sink of -inf takes no part
            args.dsinks[self.where[:-1]] += terms.sum(axis=(-1, -2), dtype=float)

    def _saved(self, args: BackwardArgs, dout: Array) -> tuple[Any, Any]:
        """The rows' lse and delta, (group, rows, 1), which sigmoid attention has not."""
        forward: Any = args.attention
        if forward.sigmoid_bias is not None:
            return None, 0
        delta = (dout * np.asarray(forward.out[self.where], dout.dtype)).sum(axis=-1, keepdims=True)
        if args.dlse is not None:
            delta -= args.dlse[self.where][..., None]
        return forward.lse[self.where][..., None], delta

    def _norm(self, lse: Any, block_k: int) -> Any:
        """Factors (group, rows, 1) that make each row's probabilities add up to 1, for few queries; else 1.

        Where the sum is off by more than lse may be by the contract, lse is not that of these keys alone, and
        stands.
        """
        forward, dtype = self.call.args, self.call.dtype
        if forward.len_q > _FEW or forward.q.dtype != dtype or forward.sigmoid_bias is not None:
            return dtype.type(1)
        total = _exp_from(self.sinks[..., None], lse).astype(float)
        for keys, allowed in self.blocks(block_k):
            total += _exp_from(self.scores(keys, allowed), lse).sum(axis=-1, keepdims=True, dtype=float)
        most = np.minimum(0.5, 4 * np.finfo(dtype).eps * np.maximum(1, abs(lse)))
        return np.where(abs(total - 1) <= most, 1 / total, 1).astype(dtype)


def _exp_from(scores: Array, lse: Array) -> Array:
    """exp(scores - lse), 0 in rows that attend nothing."""
    probs: Array = np.exp(scores - np.where(lse == -np.inf, np.inf, lse))
    return probs


def flat(x: Array) -> Array:
    """Rows of all heads of a group, (group * rows, n)."""
    return x.reshape(x.shape[0] * x.shape[1], x.shape[-1])


def _transposed(allowed: Any) -> Any:
    return None if allowed is True else flat(allowed).T


def weighted(weights: Array, x: Array, allowed: Any = ...) -> Array:
    """weights (n, m) @ x (m, d), in which no row touches what `allowed` (n, m) does not let it attend.

    By default, a weight of 0 hides a row of x that is not finite; with None, nothing is hidden.
    """
    if allowed is None:
        return weights @ x
    finite = np.asarray(np.isfinite(x).all(axis=-1))
    product = weights @ (x if finite.all() else np.where(finite[:, None], x, 0))
    for j in np.flatnonzero(~finite):  # a weight of 0 does not hide a NaN, as 0 * NaN is NaN
        some: Array = weights[:, j, None] != 0 if allowed is ... else allowed[:, j, None]
        product += np.where(some, weights[:, j, None] * x[j], 0)
    return product
