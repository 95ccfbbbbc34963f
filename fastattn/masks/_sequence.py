"""Masks of a sequence: what a query attends depends on its position and the key's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args import key_ranges
from fastattn._args.key_ranges import RangeLists, Resolved
from fastattn._args.values import as_array, integer
from fastattn.masks._mask import Mask, ScoreShape, of_groups

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fastattn._args.types import Array, Ints


class all_keys(Mask):
    """Every query attends every key."""

    __slots__ = ()

    def resolve(self, shape: ScoreShape) -> Resolved:
        return Resolved()

    def __repr__(self) -> str:
        return "all_keys()"


class causal(Mask):
    """Keys up to the query's own position: ``attention(causal=True)``."""

    __slots__ = ()

    def resolve(self, shape: ScoreShape) -> Resolved:
        return Resolved(*key_ranges.causal(shape.position))

    def __repr__(self) -> str:
        return "causal()"


@dataclass(frozen=True, repr=False, eq=False)
class window(Mask):
    """Keys from ``position - left`` to ``position + right``: ``attention(window=(left, right))``.

    Parameters
    ----------
    left, right : int or None
        None is unbounded. With the query's own key, ``left + right + 1`` keys; what some models call a
        sliding window of size n is ``window(n - 1)``.
    """

    left: int | None
    right: int | None = 0

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if getattr(self, name) is not None:
                _set(self, name, integer("window", name, getattr(self, name), 0))

    def resolve(self, shape: ScoreShape) -> Resolved:
        return Resolved(*key_ranges.window(shape.position, self.left, self.right))


@dataclass(frozen=True, repr=False, eq=False)
class first_keys(Mask):
    """The first `n` keys: an int, or one for each sequence, over the batch dimensions."""

    n: ArrayLike

    def __post_init__(self) -> None:
        _set(self, "n", _integers(type(self).__name__, "n", self.n))

    def resolve(self, shape: ScoreShape) -> Resolved:
        return Resolved(None, shape.per_sequence(f"n of {type(self).__name__}()", self.n))


class prefix(first_keys):
    """The first `n` keys, for every query: ``causal() | prefix(n)`` is a prefix language model.

    Raffel et al. 2020, arXiv:1910.10683.
    """


class lengths(first_keys):
    """The first `n` keys of each sequence, the others being padding: ``attention(kv_lengths=n)``."""


class sink_tokens(first_keys):
    """The first `n` keys, which a sliding window would lose: ``causal() & (window(w) | sink_tokens(4))``.

    StreamingLLM, Xiao et al. 2024, arXiv:2309.17453.
    """


@dataclass(frozen=True, repr=False, eq=False)
class chunked(Mask):
    """Keys of the query's own chunk of `size` positions; with ``causal() &`` as in Llama 4."""

    size: int

    def __post_init__(self) -> None:
        _set(self, "size", integer("chunked", "size", self.size, 1))

    def resolve(self, shape: ScoreShape) -> Resolved:
        size = min(self.size, key_ranges.UNBOUNDED)
        begin = shape.position // size * size
        return Resolved(begin, begin + size)


@dataclass(frozen=True, repr=False, eq=False)
class documents(Mask):
    """Keys of the query's own document, of several that are packed into one sequence.

    Parameters
    ----------
    ids : array_like of int, (len_k,) or (..., len_k)
        The document of every key, over the batch dimensions: any integers, sorted or not. Of a negative one,
        padding, nobody attends or is attended.
    query_ids : array_like of int, (len_q,) or (..., len_q), optional
        The document of every query; default the one at its position, none where no key is.
    """

    ids: ArrayLike
    query_ids: ArrayLike | None = None

    def __post_init__(self) -> None:
        for name in ("ids", "query_ids"):
            if name == "ids" or self.query_ids is not None:
                _set(self, name, _integers("documents", name, getattr(self, name), low=-(2**62)))
                if getattr(self, name).ndim == 0:
                    raise ValueError(f"documents(): {name} has shape (); expected (..., length)")

    def resolve(self, shape: ScoreShape) -> Resolved:
        ids: Any = self.ids
        shape.per_item("ids of documents()", ids, shape.len_k)
        if self.query_ids is not None:
            own: Any = self.query_ids
            shape.per_item("query_ids of documents()", own, shape.len_q)
            found, number = np.unique(np.concatenate([ids.ravel(), own.ravel()]), return_inverse=True)
            key, query = (
                number[: ids.size].reshape(ids.shape),
                number[ids.size :].reshape(own.shape)[..., None, :],
            )
        else:
            found, number = np.unique(ids, return_inverse=True)
            key = number.reshape(ids.shape)
            position = shape.by_position(-1)
            ndim = max(key.ndim + 1, position.ndim)
            table = np.pad(key, [(0, 0)] * (key.ndim - 1) + [(0, 1)], constant_values=-1)[..., None, :]
            table, position = (x.reshape((1,) * (ndim - x.ndim) + x.shape) for x in (table, position))
            query = np.take_along_axis(table, position, axis=-1)
        dropped = np.count_nonzero(found < 0)  # the first numbers, as found is sorted
        return key_ranges.simplified(of_groups(query - dropped, key - dropped, shape.len_k))


@dataclass(frozen=True, repr=False, eq=False)
class dilated(Mask):
    """Keys at distances that are multiples of `dilation`: the query's own, and `window` on either side.

    Longformer's dilated window, Beltagy et al. 2020, arXiv:2004.05150; ``causal() &`` leaves the left side.
    """

    window: int
    dilation: int

    def __post_init__(self) -> None:
        _set(self, "window", integer("dilated", "window", self.window, 0))
        _set(self, "dilation", integer("dilated", "dilation", self.dilation, 1))

    def resolve(self, shape: ScoreShape) -> Resolved:
        position = shape.position
        reach = shape.len_k // self.dilation + 1
        if self.window > reach:  # one list a remainder, and not one a row
            far = min(self.window * self.dilation, key_ranges.UNBOUNDED)
            return Resolved(position - far, position + far + 1, _residues(shape, self.dilation))
        steps = np.arange(-self.window, self.window + 1) * min(self.dilation, key_ranges.UNBOUNDED)
        rows = np.arange(position.size).reshape(position.shape)
        begin = position.ravel()[:, None] + steps
        lists = key_ranges.union(rows, rows.size, rows.reshape(-1, 1), begin, begin + 1, shape.len_k)
        return key_ranges.simplified(lists)


@dataclass(frozen=True, repr=False, eq=False)
class strided(Mask):
    """Causal: the last `stride` keys before the query's own, and every stride-th key before.

    The strided pattern of Sparse Transformers, both of its heads in one; Child et al. 2019, arXiv:1904.10509.
    """

    stride: int

    def __post_init__(self) -> None:
        _set(self, "stride", integer("strided", "stride", self.stride, 1))

    def resolve(self, shape: ScoreShape) -> Resolved:
        near = key_ranges.as_lists(window(self.stride).resolve(shape), shape.len_q, shape.len_k)
        lists = key_ranges.combined([near, _residues(shape, self.stride)], (1, 1), 1, shape.len_k)
        return Resolved(*key_ranges.causal(shape.position), lists)


@dataclass(frozen=True, repr=False, eq=False)
class fixed(Mask):
    """Causal: the query's own block of `stride` keys, and the last `summary` keys of every block before.

    The fixed pattern of Sparse Transformers, both of its heads in one; Child et al. 2019, arXiv:1904.10509.
    """

    stride: int
    summary: int = 1

    def __post_init__(self) -> None:
        _set(self, "stride", integer("fixed", "stride", self.stride, 1))
        _set(self, "summary", integer("fixed", "summary", self.summary, 1, self.stride))

    def resolve(self, shape: ScoreShape) -> Resolved:
        near = key_ranges.as_lists(chunked(self.stride).resolve(shape), shape.len_q, shape.len_k)
        stride, before = (min(n, key_ranges.UNBOUNDED) for n in (self.stride, self.stride - self.summary))
        block, index = np.arange(0, shape.len_k, stride), np.zeros((1, 1), np.int64)
        summaries = key_ranges.union(index, 1, np.array(0), block + before, block + stride, shape.len_k)
        lists = key_ranges.combined([near, summaries], (1, 1), 1, shape.len_k)
        return Resolved(*key_ranges.causal(shape.position), lists)


def _residues(shape: ScoreShape, step: int) -> RangeLists:
    """Keys at distances that are multiples of `step`: one list for each remainder that a key has."""
    key, step = np.arange(shape.len_k), min(step, key_ranges.UNBOUNDED)
    n = min(step, shape.len_k)  # the number of an empty list
    number = np.minimum(shape.position % step, n)
    return key_ranges.union(number, n + 1, key % step, key, key + 1, shape.len_k)


@dataclass(frozen=True, repr=False, eq=False)
class tree(Mask):
    """Of a tree of guessed tokens, the last keys, each attends itself, its ancestors and all before the tree.

    Speculative decoding: SpecInfer, Miao et al. 2024, arXiv:2305.09781; Medusa, Cai et al. 2024,
    arXiv:2401.10774.

    Parameters
    ----------
    parents : array_like of int, (nodes,) or (..., nodes)
        The parent of each node, an earlier one; -1 for a root. Over the batch dimensions. Query positions
        before the tree attend causally.

    Notes
    -----
    A range for each pair of a node and its ancestor: a chain of n nodes takes O(n**2) memory.
    """

    parents: ArrayLike

    def __post_init__(self) -> None:
        parents = _integers("tree", "parents", self.parents, low=-1)
        if parents.ndim == 0 or parents.shape[-1] == 0:
            raise ValueError(f"tree(): parents has shape {parents.shape}; expected (..., nodes)")
        if (parents >= np.arange(parents.shape[-1])).any():
            raise ValueError(
                "tree(): parents has a node whose parent comes after it; expected an earlier node, or -1"
            )
        _set(self, "parents", parents)

    def resolve(self, shape: ScoreShape) -> Resolved:
        parents: Any = self.parents
        nodes = parents.shape[-1]
        if nodes > shape.len_k:
            raise ValueError(
                f"{shape.func}(): parents of tree() has {nodes} nodes; expected at most len_k, {shape.len_k}"
            )
        shape.per_item("parents of tree()", parents, nodes)
        flat = parents.reshape(-1, nodes)
        trees, start = np.arange(len(flat))[:, None], shape.len_k - nodes
        owner, begin, end = [], [], []

        def add(node: Ints, key: Ints, stop: Ints) -> None:
            owner.append((trees * nodes + node)[key < stop])
            begin.append(key[key < stop])
            end.append(stop[key < stop])

        node = np.broadcast_to(np.arange(nodes), flat.shape)
        add(node, np.zeros_like(flat), np.full_like(flat, start))
        ancestor = node
        while (ancestor >= 0).any():
            add(node, start + ancestor, start + ancestor + (ancestor >= 0))
            ancestor = np.where(ancestor < 0, -1, flat[trees, ancestor])
        position = shape.position
        first = np.arange(0, flat.size, nodes).reshape(*parents.shape[:-1], 1, 1)
        number = first + np.clip(position - start, 0, nodes - 1)
        owners, begins, ends = (np.concatenate(x) for x in (owner, begin, end))
        lists = key_ranges.union(number, flat.size, owners, begins, ends, shape.len_k)
        return Resolved(*key_ranges.causal(position), lists)


def _set(mask: Mask, name: str, value: Any) -> None:
    object.__setattr__(mask, name, value)


def _integers(func: str, name: str, x: Any, low: int = 0) -> Array:
    """`x` as integers of at least `low`, in any shape."""
    array = as_array(func, name, x)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{func}(): {name} has dtype {array.dtype}; expected integers")
    if array.size and (array.min() < low or array.max() > 2**62):
        raise ValueError(f"{func}(): {name} has {array.min()} to {array.max()}; expected {low} to {2**62}")
    return array.astype(np.int64)
