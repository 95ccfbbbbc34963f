"""Saving of models: a folder as transformers has it."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.dtypes import dtype_choice
from fastattn._args.errors import named, wrong_type
from fastattn._regular_files import replaced
from fastattn.models import _gguf, _gguf_tokenizer
from fastattn.models._decoder import Decoder
from fastattn.models._encoder import Encoder, EncoderWithHead
from fastattn.models._files import ModelError, is_gguf, is_name, read_json, require
from fastattn.models._parameters import required
from fastattn.models._tensors import WEIGHTS

if TYPE_CHECKING:
    from fastattn._args.types import Array

_DTYPES = ("float32", "float16", "bfloat16")
_COPIED = ("*.json", "*.txt", "*.jinja", "*.model", "artifact.metadata")  # files that say what a model is
_LEFT = "*.index.json"
_MODULES, _INNER = "modules.json", ("additional_chat_templates",)  # folders in it are copied, too


@named("save")
def save(
    model: Decoder | Encoder | EncoderWithHead,
    path: str | os.PathLike[str],
    *,
    dtype: str = "float32",
) -> None:
    """Save a model as a folder for `load`.

    Parameters
    ----------
    model : Encoder, Decoder, CrossEncoder, TokenClassifier, SparseEncoder or MultiVectorEncoder
        Result of `load`, also after `with_state_dict` or training. The tensors of `state_dict` are written,
        not the packed weights.
    path : path
        Folder, which is created if missing. It gets model.safetensors, config.json and the other files of the
        model's folder.
    dtype : {"float32", "float16", "bfloat16"}, default "float32"
        Type of the tensors.

    Raises
    ------
    ModelError
        A ValueError, if the model cannot be saved as one folder. The message says why.
    TypeError, ValueError
        If an argument is invalid, or weights are not finite in `dtype`. Nothing is written then.

    Notes
    -----
    The weights are written to a temporary file, which replaces model.safetensors when it is complete.
    """
    if not isinstance(model, (Decoder, Encoder, EncoderWithHead)):
        raise wrong_type("model", model, "a model of load()")
    if not isinstance(path, (str, os.PathLike)):
        raise wrong_type("path", path, "a path")
    if getattr(model, "routes", None) is not None:
        raise ModelError("(): model has routes for tasks; expected one that is a folder's only model")
    origin = required(model.encoder.origin if isinstance(model, EncoderWithHead) else model.origin)
    dtype = dtype_choice("dtype", dtype, _DTYPES)
    target, save_file = Path(path), require("safetensors.numpy").save_file
    if dtype == "bfloat16":
        require("ml_dtypes")
    of_file = is_gguf(origin.folder)
    saved = origin.folder / "config.json"
    has_config = of_file or saved.is_file()
    said = read_json(saved) if has_config and not of_file else {}
    blocks = said.get("quantization_config") is not None
    if blocks or (of_file and _gguf.has_own_tensors(model.model_type)):
        came = f"{origin.folder} holds a {model.model_type} with quantized or converted tensors"
        raise ModelError(f"{came}; expected tensors as in a folder of floating-point weights")
    if not (has_config or (origin.folder / _MODULES).is_file()):
        raise ModelError(f"{origin.folder} holds one module of several; expected a model in one folder")
    tensors: dict[str, Array] = {}
    with ExitStack() as stack:
        reads = dict.fromkeys(origin.parameters.shapes(), origin.reader(stack))
        for name, read in reads.items():
            new = _gguf.renamed(model.model_type, name) if of_file else name
            with np.errstate(over="ignore"):
                tensors[new] = np.ascontiguousarray(read(name).astype(dtype, copy=False))
            if not np.isfinite(tensors[new]).all():
                came = f"{name!r} has values that are not finite as {dtype}"
                raise ValueError(f"(): {came}; expected finite ones")
    target.mkdir(parents=True, exist_ok=True)
    with replaced(target / WEIGHTS, "(): ") as file:
        save_file(tensors, file, {"format": "pt"})
    config = _files_of_gguf(origin.folder, target) if of_file else said
    if not of_file:
        _copied(origin.folder, target)
    if config:
        config |= {key: dtype for key in ("dtype", "torch_dtype") if key in config}
        _write(target / "config.json", config)


def _copied(folder: Path, target: Path) -> None:
    """Copy what a folder says beside its weights, with the folders of its modules."""
    modules = read_json(folder / _MODULES, list) if (folder / _MODULES).is_file() else []
    inner = [each["path"] for each in modules if isinstance(each, dict) and each.get("path")]
    files = {file for pattern in _COPIED for file in folder.glob(pattern) if file.is_file()}
    files -= set(folder.glob(_LEFT))
    for name in filter(is_name, dict.fromkeys([*inner, *_INNER])):
        files |= {file for file in (folder / name).rglob("*") if file.is_file()}
    for file in sorted(files):
        to = target / file.relative_to(folder)
        if not (to.exists() and to.samefile(file)):
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, to)


def _files_of_gguf(path: Path, target: Path) -> dict[str, Any]:
    """Write the tokenizer of a GGUF file, its template and what it recommends; return its config.json."""
    with ExitStack() as stack:
        file = _gguf.opened(path, stack)
        config = _gguf.config_of(path, file)
        has_tokens = "tokenizer.ggml.tokens" in file.metadata
    if has_tokens:
        _gguf_tokenizer.tokenizer_of(path).save(str(target / "tokenizer.json"))
        said = _gguf_tokenizer.tokenizer_config(path).values
        given = {key: value for key, value in said.items() if value is not None}
        _write(target / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **given})
    sampling = _gguf.usual_sampling(path)
    ends = config.values.get("eos_token_id")
    drawn = {"do_sample": True, **sampling} if sampling else {}
    _write(target / "generation_config.json", {**drawn, "eos_token_id": ends})
    return config.values


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
