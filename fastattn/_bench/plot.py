"""The bench as a picture: how many times faster fastattn is than each peer, shape by shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastattn._atomic import replaced
from fastattn._bench.harness import Json
from fastattn._bench.report import RUNTIMES, subject, subject_name

COLOURS = {
    "onnxruntime": "#2f6fb7",
    "OpenVINO": "#2e9e6b",
    "torch": "#e4572e",
    "JAX": "#8e6bbf",
    "NumPy": "#9aa5b1",
}
THICK, GREY = 0.16, "#444444"


def draw(report: Json, path: Path) -> None:
    """Write a PNG with one panel for each of at most three sections."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sections: dict[str, list[Json]] = {}
    for row in report["rows"]:
        if not row["section"].startswith(("fresh", "tiny", "padding")):
            sections.setdefault(row["section"], []).append(row)
    panels = sorted(sections, key=lambda title: title.startswith("grouped"))[:3]
    bars = [label for label in COLOURS if RUNTIMES[label][0] in report["engines"]]
    rows = max(len(sections[title]) for title in panels)
    height = 1.7 + rows * (0.25 + 0.15 * len(bars))
    figure = Figure(figsize=(4.4 * len(panels), height), dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, title in zip(axes, panels, strict=True):
        _panel(axis, title, sections[title], subject(report), bars, rows)
    _words(figure, report, bars)
    figure.tight_layout(rect=(0, 0.5 / height, 1, 1 - 0.62 / height))
    with replaced(path) as file:
        figure.savefig(file, format="png")


def _panel(axis: Any, title: str, rows: list[Json], own: str, bars: list[str], height: int) -> None:
    """One section: a group of bars for each shape, each bar from 1 to a peer's time divided by our own."""
    for place, row in enumerate(rows):
        times = {name: answer["seconds"] for name, answer in row["engines"].items() if "seconds" in answer}
        for index, label in enumerate(bars):
            measured = [times[name] for name in RUNTIMES[label] if name in times]
            if own not in times or not measured:
                continue
            ratio, y = min(measured) / times[own], place + (index - (len(bars) - 1) / 2) * THICK
            axis.barh(y, ratio - 1, left=1, height=THICK * 0.88, color=COLOURS[label])
            number = f"{ratio:.2f}" if ratio < 2 else f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"
            look = {"textcoords": "offset points", "va": "center", "fontsize": 6, "color": GREY}
            align, gap = ("left", 3) if ratio >= 1 else ("right", -3)
            axis.annotate(number, (ratio, y), (gap, 0), ha=align, **look)
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_xscale("log", base=2)
    low, high = axis.get_xlim()
    axis.set_xlim(low := min(low, 0.8) / 1.1, high := max(high, 4) * 1.3)
    ticks = [2.0**power for power in range(-6, 10) if low <= 2.0**power <= high]
    axis.set_xticks(ticks, [f"{tick:g}×" for tick in ticks], fontsize=8)
    axis.set_yticks(range(len(rows)), [row["shape"]["name"] for row in rows], fontsize=8)
    axis.set_ylim(height - 0.5, -0.5)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def _words(figure: Any, report: Json, bars: list[str]) -> None:
    """Title and legend above the panels, machine and command below them."""
    from matplotlib.patches import Patch

    config, engines, inch = report["config"], report["engines"], 1 / figure.get_figheight()
    title = f"How many times faster {subject_name(report)} is"
    figure.text(0.01, 1 - 0.1 * inch, title, fontsize=13, weight="bold", va="top")
    names = {label: f"than {label} {engines[RUNTIMES[label][0]]['version']}" for label in bars}
    patches = [Patch(color=COLOURS[label], label=name) for label, name in names.items()]
    look = {"ncols": len(bars), "frameon": False, "fontsize": 8.5, "handlelength": 1.2, "columnspacing": 1.4}
    figure.legend(handles=patches, loc="upper left", bbox_to_anchor=(0.0, 1 - 0.32 * inch), **look)
    setting = "".join(f"{key}={value} " for key, value in report["environment"].items())
    kernels = f" ({config['isa']})" if subject(report) == "fastattn" else ""
    said = f"Shapes are {report['shapes']}.  fastattn {config['version']}{kernels} on "
    said += f"{report['machine']['cpu']}, {report['threads']} threads.\n{setting}{report['command']}"
    figure.text(0.01, 0.1 * inch, said, fontsize=7.5, color=GREY)
