"""The picture of a CPU's results: how many times faster fastattn is than each peer."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from fastattn._bench.harness import Json
from fastattn._regular_files import replaced

# Rows of the suite "attention", as users know them.
CALLS = {
    "no mask 1,12,128,128,64, float32": "12 heads, 128 tokens",
    "no mask 8,12,128,128,32, float32": "8 texts, 12 heads, 128 tokens",
    "no mask 1,12,512,512,64, float32": "12 heads, 512 tokens",
    "no mask 1,8,2048,2048,64, float32": "8 heads, 2048 tokens",
    "causal 1,12,512,512,64, float32": "12 heads, 512 tokens, causal",
    "causal 1,8,2048,2048,128, float32": "8 heads, 2048 tokens, causal",
    "grouped heads 1,32:8,1,4096,128, float32": "32 heads (8 of keys), next token of 4096",
    "no mask 8,12,1,1024,64, float32": "8 texts, 12 heads, next token of 1024",
}
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


def draw(cpu: str, data: Json, path: Path) -> None:
    """Write a PNG of the results of a CPU, whose name in words is `cpu`."""
    with replaced(path) as file:
        picture(cpu, data).savefig(file, format="png")


def picture(cpu: str, data: Json) -> Any:
    """The figure that `draw` writes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    known = {row["row"]: row for row in data["rows"] if row["suite"] == "attention"}
    rows = {words: known[name] for name, words in CALLS.items() if name in known}
    bars = [label for label in COLOURS if any(label in row["ratios"] for row in rows.values())]
    height = 2 + len(rows) * (LABEL + THICK * len(bars))
    figure = Figure(figsize=(WIDE, height), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    _panel(figure.subplots(), rows, bars)
    versions = {name: version for row in rows.values() for name, version in row["versions"].items()}
    names = {label: f"than {label} {versions.get(label, '')}".rstrip() for label in bars}
    names["fallback"] = "than its NumPy fallback"
    patches = [Patch(color=COLOURS[label], label=names[label]) for label in bars]
    heading = "How many times faster fastattn is"
    figure.legend(handles=patches, title=heading, loc="outside upper left", **LEGEND)
    day = max(row["date"] for row in rows.values())
    words = f"Attention, float32, {cpu}, {data['threads']} threads, {day}: python -m bench record attention"
    figure.supxlabel(textwrap.fill(words, 80), fontsize=7.5, color=GREY, x=0.02, ha="left")
    return figure


def _panel(axis: Any, rows: dict[str, Json], bars: list[str]) -> None:
    """A group of bars for each row, below its words; each bar from 1 to a peer's time divided by our own."""
    pitch = LABEL + THICK * len(bars)
    for i, (words, row) in enumerate(rows.items()):
        axis.annotate(words, (1, i * pitch + LABEL), (3, 0), textcoords="offset points", fontsize=8.5)
        for index, label in enumerate(bars):
            if label not in row["ratios"]:
                continue
            ratio, y = row["ratios"][label], i * pitch + LABEL + (index + 0.8) * THICK
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
