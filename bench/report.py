"""docs/performance.md and the picture, made from bench/results/: ``python -m bench report [CPU]``."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.record import PAGE, RESULTS, labels
from fastattn._bench.harness import Json
from fastattn._bench.report import RUNTIMES
from fastattn._regular_files import replaced

DOCS = Path(__file__).parents[1] / "docs"
WORST = 10
SHORTER = {
    ", float32": "",
    "int8 inputs, int8": "int8",
    "int8 inputs, rest in bfloat16, int8": "int8, rest in bfloat16",
    "structural mask, ": "",
    "backward plain": "backward",
    "both plain": "forward and backward",
}
INTRODUCTION = """
The time of the fastest other library divided by the time of fastattn: above 1, fastattn is faster,
**below 1** slower. Peers: {peers}. Engines take turns in separate processes, with {threads} threads on
the same arrays. The header of a column has the day of its rows; a cell of another day has its own.
Empty: not measured on that CPU. `bench/results/` has the commits, all peers, and {total} rows, of which
{shown} are here.

{medians}

![How many times faster fastattn is, attention in float32](bench.png)

Shapes: attention has batch, heads, len_q, len_k, head_dim, with `32:8` for 32 query and 8 key heads;
products have rows, in, out; models have batch, length. Weights, inputs and results are float32 unless a
row has another type. To measure a CPU: `python -m bench record`, then `python -m bench report`, which
writes this page (`bench/README.md` has the peers and the method).
"""


class Cell(NamedTuple):
    """A row of one CPU beside its fastest peer."""

    ratio: float
    peer: str
    date: str
    suite: str
    row: str
    cpu: str
    torch: float | None


def results(folder: Path = RESULTS) -> dict[str, Json]:
    """The files by the names of their CPUs."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def title(cpu: str) -> str:
    """The name of a file's CPU in words: "AMD Zen 5"."""
    vendor, _, name = cpu.partition("-")
    if name.startswith("zen"):
        return f"{vendor.upper()} Zen {name[3:]}"
    return f"{vendor.capitalize()} {name.replace('-', ' ').title()}".strip()


def cells(found: dict[str, Json]) -> dict[tuple[str, str, str], Cell]:
    """By suite, row and CPU; rows without a peer have none."""
    made = {}
    for cpu, data in found.items():
        for row in data["rows"]:
            peers = {name: ratio for name, ratio in row["ratios"].items() if name != "fallback"}
            if peers:
                best = min(peers, key=lambda name: peers[name])
                key = row["suite"], row["row"], cpu
                made[key] = Cell(peers[best], best, row["date"], *key, peers.get("torch"))
    return made


def page(found: dict[str, Json]) -> str:
    """The text of docs/performance.md."""
    made = cells(found)
    rows = sorted((row for data in found.values() for row in data["rows"]), key=lambda row: row["date"])
    known = {name: version for row in rows for name, version in row["versions"].items()}
    shown = {(suite, row) for suite, parts in PAGE.items() for part in parts for row in labels(part)}
    text = INTRODUCTION.format(
        peers=", ".join(f"{x} {known[x].partition('+')[0]}" for x in RUNTIMES if x in known),
        threads=" or ".join(sorted({str(data["threads"]) for data in found.values()})),
        total=len(rows),
        shown=sum((row["suite"], row["row"]) in shown for row in rows),
        medians=_medians(made),
    )
    parts = ["# Performance", *(textwrap.fill(paragraph, 120) for paragraph in text.strip().split("\n\n"))]
    parts += ["\n".join(_table(suite, [*found], made)) for suite in PAGE if any(suite in key for key in made)]
    worst = sorted(made.values())[:WORST]
    lines = [f"| {_ratio(x)} | {_short(x.row)} | {title(x.cpu)} | {x.date} |" for x in worst]
    head = [f"## The {WORST} worst of {len(made)}", "| | row | CPU | day |", "|---|---|---|---|"]
    parts.append("\n".join([*head, *lines]))
    return "\n\n".join(parts) + "\n"


def _medians(made: dict[tuple[str, str, str], Cell]) -> str:
    """What the suites mean for a user, in a sentence."""
    of = {suite: [x for x in made.values() if x.suite == suite] for suite in PAGE}
    said = []
    for suite, rows in of.items():
        if rows:
            torch = [x.torch for x in rows if x.torch]
            beside = f"beside torch {median(torch):.1f}, " if torch else ""
            slower = f"below 1 in {sum(x.ratio < 1 for x in rows)} of {len(rows)}"
            said.append(f"{suite} {median(x.ratio for x in rows):.2f} ({beside}{slower})")
    return f"Medians of all rows and CPUs: {', '.join(said)}."


def _table(suite: str, cpus: list[str], made: dict[tuple[str, str, str], Cell]) -> Iterator[str]:
    """The table of a suite; a CPU that has none of its rows has no column."""
    rows = [row for part in PAGE[suite] for row in labels(part)]
    rows = [row for row in rows if any((suite, row, cpu) in made for cpu in cpus)]
    days = {cpu: [made[suite, row, cpu].date for row in rows if (suite, row, cpu) in made] for cpu in cpus}
    usual = {cpu: max(sorted(dates, reverse=True), key=dates.count) for cpu, dates in days.items() if dates}
    yield f"## {suite if suite[0].isupper() else suite.capitalize()}"
    yield f"| | {' | '.join(f'{title(cpu)}, {day}' for cpu, day in usual.items())} |"
    yield "|" + "---|" * (1 + len(usual))
    for row in rows:
        found = [made.get((suite, row, cpu)) for cpu in usual]
        yield f"| {_short(row)} | {' | '.join(_cell(x, usual[x.cpu]) if x else '' for x in found)} |"


def _cell(x: Cell, usual: str) -> str:
    return _ratio(x) + f", {x.date}" * (x.date != usual)


def _ratio(x: Cell) -> str:
    number = f"{x.ratio:.2f}" if x.ratio < 10 else f"{x.ratio:.0f}"
    return f"{f'**{number}**' if float(number) < 1 else number} {x.peer}"


def _short(row: str) -> str:
    """A row's name without its usual type, and without what it says twice."""
    for said, short in SHORTER.items():
        row = row.replace(said, short)
    return row


def main(words: list[str]) -> None:
    """Run the command line ``python -m bench report``."""
    found = results()
    parser = argparse.ArgumentParser(
        prog="python -m bench report",
        description="Make docs/performance.md from bench/results/, and docs/bench.png of one CPU.",
    )
    parser.add_argument("cpu", nargs="?", choices=found, help="draw docs/bench.png of this one, too")
    options = parser.parse_args(words)
    with replaced(DOCS / "performance.md") as file:
        file.write_text(page(found), encoding="utf-8")
    if options.cpu:
        from bench import plot

        plot.draw(title(options.cpu), found[options.cpu], DOCS / "bench.png")
