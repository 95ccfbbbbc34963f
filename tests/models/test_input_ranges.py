"""Ranges of maps' inputs, found over texts: what they are, where they are kept, and what is refused."""

import json

import numpy as np
import pytest
import tiny_models as tiny
from implementations import COMPILED, forced
from tiny_tokenizers import write_tokenizer

from fastattn import models
from fastattn._engine.steps import LinearStep
from fastattn.models import ModelError
from fastattn.models._input_ranges import ranges

NARROW = {"weights_dtype": "int8", "activations": "int8"}
TEXTS = ["the thin 123 in the", "in the 12 12 the thin", "thin", "the in 1"]
FILE = "input_ranges.json"


def folder_of(path, kind="bert", **changes):
    tiny.write(path, kind, **changes)
    write_tokenizer(path)
    return path


def some_ids(seed=0):
    return np.random.default_rng(seed).integers(2, tiny.VOCAB, (3, 12))


@pytest.fixture(name="folder")
def _folder(tmp_path):
    return folder_of(tmp_path / "model")


def test_ranges_are_those_of_the_texts(tmp_path):
    """First layer, by NumPy; queries, keys and values are one map."""
    model = models.load(folder_of(tmp_path, "llama"), calibrate=iter(TEXTS), **NARROW)
    state, found = model.state_dict(), ranges(model)
    x = state["model.embed_tokens.weight"][np.concatenate(model.text.encode(TEXTS))]
    x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + model.program.steps[0].eps)
    x = x * state["model.layers.0.input_layernorm.weight"]
    for part in "qkv":
        got = found[f"model.layers.0.self_attn.{part}_proj.weight"]
        np.testing.assert_allclose(got, [x.min(), x.max()], rtol=1e-5)
    assert found.keys() == model.origin.parameters.maps()


@pytest.mark.parametrize("kind", ["bert", "modernbert", "t5", "llama", "gemma3-causal"])
def test_results_are_near_those_without_rounding(kind, tmp_path):
    folder, ids = folder_of(tmp_path, kind), some_ids()
    model = models.load(folder, calibrate=TEXTS, **NARROW)
    steps = [step for step in model.program.steps if isinstance(step, LinearStep)]
    assert all(step.activations.shape == (2,) and step.activations.dtype == np.float32 for step in steps)
    exact, rows = (models.load(folder, **how)(ids) for how in ({"weights_dtype": "int8"}, NARROW))
    error, usual = (np.abs(got - exact).mean() for got in (model(ids), rows))
    assert 0 < error < 20 * usual
    if COMPILED:
        with forced("numpy"):
            assert np.abs(model(ids) - exact).mean() < 1.2 * error


def test_what_is_beyond_is_cut(folder):
    """Ranges of a text of one token: large inputs no longer count."""
    model = models.load(folder, calibrate=["thin"], **NARROW)
    changed = dict.fromkeys(ranges(model), (0.0, 0.001))
    models.save(model, folder)
    (folder / FILE).write_text(json.dumps(changed))
    ids = some_ids()
    cut, whole = (models.load(folder, **NARROW)(ids) if i == 0 else model(ids) for i in range(2))
    assert np.isfinite(cut).all()
    assert np.abs(cut - whole).max() > 0.1


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_folder_keeps_them(kind, tmp_path):
    folder, saved, ids = folder_of(tmp_path / "model", kind), tmp_path / "saved", some_ids()
    model, plain = models.load(folder, calibrate=TEXTS, **NARROW), models.load(folder, **NARROW)
    models.save(model, saved)
    read = models.load(saved, **NARROW)
    np.testing.assert_array_equal(read(ids), model(ids))
    assert (
        ranges(read)
        == ranges(model)
        == {n: tuple(x) for n, x in json.loads((saved / FILE).read_text()).items()}
    )
    assert not np.array_equal(read(ids), plain(ids))
    again = models.load(saved, calibrate=TEXTS[:1], **NARROW)
    assert ranges(again) != ranges(read)
    exact = models.load(saved)
    np.testing.assert_array_equal(exact(ids), models.load(folder)(ids))
    for target in (saved, tmp_path / "third"):  # over a folder that has them, and beside it
        models.save(exact, target)
        assert not (target / FILE).exists()
    np.testing.assert_array_equal(models.load(saved, **NARROW)(ids), plain(ids))


def test_a_gguf_file_has_no_place_for_them(tmp_path):
    model = models.load(folder_of(tmp_path / "model", "llama"), calibrate=TEXTS, **NARROW)
    with pytest.raises(ModelError, match=r"^save\(\): model has ranges of inputs, which a GGUF file has no"):
        models.save(model, tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"calibrate": TEXTS},
            ValueError,
            "calibrate is given with activations None; expected activations='int8'",
        ),
        ({"calibrate": "the", **NARROW}, TypeError, "calibrate is of type str; expected several"),
        ({"calibrate": ["the", 3], **NARROW}, TypeError, "calibrate has one of type int; expected strings"),
        ({"calibrate": [], **NARROW}, ValueError, "calibrate has no text with a token"),
    ],
)
def test_what_is_refused(given, error, message, folder):
    with pytest.raises(error, match=rf"^load\(\): {message}"):
        models.load(folder, **given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found | {"x": [1, 0]}, r"'x' is \[1, 0\]; expected \(low, high\) with low <= high"),
        (lambda found: found | {"x": [1]}, r"'x' is \[1\]; expected two numbers"),
        (lambda found: found | {"x": 1}, "'x' is 1; expected two numbers"),
        (lambda found: found | {"x": [0, float("inf")]}, "'x' is inf; expected a number that is finite"),
        (
            lambda found: dict(sorted(found.items())[1:]),
            "has no 'encoder.layer.0.attention.output.dense.weight'",
        ),
        (lambda found: list(found), "holds a list; expected"),
    ],
)
def test_malformed_files(change, message, folder):
    models.save(models.load(folder, calibrate=TEXTS, **NARROW), folder)
    (folder / FILE).write_text(json.dumps(change(json.loads((folder / FILE).read_text()))))
    with pytest.raises(ModelError, match=f"{FILE}:? .*{message}"):
        models.load(folder, **NARROW)
    models.load(folder, weights_dtype="int8")  # does not read it
