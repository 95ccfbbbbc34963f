"""Comparisons with torch, transformers and sentence-transformers, where these are installed: see [parity]."""

import importlib.util


def missing(*packages):
    return not all(map(importlib.util.find_spec, packages))


collect_ignore_glob = ["*"] if missing("torch", "transformers") else []
collect_ignore = (
    ["test_encode.py", "test_classify.py", "test_sparse.py", "test_multi_vector.py"]
    if missing("sentence_transformers")
    else []
)
