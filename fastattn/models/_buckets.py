"""Biases of scores by the distance of a key from its query, in the buckets of T5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fastattn.positions import t5_buckets

if TYPE_CHECKING:
    from fastattn._args.types import Array


@dataclass(frozen=True, slots=True, eq=False)
class BucketBiases:
    """A table of biases for each head, as `Places.biases` makes them for any length; see `t5_buckets`."""

    table: Array  # (buckets, heads), lane type
    max_distance: int  # from which on all distances share a bucket

    def __call__(self, longest: int) -> tuple[Array, ...]:
        """The table (heads, 2 n - 1) of `Sequences.biases` for sequences of up to `longest` tokens."""
        n = max(longest, 1)
        buckets = t5_buckets(
            1, 2 * n - 1, num_buckets=len(self.table), max_distance=self.max_distance, q_offset=n - 1
        )
        return (np.ascontiguousarray(self.table[buckets[0]].T),)
