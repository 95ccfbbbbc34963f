"""Ranges of maps' inputs, found over texts: what they are, where they are kept, and what is refused."""

import json

import numpy as np
import pytest
import tiny_models as tiny
from implementations import COMPILED, forced
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiny_routes import write_router
from tiny_tokenizers import write_byte_tokenizer, write_tokenizer

from fastattn import models
from fastattn._engine.steps import LinearStep
from fastattn.models import ModelError
from fastattn.models._input_ranges import ranges

NARROW = {"weights_dtype": "int8", "activations": "int8"}
TEXTS = ["the thin 123 in the", "in the 12 12 the thin", "thin", "the in 1"]
KEY = "fastattn.input_ranges"


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


def header_of(folder):
    with safe_open(folder / "model.safetensors", "numpy") as file:
        return file.metadata()


def with_header(folder, text):
    """Write the folder's weights again, with this text as ranges."""
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", {KEY: text})


def test_what_is_beyond_is_cut(folder):
    model, ids = models.load(folder, calibrate=["thin"], **NARROW), some_ids()
    with_header(folder, json.dumps(dict.fromkeys(ranges(model), (0.0, 1e-3))))
    cut = models.load(folder, **NARROW)(ids)
    assert np.isfinite(cut).all()
    assert np.abs(cut - model(ids)).max() > 0.1


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_folder_keeps_them(kind, tmp_path):
    folder, saved, ids = folder_of(tmp_path / "model", kind), tmp_path / "saved", some_ids()
    model, plain = models.load(folder, calibrate=TEXTS, **NARROW), models.load(folder, **NARROW)
    assert repr(model).removesuffix(">") == repr(plain).removesuffix(">") + " by known ranges"
    models.save(model, saved)
    read = models.load(saved, **NARROW)
    assert repr(read) == repr(model)
    np.testing.assert_array_equal(read(ids), model(ids))
    assert (
        ranges(read) == ranges(model) == {n: tuple(x) for n, x in json.loads(header_of(saved)[KEY]).items()}
    )
    assert not np.array_equal(read(ids), plain(ids))
    assert ranges(models.load(saved, calibrate=TEXTS[:1], **NARROW)) != ranges(read)
    np.testing.assert_array_equal(models.load(saved, calibrate=False, **NARROW)(ids), plain(ids))
    exact = models.load(saved)
    np.testing.assert_array_equal(exact(ids), models.load(folder)(ids))
    models.save(exact, saved)  # without them
    np.testing.assert_array_equal(models.load(saved, **NARROW)(ids), plain(ids))


def test_weights_in_other_types_take_them(tmp_path):
    folder = folder_of(tmp_path, "bert", hidden_size=64, num_attention_heads=2)
    model = models.load(folder, calibrate=TEXTS, **NARROW)
    models.save(model, folder)
    for kind in ("int8", "q8", "uint4"):
        for dtype in ("float32", "bfloat16"):
            read = models.load(folder, dtype=dtype, weights_dtype=kind, activations="int8")
            assert ranges(read) == ranges(model)
            assert np.isfinite(read(some_ids()).astype(np.float32)).all()


def test_a_gguf_file_has_no_place_for_them(tmp_path):
    """Neither as the target, nor as the origin, whose names a folder does not have."""
    tiny.write(tmp_path / "model", "llama", vocab_size=256)
    write_byte_tokenizer(tmp_path / "model")
    models.save(models.load(tmp_path / "model"), tmp_path / "x.gguf", dtype="q8_0")
    refused = {
        tmp_path / "y.gguf": models.load(tmp_path / "model", calibrate=TEXTS, **NARROW),
        tmp_path / "y": models.load(
            tmp_path / "x.gguf", calibrate=TEXTS, weights_dtype="int8", activations="int8"
        ),
    }
    for target, model in refused.items():
        with pytest.raises(ModelError, match=r"^save\(\): model has known ranges of inputs, (for|by)"):
            models.save(model, target)
        assert not target.exists()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"calibrate": TEXTS},
            ValueError,
            "calibrate is given with activations None; expected activations='int8'",
        ),
        ({"calibrate": "the", **NARROW}, TypeError, "calibrate is of type str; expected several"),
        ({"calibrate": ["the", 3], **NARROW}, TypeError, r"calibrate\[1\] is 3; expected a string"),
        ({"calibrate": [], **NARROW}, ValueError, "calibrate has no text with a token"),
    ],
)
def test_what_is_refused(given, error, message, folder):
    with pytest.raises(error, match=rf"^load\(\): {message}"):
        models.load(folder, **given)


def test_inputs_that_are_not_finite(tmp_path):
    tensors = tiny.tensors("bert", tiny.CONFIGS["bert"])
    tensors["encoder.layer.0.attention.output.LayerNorm.weight"] *= np.float32(1e25)
    tensors["encoder.layer.0.intermediate.dense.weight"] *= np.float32(1e25)
    tiny.write(tmp_path, "bert", tensors)
    write_tokenizer(tmp_path)
    message = r"^load\(\): calibrate gives 'encoder.layer.\d\.\S+' inputs that are not finite"
    with np.errstate(all="ignore"), pytest.raises(ModelError, match=message):
        models.load(tmp_path, calibrate=TEXTS, **NARROW)


def test_models_with_routes_have_none(tmp_path):
    write_router(tmp_path)
    with pytest.raises(ModelError, match=r"^load\(\): calibrate is given for a \w+; expected None, or"):
        models.load(tmp_path, calibrate=TEXTS, **NARROW)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found | {"x": [1, 0]}, r"'x' is \[1, 0\]; expected \(low, high\) with low <= high"),
        (lambda found: found | {"x": [1]}, r"'x' is \[1\]; expected two numbers"),
        (lambda found: found | {"x": 1}, "'x' is 1; expected two numbers"),
        (lambda found: found | {"x": [0, float("inf")]}, "'x' is inf; expected a number that is finite"),
        (
            lambda found: dict(sorted(found.items())[1:]),
            "has no 'encoder.layer.0.att",
        ),
        (lambda found: list(found), "'list' object has no attribute"),
    ],
)
def test_malformed_headers(change, message, folder):
    found = ranges(models.load(folder, calibrate=TEXTS, **NARROW))
    with_header(folder, json.dumps(change(found)))
    with pytest.raises(ModelError, match=f"{KEY}:? .*{message}"):
        models.load(folder, **NARROW)
    with_header(folder, "{")
    with pytest.raises(ModelError, match=f"{KEY}: Expecting"):
        models.load(folder, **NARROW)
    models.load(folder, weights_dtype="int8")  # does not read it
