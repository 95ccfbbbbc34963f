"""The base class of masks, and their operators.

A mask does not know how many queries and keys there are. `Mask.resolve` is told the shape of the scores and
returns the keys that each query row attends, as ranges (`fastattn._args.key_ranges`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from fastattn._args import key_ranges
from fastattn._args.errors import named
from fastattn._args.key_ranges import RangeLists, Resolved
from fastattn._args.types import ArrayLike, Bools, Ints, Shape
from fastattn._args.values import MOST_SIZE, as_array, integer, of_sequences, require_broadcast, short


@dataclass(frozen=True, eq=False)
class ScoreShape:
    """The shape of the scores that a mask is resolved for."""

    batch_shape: Shape
    heads: int
    len_q: int
    len_k: int
    offset: Ints  # position of the first query; broadcasts to batch_shape

    @property
    def scores(self) -> Shape:
        """Shape of the scores."""
        return (*self.batch_shape, self.heads, self.len_q, self.len_k)

    @property
    def position(self) -> Ints:
        """Position of each query row, (*batch, 1, len_q)."""
        return key_ranges.positions(self.offset, self.len_q)

    def per_item(self, name: str, x: Ints, n: int) -> None:
        """Raise unless `x` is (n,) or (*batch, n)."""
        if x.shape[-1:] != (n,):
            raise ValueError(f"(): {name} has shape {x.shape}; expected {n} along its last axis")
        require_broadcast(name, x.shape, (*self.batch_shape, n), f"(..., {n})")

    def keys_are(self, name: str, grid: Shape) -> None:
        """Raise unless the number of keys is the number of places of `grid`."""
        if (places := math.prod(grid)) != self.len_k:
            expected = f"{self.len_k}, one a key"
            raise ValueError(f"(): {name} has {places} places, {grid}; expected {expected}")

    def lists(self, mask: Mask) -> RangeLists:
        """The keys that `mask` allows, as lists alone."""
        return key_ranges.as_lists(mask.resolve(self), self.len_q, self.len_k)

    def by_position(self, outside: int) -> Ints:
        """Position of each query row, (*batch, 1, len_q); `outside` where no key has that position."""
        position = self.position
        return np.where((position >= 0) & (position < self.len_k), position, outside)


class Mask:
    """Rule for the keys that each query attends, for ``attention(mask=...)``.

    Masks combine: ``a & b``, ``a | b``, ``~a``. The position of a query is ``q_offset`` plus its row, that of
    a key its index. A mask has no shape: each call turns it into ranges of keys, in O(rows) or O(ranges) time
    and memory, never into an array of all scores. `compile` does this once for many calls.
    """

    __array_ufunc__ = None  # so that `array & mask` is an error and not an array of masks

    def resolve(self, shape: ScoreShape) -> Resolved:
        """Return the keys that each query row attends when the scores have this shape."""
        raise NotImplementedError

    def _set(self, **values: Any) -> None:
        """Replace fields of this frozen dataclass by their checked values."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __init_subclass__(cls) -> None:
        """Let the errors of a mask's checks begin with its name."""
        check = vars(cls).get("__post_init__")
        if check is not None:
            cls.__post_init__ = named("{cls}")(check)  # type: ignore[attr-defined]

    def _set_integers(self, high: int | None = None, **low: int) -> None:
        """Check that the named fields are integers, each of at least the number given for it."""
        for name, least in low.items():
            self._set(**{name: integer(name, getattr(self, name), least, high)})

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
        values = ", ".join(shown(getattr(self, field.name)) for field in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({values})"

    @named("to_array")
    def to_array(
        self,
        len_q: int,
        len_k: int | None = None,
        *,
        batch_shape: Shape = (),
        num_heads: int | None = None,
        q_offset: ArrayLike | None = None,
    ) -> Bools:
        """Mask as a dense array, for inspection.

        Parameters
        ----------
        len_q, len_k : int
            Numbers of queries and of keys; by default ``len_k = len_q``.
        batch_shape : tuple of int, optional
            Batch dimensions.
        num_heads : int, optional
            Number of query heads; by default the result has no axis of heads.
        q_offset : int or array_like of int, optional
            Position of the first query; default ``len_k - len_q``.

        Returns
        -------
        ndarray of bool, (*batch_shape, [num_heads,] len_q, len_k)
            True where a query attends a key.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit, or the mask does not fit the shape.
        """
        len_q = integer("len_q", len_q, 0, MOST_SIZE)
        len_k = len_q if len_k is None else integer("len_k", len_k, 0, MOST_SIZE)
        if not isinstance(batch_shape, (tuple, list)):
            raise TypeError(f"(): batch_shape is {short(batch_shape)}; expected a tuple of integers")
        batch = (integer(f"batch_shape[{n}]", x, 0, MOST_SIZE) for n, x in enumerate(batch_shape))
        heads = 1 if num_heads is None else integer("num_heads", num_heads, 1, MOST_SIZE)
        array = dense_array(self, score_shape((*batch, heads, len_q, len_k), q_offset))
        return array[..., 0, :, :] if num_heads is None else array


def dense_array(mask: Mask, shape: ScoreShape) -> Bools:
    """Return `mask` as a bool array (*batch_shape, heads, len_q, len_k), True where a query attends a key."""
    return key_ranges.as_array(mask.resolve(shape), shape.scores)


def _mask(operator: str, x: Any) -> Mask:
    """Return `x`, an operand of `operator`; raise if it is not a mask but, say, an array or a class."""
    if isinstance(x, Mask):
        return x
    what = f"the class {x.__name__}" if isinstance(x, type) else short(x)
    expected = "masks, such as masks.causal() or masks.dense(array), on both sides"
    raise TypeError(f"{operator}: an operand is {what}; expected {expected}")


def shown(x: Any) -> str:
    """`x` as `repr` of a mask shows it: long arrays by their dtype and shape."""
    if isinstance(x, np.ndarray):
        return f"<{x.dtype} {'x'.join(map(str, x.shape))}>" if x.size > 8 else repr(x.tolist())
    return getattr(x, "__name__", None) or repr(x)


@dataclass(frozen=True, repr=False, eq=False)
class _Pair(Mask):
    operator: ClassVar[str]
    left: Mask
    right: Mask

    def __repr__(self) -> str:
        return f"({self.left!r} {self.operator} {self.right!r})"


class _Both(_Pair):
    operator = "&"

    def resolve(self, shape: ScoreShape) -> Resolved:
        left, right = self.left.resolve(shape), self.right.resolve(shape)
        lists = [x.lists for x in (left, right) if x.lists is not None]
        begin, end = key_ranges.intersect([left[:2], right[:2]], shape.len_k)
        if len(lists) < 2:
            return Resolved(begin, end, *lists)
        return Resolved(begin, end, key_ranges.combined(lists, (1, 1), 2, shape.len_k))


class _Either(_Pair):
    operator = "|"

    def resolve(self, shape: ScoreShape) -> Resolved:
        lists = [shape.lists(x) for x in (self.left, self.right)]
        return key_ranges.simplified(key_ranges.combined(lists, (1, 1), 1, shape.len_k))


@dataclass(frozen=True, repr=False, eq=False)
class _Not(Mask):
    mask: Mask

    def resolve(self, shape: ScoreShape) -> Resolved:
        every = key_ranges.as_lists(Resolved(), 1, shape.len_k)
        lists = [every, shape.lists(self.mask)]
        return key_ranges.simplified(key_ranges.combined(lists, (1, -1), 1, shape.len_k))

    def __repr__(self) -> str:
        return f"~{self.mask!r}"


def score_shape(shape: Shape, q_offset: ArrayLike | None) -> ScoreShape:
    """Check `shape`, (..., heads, len_q, len_k), and `q_offset`."""
    if not isinstance(shape, (tuple, list)) or len(shape) < 3:
        expected = "at least three integers, (..., heads_q, len_q, len_k), with heads_q 1 for 2-D arrays"
        raise TypeError(f"(): shape is {short(shape)}; expected {expected}")
    *batch, heads, len_q, len_k = (integer(f"shape[{n}]", x, 0, MOST_SIZE) for n, x in enumerate(shape))
    offset: Any = len_k - len_q if q_offset is None else q_offset
    offset = of_sequences("q_offset", offset, tuple(batch))
    return ScoreShape(tuple(batch), heads, len_q, len_k, offset)


def bools(name: str, x: ArrayLike) -> Bools:
    """`x` as an array of bool."""
    array: Bools = as_array(name, x)
    if array.dtype != np.bool_:
        raise TypeError(f"(): {name} has dtype {array.dtype}; expected bool")
    return array


def runs_of(array: Bools) -> tuple[Ints, Ints, Ints]:
    """Runs of True along the last axis of `array`: the row of each, counted from 0, its begin, its end."""
    closed = np.zeros((*array.shape[:-1], array.shape[-1] + 2), np.int8)
    closed[..., 1:-1] = array
    change = np.diff(closed, axis=-1).reshape(-1, array.shape[-1] + 1)
    row, begin = np.nonzero(change == 1)
    return row, begin, np.nonzero(change == -1)[1]


def of_groups(query: Ints, key: Ints, len_k: int) -> RangeLists:
    """Lists of the keys that are in the same group as the query.

    query (*batch, 1, len_q) and key (*batch, len_k) hold numbers of groups; a negative one is in no group.
    """
    shape = key.shape[:-1]
    n_groups = int(max(query.max(initial=-1), key.max(initial=-1))) + 1
    # Find the runs of keys of one group. A run ends where the next run of the same sequence begins.
    change = np.ones(key.shape, np.bool_)
    change[..., 1:] = key[..., 1:] != key[..., :-1]
    *batch, begin = np.nonzero(change)
    sequence = np.ravel_multi_index(batch, shape) if shape else np.zeros_like(begin)
    end = np.append(begin[1:], len_k)[: len(begin)]
    end[end <= begin] = len_k
    group = key[change]
    # Each sequence has a list for each group, and an empty one after them for queries in no group.
    each = n_groups + 1
    n_lists = math.prod(shape) * each
    number = np.arange(0, n_lists, each).reshape(*shape, 1, 1) + np.where(query < 0, n_groups, query)
    end = np.where(group < 0, begin, end)
    return key_ranges.union(number, n_lists, sequence * each + group, begin, end, len_k)
