"""``python -m fastattn embed`` and ``generate``: texts to vectors, and texts continued."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from fastattn._args import Array
    from fastattn.models import Bert, Decoder

SUFFIXES = (".npy", ".jsonl")


def embed(options: argparse.Namespace) -> int:
    """Turn lines of text into vectors with an encoder (BERT, RoBERTa, MiniLM)."""
    return _said(lambda: _embed(options))


def generate(options: argparse.Namespace) -> int:
    """Continue a text with a decoder (GPT-2, Llama, Mistral, Qwen2, Qwen3)."""
    return _said(lambda: _generate(options))


def _said(work: Callable[[], None]) -> int:
    """The exit status of `work`; what is wrong with its files or arguments is a line, not a traceback."""
    try:
        work()
    except BrokenPipeError:  # whoever read has read enough
        sys.stdout = None
    except (ImportError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _embed(options: argparse.Namespace) -> None:
    from fastattn.models import Bert
    from fastattn.models.files import require

    progress_bar = require("tqdm").tqdm
    model = _load(options)
    if not isinstance(model, Bert):
        raise ValueError(f"{options.model} holds a {model.model_type}; expected a model of the BERT family")
    lines = _lines(options.file)
    with progress_bar(total=len(lines), unit=" texts", disable=None) as bar:
        vectors = model.embed(
            lines,
            batch_size=options.batch_size,
            pooling=options.pooling,
            normalize=options.normalize or None,
            progress=bar.update,
        )
    if options.output is None:
        _write_lines(vectors, sys.stdout.write)
    elif options.output.suffix == ".npy":
        np.save(options.output, vectors)
    else:
        with options.output.open("w", encoding="utf-8") as file:
            _write_lines(vectors, file.write)


def _generate(options: argparse.Namespace) -> None:
    from fastattn.models import Decoder

    model = _load(options)
    if not isinstance(model, Decoder):
        raise ValueError(f"{options.model} holds a {model.model_type}; expected a decoder, as gpt2 or llama")
    (prompt,) = model.text.encode([options.prompt])
    if not prompt:
        raise ValueError("PROMPT has no token; expected a text to continue")
    tokens = model.generate(
        prompt,
        options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    for piece in model.text.stream(prompt, tokens):
        print(piece, end="", flush=True)
    print()


def _load(options: argparse.Namespace) -> Bert | Decoder:
    from fastattn.models import load

    return load(options.model, dtype=options.dtype, weights_dtype=options.weights_dtype)


def _lines(path: Path | None) -> list[str]:
    """The lines of a file, or of the standard input; only a line feed ends one."""
    try:
        data = sys.stdin.buffer.read() if path is None else path.read_bytes()
    except OSError as error:
        what = f"FILE {str(path)!r} cannot be read, {error.strerror}; expected a file of lines of text"
        raise ValueError(what) from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path or 'the standard input'} is not UTF-8: {error}") from error
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def _write_lines(vectors: Array, write: Callable[[str], object]) -> None:
    """One JSON list of numbers a line, each with as many digits as tell it from its neighbours."""
    for vector in vectors:
        write(f"[{', '.join(map(str, vector))}]\n")
