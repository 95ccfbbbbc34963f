"""The nearest of many vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from fastattn._args.errors import named, wrong_shape
from fastattn._args.types import NearestArgs, lane_dtype
from fastattn._args.values import choice, integer, is_float, real_array
from fastattn._engine import dispatch, settings
from fastattn.models._vectors import unit

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fastattn._args.types import Array, Ints

_RUN = 1 << 12  # rows of the corpus that a thread looks at before it says which were the best
_CANDIDATES = 1 << 22  # of all runs and some queries: 64 MB
_WHOLE = 1 << 17  # features whose products of bytes an int32 holds the sum of
_KINDS = ("cosine", "dot", "hamming")


class Nearest(NamedTuple):
    """The nearest vectors of each query, the best first; equal ones in order."""

    ids: Ints  # (queries, top_k), rows of the corpus
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
        In float32, float64, float16, bfloat16 or int8, whose integers are the numbers; for "hamming" in uint8
        or int8, eight features a byte, as `quantize_embeddings` packs them. A memory map is read where it is.
    top_k : int, default 10
        How many of each query; all, if the corpus has fewer.
    similarity : {"cosine", "dot", "hamming"}, default "cosine"
        The cosine; the product; or the number of bits that differ, where fewer are nearer.
    num_threads : int, optional
        As in `fastattn.attention`.

    Returns
    -------
    Nearest
        ``(ids, scores)``, each (queries, top_k), or (top_k,) of a single query.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit.

    Notes
    -----
    ``2 * queries * vectors * features`` FLOP. Scores of all are never in memory: the best of each 4,096
    vectors are kept. The corpus is copied only if its features do not lie side by side, aligned, in the
    machine's byte order. Products are of float32; of float64, if the corpus is; of whole numbers, exact
    before the last rounding, where queries and corpus are int8. Cosines are right for lengths from 1e-12 to
    1e19: those of longer vectors are 0 in float32, those of shorter ones too small. On compiled kernels, a
    vector's score does not depend on what else is searched for or in. A score of NaN, as a vector with NaN or
    infinity may have, counts as the best.
    """
    x = real_array("corpus", corpus)
    kind = choice("similarity", similarity, _KINDS)
    bits = kind == "hamming"
    if bits and x.dtype not in (np.uint8, np.int8):
        raise TypeError(f"(): corpus has dtype {x.dtype}; expected uint8 or int8, the bits for 'hamming'")
    if not bits and x.dtype != np.int8 and not is_float(x.dtype):
        bits_of = " (bits: similarity='hamming' of `nearest`)" if x.dtype == np.uint8 else ""
        raise TypeError(f"(): corpus has dtype {x.dtype}; expected floats or int8{bits_of}")
    asked = real_array("queries", queries)
    if bits and asked.dtype != x.dtype:
        raise TypeError(
            f"(): queries has dtype {asked.dtype}; expected the corpus's, {x.dtype}, for 'hamming'"
        )
    if x.ndim != 2:
        raise wrong_shape("corpus", x, "(vectors, features)")
    if asked.ndim not in (1, 2) or asked.shape[-1] != x.shape[1]:
        raise wrong_shape("queries", asked, f"(queries, features) of {x.shape[1]} features")
    top_k = min(integer("top_k", top_k, 1), len(x))
    found = _found(np.atleast_2d(asked), x, top_k, kind, num_threads)
    return Nearest(found.ids[0], found.scores[0]) if asked.ndim == 1 else found


def _found(
    rows: Array, corpus: Array, top_k: int, similarity: str, num_threads: int | None = None
) -> Nearest:
    """The `top_k` nearest of each row, (n, features)."""
    by_angle, bits = similarity == "cosine", similarity == "hamming"
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
    order = np.lexsort(
        (-scores, ~np.isnan(scores)), axis=-1
    )  # of equal scores the first comes first, as in ids
    ids, scores = np.take_along_axis(ids, order, axis=1), np.take_along_axis(scores, order, axis=1)
    return Nearest(ids, -scores.astype(np.int64) if bits else scores)


def _side_by_side(x: Array) -> Array:
    """The rows themselves, or a copy if their elements do not lie side by side, aligned, in native order."""
    if x.flags.aligned and x.dtype.isnative and (x.shape[1] < 2 or x.strides[1] == x.itemsize):
        return x
    return np.array(x, x.dtype.newbyteorder("="), order="C")


def _narrowed(rows: Array, lane: np.dtype[np.generic]) -> Array:
    """The queries in the lane type; raises where it has no such number."""
    with np.errstate(over="ignore"):
        narrow = rows.astype(lane, copy=False)
    if narrow is not rows and (np.isinf(narrow) & np.isfinite(rows)).any():
        raise ValueError(f"(): queries has numbers beyond {lane}, in which products with the corpus are")
    return narrow
