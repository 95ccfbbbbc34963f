"""The problems of the suite "models", and which of them are measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastattn._bench import plain
from fastattn._bench.cases import Array
from fastattn._bench.suite import INT8_INPUTS, WEIGHT_BYTES, Problem, Request, Section
from fastattn._bench.suites.models import files, text

DTYPES = ("float32", "bfloat16", "int8")

# The largest error of hidden states and logits of about 1, after all layers; their reference has weights that
# were not rounded.
TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-1, "int8": 5e-1}
INT8_BFLOAT16 = "int8 inputs, rest in bfloat16"  # of the other rows with int8 inputs, the rest is in float32
ROUNDED_TOLERANCE = 1.0  # of inputs in int8; their cosines say more
PROMPT = 16  # tokens at a decoder's step, all but the last of them cached


class ModelShape(NamedTuple):
    """ids is (batch, length)."""

    name: str
    kind: str  # "minilm", or "llama"
    batch: int
    length: int
    makes: str  # a call makes `batch` of these
    layers: int = 6
    vocab: int = 0


@dataclass(frozen=True)
class ModelProblem(Problem[ModelShape]):
    """Hidden states of MiniLM, or the logits of one step of a decoder over a cache."""

    scratch: str = ""  # folder for the files that the bench writes

    shape_type = ModelShape

    @property
    def name(self) -> str:
        return self.shape.name + (f", {self.variant}" if self.variant != "plain" else "")

    @property
    def limit(self) -> str:
        return "int8" if self.variant == INT8_BFLOAT16 else super().limit

    def folder(self) -> Path:
        """Where config.json and model.safetensors are; they are written if they do not exist."""
        if self.shape.kind == "minilm":
            return files.minilm(Path(self.scratch))
        return files.llama(Path(self.scratch), self.shape.layers, self.shape.vocab)

    def config(self) -> dict[str, Any]:
        return files.read_config(self.folder())

    def ids(self) -> Array:
        """Token ids, (batch, length): random ones, but of MiniLM a text where there is one."""
        if self.shape.kind == "minilm":
            found = text.windows(self.folder(), self.shape.batch, self.shape.length)
            if found is not None:
                return found
        return self.rng(0).integers(0, self.config()["vocab_size"], (self.shape.batch, self.shape.length))

    def reference(self) -> tuple[Array, Array]:
        """The last sequence's hidden states, or the logits."""
        want = _answer(self.folder(), tuple(self.ids()[-1].tolist()))
        total = self.shape.batch * len(want)
        return np.arange(total - len(want), total), want

    def quality(self, got: Array, want: Array) -> dict[str, float]:
        """Of hidden states the mean cosine of a token's vector and that in float64."""
        if self.shape.kind != "minilm":
            return {}
        lengths = np.linalg.norm(got, axis=1) * np.linalg.norm(want, axis=1)
        return {"cosine": float(((got * want).sum(axis=1) / lengths).mean())}

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype] if self.variant == "plain" else ROUNDED_TOLERANCE

    @property
    def weights(self) -> int:
        """How many weights the linear maps have that a token passes, a decoder's output layer included."""
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
        """Operations of all matrix products; of a decoder's step the bytes of its weights."""
        if self.shape.kind == "llama":
            return float(self.weights * WEIGHT_BYTES[self.dtype])
        tokens, config = self.shape.batch * self.shape.length, self.config()
        scores: float = 4.0 * self.shape.length * config["hidden_size"] * config["num_hidden_layers"]
        return tokens * (2.0 * self.weights + scores)


@cache
def _answer(folder: Path, ids: tuple[int, ...]) -> Array:
    """(length, hidden) or (1, vocab) of one sequence; weights of every type are compared with the same."""
    config, tensors, row = files.read_config(folder), files.Tensors(folder), np.array([ids])
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
SMALL_DECODER = llama(1, 8000)  # 77 million weights, which is still more than caches hold


def plan(request: Request) -> list[Section]:
    """Weights in every type or in `dtype`; unless `full`, fewer texts and a small decoder."""
    sections: list[Section] = []

    def section(title: str, shapes: Any, dtype: str) -> None:
        rounded = title == hidden and dtype == "int8"
        variants = (INT8_INPUTS, INT8_BFLOAT16) if rounded else ("plain",)
        made = request.section(ModelProblem, title, shapes, dtype, variants)
        problems = [replace(problem, scratch=str(request.folder)) for problem in made.problems]
        sections.append(made._replace(problems=problems))

    dtypes = DTYPES if request.dtype is None else (request.dtype,)
    hidden = "hidden states" if files.has_minilm() else "hidden states (random)"
    if not request.full:  # reading, packing and checking a large decoder takes longest
        section(hidden, ENCODERS[:2], dtypes[0])
        for dtype in dict.fromkeys((dtypes[0], dtypes[-1])):
            section("one step", [SMALL_DECODER], dtype)
        return sections
    for dtype in dtypes:
        section(hidden, ENCODERS, dtype)
        section("one step", [DECODER], dtype)
    return sections
