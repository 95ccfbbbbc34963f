"""Measure MiniLM alone: the whole of it, its operations one by one, and parts of a batch.

    python -m bench.encoders {whole,texts,operations,parts,layer-parts} [--threads 2]

`whole` times the model in three types, `operations` those of a layer, each by itself, times six layers.
`texts` encodes 512 texts of all lengths, so many tokens at a time.
`parts` sends parts of the batch through all layers, one after the other, `layer-parts` through one layer at
a time. The model's weights are the real ones where their package is installed (docs/models.md), else random.
Each time is the shortest of many.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

import fastattn
from bench import files
from bench import texts as bench_texts
from bench.clock import Call, normal, shortest
from fastattn import models, ops
from fastattn._engine.core import _core
from fastattn.models import _encode_calls

SIZES = ((1, 16), (1, 128), (32, 32), (32, 128), (8, 256))  # sequences and their tokens
LAYERS, HEADS, WIDTH, INNER = 6, 12, 384, 1536
MAPS = {"qkv": (3 * WIDTH, WIDTH), "output": (WIDTH, WIDTH), "in": (INNER, WIDTH), "back": (WIDTH, INNER)}
# dtype, weights_dtype and activations, as `models.load` takes them.
KINDS = {
    "float32": ("float32", "float32", None),
    "bfloat16": ("bfloat16", "bfloat16", None),
    "int8 by int8": ("float32", "int8", "int8"),
}
Calls = dict[str, Call]


def best(*calls: Call, seconds: float = 0.7) -> list[float]:
    """Milliseconds: the shortest time of each call, taken in turns."""
    return [1e3 * t for t in shortest(*calls, during=seconds)]


def packed(kind: str) -> dict[str, ops.PackedLinear]:
    """The weights of a layer."""
    return {name: ops.pack(normal(shape, "float32") / 20, dtype=kind) for name, shape in MAPS.items()}


def buffers(tokens: int, dtype: str) -> list[np.ndarray]:
    """The arrays that a layer's operations write, but for its input: qkv, heads, sums, inner features."""
    return [normal((tokens, width), dtype) for width in (3 * WIDTH, WIDTH, WIDTH, INNER)]


def layer(x: np.ndarray, length: int, weights: dict[str, ops.PackedLinear], room: list[np.ndarray]) -> Calls:
    """The operations of a layer, in turn, on sequences x (tokens, 384), which become its result."""
    qkv, context, y, inner = (array[: len(x)] for array in room)
    heads = qkv.reshape(-1, length, 3, HEADS, WIDTH // HEADS).transpose(2, 0, 3, 1, 4)
    out = context.reshape(-1, length, HEADS, WIDTH // HEADS).swapaxes(1, 2)
    bias = {name: np.zeros(shape[0], np.float32) for name, shape in MAPS.items()}
    maps = {name: partial(ops.linear, weight=weights[name], bias=bias[name]) for name in MAPS}
    norm = partial(ops.layer_norm, y, np.ones(WIDTH, np.float32), bias["back"], out=x)
    return {
        "qkv": partial(maps["qkv"], x, out=qkv),
        "attention": partial(fastattn.attention, *heads, out=out),
        "output": partial(maps["output"], context, residual=x, out=y),
        "norm": norm,
        "in": partial(maps["in"], x, activation="gelu", out=inner),
        "back": partial(maps["back"], inner, residual=x, out=y),
        "norm 2": norm,
    }


def minilm(folder: str, kind: str) -> models.Encoder:
    dtype, weights_dtype, activations = KINDS[kind]
    made = files.minilm(Path(folder))
    return models.load(made, dtype=dtype, weights_dtype=weights_dtype, activations=activations)


def ids(batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(1000, 20000, (batch, length))


def whole(threads: int) -> None:
    """Milliseconds of the model."""
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            model = minilm(folder, kind)
            for size in SIZES:
                (ms,) = best(partial(model, ids(*size)))
                print(f"{kind:13} {size}: {ms:.2f} ms", flush=True)


def texts(threads: int) -> None:
    """Texts a second of `encode`, by how many tokens go through the layers at a time; texts of the bench."""
    cuts = (256, 512, 768, 1024, 2048, 4096)
    with tempfile.TemporaryDirectory() as folder:
        made = bench_texts.folder(Path(folder))
        drawn = bench_texts.draw(np.random.default_rng(0), 512)
        for kind, (dtype, weights_dtype, activations) in KINDS.items():
            model = models.load(made, dtype=dtype, weights_dtype=weights_dtype, activations=activations)

            def encode(tokens: int, model: models.Encoder = model) -> None:
                _encode_calls._CALL_TOKENS = tokens
                model.encode(drawn)

            found = zip(cuts, best(*(partial(encode, n) for n in cuts), seconds=2.5), strict=True)
            print(f"{kind:13}", *(f"{n} tokens {512e3 / ms:.0f};" for n, ms in found), flush=True)


def operations(threads: int) -> None:
    """Milliseconds of the operations of six layers, and their share of the peak."""
    for kind in ("float32", "bfloat16"):
        for batch, length in SIZES[1:]:
            tokens = batch * length
            calls = layer(normal((tokens, WIDTH), kind), length, packed(kind), buffers(tokens, kind))
            flop = {name: 2.0 * tokens * n * k for name, (n, k) in MAPS.items()}
            flop["attention"] = 4.0 * tokens * length * WIDTH
            times, peak, words = {}, 0.0, []
            for name, call in calls.items():
                peak = max(peak, *(_core.fma_peak(kind, threads) for _ in range(3)))
                times[name] = LAYERS * best(call, seconds=0.3)[0]
            for name, ms in times.items():
                share = f" ({LAYERS * flop[name] / ms / peak * 1e3:.0%})" if name in flop else ""
                words.append(f"{name} {ms:.2f}{share}")
            print(f"{kind} {batch, length}: {sum(times.values()):.1f} ms: {', '.join(words)}", flush=True)


def in_parts(model: models.Encoder, tokens: np.ndarray, n: int) -> None:
    for i in range(0, len(tokens), n):
        model(tokens[i : i + n])


def parts(threads: int) -> None:
    """Milliseconds of the model where parts of the batch go through all layers one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            model = minilm(folder, kind)
            for batch, length in SIZES[2:]:
                tokens = ids(batch, length)
                cuts = [n for n in (32, 16, 8, 4, 2, 1) if n <= batch]
                calls = [partial(in_parts, model, tokens, n) for n in cuts]
                found = zip(cuts, best(*calls, seconds=1.5), strict=True)
                print(kind, (batch, length), *(f"{n} at a time {ms:.1f} ms;" for n, ms in found), flush=True)


def in_turn(calls: list[Call]) -> None:
    for call in calls:
        call()


def layer_parts(threads: int) -> None:
    """Milliseconds of such parts that go through one layer at a time, by the operations of a layer."""
    for kind in ("float32", "bfloat16"):
        weights = [packed(kind) for _ in range(LAYERS)]
        for batch, length in SIZES[2:]:
            x = normal((batch * length, WIDTH), kind)
            cuts = sorted({batch, *(max(1, rows // length) for rows in (512, 256, 128))}, reverse=True)
            runs = []
            for n in cuts:
                room, rows = buffers(n * length, kind), n * length
                pieces = [x[i : i + rows] for i in range(0, len(x), rows)]
                runs.append([c for w in weights for p in pieces for c in layer(p, length, w, room).values()])
            found = best(*(partial(in_turn, run) for run in runs), seconds=2.0)
            words = (f"{n} at a time {ms:.1f} ms;" for n, ms in zip(cuts, found, strict=True))
            print(kind, (batch, length), *words, flush=True)


def main() -> None:
    """Parse the command line and measure."""
    measures = {f.__name__.replace("_", "-"): f for f in (whole, texts, operations, parts, layer_parts)}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=measures)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    fastattn.set_num_threads(arguments.threads)
    measures[arguments.what](arguments.threads)


if __name__ == "__main__":
    main()
