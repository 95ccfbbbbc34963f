"""A small language model over `fastattn.layers`, as GPT-2: `train_characters.py` trains it."""

import numpy as np

from fastattn import grad, ops
from fastattn.layers import LayerNorm, TransformerEncoder, TransformerEncoderLayer


class LanguageModel:
    """Token ids to the logits of the next token; the embedding also makes the logits."""

    def __init__(self, vocab_size, max_length, width, heads, layers, weights_dtype="float32", rng=None):
        rng, options = np.random.default_rng(rng), {"norm_first": True, "weights_dtype": weights_dtype}
        stack = [
            TransformerEncoderLayer(width, heads, 4 * width, "gelu", **options, rng=rng)
            for _ in range(layers)
        ]
        self.encoder = TransformerEncoder(stack, LayerNorm(width, weights_dtype=weights_dtype))
        lane = "float64" if weights_dtype == "float64" else "float32"
        self.table = rng.normal(0, 0.02, (vocab_size, width)).astype(lane)
        self.positions = rng.normal(0, 0.02, (max_length, width)).astype(lane)

    @property
    def parameters(self):
        """Arrays and layers for an optimizer of `fastattn.train`, which changes them in place."""
        return {"table": self.table, "positions": self.positions, "encoder": self.encoder}

    @property
    def head(self):
        return ops.pack(self.table, dtype=self.encoder.weights_dtype)

    def hidden(self, ids, cache=None):
        return self.encoder(self.embedded(ids, cache), is_causal=True, cache=cache)

    def embedded(self, ids, cache=None):
        before = cache[0].length if cache else 0
        return ops.embedding(ids, self.table) + self.positions[before : before + np.shape(ids)[1]]

    def __call__(self, ids, cache=None):
        """Logits (batch, length, vocab_size) of what follows each of `ids` (batch, length)."""
        return ops.linear(self.hidden(ids, cache), self.head)

    def loss(self, ids, targets):
        """The mean of ``-log(probability of target)``."""
        return grad.cross_entropy(self.hidden(ids), self.head, targets, need=())[0]

    def loss_and_gradients(self, ids, targets, **training):
        """The loss, and gradients by the names of `parameters`; dropout, checkpoint: see `grad.vjp`."""
        hidden, pullback = grad.vjp(self.encoder, self.embedded(ids), is_causal=True, **training)
        loss, dhidden, dtable = grad.cross_entropy(hidden, self.head, targets)
        dx, grads = pullback(dhidden)
        dpositions = np.zeros_like(self.positions)
        dpositions[: dx.shape[1]] = dx.sum(axis=0)
        grads = {f"encoder.{name}": x for name, x in grads.items()}
        grad.embedding(dx, ids, len(self.table), add_to=dtable)
        return loss, {"table": dtable, "positions": dpositions, **grads}

    def generate(self, ids, count, temperature=0.0, rng=None):
        """Continue `ids`, a sequence, by the best tokens, or with a temperature by draws of `rng`."""
        cache, ids, head = self.encoder.new_cache(), np.array([ids]), self.head
        for _ in range(count):
            (logits,) = ops.linear(self.hidden(ids, cache)[:, -1], head)
            if temperature:  # the largest after Gumbel's noise is a draw
                logits = logits / temperature + rng.gumbel(size=logits.shape)
            ids = logits.argmax(keepdims=True)[None]
            yield int(ids[0, 0])
