"""The gradient of pooling: from that of one vector a text to that of its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastattn._args.types import Array, Ints


def _at(place: int) -> Callable[[Array, Array], Array]:
    def back(tokens: Array, dvector: Array) -> Array:
        dtokens = np.zeros_like(tokens)
        dtokens[place] = dvector
        return dtokens

    return back


def _weighted(weights: Callable[[int], Any]) -> Callable[[Array, Array], Array]:
    def back(tokens: Array, dvector: Array) -> Array:
        shares = np.asarray(weights(len(tokens)), tokens.dtype)
        return np.broadcast_to(shares[:, None] * dvector, tokens.shape)

    return back


def _largest(tokens: Array, dvector: Array) -> Array:
    """Give the gradient to the first of equal ones, as `argmax` finds it."""
    dtokens = np.zeros_like(tokens)
    np.put_along_axis(dtokens, tokens.argmax(axis=0)[None], dvector[None], axis=0)
    return dtokens


# Functions of a text's tokens (length, features) and the gradient of its vector (features,).
_BACK: dict[str, Callable[[Array, Array], Array]] = {
    "cls": _at(0),
    "lasttoken": _at(-1),
    "max": _largest,
    "mean": _weighted(lambda n: np.full(n, 1 / n)),
    "mean_sqrt_len_tokens": _weighted(lambda n: np.full(n, n**-0.5)),
    "weightedmean": _weighted(lambda n: np.arange(1, n + 1) / (n * (n + 1) / 2)),
}


def pooled_back(pooling: Any, rows: Array, begins: Ints, dvectors: Array) -> Array:
    """The gradient of rows (tokens, features), for that of ``pooling(rows, begins)``."""
    drows = np.zeros_like(rows)
    apart = dvectors.reshape(len(dvectors), len(pooling.modes), rows.shape[1])
    for dvector, begin, end in zip(apart, begins[:-1], begins[1:], strict=True):
        for each, mode in zip(dvector, pooling.modes, strict=True):
            if end > begin:
                drows[begin:end] += _BACK[mode](rows[begin:end], each)
    return drows
