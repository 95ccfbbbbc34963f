"""Blocks of numbers as files have them: where codes, scales and minima lie in the bytes of a block.

The kernel that packs blocks and its NumPy twin follow one description, `Layout`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fastattn._args.types import Array


class Parts(NamedTuple):
    """Numbers of n blocks: those of a block that share a scale lie side by side."""

    codes: Array  # (n, features), int8
    scales: Array  # (n, scales of a block), float32
    minima: Array | None = None  # as scales


class Bits(NamedTuple):
    """Numbers of `width` bits: runs of them lie in bytes that follow one another, from the same bit on."""

    width: int
    runs: tuple[tuple[int, int, int], ...]  # the first byte, the lowest bit, and how many numbers

    def of(self, data: Array) -> Array:
        """Numbers (n, all) of blocks (n, bytes)."""
        found, at = np.empty((len(data), sum(run[2] for run in self.runs)), np.uint8), 0
        for byte, bit, count in self.runs:
            part = found[:, at : at + count]
            np.bitwise_and(data[:, byte : byte + count] >> bit, (1 << self.width) - 1, out=part)
            at += count
        return found

    def places(self) -> list[tuple[int, int]]:
        """Byte and lowest bit of each number."""
        return [(byte + i, bit) for byte, bit, count in self.runs for i in range(count)]


class Integers(NamedTuple):
    """Integers of a block: bits, with more above them, less a constant; 8 bits have a sign."""

    low: Bits
    high: Bits | None = None
    below: int = 0
    table: Array | None = None  # (16,), int8: what the integers are the places of

    def of(self, data: Array) -> Array:
        """Integers (n, all), int8, of blocks (n, bytes)."""
        found = self.low.of(data)
        if self.high is not None:
            found |= self.high.of(data) << self.low.width
        if self.table is not None:
            return np.asarray(self.table[found])
        codes = found.view(np.int8)
        return codes - np.int8(self.below) if self.below else codes


class Layout(NamedTuple):
    """A format's block. Numbers are ``unit * scale * code``, or ``unit * code``, plus a minimum."""

    features: int
    nbytes: int
    shared: int  # features that share a scale
    codes: Integers
    unit: int  # the byte of a float16
    exponent: bool = False  # the unit is a byte e, and means 2**(e - 128)
    scales: Integers | None = None  # None: the unit is the scale
    minimum: int | None = None  # the byte of a float16; None: there are no minima
    minima: Integers | None = None  # what that is multiplied by, and then subtracted

    def parts(self, data: Array) -> Parts:
        """Codes, scales and minima of blocks (n, bytes)."""
        if self.exponent:
            scales = np.ldexp(np.float32(1), data[:, self.unit].astype(np.int32) - 128)[:, None]
        else:
            scales = _float(data, self.unit)
        if self.scales is not None:
            scales = scales * self.scales.of(data)
        minima = None if self.minimum is None else _float(data, self.minimum)
        if minima is not None and self.minima is not None:
            minima = -(minima * self.minima.of(data))
        return Parts(self.codes.of(data), scales, minima)


def _float(data: Array, at: int) -> Array:
    """A float16 of blocks (n, bytes), as float32 (n, 1)."""
    found: Array = data[:, at : at + 2].copy().view("<f2").astype(np.float32)
    return found
