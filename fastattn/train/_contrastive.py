"""Fine-tuning by pairs of texts that belong together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.errors import named
from fastattn._args.types import FLOAT32
from fastattn._args.values import flag, integer, number, short
from fastattn.grad import cross_entropy
from fastattn.train._tuning import outer, product
from fastattn.train._vectors import EncoderTuning

if TYPE_CHECKING:
    from fastattn._args.types import Array, Ints


class ContrastiveTuning(EncoderTuning):
    """An encoder that learns which texts belong together: InfoNCE with the other texts as negatives.

    Parameters
    ----------
    model, rank, alpha, targets, rng
        As of `Tuning`; the model is an `Encoder`.
    temperature : float, default 0.05
        Cosines are divided by it.
    symmetric : bool, default False
        Count the anchors of each positive, too, as CLIP does.
    chunk_size : int, default 32
        Texts whose activations are held at once. The loss is that of the whole batch all the same (GradCache,
        Gao et al. 2021): vectors are computed without gradients first.
    checkpoint : bool, default False
        Keep only the input of each block, and compute the rest again.
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
        """The loss of ``(anchors, positives)`` or ``(anchors, positives, negatives)``, and its gradients.

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
        self._run.tokens += sum(map(len, sequences))
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
