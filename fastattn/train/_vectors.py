"""Base of losses on the vectors of texts, and the gradient of pooling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.values import iterated, short
from fastattn.grad import vjp
from fastattn.models import Encoder
from fastattn.models._model import pad
from fastattn.train._tuning import Tuning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


def _pooled_back(pooling: Any, rows: Array, begins: Ints, dvectors: Array) -> Array:
    """The gradient of rows (tokens, features), for that of ``pooling(rows, begins)``."""
    drows = np.zeros_like(rows)
    apart = dvectors.reshape(len(dvectors), len(pooling.modes), rows.shape[1])
    for dvector, begin, end in zip(apart, begins[:-1], begins[1:], strict=True):
        for each, mode in zip(dvector, pooling.modes, strict=True):
            if end > begin:
                drows[begin:end] += _BACK[mode](rows[begin:end], each)
    return drows


class EncoderTuning(Tuning):
    """Base of tunings whose loss is of an encoder's vectors."""

    @staticmethod
    def _require(model: Any) -> None:
        if not isinstance(model, Encoder):
            raise TypeError(f"(): model is of type {type(model).__name__}; expected an Encoder")
        odd = [type(x).__name__ for x in model.sentences.modules if type(x).__name__ != "Normalize"]
        if odd:
            expected = "pooling, and Normalize at most, behind the Transformer"
            raise ValueError(f"(): the model has a {odd[0]} module; expected {expected}")

    def _encoded(self, name: str, texts: Any) -> list[list[int]]:
        given = [] if isinstance(texts, str) else list(iterated(name, texts, "texts"))
        if not given or not all(isinstance(text, str) for text in given):
            raise TypeError(f"(): {name} is {short(texts)}; expected texts, at least one")
        return list(self._model.text.encode(given))

    def _pooled(self, sequences: Sequence[Sequence[int]], checkpoint: bool) -> tuple[Array, Any]:
        """Vectors (n, features) of texts, and the way from their gradient to those of the tensors."""
        ids, mask = pad(sequences)
        hidden, pullback = vjp(self._model, ids, mask, checkpoint=checkpoint)
        begins = np.append(0, np.cumsum(mask.sum(axis=1)))
        rows = hidden[mask]
        pooling = self._model.sentences.pooling

        def back(dvectors: Array) -> dict[str, Array]:
            dhidden = np.zeros_like(hidden)
            dhidden[mask] = _pooled_back(pooling, rows, begins, dvectors)
            grads: dict[str, Array] = pullback(dhidden)
            return grads

        return pooling(rows, begins), back
