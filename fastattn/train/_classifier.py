"""Fine-tuning by labels of texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn import ops
from fastattn._args.errors import named
from fastattn._args.types import lane_dtype
from fastattn._args.values import MOST_SIZE, as_array, generator, integer, short
from fastattn.grad import cross_entropy
from fastattn.train._vectors import EncoderTuning

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastattn._args.types import Array, Ints


class ClassifierTuning(EncoderTuning):
    """An encoder and a linear map after it that learn labels of texts.

    Parameters
    ----------
    model, rank, alpha, targets, rng
        As of `Tuning`; the model is an `Encoder`. rng also draws the map.
    num_labels : int

    Notes
    -----
    The map's parameters are ``head.weight`` (num_labels, features) and ``head.bias``. It sees what the model
    pools, before it is normalised.
    """

    @named("{cls}")
    def __init__(self, model: Any, num_labels: int, **options: Any):
        super().__init__(model, **options)
        count = integer("num_labels", num_labels, 2, MOST_SIZE)
        source = generator("rng", options.get("rng", 0))
        features = self._model.hidden_size * len(self._model.sentences.pooling.modes)
        head = 0.02 * source.standard_normal((count, features))
        lane = lane_dtype(self._model.dtype)
        self._parameters["head.weight"] = head.astype(lane)
        self._parameters["head.bias"] = np.zeros(count, lane)

    @named("{cls}.loss")
    def loss(self, batch: Any) -> tuple[float, dict[str, Array]]:
        """The mean cross-entropy of ``(texts, labels)``, labels 0 to num_labels - 1, and its gradients."""
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise TypeError(f"(): batch is {short(batch)}; expected (texts, labels)")
        sequences = self._encoded("batch[0]", batch[0])
        labels = self._labels(batch[1], len(sequences))
        self._run.tokens += sum(map(len, sequences))
        vectors, back = self._pooled(sequences, checkpoint=False)
        head, bias = ops.pack(self._parameters["head.weight"]), self._parameters["head.bias"]
        found: Any = cross_entropy(vectors, head, labels, bias=bias)
        loss, dvectors, dhead, dbias = found
        return float(loss), {**self._own(back(dvectors)), "head.weight": dhead, "head.bias": dbias}

    @named("{cls}.predict")
    def predict(self, texts: Iterable[str]) -> Array:
        """Probabilities (n, num_labels) of the labels of texts."""
        sequences = self._encoded("texts", texts)
        order = np.argsort([-len(ids) for ids in sequences], kind="stable")
        found = np.empty((len(sequences), len(self._parameters["head.bias"])), lane_dtype(self._model.dtype))
        for part in np.array_split(order, -(-len(order) // 64)):
            logits = self._logits(self._vectors([sequences[i] for i in part]))
            found[part] = np.exp(logits - logits.max(axis=-1, keepdims=True))
        found /= found.sum(axis=-1, keepdims=True)
        return found

    def _logits(self, vectors: Array) -> Array:
        return ops.linear(vectors, ops.pack(self._parameters["head.weight"]), self._parameters["head.bias"])

    def _labels(self, given: Any, n: int) -> Ints:
        labels: Ints = as_array("batch[1]", given)
        count = len(self._parameters["head.bias"])
        if labels.shape != (n,) or labels.dtype.kind not in "iu":
            raise ValueError(f"(): batch[1] is {short(labels)}; expected {n} integers, one a text")
        if not (labels.min() >= 0 and labels.max() < count):
            bad = labels.min() if labels.min() < 0 else labels.max()
            raise ValueError(f"(): batch[1] has {bad}; expected 0 to {count - 1}")
        return labels
