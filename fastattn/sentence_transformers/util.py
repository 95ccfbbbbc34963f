"""Functions of `sentence_transformers.util` for search, with its names and signatures.

Arrays and tensors of torch are taken; similarities of tensors are tensors. `semantic_search` computes by
`fastattn.models.nearest`: nothing of the size queries times corpus is in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.errors import named, wrong_dtype, wrong_shape
from fastattn._args.values import integer, is_float, real_array
from fastattn.models import nearest, quantize_embeddings
from fastattn.models._vectors import similarities, unit, vectors_of
from fastattn.sentence_transformers._tensors import arrays_of, torch_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastattn._args.types import Array

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


def _returned(x: Any, of_torch: bool) -> Any:
    return torch_of("a tensor").from_numpy(x) if of_torch else x
