"""Calls that make vectors of texts: their options, and how many texts go through the layers together."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np

from fastattn._args.options import require_options
from fastattn._args.values import flag, integer
from fastattn.models._files import require
from fastattn.models._text import string, strings
from fastattn.models._vectors import quantize_embeddings, unit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fastattn._args.types import Array, Ints
    from fastattn.models._sentences import Sentences

    Names = tuple[str, ...]

# Tokens that go through the layers at a time: so few that their rows stay in the caches, and enough for the
# products. docs/dev/layers-and-models.md has the times by this number.
_CALL_TOKENS = 768
QUERY, DOCUMENT = ("query",), ("document", "passage", "corpus")  # names of prompts, the first one there is


class TextOptions(TypedDict, total=False):
    """Keyword arguments of every `encode`."""

    prompt_name: str | None
    prompt: str | None
    batch_size: int | None
    show_progress_bar: bool | None


class EncodeOptions(TextOptions, total=False):
    """Keyword arguments of `Encoder.encode`, which documents them."""

    precision: str
    normalize_embeddings: bool
    truncate_dim: int | None


def given(kind: type[Any], *values: Any, **others: Any) -> Any:
    """Options of a `kind`, a TypedDict, by its names; `others` are an error, which lists them and `task`."""
    require_options(others, kind, "task")
    return dict(zip(kind.__annotations__, values, strict=True))


class Call(NamedTuple):
    """Checked options of a call of `encode`."""

    prompt: str
    batch_size: int | None
    progress: bool
    normalize: bool
    prompt_length: int = 0  # tokens
    precision: str = "float32"
    features: int = 0  # of a vector, before it is packed

    @classmethod
    def of(cls, options: Any, kind: type[Any], settings: Sentences, names: Names) -> Call:
        """Check the options of a `kind` that every `encode` has; `names` are those of prompts."""
        require_options(options, kind)
        size, shows = options.get("batch_size"), options.get("show_progress_bar")
        return cls(
            settings.prompt(options.get("prompt_name"), options.get("prompt"), names),
            None if size is None else integer("batch_size", size, 1),
            shows is not None and flag("show_progress_bar", shows),
            flag("normalize_embeddings", options.get("normalize_embeddings", False)),
        )

    def packed(self, vectors: Array) -> Array:
        """Cut, scale and quantize pooled vectors (n, features or more) for the caller."""
        vectors = vectors[:, : self.features]
        vectors = unit(vectors) if self.normalize else vectors
        if self.precision in ("binary", "ubinary"):
            return quantize_embeddings(vectors, self.precision)
        return np.ascontiguousarray(vectors)


def one_or_several(sentences: Any, name: str = "sentences") -> tuple[bool, Iterable[str]]:
    """Return whether `sentences`, the argument `name`, is one text, and the checked texts."""
    if isinstance(sentences, str):
        return True, [string(name, sentences)]
    return False, strings(name, sentences, "a string, or several, as [text]")


def watched(chunks: Iterator[Any], progress: bool, texts: Iterable[Any]) -> Iterator[Any]:
    """Yield `chunks` of what is made of `texts`, with a progress bar if asked."""
    total = len(texts) if isinstance(texts, Sized) else None
    return with_bar(chunks, total=total) if progress else chunks


def with_bar(chunks: Iterator[Array], **how: Any) -> Iterator[Array]:
    """Yield `chunks`, and count their rows in a progress bar of tqdm."""
    with require("tqdm").tqdm(unit=" texts", **how) as bar:
        for vectors in chunks:
            yield vectors
            bar.update(len(vectors))


def calls(encoded: Iterable[list[Any]], batch_size: int | None) -> Iterator[list[Ints]]:
    """The ids of the texts, or what there is of each token, that go through the layers together."""
    call: list[Ints] = []
    tokens, most = 0, min(batch_size or _CALL_TOKENS, _CALL_TOKENS)  # texts without tokens count, too
    for ids in encoded:
        if call and (tokens + len(ids) > _CALL_TOKENS or len(call) == most):
            yield call
            call, tokens = [], 0
        call.append(np.array(ids, np.int64))
        tokens += len(ids)
    if call:
        yield call


def at_once(rows: int) -> int:
    """Number of inputs of so many `rows` each that go through the layers together."""
    return max(1, _CALL_TOKENS // rows)
