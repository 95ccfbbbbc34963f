"""The bench's result as text: a table for every section, the errors, what was left out, and two medians."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any, NamedTuple

Json = dict[str, Any]

# Least share of the CPU time that threads computing without a pause get where nothing else runs. On two CPUs
# they got 0.89 to 0.99, and 0.3 to 0.6 beside one other program that computed.
QUIET_SHARE = 0.8


class Figures(NamedTuple):
    """What follows from one row's times, for fastattn or, where it was not compiled, for its fallback."""

    rate: float
    of_limit: float | None
    over_fallback: float
    over_peer: float | None
    best_peer: str


def subject(report: Json) -> str:
    return "fastattn" if "fastattn" in report["engines"] else "fallback"


def figures(report: Json, row: Json) -> Figures | None:
    """None where the subject itself has no time."""
    times = {name: answer["seconds"] for name, answer in row["engines"].items() if "seconds" in answer}
    own = times.get(subject(report))
    if own is None:
        return None
    rate = row["work"] / own
    limit = report["limits"].get(row["dtype"], {}).get(row["unit"])
    peers = {name: time for name, time in times.items() if name not in ("fastattn", "fallback")}
    best = min(peers, key=peers.__getitem__, default="")
    return Figures(
        rate,
        rate / limit if limit else None,
        times.get("fallback", own) / own,
        peers[best] / own if best else None,
        best,
    )


def _of_limit(report: Json, row: Json) -> float:
    """0 where the table shows none."""
    got = figures(report, row)
    return 0.0 if got is None or got.of_limit is None or is_tiny(row) else got.of_limit


def is_tiny(row: Json) -> bool:
    """Its time is what a call costs, whatever it computes."""
    return bool(row["work"] < 1e6)


def text(report: Json) -> str:
    parts = _head, _tables, _speeds, _reasons, _medians, _warning
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
        if name not in ("fastattn", "fallback"):
            yield f"  {name:<9} {engine['version']:<10} {engine['what']}"
    for dtype, limit in report["limits"].items():
        yield f"measured limits, {dtype}: {limit['flops'] / 1e9:.0f} GFLOP/s, {limit['bytes'] / 1e9:.1f} GB/s"


def _tables(report: Json) -> Iterator[str]:
    names = list(report["engines"])
    for section in dict.fromkeys(row["section"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["section"] == section]
        scale, unit = (1e6, "us") if is_tiny(rows[0]) else (1e3, "ms")
        yield ""
        yield (
            f"{section + ', ' + unit:<34}"
            + _cells(names)
            + f"{'rate':>11}{'of limit':>9}{'/fallback':>10}{'/best peer':>12}"
        )
        for row in rows:
            cells = [_time(row["engines"].get(name, {}), scale) for name in names]
            yield f"  {row['shape']['name']:<32}" + _cells(cells) + _derived(report, row)
        yield _errors(rows, names)
        if any(row["unit"] == "bytes" and _of_limit(report, row) > 1 for row in rows):
            yield "  above 100% of limit: read from the caches, which are faster than the memory measured"


def _cells(values: Iterable[str]) -> str:
    return "".join(f"{value:>10}" for value in values)


def _time(answer: Json, scale: float) -> str:
    if "seconds" not in answer:
        return "failed" if "failed" in answer else "-"
    value = answer["seconds"] * scale
    return f"{value:.{max(0, 3 - len(str(int(value))))}f}"


def _derived(report: Json, row: Json) -> str:
    got = figures(report, row)
    if got is None:
        return ""
    rate = f"{got.rate / 1e9:.1f} GB/s" if row["unit"] == "bytes" else f"{got.rate / 1e9:.0f} GF/s"
    limit = "-" if got.of_limit is None else f"{got.of_limit:.0%}"
    if is_tiny(row):
        rate = limit = "-"
    peer = "-" if got.over_peer is None else f"{got.over_peer:.2f} {got.best_peer}"
    return f"{rate:>11}{limit:>9}{got.over_fallback:>10.1f}  {peer}"


def _errors(rows: list[Json], names: list[str]) -> str:
    """The largest error of each engine in these rows."""
    cells = []
    for name in names:
        errors = [row["engines"][name]["error"] for row in rows if "error" in row["engines"].get(name, {})]
        cells.append(f"{max(errors):.0e}" if errors else "-")
    return f"  {'largest error against float64':<32}" + _cells(cells)


def _speeds(report: Json) -> Iterator[str]:
    """Sentences or tokens a second, of every engine, where a call makes such things."""
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
        yield f"  {shape['name']}, {row['dtype']}, {shape['makes']}/s: {', '.join(speeds)}"


def _reasons(report: Json) -> Iterator[str]:
    """Why engines have no time, each reason once."""
    reasons: dict[str, list[str]] = {}
    for row in report["rows"]:
        for name, answer in row["engines"].items():
            for kind in ("unsupported", "failed"):
                if kind in answer:
                    where = f"{row['section'].split(',')[0]} {row['shape']['name']}"
                    reasons.setdefault(f"{name} {kind}: {answer[kind]}", []).append(where)
    if reasons or report["left_out"]:
        yield ""
    if report["left_out"]:
        yield f"  left out, the time was over: {'; '.join(report['left_out'])}"
    for reason, places in reasons.items():
        more = f" and {len(places) - 2} more" if len(places) > 2 else ""
        yield f"  {reason} ({'; '.join(places[:2])}{more})"


def _medians(report: Json) -> Iterator[str]:
    """The fixed shapes of attention against those that nobody could tune for."""
    if report["suite"] != "attention":
        return
    yield ""
    for unit, kind in (("flops", "many query rows"), ("bytes", "one query row")):
        rows = [
            row
            for row in report["rows"]
            if row["unit"] == unit and row["variant"] == "plain" and not is_tiny(row)
        ]
        dtype = rows[0]["dtype"] if rows else ""
        fixed = _summary(report, [row for row in rows if row["section"] == f"no mask, {dtype}"])
        fresh = _summary(report, [row for row in rows if row["section"].startswith("fresh")])
        for what, form in (("of limit", "{:.0%}"), ("/best peer", "{:.2f}")):
            if what in fixed and what in fresh:
                tuned = (
                    "  TUNED TO A LIST: more than 10% below"
                    if fresh[what] < 0.9 * fixed[what] and not report["quick"]
                    else ""
                )
                yield (
                    f"median {what}, {kind}: fixed shapes {form.format(fixed[what])}, "
                    f"fresh shapes {form.format(fresh[what])}{tuned}"
                )


def _warning(report: Json) -> Iterator[str]:
    """Last, where it is read: that something else was running."""
    if report["cpu_share"] < QUIET_SHARE:
        yield ""
        yield (
            f"BUSY MACHINE: threads that computed without a pause got {report['cpu_share']:.0%} of the CPU"
            f" time, other programs the rest. Neither times nor ratios of this run mean much."
        )


def _summary(report: Json, rows: list[Json]) -> dict[str, float]:
    got = [found for found in (figures(report, row) for row in rows) if found]
    columns = {"of limit": [g.of_limit for g in got], "/best peer": [g.over_peer for g in got]}
    known = {name: [value for value in values if value is not None] for name, values in columns.items()}
    return {name: median(values) for name, values in known.items() if values}
