"""Sinusoidal position vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.types import FLOAT64
from fastattn._args.values import MAX_POSITION, MOST_SIZE, float_dtype, integer, number

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray


def sinusoidal(
    length: int, d_model: int, *, offset: int = 0, dtype: DTypeLike = np.float32, base: float = 10000.0
) -> NDArray[Any]:
    """Sinusoidal position vectors, which are added to the inputs [1]_.

    Parameters
    ----------
    length : int
        Number of positions.
    d_model : int
        Length of a vector; if it is odd, the last cosine is left out.
    offset : int, default 0
        The first position.
    dtype : dtype, default float32
        dtype of the result, which is computed in float64.
    base : float, default 10000
        Sets the frequencies ``w_k = base ** (-2 k / d_model)``.

    Returns
    -------
    ndarray, (length, d_model)
        ``x[t, 2k] = sin((offset + t) w_k)`` and ``x[t, 2k + 1] = cos((offset + t) w_k)``.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    References
    ----------
    .. [1] A. Vaswani et al., "Attention Is All You Need", 2017, arXiv:1706.03762, section 3.5.
    """
    length = integer("sinusoidal", "length", length, 0, MOST_SIZE)
    d_model = integer("sinusoidal", "d_model", d_model, 1, MOST_SIZE)
    offset = integer("sinusoidal", "offset", offset, -MAX_POSITION, MAX_POSITION)
    dtype = float_dtype("sinusoidal", dtype)
    base = number("sinusoidal", "base", base, FLOAT64, positive=True)
    angles = np.arange(offset, offset + length)[:, None] * base ** -(np.arange(0, d_model, 2) / d_model)
    vectors = np.empty((length, d_model), dtype)
    vectors[:, 0::2] = np.sin(angles)
    vectors[:, 1::2] = np.cos(angles[:, : d_model // 2])
    return vectors
