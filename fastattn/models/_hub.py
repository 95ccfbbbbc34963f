"""Models of the Hugging Face Hub by their names: `huggingface_hub` fetches the files that are read.

Cache, offline mode, token and another address are its affair: HF_HOME, HF_HUB_OFFLINE, HF_TOKEN, HF_ENDPOINT.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastattn.models._files import GGUF, ModelError, is_name, read_json, require
from fastattn.models._modules import ROUTERS, SPARSE_STATIC, STATIC, first_of, inner_folders
from fastattn.models._tensors import INDEX, SHOWN, WEIGHTS

_NAME = re.compile(r"[\w-][\w.-]*/(?!.*\.gguf$)[\w-][\w.-]*")  # organisation/name, and no file
# What is read of a model's folder, beside the weights; chat templates that have names lie in a folder.
_SETTINGS = ("*.json", "*.jinja", "merges.txt")
_TEMPLATES = "additional_chat_templates/*.jinja"
_FORMATS = (".safetensors", ".gguf", ".bin", ".h5", ".onnx", ".msgpack", ".ckpt", ".pt")  # that errors list


def place_of(
    model: str | os.PathLike[str], revision: str | None = None, gguf_file: str | None = None, **how: Any
) -> Path:
    """Return the folder or GGUF file of `model`, a path or a name of the Hub, whose files are fetched.

    An existing folder takes precedence. `how` are arguments of huggingface_hub: `cache_dir`, `token` and
    `local_files_only`.
    """
    for name, value in (("revision", revision), ("gguf_file", gguf_file)):
        if value is not None and not isinstance(value, str):
            raise TypeError(f"(): {name} is of type {type(value).__name__}; expected a string")
    path = Path(model)
    if gguf_file is not None and not gguf_file.endswith(GGUF):
        raise ValueError(f"(): gguf_file is {gguf_file!r}; expected a name that ends with {GGUF}")
    if not isinstance(model, str) or not _NAME.fullmatch(model) or os.path.exists(model):
        if revision is not None:
            raise ValueError(f"(): revision is given for the path {path}; expected it with organisation/name")
        return path if gguf_file is None else path / gguf_file
    try:
        hub = require("huggingface_hub")
    except ImportError as error:
        raise ImportError(f"{model} is no folder here; as a name of the Hub, {error}") from error
    try:
        if gguf_file is None:
            return _folder(hub, model, revision, how)
        try:
            return Path(hub.hf_hub_download(model, gguf_file, revision=revision, **how))
        except hub.errors.EntryNotFoundError as error:
            raise _lacking(hub, model, revision, how, gguf_file, error) from error
    except ModelError:
        raise
    except _failures() as error:
        said = " ".join(str(error).split())  # in one line
        raise ModelError(f"{model} is no folder here, and cannot be fetched: {said}") from error


def _failures() -> tuple[type[Exception], ...]:
    """Errors of the network, of the Hub's answers, and of names that it does not take."""
    libraries = [sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules]
    return OSError, ValueError, *(library.HTTPError for library in libraries)


_PATTERN = set("*?[")  # a name with these would fetch other files, too


def _folder(hub: Any, name: str, revision: str | None, how: dict[str, Any]) -> Path:
    """The folder in the cache: settings first, which say what else is read."""

    def fetch(allowed: Iterable[str], ignored: str | None = None) -> Path:
        patterns = {"allow_patterns": list(allowed), "ignore_patterns": ignored}
        return Path(hub.snapshot_download(name, revision=revision, **patterns, **how))

    folder = fetch(_SETTINGS, "*/*")
    revision = folder.name  # the commit: what follows is of the same one
    roots = ["", *(f"{x}/" for x in inner_folders(folder) if not _PATTERN.intersection(x))]
    inner = [f"{root}{kind}" for root in roots[1:] for kind in _SETTINGS]
    # huggingface_hub warns where nothing matches: one of these two settings always does.
    fetch(["config.json", "modules.json", _TEMPLATES, *inner, *(root + WEIGHTS for root in roots)])
    parts = [root + part for root in roots for part in _parts(folder / root)]
    if parts:
        fetch(parts)
    kind, main = first_of(folder)
    needs = [] if kind in (STATIC, SPARSE_STATIC) else ["config.json"]
    for needed in [] if kind in ROUTERS else [*needs, *(_parts(main)[:1] or [WEIGHTS])]:
        if not (main / needed).is_file():
            raise _lacking(hub, name, revision, how, needed)
    return folder


def _parts(folder: Path) -> list[str]:
    """Files that the index lists, where the weights are not one file."""
    path = folder / INDEX
    if (folder / WEIGHTS).is_file() or not path.is_file():
        return []
    listed = read_json(path).get("weight_map")
    files = listed.values() if isinstance(listed, dict) else ()
    return sorted({x for x in files if is_name(x) and not _PATTERN & set(x)})


def _lacking(
    hub: Any, name: str, revision: str | None, how: dict[str, Any], file: str, error: Exception | None = None
) -> ModelError:
    """The error of a file that the repository, or offline the cache, lacks; it lists what is there."""
    try:
        files = hub.HfApi(token=how.get("token")).list_repo_files(name, revision=revision)
    except _failures():  # offline
        said = error or "nothing else is known"
        return ModelError(f"{name} has no {file}, as far as it was fetched: {said}")
    found = sorted((x for x in files if x.endswith(_FORMATS)), key=lambda x: (not x.endswith(".gguf"), x))
    there = ", ".join(found[:SHOWN]) or "no file of weights"
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    hint = "; gguf_file= takes a GGUF file" if any(x.endswith(GGUF) for x in found) else ""
    return ModelError(f"{name} has no {file}; there is {there}{more}{hint}")
