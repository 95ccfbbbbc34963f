"""Files that a model's folder may hold, and errors about a folder that makes up no model."""

import base64
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tiny_models as tiny
from implementations import COMPILED, child_environment
from model_folders import change_config, refused, write_modules, write_parts
from tiny_models import CONFIGS, VOCAB

from fastattn import models
from fastattn.models import ModelError, _files, _tensors

IDS = [[3, 1, 4, 1, 5, 9, 2, 6]]
KINDS = list(CONFIGS)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_tensors_in_several_files(kind, tmp_path):
    tiny.write(tmp_path, kind)
    expected = models.load(tmp_path)(IDS)
    write_parts(tmp_path, kind)
    np.testing.assert_array_equal(models.load(tmp_path)(IDS), expected)


def test_an_index_that_was_left_over(tmp_path):
    """The one file counts, as in transformers, and not the index."""
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    tiny.write(tmp_path, "bert")
    models.load(tmp_path)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_16_bit_tensors_are_those_numbers_in_float32(kind, dtype, tmp_path):
    rounded = {name: x.astype(dtype) for name, x in tiny.tensors(kind, CONFIGS[kind]).items()}
    tiny.write(tmp_path, kind, {name: x.astype(np.float32) for name, x in rounded.items()})
    expected = models.load(tmp_path)(IDS)
    tiny.write(tmp_path, kind, rounded)
    got = models.load(tmp_path)(IDS)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, expected)


PREFIXES = {
    **dict.fromkeys(("bert", "nomic_bert"), "bert."), "modernbert": "model.", "gpt2": "transformer.",
    "deberta-v2": "deberta.", "llama": None,
    **{kind: f"{kind}." for kind in ("roberta", "distilbert", "mpnet", "albert", "new")},
}  # fmt: skip


@pytest.mark.parametrize(("kind", "prefix"), PREFIXES.items())
def test_names_with_and_without_the_base_models_prefix(kind, prefix, tmp_path):
    weights = tiny.write(tmp_path, kind)
    expected = models.load(tmp_path)(IDS)
    if prefix is None:
        renamed = {name.removeprefix("model."): x for name, x in weights.items()}
    else:
        renamed = {prefix + name: x for name, x in weights.items()}
    tiny.write(tmp_path, kind, {**renamed, "classifier.weight": np.ones((2, 24), np.float32)})
    np.testing.assert_array_equal(models.load(tmp_path)(IDS), expected)


@pytest.mark.parametrize("added", [0, 1])
def test_an_output_layer_beside_the_table_that_it_is_tied_to(added, tmp_path, monkeypatch):
    """It is another one where a single number differs, whatever config.json says."""
    monkeypatch.setattr(_tensors, "_PIECE", 100)
    weights = tiny.tensors("qwen2", CONFIGS["qwen2"])
    weights = {name: x.astype(ml_dtypes.bfloat16) for name, x in weights.items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    weights["lm_head.weight"][-1, -1] += added
    for tied in (True, False):
        tiny.write(tmp_path / str(tied), "qwen2", weights, tie_word_embeddings=tied)
    got, expected = (models.load(tmp_path / str(tied)) for tied in (True, False))
    np.testing.assert_array_equal(got(IDS), expected(IDS))
    assert ("lm_head.weight" in got.state_dict()) == bool(added)


def test_norms_by_their_old_names(tmp_path):
    """bert-base-uncased has them."""
    weights = tiny.write(tmp_path, "bert")
    expected = models.load(tmp_path)(IDS)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, name in old.items():
        weights = {key.replace(new, name): x for key, x in weights.items()}
    tiny.write(tmp_path, "bert", {f"bert.{key}": x for key, x in weights.items()})
    np.testing.assert_array_equal(models.load(tmp_path)(IDS), expected)


def test_two_tensors_of_one_name(tmp_path):
    for kind, first, second in (
        ("bert", "bert.embeddings.LayerNorm.bias", "embeddings.LayerNorm.bias"),
        ("bert", "embeddings.LayerNorm.bias", "embeddings.LayerNorm.beta"),
        ("llama", "model.norm.weight", "norm.weight"),
    ):
        weights = tiny.tensors(kind, CONFIGS[kind])
        tiny.write(tmp_path, kind, {**weights, **dict.fromkeys((first, second), np.ones(24, np.float32))})
        refused(tmp_path, repr(first), repr(second), "name one tensor; expected one of them")


@pytest.mark.parametrize("kind", ["bert", "llama", "qwen2"])
def test_tensors_in_both_16_bit_types(kind, tmp_path):
    """Tensors that become one weight are widened to a common type."""
    types = (np.float16, ml_dtypes.bfloat16, np.float32)
    drawn = tiny.tensors(kind, CONFIGS[kind])
    mixed = {name: x.astype(types[i % 3]) for i, (name, x) in enumerate(drawn.items())}
    tiny.write(tmp_path, kind, {name: x.astype(np.float32) for name, x in mixed.items()})
    expected = models.load(tmp_path)(IDS)
    tiny.write(tmp_path, kind, mixed)
    np.testing.assert_array_equal(models.load(tmp_path)(IDS), expected)


def test_tensors_that_a_model_has_no_use_for_may_be_there(tmp_path):
    for kind, name in (
        ("bert", "embeddings.position_ids"),
        ("gpt2", "h.0.attn.bias"),
        ("gpt2", "h.1.attn.masked_bias"),
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("qwen3_5_text", "mtp.fc.weight"),
        ("qwen3_next", "mtp.layers.0.mlp.gate.weight"),
    ):
        weights = tiny.tensors(kind, CONFIGS[kind])
        tiny.write(tmp_path, kind, {**weights, name: np.arange(4)})
        assert name not in models.load(tmp_path).state_dict()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_old_and_new_ways_to_say_rope(kind, tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 16
    results = []
    for config in (
        {"rope_theta": 100.0, "rope_scaling": scaling},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 100.0, **scaling}},
        {"rope_theta": 100.0, "rope_scaling": {**scaling, "type": "llama3"}, "rope_parameters": None},
        {"rope_theta": 100.0, "rope_scaling": {**scaling, "finetuned": True}},
        {"rope_theta": 100.0},
    ):
        tiny.write(tmp_path, kind)
        change_config(tmp_path, **config)
        results.append(models.load(tmp_path)(IDS))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])
    np.testing.assert_array_equal(results[0], results[3])
    assert np.abs(results[0] - results[4]).max() > 0.01


def test_windows_by_layer(tmp_path):
    """`layer_types` and `max_window_layers` say the same; without `use_sliding_window` neither counts."""
    results = []
    for config in (
        {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
        {"use_sliding_window": True, "max_window_layers": 1},
        {"use_sliding_window": False, "max_window_layers": 1},
        {},
    ):
        tiny.write(tmp_path, "qwen2", sliding_window=3, **config)
        results.append(models.load(tmp_path)(IDS))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[2], results[3])
    np.testing.assert_array_equal(results[0][:, :3], results[2][:, :3])
    assert np.abs(results[0] - results[2])[:, 3:].max() > 0.01


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_which_ids_end_a_text(kind, tmp_path):
    tiny.write(tmp_path, kind)
    assert models.load(tmp_path).stop == ()
    change_config(tmp_path, eos_token_id=7)
    assert models.load(tmp_path).stop == (7,)
    path = tmp_path / "generation_config.json"
    path.write_text('{"eos_token_id": [8, 9]}')
    assert models.load(tmp_path).stop == (8, 9)
    path.write_text('{"temperature": 0.6}')
    assert models.load(tmp_path).stop == (7,)
    path.write_text('{"eos_token_id": "end"}')
    refused(tmp_path, f"{path}: 'eos_token_id' is 'end'; expected an id or a list of ids")


def of_expert(name):
    """The name in errors of the first part of a tensor that has all experts; others stay as they are."""
    name = re.sub(r"experts\.mlp\.w([12])$", r"experts.0.mlp.fc\1.weight", name)
    return re.sub(
        r"experts\.(\w+_proj)(_bias)?$", lambda x: f"experts.0.{x[1]}.{'bias' if x[2] else 'weight'}", name
    )


@pytest.mark.parametrize("kind", KINDS)
def test_each_tensor_is_needed(kind, tmp_path):
    weights = tiny.tensors(kind, CONFIGS[kind])
    for name in weights:
        tiny.write(tmp_path, kind, {other: x for other, x in weights.items() if other != name})
        missing = f"{of_expert(name)!r} is missing"
        refused(tmp_path, f"{tmp_path / 'model.safetensors'} does not fit config.json: {missing}")


@pytest.mark.parametrize("kind", KINDS)
def test_each_tensor_has_its_shape(kind, tmp_path):
    weights = tiny.tensors(kind, CONFIGS[kind])
    for name, x in weights.items():
        tiny.write(tmp_path, kind, {**weights, name: np.zeros((*x.shape[:-1], x.shape[-1] + 1), np.float32)})
        if of_expert(name) != name:
            inner = CONFIGS[kind].get("n_inner")  # Nomic's experts are rows of a matrix
            name, x = f"{name}.0", x[0] if inner is None else x[:inner]
        refused(tmp_path, f"{name!r} has shape", f"expected {x.shape}")


def test_all_that_is_wrong_is_in_one_error(tmp_path):
    weights = tiny.tensors("llama", CONFIGS["llama"])
    del weights["lm_head.weight"]
    weights["model.norm.weight"] = weights["model.norm.weight"][:3]
    weights["model.layers.1.mlp.up_proj.weight"] = np.zeros((40, 24), np.int8)
    weights["model.layers.1.self_attn.q_proj.bias"] = np.zeros(24, np.float32)
    tiny.write(tmp_path, "llama", weights)
    refused(
        tmp_path,
        "'lm_head.weight' is missing",
        "'model.norm.weight' has shape (3,); expected (24,)",
        "'model.layers.1.mlp.up_proj.weight' has dtype I8; expected one of F32, F16, BF16",
        "'model.layers.1.self_attn.q_proj.bias' is not known",
    )
    some = {"lm_head.weight": np.zeros((VOCAB, 24), np.float32), "score.weight": np.zeros(3, np.float32)}
    tiny.write(tmp_path, "llama", some)
    message = refused(tmp_path, "; and 14 more")
    assert message.count("is missing") == 6


@pytest.mark.parametrize("kind", ["bert", "deberta-v2", "modernbert", "llama"])
def test_blocks_of_a_model_without_any_are_not_known(kind, tmp_path):
    tiny.write(tmp_path, kind)
    change_config(tmp_path, num_hidden_layers=0)
    refused(tmp_path, "layers.0." if kind in ("modernbert", "llama") else "encoder.layer.0.", "is not known")


def test_files_of_weights_that_are_missing(tmp_path):
    tiny.write(tmp_path, "bert")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    refused(tmp_path, "model.safetensors is missing", "there is pytorch_model.bin; transformers converts")
    (tmp_path / "pytorch_model.bin").unlink()
    refused(tmp_path, "model.safetensors is missing", "no other file of weights")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    refused(
        tmp_path, "model.safetensors is missing", "there is model.gguf; a GGUF file is loaded by its own path"
    )
    refused(tmp_path / "model.gguf", "model.gguf is truncated")
    refused(str(tmp_path / "not-there.gguf"), "not-there.gguf does not exist", "or a GGUF file")


def test_a_truncated_file(tmp_path):
    """The file is cut at every length of its header, and within the tensors."""
    tiny.write(tmp_path, "bert")
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for length in [*range(0, 12), *range(12, header, 97), header, header + 100, len(whole) - 1]:
        path.write_bytes(whole[:length])
        refused(tmp_path, f"{path} is truncated or no safetensors file")


SHRINKS = """
import os, sys
from fastattn import models
from fastattn.models import _tensors

def before(function):
    def call(*args, **options):
        os.truncate(sys.argv[1] + "/model.safetensors", int(sys.argv[2]))
        return function(*args, **options)
    return call

for name in ("pack", "whole"):
    setattr(_tensors.Tensors, name, before(getattr(_tensors.Tensors, name)))
try:
    models.load(sys.argv[1])
except models.ModelError as error:
    print(error)
"""


@pytest.mark.parametrize("share", [0, 0.3, 0.99])
def test_a_file_that_shrinks_while_it_is_read(share, tmp_path):
    """Where a file is mapped, to touch what was cut off ends the process."""
    tiny.write(tmp_path, "bert")
    path = tmp_path / "model.safetensors"
    length = int(share * path.stat().st_size)
    command = [sys.executable, "-c", SHRINKS, tmp_path, str(length)]
    env = child_environment() if COMPILED else child_environment(FASTATTN_BACKEND="numpy")
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith(f"{path} has become shorter, and has no byte ")
    assert run.stdout.endswith("; expected it to stay as it was when it was opened\n")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "modernbert", "t5"])
def test_a_tensor_that_is_read_in_pieces(kind, dtype, tmp_path, monkeypatch, implementation):
    """Each has the bits of one that is read whole, and the first one that is not finite is named."""
    changes = {"vocab_size": 200} if kind in ("bert", "llama") else {}
    weights = tiny.tensors(kind, {**CONFIGS[kind], **changes})
    tiny.write(tmp_path, kind, weights, **changes)
    expected = models.load(tmp_path, weights_dtype=dtype)(IDS)
    monkeypatch.setattr(_tensors, "_PIECE", 64)  # bytes: a panel at a time
    np.testing.assert_array_equal(models.load(tmp_path, weights_dtype=dtype)(IDS), expected)
    name = max(weights, key=lambda name: weights[name].size)
    weights[name][-1, -1] = np.nan
    tiny.write(tmp_path, kind, weights, **changes)
    refused(tmp_path, f"{name!r} has values that are not finite as {dtype}", weights_dtype=dtype)


def test_threads_take_turns_where_a_file_has_one_place(tmp_path, monkeypatch):
    """Files of Windows are such."""
    tiny.write(tmp_path, "bert", vocab_size=200)
    expected = models.load(tmp_path)(IDS)
    monkeypatch.delattr("os.preadv", raising=False)
    monkeypatch.setattr(_tensors, "_PIECE", 64)
    np.testing.assert_array_equal(models.load(tmp_path)(IDS), expected)


def test_a_file_that_git_lfs_has_not_fetched(tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 438007537\n"
    tiny.write(tmp_path, "bert")
    (tmp_path / "tokenizer.json").write_text(pointer)
    with pytest.raises(ModelError, match=r"tokenizer.json is a git-lfs pointer"):
        models.load(tmp_path).encode(["one"])
    (tmp_path / "model.safetensors").write_text(pointer)
    refused(tmp_path, "model.safetensors is a git-lfs pointer", "git lfs pull")


def test_a_malformed_file(tmp_path):
    tiny.write(tmp_path, "bert")
    path = tmp_path / "model.safetensors"
    for data in (b"\x80\x02}q\x00.", b"GGUF" + bytes(100), bytes(1000)):
        path.write_bytes(data)
        refused(tmp_path, str(path))


def test_a_malformed_index(tmp_path):
    index = write_parts(tmp_path, "gpt2")
    path = tmp_path / "model.safetensors.index.json"

    def changed(**places):
        path.write_text(json.dumps({"weight_map": {**index["weight_map"], **places}}))

    path.write_text("{")
    refused(tmp_path, f"{path} is not JSON")
    path.write_text("{}")
    refused(tmp_path, f"{path}: 'weight_map' is no table of file names")
    changed(**{"wte.weight": 3})
    refused(tmp_path, f"{path}: 'weight_map' is no table of file names")
    changed(**{"wte.weight": f"{'../' * 99}model.safetensors"})
    refused(
        tmp_path,
        f"{path}: 'weight_map' has '../../../../../../../../../../../.....'; expected a file beside it",
    )
    changed(**{"wte.weight": "../model.safetensors"})
    refused(tmp_path, f"{path}: 'weight_map' has '../model.safetensors'; expected a file beside it")
    changed(**{"wte.weight": "e" * 5000})
    refused(tmp_path, "cannot be read: [Errno")
    (tmp_path / "folder").mkdir()
    changed(**{"wte.weight": "folder"})
    refused(tmp_path, f"{tmp_path / 'folder'} cannot be read: [Errno")
    changed(**{"wte.weight": "elsewhere.safetensors"})
    refused(tmp_path, "elsewhere.safetensors is missing")
    other = next(file for file in index["weight_map"].values() if file != index["weight_map"]["wte.weight"])
    changed(**{"wte.weight": other})
    refused(tmp_path, f"{path}: 'wte.weight' is to be in {other}, and is not there")
    for name in ("a\0b", "\ud800.safetensors", "..", "a/b"):
        changed(**{"wte.weight": name})
        refused(tmp_path, f"{path}: 'weight_map' has {name!r}; expected a file beside it")
    changed()
    (tmp_path / other).write_bytes(b"")
    refused(tmp_path, f"{other} is truncated or no safetensors file")


def test_types_that_are_not_known(tmp_path):
    tiny.write(tmp_path, "bert")
    refused(tmp_path, "load(): dtype is 'float8'; expected one of float32", error=ValueError, dtype="float8")
    refused(tmp_path, "weights_dtype is 'int3'; expected", error=ValueError, weights_dtype="int3")
    refused(tmp_path, "activations is 'int4'; expected int8", error=ValueError, activations="int4")
    exact = "activations is 'int8' for weights in float32; expected weights in int8, q8, int4, uint4, nf4"
    refused(tmp_path, exact, error=ValueError, activations="int8")
    refused(tmp_path, "dtype is None; expected one of float32", error=ValueError, dtype=None)
    refused(tmp_path, "dtype is <class 'numpy.int8'>; expected", error=ValueError, dtype=np.int8)
    refused(tmp_path, "dtype is [1]; expected one of float32", error=ValueError, dtype=[1])
    options = {"dtype": "float64", "weights_dtype": "int8"}
    refused(tmp_path, "expected float64 for dtype float64", error=ValueError, **options)


def test_all_libraries_that_are_missing_are_named_at_once(tmp_path, monkeypatch):
    tiny.write(tmp_path, "bert")
    for package in ("tokenizers", "safetensors"):
        monkeypatch.setitem(sys.modules, package, None)
    refused(tmp_path, "need safetensors, tokenizers: pip install safetensors tokenizers ", error=ImportError)


@pytest.mark.parametrize("package", ["safetensors", "ml_dtypes"])
def test_libraries_that_are_missing(package, tmp_path, monkeypatch):
    weights = tiny.tensors("bert", CONFIGS["bert"])
    tiny.write(tmp_path, "bert", {name: x.astype(ml_dtypes.bfloat16) for name, x in weights.items()})
    monkeypatch.setitem(sys.modules, package, None)
    refused(tmp_path, f"models need {package}: pip install {package}", error=ImportError)


def test_float32_models_do_not_need_ml_dtypes(tmp_path, monkeypatch):
    tiny.write(tmp_path, "bert")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert models.load(tmp_path, weights_dtype="bfloat16")(IDS).shape == (1, 8, 24)


def test_types_may_be_numpys(tmp_path):
    tiny.write(tmp_path, "llama")
    types = {np.float64: "float64", np.dtype("f4"): "float32", ml_dtypes.bfloat16: "bfloat16"}
    for dtype, name in types.items():
        model = models.load(tmp_path, dtype=dtype)
        assert (model.dtype.name, model.weights_dtype) == (name, name)
    assert models.load(tmp_path, weights_dtype=np.int8).weights_dtype == "int8"


def test_models_are_there_without_an_import(python):
    code = """
import sys, fastattn
assert "fastattn.models" not in sys.modules
assert "models" in dir(fastattn)
print(fastattn.models.load.__name__)
try:
    fastattn.nothing
except AttributeError as error:
    print(error)
"""
    done = python(code)
    assert done.stdout == "load\nmodule 'fastattn' has no attribute 'nothing'\n", done.stderr


PEAK = """
import sys
from fastattn import models

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) >> 10 for line in status if line.startswith("VmHWM"))

models.load(sys.argv[1])
before = peak()
models.load(sys.argv[2], weights_dtype="int8")
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says how much memory there was")
def test_loading_holds_what_is_packed_and_one_tensor(tmp_path):
    """The file is not held: 70 MB of maps and a table of 60 become 17 and 60, with one map at a time."""
    changes = {"hidden_size": 512, "vocab_size": 30_000, "intermediate_size": 8192, "num_attention_heads": 8}
    shapes = tiny.shapes("bert", {**CONFIGS["bert"], **changes})
    weights = {name: np.full(shape, 0.01, np.float32) for name, shape in shapes.items()}
    assert 125 < sum(x.nbytes for x in weights.values()) >> 20 < 145
    tiny.write(tmp_path / "large", "bert", weights, **changes)
    tiny.write(tmp_path / "small", "bert")
    command = [sys.executable, "-c", PEAK, tmp_path / "small", tmp_path / "large"]
    env = child_environment() if COMPILED else child_environment(FASTATTN_BACKEND="numpy")
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert int(run.stdout) < 17 + 60 + 17 + 16


def write_growing(folder, **parts):
    """Add steps to tokenizer.json, by its keys."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **parts}))


A = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
TABLE = base64.b64encode(struct.pack("<I", 4) + b"\0\0\0\0" + b"a" * 1000 + b"\0").decode()
CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": TABLE}
TWICE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {},
}


def in_a_row(key, *steps):
    return {"type": "Sequence", key: list(steps)}


MAY_BE_EMPTY = [
    "(?=a)",
    "a*",
    "a|",
    "a{2}?",
    "a{0,2}",
    r"a\K",
    "a(?#)*",
    "a++*",
    r"\b",
    "[[a]]*",
    "[a]?",
    "$",
]


def expressions(regex, count):
    step = {"type": "Replace", "pattern": {"Regex": regex}, "content": "a"}
    return in_a_row("normalizers", *[step] * count)


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": in_a_row("normalizers", A, A, A)},
        {"normalizer": in_a_row("normalizers", A, in_a_row("normalizers", A, A))},
        *({"normalizer": expressions(each, 30)} for each in MAY_BE_EMPTY),
        {"normalizer": in_a_row("normalizers", *[{"type": "Prepend", "prepend": "a" * 1000}, A] * 2)},
        {"normalizer": in_a_row("normalizers", *[CHARSMAP] * 3)},
        {"normalizer": A, "pre_tokenizer": in_a_row("pretokenizers", *[{"type": "ByteLevel"}] * 30)},
        {"post_processor": in_a_row("processors", *[TWICE] * 30)},
        {"decoder": in_a_row("decoders", A, A, A)},
    ],
    ids=["replace", "nested", *MAY_BE_EMPTY, "prepend", "table", "bytes", "template", "decoder"],
)
def test_a_tokenizer_that_multiplies_texts_is_refused(parts, encoder):
    write_growing(encoder, **parts)
    with pytest.raises(ModelError, match=r"tokenizer.json: .* can make a text \d+ times as long; expected"):
        models.load(encoder).encode("a")


@pytest.mark.parametrize("regex", [r"\s+", " {2,}", r"\r\n", r"[^\w ]{1,3}", r"\.+", "a", "é{2}b"])
def test_expressions_that_match_a_character_make_no_text_longer(regex, encoder):
    write_growing(encoder, normalizer=expressions(regex, 30))
    assert len(models.load(encoder).encode("a")) == 24


def test_a_step_that_stands_twice_is_the_one_that_was_checked(encoder):
    """JSON has the last one of a key, and the library of tokenizers the first one that is not null."""
    path = encoder / "tokenizer.json"
    growing = json.dumps(in_a_row("normalizers", A, A, A))
    path.write_text(f'{{"normalizer": {growing}, {path.read_text().lstrip()[1:-1]}, "normalizer": null}}')
    assert len(models.load(encoder).text.encode(["a"])[0]) == 3


def test_an_unknown_step_of_a_tokenizer_is_refused(encoder):
    write_growing(encoder, normalizer={"type": "Repeat"})
    with pytest.raises(ModelError, match="has the unknown step 'Repeat'; expected one of Strip"):
        models.load(encoder).encode("a")


READ = ["modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
READ += ["model.safetensors", "tokenizer.json", "tokenizer_config.json", "config.json"]
READ += ["sentence_bert_config.json", "config_sentence_transformers.json"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pipes in folders")
@pytest.mark.parametrize("kind", ["pipe", "zeros", "terminal"])
@pytest.mark.parametrize("name", READ)
def test_only_regular_files_are_read(name, kind, encoder):
    dense = {"in_features": 24, "out_features": 24, "bias": False}
    write_modules(encoder, ("Dense", dense, {"linear.weight": np.eye(24, dtype=np.float32)}))
    models.load(encoder).encode("a")
    path = encoder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to({"zeros": "/dev/zero", "terminal": "/dev/tty"}[kind])
    with pytest.raises(ModelError, match=rf"{name} cannot be read: .*"):
        models.load(encoder).encode("a")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pipes in folders")
def test_a_pipe_among_the_parts_of_weights(tmp_path):
    tiny.write(tmp_path, "bert")
    write_parts(tmp_path, "bert")
    part = next(iter(json.loads((tmp_path / _tensors.INDEX).read_text())["weight_map"].values()))
    (tmp_path / part).unlink()
    os.mkfifo(tmp_path / part)
    with pytest.raises(ModelError, match=f"{part} cannot be read: .*it is a pipe; expected a regular file"):
        models.load(tmp_path)


def test_a_file_of_json_is_bounded(encoder):
    with (encoder / "config.json").open("rb+") as file:
        file.truncate(2**26 + 1)
    refused(encoder, f"config.json has {2**26 + 1} bytes; expected at most {2**26}")


def test_an_error_of_a_signal_is_not_taken_for_the_files(encoder, monkeypatch):
    def timed_out(file):
        raise TimeoutError("time is up")

    monkeypatch.setattr(_files, "regular", timed_out)
    with pytest.raises(TimeoutError, match="time is up"):
        models.load(encoder)


def test_values_for_which_there_is_no_memory(encoder, monkeypatch):
    def loads(text):
        raise MemoryError

    monkeypatch.setattr(_files.json, "loads", loads)
    refused(encoder, ".json holds more than there is memory for")
