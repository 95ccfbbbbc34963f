"""Products with Hadamard matrices, as `src/hadamard.inc.h` has them."""

from __future__ import annotations

import numpy as np

from fastattn._args.types import Array


def by_hadamard(x: Array, inverse: bool = False) -> Array:
    """Multiply the rows of `x` by a Hadamard matrix or its inverse, in place, in blocks of powers of two."""
    begin = 0
    while rest := x.shape[-1] - begin:
        size = min(256, 1 << (rest.bit_length() - 1))
        block = x[..., begin : begin + size]
        half = 1
        while half < size:
            pairs = block.reshape(*x.shape[:-1], size // (2 * half), 2, half)
            a, b = pairs[..., 0, :], pairs[..., 1, :]
            block = np.stack((a + b, a - b), axis=-2).reshape(block.shape)
            half *= 2
        x[..., begin : begin + size] = block / size if inverse else block
        begin += size
    return x
