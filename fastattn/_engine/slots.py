"""Memory of a cache for new keys and values: in its own type, or rounded to int8 or int4."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fastattn._args.quiet import quiet
from fastattn._args.types import INT4, Array, Ints
from fastattn._engine.rounding import in_blocks, rounded

if TYPE_CHECKING:
    from typing import Any


class Slots(NamedTuple):
    """The memory of a cache where the keys and values of new tokens go; the cache already counts them."""

    k: Array  # (batch, heads_kv, capacity, head_dim), or bytes in INT4
    v: Array
    starts: Ints | int  # position of the first new token: one number, or one for each sequence, (batch,)
    ends: Ints | None  # length of each sequence with the new tokens, (batch,); None where all have `length`
    length: int  # of the longest sequence, with the new tokens
    k_scale: Array | None = None  # (batch, heads_kv, capacity), of int8
    v_scale: Array | None = None

    def of_sequence(self, i: int, tokens: int) -> Slots:
        """Slots of sequence i alone, which gets so many tokens."""
        start = self.starts if isinstance(self.starts, int) else int(self.starts[i])
        k_scale, v_scale = (None if x is None else x[i : i + 1] for x in (self.k_scale, self.v_scale))
        k, v = self.k[i : i + 1], self.v[i : i + 1]
        return Slots(k, v, start, None, start + tokens, k_scale, v_scale)

    @quiet  # a float32 too large for float16 becomes infinite
    def put(self, k: Array, v: Array, first: int = 0) -> None:
        """Write k and v (batch, heads, tokens, head_dim) to the heads from `first` on.

        Padding is written, too; the next tokens overwrite it.
        """
        batch, heads, tokens, _ = k.shape
        parts = stored(k, v, self.k.dtype, None if self.k_scale is None else self.k_scale.dtype)
        for new, whole in zip(parts, self._arrays(), strict=True):
            there = whole[:, first : first + heads]
            if isinstance(self.starts, int):
                there[:, :, self.starts : self.starts + tokens] = new
            else:
                place = self.starts[:, None] + np.arange(tokens)
                there[np.arange(batch)[:, None], :, place] = new.swapaxes(1, 2)

    def held(self, first: int, heads: int) -> tuple[Array, ...]:
        """Views of all keys and of all values of some heads, and if they are int8, of their scales."""
        return tuple(x[:, first : first + heads, : self.length] for x in self._arrays())

    def _arrays(self) -> tuple[Array, ...]:
        if self.k_scale is None or self.v_scale is None:
            return self.k, self.v
        return self.k, self.v, self.k_scale, self.v_scale


def stored(k: Array, v: Array, dtype: np.dtype[Any], lane: np.dtype[Any] | None) -> tuple[Array, ...]:
    """What a cache in `dtype` holds of k and v (batch, heads, tokens, head_dim); of int8 scales in `lane`."""
    if dtype == INT4:
        return in_blocks(k), in_blocks(v)
    if lane is None:
        return k, v
    (k, k_scale), (v, v_scale) = rounded(k, lane), rounded(v, lane)
    return k, v, k_scale, v_scale
