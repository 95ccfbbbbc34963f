"""The reference of the site lists the whole public surface, and every example of every docstring runs."""

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import tiny_models as tiny
from tiny_tokenizers import write_tokenizer

import fastattn

PAGES = Path(__file__).parents[1] / "docs/reference"
FOUND = pkgutil.walk_packages(fastattn.__path__, "fastattn.", onerror=lambda name: None)
PUBLIC = ["fastattn", *(found.name for found in FOUND if "._" not in found.name)]

OF_OTHERS = {  # and the package that each needs
    "fastattn.dask": "dask",
    "fastattn.torch": "torch",
}


def listed():
    """Full names in the pages' lists."""
    names = []
    for page in sorted(PAGES.glob("*.md")):
        module = None
        for line in page.read_text(encoding="utf-8").splitlines():
            if found := re.match(r"\.\. currentmodule:: ([\w.]+)$", line):
                module = found[1]
            elif found := re.match(r"   (\w+)$", line):
                names.append(f"{module}.{found[1]}")
    return names


def exported(name):
    """The names of a public module's `__all__`; those of `OF_OTHERS` without an import."""
    if name not in OF_OTHERS:
        return importlib.import_module(name).__all__
    path = Path(fastattn.__file__).with_name(name.removeprefix("fastattn."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_bytes())
    (names,) = (node.value for node in tree.body if ast.unparse(node).startswith("__all__ ="))
    return ast.literal_eval(names)


def of(name):
    parent, _, last = name.rpartition(".")
    return getattr(importlib.import_module(parent), last)


@pytest.mark.parametrize("name", PUBLIC)
def test_the_reference_lists_every_public_name(name):
    """One of its names suffices: what two modules export stands in one of them."""
    names = listed()
    objects = [id(of(full)) for full in names if not full.startswith(tuple(OF_OTHERS))]
    for public in exported(name):
        full = f"{name}.{public}"
        if full not in names and full != "fastattn.__version__":
            x = of(full)
            pages = [p.name for p in PAGES.glob("*.md") if f":: {name}\n" in p.read_text(encoding="utf-8")]
            there = inspect.ismodule(x) or id(x) in objects
            assert there, f"{full} is not in docs/reference: {', '.join(pages) or 'a new page'}"


def test_the_reference_lists_nothing_twice_and_nothing_else():
    names = listed()
    assert len(names) == len(set(names)) > 140
    for name in names:
        parent, _, last = name.rpartition(".")
        assert parent in PUBLIC
        assert last in exported(parent)


def examples():
    """Docstrings with examples, by the names of what has them."""
    found = {}
    for name in PUBLIC:
        if name in OF_OTHERS and not find_spec(OF_OTHERS[name]):
            continue
        public = importlib.import_module(name)
        for last in public.__all__:
            x = getattr(public, last)
            if inspect.ismodule(x) or not (inspect.isclass(x) or inspect.isfunction(x)):
                continue
            for test in doctest.DocTestFinder(recurse=True).find(x, f"{name}.{last}", module=False):
                if test.examples:
                    found.setdefault(test.docstring, test)
    return {test.name: test for test in found.values()}


EXAMPLES = examples()


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_docstrings_run(name, tmp_path, monkeypatch):
    """Examples run in a folder with a tiny model, all of them."""
    pyplot = pytest.importorskip("matplotlib.pyplot") if ".plot." in name else None
    tiny.write(tmp_path / "all-MiniLM-L6-v2", "bert")
    write_tokenizer(tmp_path / "all-MiniLM-L6-v2")
    monkeypatch.chdir(tmp_path)
    test = EXAMPLES[name]
    assert not any(doctest.SKIP in example.options for example in test.examples)
    test.globs = {"fastattn": fastattn, "np": np}
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed == 0
    if pyplot:
        pyplot.close("all")
