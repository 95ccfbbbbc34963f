"""Slopes of ALiBi."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fastattn._args.values import MOST_SIZE, integer

if TYPE_CHECKING:
    from numpy.typing import NDArray


def alibi_slopes(num_heads: int) -> NDArray[np.float32]:
    """Slopes of ALiBi for ``attention(alibi_slopes=...)``: one a head, from steep to flat.

    Parameters
    ----------
    num_heads : int
        Number of query heads.

    Returns
    -------
    ndarray of float32, (num_heads,)
        For n heads, a power of two, ``2 ** (-8 i / n)`` with i from 1 to n. For another number: the slopes of
        the next lower power of two n, then every second slope of 2 n, as in the authors' code [1]_, BLOOM
        and MPT.

    Raises
    ------
    TypeError, ValueError
        If `num_heads` is not a positive integer.

    References
    ----------
    .. [1] O. Press, N. A. Smith, M. Lewis, "Train Short, Test Long: Attention with Linear Biases Enables
       Input Length Extrapolation", 2022, arXiv:2108.12409, section 3.
    """
    num_heads = integer("alibi_slopes", "num_heads", num_heads, 1, MOST_SIZE)
    n = 1 << (num_heads.bit_length() - 1)
    exponents = np.concatenate([np.arange(1, n + 1) / n, np.arange(1, 2 * (num_heads - n), 2) / (2 * n)])
    slopes: NDArray[np.float32] = np.exp2(-8 * exponents).astype(np.float32)
    return slopes
