"""The result of the bench as text: a table of ratios, the machine's limits, and what they mean in words."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

from fastattn._bench.harness import QUIET_SHARE, Json

# The columns of the table, and the engines behind each. Where one runtime has several, the fastest counts.
RUNTIMES = {
    "fallback": ("fallback",),
    "NumPy": ("numpy",),
    "torch": ("torch", "flex"),
    "onnxruntime": ("ort", "ort-mha", "ort-bert"),
    "OpenVINO": ("openvino",),
    "JAX": ("jax",),
    "CTranslate2": ("ct2",),
    "sentence-tr.": ("st",),
    "faiss": ("faiss",),
}
OWN = ("fastattn", "fallback")
WIDTH = 110


class Figures(NamedTuple):
    """Speeds and ratios that follow from the times of one row."""

    seconds: float
    rate: float
    of_limit: float | None  # None where no limit was measured, and where a call takes longer than computing
    ratios: dict[str, float]  # how many times faster the subject is than each column


def subject(report: Json) -> str:
    """The engine that is compared with the others: fastattn, or its fallback where it was not compiled."""
    return "fastattn" if "fastattn" in report["engines"] else "fallback"


def subject_name(report: Json) -> str:
    return "fastattn" if subject(report) == "fastattn" else "fastattn's fallback"


def columns(report: Json) -> dict[str, tuple[str, ...]]:
    """The columns that this report has: in a whole suite one for each engine."""
    others = [name for name in report["engines"] if name != subject(report)]
    if report["full"]:
        return {name: (name,) for name in others}
    return {label: names for label, names in RUNTIMES.items() if set(names) & set(others)}


def figures(report: Json, row: Json) -> Figures | None:
    """None where the subject itself has no time."""
    times = {name: answer["seconds"] for name, answer in row["engines"].items() if "seconds" in answer}
    if (own := times.get(subject(report))) is None:
        return None
    ratios = {
        label: min(times[name] for name in names if name in times) / own
        for label, names in columns(report).items()
        if set(names) & set(times)
    }
    limit = report["limits"].get(row.get("limit", row["dtype"]), {}).get(row["unit"])
    rate = row["work"] / own
    return Figures(own, rate, rate / limit if limit and not is_tiny(row) else None, ratios)


def is_tiny(row: Json) -> bool:
    """Tell whether the row's time is what a call costs, whatever it computes."""
    return bool(row["work"] < 1e6)


def text(report: Json, *more: Any) -> str:
    """The report; `more` are functions of it that return lines, for its middle."""
    parts = _head, _table, _limits, *more, _failures, _missing, _summary, _warning
    return "\n".join(line for part in parts for line in part(report))


def _head(report: Json) -> Iterator[str]:
    config, machine = report["config"], report["machine"]
    setting = "".join(f"{name}={value} " for name, value in report["environment"].items())
    yield f"{setting}{report['command']}"
    yield f"{machine['cpu']}, {machine['system']}, threads: {report['threads']}, seed: {report['seed']}"
    if config["why_numpy"] and subject(report) == "fallback":
        yield f"fastattn {config['version']}, the NumPy fallback: {config['why_numpy']}"
    else:
        yield f"fastattn {config['version']}, kernels for {config['isa']}, {config['compiler']}"
    for name, engine in report["engines"].items():
        if name != subject(report):
            yield f"  {name:<9} {engine['version']:<10} {engine['what']}"


def _table(report: Json) -> Iterator[str]:
    """A line for each row: ratios, then the time of the subject, its speed, its share of the limit."""
    width = 3 + max(max(len(row["section"]), 2 + len(row["shape"]["name"])) for row in report["rows"])
    shown, section = columns(report), ""

    def line(start: str, cells: list[str], *own: str) -> str:
        widths = [*(max(8, len(label) + 2) for label in shown), 9, 14, 10]
        return f"{start:<{width}}" + "".join(f"{x:>{n}}" for x, n in zip([*cells, *own], widths, strict=True))

    own = subject_name(report)
    yield f"\nHow many times as fast as each of the others {own} is, then its own time and speed."
    yield f"The numbers are {report['shapes']}."
    for row in report["rows"]:
        if row["section"] != section:
            section = row["section"]
            yield "\n" + line(section, list(shown), "time", "speed", "of limit")
        start, got = f"  {row['shape']['name']}", figures(report, row)
        if got is None:
            yield f"{start:<{width}}{_state(row, (subject(report),))}"
            continue
        cells = [
            f"{_digits(got.ratios[label])}x" if label in got.ratios else _state(row, names)
            for label, names in shown.items()
        ]
        rate = f"{got.rate / 1e9:.1f} GB/s" if row["unit"] == "bytes" else f"{got.rate / 1e9:.0f} GFLOP/s"
        share = "-" if got.of_limit is None else f"{got.of_limit:.0%}"
        yield line(start, cells, time_in_words(got.seconds), "-" if is_tiny(row) else rate, share)


def _digits(value: float) -> str:
    """Three digits at most: 1.23, 12.3, 123."""
    return f"{value:.{max(0, 3 - len(str(int(value))))}f}"


def time_in_words(seconds: float) -> str:
    scale, unit = (1e6, "us") if seconds < 1e-3 else (1e3, "ms") if seconds < 1 else (1.0, "s")
    return f"{_digits(seconds * scale)} {unit}"


def _state(row: Json, names: tuple[str, ...]) -> str:
    """A word in the place of a missing figure."""
    return "failed" if any("failed" in row["engines"].get(name, {}) for name in names) else "-"


def _limits(report: Json) -> Iterator[str]:
    if not report["limits"]:
        return
    speeds = [
        f"{dtype} {limit['flops'] / 1e9:.0f} GFLOP/s and {limit['bytes'] / 1e9:.1f} GB/s from memory"
        for dtype, limit in report["limits"].items()
    ]
    yield "\n" + textwrap.fill(f"The limits of this machine, measured: {'; '.join(speeds)}.", WIDTH)
    got = [figures(report, row) for row in report["rows"] if row["unit"] == "bytes"]
    if any(found and found.of_limit and found.of_limit > 1 for found in got):
        yield "Above 100% of the limit: read from the caches, which are faster than memory."


def reasons(report: Json, kind: str) -> Iterator[str]:
    """Why engines have no time, each reason once; `kind` is "failed" or "unsupported"."""
    found: dict[str, list[str]] = {}
    for row in report["rows"]:
        for name, answer in row["engines"].items():
            if kind in answer:
                where = f"{row['section'].split(',')[0]} {row['shape']['name']}"
                found.setdefault(f"{name} {kind}: {answer[kind]}", []).append(where)
    for reason, calls in found.items():
        more = f" and {len(calls) - 2} more" if len(calls) > 2 else ""
        yield from textwrap.wrap(f"{reason} ({'; '.join(calls[:2])}{more})", WIDTH)


def _failures(report: Json) -> Iterator[str]:
    if report["left_out"]:
        yield from textwrap.wrap(f"Left out, since the time was over: {'; '.join(report['left_out'])}", WIDTH)
    yield from reasons(report, "failed")


def _missing(report: Json) -> Iterator[str]:
    if report["missing"]:  # not a command: the page alone says which versions
        missing = f"Not installed: {', '.join(report['missing'])}. bench/README.md says how to install them."
        yield "\n" + textwrap.fill(missing, WIDTH)


def _summary(report: Json) -> Iterator[str]:
    """The meaning of the table in words: medians over rows."""
    sentences: list[str] = []
    for dtype in dict.fromkeys(row["dtype"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["dtype"] == dtype and not is_tiny(row)]
        got = [(row["unit"], found) for row in rows if (found := figures(report, row))]
        said = " and ".join(_compared([found.ratios for _, found in got]))
        if said:
            start = f"In {dtype} it is" if sentences else f"In short, {subject_name(report)} in {dtype} is"
            reached = " and ".join(_reached(got))
            sentences.append(f"{start} {said}{', and reaches ' * bool(reached)}{reached}.")
    if sentences and not said_if_busy(report):
        yield "\n" + textwrap.fill(f"{' '.join(sentences)} (These are medians of the rows.)", WIDTH)


def _compared(rows: list[dict[str, float]]) -> Iterator[str]:
    """`rows` are the ratios of each row."""
    numpy = [ratio for ratios in rows for label, ratio in ratios.items() if label.lower() == "numpy"]
    if numpy:
        yield f"{median(numpy):.1f} times as fast as NumPy"
    best = [found for ratios in rows if (found := best_peer(ratios))]
    if best:
        slower = sum(ratio < 1 for ratio in best)
        but = f" (slower in {slower} of {len(best)} rows)" * (slower > 0)
        yield f"{median(best):.1f} times as fast as the fastest other library{but}"


def best_peer(ratios: dict[str, float]) -> float | None:
    """The ratio to the fastest other library."""
    return min((x for label, x in ratios.items() if label.lower() not in (*OWN, "numpy")), default=None)


def _reached(rows: list[tuple[str, Figures]]) -> Iterator[str]:
    """`rows` are the unit of the work and the figures of each row."""
    for unit, limit in (("flops", "of what the CPU can compute"), ("bytes", "of what memory can deliver")):
        shares = [found.of_limit for kind, found in rows if kind == unit and found.of_limit is not None]
        if shares:
            yield f"{median(shares):.0%} {limit}"


def _warning(report: Json) -> Iterator[str]:
    """The last lines, which are read first."""
    if busy := said_if_busy(report):
        yield "\n" + textwrap.fill(busy, WIDTH)


def said_if_busy(report: Json) -> str:
    """Sentences for a run beside other programs; an empty string on a quiet machine."""
    if report["cpu_share"] >= QUIET_SHARE:
        return ""
    return (
        f"BUSY MACHINE: threads that computed without a pause got {report['cpu_share']:.0%} of the CPU time, "
        "other programs the rest. Neither times nor ratios of this run mean much."
    )
