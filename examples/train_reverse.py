"""A seq2seq `Transformer` that learns from nothing to reverse strings.

    python examples/train_reverse.py                                # half a minute
    python examples/train_reverse.py --longest 20 --width 128 --layers 3 --steps 3000

Embeddings and positions are the caller's: this shows how parameters of one's own train with those of a layer.
"""

import argparse
import string

import numpy as np

from fastattn import grad, ops
from fastattn.layers import Transformer
from fastattn.positions import sinusoidal
from fastattn.train import AdamW, Schedule, Trainer

LETTERS = string.ascii_lowercase
PAD, BEGIN, END = range(len(LETTERS), len(LETTERS) + 3)
NUM_TOKENS = len(LETTERS) + 3


class Reverser:
    """The layer, and a table of vectors that is shared by both sides and by the logits."""

    def __init__(self, width, heads, layers, longest, rng):
        self.transformer = Transformer(width, heads, layers, layers, 2 * width, norm_first=True, rng=rng)
        self.positions = sinusoidal(longest + 1, width)
        self.table = rng.normal(0, width**-0.5, (NUM_TOKENS, width)).astype(np.float32)

    def embedded(self, ids, begin=0):
        table, count = self.table, ids.shape[1]
        scale = table.shape[1] ** 0.5
        return ops.embedding(ids, table) * np.float32(scale) + self.positions[begin : begin + count]

    def loss_and_gradients(self, words):
        """words (batch, longest) end in PAD. The loss of a letter, and the gradients of all parameters."""
        source, target, table = words, reverse(words), self.table
        given = np.concatenate((np.full((len(words), 1), BEGIN), target[:, :-1]), axis=1)
        hidden = source == PAD
        out, pullback = grad.vjp(
            self.transformer,
            self.embedded(source),
            self.embedded(given),
            src_key_padding_mask=hidden,
            memory_key_padding_mask=hidden,
            tgt_is_causal=True,
        )
        loss, dout, dtable = grad.cross_entropy(out, ops.pack(table), target, ignore_index=PAD)
        dsource, dgiven, grads = pullback(dout)
        grads = {f"transformer.{name}": x for name, x in grads.items()}
        for ids, dx in ((source, dsource), (given, dgiven)):
            scale = np.float32(table.shape[1] ** 0.5)
            grad.embedding(dx * scale, ids, NUM_TOKENS, add_to=dtable)
        return loss, {**grads, "table": dtable}

    def reversed(self, words):
        """The best letter, one after another."""
        hidden = words == PAD
        memory = self.transformer.encoder(self.embedded(words), src_key_padding_mask=hidden)
        cache, head = self.transformer.decoder.new_cache(), ops.pack(self.table)
        best = np.full((len(words), 1), BEGIN)
        answer = []
        for i in range(words.shape[1]):
            out = self.transformer.decoder(
                self.embedded(best, i), memory, cache=cache, memory_key_padding_mask=hidden
            )
            best = ops.linear(out, head).argmax(axis=-1)
            answer.append(best)
        return np.concatenate(answer, axis=1)


def draw(rng, batch, longest):
    """Random words (batch, longest + 1) of different lengths, then END, then PAD."""
    words = rng.integers(len(LETTERS), size=(batch, longest + 1))
    lengths = rng.integers(1, longest + 1, size=(batch, 1))
    place = np.arange(longest + 1)
    return np.where(place < lengths, words, np.where(place == lengths, END, PAD))


def draws(rng, batch, longest):
    while True:
        yield draw(rng, batch, longest)


def reverse(words):
    """The right answers: END and PAD keep their places after them."""
    lengths = (words == END).argmax(axis=1)[:, None]
    place = np.arange(words.shape[1])
    return np.take_along_axis(words, np.where(place < lengths, lengths - 1 - place, place), axis=1)


def spelt(row):
    return "".join(LETTERS[i] for i in row if i < len(LETTERS))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"longest": 8, "width": 64, "heads": 4, "layers": 2, "batch": 64, "steps": 600, "seed": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args(argv)

    rng = np.random.default_rng(args.seed)
    model = Reverser(args.width, args.heads, args.layers, args.longest, rng)
    parameters = {"table": model.table, "transformer": model.transformer}
    optimizer = AdamW(parameters, args.lr, weight_decay=0.01)
    trainer = Trainer(
        model.loss_and_gradients,
        optimizer,
        draws(rng, args.batch, args.longest),
        schedule=Schedule("cosine", args.steps, warmup=args.steps // 10),
        max_norm=1.0,
    )
    trainer.fit(args.steps, log_every=max(1, args.steps // 6))
    words = draw(np.random.default_rng(args.seed + 1), 200, args.longest)  # nearly all were never seen
    answers, right = model.reversed(words), reverse(words)
    correct = ((answers == right) | (right == PAD)).all(axis=1)
    for word, answer in zip(words[:5], answers, strict=False):
        end = (answer == END).argmax() if END in answer else len(answer)
        print(f"{spelt(word)} -> {spelt(answer[:end])}")
    print(f"accuracy: {correct.mean():.1%} of {len(words)} words")
    return correct.mean()


if __name__ == "__main__":
    main()
