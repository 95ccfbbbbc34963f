"""The nearest of many vectors, and what is made of them: pairs of like texts, groups of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fastattn import functional
from fastattn._args.errors import named, wrong_shape
from fastattn._args.types import lane_dtype
from fastattn._args.values import choice, integer, is_float, number, real_array
from fastattn.models._vectors import unit

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fastattn._args.types import Array, Ints

_ROWS = 1 << 16  # of the corpus at a time: a list of the best of each stays, nothing else
_NUMBERS = 1 << 22  # of gathered rows at a time: 16 MB
_NEAR = 1e-6  # of 1: a length whose rounding a float32 does not tell apart
_KINDS = ("cosine", "dot")


class Nearest(NamedTuple):
    """The nearest vectors of each query, the best first; equal ones in order."""

    ids: Ints  # (queries, top_k), rows of the corpus
    scores: Array  # (queries, top_k), float32, or float64 of a corpus in float64


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
        In float32, float64, float16, bfloat16 or int8, whose integers are the numbers (not bits that are
        packed); a memory map is read piece by piece.
    top_k : int, default 10
        How many of each query; all, if the corpus has fewer.
    similarity : {"cosine", "dot"}, default "cosine"
        The cosine, or the product. Of vectors of length 1 they are the same, and "dot" is faster: "cosine"
        looks at all lengths first, and copies those pieces of a corpus that have others.
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
    ``2 * queries * vectors * features`` FLOP. Scores of all are never in memory: 65,536 vectors are looked at
    at a time, by `fastattn.functional.select_keys`. Products are of float32, whatever the corpus is in. A
    vector with NaN takes a place among the nearest, and its score is NaN.
    """
    x = real_array("corpus", corpus)
    if x.dtype != np.int8 and not is_float(x.dtype):
        raise TypeError(f"(): corpus has dtype {x.dtype}; expected floats or int8")
    lane = np.dtype(np.float32) if x.dtype == np.int8 else lane_dtype(x.dtype)
    asked = real_array("queries", queries).astype(lane)
    if x.ndim != 2:
        raise wrong_shape("corpus", x, "(vectors, features)")
    if asked.ndim not in (1, 2) or asked.shape[-1] != x.shape[1]:
        raise wrong_shape("queries", asked, f"(queries, features) of {x.shape[1]} features")
    top_k = integer("top_k", top_k, 1)
    by_angle = choice("similarity", similarity, _KINDS) == "cosine"
    rows = np.atleast_2d(unit(asked) if by_angle else asked)
    found = _found(rows, x, min(top_k, len(x)), by_angle, num_threads)
    return Nearest(found.ids[0], found.scores[0]) if asked.ndim == 1 else found


def _found(rows: Array, corpus: Array, top_k: int, by_angle: bool, num_threads: int | None = None) -> Nearest:
    """The nearest of each row (n, features), which has length 1 if `by_angle`."""
    best = Nearest(np.empty((len(rows), 0), np.int64), np.empty((len(rows), 0), rows.dtype))
    if not top_k:
        return best
    for first in range(0, len(corpus), _ROWS):
        part = corpus[first : first + _ROWS]
        if by_angle:
            part = _at_length_1(part, rows.dtype)
        scale = None
        if part.dtype == np.int8:
            scale = np.broadcast_to(np.ones((), rows.dtype), (1, len(part)))
        count = min(top_k, len(part))
        ids = functional.select_keys(rows[None], part[None], count, k_scale=scale, num_threads=num_threads)[0]
        both = np.concatenate([best.scores, _scores(rows, part, ids)], axis=1)
        ids = np.concatenate([best.ids, ids + first], axis=1)
        order = np.argsort(-both, axis=1, kind="stable")[:, :top_k]
        best = Nearest(np.take_along_axis(ids, order, axis=1), np.take_along_axis(both, order, axis=1))
    return best


def _at_length_1(part: Array, lane: np.dtype[np.generic]) -> Array:
    """Vectors (n, features) at length 1: themselves, where they have it already."""
    if part.dtype == lane:
        squares = np.einsum("ij,ij->i", part, part)
        if (np.abs(squares - 1) <= 2 * _NEAR).all():
            return part
    return unit(part.astype(lane))


def _scores(rows: Array, part: Array, ids: Ints) -> Array:
    """Products of each row with its vectors of `part`, (n, top_k)."""
    scores = np.empty(ids.shape, rows.dtype)
    each = max(1, _NUMBERS // max(1, ids.shape[1] * part.shape[1]))
    for i in range(0, len(rows), each):
        some = slice(i, i + each)
        gathered = part[ids[some]].astype(rows.dtype, copy=False)
        scores[some] = np.einsum("ijk,ik->ij", gathered, rows[some])
    return scores


@named("like_pairs")
def like_pairs(
    vectors: ArrayLike, max_pairs: int = 500_000, top_k: int = 100, *, similarity: str = "cosine"
) -> tuple[Array, Ints]:
    """Find the most similar pairs among vectors: paraphrases among texts.

    Parameters
    ----------
    vectors : array_like, (n, features)
    max_pairs : int, default 500000
        How many pairs at most, the best ones.
    top_k : int, default 100
        How many others of each vector are looked at.
    similarity : {"cosine", "dot"}, default "cosine"
        As in `nearest`.

    Returns
    -------
    scores : ndarray, (pairs,)
        The best first.
    pairs : ndarray of int64, (pairs, 2)
        Two rows each, the lower number first.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit.
    """
    x = _vectors(vectors)
    max_pairs, top_k = integer("max_pairs", max_pairs, 1), integer("top_k", top_k, 1)
    by_angle = choice("similarity", similarity, _KINDS) == "cosine"
    x = unit(x) if by_angle else x
    scores, pairs = np.empty(0, x.dtype), np.empty((0, 2), np.int64)
    each = max(1, _NUMBERS // (top_k + 1))
    for first in range(0, len(x), each):
        found = _found(x[first : first + each], x, min(top_k + 1, len(x)), False)
        own = np.arange(first, first + len(found.ids))[:, None]
        other = found.ids != own
        other &= np.cumsum(other, axis=1) <= top_k  # where the vector itself is not among its nearest
        left = np.broadcast_to(own, other.shape)[other]
        new = np.sort(np.stack([left, found.ids[other]], axis=1), axis=1)
        pairs, scores = np.concatenate([pairs, new]), np.concatenate([scores, found.scores[other]])
        pairs, once = np.unique(pairs, axis=0, return_index=True)
        scores = scores[once]
        order = np.argsort(-scores, kind="stable")[:max_pairs]
        scores, pairs = scores[order], pairs[order]
    return scores, pairs


@named("communities")
def communities(vectors: ArrayLike, threshold: float = 0.75, min_size: int = 10) -> list[Ints]:
    """Group vectors: each group is around one of them, to which the others have at least a cosine.

    Parameters
    ----------
    vectors : array_like, (n, features)
    threshold : float, default 0.75
        The least cosine to the vector in the middle.
    min_size : int, default 10
        Vectors of a group at least.

    Returns
    -------
    list of ndarray of int64
        The rows of each group, the middle first, then the nearest; the largest group first. No vector is in
        two: the one of more neighbours takes them.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit.
    """
    x = unit(_vectors(vectors))
    least, size = number("threshold", threshold, x.dtype), integer("min_size", min_size, 1)
    if len(x) < size:
        return []
    around: dict[int, Ints] = {}
    rows, count = np.arange(len(x)), size
    while rows.size:
        more: list[int] = []
        each = max(1, _NUMBERS // count)
        for first in range(0, len(rows), each):
            some = rows[first : first + each]
            found = _found(x[some], x, count, False)
            near = found.scores >= least
            for i, ids, fits in zip(some.tolist(), found.ids, near, strict=True):
                if fits[-1] and count < len(x):
                    more.append(i)
                elif fits.sum() >= size:
                    around[i] = ids[fits]
        rows, count = np.array(more, np.int64), min(2 * count, len(x))
    used = np.zeros(len(x), np.bool_)
    groups = []
    for middle in sorted(sorted(around), key=lambda i: len(around[i]), reverse=True):
        free = around[middle][~used[around[middle]]]
        if used[middle] or len(free) < size:
            continue
        group = np.concatenate([[middle], free[free != middle]])
        used[group] = True
        groups.append(group)
    return sorted(groups, key=len, reverse=True)


def _vectors(given: ArrayLike) -> Array:
    x = real_array("vectors", given)
    if not is_float(x.dtype):
        raise TypeError(f"(): vectors has dtype {x.dtype}; expected floats")
    if x.ndim != 2:
        raise wrong_shape("vectors", x, "(n, features)")
    return x.astype(lane_dtype(x.dtype))
