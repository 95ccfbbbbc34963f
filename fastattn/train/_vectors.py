"""Base of losses on the vectors of texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.values import short
from fastattn.grad import vjp
from fastattn.models import Encoder
from fastattn.models._model import pad
from fastattn.models._text import strings
from fastattn.train._tuning import Tuning

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastattn._args.types import Array


class EncoderTuning(Tuning):
    """Base of tunings whose loss is of an encoder's vectors."""

    @staticmethod
    def _require(model: Any) -> None:
        if not isinstance(model, Encoder):
            raise TypeError(f"(): model is of type {type(model).__name__}; expected an Encoder")
        odd = [type(x).__name__ for x in model.sentences.modules if type(x).__name__ != "Normalize"]
        if odd:
            expected = "pooling, and Normalize at most, after the Transformer"
            raise ValueError(f"(): the model has a {odd[0]} module; expected {expected}")

    def _encoded(self, name: str, texts: Any) -> list[list[int]]:
        expected = "texts, at least one"
        found = list(self._model.text.encoded(strings(name, texts, expected)))
        if not found:
            raise TypeError(f"(): {name} is {short(texts)}; expected {expected}")
        return found

    def _vectors(self, sequences: Sequence[Sequence[int]]) -> Array:
        """Vectors (n, features) of texts, without gradients."""
        rows, begins = self._model.hidden([np.asarray(x, np.int64) for x in sequences])
        found: Array = self._model.sentences.pooling(rows, begins)
        return found

    def _pooled(self, sequences: Sequence[Sequence[int]], checkpoint: bool) -> tuple[Array, Any]:
        """Vectors (n, features) of texts, and the way from their gradient to those of the tensors."""
        ids, mask = pad(sequences)
        hidden, pullback = vjp(self._model, ids, mask, checkpoint=checkpoint)
        begins = np.append(0, np.cumsum(mask.sum(axis=1)))
        rows = hidden[mask]
        pooling = self._model.sentences.pooling

        def back(dvectors: Array) -> dict[str, Array]:
            dhidden = np.zeros_like(hidden)
            dhidden[mask] = pooling.gradient(rows, begins, dvectors)
            grads: dict[str, Array] = pullback(dhidden)
            return grads

        return pooling(rows, begins), back
