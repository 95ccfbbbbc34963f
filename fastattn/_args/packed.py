"""Weights of a linear map, packed once into the panels that the kernels read.

A panel holds 128 bytes of each step through the input features: 32 output features (16 in float64), each
with one input feature, or with as many as fit four bytes: 2 in bfloat16, 4 in int8 and q8, 8 in 4 bits. The
micro-kernels of all instruction sets read a panel from front to back, so that they share one layout.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._args.blocks import aligned_empty, copied
from fastattn._args.dtypes import dtype_choice
from fastattn._args.errors import named, wrong_type
from fastattn._args.quiet import quiet
from fastattn._args.types import Activation, Array, KernelArgs, Rounding
from fastattn._args.values import flag, integer
from fastattn._args.weight_types import (
    BLOCK,
    BLOCKED,
    INTEGERS,
    STORED,
    WEIGHT_DTYPES,
    columns,
    steps,
)

if TYPE_CHECKING:
    from fastattn._args.coded import Layout

_ALL = slice(None)
_UNPACKED = 1 << 18  # numbers that `unpack` takes at a time: they stay in the second-level cache


class PackedLinear:
    """Packed weight of a linear map, or of a gated pair, for `fastattn.ops.linear`.

    Made by `pack`; read-only. `unpack` returns the weight, of which no other copy is kept.

    Attributes
    ----------
    in_features, out_features : int
    dtype : str
        Storage type: a name of `WEIGHT_DTYPES`.
    gated : bool
        Whether there are two maps, ``activation(gate(x)) * up(x)``.
    panels : ndarray
        - float32, float64: ``(n_panels, in_features, columns)``
        - bfloat16: ``(n_panels, ceil(in_features / 2), columns, 2)``, bits
        - int8: ``(n_panels, ceil(in_features / 4), columns, 4)``
        - q8: ``(n_panels, 8 * ceil(in_features / 32), columns, 4)``
        - 4 bits: ``(n_panels, 4 * ceil(in_features / 32), columns, 4)``, bytes: one of four features in
          the lower half, one of the next four in the upper half

        Panels of a gated pair alternate: gate, up, gate, up.
    scales : ndarray or None
        int8: ``(n_panels, columns)``, float32, one factor per output feature. q8 and 4 bits: ``(n_panels,
        blocks, columns)``, float16, one factor per `block` input features.
    minima : ndarray or None
        uint4, and q8 from files with minima: added to codes times scales; shaped as `scales`.
    sums : ndarray or None
        Integer formats: ``(n_panels, columns)``, float32, the sum of the weights of each output feature; for
        NF4, of the weights that multiply int8, rounded to multiples of 1 / 127.
    """

    __slots__ = ("dtype", "gated", "in_features", "minima", "out_features", "panels", "scales", "sums")
    dtype: str
    gated: bool
    in_features: int
    out_features: int
    panels: Array
    scales: Array | None
    sums: Array | None
    minima: Array | None

    @named("PackedLinear")
    def __init__(
        self,
        in_features: int,
        out_features: int,
        gated: bool,
        dtype: str,
        panels: Array,
        scales: Array | None,
        sums: Array | None = None,
        minima: Array | None = None,
    ):
        # The kernels do not check these sizes again.
        dtype = dtype_choice("dtype", dtype, WEIGHT_DTYPES)
        k, n = integer("in_features", in_features, 0), integer("out_features", out_features, 0)
        n_maps, width = 1 + flag("gated", gated), columns(dtype)
        count = n_maps * -(-n // width)
        stored = STORED[dtype]
        shape = (count, steps(k, dtype), width, *stored.shape)
        expected: list[tuple[str, Any, Any, Any]] = [("panels", panels, shape, stored.dtype)]
        if stored.scales == "block":
            n_blocks = -(-k // BLOCK)
            if isinstance(scales, np.ndarray) and scales.shape[1:2] == (2 * n_blocks,):
                n_blocks *= 2
            expected.append(("scales", scales, (count, n_blocks, width), np.float16))
            if stored.has_minima or (stored.table is None and minima is not None):
                expected.append(("minima", minima, (count, n_blocks, width), np.float16))
        elif stored.scales:
            expected.append(("scales", scales, (count, width), np.float32))
        if dtype in INTEGERS:
            expected.append(("sums", sums, (count, width), np.float32))
        known = [name for name, *_ in expected]
        for name, array in (("scales", scales), ("sums", sums), ("minima", minima)):
            if array is not None and name not in known:
                raise ValueError(f"(): {name} are given; expected None for {dtype}, which has none")
        for name, array, shape, kind in expected:
            if type(array) is not np.ndarray:
                raise wrong_type(name, array, "an array")
            flags = array.flags
            if array.shape != shape or array.dtype != kind or not (flags.c_contiguous and flags.aligned):
                raise ValueError(
                    f"(): {name} has shape {array.shape} and dtype {array.dtype}; expected {shape},"
                    f" {np.dtype(kind)}, C-contiguous and aligned, for {k} to {n} features in {dtype}"
                )
        fields = {"dtype": dtype, "gated": bool(gated), "panels": panels, "scales": scales, "sums": sums}
        fields |= {"in_features": int(in_features), "out_features": int(out_features), "minima": minima}
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        for _, array, _, _ in expected:
            array.flags.writeable = False

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"PackedLinear is read-only: pack() another instead of setting {name}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy through `_restored`, which aligns the panels again."""
        features = self.in_features, self.out_features
        arrays = self.panels, self.scales, self.sums, self.minima
        return _restored, (*features, self.gated, self.dtype, *arrays)

    def __repr__(self) -> str:
        kind = "gated " if self.gated else ""
        return f"<PackedLinear: {kind}{self.in_features} -> {self.out_features}, {self.dtype}>"

    @property
    def nbytes(self) -> int:
        """Memory of the weights in bytes."""
        arrays = self.panels, self.scales, self.sums, self.minima
        return sum(0 if array is None else array.nbytes for array in arrays)

    @property
    def block(self) -> int:
        """Number of input features that share a scale: 32 or 16, in block types."""
        n_blocks = self.scales.shape[1] if self.scales is not None and self.dtype in BLOCKED else 0
        return STORED[self.dtype].features * self.panels.shape[1] // n_blocks if n_blocks else BLOCK

    def floats(self, which: slice = _ALL) -> Array:
        """Panels `which` as floating numbers, (panels, in_features, columns)."""
        return self.rows_of(which).swapaxes(1, 2)

    def rows_of(self, which: slice) -> Array:
        """Weights row by row: (panels, columns, in_features)."""
        return self._floats(
            self.panels[which], *[x if x is None else x[which] for x in (self.scales, self.minima)]
        )

    def rows(self, features: Array) -> Array:
        """Weights of output features (n,), (n, in_features), as floating numbers; not of a gated pair."""
        panel, column = np.divmod(features, columns(self.dtype))
        shared = [x if x is None else x[panel, ..., column][..., None] for x in (self.scales, self.minima)]
        return self._floats(self.panels[panel, :, column][:, :, None], *shared)[:, 0]

    @quiet
    def _floats(self, panels: Array, scales: Array | None, minima: Array | None) -> Array:
        """(panels, columns, in_features), row by row, of panels (panels, steps, columns[, stored])."""
        stored, k = STORED[self.dtype], self.in_features
        rows = stored.decode(_words(panels))
        if scales is None:
            return np.ascontiguousarray(rows[..., :k])
        if stored.scales == "row":
            return np.asarray(rows[..., :k] * scales[..., None])
        blocks = rows.reshape(*rows.shape[:2], scales.shape[1], self.block)
        blocks *= scales.astype(np.float32).swapaxes(1, 2)[..., None]
        if minima is not None:
            blocks += minima.astype(np.float32).swapaxes(1, 2)[..., None]
        return blocks.reshape(rows.shape)[..., :k]

    def codes(self, which: slice) -> Array:
        """Integers of panels `which`, which multiply int8: (panels, in_features, columns)."""
        return STORED[self.dtype].codes(_words(self.panels[which]))[..., : self.in_features].swapaxes(1, 2)

    def unpack(self) -> Array:
        """The weight, (out_features, in_features), or (2, out_features, in_features): gate and up.

        float64 if it is stored in float64, else float32, which represents the other types exactly.
        """
        n_maps, width, k = 1 + self.gated, columns(self.dtype), self.in_features
        lane = np.float64 if self.dtype == "float64" else np.float32
        weight = np.empty((n_maps, self.out_features, k), lane)
        step = max(1, _UNPACKED // max(1, n_maps * width * k)) * n_maps
        for first in range(0, len(self.panels), step):
            panels = self.rows_of(slice(first, first + step))
            for i in range(n_maps):
                maps = panels[i::n_maps]
                rows = weight[i, first // n_maps * width :][: len(maps) * width]
                rows[...] = maps.reshape(len(maps) * width, k)[: len(rows)]
        return weight if self.gated else weight[0]


def _words(panels: Array) -> Array:
    """Words of panels (panels, steps, columns[, stored]), row by row: (panels, columns, steps)."""
    word = np.uint64 if panels.dtype == np.float64 else np.uint32  # what a step holds of a column
    words = np.ascontiguousarray(panels).view(word).reshape(panels.shape[:3])
    return words.swapaxes(1, 2).copy()


def _restored(*fields: Any) -> PackedLinear:
    *sizes, panels, scales, sums, minima = fields
    aligned = copied(panels, aligned_empty(panels.shape, panels.dtype))
    return PackedLinear(*[*sizes, aligned, scales, sums, minima])


@dataclass(slots=True, eq=False)
class LinearArgs(KernelArgs):
    """out (m, n) = activation(x (m, k) weight^T + bias) + residual; for a gated weight see `ops.linear`.

    Transposed, x weight in place of x weight^T: the weight has n input features and k, or k / 2, output ones.
    """

    x: Array  # last axis contiguous, as of all that follow; float32, float64, float16 or bfloat16
    weight: PackedLinear
    bias: Array | None  # (n), or (2, n) if gated: lane dtype
    activation: Activation | None
    residual: Array | None  # (m, n), x's dtype
    out: Array  # (m, n), x's dtype
    num_threads: int
    activations: Rounding | None = None  # how x is rounded before it is multiplied
    transposed: bool = False
    pre: Array | None = None  # (m, n), or (m, 2 n) if gated, x's dtype: what the activation is applied to


class RowBlock(NamedTuple):
    """Rows of a map that are packed."""

    name: str
    array: Array  # (rows, in_features), of any floating type, native, in any strides; or as `layout` says
    first: int  # the output feature that row 0 is
    map: int  # of a gated pair, the gate's is 0
    layout: Layout | None = None  # of blocks as a file has them, whose bytes are `array`, a row side by side


@dataclass(slots=True, eq=False)
class PackArgs(KernelArgs):
    """Blocks of rows into the panels `out`, which it makes. Output features of no block become 0.

    Blocks are all of numbers, or all of a file's codes that the type `dtype` holds: see `stored_codes`.
    """

    blocks: list[RowBlock]
    in_features: int
    out_features: int
    maps: int
    dtype: str
    num_threads: int
    over: PackedLinear | None = None  # of these sizes and a floating dtype, is written over; None: a new one
    tiles: tuple[int, int] = 1, 1  # input features are so many times so many heads; see `packed`
    block: int = field(init=False, default=BLOCK)  # input features that share a scale, in types of blocks
    out: Array = field(init=False)
    scales: Array | None = field(init=False)
    minima: Array | None = field(init=False, default=None)
    sums: Array | None = field(init=False)
    beyond: float = field(init=False)  # the smallest magnitude that is not finite in `dtype`
    bad: Array = field(init=False)  # of each block, whether it has such a magnitude, or NaN

    def __post_init__(self) -> None:
        width, stored = columns(self.dtype), STORED[self.dtype]
        panels = -(-self.out_features // width) * self.maps
        shape = panels, steps(self.in_features, self.dtype), width, *stored.shape
        self.scales = self.sums = None
        if self.over is None:
            self.out = aligned_empty(shape, stored.dtype)
        else:
            self.out = self.over.panels.view()
            self.out.flags.writeable = True  # as their memory is
        if stored.scales == "row":
            self.scales = np.zeros((panels, width), np.float32)
        elif stored.scales:
            self.set_blocks(BLOCK, stored.has_minima)
        if self.dtype in INTEGERS:
            self.sums = np.zeros((panels, width), np.float32)
        self.beyond, self.bad = stored.beyond, np.zeros(len(self.blocks), bool)

    def set_blocks(self, block: int, minima: bool) -> None:
        """Let `block` input features, 32 or 16, share a scale, and a minimum, too, if `minima`."""
        n_blocks = -(-self.in_features // BLOCK) * (BLOCK // block)
        self.block, self.scales = block, np.empty((len(self.out), n_blocks, columns(self.dtype)), np.float16)
        self.minima = np.empty_like(self.scales) if minima else None

    def part(self, blocks: list[RowBlock], begin: int, end: int, num_threads: int) -> PackArgs:
        """Other blocks, which are the output features `begin`, where a panel begins, to `end` of these."""
        part, width = copy(self), columns(self.dtype)
        panels = slice(begin // width * self.maps, -(-end // width) * self.maps)
        part.blocks, part.bad, part.num_threads = blocks, np.zeros(len(blocks), bool), num_threads
        part.out_features, part.out = end - begin, self.out[panels]
        for name in ("scales", "minima", "sums"):
            if (array := getattr(self, name)) is not None:
                setattr(part, name, array[panels])
        return part

    def not_finite(self) -> str | None:
        """The name of the first block that is not finite in `dtype`, if there is one."""
        return next((block.name for block, bad in zip(self.blocks, self.bad, strict=True) if bad), None)

    def packed(self) -> PackedLinear:
        """Return the packed weight; raise if it is not finite.

        Of `tiles` (r, k), input features are r times k heads: the r of each of the k come together.
        """
        name = self.not_finite()
        if name is not None:
            what = f"values that are not finite as {self.dtype}"
            raise ValueError(f"pack(): {name} has {what}; expected finite ones")
        if min(self.tiles) > 1:
            shared = (self.scales, self.minima) if self.dtype in BLOCKED else ()
            for array in filter(lambda x: x is not None, (self.out, *shared)):
                tiled = array.reshape(len(array), *self.tiles, -1, *array.shape[2:])
                array[...] = tiled.swapaxes(1, 2).reshape(array.shape)
        sizes = self.in_features, self.out_features, self.maps == 2
        return self.over or PackedLinear(*sizes, self.dtype, self.out, self.scales, self.sums, self.minima)
