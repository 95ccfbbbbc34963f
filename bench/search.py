"""The suite "search": the ten nearest of a million vectors, exactly.

Peers hold the vectors as they like, in an index that is made before the clock starts. Scores are products of
vectors of length 1, of bytes, or the bits that differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from bench.suite import Request, Suite
from fastattn import models
from fastattn._bench.cases import Array
from fastattn._bench.harness import Engine, Problem, Sections, Unsupported, Way, own_engines

VECTORS, FEATURES, TOP = 1_000_000, 384, 10
FEW = 4  # queries, for which reading the vectors takes longer than the products
BITS = "bits"
DTYPES = ("float32", "int8", BITS)


class SearchShape(NamedTuple):
    """Numbers of queries and vectors."""

    queries: int
    vectors: int = VECTORS

    @property
    def name(self) -> str:
        return f"{self.queries} in {self.vectors:,}"


@dataclass(frozen=True)
class SearchProblem(Problem):
    """The best scores of each query; of bits, how many differ."""

    @property
    def tolerance(self) -> float:
        return 1e-5 if self.dtype == "float32" else 0.5

    @property
    def unit(self) -> str:
        return "bytes" if self.dtype == BITS or self.shape.queries <= FEW else "flops"

    @property
    def limit(self) -> str:
        return "int8" if self.dtype == "int8" and self.unit == "flops" else "float32"

    def vectors(self, stream: int, count: int) -> Array:
        """Rows of length 1; their numbers times 400 in bytes; or their signs."""
        x = self.rng(stream).standard_normal((count, FEATURES), np.float32)
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        if self.dtype == BITS:
            return np.packbits(x > 0, axis=1)
        return x if self.dtype == "float32" else np.rint(400 * x).clip(-127, 127).astype(np.int8)

    def corpus(self) -> Array:
        return self.vectors(0, self.shape.vectors)

    def queries(self) -> Array:
        return self.vectors(1, self.shape.queries)

    def reference(self) -> tuple[Array, Array]:
        """The first query."""
        query, corpus = self.queries()[0], self.corpus()
        if self.dtype == BITS:
            differ = np.bitwise_count(query ^ corpus).sum(axis=1, dtype=np.int64)
            return np.array([0]), np.sort(differ)[None, :TOP].astype(np.float64)
        step = 1 << 16
        parts = [corpus[i : i + step].astype(np.float64) @ query for i in range(0, len(corpus), step)]
        return np.array([0]), -np.sort(-np.concatenate(parts))[None, :TOP]

    @property
    def work(self) -> float:
        """Bytes of the vectors, of bits for each query; or the operations of all products."""
        elements = float(self.shape.vectors) * FEATURES
        if self.dtype == BITS:
            return float(self.shape.queries) * elements / 8
        return (
            2 * self.shape.queries * elements
            if self.unit == "flops"
            else elements * np.dtype(self.dtype).itemsize
        )


def plan(request: Request) -> Sections:
    """A query, some, and many; unless `full`, fewer."""
    dtypes = (request.dtype,) if request.dtype else DTYPES
    counts = (1, 16, 100, 1000) if request.full else (1, 16)
    shapes = [SearchShape(count) for count in counts]
    sections: Sections = {}
    for dtype in dtypes:
        sections |= request.section(SearchProblem, f"{TOP} nearest of {FEATURES} features", shapes, dtype)
    return sections


def ours(problem: SearchProblem, backend: str) -> Way:
    """`models.nearest`, of vectors as they are."""
    queries, corpus = problem.queries(), problem.corpus()
    similarity = "hamming" if problem.dtype == BITS else "dot"
    return Way(lambda: models.nearest(queries, corpus, TOP, similarity=similarity).scores)


def _indexed(make: Callable[[], Any], search: Callable[[Any], Array]) -> Way:
    """A search of an index, which is made before."""
    made = cache(make)
    return Way(lambda: search(made()), load=lambda: made() and None)


def faiss(problem: SearchProblem, threads: int) -> Way:
    """Flat indices; of bytes that which takes them as they are."""
    library = import_module("faiss")
    library.omp_set_num_threads(threads)
    queries = problem.queries()
    kinds: dict[str, Callable[[], Any]] = {
        "float32": partial(library.IndexFlatIP, FEATURES),
        "int8": lambda: library.IndexScalarQuantizer(
            FEATURES, library.ScalarQuantizer.QT_8bit_direct_signed, library.METRIC_INNER_PRODUCT
        ),
        BITS: partial(library.IndexBinaryFlat, FEATURES),
    }

    def make() -> Any:
        index, step = kinds[problem.dtype](), 1 << 16
        corpus = problem.corpus()
        for i in range(0, len(corpus), step):
            index.add(corpus[i : i + step].astype(np.float32 if problem.dtype == "int8" else corpus.dtype))
        return index

    asked = queries.astype(np.float32) if problem.dtype == "int8" else queries
    return _indexed(make, lambda index: index.search(asked, TOP)[0])


def torch(problem: SearchProblem, threads: int) -> Way:
    """Products and topk of 500,000 vectors and 100 queries at a time, as sentence-transformers searches."""
    if problem.dtype != "float32":
        raise Unsupported("has no product of bytes or bits whose sums are wider")
    library: Any = import_module("torch")
    library.set_num_threads(threads)
    queries, corpus = library.from_numpy(problem.queries()), library.from_numpy(problem.corpus())

    def call() -> Array:
        found = []
        for rows in queries.split(100):
            best = library.cat([(rows @ part.T).topk(TOP)[0] for part in corpus.split(500_000)], dim=1)
            found.append(best.topk(TOP)[0])
        out: Array = library.cat(found).numpy()
        return out

    return Way(call)


def numpy(problem: SearchProblem, threads: int) -> Way:
    """All scores at once."""
    queries, corpus = problem.queries(), problem.corpus()
    if problem.dtype != "float32":
        raise Unsupported("has no fast product of bytes or bits")

    def call() -> Array:
        best: Array = -np.sort(-np.partition(queries @ corpus.T, -TOP, axis=1)[:, -TOP:], axis=1)
        return best

    return Way(call)


ENGINES = {
    **own_engines(ours),
    "faiss": Engine(("faiss",), faiss, "a flat index (faiss-cpu)"),
    "torch": Engine(("torch",), torch, "products and topk, as sentence-transformers searches"),
    "numpy": Engine(("numpy",), numpy, "one product of all, and partition"),
}


SUITE = Suite(ENGINES, plan, DTYPES, "queries in vectors", "about ten minutes")
