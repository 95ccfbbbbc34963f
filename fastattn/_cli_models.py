"""``python -m fastattn embed``, ``rerank``, ``predict``, ``generate``, ``chat``: models and texts."""

from __future__ import annotations

import json
import sys
from functools import partial, wraps
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fastattn._args.errors import named, naming
from fastattn._args.options import SamplingOptions
from fastattn._args.types import lane_dtype
from fastattn._args.values import short
from fastattn._cli_texts import WRITERS, Texts, parquet_library, write_json_lines
from fastattn._regular_files import replaced
from fastattn.models._encode_calls import with_bar
from fastattn.models._files import require
from fastattn.models._generation import checked, is_conversation
from fastattn.models._hub import place_of
from fastattn.models._routes import model_of
from fastattn.models._sampling import Sampling

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator

    from fastattn._args.types import Array
    from fastattn.models import (
        CrossEncoder,
        Decoder,
        Encoder,
        MultiVectorEncoder,
        Piece,
        SparseEncoder,
        TokenClassifier,
    )
    from fastattn.models._encode_calls import EncodeOptions

# Options that are arguments of `load`, and of `encode`; what the others say does not change a vector.
_LOADED = ("dtype", "weights_dtype", "activations")
_SCORED = ("prompt_name", "prompt", "batch_size")
_ENCODED = ("prompt_name", "prompt", "batch_size", "precision", "normalize_embeddings", "truncate_dim")

# What to do with other models, by their classes.
_INSTEAD = {
    "CrossEncoder": "Use the commands rerank and predict",
    "TokenClassifier": "Call it with ids, in Python",
    "SparseEncoder": "Use its encode, in Python, for sparse vectors",
    "MultiVectorEncoder": "Use its encode, in Python, for one vector per token",
    "Decoder": "Use the command generate",
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
    """Embed texts with an encoder."""
    from fastattn.models import Encoder

    output: Path | None = options.output
    texts = Texts(options.file, options.column)
    if output is not None:
        texts.require_other(output)
        if output.suffix == ".parquet":
            parquet_library()
    model = _loaded(options)
    if not isinstance(model, Encoder):
        kind = type(model).__name__
        came = f"{options.model} holds a {kind} ({model.model_type})"
        raise ValueError(f"{came}; expected an Encoder. {_INSTEAD[kind]}")
    model = model_of(model, options.task)
    how = {name: getattr(options, name) for name in _ENCODED}
    call = model._checked(cast("EncodeOptions", how))
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
    model = _cross_encoder(options)
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
    model = _cross_encoder(options)
    labels = list(model.labels)
    chunks = model._scores(pairs, **{name: getattr(options, name) for name in _SCORED})
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
    """Chat with a language model: /reset, /save FILE, /load FILE, /quit; Ctrl-C ends an answer."""
    from fastattn.models import message_of

    require("jinja2")  # which templates need, before a model is read and a question is asked
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
                    with naming(Path(name.strip())), replaced(Path(name.strip())) as file:
                        file.write_text(
                            json.dumps(messages, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
                        )
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
            messages.append(message_of(said))


def _conversation(path: Path) -> list[dict[str, Any]]:
    """The messages that /save wrote to a file."""
    try:
        messages = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; expected a file that /save wrote") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}; expected what /save wrote") from None
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


def _decoder(options: argparse.Namespace) -> Decoder:
    from fastattn.models import Decoder

    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model writes characters that a terminal may not show
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    model = _loaded(options)
    if not isinstance(model, Decoder):
        raise ValueError(f"{options.model} holds a {model.model_type}; expected a decoder, as gpt2 or llama")
    return model


def _cross_encoder(options: argparse.Namespace) -> CrossEncoder:
    from fastattn.models import CrossEncoder

    model = _loaded(options)
    if not isinstance(model, CrossEncoder):
        came = f"{options.model} holds a {model.model_type}; its class is {type(model).__name__}"
        raise ValueError(f"{came}; expected a CrossEncoder, with a head for texts")
    return model


def _loaded(
    options: argparse.Namespace,
) -> Encoder | CrossEncoder | TokenClassifier | SparseEncoder | MultiVectorEncoder | Decoder:
    """The model that the options name, in the types that they name; `options.model` becomes its place."""
    from fastattn.models import load

    options.model = place_of(options.model, options.revision, options.gguf_file)
    return load(options.model, **{name: getattr(options, name) for name in _LOADED})
