"""Inputs of an encoder's blocks: vectors of tokens, their positions, windows and biases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastattn import grad, ops
from fastattn._args import key_ranges
from fastattn._args.packed import PackedLinear
from fastattn._args.types import Array, Ints, lane_dtype
from fastattn._engine.steps import Sequences
from fastattn._engine.tape import PLAIN
from fastattn._engine.values import Gradients
from fastattn.layers._block import Window, visible
from fastattn.positions import RopeFrequencies, rope_tables, t5_buckets

# Frequencies of rotary positions; some scalings depend on `seq_len`, the length of the sequence.
Frequencies = RopeFrequencies | Callable[..., RopeFrequencies]


def of_length(frequencies: Frequencies, length: int) -> RopeFrequencies:
    """Frequencies for a sequence of `length` tokens."""
    return frequencies if isinstance(frequencies, RopeFrequencies) else frequencies(seq_len=length)


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """Tables whose rows add up to the vector of a token."""

    # (vocab_size, features), as in the file; or the packed weight of the output layer, if the two are tied.
    tokens: Array | PackedLinear
    types: Array | None = None  # (types, features), like `positions` in the type of the computation
    positions: Array | None = None  # (max_length, features), the first token type's vector added
    scale: Any = 1.0  # of the tokens' vectors, in the type in which gradients are multiplied
    padding: int | None = None  # the id of tokens that have the first position, and that no other counts

    def __call__(self, tokens: Ints, positions: Ints, types: Ints | None, dtype: np.dtype[Any]) -> Array:
        """The vectors (n, features) of tokens, all arrays (n,), in new memory.

        Where there are no `types`, all are the first one.
        """
        table = self.tokens
        x = ops.embedding(tokens, table) if isinstance(table, np.ndarray) else table.rows(tokens)
        x = x.astype(dtype, copy=False)
        if self.scale != 1:
            lane = lane_dtype(dtype)
            x = (x.astype(lane, copy=False) * lane.type(self.scale)).astype(dtype, copy=False)
        if self.positions is not None:  # NumPy adds numbers of 16 bits one by one
            PLAIN.add(x, self.positions[self._counted(tokens, positions)], out=x)
        elif self.types is not None:
            x += self.types[0]
        if types is not None and self.types is not None:
            x += (self.types - self.types[0])[types]
        return x

    def add_gradients(
        self, gradients: Gradients, dx: Array, tokens: Ints, positions: Ints, types: Ints | None
    ) -> None:
        """Add the gradients of the tables, for dx, the gradient of the result."""

        def add(table: Array | PackedLinear, rows: Ints, dout: Array = dx) -> None:
            n = len(table) if isinstance(table, np.ndarray) else table.out_features
            gradients.add(table, grad.embedding(dout, rows, n))

        add(self.tokens, tokens, dx if self.scale == 1 else dx * self.scale)
        if self.positions is not None:
            add(self.positions, self._counted(tokens, positions))
        if self.types is not None:
            add(self.types, np.zeros_like(tokens) if types is None else types)

    def _counted(self, tokens: Ints, positions: Ints) -> Ints:
        """The rows of `positions`, as RoBERTa counts: a text may hold the padding token."""
        if self.padding is None:
            return positions
        is_padding = tokens == self.padding
        if not is_padding.any():
            return positions + 1
        before: Ints = np.cumsum(is_padding) - is_padding  # of all sequences
        before -= np.maximum.accumulate(np.where(positions == 0, before, 0))  # of its own
        return np.where(is_padding, 0, positions + 1 - before)


@dataclass(frozen=True, slots=True, eq=False)
class BucketBiases:
    """A table of biases for each head, by buckets of distances: see `t5_buckets`."""

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
        """Add the gradient of the table, from the gradients of `biases`, which a call made."""
        for bias in biases:
            found = gradients.of(bias)
            if found is not None:
                table = np.zeros_like(self.table)
                np.add.at(table, self._buckets((bias.shape[1] + 1) // 2), found.T)
                gradients.add(self.table, table)


@dataclass(frozen=True, slots=True, eq=False)
class AlibiBiases:
    """ALiBi to either side: each head has a slope, times which the distance is taken from scores."""

    slopes: Array  # (heads,), lane type

    def __call__(self, longest: int) -> tuple[Array, ...]:
        """The table of `Sequences.biases`, as `BucketBiases` makes it."""
        n = max(longest, 1)
        away = np.abs(np.arange(1 - n, n, dtype=self.slopes.dtype))
        return (-self.slopes[:, None] * away,)

    def add_gradients(self, gradients: Gradients, biases: tuple[Array, ...]) -> None:
        """Add nothing: slopes are no parameters."""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceRules:
    """Windows, rotations and biases of an encoder's blocks, for sequences of any lengths."""

    windows: tuple[Window, ...] = (None,)  # of which each attention has one: see `program_of_blocks`
    causal: bool = False
    frequencies: tuple[Frequencies, ...] = ()  # of which each attention may have one
    biases: BucketBiases | AlibiBiases | None = None  # of scores, by distance
    inputs: int = 0  # features that steps write for the blocks, beside the rows

    def __call__(
        self, lengths: Ints, dtype: np.dtype[Any], attended: Ints | None = None
    ) -> tuple[Sequences, Ints]:
        """Return the `Sequences` of `lengths`, and each token's position in its own one (tokens,).

        `attended` is how many of each sequence are keys, the first ones; None: all.
        """
        batch, longest = len(lengths), int(lengths.max(initial=0))
        begins: Ints = np.append(0, np.cumsum(lengths))
        positions: Ints = np.arange(begins[-1]) - np.repeat(begins[:-1], lengths)
        ragged = attended is not None or begins[-1] != batch * longest
        own = positions if ragged else positions[:longest]  # of one length: those of the first
        ends = np.repeat(lengths, lengths) if ragged else longest
        shared: list[key_ranges.Range] = []
        if attended is not None:
            shared.append((None, np.repeat(attended, lengths)))
        ranges = visible(self.windows, own, self.causal, shared, ends)
        rotations = tuple(self._rotation(each, own, lengths, dtype) for each in self.frequencies)
        biases = () if self.biases is None else self.biases(longest)
        inputs = np.empty((begins[-1], self.inputs), dtype) if self.inputs else None
        cu_seqlens = begins if ragged else None
        return Sequences(batch, ranges, rotations, (), cu_seqlens, biases, None, inputs), positions

    def add_gradients(self, gradients: Gradients, call: Sequences) -> None:
        """Add the gradient of the table of biases, if `gradients` has that of the call's biases."""
        if self.biases is not None:
            self.biases.add_gradients(gradients, call.biases)

    def _rotation(
        self, frequencies: Frequencies, positions: Ints, lengths: Ints, dtype: np.dtype[Any]
    ) -> tuple[Array, Array]:
        """cos and sin (1, n, pairs) of `positions` (n,)."""
        lane = lane_dtype(dtype)
        if isinstance(frequencies, RopeFrequencies):
            cos, sin = rope_tables(positions, frequencies, lane)
            return cos[None], sin[None]
        # By its own length, so that its bits do not depend on other sequences.
        alone = lengths.tolist() if len(positions) == lengths.sum() else [len(positions)]
        tables = [rope_tables(np.arange(n), frequencies(seq_len=n), lane) for n in alone or [0]]
        cos, sin = (np.concatenate(parts)[None] for parts in zip(*tables, strict=True))
        return cos, sin
