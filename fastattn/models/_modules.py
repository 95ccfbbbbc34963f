"""Modules of a sentence-transformers folder, from modules.json, and those of its Router's routes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastattn._args.values import short
from fastattn.models._files import Config, ModelError, is_name, read_json, sentences_config

Module = tuple[str, Path]  # its kind, and its folder

_PACKAGES = ("sentence_transformers.", "pylate.")  # whose modules are known; others may be called alike
_JINA = "custom_st.Transformer"  # of jina-embeddings-v3, whose code is known by this key of config.json:
_ADAPTERS = "lora_adaptations"
AFTER_POOLING = ("Dense", "LayerNorm", "Normalize")
_SPLADE = ("MLMTransformer", "SpladePooling")  # instead of Transformer and Pooling:
MASK = "MultiVectorMask"  # or a vector of each token, with this module, or with none but those of `_BY_TOKEN`
_BY_TOKEN = ("Dense", "Normalize")
_BEFORE, _NO_PART = ("Transformer", "Pooling"), "Dropout"  # which does something in training only
SCORE = "LogitScore"  # of a language model, after Transformer alone
_TOWERS = "CLIPModel"  # in a folder of its own, and without Pooling
STATIC, SPARSE_STATIC = "StaticEmbedding", "SparseStaticEmbedding"  # a row, or a number, for each token
ROUTERS = {"Router": "router_config.json", "Asym": "config.json"}  # the second is an older name
# Orders of modules, and what an error expects.
_AFTER = f"( ({'|'.join((*AFTER_POOLING, _NO_PART))}))*"
_HEADED = f"(Transformer|{_SPLADE[0]}) {_SPLADE[1]}|Transformer {SCORE}|{SPARSE_STATIC}"
_OF_TOWERS = f"(Transformer|{_TOWERS}){_AFTER}", f"Transformer or {_TOWERS} first, once"
_POOLED = f"(Transformer Pooling|{STATIC}){_AFTER}", "Transformer and Pooling first, once each"


class Router(NamedTuple):
    """The modules of a folder, those of each route, and which route a text takes."""

    modules: list[Module]
    routes: dict[str, list[Module]]
    usual: str | None  # of a text without a task

    def on(self, route: str) -> list[Module]:
        """The modules on a `route`: before the Router, of it, and after it."""
        return [x for each in self.modules for x in (self.routes[route] if each[0] in ROUTERS else [each])]


def _entries(folder: Path) -> list[Any]:
    """The entries of modules.json; none where it is missing."""
    path = folder / "modules.json"
    entries: list[Any] = read_json(path, list) if path.exists() else []
    return entries


def first_of(folder: Path, route: str | None = None) -> Module:
    """Kind and folder of the first module, before anything is checked; "" without one.

    A folder of its own counts for modules that are no Transformer.
    """
    if route is not None and (router := router_of(folder)) is not None:
        return router.on(route)[0]
    for entry in _entries(folder)[:1]:
        said = entry if isinstance(entry, dict) else {}
        kind, inner = str(said.get("type")).rpartition(".")[2], said.get("path")
        if kind in (_TOWERS, STATIC, SPARSE_STATIC, *ROUTERS) and inner not in ("", ".") and is_name(inner):
            return kind, folder / str(inner)
        return kind, folder
    return "", folder


def inner_folders(folder: Path) -> list[str]:
    """Names of the folders of modules, with those of routes, as far as they can be read."""
    found = [entry.get("path") for entry in _entries(folder) if isinstance(entry, dict)]
    config = Config(folder / ROUTERS["Router"], optional=True)
    types = config.values.get("types")
    names = [*found, *(types if isinstance(types, dict) else ())]
    return list(dict.fromkeys(name for name in names if name not in ("", ".") and is_name(name)))


def is_pylate(folder: Path) -> bool:
    """Tell whether PyLate wrote the folder: its modules.json leaves out what follows the Dense modules."""
    values = sentences_config(folder).values
    return values.get("model_type") == "ColBERT" or "query_prefix" in values


def is_cross_encoder(folder: Path) -> bool:
    """Tell whether config_sentence_transformers.json says that a head scores what the transformer makes."""
    config = sentences_config(folder)
    return config.values.get("model_type") == "CrossEncoder"


def is_multi_vector(modules: Sequence[Module]) -> bool:
    """Tell whether modules make a vector of each token: nothing pools them."""
    kinds = [kind for kind, _ in modules]
    followed = len(kinds) > 1 and kinds[0] == "Transformer" and set(kinds[1:]) <= {*_BY_TOKEN, MASK}
    return followed and kinds.count(MASK) <= 1


def task_of(folder: Path, modules: Sequence[Module]) -> str | None:
    """Task of the module Transformer before the others, as sentence-transformers calls it."""
    if modules and modules[-1][0] == SCORE:
        return "text-generation"
    if modules:
        return "fill-mask" if modules[-1][0] == _SPLADE[1] else "feature-extraction"
    return "sequence-classification" if is_cross_encoder(folder) else None


def modules_of(folder: Path, route: str | None = None, towers: bool = False) -> list[Module]:
    """Kind and folder of each module in modules.json, on this `route` of a Router; none where it is missing.

    A head that scores has no Pooling before it, as LogitScore; SpladePooling has another one; vectors of
    tokens and two `towers` have none.
    """
    path = folder / "modules.json"
    if route is not None and (router := router_of(folder)) is not None:
        named = router.on(route)
    else:
        of_texts = *_BEFORE, *AFTER_POOLING, _NO_PART, *_SPLADE, MASK, SCORE, STATIC, SPARSE_STATIC
        named = _named(path, (_BEFORE[0], _TOWERS, *AFTER_POOLING, _NO_PART) if towers else of_texts)
    kinds = [kind for kind, _ in named]
    if not path.exists() or (kinds == ["Transformer"] and is_cross_encoder(folder)):
        return []
    by_token = is_multi_vector(named) and (MASK in kinds or is_pylate(folder))
    if by_token or re.fullmatch(_HEADED, " ".join(kinds)):
        return named
    pattern, expected = _OF_TOWERS if towers else _POOLED
    if not re.fullmatch(pattern, " ".join(kinds)):
        on = "" if route is None else f" on the route {short(route)}"
        raise ModelError(f"{path} has {', '.join(kinds) or 'no modules'}{on}; expected {expected}")
    return [(kind, inner) for kind, inner in named[int(towers) :] if kind != _NO_PART]


def _named(path: Path, known: Sequence[str]) -> list[Module]:
    """The modules of modules.json, each of a `known` kind and in a folder that it may have."""
    named: list[Module] = []
    for module in _entries(path.parent):
        entry = module if isinstance(module, dict) else {"type": module}
        kind, inner = _kind(path, entry.get("type"), known), entry.get("path", "")
        takes_task = kind in ROUTERS or entry.get("type") == _JINA
        if entry.get("kwargs") and not (takes_task and entry["kwargs"] in (["task"], ["task", "modality"])):
            raise ModelError(f"{path}: 'kwargs' of {kind} is {short(entry['kwargs'])}; expected none")
        here = inner in ("", ".")
        first = kind in ("Transformer", _SPLADE[0])
        if first and not here:
            raise ModelError(f"{path}: 'path' of {kind} is {short(inner)}; expected '', this folder")
        alone = kind in (_TOWERS, STATIC, SPARSE_STATIC, *ROUTERS)  # which may have all of the folder
        if not first and not (is_name(inner) and not here) and not (alone and here):
            raise ModelError(f"{path}: 'path' of {kind} is {short(inner)}; expected a folder beside it")
        named.append((kind, path.parent if here else path.parent / inner))
    return named


def _kind(path: Path, said: Any, known: Sequence[str]) -> str:
    """The kind of a module whose type is `said`."""
    name = str(said)
    kind = name.rpartition(".")[2]
    if kind not in known:
        raise ModelError(f"{path} has a module {short(kind)}; expected one of {', '.join(known)}")
    config = path.parent / "config.json"
    if not name.startswith(_PACKAGES) and not (name == _JINA and _ADAPTERS in Config(config, True).values):
        expected = f"one of {', '.join(_PACKAGES)}, whose code is known"
        raise ModelError(f"{path} has a module {short(name)}; expected {expected}")
    return kind


def router_of(folder: Path) -> Router | None:
    """The Router of a folder, if modules.json has one."""
    names = [str(entry.get("type")) for entry in _entries(folder) if isinstance(entry, dict)]
    if not any(name.rpartition(".")[2] in ROUTERS for name in names):
        return None
    modules = _named(folder / "modules.json", (*_BEFORE, *AFTER_POOLING, _NO_PART, *ROUTERS))
    ats = [at for kind, at in modules if kind in ROUTERS]
    if len(ats) != 1:
        raise ModelError(f"{folder / 'modules.json'} has {len(ats)} routers; expected one")
    at = ats[0]
    paths = [at / name for name in ROUTERS.values()]
    config = Config(next(filter(Path.exists, paths), paths[0]))
    known = (*_BEFORE, *AFTER_POOLING, _NO_PART, *_SPLADE, STATIC, SPARSE_STATIC)
    where = Path(config.path)
    routes: dict[str, list[Module]] = {}
    types = {name: _kind(where, said, known) for name, said in config.get("types", dict).items()}
    for route, names in config.get("structure", dict).items():
        if not isinstance(names, list) or not names or not all(is_name(x) and x in types for x in names):
            came = f"{where}: route {short(route)} is {short(names)}"
            raise ModelError(f"{came}; expected a list of names in 'types'")
        routes[route] = [(types[name], at / name) for name in names]
    if not routes:
        raise config.wrong("structure", {}, "a table of routes")
    said = config.inner("parameters", {})
    usual: Any = said.get("default_route", str, "") or None
    if usual is None and said.get("allow_empty_key", bool, True):
        usual = next(iter(routes))
    said.refuse(route_mappings={})
    if usual is not None and usual not in routes:
        raise ModelError(f"{where}: there is no route {short(usual)}; expected {', '.join(routes)}")
    return Router(modules, routes, usual)
