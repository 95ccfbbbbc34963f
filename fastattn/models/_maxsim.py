"""MaxSim (Khattab and Zaharia 2020): similarities of texts that have a vector for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn import ops
from fastattn._args.errors import wrong_shape
from fastattn._args.values import iterated, real_array

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastattn._args.packed import PackedLinear
    from fastattn._args.types import Array

# At a time: the products of tokens, 4 MB of float32, and documents of 128 features stay in the caches.
_QUERY_TOKENS, _DOCUMENT_TOKENS, _PRODUCTS = 1 << 11, 1 << 13, 1 << 20
NO_TOKEN = -1e9  # the score of a document that has no token, as in sentence-transformers


def similarities(func: str, a: Any, b: Any, mean: bool) -> Array:
    """Scores of each query with each document, (n, m): see `MultiVectorEncoder.similarity`."""
    queries, documents = _both(func, a, b)
    out = np.empty((len(queries), len(documents)), _dtype(queries, documents))
    for first, last in _blocks(queries, _QUERY_TOKENS):
        tokens = sum(map(len, queries[first:last]))
        most = min(_DOCUMENT_TOKENS, _PRODUCTS // max(1, tokens))
        for begin, end in _blocks(documents, most):
            out[first:last, begin:end] = _scores(func, queries[first:last], documents[begin:end], mean)
    return out


def pairs(func: str, a: Any, b: Any, mean: bool) -> Array:
    """Score of each query with the document in the same place, (n,)."""
    queries, documents = _both(func, a, b)
    if len(queries) != len(documents):
        came = f"embeddings2 is of {len(documents)} texts"
        raise ValueError(f"{func}(): {came}; expected {len(queries)}, as many as embeddings1")
    out = np.empty(len(queries), _dtype(queries, documents))
    for i, (query, document) in enumerate(zip(queries, documents, strict=True)):
        out[i] = _scores(func, [query], [document], mean)[0, 0]
    return out


def _scores(func: str, queries: list[Array], documents: list[Array], mean: bool) -> Array:
    """Scores (queries, documents). The products are our kernel's: a row's bits depend on no other row."""
    lengths = np.array([len(query) for query in queries])
    sizes = np.array([len(document) for document in documents])
    out = np.zeros((len(queries), len(documents)), _dtype(queries, documents))
    some, full = np.flatnonzero(lengths), np.flatnonzero(sizes)
    if some.size and full.size:
        x, y = np.concatenate(queries), np.concatenate(documents)
        products = ops.linear(x, _packed(func, y))  # (tokens of queries, tokens of documents)
        best = np.maximum.reduceat(products, _begins(sizes[full]), axis=1)
        out[np.ix_(some, full)] = np.add.reduceat(best, _begins(lengths[some]), axis=0)
    out[:, sizes == 0] = NO_TOKEN
    if mean:
        out /= np.maximum(lengths, 1)[:, None].astype(out.dtype)
    return out


def _packed(func: str, y: Array) -> PackedLinear:
    try:
        return ops.pack(y)
    except ValueError:  # which calls them a weight
        raise _not_finite(func, "embeddings2") from None


def _not_finite(func: str, name: str) -> ValueError:
    return ValueError(f"{func}(): {name} has numbers that are not finite; expected finite ones")


def _begins(lengths: Array) -> Array:
    return np.append(0, np.cumsum(lengths)[:-1])


def _blocks(texts: list[Array], most: int) -> Iterator[tuple[int, int]]:
    """Places of texts that have up to `most` tokens together, or of one text."""
    begin, tokens = 0, 0
    for end, text in enumerate(texts):
        if end > begin and tokens + len(text) > most:
            yield begin, end
            begin, tokens = end, 0
        tokens += len(text)
    if texts:
        yield begin, len(texts)


def _dtype(*sides: list[Array]) -> type[np.floating[Any]]:
    """float64 if any has it; np.result_type of thousands takes longer than their products."""
    double = any(text.dtype == np.float64 for texts in sides for text in texts)
    return np.float64 if double else np.float32


def _both(func: str, a: Any, b: Any) -> tuple[list[Array], list[Array]]:
    """The vectors (tokens, features) of the texts of both, in one type."""
    queries, documents = (_texts(func, name, x) for name, x in (("embeddings1", a), ("embeddings2", b)))
    features = next((text.shape[1] for text in (*queries, *documents)), 0)
    for name, texts in (("embeddings1", queries), ("embeddings2", documents)):
        for text in texts:
            if text.shape[1] != features:
                raise wrong_shape(func, name, text, f"(tokens, {features}), as others")
    if not all(np.isfinite(query).all() for query in queries):
        raise _not_finite(func, "embeddings1")
    dtype = _dtype(queries, documents)
    first, second = ([text.astype(dtype, copy=False) for text in texts] for texts in (queries, documents))
    return first, second


def _texts(func: str, name: str, x: Any) -> list[Array]:
    if isinstance(x, np.ndarray) and x.ndim == 3:  # padded with zeros
        return [text[text.any(axis=1)] for text in _texts(func, name, list(x))]
    several = not (isinstance(x, np.ndarray) and x.ndim == 2)
    texts = iterated(func, name, x, "vectors of tokens, as encode makes them") if several else [x]
    arrays = [real_array(func, name, text) for text in texts]
    for array in arrays:
        if array.ndim != 2:
            raise wrong_shape(func, name, array, "(tokens, features) of each text")
    return [_lane(array) for array in arrays]


def _lane(x: Array) -> Array:
    """`x` in float32, or in float64 if it is that."""
    return x.astype(np.float64 if x.dtype == np.float64 else np.float32, copy=False)
