"""Similarities of vectors of texts, and vectors of unit length or of fewer bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fastattn import ops
from fastattn._args.errors import named, wrong_shape
from fastattn._args.types import Array, ArrayLike, lane_dtype
from fastattn._args.values import choice, float_array, iterated, real_array

PRECISIONS = ("float32", "int8", "uint8", "binary", "ubinary")
RANGED = ("int8", "uint8")  # in which a vector depends on all others
_LEVELS = 255  # steps between the least and the largest code of a byte


# Near the largest number, squares become infinite, and quotients NaN, as in torch: nothing warns of it.
_QUIET: dict[str, Any] = {"over": "ignore", "invalid": "ignore"}


def unit(vectors: Array) -> Array:
    """The vectors (..., features) at length 1; a vector of zeros stays."""
    with np.errstate(**_QUIET):
        norm = np.sqrt(np.square(vectors).sum(axis=-1, keepdims=True))
        scaled: Array = vectors / np.maximum(norm, 1e-12)
    return scaled


@named("quantize_embeddings")
def quantize_embeddings(
    embeddings: ArrayLike,
    precision: str,
    ranges: ArrayLike | None = None,
    calibration_embeddings: ArrayLike | None = None,
) -> Array:
    """Quantize vectors, as the function of this name in sentence-transformers.

    Parameters
    ----------
    embeddings : array_like, (n, features) or (features,)
    precision : {"float32", "int8", "uint8", "binary", "ubinary"}
        "int8" and "uint8" have 256 equal steps from the feature's minimum to its maximum; values beyond are
        clipped. "binary" and "ubinary" have one bit per feature, set above 0; bytes of eight bits as from
        `numpy.packbits`, minus 128 for "binary".
    ranges : array_like, (2, features), optional
        Minimum and maximum of each feature, for "int8" and "uint8".
    calibration_embeddings : array_like, (m, features), optional
        Vectors from which ranges are taken; by default `embeddings`, which must be several then.

    Returns
    -------
    ndarray, (n, features) or (n, ceil(features / 8))
        float32, int8 or uint8.
    """
    vectors = float_array("embeddings", embeddings)
    if vectors.ndim not in (1, 2):
        raise wrong_shape("embeddings", vectors, "(n, features) or (features,)")
    vectors = vectors.astype(lane_dtype(vectors.dtype), copy=False)
    precision = choice("precision", precision, PRECISIONS)
    limits = _limits(vectors, precision, ranges, calibration_embeddings)
    if precision == "float32":
        return vectors.astype(np.float32)
    if limits is None:
        bits = np.packbits(vectors > 0, axis=-1)
        return bits if precision == "ubinary" else (bits ^ 0x80).view(np.int8)
    with np.errstate(**_QUIET):
        steps = (limits[1] - limits[0]) / _LEVELS
        codes = np.floor((vectors - limits[0]) / np.where(steps == 0, 1, steps)).clip(0, _LEVELS)
        coded: Array = codes.astype(np.uint8) if precision == "uint8" else (codes - 128).astype(np.int8)
    return coded


def _limits(vectors: Array, precision: str, ranges: Any, calibration: Any) -> Array | None:
    """Minimum and maximum of each feature, (2, features), in float32; None for other precisions."""
    features = vectors.shape[-1:]
    given = {"ranges": ranges, "calibration_embeddings": calibration}
    names = [name for name, x in given.items() if x is not None]
    if precision not in RANGED:
        if names:
            raise ValueError(f"(): {names[0]} is given for {precision}; expected int8 or uint8 with it")
        return None
    for name, x in (("embeddings", vectors), *given.items()):
        if x is not None and not np.isfinite(float_array(name, x)).all():
            raise _not_finite(name)
    if len(names) == 2:
        raise ValueError("(): ranges and calibration_embeddings are given; expected one of them")
    if ranges is not None:
        limits = float_array("ranges", ranges).astype(np.float32)
        if limits.shape != (2, *features):
            raise wrong_shape("ranges", limits, (2, *features))
        if not (limits[0] <= limits[1]).all():
            raise ValueError("(): ranges has a minimum above the maximum; expected none")
        return limits
    name, sample = "embeddings", vectors
    if calibration is not None:
        name, sample = "calibration_embeddings", float_array("calibration_embeddings", calibration)
        if sample.ndim != 2 or sample.shape[1:] != features:
            raise wrong_shape(name, sample, f"(m, {features[0]})")
    if sample.ndim == 2 and not len(vectors):
        return np.zeros((2, *features), np.float32)
    if sample.ndim == 1 or len(sample) < 2:
        expected = "several, or quantize_embeddings(..., calibration_embeddings=others)"
        raise ValueError(f"(): {name} has one item for precision {precision!r}; expected {expected}")
    return np.stack([sample.min(axis=0), sample.max(axis=0)]).astype(np.float32)


def similarities(
    kind: str,
    a: ArrayLike,
    b: ArrayLike,
    pairwise: bool,
    names: tuple[str, str] = ("embeddings1", "embeddings2"),
) -> Array:
    """Similarity `kind` of each vector of a with each of b, (n, m); `pairwise` of a[i] with b[i], (n,)."""
    x, y = (vectors_of(name, z) for name, z in zip(names, (a, b), strict=True))
    dtype = np.result_type(x, y)
    x, y = x.astype(dtype, copy=False), y.astype(dtype, copy=False)
    if pairwise:
        if x.shape != y.shape:
            raise wrong_shape(names[1], y, f"{names[0]}'s, {x.shape}")
        with np.errstate(**_QUIET):
            return np.asarray(_PAIRS[kind](x, y))
    x, y = np.atleast_2d(x), np.atleast_2d(y)
    if x.shape[1] != y.shape[1]:
        raise wrong_shape(names[1], y, f"(m, {x.shape[1]}), as many features as {names[0]}")
    if kind == "cosine":
        return _products(unit(x), unit(y))
    if kind == "dot":
        return _products(x, y)
    out = np.empty((len(x), len(y)), dtype)
    with np.errstate(**_QUIET):
        for row, vector in zip(out, x, strict=True):
            row[:] = _PAIRS[kind](vector, y)
    return out


def _products(x: Array, y: Array) -> Array:
    """x @ y.T by the kernels of `ops`: the bits of a row do not depend on other rows."""
    if not x.size or not y.size:
        return np.zeros((len(x), len(y)), x.dtype)
    if len(x) < len(y):  # packing copies
        return np.ascontiguousarray(_products(y, x).T)
    odd = np.asarray(~np.isfinite(y).all(axis=1))  # no weights: packing refuses them
    products = ops.linear(x, ops.pack(np.where(odd[:, None], y.dtype.type(0), y) if odd.any() else y))
    with np.errstate(**_QUIET):
        products[:, odd] = x @ y[odd].T
    return products


# Functions of two arrays (..., features). Distances are negative: the larger, the more similar.
_PAIRS: dict[str, Callable[[Array, Array], Any]] = {
    "cosine": lambda x, y: (unit(x) * unit(y)).sum(axis=-1),
    "dot": lambda x, y: (x * y).sum(axis=-1),
    "euclidean": lambda x, y: -np.sqrt(np.square(x - y).sum(axis=-1)),
    "manhattan": lambda x, y: -np.abs(x - y).sum(axis=-1),
}
SIMILARITIES = tuple(_PAIRS)


def vectors_of(
    name: str,
    x: ArrayLike,
    dims: tuple[int, ...] = (1, 2),
    expected: str = "(n, features) or (features,)",
) -> Array:
    """`x` as an array of `dims` axes, of float32, or of float64 if it is that."""
    array = real_array(name, x)
    if array.ndim not in dims:
        raise wrong_shape(name, array, expected)
    return array.astype(lane_dtype(array.dtype), copy=False)


# MaxSim (Khattab and Zaharia 2020): similarities of texts that have a vector for each token.
# At a time: the products of tokens, 4 MB of float32, and documents of 128 features stay in the caches.
_QUERY_TOKENS, _DOCUMENT_TOKENS, _PRODUCTS = 1 << 11, 1 << 13, 1 << 20
NO_TOKEN = -1e9  # the score of a document that has no token, as in sentence-transformers


def maxsim(a: Any, b: Any, mean: bool, pairwise: bool) -> Array:
    """Scores of each query with each document, (n, m); `pairwise` with the one at its index, (n,)."""
    queries, documents = _both(a, b)
    dtype = _dtype(queries, documents)
    if pairwise:
        if len(queries) != len(documents):
            came = f"embeddings2 is of {len(documents)} texts"
            raise ValueError(f"(): {came}; expected {len(queries)}, as many as embeddings1")
        pairs = zip(queries, documents, strict=True)
        return np.array([_scores([query], [document], mean)[0, 0] for query, document in pairs], dtype)
    out = np.empty((len(queries), len(documents)), dtype)
    for first, last in _blocks(queries, _QUERY_TOKENS):
        tokens = sum(map(len, queries[first:last]))
        most = min(_DOCUMENT_TOKENS, _PRODUCTS // max(1, tokens))
        for begin, end in _blocks(documents, most):
            out[first:last, begin:end] = _scores(queries[first:last], documents[begin:end], mean)
    return out


def _scores(queries: list[Array], documents: list[Array], mean: bool) -> Array:
    """Scores (queries, documents). The products are our kernel's: a row's bits depend on no other row."""
    lengths = np.array([len(query) for query in queries])
    sizes = np.array([len(document) for document in documents])
    out = np.zeros((len(queries), len(documents)), _dtype(queries, documents))
    some, full = np.flatnonzero(lengths), np.flatnonzero(sizes)
    if some.size and full.size:
        x, y = np.concatenate(queries), np.concatenate(documents)
        try:
            packed = ops.pack(y)
        except ValueError:  # which calls them a weight
            raise _not_finite("embeddings2") from None
        products = ops.linear(x, packed)  # (tokens of queries, tokens of documents)
        best = np.maximum.reduceat(products, _begins(sizes[full]), axis=1)
        out[np.ix_(some, full)] = np.add.reduceat(best, _begins(lengths[some]), axis=0)
    out[:, sizes == 0] = NO_TOKEN
    if mean:
        out /= np.maximum(lengths, 1)[:, None].astype(out.dtype)
    return out


def _not_finite(name: str) -> ValueError:
    return ValueError(f"(): {name} has values that are not finite; expected finite ones")


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


def _both(a: Any, b: Any) -> tuple[list[Array], list[Array]]:
    """The vectors (tokens, features) of the texts of both, in one type."""
    queries, documents = (_texts(name, x) for name, x in (("embeddings1", a), ("embeddings2", b)))
    features = next((text.shape[1] for text in (*queries, *documents)), 0)
    for name, texts in (("embeddings1", queries), ("embeddings2", documents)):
        for text in texts:
            if text.shape[1] != features:
                raise wrong_shape(name, text, f"(tokens, {features}), as others")
    if not all(np.isfinite(query).all() for query in queries):
        raise _not_finite("embeddings1")
    dtype = _dtype(queries, documents)
    first, second = ([text.astype(dtype, copy=False) for text in texts] for texts in (queries, documents))
    return first, second


def _texts(name: str, x: Any) -> list[Array]:
    if isinstance(x, np.ndarray) and x.ndim == 3:  # padded with zeros
        return [text[text.any(axis=1)] for text in _texts(name, list(x))]
    several = not (isinstance(x, np.ndarray) and x.ndim == 2)
    texts = iterated(name, x, "vectors of tokens, as encode makes them") if several else [x]
    return [vectors_of(name, text, (2,), "(tokens, features) of each text") for text in texts]
