"""The bench on tiny problems, without peers: every engine's result is checked, and every plan and report."""

import json
import os
import pickle
import sys
from types import SimpleNamespace

import pytest

import bench
import fastattn
from bench import __main__ as command
from bench import embeddings as embeddings_suite
from bench import files
from bench import flash as flash_suite
from bench import models as models_suite
from bench.attention import SIGMOID, MaskedProblem
from bench.embeddings import ARRIVAL, TextProblem, several
from bench.flash import FlashProblem, FlexProblem, GenerateProblem, PackedProblem, PromptShape
from bench.hybrids import VARIANTS as HYBRIDS
from bench.hybrids import HybridProblem
from bench.layers import LayerProblem, LayerShape
from bench.models import ModelProblem
from bench.optimize import TINY, TorchProblem
from bench.search import DTYPES as SEARCHED
from bench.search import SearchProblem, SearchShape
from bench.suite import FULL, INT8_INPUTS, Request, chosen, run, text
from bench.training import MASKED, MODIFIED, GradientProblem, StepProblem
from fastattn._bench import attention as minute
from fastattn._bench import harness
from fastattn._bench.cases import Shape

SUITES = bench.SUITES
ENGINES = ("fastattn", "fallback", "numpy")
# Several times what is seen; rounded inputs are O(1).
BOUNDS = {"float32": 2e-5, "bfloat16": 5e-2, "int8": 3e-1, "bits": 0}

TINY_LAYERS = [
    LayerShape("linear", "linear", 1, 5, 40, 24),
    LayerShape("row", "linear", 1, 1, 40, 24),
    LayerShape("norm", "layer_norm", 2, 3, 40),
    LayerShape("gelu", "gelu", 2, 3, 40),
    LayerShape("rope", "rope", 2, 5, 32, heads=2),
    LayerShape("encoder", "encoder", 3, 5, 24, 40, 2),
    LayerShape("decoder", "decoder", 3, 5, 24, 40, 2, 7),
]
TINY_LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


class Here:
    """A worker in this process: its results count here, and not its times."""

    broken = False

    def __init__(self, engine, threads):
        self.worker, self.process = harness._Worker(engine, threads), SimpleNamespace(kill=lambda: None)

    def ask(self, do, **arguments):
        try:
            return getattr(self.worker, do)(**arguments)
        except harness.Unsupported as error:
            return {"unsupported": str(error)}

    def another(self):
        return self

    def close(self):
        pass


@pytest.fixture
def measured(monkeypatch):
    """A function that runs problems as briefly as can be: in this process, or `apart` in workers of it."""

    def go(suite, sections, full=True, threads=1, apart=False):
        monkeypatch.setattr("bench.suite.FULL", FULL._replace(seconds=1e-4, rounds=1))
        if not apart:
            monkeypatch.setattr(harness, "WorkerProcess", Here)
            monkeypatch.setattr(harness, "WARM_UP", 0.0)
        small, effort = SUITES[suite]._replace(plan=lambda _: sections), None if full else harness.brief(1)
        result = run(suite, small, Request(), only="", peers=["numpy"], effort=effort, threads=threads)
        return json.loads(json.dumps(result))

    yield go
    harness.FOR_GOOD.close()


def check(result, sections, missing=()):
    """Every engine has a time and a small error, but for those `missing`, which say why."""
    installed = [name for name in ENGINES if name in result["engines"]]
    assert "fallback" in installed
    names = [problem.name for problems in sections.values() for problem in problems]
    assert [row["shape"]["name"] for row in result["rows"]] == names
    for row in result["rows"]:
        for name in installed:
            answer = row["engines"][name]
            if (row["shape"]["name"], name) in missing:
                assert set(answer) == {"unsupported"}
                continue
            assert "failed" not in answer, (row["section"], row["shape"]["name"], name, answer)
            assert answer["seconds"] > 0
            assert answer["error"] <= BOUNDS[row["dtype"]], (row["shape"]["name"], name, answer)
    words = text(result)
    assert all(title in words for title in sections)
    assert "nan" not in words
    return words


def test_layers(measured):
    sections = {
        f"layer, {dtype}": [LayerProblem(shape, "plain", dtype, 3) for shape in shapes]
        for dtype, shapes in (
            ("float32", TINY_LAYERS),
            ("bfloat16", TINY_LAYERS[:2]),
            ("int8", TINY_LAYERS[-1:]),
        )
    }
    maps = [LayerShape("linear", "linear", 1, 5, 64, 24), LayerShape("rows", "linear", 1, 20, 32, 24)]
    sections |= Request(seed=3).section(LayerProblem, "map", maps, "int8", ("plain", INT8_INPUTS))
    result = measured("layers", sections)
    check(result, sections)
    if "fastattn" in result["engines"]:
        assert set(result["limits"]) == {"float32", "bfloat16", "int8"}
        assert all(limit["flops"] > 0 for limit in result["limits"].values())


def test_models(measured, monkeypatch, tmp_path):
    # The files are made here, before a worker asks for them.
    monkeypatch.setattr(files, "LLAMA", files.LLAMA | TINY_LLAMA)
    # Without its package MiniLM is random, and bfloat16 errs by up to 0.095 after six such layers.
    monkeypatch.setattr(files, "MINILM", files.MINILM | {"num_hidden_layers": 1})
    scratch = str(tmp_path)
    encoder, decoder = models_suite.minilm(2, 5), models_suite.llama(2, 64)
    sections = {
        dtype: [ModelProblem(shape, "plain", dtype, 3, scratch) for shape in shapes]
        for dtype, shapes in (
            ("float32", [encoder, decoder]),
            ("bfloat16", [encoder, decoder]),
            ("int8", [decoder]),
        )
    }
    sections["rounded"] = [
        ModelProblem(encoder, variant, "int8", 3, scratch)
        for variant in (INT8_INPUTS, models_suite.INT8_BFLOAT16)
    ]
    words = check(measured("models", sections), sections, missing={(decoder.name, "numpy")})
    assert "tokens/s" in words
    assert "sentences/s" in words
    assert "The mean cosines with float64 in int8: " in words


def test_embeddings(measured, monkeypatch, tmp_path):
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(files, "MINILM", files.MINILM | {"num_hidden_layers": 1})  # where it is random
    arrival, one = embeddings_suite.several(embeddings_suite.ARRIVAL, 5), embeddings_suite.SHAPES[-1]
    sections = {
        dtype: [
            TextProblem(shape, variant, dtype, 3, str(tmp_path)) for shape in shapes for variant in variants
        ]
        for dtype, shapes, variants in (
            ("float32", (arrival, one), ("plain",)),
            ("int8", (arrival,), (INT8_INPUTS, models_suite.INT8_BFLOAT16)),
        )
    }
    narrow = {(problem.name, "numpy") for problem in sections["int8"]}
    result = measured("embeddings", sections)
    words = check(result, sections, missing=narrow)
    assert "texts/s" in words
    for row in result["rows"]:
        for name, answer in row["engines"].items():
            if "seconds" in answer:
                assert answer["load"] >= 0
                assert answer["cosine"] > 0.98, (row["shape"]["name"], name)
                if sys.platform == "linux":
                    assert 2e7 < answer["peak"] < 4e9
    if sys.platform == "linux":
        assert "most memory and loading: " in words


SMALL = Shape("small", batch=2, heads_q=2, heads_kv=2, len_q=40, len_k=40, head_dim=16)


def test_attention(measured):
    variants = ("plain", "causal", "padding_mask", SIGMOID, "sliding_window")
    request = Request(seed=3)
    sections = {
        **request.section(MaskedProblem, "small", [SMALL], "float32", variants),
        **request.section(MaskedProblem, "grouped", [SMALL._replace(heads_q=4)], "float32"),
    }
    check(measured("attention", sections, apart=True), sections)


@pytest.mark.parametrize("dtype", SEARCHED)
def test_search(measured, dtype):
    sections = Request(seed=3).section(
        SearchProblem, "small", [SearchShape(3, 700), SearchShape(9, 700)], dtype
    )
    narrow = {("3 in 700", "numpy"), ("9 in 700", "numpy")} if dtype != "float32" else ()
    check(measured("search", sections), sections, missing=narrow)


def test_hybrids(measured):
    step = SMALL._replace(batch=1, len_q=1, len_k=1)
    sections = {
        **Request(seed=3).section(HybridProblem, "text", [SMALL._replace(batch=1)], "float32", HYBRIDS),
        **Request(seed=3).section(HybridProblem, "step", [step], "float32", HYBRIDS),
    }
    check(measured("hybrids", sections), sections)


@pytest.mark.parametrize("kind", ["backward", "both"])
@pytest.mark.parametrize("shape", [SMALL, SMALL._replace(heads_q=4)], ids=["small", "grouped"])
def test_training(shape, kind, measured):
    variants = [f"{kind} {name}" for name in ("plain", "causal", *MASKED, *MODIFIED)]
    sections = Request(seed=3).section(GradientProblem, "problems", [shape], "float32", variants)
    check(measured("training", sections), sections)


def test_steps_of_training(measured):
    sections = {"steps": [StepProblem(SMALL, "step characters", "float32", 3)]}
    check(measured("training", sections), sections)


def test_operators_of_torch(measured):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    if not fastattn.show_config()["isas_available"]:
        pytest.skip("of compiled kernels, and there are none")
    sections = Request(seed=3).section(TorchProblem, "call", [TINY], "float32")
    (row,) = measured("optimize", sections)["rows"]
    assert set(row["engines"]) == {"fastattn", "operator", "inference", "learning"}
    assert all(answer["seconds"] > 0 and answer["error"] < 1e-5 for answer in row["engines"].values())


def test_programs_of_torch(measured, monkeypatch, tmp_path):
    pytest.importorskip("sentence_transformers")
    if not fastattn.show_config()["isas_available"]:
        pytest.skip("of compiled kernels, and there are none")
    monkeypatch.setattr("bench.flash.LLAMA", {**flash_suite.LLAMA, **TINY_LLAMA, "num_hidden_layers": 1})
    prompts = PromptShape("prompts", 2, 3, 5, 2)
    sections = {
        "functions": [FlashProblem(SMALL, mask, "float32", 3) for mask in ("plain", "causal")],
        "masks": [FlexProblem(SMALL, mask, "float32", 3) for mask in flash_suite.MODS],
        "texts": [PackedProblem(several(ARRIVAL, 3), "plain", "float32", 3, str(tmp_path))],
        "prompts": [GenerateProblem(prompts, "plain", "float32", 3)],
    }
    rows = measured("flash", sections)["rows"]
    assert [{name for name, x in row["engines"].items() if "seconds" in x} for row in rows] == [
        {"fastattn", "padded"} if row["section"] == "texts" else {"fastattn"} for row in rows
    ]


def test_the_first_minute_ends_in_words(measured):
    """Ratios of the median row; both engines that compute with NumPy had one thread, too."""
    section = Request(seed=3).section(MaskedProblem, "small", [SMALL._replace(len_k=4000)], "float32")
    result = measured("attention", section, full=False, threads=2, apart=True)
    assert set(result["rows"][0]["engines"]) == set(result["engines"]) >= {"fallback", "numpy"}
    words = text({**result, "cpu_share": 1.0})
    assert " NumPy " in words
    assert (
        words.count("in one thread and in 2, the faster counts")
        == len({"fastattn"} & set(result["engines"])) + 1
    )
    assert "times as fast as NumPy" in words[words.index("In short") :]


@pytest.mark.parametrize(
    ("one", "two", "way"), [(1, 2, harness.SINGLE), (2, 1, ""), (1, None, harness.SINGLE), (None, 1, "")]
)
def test_numpy_counts_with_the_threads_that_suit_it(one, two, way):
    def worker(seconds):
        answer = {"failed": "no"} if seconds is None else {"seconds": seconds, "way": ""}
        return SimpleNamespace(broken=False, ask=lambda do, **_: dict(answer))

    workers = {"numpy": worker(two), f"numpy {harness.SINGLE}": worker(one)}
    problem = MaskedProblem(SMALL, "plain", "float32")
    found = harness.compare(workers, problem, FULL._replace(rounds=1), 0.0)
    assert found == {"numpy": {"seconds": 1, "way": way, "rounds": [1]}}


def made_up(*rows, full=False, busy=False):
    """A report of rows of seconds, in float32, of 1e9 operations on a CPU that makes so many a second."""
    engines = [{name: {"seconds": x, "error": 0.0} for name, x in row.items() if x} for row in rows]
    engines[-1] |= {name: {"unsupported": "no"} for name, x in rows[-1].items() if not x}
    row = {
        "section": "no mask, float32",
        "variant": "plain",
        "dtype": "float32",
        "unit": "flops",
        "work": 1e9,
    }
    names = ("first", "second")
    return {
        "command": "test", "suite": "attention", "full": full, "environment": {}, "seed": 0, "threads": 2,
        "machine": {"cpu": "cpu", "system": "system"}, "shapes": "numbers", "missing": ["jax"],
        "config": {"version": "1", "isa": "avx2", "compiler": "gcc", "why_numpy": None},
        "engines": {name: {"version": "1", "what": name} for name in engines[0]},
        "limits": {"float32": {"flops": 1e9, "bytes": 1e9}}, "cpu_share": 0.5 if busy else 1.0,
        "rows": [{**row, "shape": {"name": n}, "engines": x} for n, x in zip(names, engines, strict=True)],
        "left_out": [],
    }  # fmt: skip


def test_the_table_of_ratios():
    """Two engines in one runtime count as the faster one."""
    first = {"fastattn": 2, "fallback": 20, "numpy": 8, "ort": 5, "ort-mha": 3}
    rows = first, {"fastattn": 1, "fallback": 9, "numpy": 6, "ort": 0.5, "ort-mha": None}
    words, whole = (" ".join(text(made_up(*rows, full=full)).split()) for full in (False, True))
    for said in (
        "no mask, float32 fallback NumPy onnxruntime time speed of limit",
        "first 10.0x 4.00x 1.50x 2.00 s 0 GFLOP/s 50%", "second 9.00x 6.00x 0.50x 1.00 s 1 GFLOP/s 100%",
        "In short, fastattn in float32 is 5.0 times as fast as NumPy and 1.0 times as fast as the fastest "
        "other library (slower in 1 of 2 rows), and reaches 75% of what the CPU can compute.",
        "bench/README.md says how to install",
    ):  # fmt: skip
        assert said in words
    assert "no mask, float32 fallback numpy ort ort-mha time speed of limit" in whole
    assert "ort-mha unsupported: no (no mask second)" in whole
    assert not [said for said in ("unsupported", "pip install", "BUSY MACHINE") if said in words]
    busy = text(made_up(*rows, busy=True))
    assert "BUSY MACHINE" in busy
    assert "In short" not in busy


def test_a_result_that_is_wrong_has_no_time(measured, monkeypatch):
    problem = LayerProblem(TINY_LAYERS[0], "plain", "float32", 3)
    rows, want = problem.reference()
    monkeypatch.setattr(LayerProblem, "reference", lambda self: (rows, want + 1))
    row = measured("layers", {"layer": [problem]})["rows"][0]
    assert all("wrong result, off by 1" in answer["failed"] for answer in row["engines"].values())


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("full", [False, True])
def test_plans(suite, full, tmp_path):
    """Every problem reaches a worker as it is, has work to do, and is of a type that the suite has."""
    for problems in SUITES[suite].plan(Request(None, full, 5, tmp_path)).values():
        assert problems
        for problem in problems:
            assert pickle.loads(pickle.dumps(problem)) == problem
            assert problem.dtype in SUITES[suite].dtypes
            if suite not in ("models", "embeddings", "flash"):  # whose files would have to be made
                assert problem.work > 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("suite", "dtype"), [("attention", "int8"), ("layers", "float64"), ("models", "float16")]
)
def test_a_type_that_a_suite_lacks_is_refused(monkeypatch, capsys, suite, dtype):
    monkeypatch.setattr("sys.argv", ["bench", suite, "--dtype", dtype])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert f"{suite} has no {dtype}" in capsys.readouterr().err


def test_the_minute_is_part_of_the_suite():
    """Both have equal problems, in one order."""
    sections = SUITES["attention"].plan(Request(full=False))
    rows, own = ({title: [x.name for x in y] for title, y in z.items()} for z in (sections, minute.plan()))
    assert rows == own


def test_rows_are_chosen_by_title_and_name(monkeypatch, capsys):
    sections = SUITES["attention"].plan(Request(full=True))
    assert list(chosen(sections, "sliding")) == ["structural mask, sliding_window, float32"]
    (plain,) = chosen(SUITES["variants"].plan(Request(full=False)), "plain").values()
    assert [problem.variant for problem in plain] == ["plain"]
    monkeypatch.setattr("sys.argv", ["bench", "variants", "--seconds", "1", "--only", "nosuch"])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    said = "--only nosuch is in no row; there are\n  1,8,2048,2048,64, float32: plain;"
    assert said in capsys.readouterr().err
