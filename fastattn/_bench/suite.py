"""What a suite of the bench is made of: problems, engines that compute them, sections of its table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

import fastattn
from fastattn._bench.cases import Array, Rng, Shape, as_dtype, make_inputs
from fastattn._bench.ways import Way, enter_for_good
from fastattn._engine import settings

# The largest error of a right answer: several times what any engine shows on standard normal inputs.
TOLERANCE = {"float64": 1e-10, "float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1, "int8": 1e-1, "int4": 1e-1}
INT8_INPUTS = "int8 inputs"  # the variant of products that may round their inputs
COMPILED = "fastattn._engine.core._core"  # the package that the engine of the kernels needs
# Bytes of one weight, by the dtype in which layers and models keep their weights.
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "int4": 4.5 / 8}


class AnyShape(Protocol):
    """A NamedTuple of the sizes of a problem, and what the table calls them."""

    @property
    def name(self) -> str: ...
    def _asdict(self) -> dict[str, Any]: ...


ShapeT = TypeVar("ShapeT", bound=AnyShape)


@dataclass(frozen=True)
class Problem(ABC, Generic[ShapeT]):
    """One row of the table. Every process makes the same arrays from these fields, which JSON can carry."""

    shape: ShapeT
    variant: str
    dtype: str  # of the inputs; of the weights in layers and models, whose inputs are float32
    seed: int

    shape_type: ClassVar[type[Any]]

    def to_json(self) -> list[Any]:
        return list(astuple(self))

    @classmethod
    def from_json(cls, fields: list[Any]) -> Any:
        shape, *others = fields
        return cls(cls.shape_type(*shape), *others)

    def rng(self, stream: int) -> Rng:
        """A generator of random numbers; each `stream` gives other numbers."""
        return np.random.default_rng([self.seed, stream])

    @property
    def name(self) -> str:
        """What the table calls this row."""
        return self.shape.name

    @property
    def tolerance(self) -> float:
        """The largest error of a right answer."""
        return TOLERANCE[self.dtype]

    @property
    def limit(self) -> str:
        """The type in which the products are computed: the limit of its multiply-adds holds."""
        if self.variant == INT8_INPUTS:
            return "int8"
        return "float32" if self.dtype in ("int8", "int4") else self.dtype

    def quality(self, got: Array, want: Array) -> dict[str, float]:
        """What else to say of some rows of a result, beside its largest error."""
        return {}

    @property
    @abstractmethod
    def unit(self) -> str:
        """The unit of `work`: "flops", or "bytes" where memory is the limit."""

    @property
    @abstractmethod
    def work(self) -> float:
        """How many floating-point operations the problem needs, or how many bytes it reads."""

    @abstractmethod
    def reference(self) -> tuple[Array, Array]:
        """Indices of some rows of the result, and these rows in float64; leading axes count as one."""


class CallProblem(Problem[Shape]):
    """A call of a function of q, k and v: q is (B, H, Lq, D), k is (B, Hkv, Lk, D), v is (B, Hkv, Lk, Dv)."""

    shape_type = Shape

    def arrays(self) -> tuple[Array, Array, Array]:
        """Q, k and v of standard normal numbers."""
        return make_inputs(self.shape, self.dtype, self.rng(0))

    @property
    def scores_bytes(self) -> int:
        """What an engine needs that stores all scores at once, 16-bit types being widened."""
        return self.shape.scores * max(4, as_dtype(self.dtype).itemsize)

    @property
    def unit(self) -> str:
        return "bytes" if self.shape.decode else "flops"


class Section(NamedTuple):
    """Rows of the table that belong together."""

    title: str
    problems: list[Any]


class Request(NamedTuple):
    """What the command line asks of a suite."""

    dtype: str | None = None  # None: those that the suite chooses
    full: bool = False  # all rows, not only those of the first minute
    seed: int = 0
    folder: Path = Path()  # for files that problems need

    def section(
        self,
        kind: Callable[..., Problem[Any]],
        title: str,
        shapes: Iterable[Any],
        dtype: str,
        variants: Iterable[str] = ("plain",),
    ) -> Section:
        """A problem of class `kind` for every shape and variant."""
        chosen = tuple(variants)
        problems = [kind(shape, variant, dtype, self.seed) for shape in shapes for variant in chosen]
        return Section(f"{title}, {dtype}", problems)


class Engine(NamedTuple):
    """A column of the table; `packages` must be importable, the first of them gives the version.

    `ways(problem, threads)` returns one or several ways to compute a problem, each laid out and ready: the
    worker tries them all and times the fastest.
    """

    packages: tuple[str, ...]
    ways: Callable[[Any, int], Way | dict[str, Way]]
    what: str

    def installed(self) -> bool:
        if self.packages[0] == COMPILED and not fastattn.available_isas():
            return False
        return not self.missing()

    def missing(self) -> list[str]:
        """Those of its packages that are not installed."""
        return [package for package in self.packages if util.find_spec(package) is None]

    def version(self) -> str:
        own = self.packages[0].startswith("fastattn")
        return fastattn.__version__ if own else metadata.version(self.packages[0])

    def named_ways(self, problem: Any, threads: int) -> dict[str, Way]:
        ways = self.ways(problem, threads)
        return {"": ways} if isinstance(ways, Way) else ways


def own_engines(way: Callable[[Any, str], Way], *packages: str) -> dict[str, Engine]:
    """fastattn and its fallback: `way(problem, backend)` is called where that backend is in force."""

    def ways(backend: str) -> Callable[[Any, int], Way]:
        def prepare(problem: Any, threads: int) -> Way:
            enter_for_good(settings.forced(backend=backend, num_threads=threads))
            return way(problem, backend)

        return prepare

    return {
        "fastattn": Engine((COMPILED, *packages), ways("compiled"), "the compiled kernels"),
        "fallback": Engine(("fastattn", *packages), ways("numpy"), "fastattn without its extension"),
    }


class Suite(NamedTuple):
    """What ``python -m fastattn bench --suite`` runs."""

    engines: dict[str, Engine]
    plan: Callable[[Request], list[Section]]  # which problems are measured
    problem: type[Problem[Any]]
    dtypes: tuple[str, ...]
    shapes: str  # what the numbers in a shape's name are
    minutes: str  # how long the whole suite takes
    memory: bool = False  # whether its memory is compared, too: then a process has one problem and one way


def has_bfloat16() -> bool:
    """Whether NumPy knows bfloat16, which the package ml_dtypes gives it."""
    return util.find_spec("ml_dtypes") is not None
