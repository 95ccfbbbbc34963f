"""The result of the bench as text: a table of ratios, the machine's limits, and what they mean in words."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from statistics import mean, median
from typing import Any, NamedTuple

from fastattn._bench.busy import QUIET_SHARE

Json = dict[str, Any]

# The columns of the table, and the engines behind each. Where one runtime has several, the fastest counts.
RUNTIMES = {
    "NumPy": ("numpy",),
    "torch": ("torch", "flex"),
    "onnxruntime": ("ort", "ort-mha", "ort-bert"),
    "OpenVINO": ("openvino",),
    "JAX": ("jax",),
    "CTranslate2": ("ct2",),
    "fastembed": ("fastembed",),
    "sentence-tr.": ("st", "st-onnx", "st-ov"),
}
OWN = ("fastattn", "fallback")
WIDTH = 110

# The least ratio of the medians of fresh and fixed shapes; below it, kernels were tuned to the fixed ones.
FRESH_SHARE = 0.9


class Figures(NamedTuple):
    """What follows from the times of one row."""

    seconds: float
    rate: float
    of_limit: float | None  # None where no limit was measured, and where a call takes longer than computing
    ratios: dict[str, float]  # how many times faster the subject is than each column
    best_peer: str  # the smallest of these ratios is that of this column; "" if there is none


def subject(report: Json) -> str:
    """The engine that is compared with the others: fastattn, or its fallback where it was not compiled."""
    return "fastattn" if "fastattn" in report["engines"] else "fallback"


def columns(report: Json) -> dict[str, tuple[str, ...]]:
    """The columns that this report has: with ``--full`` one for each engine."""
    others = [name for name in report["engines"] if name != subject(report)]
    if report["full"]:
        return {name: (name,) for name in others}
    return {label: names for label, names in RUNTIMES.items() if set(names) & set(others)}


def figures(report: Json, row: Json) -> Figures | None:
    """None where the subject itself has no time."""
    times = {name: answer["seconds"] for name, answer in row["engines"].items() if "seconds" in answer}
    own = times.get(subject(report))
    if own is None:
        return None
    best = {
        label: min(times[name] for name in names if name in times)
        for label, names in columns(report).items()
        if set(names) & set(times)
    }
    ratios = {label: time / own for label, time in best.items()}
    peers = {label: ratio for label, ratio in ratios.items() if label not in OWN}
    limit = report["limits"].get(row.get("limit", row["dtype"]), {}).get(row["unit"])
    rate = row["work"] / own
    return Figures(
        own,
        rate,
        rate / limit if limit and not is_tiny(row) else None,
        ratios,
        min(peers, key=peers.__getitem__, default=""),
    )


def is_tiny(row: Json) -> bool:
    """Whether the row's time is what a call costs, whatever it computes."""
    return bool(row["work"] < 1e6)


def text(report: Json) -> str:
    parts = _head, _table, _limits, _speeds, _costs, _errors, _reasons, _fresh, _missing, _summary, _warning
    return "\n".join(line for part in parts for line in part(report))


def _head(report: Json) -> Iterator[str]:
    config, machine = report["config"], report["machine"]
    setting = "".join(f"{name}={value} " for name, value in report["environment"].items())
    yield f"{setting}{report['command']}"
    yield f"{machine['cpu']}, {machine['system']}, threads: {report['threads']}, seed: {report['seed']}"
    if config["why_numpy"] and subject(report) == "fallback":
        yield f"fastattn {config['version']} WITHOUT its compiled kernels, {config['why_numpy']}"
    else:
        yield f"fastattn {config['version']}, kernels for {config['isa']}, {config['compiler']}"
    for name, engine in report["engines"].items():
        if name not in OWN:
            yield f"  {name:<9} {engine['version']:<10} {engine['what']}"


def _table(report: Json) -> Iterator[str]:
    """A line for each row: ratios, then the time of the subject, its speed, its share of the limit."""
    width = 3 + max(max(len(row["section"]), 2 + len(row["shape"]["name"])) for row in report["rows"])
    shown = columns(report)
    yield ""
    yield f"How many times as fast as each of the others {_name(report)} is, then its own time and speed."
    yield f"The numbers are {report['shapes']}."
    section = ""
    for row in report["rows"]:
        if row["section"] != section:
            section = row["section"]
            yield ""
            yield (
                f"{section:<{width}}"
                + _cells(shown, list(shown))
                + f"{'time':>9}{'speed':>14}{'of limit':>10}"
            )
        start = f"  {row['shape']['name']}".ljust(width)
        got = figures(report, row)
        if got is None:
            yield start + _state(row["engines"][subject(report)])
            continue
        cells = [
            f"{_digits(got.ratios[label])}x" if label in got.ratios else _worst_state(row, names)
            for label, names in shown.items()
        ]
        rate = f"{got.rate / 1e9:.1f} GB/s" if row["unit"] == "bytes" else f"{got.rate / 1e9:.0f} GFLOP/s"
        share = "-" if got.of_limit is None else f"{got.of_limit:.0%}"
        own = f"{_time(got.seconds):>9}{'-' if is_tiny(row) else rate:>14}{share:>10}"
        yield start + _cells(shown, cells) + own


def _name(report: Json) -> str:
    return "fastattn" if subject(report) == "fastattn" else "fastattn's fallback"


def _cells(shown: dict[str, Any], cells: list[str]) -> str:
    return "".join(f"{cell:>{max(8, len(label) + 2)}}" for label, cell in zip(shown, cells, strict=True))


def _digits(value: float) -> str:
    """Three digits at most: 1.23, 12.3, 123."""
    return f"{value:.{max(0, 3 - len(str(int(value))))}f}"


def _time(seconds: float) -> str:
    scale, unit = (1e6, "us") if seconds < 1e-3 else (1e3, "ms") if seconds < 1 else (1.0, "s")
    return f"{_digits(seconds * scale)} {unit}"


def _state(answer: Json) -> str:
    """What stands in the place of a missing figure."""
    return "failed" if "failed" in answer else "-"


def _worst_state(row: Json, names: tuple[str, ...]) -> str:
    return max(_state(row["engines"].get(name, {})) for name in names)


def _limits(report: Json) -> Iterator[str]:
    if not report["limits"]:
        return
    speeds = [f"{limit['flops'] / 1e9:.0f} GFLOP/s in {dtype}" for dtype, limit in report["limits"].items()]
    memory = max(limit["bytes"] for limit in report["limits"].values())
    yield ""
    yield f"The limits of this machine, measured: {', '.join(speeds)}; {memory / 1e9:.1f} GB/s from memory."
    got = [(row, figures(report, row)) for row in report["rows"] if row["unit"] == "bytes"]
    if any(found and found.of_limit and found.of_limit > 1 for _, found in got):
        yield "Above 100% of the limit: read from the caches, which are faster than memory."


def _speeds(report: Json) -> Iterator[str]:
    """Sentences or tokens a second of every engine, in the suite whose calls make them."""
    rows = [row for row in report["rows"] if "makes" in row["shape"]]
    if rows:
        yield ""
    for row in rows:
        shape = row["shape"]
        speeds = [
            f"{name} {shape['batch'] / answer['seconds']:.1f}"
            for name, answer in row["engines"].items()
            if "seconds" in answer
        ]
        made = f"{shape['name']}, {row['dtype']}, {shape['makes']}/s: {', '.join(speeds)}"
        yield from textwrap.wrap(made, WIDTH)


def _costs(report: Json) -> Iterator[str]:
    """What else an engine costs, in the suite that compares memory: its peak, and the time of loading."""
    for row in report["rows"]:
        costs = [
            f"{name} {answer['peak'] / 1e6:.0f} MB, {_time(answer['load'])}"
            for name, answer in row["engines"].items()
            if answer.get("peak")
        ]
        if costs:
            made = f"{row['shape']['name']}, {row['dtype']}, most memory and loading: {'; '.join(costs)}"
            yield from textwrap.wrap(made, WIDTH)


def _errors(report: Json) -> Iterator[str]:
    """The largest error of each engine, and of hidden states the mean cosine."""
    for dtype in dict.fromkeys(row["dtype"] for row in report["rows"]):
        errors: dict[str, float] = {}
        for row in report["rows"]:
            for name, answer in row["engines"].items():
                if row["dtype"] == dtype and "error" in answer:
                    errors[name] = max(errors.get(name, 0.0), answer["error"])
        listed = ", ".join(f"{name} {error:.0e}" for name, error in errors.items())
        yield from textwrap.wrap(f"The largest errors against float64 in {dtype}: {listed or '-'}", WIDTH)
        cosines: dict[str, list[float]] = {}
        for row in report["rows"]:
            for name, answer in row["engines"].items():
                if row["dtype"] == dtype and "cosine" in answer:
                    cosines.setdefault(name, []).append(answer["cosine"])
        listed = ", ".join(f"{name} {mean(found):.5f}" for name, found in cosines.items())
        if listed:
            yield from textwrap.wrap(f"The mean cosines with float64 in {dtype}: {listed}", WIDTH)


def _reasons(report: Json) -> Iterator[str]:
    """Why engines have no time, each reason once. That they lack something is said with ``--full`` only."""
    kinds = ("unsupported", "failed") if report["full"] else ("failed",)
    reasons: dict[str, list[str]] = {}
    for row in report["rows"]:
        for name, answer in row["engines"].items():
            for kind in kinds:
                if kind in answer:
                    where = f"{row['section'].split(',')[0]} {row['shape']['name']}"
                    reasons.setdefault(f"{name} {kind}: {answer[kind]}", []).append(where)
    if report["left_out"]:
        yield from textwrap.wrap(f"Left out, since the time was over: {'; '.join(report['left_out'])}", WIDTH)
    for reason, places in reasons.items():
        more = f" and {len(places) - 2} more" if len(places) > 2 else ""
        yield from textwrap.wrap(f"{reason} ({'; '.join(places[:2])}{more})", WIDTH)


def _fresh(report: Json) -> Iterator[str]:
    """The medians of the fixed shapes, and of the fresh ones, for which nobody could tune a kernel."""
    for unit, kind in (("flops", "many query rows"), ("bytes", "one query row")):
        rows = [row for row in report["rows"] if row["unit"] == unit and row["variant"] == "plain"]
        fresh = _medians(report, [row for row in rows if row["section"].startswith("fresh")])
        if not fresh:
            continue
        dtype = rows[0]["dtype"]
        fixed = _medians(report, [row for row in rows if row["section"] == f"no mask, {dtype}"])
        for what in fresh.keys() & fixed.keys():
            tuned = fresh[what] < FRESH_SHARE * fixed[what]
            yield (
                f"Median {what}, {kind}: fixed shapes {fixed[what]:.2f}, fresh shapes {fresh[what]:.2f}"
                + ("  TUNED TO A LIST: more than 10% below" * tuned)
            )


def _medians(report: Json, rows: list[Json]) -> dict[str, float]:
    got = [found for found in (figures(report, row) for row in rows) if found]
    values = {
        "share of the limit": [g.of_limit for g in got if g.of_limit is not None],
        "ratio to the best peer": [g.ratios[g.best_peer] for g in got if g.best_peer],
    }
    return {name: median(found) for name, found in values.items() if found}


def _missing(report: Json) -> Iterator[str]:
    if report["missing"]:
        yield ""
        missing = ", ".join(report["missing"])  # not a command: the README alone says which versions
        yield from textwrap.wrap(
            f"Not installed: {missing}. bench/README.md says how to install them.", WIDTH
        )


def _summary(report: Json) -> Iterator[str]:
    """What the table means, in words: medians over rows."""
    sentences: list[str] = []
    for dtype in dict.fromkeys(row["dtype"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["dtype"] == dtype and not is_tiny(row)]
        got = [(row["unit"], found) for row in rows if (found := figures(report, row))]
        said = " and ".join(_compared([found.ratios for _, found in got]))
        if said:
            start = f"In {dtype} it is" if sentences else f"In short, {_name(report)} in {dtype} is"
            reached = " and ".join(_reached(got))
            sentences.append(f"{start} {said}{', and reaches ' * bool(reached)}{reached}.")
    if sentences:
        yield ""
        yield from textwrap.wrap(f"{' '.join(sentences)} (These are medians of the rows.)", WIDTH)


def _compared(rows: list[dict[str, float]]) -> Iterator[str]:
    """`rows` are the ratios of each row."""
    numpy = [ratio for ratios in rows for label, ratio in ratios.items() if label.lower() == "numpy"]
    if numpy:
        yield f"{median(numpy):.1f} times as fast as NumPy"
    libraries = [
        [ratio for label, ratio in ratios.items() if label.lower() not in (*OWN, "numpy")] for ratios in rows
    ]
    best = [min(ratios) for ratios in libraries if ratios]
    if best:
        slower = sum(ratio < 1 for ratio in best)
        but = f" (slower in {slower} of {len(best)} rows)" * (slower > 0)
        yield f"{median(best):.1f} times as fast as the fastest other library{but}"


def _reached(rows: list[tuple[str, Figures]]) -> Iterator[str]:
    """`rows` are the unit of the work and the figures of each row."""
    for unit, limit in (("flops", "of what the CPU can compute"), ("bytes", "of what memory can deliver")):
        shares = [found.of_limit for kind, found in rows if kind == unit and found.of_limit is not None]
        if shares:
            yield f"{median(shares):.0%} {limit}"


def _warning(report: Json) -> Iterator[str]:
    """The last lines, which are read first: other programs were running."""
    if report["cpu_share"] < QUIET_SHARE:
        yield ""
        yield from textwrap.wrap(
            f"BUSY MACHINE: threads that computed without a pause got {report['cpu_share']:.0%} of the CPU"
            " time, other programs the rest. Neither times nor ratios of this run mean much.",
            WIDTH,
        )
