"""Saving of models: a folder as transformers has it."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from fastattn._args.dtypes import dtype_choice
from fastattn._args.errors import named, wrong_type
from fastattn._args.types import Array
from fastattn._regular_files import replaced
from fastattn.models._decoder import Decoder
from fastattn.models._encoder import Encoder, EncoderWithHead
from fastattn.models._files import ModelError, is_gguf, is_name, read_json, require
from fastattn.models._parameters import required
from fastattn.models._tensors import WEIGHTS

_DTYPES = ("float32", "float16", "bfloat16")
_COPIED = ("*.json", "*.txt", "*.jinja", "*.model")  # files that say what a model is
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
    model : Encoder, Decoder, CrossEncoder, SparseEncoder or MultiVectorEncoder
        Result of `load` of a folder, also after `with_state_dict` or training. The tensors of `state_dict`
        are written, not the packed weights.
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
    saved = origin.folder / "config.json"
    config = read_json(saved) if saved.is_file() else {}
    if config.get("quantization_config") is not None or is_gguf(origin.folder):
        came = f"{origin.folder} holds a {model.model_type} with quantized or converted tensors"
        raise ModelError(f"{came}; expected tensors as in a folder of floating-point weights")
    if not (config or (origin.folder / _MODULES).is_file()):
        raise ModelError(f"{origin.folder} holds one module of several; expected a model in one folder")
    tensors: dict[str, Array] = {}
    with ExitStack() as stack:
        reads = dict.fromkeys(origin.parameters.shapes(), origin.reader(stack))
        for name, read in reads.items():
            with np.errstate(over="ignore"):
                tensors[name] = np.ascontiguousarray(read(name).astype(dtype, copy=False))
            if not np.isfinite(tensors[name]).all():
                came = f"{name!r} has values that are not finite as {dtype}"
                raise ValueError(f"(): {came}; expected finite ones")
    target.mkdir(parents=True, exist_ok=True)
    with replaced(target / WEIGHTS, "(): ") as file:
        save_file(tensors, file, {"format": "pt"})
    _copied(origin.folder, target)
    if config:
        config |= {key: dtype for key in ("dtype", "torch_dtype") if key in config}
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (target / "config.json").write_text(text, encoding="utf-8")


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
