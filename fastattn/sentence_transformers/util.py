"""Functions of `sentence_transformers.util` for search, pairs and groups, with its names and signatures.

Arrays and tensors of torch are taken; similarities of tensors are tensors. `fastattn.models.nearest`,
`like_pairs` and `communities` compute: nothing of the size queries times corpus is in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.errors import named, wrong_dtype, wrong_shape
from fastattn._args.types import FLOAT64
from fastattn._args.values import integer, is_float, number, real_array
from fastattn.models import communities, like_pairs, nearest, quantize_embeddings
from fastattn.models._vectors import similarities, unit, vectors_of
from fastattn.sentence_transformers._tensors import arrays_of, torch_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastattn._args.types import Array
    from fastattn.sentence_transformers import SentenceTransformer

__all__ = [
    "community_detection",
    "cos_sim",
    "dot_score",
    "normalize_embeddings",
    "paraphrase_mining",
    "paraphrase_mining_embeddings",
    "quantize_embeddings",
    "semantic_search",
]


def __dir__() -> list[str]:
    return __all__


@named("cos_sim")
def cos_sim(a: Any, b: Any) -> Any:
    """Cosine of each vector with each, (n, m)."""
    return _compared("cosine", a, b)


@named("dot_score")
def dot_score(a: Any, b: Any) -> Any:
    """Product of each vector with each, (n, m)."""
    return _compared("dot", a, b)


@named("normalize_embeddings")
def normalize_embeddings(embeddings: Any) -> Any:
    """The vectors at length 1."""
    x, of_torch = arrays_of("embeddings", embeddings)
    return _returned(unit(vectors_of("embeddings", x)), of_torch)


@named("semantic_search")
def semantic_search(
    query_embeddings: Any,
    corpus_embeddings: Any,
    query_chunk_size: int = 100,
    corpus_chunk_size: int = 500000,
    top_k: int = 10,
    score_function: Callable[..., Any] = cos_sim,
) -> list[list[dict[str, int | float]]]:
    """Find the vectors nearest to each query: a list of ``{"corpus_id": ..., "score": ...}``, the best first.

    `score_function` is `cos_sim` or `dot_score`. The sizes of chunks change nothing.
    """
    queries = np.atleast_2d(_checked("query_embeddings", query_embeddings))
    corpus = _checked("corpus_embeddings", corpus_embeddings)
    if corpus.ndim != 2 or (corpus.shape[1] != queries.shape[1]):
        raise wrong_shape("corpus_embeddings", corpus, f"(vectors, {queries.shape[1]}), as query_embeddings")
    found = nearest(queries, corpus, integer("top_k", top_k, 1), similarity=_kind(score_function))
    return [
        [{"corpus_id": i, "score": score} for i, score in zip(ids, scores, strict=True)]
        for ids, scores in zip(found.ids.tolist(), found.scores.tolist(), strict=True)
    ]


@named("paraphrase_mining")
def paraphrase_mining(
    model: SentenceTransformer,
    sentences: Sequence[str],
    show_progress_bar: bool = False,
    batch_size: int = 32,
    query_chunk_size: int = 5000,
    corpus_chunk_size: int = 100000,
    max_pairs: int = 500000,
    top_k: int = 100,
    score_function: Callable[..., Any] = cos_sim,
    truncate_dim: int | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
) -> list[list[float | int]]:
    """Find the most similar pairs of texts: lists of score, and two numbers of texts; the best first."""
    vectors = model.encode(
        sentences,
        prompt_name=prompt_name,
        prompt=prompt,
        batch_size=batch_size,
        show_progress_bar=show_progress_bar,
        truncate_dim=truncate_dim,
    )
    return paraphrase_mining_embeddings(
        vectors, max_pairs=max_pairs, top_k=top_k, score_function=score_function
    )


@named("paraphrase_mining_embeddings")
def paraphrase_mining_embeddings(
    embeddings: Any,
    query_chunk_size: int = 5000,
    corpus_chunk_size: int = 100000,
    max_pairs: int = 500000,
    top_k: int = 100,
    score_function: Callable[..., Any] = cos_sim,
) -> list[list[float | int]]:
    """Find the most similar pairs of vectors, as `paraphrase_mining` does."""
    vectors, kind = _several(embeddings), _kind(score_function)
    most, each = integer("max_pairs", max_pairs, 1), integer("top_k", top_k, 1)
    scores, pairs = like_pairs(vectors, most, each, similarity=kind)
    return [[score, *pair] for score, pair in zip(scores.tolist(), pairs.tolist(), strict=True)]


@named("community_detection")
def community_detection(
    embeddings: Any,
    threshold: float = 0.75,
    min_community_size: int = 10,
    batch_size: int = 1024,
    show_progress_bar: bool = False,
) -> list[list[int]]:
    """Group vectors around some of them, as `fastattn.models.communities` does: the middle comes first."""
    vectors = _several(embeddings)
    least, size = (
        number("threshold", threshold, FLOAT64),
        integer("min_community_size", min_community_size, 1),
    )
    return [group.tolist() for group in communities(vectors, least, size)]


def _kind(score_function: Any) -> str:
    """The similarity that a function of this module, or of sentence-transformers', computes."""
    name = getattr(score_function, "__name__", None)
    if name not in ("cos_sim", "pytorch_cos_sim", "dot_score"):
        raise ValueError(f"(): score_function is {name or score_function!r}; expected cos_sim or dot_score")
    return "dot" if name == "dot_score" else "cosine"


def _compared(kind: str, a: Any, b: Any) -> Any:
    (x, of_torch), (y, too) = arrays_of("a", a), arrays_of("b", b)
    return _returned(similarities(kind, x, y, False, ("a", "b")), of_torch or too)


def _checked(name: str, x: Any) -> Array:
    """Vectors (n, features) or (features,), floats or bytes, in the type that they have."""
    array = real_array(name, arrays_of(name, x)[0])
    if array.dtype != np.int8 and not is_float(array.dtype):
        raise wrong_dtype(name, array, "floats or int8")
    if array.ndim not in (1, 2):
        raise wrong_shape(name, array, "(n, features) or (features,)")
    return array


def _several(embeddings: Any) -> Array:
    """The argument `embeddings` as floats (n, features); none of (0, 0)."""
    array = vectors_of("embeddings", arrays_of("embeddings", embeddings)[0])
    if array.ndim == 1 and array.size:
        raise wrong_shape("embeddings", array, "(n, features)")
    return array.reshape(0, 0) if array.ndim == 1 else array


def _returned(x: Any, of_torch: bool) -> Any:
    return torch_of("a tensor").from_numpy(x) if of_torch else x
