"""Packed weights with false fields, and arrays that change after something was made of them."""

from contextlib import suppress

import numpy as np

from fastattn._args.packed import PackedLinear
from fastattn._args.weight_types import WEIGHT_DTYPES

FIELDS = ("in_features", "out_features", "gated", "dtype", "panels", "scales", "sums")


def false(d, weight):
    """A packed weight with a field that does not fit the others, if one can be made."""
    fields = {name: getattr(weight, name) for name in FIELDS}
    name = d.choose(*FIELDS)
    fields[name] = d.choose(*WEIGHT_DTYPES) if name == "dtype" else d.wrong(fields[name])
    with suppress(TypeError, ValueError, AttributeError):  # what cannot even be made
        return PackedLinear(**fields)
    return weight


def tampered(d, weight):
    """`weight` with one of its arrays changed in place."""
    others = [array for array in (weight.scales, weight.sums) if array is not None]
    tamper(d, weight.panels if not others or d.chance(0.7) else d.choose(*others))
    return weight


def tamper(d, x, viewed=False):
    """Change an array in place: its memory, type, shape or numbers. What NumPy refuses stays as it was.

    The memory of one with views (`viewed`) stays: NumPy would free it under them.
    """
    with suppress(TypeError, ValueError, AttributeError):
        x.flags.writeable = True
        how = d.rng.integers(1 if viewed else 0, 5)
        if how == 0:
            x.resize(d.choose(0, 1, x.size // 2, 2 * x.size), refcheck=False)
        elif how == 1:
            x.shape = d.choose((x.size,), x.shape[::-1], (*x.shape, 1))
        elif how == 2:
            x.dtype = d.choose("f4", "i4", "u1", "f8", "u2")
        elif how == 3:
            x.strides = d.choose((0,) * x.ndim, x.strides[::-1])
        else:
            x[...] = np.asarray(d.choose(0, 1), x.dtype)
