"""Biases of scores by the distance of a key from its query, in the buckets of T5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fastattn.positions import t5_buckets

if TYPE_CHECKING:
    from fastattn._args.types import Array, Ints
    from fastattn._engine.tape import Gradients


@dataclass(frozen=True, slots=True, eq=False)
class BucketBiases:
    """A table of biases for each head, as `Places.biases` makes them for any length; see `t5_buckets`."""

    table: Array  # (buckets, heads), lane type
    max_distance: int  # from which on all distances share a bucket

    def __call__(self, longest: int) -> tuple[Array, ...]:
        """The table (heads, 2 n - 1) of `Sequences.biases` for sequences of up to `longest` tokens."""
        return (np.ascontiguousarray(self.table[self._buckets(max(longest, 1))].T),)

    def _buckets(self, n: int) -> Ints:
        """The bucket of each distance, (2 n - 1,)."""
        table = t5_buckets(
            1, 2 * n - 1, num_buckets=len(self.table), max_distance=self.max_distance, q_offset=n - 1
        )
        buckets: Ints = table[0]
        return buckets

    def add_gradients(self, gradients: Gradients, biases: tuple[Array, ...]) -> None:
        """Add that of the table, from those of `biases`, which a call made."""
        for bias in biases:
            found = gradients.of(bias)
            if found is not None:
                table = np.zeros_like(self.table)
                np.add.at(table, self._buckets((bias.shape[1] + 1) // 2), found.T)
                gradients.add(self.table, table)
