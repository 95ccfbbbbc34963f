"""Vision transformers (Dosovitskiy et al. 2020), and heads that make a vector of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastattn import ops
from fastattn._args.types import Activation, Array, lane_dtype
from fastattn._engine.program import Program
from fastattn.functional._attention import attention
from fastattn.layers._block import Norm, Projection
from fastattn.models._embeddings import SequenceRules


def mapped(x: Array, linear: Projection, activation: Activation | None = None) -> Array:
    """``activation(linear(x))`` of rows."""
    weight, bias, rounded = linear
    return ops.linear(x, weight, bias, activation=activation, activations=rounded)


@dataclass(frozen=True, slots=True, eq=False)
class ClassToken:
    """The vector of an image is the row of its class token, normed and mapped."""

    norm: Norm
    linear: Projection

    def __call__(self, rows: Array) -> Array:
        """The vectors (n, features) of rows (n, length, hidden), in the lane type."""
        first = np.ascontiguousarray(rows[:, 0]).astype(lane_dtype(rows.dtype), copy=False)
        return mapped(ops.layer_norm(first, self.norm.weight, self.norm.bias, eps=self.norm.eps), self.linear)


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """The vector of an image is what one learned query finds in its rows, and a feed-forward of it."""

    q: Array  # (heads, 1, head_dim)
    kv: Projection
    attended: Projection
    norm: Norm
    inner: Projection
    activation: Activation
    outer: Projection

    def __call__(self, rows: Array) -> Array:
        """Make the vectors, as `ClassToken` does."""
        n, length, hidden = rows.shape
        heads = mapped(rows, self.kv).reshape(n, length, 2, len(self.q), -1).transpose(2, 0, 3, 1, 4)
        found = attention(self.q.astype(rows.dtype, copy=False), *heads).reshape(n, hidden)
        x = mapped(found.astype(lane_dtype(rows.dtype), copy=False), self.attended)
        normed = ops.layer_norm(x, self.norm.weight, self.norm.bias, eps=self.norm.eps)
        y: Array = x + mapped(mapped(normed, self.inner, self.activation), self.outer)
        return y


@dataclass(frozen=True, slots=True, eq=False)
class Vision:
    """Vision transformer: squares of pixels become rows, as words of a text do, and rows a vector."""

    image_size: int
    patch_size: int
    patches: Projection  # from the pixels of a square, (3, height, width), to a row
    token: Array | None  # the class token's row, before all others
    positions: Array  # (patches, hidden), added to the others
    program: Program
    sequence_rules: SequenceRules
    head: ClassToken | Probe

    @property
    def length(self) -> int:
        """Rows of an image."""
        return len(self.positions) + (self.token is not None)

    def __call__(self, pixels: Sequence[Array] | Array, dtype: np.dtype[Any]) -> Array:
        """The vectors (n, features), in the lane type, of pixels (n, 3, size, size); computed in `dtype`."""
        n, size = len(pixels), self.patch_size
        pixels = np.asarray(pixels)
        side = self.image_size // size
        whole = pixels[:, :, : side * size, : side * size].astype(dtype, copy=False)  # a rest is left out
        squares = whole.reshape(n, -1, side, size, side, size).transpose(0, 2, 4, 1, 3, 5)
        found = mapped(squares.reshape(n, side * side, -1), self.patches)
        x = np.empty((n, self.length, found.shape[-1]), dtype)
        before = self.length - side * side
        np.add(found, self.positions, out=x[:, before:])
        if self.token is not None:
            x[:, 0] = self.token
        sequences, _ = self.sequence_rules(np.full(n, self.length), dtype)
        rows = self.program.run(x.reshape(n * self.length, -1), sequences)
        return self.head(rows.reshape(x.shape))
