"""What losses on the vectors of texts share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.values import iterated, short
from fastattn.grad import vjp
from fastattn.models import Encoder
from fastattn.models._model import pad
from fastattn.train._pooling import pooled_back
from fastattn.train._tuning import Tuning

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastattn._args.types import Array


class EncoderTuning(Tuning):
    """An encoder whose vectors of texts a loss is of."""

    @staticmethod
    def _require(func: str, model: Any) -> Any:
        if not isinstance(model, Encoder):
            raise TypeError(f"{func}(): model is of type {type(model).__name__}; expected an Encoder")
        odd = [type(x).__name__ for x in model.sentences.modules if type(x).__name__ != "Normalize"]
        if odd:
            expected = "pooling, and Normalize at most, behind the Transformer"
            raise ValueError(f"{func}(): the model has a {odd[0]} module; expected {expected}")
        return model

    def _encoded(self, func: str, name: str, texts: Any) -> list[list[int]]:
        given = [] if isinstance(texts, str) else list(iterated(func, name, texts, "texts"))
        if not given or not all(isinstance(text, str) for text in given):
            raise TypeError(f"{func}(): {name} is {short(texts)}; expected texts, at least one")
        return list(self._model.text.encode(given))

    def _pooled(self, sequences: Sequence[Sequence[int]], checkpoint: bool) -> tuple[Array, Any]:
        """Vectors (n, features) of texts, and what makes gradients of the tensors of theirs."""
        ids, mask = pad(sequences)
        hidden, pullback = vjp(self._model, ids, mask, checkpoint=checkpoint)
        begins = np.append(0, np.cumsum(mask.sum(axis=1)))
        rows = hidden[mask]
        pooling = self._model.sentences.pooling

        def back(dvectors: Array) -> dict[str, Array]:
            dhidden = np.zeros_like(hidden)
            dhidden[mask] = pooled_back(pooling, rows, begins, dvectors)
            grads: dict[str, Array] = pullback(dhidden)
            return grads

        return pooling(rows, begins), back
