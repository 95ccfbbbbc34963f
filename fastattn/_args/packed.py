"""Weights of a linear map, packed once into the panels that the kernels read.

A panel holds `PANEL_BYTES` of each step through the input features: 32 output features (16 in float64), each
with one input feature, or with as many as fit four bytes: 2 in bfloat16, 4 in int8 and q8, 8 in 4 bits. The
micro-kernels of all instruction sets read a panel from front to back, so that they share one layout.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from fastattn._args.blocks import aligned_empty, copied
from fastattn._args.dtypes import dtype_choice
from fastattn._args.errors import named, wrong_type
from fastattn._args.types import Activation, Array, KernelArgs, Rounding
from fastattn._args.values import flag, integer

if TYPE_CHECKING:
    from fastattn._args.coded import Layout

PANEL_BYTES = 128
_ALL = slice(None)
_UNPACKED = 1 << 18  # numbers that `unpack` takes at a time: they stay in the second-level cache
BLOCK = 32  # input features that share a scale, for each output feature, in types of blocks; or half of that


class Table(NamedTuple):
    """Values of the sixteen codes of a 4-bit type: times the scale of their block, plus its minimum."""

    values: Array  # (16,), float32, ascending
    codes: Array  # (16,), the same as int8 ...
    unit: float  # ... times this; 1: they are equal

    def numbers(self, codes: Array) -> Array:
        """Places in the table of some `codes`."""
        if int(self.codes[-1]) - int(self.codes[0]) == 15:  # one after another
            found: Array = (codes - self.codes[0]).view(np.uint8)
            return found
        places = np.zeros(256, np.uint8)
        places[self.codes.view(np.uint8)] = np.arange(16)
        return np.asarray(places[codes.view(np.uint8)])

    @property
    def pairs(self) -> Array:
        """Values of two codes side by side, for each byte: (4096,), two values each."""
        index = np.arange(1 << 12)
        return np.stack((self.values[index & 15], self.values[index >> 8 & 15]), axis=-1).view(np.float64)[
            :, 0
        ]

    @property
    def middles(self) -> Array:
        """Between neighbouring values (15,), and infinity: x has the code of how many are less than x."""
        return np.append((self.values[1:] + self.values[:-1]) / 2, np.float32(np.inf))


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A type of weights: what a panel holds of them, and their codes in NumPy. In C: src/weights.inc.h.

    The words of an output feature are what the steps hold of it, side by side.
    """

    dtype: type[np.generic]
    features: int  # input features of a step
    shape: tuple[int, ...] = ()  # of what a step holds of each output feature
    beyond: float = np.inf  # the smallest magnitude that becomes infinite
    scales: Literal["", "row", "block"] = ""  # of each output feature, or of each of its blocks
    has_minima: bool = False  # each block has one, which is subtracted first
    extreme: float = 0.0  # in blocks: what the element of largest magnitude becomes, or its magnitude ...
    by_magnitude: bool = True  # ... if this is set
    integers: bool = True  # if it has scales: codes are integers, which multiply inputs in int8
    table: Table | None = None

    def encode(self, x: Array) -> tuple[Array, Array]:
        """Words of x (..., features), scaled lanes, as `dtype`; and integers of x, if there are such."""
        return x, x

    def decode(self, words: Array) -> Array:
        """Values of words: (..., features)."""
        values: Array = words.view(self.dtype)
        return values

    def codes(self, words: Array) -> Array:
        """Integers of words: (..., features)."""
        return self.decode(words)


class _Pairs(Stored):
    __slots__ = ()

    def encode(self, x: Array) -> tuple[Array, Array]:
        return to_bfloat16_bits(x), x

    def decode(self, words: Array) -> Array:
        return from_bfloat16_bits(words.view(np.uint16))


class _Bytes(Stored):
    __slots__ = ()

    def encode(self, x: Array) -> tuple[Array, Array]:
        # Clip: the scale of a row of denormal numbers is coarse, so that a quotient may exceed 127.
        codes = np.clip(np.rint(x), -127, 127).astype(np.int8)
        return codes, codes

    def decode(self, words: Array) -> Array:
        return words.view(np.int8).astype(np.float32)

    def codes(self, words: Array) -> Array:
        return np.asarray(words.view(np.int8))


class _Places(Stored):
    """Places in a table, two in a byte."""

    __slots__ = ()

    def encode(self, x: Array) -> tuple[Array, Array]:
        assert self.table
        places = np.searchsorted(self.table.middles[:-1], x).astype(np.uint8)
        return two_a_byte(places), self.table.codes[places]

    def decode(self, words: Array) -> Array:
        assert self.table
        return np.take(self.table.pairs, _bytes_of(words).view(np.uint16)).view(np.float32)

    def codes(self, words: Array) -> Array:
        assert self.table
        return self.table.codes[_bytes_of(words).view(np.uint8)]


def two_a_byte(codes: Array) -> Array:
    """Codes (..., features) as steps hold them, (..., features / 2)."""
    fours = np.ascontiguousarray(codes).view(np.uint32)
    return np.asarray((fours[..., ::2] | fours[..., 1::2] << 4).view(np.uint8))


def _bytes_of(words: Array) -> Array:
    """Codes of words (..., steps), a byte each, four to an integer: (..., 2 * steps)."""
    halves = np.stack((words & 0x0F0F0F0F, words >> 4 & 0x0F0F0F0F), axis=-1)
    return halves.reshape(*words.shape[:-1], 2 * words.shape[-1])


_NF4 = (
    "-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635"
    " -0.18477343022823334 -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725"
    " 0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0"
)
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
FP4 = np.array([-12, -8, -6, -4, -3, -2, -1, 0, 0, 1, 2, 3, 4, 6, 8, 12], np.int8)  # doubled
_HALF = 65520.0  # the smallest number that float16, as scales and minima of blocks are, rounds to infinity


def _four_bits(values: Any, extreme: float, unit: float = 1.0, has_minima: bool = False) -> Stored:
    """A table's type. Without `extreme`, a block's largest magnitude becomes 1."""
    table = Table(np.asarray(values, np.float32), np.rint(np.divide(values, unit)).astype(np.int8), unit)
    beyond = _HALF if has_minima else abs(extreme or 1) * _HALF
    how = extreme or 1, not extreme
    return _Places(np.uint8, 8, (4,), beyond, "block", has_minima, *how, table=table)


# int4 is what GGUF calls Q4_0, uint4 Q4_1, q8 Q8_0, iq4 IQ4_NL; fp4's numbers are those of MXFP4. NF4's are
# quantiles of the normal distribution (Dettmers et al. 2023, arXiv:2305.14314), such that 0 is one of them.
# int8 is scaled in float32.
STORED = {
    "float32": Stored(np.float32, 1, beyond=2.0**128 - 2.0**103),
    "float64": Stored(np.float64, 1),
    "bfloat16": _Pairs(np.uint16, 2, (2,), 2.0**128 - 2.0**119),
    "int8": _Bytes(np.int8, 4, (4,), 2.0**128 - 2.0**103, "row"),
    "q8": _Bytes(np.int8, 4, (4,), 127 * _HALF, "block", extreme=127),
    "int4": _four_bits(range(-8, 8), -8),
    "uint4": _four_bits(range(16), 15, has_minima=True),
    "nf4": _four_bits([float(x) for x in _NF4.split()], 0, 1 / 127),
    "iq4": _four_bits(IQ4, -127),
    "fp4": _four_bits(FP4, -12),
}
WEIGHT_DTYPES = tuple(STORED)
OF_FLOAT32 = tuple(name for name in STORED if name != "float64")
BLOCKED = tuple(name for name, stored in STORED.items() if stored.scales == "block")
# The types that multiply inputs in int8.
INTEGERS = tuple(name for name, stored in STORED.items() if stored.scales and stored.integers)


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

    @np.errstate(all="ignore")
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


def columns(dtype: str) -> int:
    """Output features of a panel."""
    return PANEL_BYTES // (8 if dtype == "float64" else 4)


def steps(in_features: int, dtype: str) -> int:
    """Steps of a panel through that many input features; whole blocks, in 4 bits."""
    if dtype in BLOCKED:
        return -(-in_features // BLOCK) * (BLOCK // STORED[dtype].features)
    return -(-in_features // STORED[dtype].features)


def stored_codes(dtype: str, layout: Layout) -> tuple[int, Array | None]:
    """Return what is added to the integers of a file's blocks, and a table of what they become, or None.

    Codes without a minimum, from -8 up, become codes from 0 up where the type has minima.
    """
    codes, table = layout.codes, STORED[dtype].table
    if table is None:
        return -codes.below, codes.table
    if codes.table is not None:
        return 0, table.numbers(codes.table).view(np.int8)
    return (8 if layout.minimum is None else 0) - codes.below, None


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


def is_finite(x: Array, stored: str, or_none: bool = False) -> bool:
    """Whether floating `x` is finite once it is `stored`, one of WEIGHT_DTYPES; `or_none` also allows -inf.

    It compares bits. Read as signed integers, positive numbers keep their order, with infinity and then NaN
    behind them; read as unsigned integers, negative numbers do. So two maxima answer the question, without
    memory. For 16-bit types this takes a tenth of the time of comparing the numbers.
    """
    signed, unsigned = (np.dtype(f"{kind}{x.itemsize}").newbyteorder(x.dtype.byteorder) for kind in "iu")
    beyond = STORED[stored].beyond if stored in STORED else np.inf
    with np.errstate(over="ignore"):
        above, below = np.array([beyond, -np.inf if or_none else -beyond]).astype(x.dtype)[:, None]
    most, least = x.view(signed).max(initial=0), x.view(unsigned).max(initial=0)
    low = below.view(unsigned)[0]
    return bool(most < above.view(signed)[0] and (least <= low if or_none else least < low))


def to_bfloat16_bits(x: Array) -> Array:
    """Round float32 `x` to bfloat16, to nearest even, and return its bits; NaN stays NaN."""
    bits, nan = x.view(np.uint32), np.isnan(x)
    rounded = np.asarray(bits >> 16)
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    rounded[nan] = bits[nan] >> 16 | 0x40
    return rounded.astype(np.uint16)


def from_bfloat16_bits(bits: Array) -> Array:
    """The values of bfloat16 `bits`, in float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
