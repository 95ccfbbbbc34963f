"""The types in which weights of linear maps are stored, and what a step of a panel holds of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from fastattn._args.types import Array

if TYPE_CHECKING:
    from fastattn._args.coded import Layout

PANEL_BYTES = 128  # of each step through the input features: see packed.py
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


# int4 is what GGUF calls Q4_0, uint4 Q4_1, q8 Q8_0, iq4 IQ4_NL; fp4 has the values of MXFP4. Those of nf4 are
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
