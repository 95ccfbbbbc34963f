"""Rotary positions for attention layers: one set of tables for all layers of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.errors import named
from fastattn._args.types import Array, Ints, lane_dtype
from fastattn._args.values import flag, short
from fastattn.layers import _computation
from fastattn.positions import RopeFrequencies, rope_tables

if TYPE_CHECKING:
    from fastattn._engine.tape import Tape

_LEAST_POSITIONS = 64


class Rope:
    """Rotary positions for the ``rope=`` of attention layers; share one between all layers of a model.

    Parameters
    ----------
    frequencies : RopeFrequencies
        From `fastattn.positions.rope_frequencies`.
    interleaved : bool, default False
        Which dimensions form a pair: see `fastattn.positions.apply_rope`.
    """

    @named("Rope")
    def __init__(self, frequencies: RopeFrequencies, interleaved: bool = False):
        expected = "what rope_frequencies(head_dim) returns"
        _computation.require("frequencies", frequencies, RopeFrequencies, expected)
        self.frequencies, self.interleaved = frequencies, flag("interleaved", interleaved)
        # By lane type, for positions 0, 1, ...; their length doubles when it is too small.
        self._tables: dict[np.dtype[Any], tuple[Array, Array]] = {}

    def __repr__(self) -> str:
        each, factor = self.frequencies
        slowest = f" down to {each[-1]:.3g} radians" if len(each) else ""
        times = "" if factor == 1 else f" times {factor:.3g}"
        return f"Rope({len(each)} pairs{slowest}{times}, interleaved={self.interleaved})"

    def __eq__(self, other: object) -> bool:
        """Whether both rotate alike."""
        if self is other or not isinstance(other, Rope):
            return self is other
        (ours, factor), (theirs, other_factor) = self.frequencies, other.frequencies
        alike = (factor, self.interleaved) == (other_factor, other.interleaved)
        return alike and np.array_equal(ours, theirs)

    def __hash__(self) -> int:
        return hash((len(self.frequencies.inv_freq), self.interleaved))

    def tables(self, offset: Ints | int, length: int, dtype: np.dtype[Any]) -> tuple[Array, Array]:
        """Cos and sin at `length` positions from `offset` on: (length, pairs), or (batch, length, pairs)."""
        if not (isinstance(offset, (int, np.ndarray)) and isinstance(length, int)):
            came = f"offset is {short(offset)} and length {short(length)}"
            raise TypeError(f"Rope.tables(): {came}; expected integers, or an array (batch,) of offsets")
        if not isinstance(dtype, np.dtype):
            raise TypeError(f"Rope.tables(): dtype is {short(dtype)}; expected a numpy.dtype")
        lane = lane_dtype(dtype)
        end = (offset if isinstance(offset, int) else int(offset.max(initial=0))) + length
        tables = self._tables.get(lane)
        if tables is None or len(tables[0]) < end:
            count = max(end, _LEAST_POSITIONS, 0 if tables is None else 2 * len(tables[0]))
            tables = self._tables[lane] = rope_tables(np.arange(count), self.frequencies, lane)
        cos, sin = tables
        if isinstance(offset, int):
            return cos[offset:end], sin[offset:end]
        positions = offset[:, None] + np.arange(length)
        return cos[positions], sin[positions]

    def rotate(self, tape: Tape, x: Any, offset: Ints | int) -> Any:
        """Rotate x (batch, heads, length, head_dim) in place. Its first token is at `offset`."""
        array = tape.array(x)
        cos, sin = self.tables(offset, array.shape[-2], array.dtype)
        return tape.rotate(x, cos[..., None, :, :], sin[..., None, :, :], self.interleaved)
