"""Masks of a sequence: what a query attends depends on its position and on that of the key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fastattn._args import key_ranges
from fastattn._args.key_ranges import RangeLists, Resolved
from fastattn._args.types import ArrayLike
from fastattn._args.values import integers, of_sequences
from fastattn.masks._mask import Mask, ScoreShape, of_groups


@dataclass(frozen=True, repr=False, eq=False)
class causal(Mask):
    """Keys up to the query's own position, as ``attention(causal=True)``."""

    def resolve(self, shape: ScoreShape) -> Resolved:
        return Resolved(*key_ranges.causal(shape.position))


@dataclass(frozen=True, repr=False, eq=False)
class window(Mask):
    """Keys from ``position - left`` to ``position + right``, as ``attention(window=(left, right))``.

    Parameters
    ----------
    left, right : int or None
        Keys on each side of the query's own; None is unbounded. A query attends ``left + right + 1`` keys: a
        sliding window of size n is ``window(n - 1)``.
    """

    left: int | None
    right: int | None = 0

    def __post_init__(self) -> None:
        try:
            self._set_integers(**{name: 0 for name in ("left", "right") if getattr(self, name) is not None})
        except ValueError as error:
            raise ValueError(f"{error}, or None for no bound") from None

    def resolve(self, shape: ScoreShape) -> Resolved:
        return Resolved(*key_ranges.window(shape.position, self.left, self.right))


@dataclass(frozen=True, repr=False, eq=False)
class first_keys(Mask):
    """The first `n` keys.

    ``first_keys(lengths)`` masks padding after these lengths, as ``attention(kv_lengths=lengths)``.
    ``causal() | first_keys(n)`` is a prefix language model (Raffel et al. 2020, arXiv:1910.10683).
    ``causal() & (window(w) | first_keys(4))`` keeps the attention sinks of a sliding window (StreamingLLM,
    Xiao et al. 2024, arXiv:2309.17453).

    Parameters
    ----------
    n : int or array_like of int
        One number for all sequences, or one for each.
    """

    n: ArrayLike

    def __post_init__(self) -> None:
        self._set(n=integers("n", self.n, low=0))

    def resolve(self, shape: ScoreShape) -> Resolved:
        n = of_sequences("n of first_keys()", self.n, shape.batch_shape)
        return Resolved(*key_ranges.lengths(n))


@dataclass(frozen=True, repr=False, eq=False)
class chunked(Mask):
    """Keys of the query's own chunk of `size` positions; ``causal() & chunked(size)`` as in Llama 4."""

    size: int

    def __post_init__(self) -> None:
        self._set_integers(size=1)

    def resolve(self, shape: ScoreShape) -> Resolved:
        size = min(self.size, key_ranges.UNBOUNDED)
        begin = shape.position // size * size
        return Resolved(begin, begin + size)


@dataclass(frozen=True, repr=False, eq=False)
class documents(Mask):
    """Keys of the query's own document, where several documents are packed into one sequence.

    Parameters
    ----------
    ids : array_like of int, (len_k,) or (..., len_k)
        Document of each key, in any order; leading axes broadcast to the batch dimensions. Negative numbers
        are padding, which neither attends nor is attended.
    query_ids : array_like of int, (len_q,) or (..., len_q), optional
        Document of each query. Default: that of the key at the query's position; without such a key, a query
        attends nothing.
    """

    ids: ArrayLike
    query_ids: ArrayLike | None = None

    def __post_init__(self) -> None:
        given = ("ids",) if self.query_ids is None else ("ids", "query_ids")
        for name in given:
            array = integers(name, getattr(self, name))
            if array.ndim == 0:
                raise ValueError(f"(): {name} has shape (); expected (..., length)")
            self._set(**{name: array})

    def resolve(self, shape: ScoreShape) -> Resolved:
        ids: Any = self.ids
        own: Any = self.query_ids
        shape.per_item("ids of documents()", ids, shape.len_k)
        if own is not None:
            shape.per_item("query_ids of documents()", own, shape.len_q)
        # Number the documents from 0. Padding gets negative numbers, as `found` is sorted.
        given = [ids.ravel()] if own is None else [ids.ravel(), own.ravel()]
        found, number = np.unique(np.concatenate(given), return_inverse=True)
        number = number.ravel() - np.count_nonzero(found < 0)
        key = number[: ids.size].reshape(ids.shape)
        if own is not None:
            query = number[ids.size :].reshape(own.shape)[..., None, :]
        else:  # look the query's position up among the keys; an entry after the last key is padding
            table = np.pad(key, [(0, 0)] * (key.ndim - 1) + [(0, 1)], constant_values=-1)[..., None, :]
            position = shape.by_position(-1)
            ndim = max(table.ndim, position.ndim)
            table, position = (x.reshape((1,) * (ndim - x.ndim) + x.shape) for x in (table, position))
            query = np.take_along_axis(table, position, axis=-1)
        return key_ranges.simplified(of_groups(query, key, shape.len_k))


@dataclass(frozen=True, repr=False, eq=False)
class dilated(Mask):
    """The query's own key and `window` keys on either side, at distances that are multiples of `dilation`.

    Longformer's dilated window, Beltagy et al. 2020, arXiv:2004.05150. ``causal() & dilated(...)`` keeps the
    keys on the left.
    """

    window: int
    dilation: int

    def __post_init__(self) -> None:
        self._set_integers(window=0, dilation=1)

    def resolve(self, shape: ScoreShape) -> Resolved:
        position = shape.position
        if self.window > shape.len_k // self.dilation + 1:  # a list for each remainder, not for each row
            far = min(self.window * self.dilation, key_ranges.UNBOUNDED)
            return Resolved(position - far, position + far + 1, _residues(shape, self.dilation))
        steps = np.arange(-self.window, self.window + 1) * min(self.dilation, key_ranges.UNBOUNDED)
        rows = np.arange(position.size).reshape(position.shape)
        begin = position.ravel()[:, None] + steps
        lists = key_ranges.union(rows, rows.size, rows.reshape(-1, 1), begin, begin + 1, shape.len_k)
        return key_ranges.simplified(lists)


@dataclass(frozen=True, repr=False, eq=False)
class strided(Mask):
    """Causal: the last `stride` keys before the query's own, and every stride-th key before those.

    The strided pattern of Sparse Transformers, with both of its heads in one mask; Child et al. 2019,
    arXiv:1904.10509.
    """

    stride: int

    def __post_init__(self) -> None:
        self._set_integers(stride=1)

    def resolve(self, shape: ScoreShape) -> Resolved:
        return _causal_union(shape, window(self.stride), _residues(shape, self.stride))


@dataclass(frozen=True, repr=False, eq=False)
class fixed(Mask):
    """Causal: the query's own block of `stride` keys, and the last `summary` keys of every block before it.

    The fixed pattern of Sparse Transformers, with both of its heads in one mask; Child et al. 2019,
    arXiv:1904.10509.
    """

    stride: int
    summary: int = 1

    def __post_init__(self) -> None:
        self._set_integers(stride=1)
        self._set_integers(summary=1, high=self.stride)

    def resolve(self, shape: ScoreShape) -> Resolved:
        stride, before = (min(n, key_ranges.UNBOUNDED) for n in (self.stride, self.stride - self.summary))
        block, number = np.arange(0, shape.len_k, stride), np.zeros((1, 1), np.int64)
        summaries = key_ranges.union(number, 1, np.array(0), block + before, block + stride, shape.len_k)
        return _causal_union(shape, chunked(self.stride), summaries)


def _causal_union(shape: ScoreShape, near: Mask, far: RangeLists) -> Resolved:
    """Keys of `near` or `far` up to the query's own."""
    lists = key_ranges.combined([shape.lists(near), far], (1, 1), 1, shape.len_k)
    return Resolved(*key_ranges.causal(shape.position), lists)


def _residues(shape: ScoreShape, step: int) -> RangeLists:
    """Keys at distances that are multiples of `step`: one list for each remainder that a key has."""
    key, step = np.arange(shape.len_k), min(step, key_ranges.UNBOUNDED)
    n = min(step, shape.len_k)  # list n is empty: no key has the remainders from n on
    number = np.minimum(shape.position % step, n)
    return key_ranges.union(number, n + 1, key % step, key, key + 1, shape.len_k)


@dataclass(frozen=True, repr=False, eq=False)
class tree(Mask):
    """Tree of guessed tokens, the last keys: each attends itself, its ancestors and all earlier keys.

    Speculative decoding: SpecInfer, Miao et al. 2024, arXiv:2305.09781; Medusa, Cai et al. 2024,
    arXiv:2401.10774.

    Parameters
    ----------
    parents : array_like of int, (nodes,) or (..., nodes)
        Parent of each node, an earlier node, or -1 for a root. Leading axes broadcast to the batch
        dimensions. Queries at positions before the tree attend causally.

    Notes
    -----
    One range per pair of a node and an ancestor: a chain of n nodes takes O(n**2) memory.
    """

    parents: ArrayLike

    def __post_init__(self) -> None:
        parents = integers("parents", self.parents, low=-1)
        if parents.ndim == 0 or parents.shape[-1] == 0:
            raise ValueError(f"(): parents has shape {parents.shape}; expected (..., nodes)")
        if (parents >= np.arange(parents.shape[-1])).any():
            expected = "an earlier node, or -1"
            raise ValueError(f"(): parents has a node whose parent comes after it; expected {expected}")
        self._set(parents=parents)

    def resolve(self, shape: ScoreShape) -> Resolved:
        parents: Any = self.parents
        nodes = parents.shape[-1]
        if nodes > shape.len_k:
            expected = f"at most len_k, {shape.len_k}"
            raise ValueError(f"(): parents of tree() has {nodes} nodes; expected {expected}")
        shape.per_item("parents of tree()", parents, nodes)
        flat = parents.reshape(-1, nodes)
        trees, start = np.arange(len(flat))[:, None], shape.len_k - nodes
        number = np.arange(flat.size).reshape(flat.shape)  # of the list of each node of each tree
        # Every list has the keys before the tree, then the node itself, its parent, its parent's parent ...
        owner, begin, end = [number.ravel()], [np.zeros(flat.size, np.int64)], [np.full(flat.size, start)]
        ancestor = np.broadcast_to(np.arange(nodes), flat.shape)
        while (some := ancestor >= 0).any():
            owner.append(number[some])
            begin.append(start + ancestor[some])
            end.append(start + ancestor[some] + 1)
            ancestor = np.where(some, flat[trees, ancestor], -1)
        position = shape.position
        first = np.arange(0, flat.size, nodes).reshape(*parents.shape[:-1], 1, 1)
        owners, begins, ends = (np.concatenate(x) for x in (owner, begin, end))
        chosen = first + np.clip(position - start, 0, nodes - 1)
        lists = key_ranges.union(chosen, flat.size, owners, begins, ends, shape.len_k)
        return Resolved(*key_ranges.causal(position), lists)
