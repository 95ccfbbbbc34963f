"""Real text for MiniLM: the manual of the language that comes with Python.

Its narrow types are calibrated on one part of it, and compared on another.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module, util
from pathlib import Path

import numpy as np

from fastattn._bench.cases import Array

CHARACTERS = 400_000  # some 100,000 tokens
COMPARED = 10_000  # the first tokens, which the largest problem needs; calibration takes those behind them


def windows(folder: Path, count: int, length: int, first: int = 0) -> Array | None:
    """Token ids (count, length) from token `first` on, in each row between those of begin and end.

    None where the tokenizer or the text is missing.
    """
    tokens = _tokens(folder)
    if tokens is None:
        return None
    rows = np.empty((count, length), np.int64)
    rows[:, 0], rows[:, -1] = tokens[0], tokens[-1]
    inner = max(0, length - 2)
    rows[:, 1:-1] = tokens[1:-1][first : first + count * inner].reshape(count, inner)
    return rows


@cache
def _tokens(folder: Path) -> Array | None:
    """The ids of the text, between those of its begin and end."""
    path = folder / "tokenizer.json"
    if not path.exists() or any(util.find_spec(name) is None for name in ("tokenizers", "pydoc_data")):
        return None
    topics = import_module("pydoc_data.topics").topics
    text = "\n".join(topics[name] for name in sorted(topics))[:CHARACTERS]
    tokenizer = import_module("tokenizers").Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return np.array(tokenizer.encode(text).ids)
