"""The directive `benchmarks FOLDER`: tables of the JSON files of the bench, a section for each run."""

import json
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import nested_parse_with_titles

from fastattn._bench.report import RUNTIMES

FIRST = ("attention", "models", "layers", "embeddings", "recurrent", "training")


def cells_of(row, labels, limits):
    """What a row says of fastattn, and of each label."""
    seconds = {name: engine["seconds"] for name, engine in row["engines"].items() if "seconds" in engine}
    own = seconds["fastattn"]
    others = [min((seconds[n] for n in RUNTIMES[label] if n in seconds), default=None) for label in labels]
    shape = row["shape"] if isinstance(row["shape"], str) else row["shape"]["name"]
    share = row.get("of_limit")
    if share is None and "work" in row and row["work"] > 1e6:
        limit = limits.get(row.get("limit", row["dtype"]), {}).get(row["unit"])
        share = row["work"] / own / limit if limit else None
    ratios = ["" if other is None else f"{other / own:.2f}" for other in others]
    return [shape, f"{1e3 * own:.3g}", *ratios, "" if share is None else f"{share:.0%}"]


def section(path):
    """The lines of a run in Markdown."""
    run = json.loads(path.read_text(encoding="utf-8"))
    labels = [label for label, names in RUNTIMES.items() if set(names) & set(run["engines"])]
    machine, config = run["machine"], run["config"]
    yield f"## {run['suite'].capitalize()}: {path.stem.replace('-', ' ')}"
    yield ""
    yield f"    {run['command']}"
    yield ""
    yield f"{machine['cpu']}, {run['threads']} threads, kernels `{config['isa']}`, {config['compiler']}."
    versions = {
        label: next(run["engines"][name]["version"] for name in RUNTIMES[label] if name in run["engines"])
        for label in labels
    }
    yield ", ".join(f"{label} {number}" for label, number in versions.items()) + ". "
    if run.get("note"):
        yield run["note"] + " "
    yield f"The file: [{path.name}](notes/runs/{path.name})."
    previous = None
    for row in run["rows"]:
        if "seconds" not in row["engines"].get("fastattn", {}):
            continue
        name = row["section"] if row["dtype"] in row["section"] else f"{row['section']}, {row['dtype']}"
        if name != previous:
            yield ""
            yield f"### {name}"
            yield ""
            yield "| " + " | ".join(["shape", "ms", *labels, "limit"]) + " |"
            yield "|---|" + "---:|" * (len(labels) + 2)
            previous = name
        yield "| " + " | ".join(cells_of(row, labels, run["limits"])) + " |"
    yield ""


class Benchmarks(SphinxDirective):
    required_arguments = 1

    def run(self):
        folder = Path(self.env.srcdir, self.arguments[0])
        paths = sorted(folder.glob("*.json"))
        if not paths:
            raise self.error(f"{folder} has no JSON file")
        for path in paths:
            self.env.note_dependency(str(path))

        def place(path):
            suite = json.loads(path.read_text(encoding="utf-8"))["suite"]
            return (
                FIRST.index(suite) if suite in FIRST else len(FIRST),
                path.name.startswith("cascade"),
                path.name,
            )

        lines = [line for path in sorted(paths, key=place) for line in section(path)]
        parent = nodes.section()
        parent.document = self.state.document
        nested_parse_with_titles(self.state, StringList(lines, str(folder)), parent)
        return parent.children


def setup(app):
    app.add_directive("benchmarks", Benchmarks)
    return {"parallel_read_safe": True}
