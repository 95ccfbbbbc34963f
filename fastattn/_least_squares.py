"""Scales and minima of groups of numbers, of which few bits are kept: those of least squared errors.

A group is a row of x (n, size), with a weight w for each of its squares. Its numbers become ``scale * code``,
or ``scale * code + minimum``, with integers of a range as codes. Two facts find scales and minima:

- Given these, the best codes are the nearest ones.
- Given codes q, the best scale and minimum are those of a regression of x on q. Without a minimum the scale
  is sum(w q x) / sum(w q q), which takes sum(w q x)**2 / sum(w q q) off the sum of squares. With one, sums
  are of deviations from the means. A scale that is off by e adds sum(w q q) e**2 again.

So a grid of scales gives codes, and the codes that take off most give the scale. The last fact rounds scales
that are themselves codes times a scale: that is the same problem, with other weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastattn._args.types import Array


_AGAIN = 0, 0  # behind a grid: what was found is refined twice, from its own nearest codes


class Line(NamedTuple):
    """Scales and minima of groups, all (n, 1), and what is needed to round them."""

    scale: Array
    minimum: Array
    stiffness: Array  # what an error of the scale, squared, adds to the sum of squares
    mean: Array  # weighted, of the numbers
    code: Array  # the same of the codes


def nearest(x: Array, scale: Array, minimum: Array | float, low: int, high: int) -> Array:
    """Codes of x from `low` to `high`, as floats; 0, or the next one to it, where the scale is 0."""
    inverse = _quotient(np.ones_like(scale), scale)
    codes = np.rint((x - minimum) * inverse)
    return np.clip(codes, low, high, out=codes)


def squares(x: Array, w: Array, scale: Array, minimum: Array | float, low: int, high: int) -> Array:
    """Weighted sums of squared errors of groups (n, 1) with their nearest codes."""
    errors = nearest(x, scale, minimum, low, high)
    errors *= scale
    errors += minimum
    errors -= x
    return _sum(w * errors, errors)


def scales_of(x: Array, w: Array, low: int, high: int, grid: Sequence[float]) -> tuple[Array, Array]:
    """Scales of groups without minima, and their stiffness as in `Line`, both (n, 1).

    In the grid are codes of the number of largest magnitude; the result is refined.
    """
    outermost = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    most, scale, stiffness = np.full(outermost.shape, -1, np.float32), *np.zeros((2, *outermost.shape), "f4")
    for code in (*grid, *_AGAIN):
        q = nearest(x, outermost / np.float32(code) if code else scale, 0.0, low, high)
        wq = w * q
        own, product = _sum(wq, q), _sum(wq, x)
        new = _quotient(product, own)
        better = product * new > most
        for kept, found in ((most, product * new), (scale, new), (stiffness, own)):
            np.copyto(kept, found, where=better)
    return scale, stiffness


def lines_of(x: Array, w: Array, high: int, grid: Sequence[float], below: bool) -> Line:
    """Scales and minima of groups, with codes from 0 to `high`; `below`: no minimum is above 0.

    The numbers of a group have a range, which is so many scales as the grid says.
    """
    total = _sum(w)
    mean = _quotient(_sum(w, x), total)
    first = x.min(axis=1, keepdims=True)
    if below:
        first = np.minimum(first, 0)
    width = x.max(axis=1, keepdims=True) - first
    most, found = np.full(mean.shape, -1, np.float32), [np.zeros_like(mean) for _ in range(4)]
    for codes in (*grid, *_AGAIN):
        scale, minimum = (width / np.float32(codes), first) if codes else found[:2]
        q = nearest(x, scale, minimum, 0, high)
        wq = w * q
        code, own, product = _quotient(_sum(wq), total), _sum(wq, q), _sum(wq, x)
        around = np.maximum(own - total * code**2, 0)  # of deviations from the means
        scale = _quotient(product - total * code * mean, around)
        minimum = mean - scale * code
        gain = total * mean**2 + around * scale**2
        if below:
            without = minimum > 0
            alone = _quotient(product, own)
            scale = np.where(without, alone, scale)
            around = np.where(without, own, around)
            gain = np.where(without, product * alone, gain)
            minimum = np.minimum(minimum, 0)
        better = gain > most
        np.copyto(most, gain, where=better)
        for kept, new in zip(found, (scale, minimum, around, code), strict=True):
            np.copyto(kept, new, where=better)
    scale, minimum, around, code = found
    return Line(scale, minimum, around, mean, code)


def best_of(x: Array, w: Array, low: int, high: int, scales: Array, minima: Array) -> Array:
    """Which of k scales and minima, both (k, n, 1), gives each group the least squares: indices (n,)."""
    errors = [squares(x, w, *each, low, high)[:, 0] for each in zip(scales, minima, strict=True)]
    found: Array = np.argmin(errors, axis=0)
    return found


def planes_of(x: Array, w: Array, u: Array, v: Array) -> tuple[Array, Array]:
    """Factors (n, 1) of u and v whose sum is nearest to x, all (n, size)."""
    wu, wv = (w * each for each in (u.astype(float), v.astype(float)))
    uu, uv, vv, ux, vx = _sum(wu, u), _sum(wu, v), _sum(wv, v), _sum(wu, x), _sum(wv, x)
    divisor = uu * vv - uv**2
    alone = divisor < 1e-9 * uu * vv  # one is a multiple of the other, or 0: u has it all
    a = np.where(alone, _quotient(ux, uu), _quotient(ux * vv - vx * uv, divisor))
    b = np.where(alone, 0, _quotient(vx * uu - ux * uv, divisor))
    return a.astype(np.float32), b.astype(np.float32)


def half(x: Array) -> Array:
    """Numbers that float16 has, the nearest ones to x, in float32."""
    return x.astype(np.float16).astype(np.float32)


def _sum(a: Array, b: Array | None = None) -> Array:
    """Sums of a, or of products, over groups, (n, 1)."""
    found: Array = a.sum(axis=1) if b is None else np.einsum("ij,ij->i", a, b)
    return found[:, None]


def _quotient(a: Array, b: Array) -> Array:
    """The quotient; 0 where the divisor is 0, or so small that the quotient is not finite."""
    with np.errstate(all="ignore"):
        found: Array = a / b
    return np.where(np.isfinite(found), found, np.float32(0))
