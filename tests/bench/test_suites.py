"""The bench of layers and of models, on tiny ones, without peers: every engine's result is checked."""

import contextlib
import json
import os

import pytest

from fastattn import __main__ as cli
from fastattn._bench import model_files, model_problem, report, run
from fastattn._bench.layer_problem import LayerProblem, LayerShape
from fastattn._bench.model_problem import ModelProblem
from fastattn._bench.suite import Section
from fastattn._bench.suites import SUITES

ENGINES = ("fastattn", "fallback", "numpy")
BOUNDS = {
    "float32": 2e-5,
    "bfloat16": 5e-2,
    "int8": 3e-1,
}  # several times what is seen; rounded inputs are O(1)

TINY_LAYERS = [
    LayerShape("linear", "linear", 1, 5, 40, 24),
    LayerShape("row", "linear", 1, 1, 40, 24),
    LayerShape("norm", "layer_norm", 2, 3, 40),
    LayerShape("gelu", "gelu", 2, 3, 40),
    LayerShape("rope", "rope", 2, 5, 32, heads=2),
    LayerShape("encoder", "encoder", 3, 5, 24, 40, 2),
    LayerShape("decoder", "decoder", 3, 5, 24, 40, 2, 7),
    LayerShape("step", "step", 3, 5, 24, 40, 2, 7),
]
TINY_LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


class NoBar:
    """Instead of tqdm, which the tests do not need."""

    def __init__(self, total):
        self.total, self.done = total, 0

    def update(self):
        self.done += 1

    def set_description(self, text):
        pass


@pytest.fixture
def bench(monkeypatch):
    """A function that runs problems in workers, as briefly as can be."""

    def go(suite, sections):
        engines = {name: SUITES[suite].engines[name] for name in ENGINES}
        monkeypatch.setitem(SUITES, suite, SUITES[suite]._replace(engines=engines, plan=lambda *_: sections))
        monkeypatch.setattr(run, "QUICK", run.QUICK._replace(seconds=1e-4, rounds=1, budget=float("inf")))
        bar = NoBar(0)
        monkeypatch.setattr(run, "progress", lambda total: contextlib.nullcontext(bar))
        result = run.run(suite, dtype=None, only="", quick=True, threads=1, command="test", seed=0)
        assert bar.done == 2 * sum(len(section.problems) for section in sections)
        return json.loads(json.dumps(result))

    return go


def check(result, sections, missing=()):
    """Every engine has a time and a small error, but for those `missing`, which say why."""
    installed = [name for name in ENGINES if name in result["engines"]]
    assert "fallback" in installed
    assert [row["shape"]["name"] for row in result["rows"]] == [
        problem.shape.name for section in sections for problem in section.problems
    ]
    for row in result["rows"]:
        for name in installed:
            answer = row["engines"][name]
            if (row["shape"]["name"], name) in missing:
                assert set(answer) == {"unsupported"}
                continue
            assert "failed" not in answer, (row["section"], row["shape"]["name"], name, answer)
            assert answer["seconds"] > 0
            assert answer["error"] <= BOUNDS[row["dtype"]], (row["shape"]["name"], name, answer)
    words = report.text(result)
    assert all(section.title in words for section in sections)
    assert "nan" not in words
    return words


def test_layers(bench):
    sections = [
        Section(f"layer, {dtype}", [LayerProblem(shape, "plain", dtype, 3) for shape in shapes])
        for dtype, shapes in (
            ("float32", TINY_LAYERS),
            ("bfloat16", TINY_LAYERS[:2]),
            ("int8", TINY_LAYERS[-2:]),
        )
    ]
    check(bench("layers", sections), sections)


def test_models(bench, monkeypatch, tmp_path):
    # The files are made here, before a worker asks for them.
    monkeypatch.setattr(model_files, "LLAMA", model_files.LLAMA | TINY_LLAMA)
    scratch = str(tmp_path)
    encoder, decoder = model_problem.minilm(2, 5), model_problem.llama(2, 64)
    sections = [
        Section(f"{dtype}", [ModelProblem(shape, "plain", dtype, 3, scratch) for shape in shapes])
        for dtype, shapes in (
            ("float32", [encoder, decoder]),
            ("bfloat16", [encoder, decoder]),
            ("int8", [decoder]),
        )
    ]
    words = check(bench("models", sections), sections, missing={(decoder.name, "numpy")})
    assert "tokens/s" in words
    assert "sentences/s" in words


def test_a_result_that_is_wrong_has_no_time(bench, monkeypatch):
    problem = LayerProblem(TINY_LAYERS[0], "plain", "float32", 3)
    rows, want = problem.reference()
    monkeypatch.setattr(LayerProblem, "reference", lambda self: (rows, want + 1))
    row = bench("layers", [Section("layer", [problem])])["rows"][0]
    assert all("wrong result, off by 1" in answer["failed"] for answer in row["engines"].values())


@pytest.mark.parametrize(("seconds", "said"), [(0.5, True), (2.0, False)])
def test_a_figure_above_the_limit_is_explained(seconds, said):
    row = {"section": "rows", "shape": {"name": "a"}, "dtype": "float32", "unit": "bytes", "work": 2e9}
    row["engines"] = {"fastattn": {"seconds": seconds, "error": 0.0}}
    limits = {"float32": {"bytes": 2e9, "flops": 1e9}}
    table = list(report._tables({"engines": {"fastattn": {}}, "limits": limits, "rows": [row]}))
    assert ("200%" in table[2], "above 100% of limit: read from the caches" in table[-1]) == (said, said)


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("quick", [False, True])
def test_plans(suite, quick, tmp_path):
    """Every problem survives JSON, has work to do, and is of a type that the suite has."""
    for section in SUITES[suite].plan(None, quick, 5, tmp_path):
        assert section.problems
        for problem in section.problems:
            again = SUITES[suite].problem(json.loads(json.dumps(list(problem))))
            assert again == problem
            assert problem.dtype in SUITES[suite].dtypes
            if suite != "models":  # whose files would have to be made
                assert problem.work > 0
    assert os.listdir(tmp_path) == []


def test_the_large_decoder_has_a_billion_weights():
    config = model_files.LLAMA | {"num_hidden_layers": 16, "vocab_size": 128256}
    shapes = model_files.llama_shapes(config)
    weights = sum(rows * columns[0] for rows, *columns in shapes.values() if columns)
    assert model_problem.DECODER.layers == 16
    assert model_problem.DECODER.vocab == 128256
    assert 1.2e9 < weights < 1.25e9


@pytest.mark.parametrize(
    ("suite", "dtype"), [("attention", "int8"), ("layers", "float64"), ("models", "float16")]
)
def test_a_type_that_a_suite_lacks_is_refused(monkeypatch, capsys, suite, dtype):
    monkeypatch.setattr("sys.argv", ["fastattn", "bench", "--suite", suite, "--dtype", dtype])
    assert cli.main() == 2
    assert f"--suite {suite} has no {dtype}" in capsys.readouterr().err


def test_rows_are_chosen_by_title_and_name(monkeypatch, capsys, tmp_path):
    sections = SUITES["attention"].plan(None, False, 0, tmp_path)
    assert [x.title for x in run.chosen(sections, "sliding")] == ["structural mask, sliding_window, float32"]
    (plain,) = run.chosen(SUITES["variants"].plan(None, True, 0, tmp_path), "plain")
    assert [problem.variant for problem in plain.problems] == ["plain"]
    monkeypatch.setattr("sys.argv", ["fastattn", "bench", "--suite", "variants", "--only", "nosuch"])
    assert cli.main() == 2
    said = "--only nosuch is in no row; there are\n  1,8,2048,2048,64, float32: plain;"
    assert said in capsys.readouterr().err
