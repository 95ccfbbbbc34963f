"""What a suite of the bench is made of: engines, problems, and the sections of its table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import fastattn
from fastattn._bench.cases import Array
from fastattn._bench.ways import Ways

# Largest error of an answer that is right, several times what any engine shows on standard normal inputs.
TOLERANCE = {"float64": 1e-10, "float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1, "int8": 1e-1}


class AnyProblem(Protocol):
    """A NamedTuple of what JSON can carry, of which every process makes the same arrays."""

    def __iter__(self) -> Iterator[Any]: ...
    @property
    def shape(self) -> Any:
        """A NamedTuple with a `name`."""

    @property
    def variant(self) -> str: ...
    @property
    def dtype(self) -> str:
        """Of the inputs or, in layers, of the weights."""

    @property
    def unit(self) -> str:
        """Of `work`: "flops" or, where memory is the limit, "bytes"."""

    @property
    def work(self) -> float: ...
    @property
    def tolerance(self) -> float: ...
    def reference(self) -> tuple[Array, Array]:
        """Some rows of the result (..., n), counted over all its leading axes, and what they hold."""


class Section(NamedTuple):
    """Rows of the table that belong together."""

    title: str
    problems: list[Any]


class Engine(NamedTuple):
    """A column of the table; `packages` must be importable, the first of them gives the version."""

    packages: tuple[str, ...]
    ways: Ways
    what: str

    def installed(self) -> bool:
        if self.packages[0] == "fastattn._engine.core._core" and not fastattn.available_isas():
            return False
        return all(util.find_spec(package) is not None for package in self.packages)

    def version(self) -> str:
        return (
            fastattn.__version__
            if self.packages[0].startswith("fastattn")
            else metadata.version(self.packages[0])
        )


class Suite(NamedTuple):
    """`plan(dtype, quick, seed, folder)` chooses what is measured; files go to the folder."""

    engines: dict[str, Engine]
    plan: Callable[[str | None, bool, int, Path], list[Section]]
    problem: Callable[[list[Any]], Any]  # the inverse of list(problem), after a trip through JSON
    dtypes: tuple[str, ...]
    shapes: str  # what the numbers in a shape's name are
    minutes: str  # how long the whole suite takes


def has_bfloat16() -> bool:
    """Whether NumPy knows the type."""
    return util.find_spec("ml_dtypes") is not None
