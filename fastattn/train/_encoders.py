"""Fine-tuning of encoders: by pairs of texts that belong together, and by labels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fastattn import ops
from fastattn._args.errors import named
from fastattn._args.types import FLOAT32, Array, Ints, lane_dtype
from fastattn._args.values import MOST_SIZE, as_array, flag, generator, integer, number, short
from fastattn.grad import cross_entropy, vjp
from fastattn.models import Encoder
from fastattn.models._model import pad
from fastattn.models._text import strings
from fastattn.train._tuning import Tuning, outer, product


class EncoderTuning(Tuning):
    """Base of tunings whose loss is of an encoder's vectors."""

    _kind = Encoder

    def _require(self, model: Any) -> None:
        super()._require(model)
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


class ContrastiveTuning(EncoderTuning):
    """Train an encoder on texts that belong together: InfoNCE, with the other texts as negatives.

    Parameters
    ----------
    model : Encoder
        From `fastattn.models.load`, in a floating `weights_dtype`.
    rank : int, optional
        Train adapters of this rank, ``W + alpha / rank * up @ down`` (LoRA, Hu et al. 2021), instead of the
        tensors. At most the smaller side of each matrix.
    alpha : float, optional
        With `rank`, above 0; default twice the rank.
    targets : str or sequence of str, default ``"*"``
        Patterns, as for `fnmatch`, of the tensors to train; with `rank` only weights of linear maps, and no
        table of tokens, which the output layer may share.
    rng : Generator or int, default 0
        Draws ``down``; ``up`` starts at 0, so that nothing changes before the first step.
    temperature : float, default 0.05
        Divides the cosines.
    symmetric : bool, default False
        Also predict the anchor of each positive, as CLIP does.
    chunk_size : int, default 32
        Texts whose activations are held at once. The loss still covers the whole batch (GradCache, Gao et al.
        2021): vectors are computed without gradients first.
    checkpoint : bool, default False
        Keep only the input of each block, and recompute the rest.

    Notes
    -----
    `model` has the adapters merged, so that it computes as fast as before. Gradients of adapters are
    projected from gradients of whole matrices: a step takes as long as training all tensors, but its moments
    are small.
    """

    @named("{cls}")
    def __init__(
        self,
        model: Any,
        *,
        temperature: float = 0.05,
        symmetric: bool = False,
        chunk_size: int = 32,
        checkpoint: bool = False,
        **options: Any,
    ):
        super().__init__(model, **options)
        self.temperature = number("temperature", temperature, FLOAT32, positive=True)
        self.symmetric = flag("symmetric", symmetric)
        self.chunk_size = integer("chunk_size", chunk_size, 1)
        self.checkpoint = flag("checkpoint", checkpoint)

    @named("{cls}.loss")
    def loss(self, batch: Any) -> tuple[float, dict[str, Array]]:
        """Compute the loss of ``(anchors, positives[, negatives])``, and its gradients.

        Each is a list of texts. ``positives[i]`` belongs to ``anchors[i]``; all other positives, and all
        negatives, do not.
        """
        if not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
            raise TypeError(f"(): batch is {short(batch)}; expected (anchors, positives[, negatives])")
        parts = [self._encoded(f"batch[{i}]", texts) for i, texts in enumerate(batch)]
        n = len(parts[0])
        if len(parts[1]) != n:
            raise ValueError(
                f"(): batch has {n} anchors and {len(parts[1])} positives; expected the same number"
            )
        sequences = [ids for part in parts for ids in part]
        self._tokens += sum(map(len, sequences))
        chunks = [sequences[i : i + self.chunk_size] for i in range(0, len(sequences), self.chunk_size)]
        several = len(chunks) > 1
        if several:
            vectors = np.concatenate([self._vectors(chunk) for chunk in chunks])
        else:
            vectors, back = self._pooled(chunks[0], self.checkpoint)
        loss, dvectors = info_nce(vectors, n, self.temperature, symmetric=self.symmetric)
        total: dict[str, Array] = {}
        for i, chunk in enumerate(chunks):
            if several:
                _, back = self._pooled(chunk, self.checkpoint)
            begin = i * self.chunk_size
            for name, grad in back(dvectors[begin : begin + len(chunk)]).items():
                total[name] = total[name] + grad if name in total else grad
        return loss, self._own(total)


class ClassifierTuning(EncoderTuning):
    """Train an encoder, and a linear map after it, on labels of texts.

    Parameters
    ----------
    model, rank, alpha, targets, rng
        As in `ContrastiveTuning`; rng also draws the map.
    num_labels : int

    Notes
    -----
    The map's parameters are ``head.weight`` (num_labels, features) and ``head.bias``. Its input is pooled,
    not normalised.
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
        """Compute the mean cross-entropy of ``(texts, labels)``, labels from 0 on, and its gradients."""
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise TypeError(f"(): batch is {short(batch)}; expected (texts, labels)")
        sequences = self._encoded("batch[0]", batch[0])
        labels = self._labels(batch[1], len(sequences))
        self._tokens += sum(map(len, sequences))
        vectors, back = self._pooled(sequences, checkpoint=False)
        head, bias = ops.pack(self._parameters["head.weight"]), self._parameters["head.bias"]
        found: Any = cross_entropy(vectors, head, labels, bias=bias)
        loss, dvectors, dhead, dbias = found
        return float(loss), {**self._own(back(dvectors)), "head.weight": dhead, "head.bias": dbias}

    @named("{cls}.predict")
    def predict(self, texts: Iterable[str]) -> Array:
        """Return the probabilities (n, num_labels) of the labels of texts."""
        sequences = self._encoded("texts", texts)
        order = np.argsort([-len(ids) for ids in sequences], kind="stable")
        head, bias = ops.pack(self._parameters["head.weight"]), self._parameters["head.bias"]
        found = np.empty((len(sequences), len(bias)), lane_dtype(self._model.dtype))
        for part in np.array_split(order, -(-len(order) // 64)):
            logits = ops.linear(self._vectors([sequences[i] for i in part]), head, bias)
            found[part] = np.exp(logits - logits.max(axis=-1, keepdims=True))
        found /= found.sum(axis=-1, keepdims=True)
        return found

    def _labels(self, given: Any, n: int) -> Ints:
        labels: Ints = as_array("batch[1]", given)
        count = len(self._parameters["head.bias"])
        if labels.shape != (n,) or labels.dtype.kind not in "iu":
            raise ValueError(f"(): batch[1] is {short(labels)}; expected {n} integers, one a text")
        if not (labels.min() >= 0 and labels.max() < count):
            bad = labels.min() if labels.min() < 0 else labels.max()
            raise ValueError(f"(): batch[1] has {bad}; expected 0 to {count - 1}")
        return labels


def info_nce(vectors: Array, n: int, temperature: float, *, symmetric: bool) -> tuple[float, Array]:
    """InfoNCE of vectors (n anchors, then their positives, then negatives), and its gradient.

    The loss is the mean of ``-log softmax(cos(anchor, others) / temperature)`` at the positive (van den Oord
    et al. 2018).
    """
    norm = np.maximum(np.sqrt(np.square(vectors).sum(axis=-1, keepdims=True)), 1e-12)
    units = vectors / norm
    anchors, others = units[:n], units[n:]
    by = vectors.dtype.type(1 / temperature)
    scores, own = by * product(anchors, others.T), np.arange(n)
    loss, dscores = _cross_entropy(scores, own)
    if symmetric:
        other, transposed = _cross_entropy(scores[:, :n].T, own)
        loss, dscores = (loss + other) / 2, dscores / 2
        dscores[:, :n] += transposed.T / 2
    dunits = np.concatenate([product(dscores, others), outer(dscores, anchors)]) * by
    return loss, (dunits - units * (units * dunits).sum(axis=-1, keepdims=True)) / norm


def _cross_entropy(logits: Array, labels: Ints) -> tuple[float, Array]:
    loss, gradient = cross_entropy(logits, None, labels)
    return float(loss), np.asarray(gradient)
