"""Comparisons with other packages, and adapters to them, where these are installed: see [parity]."""

import importlib.util
import os

# The gate sets this where it has installed all of them: a file that is left out would pass unnoticed.
REQUIRED = os.environ.get("FASTATTN_REQUIRE_PARITY")


def missing(*packages):
    return not (REQUIRED or all(map(importlib.util.find_spec, packages)))


NEEDS = {
    "test_classify.py": "sentence_transformers",
    "test_encode.py": "sentence_transformers",
    "test_jax.py": "jax",
    "test_multi_vector.py": "sentence_transformers",
    "test_onnx.py": "onnx",
    "test_sklearn.py": "sklearn",
    "test_sparse.py": "sentence_transformers",
}
collect_ignore_glob = ["*"] if missing("torch", "transformers") else []
collect_ignore = [file for file, package in NEEDS.items() if missing(package)]
