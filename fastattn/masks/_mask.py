"""What every mask is: a value that says which keys each query row attends, once it is told the shape."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args import key_ranges
from fastattn._args.key_ranges import RangeLists, Resolved
from fastattn._args.values import MOST_SIZE, as_array, integer, integers, require_broadcast, short

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike

    from fastattn._args.types import Bools, Ints, Shape

# Scores of a block that `compile` looks at at a time.
_BLOCK_SCORES = 2**20


@dataclass(frozen=True, eq=False)
class ScoreShape:
    """The scores that a mask is for, (*batch_shape, heads, len_q, len_k); `func` is for messages."""

    func: str
    batch_shape: Shape
    heads: int
    len_q: int
    len_k: int
    offset: Ints  # position of the first query; broadcasts to batch_shape

    @property
    def position(self) -> Ints:
        """Of every query row, (*batch, 1, len_q)."""
        return key_ranges.positions(self.offset, self.len_q)

    def per_sequence(self, name: str, x: Any) -> Ints:
        """`x`, an int for each sequence, as (*batch, 1, 1)."""
        return integers(self.func, name, x, self.batch_shape, "the batch dimensions")[..., None, None]

    def per_item(self, name: str, x: Ints, n: int) -> None:
        """Raise unless `x` is (n,) or (*batch, n)."""
        if x.shape[-1:] != (n,):
            raise ValueError(f"{self.func}(): {name} has shape {x.shape}; expected {n} along its last axis")
        require_broadcast(self.func, name, x.shape, (*self.batch_shape, n), f"(..., {n})")

    def keys_are(self, name: str, grid: Shape) -> None:
        """Raise unless there are as many keys as `grid` has places."""
        if (places := math.prod(grid)) != self.len_k:
            raise ValueError(
                f"{self.func}(): {name} has {places} places, shape {grid}; expected {self.len_k}, one a key"
            )

    def by_position(self, outside: int) -> Ints:
        """The position of every query row, (*batch, 1, len_q), or `outside` where no key is."""
        position = self.position
        return np.where((position >= 0) & (position < self.len_k), position, outside)


class Mask:
    """Which keys each query attends: a value without a shape, for ``attention(mask=...)``.

    Masks combine: ``a & b`` is what both allow, ``a | b`` what either does, ``~a`` the rest. They count from
    the position of a query, ``q_offset`` + row, and from the first key. Nothing of the size of the scores is
    ever made of them: they become ranges of keys, O(rows) or O(ranges), anew in each call; what `compile`
    returns has done it already.
    """

    __slots__ = ()
    __array_ufunc__ = None  # array & mask is an error, not an array of masks

    def resolve(self, shape: ScoreShape) -> Resolved:
        """The keys of every row, for this shape."""
        raise NotImplementedError

    def __and__(self, other: Mask) -> Mask:
        return _Both(self, _mask("&", other))

    def __rand__(self, other: Any) -> Mask:
        return _mask("&", other) & self

    def __or__(self, other: Mask) -> Mask:
        return _Either(self, _mask("|", other))

    def __ror__(self, other: Any) -> Mask:
        return _mask("|", other) | self

    def __invert__(self) -> Mask:
        return _Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a mask is neither true nor false; combine masks with &, | and ~, not and, or, not")

    def __repr__(self) -> str:
        values = ", ".join(_shown(getattr(self, field.name)) for field in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({values})"

    def to_array(
        self,
        len_q: int,
        len_k: int | None = None,
        *,
        batch_shape: Shape = (),
        heads: int | None = None,
        q_offset: ArrayLike | None = None,
    ) -> Bools:
        """Who attends whom as a dense array, for looking at it.

        Parameters
        ----------
        len_q, len_k : int
            Of the scores; by default ``len_k = len_q``.
        batch_shape : tuple of int, optional
            Batch dimensions.
        heads : int, optional
            Query heads; by default the result has no such axis.
        q_offset : int or array_like of int, optional
            Position of the first query; default ``len_k - len_q``.

        Returns
        -------
        ndarray of bool, (*batch_shape, [heads,] len_q, len_k)
            True where a query attends a key.
        """
        func = "to_array"
        len_q = integer(func, "len_q", len_q, 0, MOST_SIZE)
        len_k = len_q if len_k is None else integer(func, "len_k", len_k, 0, MOST_SIZE)
        if not isinstance(batch_shape, (tuple, list)):
            raise TypeError(f"{func}(): batch_shape is {short(batch_shape)}; expected a tuple of integers")
        batch = (integer(func, f"batch_shape[{n}]", x, 0, MOST_SIZE) for n, x in enumerate(batch_shape))
        n_heads = 1 if heads is None else integer(func, "heads", heads, 1, MOST_SIZE)
        array = dense_array(self, score_shape(func, (*batch, n_heads, len_q, len_k), q_offset))
        return array[..., 0, :, :] if heads is None else array


def dense_array(mask: Mask, shape: ScoreShape) -> Bools:
    """Who attends whom, (*batch_shape, heads, len_q, len_k)."""
    scores = (*shape.batch_shape, shape.heads, shape.len_q, shape.len_k)
    return key_ranges.as_array(mask.resolve(shape), scores)


def _mask(operator: str, x: Any) -> Mask:
    """`x`, an operand of `operator`, or an error: an array or a class is easily taken for a mask."""
    if isinstance(x, Mask):
        return x
    what = f"the class {x.__name__}" if isinstance(x, type) else short(x)
    raise TypeError(
        f"{operator}: an operand is {what}; expected masks, such as masks.causal(), on both sides (of a bool"
        f" array masks.dense(array) makes one)"
    )


def _shown(x: Any) -> str:
    if isinstance(x, np.ndarray):
        return f"<{x.dtype} {'x'.join(map(str, x.shape))}>" if x.size > 8 else repr(x.tolist())
    return getattr(x, "__name__", None) or repr(x)


@dataclass(frozen=True, repr=False, eq=False)
class _Both(Mask):
    left: Mask
    right: Mask

    def resolve(self, shape: ScoreShape) -> Resolved:
        left, right = self.left.resolve(shape), self.right.resolve(shape)
        lists = [x.lists for x in (left, right) if x.lists is not None]
        begin, end = key_ranges.intersect([left[:2], right[:2]], shape.len_k)
        if len(lists) < 2:
            return Resolved(begin, end, *lists)
        return Resolved(begin, end, key_ranges.combined(lists, (1, 1), 2, shape.len_k))

    def __repr__(self) -> str:
        return f"({self.left!r} & {self.right!r})"


@dataclass(frozen=True, repr=False, eq=False)
class _Either(Mask):
    left: Mask
    right: Mask

    def resolve(self, shape: ScoreShape) -> Resolved:
        parts = (self.left.resolve(shape), self.right.resolve(shape))
        lists = [key_ranges.as_lists(x, shape.len_q, shape.len_k) for x in parts]
        return key_ranges.simplified(key_ranges.combined(lists, (1, 1), 1, shape.len_k))

    def __repr__(self) -> str:
        return f"({self.left!r} | {self.right!r})"


@dataclass(frozen=True, repr=False, eq=False)
class _Not(Mask):
    mask: Mask

    def resolve(self, shape: ScoreShape) -> Resolved:
        lists = key_ranges.as_lists(self.mask.resolve(shape), shape.len_q, shape.len_k)
        every = key_ranges.as_lists(Resolved(), 1, shape.len_k)
        return key_ranges.simplified(key_ranges.combined([every, lists], (1, -1), 1, shape.len_k))

    def __repr__(self) -> str:
        return f"~{self.mask!r}"


@dataclass(frozen=True, repr=False, eq=False)
class _Compiled(Mask):
    """A mask resolved for one shape."""

    of: Any  # the mask or predicate
    shape: ScoreShape
    resolved: Resolved

    def resolve(self, shape: ScoreShape) -> Resolved:
        mine = self.shape
        same = (mine.batch_shape, mine.heads, mine.len_q, mine.len_k)
        if same != (shape.batch_shape, shape.heads, shape.len_q, shape.len_k):
            raise ValueError(
                f"{shape.func}(): mask was compiled for {same}, (batch dimensions, heads, len_q, len_k);"
                f" expected one for {(shape.batch_shape, shape.heads, shape.len_q, shape.len_k)}"
            )
        if (mine.offset != shape.offset).any():
            raise ValueError(f"{shape.func}(): mask was compiled for another q_offset; expected one for this")
        return self.resolved

    def __repr__(self) -> str:
        s = self.shape
        return f"compile({_shown(self.of)}, {(*s.batch_shape, s.heads, s.len_q, s.len_k)})"


def compile(
    mask: Mask | Callable[[Ints, Ints, Ints, Ints], ArrayLike],
    shape: Shape,
    *,
    q_offset: ArrayLike | None = None,
) -> Mask:
    """Resolve a mask, or any predicate, for one shape: for many calls with that shape.

    Parameters
    ----------
    mask : Mask or callable
        A mask, or a function ``f(b, h, i, j)`` of integer arrays that broadcast against each other: the
        sequence, counted over all batch dimensions, the query head, the query's position and the key. It
        returns a bool array, True where the query attends the key. It is called on blocks of at most about a
        million scores.
    shape : tuple of int
        Of the scores: (..., heads_q, len_q, len_k), with a 1 for the heads of 2-D arrays.
    q_offset : int or array_like of int, optional
        As in `attention`; default ``len_k - len_q``.

    Returns
    -------
    Mask
        With the ranges in it. It fits this shape and offset and no other.

    Raises
    ------
    TypeError, ValueError
        If `mask` is neither, or what it returns is not bool or does not broadcast.

    Notes
    -----
    A predicate costs O(scores) time, once, less where it does not depend on b or h; of memory, a block and
    the ranges.

    Examples
    --------
    >>> from fastattn import masks
    >>> mask = masks.compile(lambda b, h, i, j: (i >= j) & (i - j < 4), (1, 8, 64, 64))
    """
    scores = score_shape("compile", shape, q_offset)
    if isinstance(mask, Mask):
        return _Compiled(mask, scores, mask.resolve(scores))
    if not callable(mask):
        raise TypeError(f"compile(): mask is of type {type(mask).__name__}; expected a mask or a function")
    return _Compiled(mask, scores, key_ranges.simplified(_of_predicate(mask, scores)))


def score_shape(func: str, shape: Shape, q_offset: ArrayLike | None) -> ScoreShape:
    """`shape`, (..., heads, len_q, len_k), checked."""
    if not isinstance(shape, (tuple, list)) or len(shape) < 3:
        raise TypeError(f"{func}(): shape is {short(shape)}; expected integers, (..., heads_q, len_q, len_k)")
    *batch, heads, len_q, len_k = (integer(func, f"shape[{n}]", x, 0, MOST_SIZE) for n, x in enumerate(shape))
    offset: Any = len_k - len_q if q_offset is None else q_offset
    offset = integers(func, "q_offset", offset, tuple(batch), "the batch dimensions")
    return ScoreShape(func, tuple(batch), heads, len_q, len_k, offset)


def _of_predicate(function: Callable[..., ArrayLike], shape: ScoreShape) -> RangeLists:
    """Lists of the keys for which `function` holds."""
    n_batch = int(np.prod(shape.batch_shape))
    b = np.arange(n_batch).reshape(*shape.batch_shape, 1, 1, 1)
    h = np.arange(shape.heads)[:, None, None]
    i, j = shape.position[..., None], np.arange(shape.len_k)

    def called(i: Ints) -> Bools:
        found = as_array("compile", "what mask returns", function(b, h, i, j))
        if found.dtype != np.bool_:
            raise TypeError(f"compile(): mask returns dtype {found.dtype}; expected bool")
        target = (*shape.batch_shape, shape.heads, i.shape[-2], shape.len_k)
        require_broadcast("compile", "what mask returns", found.shape, target, "(..., heads_q, len_q, len_k)")
        return found if found.ndim > 2 else found[(None,) * (3 - found.ndim)]

    lead = called(i[..., :1, :]).shape[:-2]  # 1 where it does not depend on the sequence, the head
    block = max(1, _BLOCK_SCORES // max(1, int(np.prod(lead)) * shape.len_k))
    numbers = np.arange(int(np.prod(lead)) * shape.len_q).reshape(*lead, shape.len_q)
    parts = []
    for r in range(0, shape.len_q, block):
        found = called(i[..., r : r + block, :])
        rows = numbers[..., r : r + block]
        parts.append(_runs(np.broadcast_to(found, (*rows.shape, shape.len_k)), rows))
    owner, begin, end = (
        (np.concatenate(x) for x in zip(*parts, strict=True)) if parts else np.zeros((3, 0), np.int64)
    )
    return key_ranges.union(numbers, numbers.size, owner, begin, end, shape.len_k)


def _runs(array: Bools, rows: Ints) -> tuple[Ints, Ints, Ints]:
    """Runs of True along the last axis of `array`: owner, begin and end; `rows` numbers what is before it."""
    closed = np.zeros((*array.shape[:-1], array.shape[-1] + 2), np.int8)
    closed[..., 1:-1] = array
    change = np.diff(closed, axis=-1).reshape(-1, array.shape[-1] + 1)
    row, begin = np.nonzero(change == 1)
    return rows.ravel()[row], begin, np.nonzero(change == -1)[1]


def runs_of(array: Bools) -> tuple[Ints, Ints, Ints]:
    """Runs of True along the last axis of `array`, whose rows are numbered from 0: owner, begin and end."""
    return _runs(array, np.arange(int(np.prod(array.shape[:-1]))))


def of_groups(query: Ints, key: Ints, len_k: int) -> RangeLists:
    """Lists of the keys in the query's group: query (*batch, 1, len_q), key (*batch, len_k); none below 0."""
    shape = key.shape[:-1]
    none = int(max(query.max(initial=-1), key.max(initial=-1))) + 1  # a group without keys
    change = np.ones(key.shape, np.bool_)
    change[..., 1:] = key[..., 1:] != key[..., :-1]
    *batch, begin = np.nonzero(change)
    sequence = np.ravel_multi_index(batch, shape) if shape else np.zeros_like(begin)
    end = np.append(begin[1:], len_k)[: len(begin)]  # where the next run of the sequence begins
    end[end <= begin] = len_k
    group = key[change]
    n_lists = int(np.prod(shape)) * (none + 1)
    first = np.arange(0, n_lists, none + 1).reshape(*shape, 1, 1)
    index = first + np.where(query < 0, none, query)
    end = np.where(group < 0, begin, end)
    return key_ranges.union(index, n_lists, sequence * (none + 1) + group, begin, end, len_k)
