"""Modifiers of scores in NumPy, their slopes and their gradients: the twin of src/modifiers.inc.h.

Words are those of `attention.py`. Where no shape is named, arrays are (group, rows, keys).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._args.types import AXES, Array, BackwardArgs
from fastattn._args.values import float_array, require_broadcast


class Scores:
    """The scores of a block of query rows: what a `Task` does with those before softmax."""

    call: Any  # the `Call`
    batch: tuple[int, ...]
    h_kv: int
    where: Any  # (*batch, heads, rows)
    bias: Any
    position: Array  # of the rows, (rows, 1), with `has_distances`

    def part(self, name: str) -> Any:
        """The task's own part of an array of the call, or None."""
        if (x := self.call.arrays.get(name)) is None:
            return None
        axes = AXES[name]
        if axes[:1] == ("heads_kv",):
            return x[(*self.batch, self.h_kv)]
        return x[self.where if "len_q" in axes else self.where[:-1] if axes else self.batch]

    def products(self, keys: slice) -> Array:
        """q @ k.T."""
        raise NotImplementedError

    def distances(self, keys: slice) -> Array:
        """Distances of the rows' positions and keys, (rows, keys)."""
        found: Array = abs(self.position - np.arange(keys.start, keys.stop))
        return found

    def scores(self, keys: slice, allowed: Any) -> Array:
        """Scores, modified in this order: scale, softcap, bias, ALiBi, masks."""
        dtype, softcap = self.call.dtype, self.call.args.softcap
        scores = self.products(keys)
        scores *= self.call.args.scale  # scaling q instead would add its rounding to that of the product
        if softcap:
            scores /= softcap
            np.tanh(scores, out=scores)
            scores *= softcap
        if self.call.score_mod is not None:
            scores = self.checked(self.call.score_mod, (scores,), keys)
        finite = None
        if self.bias is not None:
            finite = scores != -np.inf
            scores += self.bias[..., keys].astype(dtype)
        if (slopes := self.part("alibi_slopes")) is not None:
            scores -= slopes[:, None, None] * self.distances(keys).astype(dtype)
        if finite is not None:  # a finite bias never masks, even if the sum overflows; NaN stays NaN
            np.maximum(scores, np.finfo(dtype).min, out=scores, where=finite)
        if allowed is not True:
            np.copyto(scores, -np.inf, where=~allowed)
        return scores

    def slopes_of_scores(self, keys: slice) -> Array | None:
        """Derivatives of scores, before biases, by scaled products; None: they are 1."""
        return self.softcap_slopes(keys)[0] if self.call.args.softcap else None

    def softcap_slopes(self, keys: slice) -> tuple[Array, Array]:
        """Derivatives of ``softcap * tanh(x / softcap)`` by x and by the cap.

        The first is ``1 - tanh**2`` with all its digits. From 400 on it is 0, and infinity would make NaN.
        """
        a = self.call.args
        scaled = np.clip(self.products(keys) * self.call.dtype.type(a.scale / a.softcap), -400, 400)
        e = np.exp(-2 * abs(scaled))
        slope: Array = 4 * e / (1 + e) ** 2
        return slope, np.tanh(scaled) - scaled * slope

    def checked(self, function: Any, arrays: tuple[Array, ...], keys: slice) -> Array:
        """Result of a caller's function on arrays, with their shape."""
        call = self.call
        b = int(np.ravel_multi_index(self.batch, call.args.batch_shape)) if self.batch else 0
        h = self.h_kv * call.group + np.arange(call.group)[:, None, None]
        found = function(*arrays, b, h, self.position, np.arange(keys.start, keys.stop))
        mod = "score_mod" if len(arrays) == 1 else "score_mod_backward"
        name = f"what {mod} returns"
        found = float_array(name, found)
        require_broadcast(name, found.shape, arrays[0].shape, "(group, rows, keys)")
        return np.array(np.broadcast_to(found, arrays[0].shape), call.dtype)

    def of_scores(self, dscores: Array, keys: slice) -> Array:
        """Gradient of the scores that `score_mod` got, by `score_mod_backward`."""
        scores = self.products(keys) * self.call.dtype.type(self.call.args.scale)
        return self.checked(self.call.score_mod_backward, (dscores, scores), keys)

    def add_modifiers(self, args: BackwardArgs, keys: slice, dscores: Array) -> None:
        """Add what dscores, behind all modifiers, make of the gradients of these."""
        forward, heads, rows = args.attention, self.where[:-1], self.where[-1]
        if args.dbias is not None:
            add_to(args.dbias, self.batch, (heads[-1], rows, keys), dscores)
        if args.dbias_diagonals is not None:
            n_rows, n_keys = dscores.shape[1:]
            first = keys.start - rows.stop + forward.len_q  # of j - i + len_q - 1
            sums = np.zeros((len(dscores), n_rows + n_keys - 1), dscores.dtype)
            for r in range(n_rows):
                sums[:, n_rows - 1 - r : n_rows - 1 - r + n_keys] += dscores[:, r]
            where = heads[-1], slice(None), slice(first, first + sums.shape[1])
            add_to(args.dbias_diagonals[..., None, :], self.batch, where, sums[:, None])
        if args.dalibi_slopes is not None:
            args.dalibi_slopes[heads] -= (dscores * self.distances(keys)).sum(axis=(-1, -2), dtype=float)
        if args.dsoftcap is not None:
            terms = np.where(dscores == 0, 0, dscores * self.softcap_slopes(keys)[1])
            args.dsoftcap[heads] += terms.sum(axis=(-1, -2), dtype=float)


def add_to(to: Array, batch: tuple[int, ...], where: tuple[slice, ...], x: Array) -> None:
    """to[batch, where] += x, summed over axes that `to` does not have, or has once."""
    lengths = to.shape[:-3]
    own = batch[len(batch) - len(lengths) :]
    single = tuple(i for i in range(3) if to.shape[i - 3] == 1)
    index: Any = (
        *(0 if n == 1 else b for n, b in zip(lengths, own, strict=True)),
        *(slice(None) if i in single else place for i, place in enumerate(where)),
    )
    to[index] += x.sum(axis=single, keepdims=True) if single else x
