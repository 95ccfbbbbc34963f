"""Records of CPUs, and the page and picture made from them; nothing is measured but one tiny row."""

import json

import pytest

from bench import SUITES, plot, record, report
from bench.suite import Request
from fastattn._bench import harness
from fastattn._bench.cases import Shape

ABOUT = {"cpu": "cpu", "threads": 2}
WHEN = {"date": "2026-11-29", "commit": "abc"}


def row(name="a", suite="attention", **ratios):
    own = {"suite": suite, "row": name, **WHEN, "ms": 1.0}
    return {**own, "versions": dict.fromkeys(ratios, "1"), "ratios": ratios}


def test_the_page_is_what_report_makes():
    page = (report.DOCS / "performance.md").read_text(encoding="utf-8")
    assert page == report.page(report.results()), "python -m bench report writes it"
    assert page.count("\n") <= 120


@pytest.mark.parametrize("suite", record.PAGE)
def test_every_row_of_the_page_is_measured(suite, tmp_path):
    """And by one of the suites, under the name that the page looks for."""
    for part in record.PAGE[suite]:
        found = record.chosen([part], Request(folder=tmp_path))
        names = [record.label(title, problem.name) for title, rows in found.items() for problem in rows]
        assert sorted(names) == sorted(record.labels(part))
        assert part.dtype in SUITES[part.suite].dtypes


def test_a_row_replaces_its_own_and_keeps_the_others(tmp_path):
    path = tmp_path / "cpu.json"
    record.put(path, ABOUT, [row("a", torch=2.0), row("b", torch=3.0), row("a", "layers", torch=4.0)])
    record.put(path, ABOUT, [row("a", torch=5.0), row("c", torch=6.0)])
    data = json.loads(path.read_text())
    assert [(x["suite"], x["row"], x["ratios"]["torch"]) for x in data["rows"]] == [
        ("attention", "a", 5.0), ("attention", "b", 3.0), ("layers", "a", 4.0), ("attention", "c", 6.0),
    ]  # fmt: skip
    assert len(path.read_text().splitlines()) == 2 + len(data["rows"])
    with pytest.raises(ValueError, match=r"cpu\.json is of 2 threads, not 4"):
        record.put(path, {**ABOUT, "threads": 4}, [])


def test_an_interrupted_record_keeps_what_it_measured(monkeypatch, tmp_path):
    """One row is measured, without peers; the second is interrupted."""
    sizes = "1,2,8,8,16", "1,2,16,16,16"
    shapes = [Shape(sizes[i], 1, 2, 2, n, n, 16) for i, n in enumerate((8, 16))]
    part = record.Part("attention", "float32", {"no mask": sizes})
    monkeypatch.setattr("bench.attention.SHAPES", shapes)
    monkeypatch.setitem(record.PAGE, "attention", (part,))
    measured, done = harness.compare, []

    def compare(*arguments):
        if done:
            raise KeyboardInterrupt
        done.append(None)
        return measured(*arguments)

    monkeypatch.setattr(harness, "compare", compare)
    path = tmp_path / "cpu.json"
    with pytest.raises(KeyboardInterrupt):
        record.main(["attention", "--seconds", "1", "--threads", "1", "--peers", "numpy", "--to", str(path)])
    (line,) = json.loads(path.read_text())["rows"]
    assert (line["suite"], line["row"]) == ("attention", "no mask 1,2,8,8,16, float32")
    assert line["ms"] > 0
    assert set(line["ratios"]) <= {"fallback", "NumPy"}
    assert set(line["versions"]) <= {"NumPy"}
    assert len(line["date"]) == 10


def test_a_peer_that_is_missing_has_no_part_in_a_row(tmp_path):
    """The fallback is no peer; a row without peers has no cell, one with others says which is fastest."""
    found = {
        "amd-zen4": {**ABOUT, "rows": [row("no mask 1,12,128,128,64, float32", NumPy=3.0, JAX=0.5)]},
        "intel-x": {**ABOUT, "rows": [row("no mask 1,12,128,128,64, float32", fallback=3.0)]},
    }
    words = report.page(found)
    assert "| no mask 1,12,128,128,64 | **0.50** JAX |\n" in words
    assert "torch" not in words.partition("## ")[0].partition("Peers: ")[2].partition(".")[0]
    assert [x.cpu for x in report.cells(found).values()] == ["amd-zen4"]
    old = {**row("causal 1,12,512,512,64, float32", torch=2.0), "date": "2025-01-01"}
    old = {**found["amd-zen4"], "rows": [*found["amd-zen4"]["rows"], old]}
    assert "| | AMD Zen 4, 2026-11-29 |" in (words := report.page({"amd-zen4": old}))
    assert "| causal 1,12,512,512,64 | 2.00 torch, 2025-01-01 |\n" in words


def test_a_row_that_failed_is_not_written():
    measured = {"engines": {"fastattn": None, "torch": None}, "full": False, "limits": {}}
    line = {"section": "no mask, float32", "shape": {"name": "1"}, "dtype": "float32"}
    line |= {"unit": "flops", "work": 1e9}
    failed = {**line, "engines": {"fastattn": {"failed": "no"}, "torch": {"seconds": 1.0}}}
    assert record.row_of("attention", measured, failed, {"torch": "2"}, WHEN) is None
    alone = {**line, "engines": {"fastattn": {"seconds": 2.0}, "torch": {"unsupported": "no"}}}
    assert record.row_of("attention", measured, alone, {"torch": "2"}, WHEN)["ratios"] == {}


def test_the_picture_says_what_the_file_says():
    matplotlib = pytest.importorskip("matplotlib")
    name, words = next(iter(plot.CALLS.items()))
    figure = plot.picture("CPU 1", {**ABOUT, "rows": [row(name, fallback=8.0, NumPy=4.0, torch=1.25)]})
    said = [found.get_text() for found in figure.findobj(matplotlib.text.Text)]
    for part in ("than its NumPy fallback", "than NumPy 1", "than torch 1", "8.0", "4.0", "1.25", words):
        assert part in said
    assert any("CPU 1" in each for each in said)
    assert set(plot.CALLS) <= {name for part in record.PAGE["attention"] for name in record.labels(part)}
