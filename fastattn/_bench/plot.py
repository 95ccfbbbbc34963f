"""The bench as a picture: how many times faster fastattn is than each peer, shape by shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastattn._bench.report import subject

Json = dict[str, Any]

# The columns behind a bar, and its colour. Of two operators of one runtime the faster counts.
BARS = {
    "NumPy": (("numpy",), "#9aa5b1"),
    "JAX": (("jax",), "#8e6bbf"),
    "torch": (("torch",), "#e4572e"),
    "OpenVINO": (("openvino",), "#2e9e6b"),
    "onnxruntime": (("ort", "ort-mha"), "#2f6fb7"),
}
THICK = 0.16


def draw(report: Json, path: Path) -> None:
    """Write a PNG with one panel for each of at most three sections."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sections: dict[str, list[Json]] = {}
    for row in report["rows"]:
        if not row["section"].startswith(("fresh", "tiny", "padding")):
            sections.setdefault(row["section"], []).append(row)
    panels = sorted(sections, key=lambda title: title.startswith("grouped"))[:3]
    bars = {name: bar for name, bar in BARS.items() if any(column in report["engines"] for column in bar[0])}

    rows = max(len(sections[title]) for title in panels)
    figure = Figure(figsize=(4.4 * len(panels), 1.9 + rows * (0.25 + 0.16 * len(bars))), dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, title in zip(axes, panels, strict=True):
        _panel(axis, title, sections[title], subject(report), bars, rows)
    _caption(figure, axes[0], report)
    figure.savefig(path)


def _panel(axis: Any, title: str, rows: list[Json], own: str, bars: dict[str, Any], height: int) -> None:
    """One section: shapes downwards, a bar from 1 to each peer's time over our own."""
    for place, row in enumerate(rows):
        times = {name: answer["seconds"] for name, answer in row["engines"].items() if "seconds" in answer}
        for index, (label, (columns, colour)) in enumerate(bars.items()):
            measured = [times[name] for name in columns if name in times]
            if own not in times or not measured:
                continue
            ratio = min(measured) / times[own]
            y = place + (index - (len(bars) - 1) / 2) * THICK
            axis.barh(
                y, ratio - 1, left=1, height=THICK * 0.88, color=colour, label=label if place == 0 else None
            )
            side = ("left", 3) if ratio >= 1 else ("right", -3)
            axis.annotate(
                f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}",
                (ratio, y),
                (side[1], 0),
                textcoords="offset points",
                ha=side[0],
                va="center",
                fontsize=6,
                color="#444444",
            )
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_xscale("log", base=2)
    low, high = axis.get_xlim()
    axis.set_xlim(min(low, 0.7), max(high, 4) * 1.3)
    ticks = [2.0**power for power in range(-4, 8) if axis.get_xlim()[0] <= 2.0**power <= axis.get_xlim()[1]]
    axis.set_xticks(ticks, [f"{tick:g}×" for tick in ticks], fontsize=8)
    axis.set_yticks(range(len(rows)), [row["shape"]["name"] for row in rows], fontsize=8)
    axis.set_ylim(height - 0.5, -0.5)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(length=0)
    for side in ("top", "right", "left", "bottom"):
        axis.spines[side].set_visible(False)


def _caption(figure: Any, axis: Any, report: Json) -> None:
    own, config, machine = subject(report), report["config"], report["machine"]
    name = "fastattn" if own == "fastattn" else "fastattn's NumPy fallback"
    handles, labels = axis.get_legend_handles_labels()
    inches = figure.get_figheight()
    figure.suptitle(
        f"Speed-up of {name} over …  (right of 1×: {name} is faster)", x=0.01, ha="left", fontsize=12
    )
    figure.legend(
        handles[::-1],
        labels[::-1],
        loc="upper left",
        bbox_to_anchor=(0.0, 1 - 0.32 / inches),
        ncols=5,
        frameon=False,
        fontsize=9,
    )
    versions = ", ".join(
        f"{key} {report['engines'][columns[0]]['version']}"
        for key, (columns, _) in BARS.items()
        if columns[0] in report["engines"]
    )
    isa = f" ({config['isa']})" if own == "fastattn" else ""
    setting = "".join(f"{key}={value} " for key, value in report["environment"].items())
    figure.text(
        0.01,
        0.08 / inches,
        f"shapes: batch, heads, len_q, len_k, head_dim · fastattn {config['version']}{isa}, {versions}\n"
        f"{machine['cpu']}, {report['threads']} threads · {setting}{report['command']}",
        fontsize=7.5,
        color="#444444",
    )
    figure.tight_layout(rect=(0, 0.42 / inches, 1, 1 - 0.6 / inches))
