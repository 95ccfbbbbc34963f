"""Masks of a grid: positions are the places of an image or a volume, row by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args import key_ranges
from fastattn._args.key_ranges import Resolved
from fastattn._args.values import MOST_SIZE, flag, integer, short
from fastattn.masks._mask import Mask, ScoreShape, of_groups
from fastattn.masks._sequence import _set

if TYPE_CHECKING:
    from fastattn._args.types import Bools, Ints, Shape


@dataclass(frozen=True, repr=False, eq=False)
class axial(Mask):
    """Places that differ from the query's along `axis` only, or several axes.

    Axial attention, Ho et al. 2019, arXiv:1912.12180.
    """

    shape: Shape
    axis: int | tuple[int, ...]

    def __post_init__(self) -> None:
        _set(self, "shape", _sizes("axial", "shape", self.shape))
        axes = self.axis if isinstance(self.axis, (tuple, list)) else (self.axis,)
        n = len(self.shape)
        _set(self, "axis", tuple(integer("axial", "axis", axis, -n, n - 1) % n for axis in axes))

    def resolve(self, shape: ScoreShape) -> Resolved:
        shape.keys_are("shape of axial()", self.shape)
        places = np.arange(shape.len_k).reshape(self.shape)
        for axis in self.axis:  # type: ignore[union-attr]
            places = places.take([0], axis)
        return _groups(shape, np.broadcast_to(places, self.shape))


@dataclass(frozen=True, repr=False, eq=False)
class swin(Mask):
    """Places of the query's own window, of those that divide the grid, shifted cyclically by `shift`.

    Swin Transformer, Liu et al. 2021, arXiv:2103.14030: parts of a window that the shift brings together
    from opposite borders do not attend each other.

    Parameters
    ----------
    shape : tuple of int
        Of the grid.
    window : int or tuple of int
        Along each axis.
    shift : int or tuple of int, default 0
        Less than the window.
    """

    shape: Shape
    window: int | Shape
    shift: int | Shape = 0

    def __post_init__(self) -> None:
        shape = _sizes("swin", "shape", self.shape)
        _set(self, "shape", shape)
        _set(self, "window", _sizes("swin", "window", self.window, len(shape)))
        _set(self, "shift", _sizes("swin", "shift", self.shift, len(shape), low=0))
        if any(s >= w for s, w in zip(self.shift, self.window, strict=True)):  # type: ignore[arg-type]
            raise ValueError(f"swin(): shift is {self.shift}; expected less than the window, {self.window}")

    def resolve(self, shape: ScoreShape) -> Resolved:
        shape.keys_are("shape of swin()", self.shape)
        groups: Any = np.zeros((), np.int64)
        for n, size, shift in zip(self.shape, self.window, self.shift, strict=True):  # type: ignore[arg-type]
            size, shift = min(size, n), min(shift, n)  # a larger one is one window
            window = np.where(np.arange(n) < shift, 0, (np.arange(n) - shift) // size + 1)
            groups = groups[..., None] * (n + 1) + window
        return _groups(shape, groups)


@dataclass(frozen=True, repr=False, eq=False)
class neighborhood(Mask):
    """The `kernel` places nearest to the query's along each axis; at borders the window moves inwards.

    Neighborhood attention as NATTEN defines it: Hassani et al. 2023, arXiv:2204.07143; dilated: Hassani and
    Shi 2022, arXiv:2209.15001. Every query attends as many keys, its own among them.

    Parameters
    ----------
    shape : tuple of int
        Of the grid: 1, 2, 3 or more axes.
    kernel : int or tuple of int
        Places along each axis; ``kernel * dilation`` at most its length. Of an even number, one more lies
        before the query than behind it.
    dilation : int or tuple of int, default 1
        Distance of neighbours.
    causal : bool or tuple of bool, default False
        Along such an axis the `kernel` places up to the query's, fewer at the border.
    """

    shape: Shape
    kernel: int | Shape
    dilation: int | Shape = 1
    causal: bool | tuple[bool, ...] = False

    def __post_init__(self) -> None:
        values = neighborhood_sizes("neighborhood", self.shape, self.kernel, self.dilation, self.causal)
        for name, value in zip(("shape", "kernel", "dilation", "causal"), values, strict=True):
            _set(self, name, value)

    def resolve(self, shape: ScoreShape) -> Resolved:
        shape.keys_are("shape of neighborhood()", self.shape)
        n = shape.len_k
        # Keys are the product over the axes of what is attended along each; (places of axes so far, keys).
        first: Ints = np.zeros((1, 1), np.int64)
        given: Any = np.ones((1, 1), np.bool_)
        length: Any = 1
        for axis, (size, kernel, step, causal) in enumerate(
            zip(self.shape, self.kernel, self.dilation, self.causal, strict=True)  # type: ignore[arg-type]
        ):
            keys, some = _nearest(size, kernel, step, causal)
            if axis == len(self.shape) - 1 and step == 1:  # one range instead of single keys
                length = np.tile(some.sum(axis=1), len(first))[:, None]
                keys, some = keys[np.arange(size), some.argmax(axis=1), None], np.ones((size, 1), np.bool_)
            first = (first[:, None, :, None] * size + keys[None, :, None, :]).reshape(len(first) * size, -1)
            if any(self.causal):  # type: ignore[arg-type]
                given = (given[:, None, :, None] & some[None, :, None, :]).reshape(first.shape)
        counts, begin, stop = np.full(n, first.shape[1]), first.ravel(), (first + length).ravel()
        if not given.all():
            counts, begin, stop = given.sum(axis=1), begin[given.ravel()], stop[given.ravel()]
        lists = key_ranges.of_sorted(shape.by_position(n), np.append(counts, 0), begin, stop, n)
        return key_ranges.simplified(lists)


def neighborhood_sizes(
    func: str, shape: Any, kernel: Any, dilation: Any, causal: Any
) -> tuple[Shape, Shape, Shape, tuple[bool, ...]]:
    """What `neighborhood` is made of, each with a value for every axis, checked for `func`."""
    shape = _sizes(func, "shape", shape)
    n = len(shape)
    kernel, dilation = _sizes(func, "kernel", kernel, n), _sizes(func, "dilation", dilation, n)
    axes = causal if isinstance(causal, (tuple, list)) else (causal,) * n
    if len(axes) != n:
        raise ValueError(f"{func}(): causal is {short(causal)}; expected {n}, one an axis")
    if any(size * step > places for places, size, step in zip(shape, kernel, dilation, strict=True)):
        raise ValueError(
            f"{func}(): kernel {kernel} with dilation {dilation} exceeds the grid; expected their product to"
            f" be at most {shape} along each axis"
        )
    return shape, kernel, dilation, tuple(flag(func, "causal", x) for x in axes)


def _nearest(size: int, kernel: int, step: int, causal: bool) -> tuple[Ints, Bools]:
    """Places (size, kernel) that each attends along one axis, and which of them there are."""
    # Neighbours have the same remainder by `step`; number them, `count` in all, from 0.
    own, remainder = np.divmod(np.arange(size), step)
    count = (size - remainder + step - 1) // step
    first = own - kernel + 1 if causal else np.minimum(np.maximum(own - kernel // 2, 0), count - kernel)
    number = first[:, None] + np.arange(kernel)
    return number * step + remainder[:, None], number >= 0


def _groups(shape: ScoreShape, groups: Ints) -> Resolved:
    """Each place attends those of its own group; groups has a number for each, in the shape of the grid."""
    key = np.unique(groups, return_inverse=True)[1].ravel()
    query = np.append(key, -1)[shape.by_position(-1)]
    return key_ranges.simplified(of_groups(query, key, shape.len_k))


def _sizes(func: str, name: str, x: Any, n: int | None = None, low: int = 1) -> Shape:
    """`x` as `n` integers of at least `low`; one stands for all of them."""
    if isinstance(x, (tuple, list)):
        sizes = tuple(integer(func, f"{name}[{axis}]", size, low, MOST_SIZE) for axis, size in enumerate(x))
    else:
        sizes = (integer(func, name, x, low, MOST_SIZE),) * (n or 1)
    if not sizes or len(sizes) != (n or len(sizes)):
        raise ValueError(f"{func}(): {name} is {short(x)}; expected {n or 'some'} integers, one an axis")
    return sizes
