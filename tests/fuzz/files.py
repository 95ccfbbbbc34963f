"""Folders of tiny models with something wrong in a file: loaded and, if that is possible, called."""

import json
import shutil
import struct
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import ml_dtypes
import numpy as np
import tiny_models
from judge import Case
from safetensors.numpy import save
from tiny_tokenizers import write_tokenizer

from fastattn import models
from fastattn.models import ModelError

INDEX = "model.safetensors.index.json"
EXTRAS = {
    "generation_config.json": {"eos_token_id": [7, 8], "temperature": 0.6},
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
        {"idx": 3, "name": "3", "path": "3_Normalize", "type": "sentence_transformers.models.Normalize"},
    ],
    "1_Pooling/config.json": {"word_embedding_dimension": 24, "pooling_mode_mean_tokens": True},
    "2_Dense/config.json": {"in_features": 24, "out_features": 8, "bias": False},
    "sentence_bert_config.json": {
        "max_seq_length": 9,
        "do_lower_case": True,
        "transformer_task": "feature-extraction",
        "processor_kwargs": {"model_max_length": 8, "truncation_side": "left"},
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": "token_embeddings",
        "processing_kwargs": {"text": {"padding": True}},
        "model_kwargs": {"torch_dtype": "float16"},
    },
    "tokenizer_config.json": {
        "do_lower_case": True,
        "strip_accents": None,
        "tokenizer_class": "BertTokenizer",
    },
    "config_sentence_transformers.json": {"prompts": {"query": "the "}, "default_prompt_name": "query"},
}
VALUES = (
    None, True, False, 0, 1, -1, 2, 3, 7, 1.5, -0.0, 1e308, float("nan"), float("inf"), 10**12, 2**31, 2**63,
    2**64, 10**400, "", "x", "gelu", "..", "a/b", "e" * 5000, "\0", [], {}, [1], [[]], ["x"], [None],
    {"x": 1}, [0, 2**62], [10**12, 10**12], "F32", "I64", "BF16", "F8_E4M3", [0, 0], [-1, 4], [1.5],
    {"rope_type": "yarn", "factor": 0}, {"rope_type": "linear"}, {"rope_type": "dynamic", "factor": 1e30},
    {"type": "longrope", "short_factor": [], "long_factor": [1]}
)  # fmt: skip


@cache
def home():
    """Folder in which this process writes its models."""
    return TemporaryDirectory(prefix="fuzz-")


def folder():
    return Path(home().name, "model")


@cache
def whole(kind):
    """The correct files of a model by name, without its tensors."""
    with TemporaryDirectory() as path:
        tiny_models.write(Path(path), kind)
        write_tokenizer(Path(path))
        files = {name: Path(path, name).read_bytes() for name in ("config.json", "tokenizer.json")}
    files["2_Dense/model.safetensors"] = save({"linear.weight": np.ones((8, 24), np.float32)})
    return files | {name: json.dumps(values).encode() for name, values in EXTRAS.items()}


def tensor_files(d, kind):
    """A model's tensors in one file, or in two and an index."""
    tensors = tiny_models.tensors(kind, tiny_models.CONFIGS[kind])
    if d.chance(0.3):
        dtype = d.choose(np.float16, ml_dtypes.bfloat16)
        tensors = {name: x.astype(dtype) for name, x in tensors.items()}
    if d.chance(0.7):
        return {"model.safetensors": save(tensors)}
    files, places = {}, {}
    for i in range(2):
        part = dict(list(tensors.items())[i::2])
        files[f"model-{i}.safetensors"] = save(part)
        places |= dict.fromkeys(part, f"model-{i}.safetensors")
    return {**files, INDEX: json.dumps({"metadata": {}, "weight_map": places}).encode()}


def draw(d):
    """A case: some files of a model are spoiled, then it is loaded and called."""
    kind = d.choose(*tiny_models.CONFIGS)
    files = {**whole(kind), **tensor_files(d, kind)}
    for name in (*EXTRAS, "tokenizer.json"):
        if d.chance(0.3):
            del files[name]
    changes = [spoil(d, files) for _ in range(d.choose(1, 1, 2))]
    write(files)
    dtype = d.choose("float32", "float32", "float64", "bfloat16")
    options = {"dtype": dtype, "weights_dtype": d.choose(None, "int8", "int4")}
    if dtype == "float64":
        del options["weights_dtype"]
    names = (kind, *models.MODEL_TYPES, "generate", "encode", "decode")  # which may not like its numbers
    return Case(names, lambda: used(options), [options, changes], clean=clean, twice=False)


def write(files):
    """Fill the folder with these files and nothing else."""
    path = folder()
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    for name, data in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if data is None:
            file.mkdir()
        else:
            file.write_bytes(data)


def used(options):
    """Load the model and call it. It may not take more memory than its files explain."""
    try:
        model = models.load(folder(), **options)
    except MemoryError as error:
        raise AssertionError("no memory") from error
    out = model([[1, 2, 3], [4, 5, 6]])
    if out.shape[:2] != (2, 3) or out.dtype != model.dtype:
        raise AssertionError(f"returned {out.dtype}{out.shape}")
    if isinstance(model, models.Encoder):
        return model.encode(["the cat", ""])
    ids = model.text.encode(["the cat", "a dog on the mat"])
    new = list(islice(model.generate([[1, 2], [3]], 3, temperature=0.5, top_k=3, seed=1), 3))
    return model.text.decode([*ids, *np.transpose(new)])


def clean(error):
    """Tell whether an error names the file that is wrong."""
    return isinstance(error, ModelError) and str(error).startswith(str(folder()))


def spoil(d, files):
    """Change one file. Says what it did."""
    name = d.choose(*files, *(name for name in files if name.startswith(("config.json", "model"))))
    data = files[name]
    if not data:  # a folder, or empty
        return f"{name} stays"
    how = d.rng.integers(12)
    if how == 0:
        del files[name]
        return f"no {name}"
    if how == 1:
        files[name] = None
        return f"{name} is a folder"
    if how == 2:
        files[name] = d.choose(*(other for other in files.values() if other))
        return f"{name} is another file"
    if how <= 5:
        files[name], text = spoiled_bytes(d, data)
        return f"{name}: {text}"
    if name.endswith(".safetensors"):
        files[name], text = spoiled_tensors(d, data)
        return f"{name}: {text}"
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):  # of a file spoiled before
        return f"{name} stays"
    text = spoil_json(d, values)
    files[name] = json.dumps(values).encode()
    return f"{name}: {text}"


def spoiled_bytes(d, data):
    at = int(d.rng.integers(min(len(data), d.choose(9, 200, len(data))))) if data else 0
    how = d.rng.integers(7)
    if how == 0:
        return data[:at], f"cut at {at}"
    if how == 1:
        return data[:at] + data[at + d.size() :], f"bytes left out at {at}"
    if how == 2:
        return data[:at] + d.rng.bytes(d.size()) + data[at:], f"bytes put in at {at}"
    if how == 3:
        return data + d.rng.bytes(d.size()), "bytes after it"
    if how == 4:
        deep = d.choose(b"[", b'{"a":', b"9") * 100_000
        return deep, f"{deep[:5]} many times"
    changed = bytearray(data)
    for place in (at, *d.rng.integers(len(data), size=d.choose(0, 0, 3))):
        changed[place] = d.choose(0, 255, 34, 91, 125, 48, int(d.rng.integers(256)))
    return bytes(changed), f"bytes changed at {at}"


def spoiled_tensors(d, data):
    """A safetensors file with another header in front of its tensors, or with NaN in them."""
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError):  # of a file spoiled before
        return data, "stays"
    if d.chance(0.1):
        wrong = d.choose(0, 2**31, 2**63, 2**64 - 1, length - 1)
        return struct.pack("<Q", wrong) + data[8:], f"a header of {wrong} bytes"
    if d.chance(0.1):
        return data[: 8 + length] + b"\xff" * (len(data) - 8 - length), "NaN"
    text = spoil_json(d, header)
    new = json.dumps(header).encode()
    return struct.pack("<Q", len(new)) + new + data[8 + length :], f"header: {text}"


def spoil_json(d, values):
    """Change one value somewhere in `values`. Says what it did."""
    path = []
    while isinstance(values, (dict, list)) and values:
        key = d.choose(*values) if isinstance(values, dict) else int(d.rng.integers(len(values)))
        path.append(key)
        if not isinstance(values[key], (dict, list)) or not values[key] or d.chance(0.2):
            break
        values = values[key]
    if not path:
        return "nothing"
    how = d.rng.integers(5)
    if how == 0:
        del values[key]
        return f"no {path}"
    if how == 1 and isinstance(values, dict):
        other = d.choose("x", "", "model_type", *values)
        values[other] = values.pop(key)
        return f"{path} is called {other!r}"
    if how == 2 and type(values[key]) is int:
        values[key] += d.choose(-1, 1, 2, 100)
    else:
        values[key] = d.choose(*VALUES)
    return f"{path} is {str(values[key])[:60]!r}"
