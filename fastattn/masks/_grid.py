"""Masks of a grid: the positions of a sequence are the places of an image or a volume, row by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fastattn._args import key_ranges
from fastattn._args.key_ranges import Resolved
from fastattn._args.types import Bools, Ints, Shape
from fastattn._args.values import MOST_SIZE, flag, integer, short
from fastattn.masks._mask import Mask, ScoreShape, of_groups


@dataclass(frozen=True, repr=False, eq=False)
class axial(Mask):
    """Axial attention: places that differ from the query's only along `axis`.

    Ho et al. 2019, arXiv:1912.12180.

    Parameters
    ----------
    shape : tuple of int
        Shape of the grid.
    axis : int or tuple of int
        One axis or several.
    """

    shape: Shape
    axis: int | tuple[int, ...]

    def __post_init__(self) -> None:
        shape = sizes("shape", self.shape)
        axes, n = self.axis if isinstance(self.axis, (tuple, list)) else (self.axis,), len(shape)
        self._set(shape=shape, axis=tuple(integer("axis", axis, -n, n - 1) % n for axis in axes))

    def resolve(self, shape: ScoreShape) -> Resolved:
        shape.keys_are("shape of axial()", self.shape)
        places = np.arange(shape.len_k).reshape(self.shape)
        for axis in self.axis:  # type: ignore[union-attr]
            places = places.take([0], axis)
        return _groups(shape, np.broadcast_to(places, self.shape))


@dataclass(frozen=True, repr=False, eq=False)
class swin(Mask):
    """Swin Transformer: places of the query's own window, in a grid of cyclically shifted windows.

    Liu et al. 2021, arXiv:2103.14030. Parts of opposite borders that the shift brings into one window do not
    attend each other.

    Parameters
    ----------
    shape : tuple of int
        Shape of the grid.
    window : int or tuple of int
        Window size, for all axes or for each.
    shift : int or tuple of int, default 0
        Shift of the windows, for all axes or for each; less than `window`.
    """

    shape: Shape
    window: int | Shape
    shift: int | Shape = 0

    def __post_init__(self) -> None:
        shape = sizes("shape", self.shape)
        window = sizes("window", self.window, len(shape))
        shift = sizes("shift", self.shift, len(shape), low=0)
        if any(s >= w for s, w in zip(shift, window, strict=True)):
            raise ValueError(f"(): shift is {shift}; expected less than the window, {window}")
        self._set(shape=shape, window=window, shift=shift)

    def resolve(self, shape: ScoreShape) -> Resolved:
        shape.keys_are("shape of swin()", self.shape)
        groups: Any = np.zeros((), np.int64)
        for n, size, shift in zip(self.shape, self.window, self.shift, strict=True):  # type: ignore[arg-type]
            size, shift = min(size, n), min(shift, n)  # a window larger than the grid is the whole axis
            window = np.where(np.arange(n) < shift, 0, (np.arange(n) - shift) // size + 1)
            groups = groups[..., None] * (n + 1) + window
        return _groups(shape, groups)


@dataclass(frozen=True, repr=False, eq=False)
class neighborhood(Mask):
    """Neighborhood attention: the `kernel` places nearest to the query's along each axis.

    As NATTEN: Hassani et al. 2023, arXiv:2204.07143; dilated, Hassani and Shi 2022, arXiv:2209.15001. At
    borders the window moves inwards. Without `causal`, all queries attend as many keys, their own included.

    Parameters
    ----------
    shape : tuple of int
        Shape of the grid, with any number of axes.
    kernel : int or tuple of int
        Places for all axes or for each; ``kernel * dilation`` is at most the length of the axis. An even
        window has one more place before the query than after it.
    dilation : int or tuple of int, default 1
        Distance between neighbouring places, for all axes or for each.
    causal : bool or tuple of bool, default False
        Whether the window is the `kernel` places up to the query's (fewer at the border), for all axes or for
        each.
    """

    shape: Shape
    kernel: int | Shape
    dilation: int | Shape = 1
    causal: bool | tuple[bool, ...] = False

    def __post_init__(self) -> None:
        values = neighborhood_sizes(self.shape, self.kernel, self.dilation, self.causal)
        self._set(**dict(zip(("shape", "kernel", "dilation", "causal"), values, strict=True)))

    def resolve(self, shape: ScoreShape) -> Resolved:
        shape.keys_are("shape of neighborhood()", self.shape)
        n = shape.len_k
        # The keys of a query are the product, over the axes, of the places attended along each axis. `first`
        # and `given` have a row for each place of the axes so far; `given` is False where there is no key.
        first: Ints = np.zeros((1, 1), np.int64)
        given: Any = np.ones((1, 1), np.bool_)
        length: Any = 1
        for axis, (size, kernel, step, causal) in enumerate(
            zip(self.shape, self.kernel, self.dilation, self.causal, strict=True)  # type: ignore[arg-type]
        ):
            keys, some = _nearest(size, kernel, step, causal)
            if axis == len(self.shape) - 1 and step == 1:  # neighbouring keys: one range for all of them
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
    shape: Any, kernel: Any, dilation: Any, causal: Any
) -> tuple[Shape, Shape, Shape, tuple[bool, ...]]:
    """The fields of `neighborhood`, checked, with a value for each axis."""
    shape = sizes("shape", shape)
    n = len(shape)
    kernel, dilation = sizes("kernel", kernel, n), sizes("dilation", dilation, n)
    axes = causal if isinstance(causal, (tuple, list)) else (causal,) * n
    if len(axes) != n:
        raise ValueError(f"(): causal is {short(causal)}; expected {n}, one an axis")
    if any(size * step > places for places, size, step in zip(shape, kernel, dilation, strict=True)):
        given = f"kernel {kernel} with dilation {dilation}"
        expected = f"their product to be at most {shape} along each axis"
        raise ValueError(f"(): {given} exceeds the grid; expected {expected}")
    return shape, kernel, dilation, tuple(flag("causal", x) for x in axes)


def _nearest(size: int, kernel: int, step: int, causal: bool) -> tuple[Ints, Bools]:
    """Places (size, kernel) that each place attends along one axis, and which of them are on the axis."""
    # Places with the same remainder by `step` are neighbours. There are `count` of them, numbered from 0.
    own, remainder = np.divmod(np.arange(size), step)
    count = (size - remainder + step - 1) // step
    first = own - kernel + 1 if causal else np.minimum(np.maximum(own - kernel // 2, 0), count - kernel)
    number = first[:, None] + np.arange(kernel)
    return number * step + remainder[:, None], number >= 0


def _groups(shape: ScoreShape, groups: Ints) -> Resolved:
    """Each place attends the places of its own group; `groups` has the number of each place's group."""
    key = np.unique(groups, return_inverse=True)[1].ravel()
    query = np.append(key, -1)[shape.by_position(-1)]
    return key_ranges.simplified(of_groups(query, key, shape.len_k))


def sizes(name: str, x: Any, n: int | None = None, low: int = 1, high: int | None = MOST_SIZE) -> Shape:
    """`x` as `n` integers of at least `low`; a single integer stands for all axes."""
    if isinstance(x, (tuple, list)):
        found = tuple(integer(f"{name}[{axis}]", size, low, high) for axis, size in enumerate(x))
    else:
        found = (integer(name, x, low, high),) * (n or 1)
    if not found or len(found) != (n or len(found)):
        raise ValueError(f"(): {name} is {short(x)}; expected {n or 'some'} integers, one an axis")
    return found
