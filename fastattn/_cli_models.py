"""``python -m fastattn embed`` and ``generate``: texts to vectors, and texts continued."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import wraps
from io import TextIOWrapper
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import BinaryIO, TextIO

    from fastattn._args.types import Array
    from fastattn.models import Decoder, Encoder

SUFFIXES = (".npy", ".jsonl")


def _said(work: Callable[[argparse.Namespace], None]) -> Callable[[argparse.Namespace], int]:
    """A command that returns an exit status; what is wrong with files or arguments is one line."""

    @wraps(work)
    def command(options: argparse.Namespace) -> int:
        try:
            work(options)
        except BrokenPipeError:  # whoever read has read enough
            sys.stdout = None
        except (ImportError, OSError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return 0

    return command


@_said
def embed(options: argparse.Namespace) -> None:
    """Turn lines of text into vectors with an encoder (BERT, RoBERTa, MiniLM)."""
    from fastattn.models import Encoder
    from fastattn.models._files import require

    progress_bar = require("tqdm").tqdm
    model = _loaded(options)
    if not isinstance(model, Encoder):
        raise ValueError(f"{options.model} holds a {model.model_type}; expected a model of the BERT family")
    with _opened(options.file) as file:
        total, lines = _lines(file)
        with progress_bar(total=total, unit=" texts", disable=None) as bar:
            how = {
                "batch_size": options.batch_size,
                "pooling": options.pooling,
                "normalize": options.normalize or None,
                "progress": bar.update,
            }
            if options.output is None:
                _write_lines(model.embed_stream(lines, **how), sys.stdout)
            elif options.output.suffix == ".npy":
                np.save(options.output, model.embed(lines, **how))
            else:
                vectors = model.embed_stream(lines, **how)
                with options.output.open("w", encoding="utf-8") as output:
                    _write_lines(vectors, output)


@_said
def generate(options: argparse.Namespace) -> None:
    """Continue a text with a decoder (GPT-2, Llama, Mistral, Qwen2, Qwen3)."""
    from fastattn.models import Decoder

    model = _loaded(options)
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
        rng=options.seed,
        cache_dtype=options.cache_dtype,
    )
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model writes characters that a terminal may not show
    for piece in model.text.stream(prompt, tokens):
        print(piece, end="", flush=True)
    print()


def _loaded(options: argparse.Namespace) -> Encoder | Decoder:
    """The model that the options name, in the types that they name."""
    from fastattn.models import load

    how = {name: getattr(options, name) for name in ("dtype", "weights_dtype", "activations")}
    return load(options.model, **how)


def _opened(path: Path | None) -> AbstractContextManager[BinaryIO]:
    """The file, or the standard input."""
    if path is None:
        return nullcontext(sys.stdin.buffer)
    try:
        return path.open("rb")
    except OSError as error:
        what = f"FILE {str(path)!r} cannot be read, {error.strerror}; expected a file of lines of text"
        raise ValueError(what) from error


def _lines(file: BinaryIO) -> tuple[int | None, Iterator[str]]:
    """How many lines of text there are, where that can be known, and they; only a line feed ends one."""
    if not file.seekable():  # a pipe
        return None, _decoded(file)
    start = file.tell()
    total = sum(1 for _ in _decoded(file))  # so that what is no text is known before anything is computed
    file.seek(start)
    return total, _decoded(file)


def _decoded(file: BinaryIO) -> Iterator[str]:
    name, number = "the standard input" if file is sys.stdin.buffer else file.name, 0
    try:
        for number, line in enumerate(file, 1):  # noqa: B007 - the line that is wrong
            yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 in line {number}: {error}") from error


def _write_lines(windows: Iterable[Array], file: TextIO) -> None:
    """One JSON list of numbers a line, each with as many digits as tell it from its neighbours."""
    for vectors in windows:
        for vector in vectors:
            file.write(f"[{', '.join(map(str, vector))}]\n")
        file.flush()
