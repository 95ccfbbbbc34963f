"""Keys and values in int8, what they stand for, and arguments of calls with them."""

import numpy as np
from oracle import spread_inputs

from fastattn._bench.cases import STRUCTURES, combine


def rounded(x):
    """(codes, scales) of x (..., head_dim), as a cache in int8 makes them."""
    lane = np.float64 if x.dtype == np.float64 else np.float32
    scale = np.abs(x.astype(lane)).max(axis=-1) / lane(127)
    codes = np.divide(x, scale[..., None], out=np.zeros(x.shape, lane), where=scale[..., None] > 0)
    return np.rint(codes).astype(np.int8), scale


def widened(codes, scale):
    with np.errstate(all="ignore"):
        return codes.astype(scale.dtype) * scale[..., None]


def inputs(shape, dtype, seed=0):
    """q, the arguments that are int8, and k and v as these mean them."""
    q, k, v = spread_inputs(shape, dtype, np.random.default_rng(seed))
    (k, k_scale), (v, v_scale) = rounded(k), rounded(v)
    int8 = {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}
    return q, int8, widened(k, k_scale), widened(v, v_scale)


def arguments_of(variant, shape):
    """Arguments of a variant, or the mask of a structure."""
    rng = np.random.default_rng(1)
    return (
        {"mask": STRUCTURES[variant](shape, rng)}
        if variant in STRUCTURES
        else combine((variant,), shape, rng)
    )
