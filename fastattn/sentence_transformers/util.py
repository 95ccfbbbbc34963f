"""Functions of `sentence_transformers.util` for search, with its names and signatures.

Arguments are arrays or tensors of torch; similarities of tensors are tensors. `semantic_search` uses
`fastattn.models.nearest`, which needs no memory for all queries times all vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fastattn._args.errors import named, wrong_dtype, wrong_shape
from fastattn._args.types import Array
from fastattn._args.values import integer, is_float, real_array
from fastattn.models import nearest, quantize_embeddings
from fastattn.models._similarity import unit, vectors_of
from fastattn.sentence_transformers._base import arrays_of, compared, returned

__all__ = [
    "cos_sim",
    "dot_score",
    "normalize_embeddings",
    "quantize_embeddings",
    "semantic_search",
]


def __dir__() -> list[str]:
    return __all__


@named("cos_sim")
def cos_sim(a: Any, b: Any) -> Any:
    """Cosine similarity of each vector of `a` with each of `b`, (n, m)."""
    return compared("cosine", a, b, False, ("a", "b"))


@named("dot_score")
def dot_score(a: Any, b: Any) -> Any:
    """Dot product of each vector of `a` with each of `b`, (n, m)."""
    return compared("dot", a, b, False, ("a", "b"))


@named("normalize_embeddings")
def normalize_embeddings(embeddings: Any) -> Any:
    """Scale vectors to length 1."""
    x, of_torch = arrays_of("embeddings", embeddings)
    return returned(unit(vectors_of("embeddings", x)), of_torch)


@named("semantic_search")
def semantic_search(
    query_embeddings: Any,
    corpus_embeddings: Any,
    query_chunk_size: int = 100,
    corpus_chunk_size: int = 500000,
    top_k: int = 10,
    score_function: Callable[..., Any] = cos_sim,
) -> list[list[dict[str, int | float]]]:
    """Find the nearest vectors of each query: lists of ``{"corpus_id": ..., "score": ...}``, best first.

    `score_function` is `cos_sim` or `dot_score`. Chunk sizes have no effect.
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


def _kind(score_function: Any) -> str:
    """The similarity that a function of this module, or of sentence-transformers', computes."""
    name = getattr(score_function, "__name__", None)
    if name not in ("cos_sim", "pytorch_cos_sim", "dot_score"):
        raise ValueError(f"(): score_function is {name or score_function!r}; expected cos_sim or dot_score")
    return "dot" if name == "dot_score" else "cosine"


def _checked(name: str, x: Any) -> Array:
    """Vectors (n, features) or (features,), floats or bytes, in the type that they have."""
    array = real_array(name, arrays_of(name, x)[0])
    if array.dtype != np.int8 and not is_float(array.dtype):
        raise wrong_dtype(name, array, "floats or int8")
    if array.ndim not in (1, 2):
        raise wrong_shape(name, array, "(n, features) or (features,)")
    return array
