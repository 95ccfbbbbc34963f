"""Models that are saved give the same results from their new folders."""

import json

import numpy as np
import pytest
import tiny_gguf
import tiny_gpt_oss
import tiny_models as tiny
from model_folders import change_config, write_modules, write_parts
from tiny_tokenizers import write_tokenizer

from fastattn import models
from fastattn.models import ModelError

IDS = np.arange(40).reshape(2, 20) % 29


def loaded(folder):
    tiny.write(folder, "llama")
    return models.load(folder)


@pytest.mark.parametrize("kind", ["llama", "gemma3-causal"])
def test_a_gguf_file_becomes_no_folder(kind, tmp_path):
    tiny_gguf.write(tmp_path / "model.gguf", kind, "F32")
    with pytest.raises(ModelError, match=r"holds a .* with quantized or converted tensors"):
        models.save(models.load(tmp_path / "model.gguf"), tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("kind", [*tiny.DECODERS, *tiny.ENCODERS])
def test_a_folder_of_any_family(kind, tmp_path):
    tiny.write(tmp_path / "model", kind)
    model = models.load(tmp_path / "model")
    models.save(model, tmp_path / "saved")
    again = models.load(tmp_path / "saved")
    np.testing.assert_array_equal(again(IDS), model(IDS))
    expected = model.state_dict()
    state = again.state_dict()
    assert state.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(state[name], x)
    changed = model.with_state_dict({name: 1.5 * x for name, x in expected.items()})
    models.save(changed, tmp_path / "saved")  # over the one that is there
    np.testing.assert_array_equal(models.load(tmp_path / "saved")(IDS), changed(IDS))


def test_a_folder_in_another_type_and_from_parts(tmp_path):
    (tmp_path / "model").mkdir()
    write_parts(tmp_path / "model", "llama")
    change_config(tmp_path / "model", torch_dtype="float32")
    model = models.load(tmp_path / "model")
    for dtype in ("float16", "bfloat16"):
        models.save(model, tmp_path / dtype, dtype=dtype)
        rounded = {n: x.astype(dtype).astype(np.float32) for n, x in model.state_dict().items()}
        again = models.load(tmp_path / dtype)
        np.testing.assert_array_equal(again(IDS), model.with_state_dict(rounded)(IDS))
        assert json.loads((tmp_path / dtype / "config.json").read_text())["torch_dtype"] == dtype
        assert not (tmp_path / dtype / "model.safetensors.index.json").exists()
    models.save(model, tmp_path / "model")  # over its own folder
    np.testing.assert_array_equal(models.load(tmp_path / "model")(IDS), model(IDS))


def test_modules_and_tokenizers_come_along(tmp_path):
    folder = tmp_path / "model"
    tiny.write(folder, "bert")
    write_tokenizer(folder)
    write_modules(folder, ("Normalize", None))
    (folder / "pytorch_model.bin").write_bytes(b"x")
    model = models.load(folder)
    models.save(model, tmp_path / "saved")
    texts = ["the cat sat", "a dog"]
    np.testing.assert_array_equal(models.load(tmp_path / "saved").encode(texts), model.encode(texts))
    assert not (tmp_path / "saved/pytorch_model.bin").exists()


def test_arguments_that_are_refused(tmp_path):
    model = loaded(tmp_path / "model")
    state = model.state_dict()
    state["model.layers.1.mlp.up_proj.weight"][3, 5] = 1e30
    big = {"model": model.with_state_dict(state), "dtype": "float16"}
    for wrong, error, message in (
        ({"model": 5}, TypeError, "model is of type int; expected a model of load"),
        ({"path": 5}, TypeError, "path is of type int; expected a path"),
        ({"dtype": "q4_k"}, ValueError, "dtype is 'q4_k'; expected one of float32, float16, bfloat16$"),
        (big, ValueError, "'model.layers.1.mlp.up_proj.weight' has values that are not finite as float16"),
    ):
        given = {"model": model, "path": tmp_path / "x", **wrong}
        with pytest.raises(error, match=rf"^save\(\): {message}"):
            models.save(given.pop("model"), given.pop("path"), **given)
    assert [x.name for x in tmp_path.iterdir()] == ["model"]


def test_weights_in_any_type_are_written_as_they_were_read(tmp_path):
    """Not as they are packed."""
    loaded(tmp_path / "model")
    model = models.load(tmp_path / "model", dtype="bfloat16", weights_dtype="int8")
    models.save(model, tmp_path / "saved")
    np.testing.assert_array_equal(models.load(tmp_path / "saved")(IDS), models.load(tmp_path / "model")(IDS))


def test_blocks_of_a_folder_are_not_made_floats(tmp_path):
    """Its config.json would say otherwise; nothing is written, in its own place either."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "quantization_config": {"quant_method": "mxfp4"}}
    blocks, _ = tiny_gpt_oss.in_mxfp4(tiny.tensors("gpt_oss", {**tiny.CONFIGS["gpt_oss"], **sizes}))
    tiny.write(tmp_path, "gpt_oss", blocks, **sizes)
    model, before = models.load(tmp_path), (tmp_path / "model.safetensors").read_bytes()
    for target in (tmp_path, tmp_path / "other"):
        with pytest.raises(ModelError, match="holds a gpt_oss with quantized or converted tensors"):
            models.save(model, target)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert not (tmp_path / "other").exists()
