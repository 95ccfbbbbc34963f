"""Models that make vectors of texts: their common methods, the options of a call, and its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypedDict, TypeVar

import numpy as np

from fastattn._args.errors import named
from fastattn._args.options import require_options
from fastattn._args.types import Array, Ints, Unpack
from fastattn._args.values import flag, integer, short
from fastattn.models._files import require
from fastattn.models._sentences import Sentences
from fastattn.models._similarity import unit
from fastattn.models._text import Text, string, strings

_Model = TypeVar("_Model")


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Models by the names of routes; tasks are these names, or what `mappings` call them.

    One that is None is made when it is first used: by its name, with the tokenizer of the others.
    """

    models: dict[str, Any]
    usual: str | None  # of a text without a task
    mappings: Mapping[str, str]  # of other tasks to routes
    make: Callable[[str], Any] | None = None

    def of(self, task: Any) -> Any:
        """The model of a `task`."""
        if task is None or isinstance(task, str):
            names = self.mappings.get(task or ""), task, "text", self.usual if task is None else None
            found = next((name for name in names if name in self.models), None)
            if found is not None:
                if self.models[found] is None and self.make is not None:
                    self.models[found] = self.make(found)
                return self.models[found]
        expected = ", ".join(map(short, dict.fromkeys([*self.models, *self.mappings])))
        raise ValueError(f"(): task is {short(task)}; expected one of {expected}")


def routed(
    models: Mapping[str, _Model | None],
    usual: str | None,
    mappings: Mapping[str, str],
    make: Callable[[str], _Model] | None = None,
) -> _Model:
    """One of `models`, the `usual` one, which sends texts to the others by their task: see `Routes`.

    It has no tensors, and the other modules' tensors cannot be changed through it.
    """
    first: Any = models[next(iter(models)) if usual is None else usual]
    routes, encoder = Routes(dict(models), usual, mappings, make), getattr(first, "encoder", None)
    own = {"origin": None} if encoder is None else {"encoder": replace(encoder, origin=None)}
    found: _Model = replace(first, routes=routes, **own)
    return found


def model_of(model: _Model, task: Any, optional: bool = False) -> _Model:
    """Return the model of a `task`; without routes there are no tasks, and one raises unless `optional`."""
    routes: Routes | None = getattr(model, "routes")  # noqa: B009
    if routes is not None:
        found: Any = routes.of(task)
        if routes.make is not None:
            found = replace(found, text=getattr(model, "text"))  # noqa: B009
        same: _Model = found
        return same
    if task is not None and not optional:
        raise ValueError(f"(): task is {short(task)}; expected None: this model has no tasks")
    return model


Names = tuple[str, ...]

# Tokens that go through the layers at a time: so few that their rows stay in the caches, and enough for the
# products. docs/dev/layers-and-models.md has the times by this number.
_CALL_TOKENS = 768
QUERY, DOCUMENT = ("query",), ("document", "passage", "corpus")  # names of prompts, the first one there is


class TextOptions(TypedDict, total=False):
    """Keyword arguments of every `encode` and `predict`."""

    prompt_name: str | None
    prompt: str | None
    batch_size: int | None
    show_progress_bar: bool | None


class EncodeOptions(TextOptions, total=False):
    """Keyword arguments of `Encoder.encode`, which documents them."""

    normalize_embeddings: bool
    truncate_dim: int | None


class SparseOptions(TextOptions, total=False):
    """Keyword arguments of `SparseEncoder.encode`, which documents them."""

    max_active_dims: int | None


class MultiVectorOptions(TextOptions, total=False):
    """Keyword arguments of `MultiVectorEncoder.encode`, which documents them."""

    normalize_embeddings: bool


class _AnyOptions(EncodeOptions, SparseOptions, total=False):
    """Options of all kinds of models; each refuses the options that it does not take."""


class TextModel:
    """A model with a tokenizer that cuts texts."""

    __slots__ = ()
    text: Text
    routes: Routes | None = None  # where texts go by their task
    _pairs: ClassVar[bool] = False  # whether two texts may become one sequence

    @property
    def max_seq_length(self) -> int | None:
        """Maximum number of tokens of a text, or of a pair, with special tokens; longer texts are cut.

        Can be set, up to the model's own maximum. Running calls keep the length that they started with.
        """
        return self.text.limit

    @max_seq_length.setter
    @named("{cls}")
    def max_seq_length(self, tokens: int) -> None:
        self._replace_text(self.text.shortened(tokens, self._pairs))
        if self.routes is not None and self.routes.make is None:
            for model in self.routes.models.values():
                model.max_seq_length = tokens

    def _replace_text(self, text: Text) -> None:
        object.__setattr__(self, "text", text)


class Compared:
    """Similarities of the vectors that a model makes."""

    __slots__ = ()

    @named("similarity")
    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Similarity of each text of `embeddings1` to each of `embeddings2`, (n, m).

        `similarity_fn_name` is the measure. "cosine", "dot", "euclidean" and "manhattan" (negative
        distances) take vectors (n, features) and (m, features), or (features,) for one, sparse ones
        for a `SparseEncoder`. "maxsim" and "meanmaxsim", of a `MultiVectorEncoder`, are the sum and the
        mean over query tokens of the largest dot product with a document token; they take lists of arrays
        (tokens, features), or an array (n, tokens, features) padded with zeros. A document without tokens
        scores -1e9.
        """
        return self._compared(embeddings1, embeddings2, pairwise=False)

    @named("similarity_pairwise")
    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Similarity of each text of `embeddings1` to the one at the same index of `embeddings2`, (n,)."""
        return self._compared(embeddings1, embeddings2, pairwise=True)

    def _compared(self, a: Any, b: Any, pairwise: bool) -> Any:
        raise NotImplementedError


class TextEncoder(Compared, TextModel):
    """A model that makes vectors of texts, with other prompts for queries and documents."""

    __slots__ = ()

    @named("encode_query")
    def encode_query(self, sentences: str | Iterable[str], **options: Unpack[_AnyOptions]) -> Any:
        """Encode queries: `encode` with the task "query" and, by default, the prompt "query"."""
        return model_of(self, "query", optional=True)._encode(sentences, options, QUERY, "query")

    @named("encode_document")
    def encode_document(self, sentences: str | Iterable[str], **options: Unpack[_AnyOptions]) -> Any:
        """Encode documents: `encode` with the task "document" and, by default, the prompt "document".

        Without a prompt of that name, "passage" is used, then "corpus".
        """
        return model_of(self, "document", optional=True)._encode(sentences, options, DOCUMENT, "document")

    def _encode(self, sentences: Any, options: Any, names: Names = (), task: str | None = None) -> Any:
        """`encode`; the prompts `names` come before the default prompt."""
        raise NotImplementedError


class EncodeSettings(NamedTuple):
    """Checked options of a call of `encode`."""

    prompt: str
    batch_size: int | None
    progress: bool
    normalize: bool
    prompt_length: int = 0  # tokens
    features: int = 0  # of a vector

    @classmethod
    def of(cls, options: Any, kind: type[Any], settings: Sentences, names: Names = ()) -> EncodeSettings:
        """Check the options of a `kind` that every `encode` has; `names` are names of prompts."""
        require_options(options, kind, *(() if names else ("task",)))  # queries and documents have theirs
        size, shows = options.get("batch_size"), options.get("show_progress_bar")
        return cls(
            settings.prompt(options.get("prompt_name"), options.get("prompt"), names),
            None if size is None else integer("batch_size", size, 1),
            shows is not None and flag("show_progress_bar", shows),
            flag("normalize_embeddings", options.get("normalize_embeddings", False)),
        )

    def finished(self, vectors: Array) -> Array:
        """Cut and scale pooled vectors (n, features or more) for the caller."""
        vectors = vectors[:, : self.features]
        return np.ascontiguousarray(unit(vectors) if self.normalize else vectors)


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
