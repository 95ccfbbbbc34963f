"""The bench as a picture: how many times faster fastattn is than each peer, for calls that people make."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from fastattn._bench.attention import TINY, plan
from fastattn._bench.harness import Json
from fastattn._bench.report import RUNTIMES, said_if_busy, subject, subject_name
from fastattn._regular_files import replaced

COLOURS = {
    "onnxruntime": "#2f6fb7",
    "OpenVINO": "#2e9e6b",
    "torch": "#e4572e",
    "JAX": "#8e6bbf",
    "NumPy": "#9aa5b1",
    "fallback": "#c9a66b",
}
# Inches: the picture, as wide as a phone can show, a bar, and the words of a row.
WIDE, THICK, LABEL = 4.5, 0.115, 0.22
GREY = "#444444"
LEGEND = {"frameon": False, "fontsize": 8, "handlelength": 1.2, "ncols": 2, "alignment": "left"}
LEGEND["title_fontproperties"] = {"size": 12, "weight": "bold"}


def draw(report: Json, path: Path) -> None:
    """Write a PNG of the minute's float32 rows, or of a suite's first section where it has none of these."""
    with replaced(path) as file:
        picture(report).savefig(file, format="png")


def picture(report: Json) -> Any:
    """The figure that `draw` writes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    usual = _usual()
    rows = sorted(
        (row for row in report["rows"] if _key(row) in usual), key=lambda row: usual.index(_key(row))
    )
    rows = rows or [row for row in report["rows"] if row["section"] == report["rows"][0]["section"]]
    others = report["engines"].keys() - {subject(report)}
    bars = [label for label in COLOURS if RUNTIMES[label][0] in others]
    height = 2 + len(rows) * (LABEL + THICK * len(bars))
    figure = Figure(figsize=(WIDE, height), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    _panel(figure.subplots(), rows, subject(report), bars)
    _words(figure, report, rows, bars)
    return figure


def _key(row: Json) -> tuple[str, str, str]:
    return row["dtype"], row["variant"], row["shape"]["name"]


def _usual() -> list[tuple[str, str, str]]:
    problems = [problem for of_title in plan().values() for problem in of_title]
    return [(x.dtype, x.variant, x.name) for x in problems if x.dtype == "float32" and x.shape != TINY]


def in_words(row: Json) -> str:
    """The call of a row, as "12 heads, 512 tokens, causal"; the shape's name where it has no such sizes."""
    shape, variant = row["shape"], row["variant"]
    if "len_q" not in shape:
        return str(shape["name"])
    heads, heads_kv, tokens = shape["heads_q"], shape["heads_kv"], f"{shape['len_q']} tokens"
    if shape["len_q"] == 1:
        tokens = f"next token of {shape['len_k']}"
    elif shape["len_q"] != shape["len_k"]:
        tokens += f" to {shape['len_k']}"
    parts = [f"{heads} heads" + f" ({heads_kv} of keys)" * (heads != heads_kv), tokens]
    texts = [f"{shape['batch']} texts"] if shape["batch"] > 1 else []
    return ", ".join(texts + parts + [variant.replace("_", " ")] * (variant != "plain"))


def _panel(axis: Any, rows: list[Json], own: str, bars: list[str]) -> None:
    """A group of bars for each row, below its words; each bar from 1 to a peer's time divided by our own."""
    pitch = LABEL + THICK * len(bars)
    for i, row in enumerate(rows):
        times = {name: answer["seconds"] for name, answer in row["engines"].items() if "seconds" in answer}
        axis.annotate(in_words(row), (1, i * pitch + LABEL), (3, 0), textcoords="offset points", fontsize=8.5)
        for index, label in enumerate(bars):
            measured = [times[name] for name in RUNTIMES[label] if name in times]
            if own not in times or not measured:
                continue
            ratio, y = min(measured) / times[own], i * pitch + LABEL + (index + 0.8) * THICK
            axis.barh(y, ratio - 1, left=1, height=THICK * 0.88, color=COLOURS[label])
            number = f"{ratio:.2f}" if ratio < 2 else f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"
            look = {"textcoords": "offset points", "va": "center", "fontsize": 7, "color": GREY}
            align, gap = ("left", 3) if ratio >= 1 else ("right", -3)
            axis.annotate(number, (ratio, y), (gap, 0), ha=align, **look)
    axis.set_xscale("log", base=2)
    low, high = axis.get_xlim()
    axis.set_xlim(low := min(low, 0.8) / 1.1, high := max(high, 4) * 1.3)
    ticks = [2.0**power for power in range(-6, 10) if low <= 2.0**power <= high]
    axis.set_xticks(ticks, [f"{tick:g}×" for tick in ticks], fontsize=8)
    axis.set_yticks([])
    axis.set_ylim(len(rows) * pitch + THICK, 0)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def _words(figure: Any, report: Json, rows: list[Json], bars: list[str]) -> None:
    """Title and legend above the panel, machine and command below it."""
    from matplotlib.patches import Patch

    config, engines = report["config"], report["engines"]
    names = {label: f"than {label} {engines[RUNTIMES[label][0]]['version']}" for label in bars}
    patches = [Patch(color=COLOURS[label], label=name) for label, name in names.items()]
    title = f"How many times faster {subject_name(report)} is"
    figure.legend(handles=patches, title=title, loc="outside upper left", **LEGEND)
    setting = "".join(f"{key}={value} " for key, value in report["environment"].items())
    kernels = f" ({config['isa']})" if subject(report) == "fastattn" else ""
    machine = f"{rows[0]['dtype']}.  fastattn {config['version']}{kernels} on {report['machine']['cpu']}, "
    said = [f"{machine}{report['threads']} threads.", f"{setting}{report['command']}", said_if_busy(report)]
    figure.supxlabel(
        "\n".join(textwrap.fill(x, 80) for x in said if x), fontsize=7.5, color=GREY, x=0.02, ha="left"
    )
