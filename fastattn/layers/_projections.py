"""Linear maps of one input, stacked in one packed weight: one `linear` for all, or for some neighbours.

Each map begins at a panel of its own, so that neighbours are a slice of the panels and not a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fastattn._args.pack import blocks_args
from fastattn._args.packed import PackedLinear, columns
from fastattn._engine import dispatch
from fastattn._engine.settings import get_num_threads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastattn._args.types import Array


class StackedMaps(NamedTuple):
    """Maps one after another: feature ``begins[i]`` of the product is the first of map i.

    The product is cut into heads of `head_dim` features each. `places` are those of the maps: in heads if all
    maps and the whole product begin and end with a head (`in_heads`), else in features.
    """

    weight: PackedLinear
    bias: Array | None
    begins: tuple[int, ...]
    sizes: tuple[int, ...]
    head_dim: int
    places: tuple[slice, ...]
    in_heads: bool
    whole: bool  # no features lie between the maps

    def part(self, first: int, last: int) -> StackedMaps:
        """The maps from `first` up to `last`, in the same memory."""
        width = columns(self.weight.dtype)
        begin, end = self.begins[first], self.begins[last - 1] + self.sizes[last - 1]
        panels = slice(begin // width, -(-end // width))
        weight = self.weight
        scales, sums = (None if x is None else x[panels] for x in (weight.scales, weight.sums))
        features = weight.in_features, end - begin
        packed = PackedLinear(*features, False, weight.dtype, weight.panels[panels], scales, sums)
        bias = None if self.bias is None else self.bias[begin:end]
        begins = [b - begin for b in self.begins[first:last]]
        return _stacked(packed, bias, begins, self.sizes[first:last], self.head_dim)

    def apart(self, whole: Array | None) -> list[Array]:
        """Each map's own part of the unpacked weight or of the bias; an empty list if that is None."""
        if whole is None:
            return []
        return [whole[b : b + n] for b, n in zip(self.begins, self.sizes, strict=True)]


def stack(weights: Sequence[Array], biases: Sequence[Array], dtype: str, head_dim: int) -> StackedMaps:
    """Stack the maps of `weights`, (out_features, in_features) each, and `biases`, which may be empty."""
    args = blocks_args([[("weight", weight) for weight in weights]], dtype, get_num_threads(), columns(dtype))
    dispatch.run(args)
    begins = [block.first for block in args.blocks]
    lane = np.float64 if dtype == "float64" else np.float32
    bias = np.zeros(args.out_features, lane) if biases else None
    for begin, part in zip(begins, biases, strict=bool(biases)):
        assert bias is not None
        bias[begin : begin + len(part)] = part
    sizes = tuple(len(weight) for weight in weights)
    return _stacked(args.packed(), bias, begins, sizes, head_dim)


def _stacked(
    weight: PackedLinear, bias: Array | None, begins: list[int], sizes: tuple[int, ...], head_dim: int
) -> StackedMaps:
    in_heads = not any(n % head_dim for n in (*begins, *sizes, weight.out_features))
    unit = head_dim if in_heads else 1
    places = tuple(slice(b // unit, (b + n) // unit) for b, n in zip(begins, sizes, strict=True))
    whole = sum(sizes) == weight.out_features
    return StackedMaps(weight, bias, tuple(begins), sizes, head_dim, places, in_heads, whole)
