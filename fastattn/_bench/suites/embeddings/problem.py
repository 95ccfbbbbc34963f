"""The problems of the suite "embeddings", and which of them are measured."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastattn._bench import plain
from fastattn._bench.cases import Array
from fastattn._bench.suite import INT8_INPUTS, Problem, Request, Section
from fastattn._bench.suites.embeddings import texts
from fastattn._bench.suites.models import files
from fastattn._bench.suites.models.problem import DTYPES, INT8_BFLOAT16

# The largest error of a number in a vector of length 1, whose numbers are about 0.05; cosines say more.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "int8": 3e-1}
ARRIVAL, SORTED, ONE = "in order of arrival", "sorted by length", "one short text"
COUNT = 512


class TextShape(NamedTuple):
    """How many texts, and in which order."""

    name: str
    order: str
    batch: int
    makes: str = "texts"  # a call makes `batch` vectors of them


@dataclass(frozen=True)
class TextProblem(Problem[TextShape]):
    """The vectors of texts by MiniLM, of length 1."""

    scratch: str = ""  # folder for the files that the bench writes

    shape_type = TextShape

    @property
    def name(self) -> str:
        return self.shape.name + (f", {self.variant}" if self.variant != "plain" else "")

    @property
    def limit(self) -> str:
        return "int8" if self.variant == INT8_BFLOAT16 else super().limit

    @property
    def rest(self) -> str:
        """What is computed in, but for linear maps in int8."""
        return {INT8_INPUTS: "float32", INT8_BFLOAT16: "bfloat16"}.get(self.variant, self.dtype)

    def folder(self) -> Path:
        """The folder of MiniLM; it is written if it does not exist."""
        return texts.folder(Path(self.scratch))

    def texts(self) -> list[str]:
        """The texts in their order."""
        if self.shape.order == ONE:
            return texts.short(self.rng(0))
        made = texts.draw(self.rng(0), self.shape.batch)
        return sorted(made, key=len) if self.shape.order == SORTED else made

    def others(self, count: int) -> list[str]:
        """Other texts, from which ranges are found that a quantisation needs before it runs."""
        return texts.draw(self.rng(1), count)

    def reference(self) -> tuple[Array, Array]:
        known = vectors(self.folder(), tuple(sorted(self.texts())), np.float64)
        want = np.stack([known[text] for text in self.texts()])
        return np.arange(len(want)), want

    def quality(self, got: Array, want: Array) -> dict[str, float]:
        """The mean cosine of a text's vector and that in float64."""
        lengths = np.linalg.norm(got, axis=1) * np.linalg.norm(want, axis=1)
        return {"cosine": float(((got * want).sum(axis=1) / lengths).mean())}

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    @property
    def unit(self) -> str:
        return "flops"

    @property
    def work(self) -> float:
        """Operations of all matrix products, without padding."""
        config = files.read_config(self.folder())
        hidden, inner, layers = (
            config[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
        )
        lengths = np.array([len(ids) for ids in texts.encode(self.folder(), self.texts())], float)
        maps = 2.0 * (4 * hidden * hidden + 2 * hidden * inner)
        return float(layers * (maps * lengths.sum() + 4 * hidden * np.square(lengths).sum()))


@cache
def vectors(folder: Path, chosen: tuple[str, ...], dtype: Any) -> dict[str, Array]:
    """The vector of each text by definition, those of one length together, so that nothing is padded."""
    config = files.read_config(folder)
    weights = {name: array.astype(dtype) for name, array in files.Tensors(folder).items()}
    lengths: defaultdict[int, dict[str, list[int]]] = defaultdict(dict)
    for text, ids in zip(chosen, texts.encode(folder, list(chosen)), strict=True):
        lengths[len(ids)][text] = ids
    made: dict[str, Array] = {}
    for group in lengths.values():
        rows, mask = texts.padded(list(group.values()))
        made |= zip(group, texts.pooled(plain.bert(rows, weights, config), mask), strict=True)
    return made


def several(order: str, count: int = COUNT) -> TextShape:
    return TextShape(f"{count} texts {order}", order, count)


SHAPES = (several(ARRIVAL), several(SORTED), TextShape(ONE, ONE, 1))


def plan(request: Request) -> list[Section]:
    """Every precision; unless `full`, two of them."""
    dtypes = (request.dtype,) if request.dtype else DTYPES if request.full else DTYPES[::2]
    title = "MiniLM" if files.has_minilm() else "MiniLM (random)"
    sections = []
    for dtype in dtypes:
        variants = (INT8_INPUTS, INT8_BFLOAT16) if dtype == "int8" else ("plain",)
        shapes = SHAPES if request.full else (SHAPES[0], SHAPES[-1])
        made = request.section(TextProblem, title, shapes, dtype, variants)
        problems = [replace(problem, scratch=str(request.folder)) for problem in made.problems]
        sections.append(made._replace(problems=problems))
    return sections
