"""Results of a CPU in bench/results/: ``python -m bench record`` measures the rows of docs/performance.md.

A file has a line for each row: suite, row, date, commit, versions of the peers, milliseconds of fastattn (the
median of its rounds), the time of each peer over that, and the share of what the CPU can compute or read.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import fastattn
from bench import SUITES
from bench.search import DTYPES as SEARCHED
from bench.suite import Request, run
from fastattn._bench import report
from fastattn._bench.harness import Effort, Json, Sections, cpu_name
from fastattn._regular_files import replaced

RESULTS = Path(__file__).with_name("results")
SECONDS = 100  # of a suite; to start the peers, make their files and lay out problems comes on top


class Part(NamedTuple):
    """Rows of one of `SUITES`, by the title above them."""

    suite: str
    dtype: str
    rows: dict[str, tuple[str, ...]]


def _structures(*names: str) -> dict[str, tuple[str, ...]]:
    return {f"structural mask, {name}": ("1,4,4096,4096,64",) for name in names}


_INT8, _REST = ", int8 inputs", ", int8 inputs, rest in bfloat16"
_MINILM = "MiniLM 1,16", "MiniLM 1,128", "MiniLM 32,128"
_ARRIVAL, _ONE = "512 texts in order of arrival", "one short text"
# The tables of docs/performance.md, and what each is measured by.
PAGE: dict[str, tuple[Part, ...]] = {
    "attention": (
        Part("attention", "float32", {
            "no mask": ("1,12,128,128,64", "8,12,128,128,32", "1,12,512,512,64", "1,8,2048,2048,64",
                        "8,12,1,1024,64"),
            "causal": ("1,12,512,512,64", "1,8,2048,2048,128"),
            "padding mask": ("1,8,2048,2048,64",),
            "grouped heads": ("1,32:8,2048,2048,128", "1,32:8,1,4096,128"),
            "tiny call": ("1,1,8,8,16",),
        }),
        Part("attention", "bfloat16", {
            "no mask": ("1,12,512,512,64", "1,8,2048,2048,64"), "causal": ("1,8,2048,2048,128",),
        }),
        Part("flash", "float32", {
            "flash_attn_func": ("1,8,512,512,64",),
            "block mask": ("flex_attention documents 1,8,2048,2048,64",),
        }),
        Part("flash", "bfloat16", {"flash_attn_func causal": ("1,8,512,512,64",)}),
    ),
    "layers": (
        Part("layers", "float32", {
            "linear": ("128,384,1536", "1024,768,3072",), "one row": ("1,4096,11008",),
            "layer": ("encoder 32,128,384", "encoder 1,16,384"), "one pass": ("layer_norm 4096,768",),
        }),
        Part("layers", "bfloat16", {"linear": ("128,384,1536", "1024,768,3072")}),
        Part("layers", "int8", {"linear": (f"128,384,1536{_INT8}", f"1024,768,3072{_INT8}")}),
    ),
    "MiniLM": (
        Part("models", "float32", {"hidden states": _MINILM}),
        Part("models", "bfloat16", {"hidden states": _MINILM}),
        Part("models", "int8", {"hidden states": tuple(f"{name}{_INT8}" for name in _MINILM)}),
    ),
    "texts to vectors": (
        Part("embeddings", "float32", {"MiniLM": (_ARRIVAL, _ONE)}),
        Part("embeddings", "bfloat16", {"MiniLM": (_ARRIVAL,)}),
        Part("embeddings", "int8", {"MiniLM": (_ARRIVAL + _INT8, _ARRIVAL + _REST, _ONE + _INT8)}),
    ),
    "training": (
        Part("training", "float32", {
            "no mask": ("backward plain 1,12,128,128,64", "backward plain 1,12,512,512,64",
                        "both plain 1,8,2048,2048,64"),
            "causal": ("backward causal 1,8,2048,2048,64",),
            "steps": ("step characters 16,6,256,256,64", "step GPT-2 4,12,256,256,64"),
        }),
        Part("training", "bfloat16", {"no mask": ("backward plain 1,8,2048,2048,64",)}),
    ),
    "masks": (
        Part("attention", "float32", _structures(
            "sliding_window", "packed_documents", "block_sparse", "bigbird", "dilated")),
    ),
    "others": (
        *(Part("search", dtype, {"10 nearest of 384 features": ("1 in 1,000,000",)}) for dtype in SEARCHED),
        *(Part("models", dtype, {"one step": ("Llama, 16 layers",)}) for dtype in ("float32", "bfloat16")),
    ),
}  # fmt: skip
USUAL = tuple(PAGE)[:-1]  # measured if no suite is named: the Llama takes 5 GB of memory an engine


def label(section: str, name: str) -> str:
    """The name of a row in a file: "causal 1,8,2048,2048,64, float32"; only names of numbers need a title."""
    title, _, dtype = section.rpartition(", ")
    return f"{name}, {dtype}" if name[0].isalpha() else f"{title} {name}, {dtype}"


def labels(part: Part) -> Iterator[str]:
    """The names of a part's rows."""
    for title, names in part.rows.items():
        yield from (label(f"{title}, {part.dtype}", name) for name in names)


def chosen(parts: Sequence[Part], request: Request) -> Sections:
    """The problems of parts. Titles may say more in brackets, as that weights are random."""
    found: Sections = {}
    for part in parts:
        for title, problems in SUITES[part.suite].plan(request._replace(dtype=part.dtype)).items():
            names = part.rows.get(title.removesuffix(f", {part.dtype}").partition(" (")[0], ())
            found[title.replace(" (random)", "")] = [x for x in problems if x.name in names]
    return {title: problems for title, problems in found.items() if problems}


def row_of(suite: str, measured: Json, row: Json, versions: dict[str, str], when: Json) -> Json | None:
    """A line of a file; None where fastattn itself has no time."""
    if (found := report.figures(measured, row)) is None:
        return None
    ratios = {name: round(ratio, 3) for name, ratio in found.ratios.items()}
    line = {"suite": suite, "row": label(row["section"], row["shape"]["name"]), **when}
    line |= {"versions": {name: versions[name] for name in ratios if name != "fallback"}}
    line |= {"ms": float(f"{1e3 * found.seconds:.4g}"), "ratios": ratios}
    return line if found.of_limit is None else line | {"limit": round(found.of_limit, 3)}


def versions_of(engines: dict[str, str]) -> dict[str, str]:
    """The version of each column, from the versions of the engines."""
    return {
        name: engines[each]
        for name, several in report.RUNTIMES.items()
        for each in reversed(several)
        if each in engines
    }


def put(path: Path, about: Json, new: Iterable[Json]) -> None:
    """Write rows to a file: they replace rows of the same name and suite; all others stay."""
    data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {**about, "rows": []}
    if data["threads"] != about["threads"]:
        raise ValueError(f"{path.name} is of {data['threads']} threads, not {about['threads']}")
    rows = {(row["suite"], row["row"]): row for row in (*data["rows"], *new)}
    head = json.dumps({name: value for name, value in data.items() if name != "rows"})[:-1]
    lines = ",\n".join(json.dumps(row) for row in rows.values())
    with replaced(path) as file:
        file.write_text(f'{head}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")


# Code names of CPUs by family and model; of a model in several ranges the last counts.
_NAMES = (
    (23, range(0x100), "amd-zen2"), (25, range(0x100), "amd-zen3"), (25, range(0x10, 0x20), "amd-zen4"),
    (25, range(0x60, 0xB0), "amd-zen4"), (26, range(0x100), "amd-zen5"), (6, [0x55], "intel-cascade-lake"),
    (6, [0x6A, 0x6C], "intel-ice-lake"), (6, [0x8F], "intel-sapphire-rapids"),
    (6, [0xCF], "intel-emerald-rapids"), (6, [0xAD, 0xAE], "intel-granite-rapids"),
)  # fmt: skip


def short_name() -> str:
    """The CPU's code name, as "amd-zen4", or where that is unknown its maker's name for it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        family, model = int(facts["cpu family"]), int(facts["model"])
        return [name for of, models, name in _NAMES if of == family and model in models][-1]
    except (OSError, KeyError, IndexError, ValueError):
        return "-".join("".join(c if c.isalnum() else " " for c in cpu_name().lower()).split())


def commit() -> str:
    """The checkout's commit, with a "+" where the package was changed since."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=RESULTS.parent, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "-s", "../fastattn", "../src")
        return git("rev-parse", "--short=8", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return ""


def measure(
    suite: str, parts: Sequence[Part], path: Path, seconds: float, peers: Iterable[str], threads: int
) -> None:
    """Measure the rows of parts of one of `SUITES` in about so long, and write each when it is there."""
    about, whole = {"cpu": cpu_name(), "threads": threads}, SUITES[parts[0].suite]
    engines = {
        name: each
        for name, each in whole.engines.items()
        if not each.missing() and (not peers or each.packages[0] == "fastattn" or name in peers)
    }
    versions = versions_of({name: each.version() for name, each in engines.items()})
    when = {"date": f"{datetime.now(timezone.utc):%Y-%m-%d}", "commit": commit()}
    rows = sum(len([*labels(part)]) for part in parts)
    effort = Effort(seconds=0.05, rounds=15, most=seconds / rows / len(engines), total=float("inf"))

    def keep(row: Json, limits: dict[str, Json]) -> None:
        line = row_of(suite, {"engines": engines, "full": False, "limits": limits}, row, versions, when)
        print(f"  {label(row['section'], row['shape']['name'])}: {said(line)}", flush=True)
        if line:
            put(path, about, [line])

    with TemporaryDirectory() as folder:
        request = Request(folder=Path(folder))
        small = whole._replace(plan=partial(chosen, parts))
        result = run(suite, small, request, only="", peers=peers, effort=effort, threads=threads, keep=keep)
    for line in (*report.reasons(result, "failed"), report.said_if_busy(result)):
        print(f"  {line}" * bool(line), flush=True)


def said(line: Json | None) -> str:
    """A row for the terminal."""
    if line is None:
        return "failed"
    return f"{line['ms']} ms, {', '.join(f'{name} {x:.2f}' for name, x in line['ratios'].items())}"


def main(words: list[str]) -> None:
    """Run the command line ``python -m bench record``."""
    parser = argparse.ArgumentParser(
        prog="python -m bench record",
        description="Measure the rows of docs/performance.md on this CPU, and write them to bench/results/.",
    )
    option = parser.add_argument
    option("suites", nargs="*", metavar="SUITE", help=f"{', '.join(PAGE)} ({', '.join(USUAL)})")
    option("--seconds", type=int, default=SECONDS, metavar="N", help=f"of each suite ({SECONDS})")
    option("--peers", nargs="+", default=(), metavar="NAME", help="other engines (all that are installed)")
    option("--threads", type=int, default=fastattn.get_num_threads(), metavar="N", help="of every engine")
    option("--to", type=Path, metavar="FILE", help="the file (that of this CPU in bench/results/)")
    options = parser.parse_args(words)
    path = options.to or RESULTS / f"{short_name()}.json"
    for name in options.suites:
        if name not in PAGE:
            parser.error(f"no suite {name!r}; there are {', '.join(PAGE)}")
    for name in options.suites or USUAL:
        for _, several in groupby(PAGE[name], lambda part: part.suite):
            parts = [*several]
            print(f"{name}: {sum(len([*labels(part)]) for part in parts)} rows to {path}", flush=True)
            seconds = options.seconds * len(parts) / len(PAGE[name])
            measure(name, parts, path, seconds, options.peers, options.threads)
