"""A Transformer that learns from nothing to write as Python's documentation is written, letter by letter.

    python examples/train_characters.py           # under a minute: short words, and what looks like words
    python examples/train_characters.py --layers 6 --width 384 --heads 6 --length 256 --batch 16 --steps 5000

The text comes with Python: what `help()` shows. `--save run.safetensors` writes the run now and then, and
continues with it if it exists, at the same sizes. Another `--steps` is another schedule of the learning
rate: the run continues with that, and a warning. `--plot loss.png` draws the loss.
"""

import argparse
import math
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from language_model import LanguageModel

from fastattn.train import AdamW, Batches, Schedule, Trainer

SIZES = ("layers", "width", "heads", "length", "batch")


class Windows(Batches):
    """Batches whose place, as it is saved, has the sizes of the run, too: it continues at these alone."""

    def __init__(self, windows, sizes, rng):
        self.sizes = sizes
        super().__init__(windows, batch_size=sizes["batch"], rng=rng)

    def state_dict(self):
        return {**super().state_dict(), "sizes": self.sizes}

    def load_state_dict(self, state_dict):
        begun = state_dict.get("sizes", {})
        for name, size in self.sizes.items():
            if begun.get(name) != size:
                raise ValueError(f"--{name} is {size}; expected {begun.get(name)}, with which the run began")
        super().load_state_dict(state_dict)


def characters():
    """(text, its characters): ids are their places."""
    text = "\n".join(topics[name] for name in sorted(topics))
    return text, sorted(set(text))


def evaluate(model, windows, batch):
    """The mean loss of some windows that no step has seen."""
    losses = [
        model.loss(part[:, :-1], part[:, 1:]) for part in np.array_split(windows, -(-len(windows) // batch))
    ]
    return math.fsum(losses) / len(losses)


def written(model, letters, begin, count, rng):
    """`begin`, continued. When the model's sequence is full, it continues after the latter half of it."""
    ids = [letters.index(letter) for letter in begin]
    while len(ids) < count:
        seen = ids[-(len(model.positions) // 2) :]
        room = min(len(model.positions) - len(seen), count - len(ids))
        ids += model.generate(seen, room, temperature=0.8, rng=rng)
    return "".join(letters[i] for i in ids)


def plot(path, steps, tested):
    try:
        import matplotlib
    except ImportError:
        print("no picture: pip install matplotlib")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    axes.plot([step.step for step in steps], [step.loss for step in steps], linewidth=0.8, label="training")
    axes.plot(*zip(*tested, strict=True), "o-", label="unseen text")
    axes.set(xlabel="step", ylabel="loss of a character, nats")
    axes.legend()
    figure.savefig(path)
    print(f"picture: {path}")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"layers": 2, "width": 96, "heads": 3, "length": 64, "batch": 16, "steps": 300, "sample": 300}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args(argv)

    text, letters = characters()
    places = {letter: i for i, letter in enumerate(letters)}
    ids = np.array([places[letter] for letter in text])
    windows = np.lib.stride_tricks.sliding_window_view(ids, args.length + 1)
    seen, unseen = np.split(windows, [len(windows) * 9 // 10])
    unseen = unseen[args.length :: args.length][: 4 * args.batch]  # the first ones overlap what is seen

    model = LanguageModel(
        len(letters), args.length, args.width, args.heads, args.layers, rng=np.random.default_rng(args.seed)
    )
    optimizer = AdamW(model.parameters, args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    trainer = Trainer(
        lambda batch: model.loss_and_gradients(batch[:, :-1], batch[:, 1:]),
        optimizer,
        Windows(seen, {name: getattr(args, name) for name in SIZES}, args.seed),
        schedule=Schedule("cosine", args.steps, warmup=args.steps // 20, final=0.1),
        max_norm=1.0,
        tokens=lambda batch: batch[:, 1:].size,
    )
    count = sum(x.size for x in optimizer.parameters.values())
    print(f"{len(text):,} characters, {len(letters)} different ones; {count:,} parameters")
    if args.save and args.save.exists():
        try:
            trainer.load(args.save)
        except (OSError, ValueError) as error:
            raise SystemExit(f"error: {args.save}: {error}") from None
        if trainer.steps < args.steps:
            print(f"{args.save}: continues at step {trainer.steps}")
        else:
            print(f"{args.save}: finished, at step {trainer.steps}; a larger --steps continues")

    every = max(1, args.steps // 6)
    tested = [(trainer.steps, evaluate(model, unseen, args.batch))]

    def now_and_then(step):
        if step.step % every == 0 or step.step == args.steps:
            tested.append((step.step, evaluate(model, unseen, args.batch)))
            print(f"    unseen text: {tested[-1][1]:.4f}")
            if args.save:
                trainer.save(args.save)

    steps = trainer.fit(args.steps, log_every=every, callback=now_and_then)
    if args.plot:
        plot(args.plot, steps, tested)
    print(written(model, letters, "The ", args.sample, np.random.default_rng(args.seed)))
    return tested


if __name__ == "__main__":
    main()
