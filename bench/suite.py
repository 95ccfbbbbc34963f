"""The base of all suites, beside the package's harness: shapes, plans, and more lines of the report."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator
from importlib import util
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

from fastattn._args.errors import naming
from fastattn._bench import harness, report
from fastattn._bench.attention import shape_of
from fastattn._bench.cases import Array, Shape, as_dtype
from fastattn._bench.harness import Engine, Json, Problem, Sections, Unsupported

INT8_INPUTS = "int8 inputs"  # the variant of products that may round their inputs
# Bytes of one weight, by the dtype in which layers and models keep their weights.
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
FULL = harness.Effort(seconds=0.15, rounds=5, most=8.0, total=float("inf"))
# The least ratio of the medians of fresh and fixed shapes; below it, kernels were tuned to the fixed ones.
FRESH_SHARE = 0.9

SHAPES = (
    shape_of(1, 12, 128, 128, 64),
    shape_of(8, 12, 128, 128, 32),
    shape_of(1, 12, 512, 512, 64),
    shape_of(1, 8, 2048, 2048, 64),
    shape_of(1, 8, 2048, 2048, 128),
    shape_of(1, 4, 8192, 8192, 64),
    shape_of(1, 32, 1, 4096, 128),
    shape_of(8, 12, 1, 1024, 64),
)
PREFILL = [shape for shape in SHAPES if shape.len_q > 1]


def grouped(shape: Shape) -> Shape:
    """A shape like this with 32 query heads in 8 groups."""
    return shape_of(shape.batch, 32, *shape[4:7], heads_kv=8)


def flops(shape: Shape) -> float:
    """Floating-point operations of the two matrix products, without any mask."""
    return 2.0 * scores(shape) * (shape.head_dim + shape.dim_v)


def scores(shape: Shape) -> int:
    """Number of pairs of a query and a key, over all heads."""
    return shape.batch * shape.heads_q * shape.len_q * shape.len_k


def refuse_dense(shape: Shape, dtype: str, copies: float = 2) -> None:
    """Refuse a problem to an engine of attention that holds several copies of all scores at once."""
    need = copies * scores(shape) * max(4, as_dtype(dtype).itemsize)
    refuse_above_memory(need, "holds every score at once")


def refuse_above_memory(need: float, why: str) -> None:
    """Refuse a problem for which an engine needs more than half of the free memory, where that is known."""
    if need > _status("/proc/meminfo", "MemAvailable", float("inf")) / 2:
        raise Unsupported(f"{why}: {need / 1e9:.0f} GB")


def peak_memory() -> dict[str, float]:
    """The most bytes this process had in memory; what getrusage says does not begin anew with a program."""
    peak = _status("/proc/self/status", "VmHWM", 0.0)
    return {"peak": peak} if peak else {}


def mean_cosine(got: Array, want: Array) -> dict[str, float]:
    """The mean cosine of rows."""
    lengths = np.linalg.norm(got, axis=1) * np.linalg.norm(want, axis=1)
    return {"cosine": float(((got * want).sum(axis=1) / lengths).mean())}


def _status(file: str, name: str, default: float) -> float:
    try:
        lines = Path(file).read_text().splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(name))
    except (OSError, StopIteration):
        return default


class WeightProblem(Problem):
    """A problem of layers or models, whose weights are of `dtype`."""

    @property
    def name(self) -> Any:
        """The shape's name, and what is rounded."""
        return self.shape.name + (f", {self.variant}" if self.variant != "plain" else "")

    @property
    def limit(self) -> str:
        if self.variant.startswith(INT8_INPUTS):
            return "int8"
        return "float32" if self.dtype == "int8" else self.dtype


class Request(NamedTuple):
    """The rows that the command line asks for."""

    dtype: str | None = None  # None: those that the suite chooses
    full: bool = True  # all rows, not only those of the first minute
    seed: int = 0
    folder: Path = Path()  # for files that problems need

    def section(
        self,
        kind: Callable[..., Problem],
        title: str,
        shapes: Iterable[Any],
        dtype: str,
        variants: Iterable[str] = ("plain",),
    ) -> Sections:
        """A problem of class `kind` for every shape and variant."""
        variants = tuple(variants)
        problems = [kind(shape, variant, dtype, self.seed) for shape in shapes for variant in variants]
        return {f"{title}, {dtype}": problems}


class Suite(NamedTuple):
    """A subject of ``python -m bench``."""

    engines: dict[str, Engine]
    plan: Callable[[Request], Sections]  # which problems are measured
    dtypes: tuple[str, ...]
    shapes: str  # what the numbers in a shape's name are
    minutes: str  # how long the whole suite takes


class NoRows(Exception):
    """No row has the name that was asked for; the message lists all names."""


def chosen(sections: Sections, only: str) -> Sections:
    """The sections, reduced to the rows whose title or name contains `only`."""
    kept = {title: [x for x in rows if only in f"{title} {x.name}"] for title, rows in sections.items()}
    if any(kept.values()):
        return {title: rows for title, rows in kept.items() if rows}
    names = "\n".join(f"  {title}: {'; '.join(x.name for x in rows)}" for title, rows in sections.items())
    raise NoRows(f"--only {only} is in no row; there are\n{names}")


def run(
    title: str,
    suite: Suite,
    request: Request,
    *,
    only: str,
    peers: Iterable[str],
    effort: harness.Effort | None,
    threads: int,
    keep: harness.Keep = lambda row, limits: None,
) -> Json:
    """Measure a suite: all of it, or as much as `effort` allows; `keep` gets each row."""
    engines = {
        name: engine
        for name, engine in suite.engines.items()
        if engine.packages[0] == "fastattn" or not peers or name in peers
    }
    more = {
        "suite": title,
        "full": request.full and effort is None,
        "seed": request.seed,
        "shapes": suite.shapes,
    }
    with naming(request.folder):
        return harness.run(engines, chosen(suite.plan(request), only), effort or FULL, threads, keep, **more)


def text(result: Json) -> str:
    """The report of the package, and what else a suite has to say."""
    return report.text(result, _speeds, _costs, _errors, _unsupported, _fresh)


def _speeds(result: Json) -> Iterator[str]:
    """Sentences or tokens a second of every engine, in the suite whose calls make them."""
    for row in result["rows"]:
        if "makes" in (shape := row["shape"]):
            speeds = [
                f"{name} {shape['batch'] / answer['seconds']:.1f}"
                for name, answer in row["engines"].items()
                if "seconds" in answer
            ]
            made = f"{shape['name']}, {row['dtype']}, {shape['makes']}/s: {', '.join(speeds)}"
            yield from textwrap.wrap(made, report.WIDTH)


def _costs(result: Json) -> Iterator[str]:
    """The memory of an engine at its peak, and the time of loading, in suites that compare them."""
    for row in result["rows"]:
        costs = [
            f"{name} {answer['peak'] / 1e6:.0f} MB, {report.time_in_words(answer['load'])}"
            for name, answer in row["engines"].items()
            if "peak" in answer
        ]
        if costs:
            made = f"{row['shape']['name']}, {row['dtype']}, most memory and loading: {'; '.join(costs)}"
            yield from textwrap.wrap(made, report.WIDTH)


def _errors(result: Json) -> Iterator[str]:
    """The largest error of each engine, and of hidden states the mean cosine."""
    for dtype in dict.fromkeys(row["dtype"] for row in result["rows"]):
        for key, what, merge, form in (
            ("error", "The largest errors against", max, ".0e"),
            ("cosine", "The mean cosines with", mean, ".5f"),
        ):
            found: dict[str, list[float]] = {}
            for row in result["rows"]:
                for name, answer in row["engines"].items():
                    if row["dtype"] == dtype and key in answer:
                        found.setdefault(name, []).append(answer[key])
            listed = ", ".join(f"{name} {merge(values):{form}}" for name, values in found.items())
            if listed:
                yield from textwrap.wrap(f"{what} float64 in {dtype}: {listed}", report.WIDTH)


def _unsupported(result: Json) -> Iterator[str]:
    """Why engines have no time, in a whole suite only."""
    if result["full"]:
        yield from report.reasons(result, "unsupported")


def _fresh(result: Json) -> Iterator[str]:
    """The medians of the fixed shapes, and of the fresh ones, for which nobody could tune a kernel."""
    for unit, kind in (("flops", "many query rows"), ("bytes", "one query row")):
        rows = [row for row in result["rows"] if row["unit"] == unit and row["variant"] == "plain"]
        fresh = _medians(result, [row for row in rows if row["section"].startswith("fresh")])
        if not fresh:
            continue
        dtype = rows[0]["dtype"]
        fixed = _medians(result, [row for row in rows if row["section"] == f"no mask, {dtype}"])
        for what in fresh.keys() & fixed.keys():
            tuned = fresh[what] < FRESH_SHARE * fixed[what]
            yield (
                f"Median {what}, {kind}: fixed shapes {fixed[what]:.2f}, fresh shapes {fresh[what]:.2f}"
                + ("  TUNED TO A LIST: more than 10% below" * tuned)
            )


def _medians(result: Json, rows: list[Json]) -> dict[str, float]:
    got = [found for found in (report.figures(result, row) for row in rows) if found]
    values = {
        "share of the limit": [x.of_limit for x in got if x.of_limit is not None],
        "ratio to the best peer": [best for x in got if (best := report.best_peer(x.ratios)) is not None],
    }
    return {name: median(found) for name, found in values.items() if found}


def has_bfloat16() -> bool:
    """Tell whether NumPy knows bfloat16, which the package ml_dtypes gives it."""
    return util.find_spec("ml_dtypes") is not None
