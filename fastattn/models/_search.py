"""The nearest of many vectors."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from fastattn._args.errors import named, wrong_shape
from fastattn._args.types import Array, ArrayLike, Ints, NearestArgs, lane_dtype
from fastattn._args.values import choice, integer, is_float, real_array
from fastattn._engine import dispatch, settings
from fastattn.models._similarity import unit

_RUN = 1 << 12  # rows of the corpus that a thread looks at before it says which were the best
_CANDIDATES = 1 << 22  # of all runs and some queries: 64 MB
_WHOLE = 1 << 17  # features whose products of bytes an int32 holds the sum of
_KINDS = ("cosine", "dot", "hamming")


class Nearest(NamedTuple):
    """Nearest vectors of each query, best first; ties in the order of the corpus."""

    ids: Ints  # (queries, top_k), row indices of the corpus
    scores: Array  # (queries, top_k), float32, or float64 of a corpus in float64; int64 of bits


@named("nearest")
def nearest(
    queries: ArrayLike,
    corpus: ArrayLike,
    top_k: int = 10,
    *,
    similarity: str = "cosine",
    num_threads: int | None = None,
) -> Nearest:
    """Find the vectors of a corpus that are most similar to each query, exactly.

    Parameters
    ----------
    queries : array_like, (queries, features) or (features,)
    corpus : array_like, (vectors, features)
        float32, float64, float16, bfloat16, or int8 integers; for "hamming" uint8 or int8 with eight features
        per byte, as `quantize_embeddings` packs them. A memory map is read in place.
    top_k : int, default 10
        Number of results per query, at most the number of vectors.
    similarity : {"cosine", "dot", "hamming"}, default "cosine"
        Cosine similarity, dot product, or number of differing bits (fewer are nearer).
    num_threads : int, optional
        As in `fastattn.attention`.

    Returns
    -------
    Nearest
        ``(ids, scores)``, each (queries, top_k), or (top_k,) for a single query.

    Notes
    -----
    ``2 * queries * vectors * features`` FLOP. Only the best scores of each 4,096 vectors are stored. The
    corpus is copied if its features are not contiguous, aligned and in native byte order. Products are
    float32; float64 if the corpus is; exact integers, before the last rounding, if queries and corpus are
    int8. Cosines are right for lengths from 1e-12 to 1e19; in float32, cosines of longer vectors are 0, of
    shorter ones too small. With compiled kernels, a score is independent of the other queries and vectors.
    NaN scores, from vectors with NaN or infinity, count as best.
    """
    x = real_array("corpus", corpus)
    similarity = choice("similarity", similarity, _KINDS)
    bits = similarity == "hamming"
    if bits and x.dtype not in (np.uint8, np.int8):
        raise TypeError(f"(): corpus has dtype {x.dtype}; expected uint8 or int8, the bits for 'hamming'")
    if not bits and x.dtype != np.int8 and not is_float(x.dtype):
        bits_of = " (bits: similarity='hamming' of `nearest`)" if x.dtype == np.uint8 else ""
        raise TypeError(f"(): corpus has dtype {x.dtype}; expected floats or int8{bits_of}")
    asked = real_array("queries", queries)
    if bits and asked.dtype != x.dtype:
        expected = f"the corpus's, {x.dtype}, for 'hamming'"
        raise TypeError(f"(): queries has dtype {asked.dtype}; expected {expected}")
    if x.ndim != 2:
        raise wrong_shape("corpus", x, "(vectors, features)")
    if asked.ndim not in (1, 2) or asked.shape[-1] != x.shape[1]:
        raise wrong_shape("queries", asked, f"(queries, features) of {x.shape[1]} features")
    top_k = min(integer("top_k", top_k, 1), len(x))
    rows, corpus, by_angle = np.atleast_2d(asked), x, similarity == "cosine"
    whole = rows.dtype == corpus.dtype == np.int8 and corpus.shape[1] < _WHOLE and not bits
    narrow = corpus.dtype.itemsize == 1
    lane = np.dtype(np.float32) if narrow else lane_dtype(corpus.dtype)
    if bits:
        rows, corpus = rows.view(np.int8), corpus.view(np.int8)
    elif not whole:
        rows = rows.astype(lane if rows.dtype != np.float64 else np.float64, copy=False)
        rows = _narrowed(unit(rows) if by_angle else rows, lane)
    rows, corpus = _side_by_side(rows), _side_by_side(corpus)
    kind: Literal["lanes", "whole", "bits"] = "bits" if bits else "whole" if whole else "lanes"
    ids, scores = np.empty((len(rows), top_k), np.int64), np.empty((len(rows), top_k), lane)
    each = max(1, _CANDIDATES // max(1, -(-len(corpus) // _RUN) * min(top_k, _RUN)))
    workers = settings.threads(num_threads)
    for first in range(0, len(rows) if top_k else 0, each):
        some = slice(first, first + each)
        out = ids[some], scores[some]
        dispatch.run(NearestArgs(rows[some], corpus, kind, by_angle, top_k, _RUN, *out, workers))
    if whole and by_angle:
        lengths = np.sqrt(np.square(rows, dtype=lane).sum(axis=1, keepdims=True))
        scores /= np.maximum(lengths, lane.type(1e-12))
    order = np.lexsort((-scores, ~np.isnan(scores)), axis=-1)  # ties in the order of ids
    ids, scores = np.take_along_axis(ids, order, axis=1), np.take_along_axis(scores, order, axis=1)
    scores = -scores.astype(np.int64) if bits else scores
    return Nearest(ids[0], scores[0]) if asked.ndim == 1 else Nearest(ids, scores)


def _side_by_side(x: Array) -> Array:
    """The rows, copied unless their elements are contiguous, aligned and in native byte order."""
    if x.flags.aligned and x.dtype.isnative and (x.shape[1] < 2 or x.strides[1] == x.itemsize):
        return x
    return np.array(x, x.dtype.newbyteorder("="), order="C")


def _narrowed(rows: Array, lane: np.dtype[np.generic]) -> Array:
    """Queries in the lane type; raises if it cannot hold a value."""
    with np.errstate(over="ignore"):
        narrow = rows.astype(lane, copy=False)
    if narrow is not rows and (np.isinf(narrow) & np.isfinite(rows)).any():
        raise ValueError(f"(): queries has values beyond {lane}, the dtype of products with the corpus")
    return narrow
