"""One model of the bench: its files, its inputs, what it should answer, and which are measured."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastattn._bench import plain
from fastattn._bench.cases import Array
from fastattn._bench.suite import Section
from fastattn._bench.suites.layers.problem import BYTES
from fastattn._bench.suites.models import files as model_files

DTYPES = ("float32", "bfloat16", "int8")

# Of hidden states and logits of size 1, after all layers, against weights that were not rounded.
TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-1, "int8": 5e-1}
PROMPT = 16  # tokens of a decoder's last step: all but one are cached


class ModelShape(NamedTuple):
    """ids is (batch, length)."""

    name: str
    kind: str  # "minilm", or "llama"
    batch: int
    length: int
    makes: str  # what a call makes `batch` of
    layers: int = 6
    vocab: int = 0


class ModelProblem(NamedTuple):
    """Hidden states of MiniLM, or the logits of one step of a decoder over a cache."""

    shape: ModelShape
    variant: str
    dtype: str  # of the weights
    seed: int
    scratch: str  # folder for the files that are made

    @classmethod
    def from_list(cls, fields: list[Any]) -> ModelProblem:
        """The inverse of ``list(problem)`` after a trip through JSON."""
        shape, variant, dtype, seed, scratch = fields
        return cls(ModelShape(*shape), variant, dtype, seed, scratch)

    def folder(self) -> Path:
        """config.json and model.safetensors, made if they are not there."""
        if self.shape.kind == "minilm":
            return model_files.minilm(Path(self.scratch))
        return model_files.llama(Path(self.scratch), self.shape.layers, self.shape.vocab)

    def config(self) -> dict[str, Any]:
        return model_files.read_config(self.folder())

    def ids(self) -> Array:
        """(batch, length)."""
        rng = np.random.default_rng([self.seed, 0])
        return rng.integers(0, self.config()["vocab_size"], (self.shape.batch, self.shape.length))

    def reference(self) -> tuple[Array, Array]:
        """The last sequence's hidden states, or the logits, in float64."""
        want = _answer(self.folder(), tuple(self.ids()[-1].tolist()))
        total = self.shape.batch * len(want)
        return np.arange(total - len(want), total), want

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    @property
    def weights(self) -> int:
        """How many a token meets, all linear maps together; of a decoder with its output layer."""
        config = self.config()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        if self.shape.kind == "minilm":
            return int(config["num_hidden_layers"] * (4 * hidden * hidden + 2 * hidden * inner))
        kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
        layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner
        return int(config["num_hidden_layers"] * layer + config["vocab_size"] * hidden)

    @property
    def unit(self) -> str:
        return "flops" if self.shape.kind == "minilm" else "bytes"

    @property
    def work(self) -> float:
        """FLOP of all products; of a decoder's step the bytes of its weights."""
        if self.shape.kind == "llama":
            return float(self.weights * BYTES[self.dtype])
        tokens, config = self.shape.batch * self.shape.length, self.config()
        scores: float = 4.0 * self.shape.length * config["hidden_size"] * config["num_hidden_layers"]
        return tokens * (2.0 * self.weights + scores)


@cache
def _answer(folder: Path, ids: tuple[int, ...]) -> Array:
    """(length, hidden) or (1, vocab), from one sequence: the same for weights of every type."""
    config, tensors, row = model_files.read_config(folder), model_files.Tensors(folder), np.array([ids])
    if config["model_type"] == "llama":
        return plain.llama(row, tensors, config, np.float64)
    states: Array = plain.bert(row, plain.Widened(tensors, "", np.float64), config)[0]
    return states


def minilm(batch: int, length: int) -> ModelShape:
    return ModelShape(f"MiniLM {batch},{length}", "minilm", batch, length, "sentences")


def llama(layers: int, vocab: int) -> ModelShape:
    name = f"Llama, {layers} layer{'s' * (layers > 1)}"
    return ModelShape(name, "llama", 1, PROMPT, "tokens", layers, vocab)


ENCODERS = (minilm(1, 16), minilm(1, 128), minilm(32, 32), minilm(32, 128), minilm(8, 256))
DECODER = llama(16, 128256)
SMALL_DECODER = llama(1, 8000)  # 77 million weights: still more than caches hold


def plan(dtype: str | None, quick: bool, seed: int, folder: Path) -> list[Section]:
    """What is measured, with weights in every type or in `dtype`; with `quick` a part of it."""
    chosen = DTYPES if dtype is None else (dtype,)
    sections = []

    def section(title: str, shapes: Any, dtype: str) -> None:
        problems = [ModelProblem(shape, "plain", dtype, seed, str(folder)) for shape in shapes]
        sections.append(Section(f"{title}, {dtype}", problems))

    weights = "" if model_files.has_minilm() else " (random)"
    if quick:  # reading, packing and checking a decoder takes longest
        if chosen[0] != "int8":
            section(f"hidden states{weights}", ENCODERS[:2], chosen[0])
        for name in dict.fromkeys((chosen[0], chosen[-1])):
            section("one step", [SMALL_DECODER], name)
        return sections
    for name in chosen:
        if name != "int8":
            section(f"hidden states{weights}", ENCODERS, name)
        section("one step", [DECODER], name)
    return sections
