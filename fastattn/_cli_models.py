"""``python -m fastattn embed``, ``rerank``, ``generate``, ``chat``, and their files of texts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fastattn import models
from fastattn._args.errors import named, naming
from fastattn._args.options import SamplingOptions
from fastattn._args.types import Array, lane_dtype
from fastattn._args.values import short
from fastattn._regular_files import replaced
from fastattn.models import Piece
from fastattn.models._encode_calls import model_of, with_bar
from fastattn.models._files import require
from fastattn.models._hub import place_of
from fastattn.models._sampling import Sampling
from fastattn.models._text import require_whole

# Options that are arguments of `load`, and of `encode`; what the others say does not change a vector.
_LOADED = ("dtype", "weights_dtype", "activations")
_SCORED = ("prompt_name", "prompt", "batch_size")
_INSTEAD = {  # by the classes of models
    "Encoder": "The command embed takes it",
    "TwoTowers": "The command embed takes it",
    "CrossEncoder": "The command rerank takes it",
    "SparseEncoder": "Its encode makes sparse vectors, in Python",
    "MultiVectorEncoder": "Its encode makes a vector of each token, in Python",
    "Decoder": "The commands generate and chat take it",
}


def _said(work: Callable[[argparse.Namespace], None]) -> Callable[[argparse.Namespace], int]:
    """A command that returns an exit status; what is wrong with arguments or models is one line."""

    @wraps(work)
    def command(options: argparse.Namespace) -> int:
        try:
            work(options)
        except (ImportError, ValueError) as error:
            print(f"error: {str(error).removeprefix('(): ')}", file=sys.stderr)
            return 1
        return 0

    return command


@_said
@named("embed")
def embed(options: argparse.Namespace) -> None:
    """Turn texts into vectors with an encoder."""
    output: Path | None = options.output
    texts = Texts(options.file, options.column)
    if output is not None:
        texts.require_other(output)
    model = _loaded(options, models.Encoder)
    model = model_of(model, options.task)
    how: Any = {name: getattr(options, name) for name in (*_SCORED, "normalize_embeddings", "truncate_dim")}
    call = model._checked(how)
    # A file is looked through first: what is no text is found before anything is computed.
    total = sum(1 for _ in texts) if texts.again else None
    vectors = _with_bar(model._vectors(iter(texts), call), total=total)
    if output is not None:
        with naming(output), replaced(output) as new:
            _write_npy(new, vectors, call.finished(np.empty((0, call.features), lane_dtype(model.dtype))))
        return
    for block in vectors:  # each number has as many digits as tell it from its neighbours
        for vector in block:
            print(f"[{', '.join(map(str, vector))}]")
        sys.stdout.flush()


@_said
def rerank(options: argparse.Namespace) -> None:
    """Rank texts by relevance to a query with a cross-encoder; prints one JSON line per text."""
    texts = Texts(options.file, options.column)
    model = _loaded(options, models.CrossEncoder)
    how = {name: getattr(options, name) for name in ("top_k", *_SCORED)}
    for found in model.rank(options.query, list(texts), return_documents=True, **how):
        print(json.dumps(found, ensure_ascii=False))


@_said
def generate(options: argparse.Namespace) -> None:
    """Continue a text with a language model (GPT-2, Llama and its family, GGUF files)."""
    model = _decoder(options)
    # The end of a file's last line is no part of a text: after it, models write something else.
    prompt = sys.stdin.read().removesuffix("\n") if options.prompt == "-" else options.prompt
    if not model.text.encode([prompt])[0]:
        raise ValueError("PROMPT has no token; expected a text to continue")
    for piece in model.generate(prompt, options.max_new_tokens, **_sampling(options)):
        print(piece.text, end="", flush=True)
    print()


@_said
def chat(options: argparse.Namespace) -> None:
    """Talk with a language model: /reset, /quit; Ctrl-C ends an answer."""
    require("jinja2")  # before a model is read and a question is asked
    model = _decoder(options)
    given = _sampling(options)
    session = model.session(given.pop("cache_dtype"))
    if options.temperature is None:  # as the model's files recommend, but for what is given
        given = {**model.usual_sampling(), **{name: x for name, x in given.items() if x is not None}}
    draw: Any = {name: x for name, x in given.items() if name in SamplingOptions.__annotations__}
    named("chat")(Sampling)(draw)
    first = [] if options.system is None else [{"role": "system", "content": options.system}]
    messages = list(first)
    for line in iter(partial(_line, "> "), None):
        if line == "/quit":
            return
        if line == "/reset":
            messages = list(first)
        elif line.startswith("/"):
            print("expected /reset or /quit", file=sys.stderr)
        elif line:
            messages.append({"role": "user", "content": line})
            said: list[Piece] = []
            try:
                for piece in model.generate(messages, options.max_new_tokens, cache=session, **given):
                    if piece.text and piece.kind != (said[-1].kind if said else "text"):
                        print(f"\n[{piece.kind}]")
                    print(piece.text, end="", flush=True)
                    said.append(piece)
            except KeyboardInterrupt:  # what was said stays
                pass
            print()
            messages.append(models.message_of(said))


def _line(prompt: str) -> str | None:
    """The next line of standard input; None at its end."""
    is_terminal = sys.stdin.isatty()
    try:
        return input(prompt if is_terminal else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:  # one that came after an answer had ended
        if not is_terminal:
            raise
        print()
        return ""


def _with_bar(chunks: Iterator[Array], **how: Any) -> Iterator[Array]:
    """`with_bar` on a terminal, where tqdm is installed."""
    shown = sys.stderr is not None and sys.stderr.isatty() and find_spec("tqdm") is not None
    return with_bar(chunks, **how) if shown else chunks


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    found = {name: x for name, x in vars(options).items() if name in SamplingOptions.__annotations__}
    others = {name: getattr(options, name) for name in ("cache_dtype", "stop", "speculate")}
    return {**others, **found}


def _decoder(options: argparse.Namespace) -> models.Decoder:
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model writes characters that a terminal may not show
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    model: models.Decoder = _loaded(options, models.Decoder)
    return model


def _loaded(options: argparse.Namespace, kind: type[Any]) -> Any:
    """The model that the options name, which must be a `kind`; `options.model` becomes its place."""
    options.model = place_of(options.model, options.revision, options.gguf_file)
    model: Any = models.load(options.model, **{name: getattr(options, name) for name in _LOADED})
    if not isinstance(model, kind):
        there = type(model).__name__
        came = f"{options.model} holds {'an' if there[0] in 'AEIOU' else 'a'} {there} ({model.model_type})"
        raise ValueError(f"{came}; expected a model of the class {kind.__name__}. {_INSTEAD[there]}")
    return model


@dataclass(frozen=True)
class Texts:
    """Texts of a file, lines or rows of JSON, or lines of the standard input."""

    path: Path | None
    column: str | None  # of rows

    def __post_init__(self) -> None:
        if self.column is not None and not self._has_rows:
            kind = "the standard input" if self.path is None else f"a file {self.path.suffix!r}"
            came = f"--column is {self.column!r} for {kind}, which has lines of text"
            raise ValueError(f"{came}; expected it for .jsonl")
        if self.path is not None and self.path.suffix.lower() in (".csv", ".parquet"):
            raise ValueError(f"FILE {str(self.path)!r} is a table; expected lines of text, or .jsonl")
        if self.path is not None and not self.path.exists():
            expected = "a file of texts (for a text itself, use standard input: echo TEXT | python -m ...)"
            raise ValueError(f"FILE {str(self.path)!r} does not exist; expected {expected}")

    @property
    def again(self) -> bool:
        """Whether they can be read a second time, which a pipe cannot."""
        return self.path is not None and self.path.is_file()

    @property
    def _has_rows(self) -> bool:
        return self.path is not None and self.path.suffix.lower() == ".jsonl"

    def __iter__(self) -> Iterator[str]:
        name, number = "the standard input" if self.path is None else str(self.path), 0
        read, unit = (
            (partial(_rows, column=self.column or "text"), "row") if self._has_rows else (_lines, "line")
        )
        try:
            with nullcontext(sys.stdin.buffer) if self.path is None else self.path.open("rb") as file:
                for text in read(file):
                    require_whole("the text", text)  # JSON may hold halves of characters
                    yield text
                    number += 1
        except OSError as error:
            raise ValueError(f"FILE {name!r} cannot be read, {error.strerror or error}") from error
        except UnicodeError as error:
            raise ValueError(f"{name} is not UTF-8 in {unit} {number + 1}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{name}, {unit} {number + 1}: {str(error).removeprefix('(): ')}") from error

    def require_other(self, output: Path) -> None:
        """Raise if the file is the one that will be written."""
        if self.path is not None and output.exists() and output.samefile(self.path):
            raise ValueError(f"FILE {str(self.path)!r} is written by --output; expected another file")


def _lines(file: BinaryIO) -> Iterator[str]:
    """Lines of text; only a line feed ends one, or a carriage return before it."""
    for line in file:
        yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")


def _rows(file: BinaryIO, column: str) -> Iterator[str]:
    """The texts in a column of JSON lines."""
    for i, line in enumerate(_lines(file)):
        line = line if i else line.removeprefix("\ufeff")
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except RecursionError as error:
            raise ValueError(str(error)) from None
        if not isinstance(row, dict) or column not in row:
            raise ValueError(f"{short(row)} has no {column!r}; expected it (--column names another)")
        if not isinstance(row[column], str):
            raise ValueError(f"{short(row[column])} is not a text; expected a string")
        yield row[column]


def _write_npy(path: Path, blocks: Iterator[Array], empty: Array) -> None:
    """An array, whose header is written again when its rows are counted; NumPy leaves room for any number."""
    header = {"descr": empty.dtype.str, "fortran_order": False, "shape": empty.shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        rows = 0
        for vectors in blocks:
            file.write(np.ascontiguousarray(vectors).data)
            rows += len(vectors)
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, {**header, "shape": (rows, *empty.shape[1:])})
