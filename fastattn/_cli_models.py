"""``python -m fastattn embed``, ``rerank``, ``predict``, ``generate``, ``chat``, and their files of texts."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from importlib.util import find_spec
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn import models
from fastattn._args.errors import named, naming
from fastattn._args.options import SamplingOptions
from fastattn._args.types import lane_dtype
from fastattn._args.values import short
from fastattn._regular_files import replaced
from fastattn.models._encode_calls import with_bar
from fastattn.models._files import require
from fastattn.models._generation import checked, is_conversation
from fastattn.models._hub import place_of
from fastattn.models._routes import model_of
from fastattn.models._sampling import Sampling
from fastattn.models._text import require_whole

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator
    from typing import BinaryIO, TextIO

    from fastattn._args.types import Array
    from fastattn.models import Piece

# Options that are arguments of `load`, and of `encode`; what the others say does not change a vector.
_LOADED = ("dtype", "weights_dtype", "activations")
_SCORED = ("prompt_name", "prompt", "batch_size")
_ENCODED = (*_SCORED, "precision", "normalize_embeddings", "truncate_dim")
_INSTEAD = {  # by the classes of models
    "Encoder": "The command embed takes it",
    "TwoTowers": "The command embed takes it",
    "CrossEncoder": "The commands rerank and predict take it",
    "TokenClassifier": "It is called with ids, in Python",
    "SparseEncoder": "Its encode makes sparse vectors, in Python",
    "MultiVectorEncoder": "Its encode makes a vector of each token, in Python",
    "Decoder": "The commands generate and chat take it",
}
_COLUMN = "text"
_BLOCK = 8192  # rows of a Parquet file that are read or written at a time
_MOST_CHARACTERS = 2**31 - 1  # of a field in a CSV file; the module's own limit is 131072


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
        if output.suffix == ".parquet":
            parquet_library()
    model = _loaded(options, models.Encoder)
    model = model_of(model, options.task)
    how: Any = {name: getattr(options, name) for name in _ENCODED}
    call = model._checked(how)
    # A file is looked through first: what is no text is found before anything is computed.
    total = sum(1 for _ in texts) if texts.again else None
    vectors = _with_bar(model._vectors(iter(texts), call), total=total)
    if output is None:
        write_json_lines(vectors, sys.stdout)
        return
    empty = call.packed(np.empty((0, call.features), lane_dtype(model.dtype)))
    with naming(output), replaced(output) as new:
        WRITERS[output.suffix](new, vectors, empty)


@_said
def rerank(options: argparse.Namespace) -> None:
    """Rank texts by relevance to a query with a cross-encoder; prints one JSON line per text."""
    texts = Texts(options.file, options.column)
    model = _loaded(options, models.CrossEncoder)
    how = {name: getattr(options, name) for name in ("top_k", *_SCORED)}
    for found in model.rank(options.query, list(texts), return_documents=True, **how):
        print(json.dumps(found, ensure_ascii=False))


@_said
@named("predict")
def predict(options: argparse.Namespace) -> None:
    """Score texts or pairs with a cross-encoder or classifier; prints one JSON line each."""
    firsts = Texts(options.file, options.column)
    pairs: Iterable[tuple[str, ...]] = ((text,) for text in firsts)
    if options.pair is not None:  # the second column, read beside the first one
        pairs = zip(firsts, Texts(options.file, options.pair, "--pair"), strict=True)
    model = _loaded(options, models.CrossEncoder)
    labels = list(model.labels)
    how: Any = {name: getattr(options, name) for name in _SCORED}
    chunks = model._scores(pairs, how)
    for scores in _with_bar(chunks):
        for row in scores.tolist():
            print(json.dumps({"labels": labels, "scores": row}, ensure_ascii=False))
        sys.stdout.flush()


@_said
def info(options: argparse.Namespace) -> None:
    """Print the metadata of a GGUF file."""
    from fastattn.models._gguf import described

    print(described(options.model))


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
    """Talk with a language model: /reset, /save FILE, /load FILE, /quit; Ctrl-C ends an answer."""
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
            command, _, name = line.partition(" ")
            if command not in ("/save", "/load") or not name.strip():
                print("expected /reset, /save FILE, /load FILE or /quit", file=sys.stderr)
                continue
            try:
                if command == "/load":
                    messages = _conversation(Path(name.strip()))
                    done = "messages are read from"
                elif messages == first:
                    raise ValueError("nothing has been said; no file is written")
                else:
                    written = json.dumps(messages, ensure_ascii=False, indent=1) + "\n"
                    with naming(Path(name.strip())), replaced(Path(name.strip())) as file:
                        file.write_text(written, encoding="utf-8")
                    done = "messages are in"
                print(f"{len(messages)} {done} {name.strip()}", file=sys.stderr)
            except (OSError, ValueError) as error:  # what was said is not lost
                print(f"error: {error}", file=sys.stderr)
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


def _conversation(path: Path) -> list[dict[str, Any]]:
    """The messages that /save wrote to a file."""
    try:
        messages = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; expected a file that /save wrote") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}; expected a file that /save wrote") from None
    if not is_conversation(messages):
        raise ValueError(f"{path} holds {short(messages)}; expected a list of messages, as /save writes it")
    try:
        return checked(messages)
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).removeprefix('(): ids has ')}") from None


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
    """Texts of a file, whose suffix is its format, or lines of the standard input."""

    path: Path | None
    column: str | None  # in files that have columns
    option: str = "--column"  # that names it

    def __post_init__(self) -> None:
        kind = "the standard input" if self.path is None else f"a file {self.path.suffix!r}"
        if self.column is not None and self._columns is None:
            expected = f"it for {', '.join(_COLUMNS)}"
            came = f"{self.option} is {self.column!r} for {kind}, which has lines of text"
            raise ValueError(f"{came}; expected {expected}")
        if self.path is not None and not self.path.exists():
            expected = "a file of texts (for a text itself, use standard input: echo TEXT | python -m ...)"
            raise ValueError(f"FILE {str(self.path)!r} does not exist; expected {expected}")

    @property
    def again(self) -> bool:
        """Whether they can be read a second time, which a pipe cannot."""
        return self.path is not None and self.path.is_file()

    @property
    def _columns(self) -> Callable[[BinaryIO, str], Iterator[Any]] | None:
        return None if self.path is None else _COLUMNS.get(self.path.suffix.lower())

    def __iter__(self) -> Iterator[str]:
        name, number = "the standard input" if self.path is None else str(self.path), 0
        read, unit = (_lines, "line") if self._columns is None else (self._columns, "row")
        try:
            with nullcontext(sys.stdin.buffer) if self.path is None else self.path.open("rb") as file:
                for text in map(_text, read(file, self.column or _COLUMN)):
                    yield text
                    number += 1
        except OSError as error:
            raise ValueError(f"FILE {name!r} cannot be read, {error.strerror or error}") from error
        except UnicodeError as error:
            raise ValueError(f"{name} is not UTF-8 in {unit} {number + 1}: {error}") from error
        except _NotThere as error:
            raise ValueError(f"{name}: {error}") from None
        except ValueError as error:
            raise ValueError(f"{name}, {unit} {number + 1}: {str(error).removeprefix('(): ')}") from error

    def require_other(self, output: Path) -> None:
        """Raise if the file is the one that will be written."""
        if self.path is not None and output.exists() and output.samefile(self.path):
            raise ValueError(f"FILE {str(self.path)!r} is written by --output; expected another file")


class _NotThere(ValueError):
    """A column is not in a file, or is there twice."""


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{short(value)} is not a text; expected a string")
    require_whole("the text", value)  # JSON may hold halves of characters
    return value


def _lines(file: BinaryIO, column: str) -> Iterator[str]:
    """Lines of text; only a line feed ends one, or a carriage return before it."""
    for line in file:
        yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")


def _json_lines(file: BinaryIO, column: str) -> Iterator[Any]:
    for i, line in enumerate(_lines(file, column)):
        line = line if i else line.removeprefix("\ufeff")
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except RecursionError as error:
            raise ValueError(str(error)) from None
        if not isinstance(row, dict) or column not in row:
            raise ValueError(f"{short(row)} has no {column!r}; expected it (--column names another)")
        yield row[column]


def _csv(file: BinaryIO, column: str) -> Iterator[str]:
    csv.field_size_limit(_MOST_CHARACTERS)
    lines = (line.decode("utf-8") for line in file)
    rows = csv.reader(chain((line.removeprefix("\ufeff") for line in islice(lines, 1)), lines), strict=True)
    try:
        names = next(rows, [])
        index = _index(column, names)
        for row in filter(None, rows):  # without empty lines
            if len(row) != len(names):
                raise ValueError(f"{len(row)} fields; expected {len(names)}, as in the first line")
            yield row[index]
    except csv.Error as error:
        raise ValueError(f"not CSV: {error}") from error


def _parquet(file: BinaryIO, column: str) -> Iterator[Any]:
    parquet = parquet_library().ParquetFile(file)
    _index(column, parquet.schema_arrow.names)
    for batch in parquet.iter_batches(_BLOCK, columns=[column]):
        yield from batch.column(0).to_pylist()


def _index(column: str, names: list[str]) -> int:
    """Index of the column with this name."""
    if column not in names:
        there = ", ".join(map(short, names)) or "none"
        raise _NotThere(f"column {column!r} is missing; expected one of {there} (--column names it)")
    if names.count(column) > 1:
        raise _NotThere(f"{names.count(column)} columns have the name {column!r}; expected one")
    return names.index(column)


_COLUMNS: dict[str, Callable[[BinaryIO, str], Iterator[Any]]] = {
    ".jsonl": _json_lines,
    ".csv": _csv,
    ".parquet": _parquet,
}


def parquet_library() -> Any:
    """The module `pyarrow.parquet`."""
    require("pyarrow")
    return importlib.import_module("pyarrow.parquet")


def write_json_lines(blocks: Iterable[Array], file: TextIO) -> None:
    """One JSON list of numbers a line, each with as many digits as tell it from its neighbours."""
    for vectors in blocks:
        for vector in vectors:
            file.write(f"[{', '.join(map(str, vector))}]\n")
        file.flush()


def _write_json(path: Path, blocks: Iterable[Array], empty: Array) -> None:
    with path.open("w", encoding="utf-8") as file:
        write_json_lines(blocks, file)


def _write_npy(path: Path, blocks: Iterable[Array], empty: Array) -> None:
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


def _write_parquet(path: Path, blocks: Iterable[Array], empty: Array) -> None:
    """One column, "embedding", of lists of one length."""
    parquet, arrow = parquet_library(), require("pyarrow")
    kind = arrow.list_(arrow.from_numpy_dtype(empty.dtype), empty.shape[1])
    schema = arrow.schema([("embedding", kind)])
    with parquet.ParquetWriter(path, schema) as writer:
        held: list[Array] = []

        def write() -> None:
            values = arrow.array(np.concatenate([empty, *held]).reshape(-1))
            column = arrow.FixedSizeListArray.from_arrays(values, type=kind)
            writer.write_table(arrow.table([column], schema=schema))
            held.clear()

        for block in blocks:
            held.append(block)
            if sum(map(len, held)) >= _BLOCK:
                write()
        if held:
            write()


# By suffix: what writes blocks of vectors to a path, given none, `empty`, for their length and type.
WRITERS: dict[str, Callable[[Path, Iterable[Array], Array], None]] = {
    ".npy": _write_npy,
    ".jsonl": _write_json,
    ".parquet": _write_parquet,
}
