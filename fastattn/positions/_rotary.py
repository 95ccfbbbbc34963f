"""Rotary positions (RoPE): tables of cos and sin, and the rotation of queries and keys by them.

Pair k of a vector's dimensions is rotated by the angle ``position * inv_freq[k]``. The product of a query and
a key then depends only on the distance between them. `_rotary_scaling.py` computes the frequencies.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._args.dtypes import float_dtype
from fastattn._args.errors import named, put_name, wrong_type
from fastattn._args.results import result_array
from fastattn._args.types import Array, ArrayLike, DTypeLike, NDArray, RopeArgs, lane_dtype
from fastattn._args.values import flag, float_array, integer_array, readable, require_broadcast
from fastattn._engine import dispatch, settings
from fastattn.positions._rotary_scaling import RopeFrequencies


@named("rope_tables")
def rope_tables(
    positions: ArrayLike, frequencies: RopeFrequencies, dtype: DTypeLike = np.float32
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Cos and sin tables for `apply_rope`.

    Parameters
    ----------
    positions : array_like of int, (length,) or (..., length)
        Position of each query or key: ``np.arange(length)``, with a cache from ``cache.length`` on.
    frequencies : RopeFrequencies
        From `rope_frequencies`.
    dtype : dtype, default float32
        dtype of the tables, computed in float64. `apply_rope` reads float32 (float64 for float64 x) without
        conversion.

    Returns
    -------
    cos, sin : ndarray, (..., length, rotary_dim / 2)
        ``attention_factor * cos(position * inv_freq)``, and sin.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, before anything is computed.

    Notes
    -----
    Implementations with float32 angles differ: at position 100,000 their cosines are off by up to 0.007
    (base 10000, 128 dimensions).

    Examples
    --------
    >>> import numpy as np
    >>> from fastattn.positions import apply_rope, rope_frequencies, rope_tables
    >>> cos, sin = rope_tables(np.arange(5), rope_frequencies(64))
    >>> apply_rope(np.ones((1, 8, 5, 64), np.float32), cos, sin).shape
    (1, 8, 5, 64)
    """
    array = integer_array("positions", positions)
    if array.ndim == 0:
        raise ValueError("(): positions has shape (); expected (length,) or (..., length)")
    if not isinstance(frequencies, RopeFrequencies):
        raise wrong_type("frequencies", frequencies, "RopeFrequencies")
    dtype = float_dtype(dtype)
    inv_freq, attention_factor = frequencies
    angles = array[..., None].astype(np.float64) * inv_freq
    cos, sin = ((attention_factor * f(angles)).astype(dtype) for f in (np.cos, np.sin))
    return cos, sin


def apply_rope(
    x: ArrayLike, cos: ArrayLike, sin: ArrayLike, *, interleaved: bool = False, out: Array | None = None
) -> NDArray[Any]:
    """Rotate the first ``2 * cos.shape[-1]`` dimensions of queries or keys, and copy the rest [1]_.

    Parameters
    ----------
    x : array_like, (..., heads, length, head_dim)
        float32, float64, float16 or bfloat16, in any strides. A 2-D array is one head.
    cos, sin : array_like, (length, rotary_dim / 2) or (..., length, rotary_dim / 2)
        From `rope_tables`, shared by all heads. Leading dimensions broadcast to x's, without the heads.
    interleaved : bool, default False
        Pairs of the ``r = 2 * cos.shape[-1]`` dimensions: k and k + r/2 (Llama, GPT-NeoX and most models in
        Hugging Face format), or if True 2k and 2k + 1 (RoFormer, GPT-J, Llama in Meta's format).
    out : ndarray, optional
        Array for the result, with x's shape and dtype and a contiguous last axis: x itself (in place), or one
        that shares no memory with an input.

    Returns
    -------
    ndarray, (..., heads, length, head_dim)
        In x's dtype; a pair (a, b) becomes ``(a cos - b sin, b cos + a sin)``.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, before anything is computed.

    Notes
    -----
    Computed in float32 (float64 for float64); tables of another dtype are converted.

    References
    ----------
    .. [1] J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021,
       arXiv:2104.09864, section 3.4.2.
    """
    try:
        return rotated("x", x, cos, sin, interleaved, out)
    except Exception as error:
        put_name("apply_rope", error)
        raise


def rotated(
    name: str, x: ArrayLike, cos: ArrayLike, sin: ArrayLike, interleaved: bool, out: Array | None
) -> Array:
    """`apply_rope` of `x`, which messages call `name`."""
    array = float_array(name, x, least_dims=2)
    cos, sin = (float_array(n, t) for n, t in (("cos", cos), ("sin", sin)))
    if cos.ndim < 2:
        raise ValueError(f"(): cos has shape {cos.shape}; expected (..., length, rotary_dim / 2)")
    if cos.shape != sin.shape:
        raise ValueError(f"(): sin has shape {sin.shape}; expected {cos.shape} as cos")
    length, head_dim = array.shape[-2:]
    if cos.shape[-2] != length:
        found, expected = (
            f"{cos.shape}, length {cos.shape[-2]}",
            f"length {length} as in {name}, shape {array.shape}",
        )
        raise ValueError(f"(): cos has shape {found}; expected {expected}")
    if 2 * cos.shape[-1] > head_dim:
        found = f"{cos.shape}, which rotates {2 * cos.shape[-1]} dimensions"
        expected = f"at most the {head_dim} of {name}, shape {array.shape}"
        raise ValueError(f"(): cos has shape {found}; expected {expected}")
    rows = (*array.shape[:-3], *cos.shape[-2:])
    require_broadcast("cos", cos.shape, rows, "(..., length, rotary_dim / 2)")
    interleaved = flag("interleaved", interleaved)
    dtype = array.dtype.newbyteorder("=")
    if out is None:
        out = np.empty(array.shape, dtype)
    else:
        inputs = [("cos", cos, cos), ("sin", sin, sin)]
        in_place = isinstance(out, np.ndarray) and out.__array_interface__ == array.__array_interface__
        if not in_place:
            inputs.append((name, array, array))
        result_array(out, array.shape, dtype, name, inputs)
    if out.size == 0:
        return out
    lane = lane_dtype(dtype)
    cos, sin = (np.require(t, lane, ("C", "ALIGNED"))[..., None, :, :] for t in (cos, sin))  # for all heads
    source, result = readable(array, name, [], "the head dimension"), out
    if array.ndim == 2:
        source, result = source[None], result[None]
    args = RopeArgs(source, result, cos, sin, interleaved, settings.get_num_threads())
    dispatch.run(args, None)
    return out
