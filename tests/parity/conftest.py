"""Comparisons with other packages, and recipes for them, where these are installed: see [parity]."""

import importlib.util
import os
import sys
import warnings
from collections import Counter

import pytest

# The gate sets this where it has installed all of them: a file that is left out would pass unnoticed.
REQUIRED = os.environ.get("FASTATTN_REQUIRE_PARITY")


def missing(*packages):
    return not (REQUIRED or all(map(importlib.util.find_spec, packages)))


NEEDS = {
    "test_classify.py": "sentence_transformers",
    "test_encode.py": "sentence_transformers",
    "test_jax.py": "jax",
    "test_jina.py": "sentence_transformers",
    "test_multi_vector.py": "sentence_transformers",
    "test_onnx.py": "onnx",
    "test_routes.py": "sentence_transformers",
    "test_sentence_transformers.py": "sentence_transformers",
    "test_sparse.py": "sentence_transformers",
    "test_tiles.py": "onnxruntime",
}
collect_ignore_glob = ["*"] if missing("torch", "transformers") else []
collect_ignore = [file for file, package in NEEDS.items() if missing(package)]


@pytest.fixture
def quiet_torch():
    """Torch computes on one thread, and draws from seed 0."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def quiet(quiet_torch):
    """Warnings of other libraries are not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _Gains(dict):
    """Measurements that have all been made: ours takes half of torch's time."""

    def __missing__(self, key):
        return 2.0


@pytest.fixture(autouse=True)
def _ours_gains(monkeypatch):
    """No test depends on how fast this machine is; test_torch_measure.py has those of measuring."""
    if importlib.util.find_spec("torch"):
        from fastattn.torch import _measure

        monkeypatch.setattr(_measure, "_ratios", _Gains())


@pytest.fixture
def own_functions(monkeypatch):
    """Let transformers have its own functions: other tests register and do not undo it."""
    from fastattn.torch import _measure, _modules

    _modules._put_back()
    users, _modules.IN_USE.users = _modules.IN_USE.users, {}
    monkeypatch.setattr(_measure, "_refused", {})
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and ".modeling_" in name:
            for function in _modules.FUNCTIONS:
                own = vars(module).get(function)
                while hasattr(own, _modules._OURS):  # of a module imported after a change
                    own = own.__wrapped__
                if own is not None:
                    setattr(module, function, own)
    yield
    _modules._put_back()
    _modules.IN_USE.users = users
    if users:
        _modules._replace()


@pytest.fixture
def ran(monkeypatch):
    """The kernels of ours that run, one name for each call."""
    from fastattn._engine import dispatch

    names, run = [], dispatch.run
    monkeypatch.setattr(dispatch, "run", lambda args, *rest: (names.append(args.kernel), run(args, *rest)))
    return names


@pytest.fixture
def calls(monkeypatch):
    """Count calls of our functions, by the names that modules of transformers have for them."""
    from fastattn.torch._hybrids import FUNCTIONS

    found = Counter()
    for name, function in FUNCTIONS.items():

        def call(*args, _function=function, _name=name, **kwargs):
            result = _function(*args, **kwargs)
            found[_name] += 1
            return result

        monkeypatch.setitem(FUNCTIONS, name, call)
    return found
