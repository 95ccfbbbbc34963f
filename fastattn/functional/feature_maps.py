"""Feature maps for `linear_attention`: phi(q) . phi(k) takes the place of exp(q . k)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastattn import ops
from fastattn._args.errors import named, wrong_dtype, wrong_shape
from fastattn._args.ops import epsilon
from fastattn._args.types import Array, ArrayLike, lane_dtype
from fastattn._args.values import float_array, generator, integer, real_array, require_broadcast
from fastattn.functional._differentiable import Steps, differentiable

__all__ = ["Favor", "elu", "favor", "taylor", "unit"]

_MOST_FEATURES = 1 << 24  # the square of which NumPy can still count


def __dir__() -> list[str]:
    return __all__


@differentiable("x")
def elu(x: ArrayLike) -> Steps[Array]:
    """``elu(x) + 1`` (Katharopoulos et al. 2020): x + 1 above 0, else exp(x); x's shape and dtype.

    Raises
    ------
    TypeError
        If x is no array of float32, float64, float16 or bfloat16.
    """
    array = float_array("x", x)
    wide = array.astype(lane_dtype(array.dtype), copy=False)
    result = np.where(wide > 0, wide + 1, np.exp(np.minimum(wide, 0)))
    request = yield np.asarray(result, array.dtype.newbyteorder("="))

    if not request.need:
        return ()
    slope = np.exp(np.minimum(wide, 0))  # 1 on both sides of 0
    dx = request.dout.astype(wide.dtype, copy=False) * slope
    return (np.asarray(dx, request.dout.dtype),)


@differentiable("x")
def unit(x: ArrayLike, *, eps: float = 1e-6) -> Steps[Array]:
    """``x / sqrt(sum(x**2) + eps)`` over the last axis: the keys, and often queries, of the delta rules.

    Raises
    ------
    TypeError, ValueError
        If x is no array of float32, float64, float16 or bfloat16, or eps is no number of 0 or more.
    """
    array = float_array("x", x, least_dims=1)
    lane, dim = lane_dtype(array.dtype), max(1, array.shape[-1])
    eps = epsilon("eps", eps, lane)
    request = yield ops.rms_norm(array, np.full(array.shape[-1], dim**-0.5, lane), eps=eps / dim)

    if not request.need:
        return ()
    wide, dout = (x.astype(lane, copy=False) for x in (array, request.dout))
    length = np.sqrt(np.square(wide).sum(-1, keepdims=True) + lane.type(eps))
    y = wide / length
    dx = (dout - y * (y * dout).sum(-1, keepdims=True)) / length
    return (np.asarray(dx, request.dout.dtype),)


@differentiable("x")
def taylor(x: ArrayLike) -> Steps[Array]:
    """Features whose products are ``1 + s + s**2 / 2``, near exp(s), with ``s = q @ k / sqrt(head_dim)``.

    Parameters
    ----------
    x : array_like, (..., head_dim)
        Queries or keys; float32, float64, float16 or bfloat16.

    Returns
    -------
    ndarray, (..., 1 + head_dim + head_dim * (head_dim + 1) / 2)
        1, ``y = x / head_dim^(1/4)``, and ``y_i y_j`` of all pairs i <= j, with i = j divided by ``sqrt(2)``;
        in x's dtype.

    Raises
    ------
    TypeError, ValueError
        If x is no array of these dtypes, or a number.

    Notes
    -----
    The polynomial is at least 1/2: ``linear_attention(taylor(q), taylor(k), v, rule="linear", normalize=True,
    eps=0)`` never divides by 0. Its state has about head_dim^2 / 2 rows; Based takes a head_dim of 16.
    Source: S. Arora et al., "Simple Linear Attention Language Models Balance the Recall-Throughput Tradeoff",
    2024, arXiv:2402.18668.
    """
    array = float_array("x", x, least_dims=1)
    lane, dim = lane_dtype(array.dtype), array.shape[-1]
    first, second = np.triu_indices(dim)
    factors = np.where(first == second, 0.5**0.5, 1).astype(lane)
    root = lane.type(max(1, dim) ** -0.25)
    y = array.astype(lane) * root
    result = np.empty((*array.shape[:-1], 1 + dim + len(first)), array.dtype.newbyteorder("="))
    result[..., 0] = 1
    with np.errstate(all="ignore"):
        result[..., 1 : 1 + dim] = y
        result[..., 1 + dim :] = y[..., first] * y[..., second] * factors
    request = yield result

    if not request.need:
        return ()
    dout = request.dout.astype(lane)
    dproducts = np.zeros((*y.shape, dim), lane)  # of y_i y_j, at (i, j) and (j, i)
    dproducts[..., first, second] = dout[..., 1 + dim :] * factors
    dproducts += dproducts.swapaxes(-1, -2).copy()
    dy = dout[..., 1 : 1 + dim] + (dproducts * y[..., None, :]).sum(-1)
    return (np.asarray(dy * root, request.dout.dtype),)


@dataclass(frozen=True, eq=False)
class Favor:
    """Positive random features whose products estimate exp(q @ k / sqrt(head_dim)): of `favor`."""

    projection: Array  # (num_features, head_dim), float64

    @np.errstate(all="ignore")
    @named("queries")
    def queries(self, q: ArrayLike) -> Array:
        """Features (..., length, num_features) of q (..., length, head_dim), in its dtype.

        Each query's features are divided by the largest of them, which `normalize` takes out again.
        """
        exponents, dtype = self._exponents("q", q)
        return self._features(exponents - exponents.max(axis=-1, keepdims=True), dtype)

    @np.errstate(all="ignore")
    @named("shift")
    def shift(self, k: ArrayLike) -> Array:
        """The largest exponent of the keys of each head, (..., 1, 1), for k (..., length, head_dim)."""
        return np.asarray(self._exponents("k", k)[0].max((-1, -2), keepdims=True, initial=-np.inf))

    @np.errstate(all="ignore")
    @named("keys")
    def keys(self, k: ArrayLike, shift: ArrayLike | None = None) -> Array:
        """Features (..., length, num_features) of k (..., length, head_dim), in its dtype.

        They are divided by exp(shift), by default that of these keys' `shift`, so that none overflows. One
        and the same factor for all keys of a head cancels where results are normalised. Keys that come in
        several calls, with a state carried on, need one `shift` for all of them: that of the first call, or
        0 where no exponent gets near 88, the largest of float32.
        """
        exponents, dtype = self._exponents("k", k)
        if shift is None:
            down = exponents.max(axis=(-1, -2), keepdims=True, initial=-np.inf)
        else:
            down = real_array("shift", shift)
            one_each = (*exponents.shape[:-1], 1)
            require_broadcast("shift", down.shape, one_each, "(..., length, 1)")
        return self._features(exponents - down.astype(np.float64), dtype)

    @np.errstate(all="ignore")
    @named("queries_backward")
    def queries_backward(self, dout: ArrayLike, q: ArrayLike) -> Array:
        """The gradient of q, from that of ``queries(q)``; q's shape and dtype, which dout's features have."""
        return self._backward("q", dout, q, (-1,))

    @np.errstate(all="ignore")
    @named("keys_backward")
    def keys_backward(self, dout: ArrayLike, k: ArrayLike, shift: ArrayLike | None = None) -> Array:
        """The gradient of k, from that of ``keys(k, shift)``; a given shift is a constant."""
        axes = (-1, -2)
        if shift is None:
            return self._backward("k", dout, k, axes)
        exponents, _ = self._exponents("k", k)
        down = real_array("shift", shift)
        require_broadcast("shift", down.shape, (*exponents.shape[:-1], 1), "(..., length, 1)")
        return self._backward("k", dout, k, axes, down.astype(np.float64))

    def _backward(
        self, name: str, dout: ArrayLike, x: ArrayLike, axes: tuple[int, ...], down: Any = None
    ) -> Array:
        """The gradient of x through features that are divided by exp(down), or the largest of `axes`."""
        exponents, dtype = self._exponents(name, x)
        given, array = float_array("dout", dout, least_dims=2), float_array(name, x)
        if given.shape != exponents.shape:
            raise wrong_shape("dout", given, exponents.shape)
        if given.dtype.newbyteorder("=") != dtype:
            raise wrong_dtype("dout", given, f"{name}'s, {dtype}")
        lane = lane_dtype(dtype)
        largest = exponents.max(axes, keepdims=True, initial=-np.inf)
        moved = exponents - (largest if down is None else down)
        dexponents = np.exp(moved) / math.sqrt(len(self.projection)) * given.astype(lane)
        if down is None:  # it is one of the exponents, or several equal ones share it
            is_largest = exponents == largest
            share = dexponents.sum(axes, keepdims=True) / is_largest.sum(axes, keepdims=True)
            dexponents = dexponents - is_largest * share
        factor = lane.type(array.shape[-1] ** -0.25)
        dy = dexponents @ self.projection.astype(lane) - dexponents.sum(-1, keepdims=True) * (
            array.astype(lane) * factor
        )
        return np.asarray(dy * factor, dtype)

    def _exponents(self, name: str, x: ArrayLike) -> tuple[Array, np.dtype[Any]]:
        """w . y - |y|^2 / 2 for each feature w, y = x / head_dim^(1/4), in the accumulator's dtype."""
        array = float_array(name, x, least_dims=2)
        head_dim = self.projection.shape[1]
        if array.shape[-1] != head_dim:
            raise wrong_shape(name, array, f"(..., length, {head_dim})")
        lane = lane_dtype(array.dtype)
        y = array.astype(lane) * lane.type(array.shape[-1] ** -0.25)
        exponents: Array = y @ self.projection.T.astype(lane) - 0.5 * np.square(y).sum(-1, keepdims=True)
        return exponents, array.dtype.newbyteorder("=")

    def _features(self, exponents: Array, dtype: np.dtype[Any]) -> Array:
        """Return exp(exponents) / sqrt(num_features)."""
        return np.asarray(np.exp(exponents) / math.sqrt(len(self.projection)), dtype)


@named("favor")
def favor(head_dim: int, num_features: int, rng: np.random.Generator | int | None = None) -> Favor:
    """Performer's positive orthogonal random features, FAVOR+.

    Parameters
    ----------
    head_dim : int
    num_features : int
        More of them estimate better; ``head_dim * log(head_dim)`` is the paper's order of magnitude.
    rng : Generator, int or None, optional
        Where the directions come from: the same for queries and keys, and in every call of a model.

    Returns
    -------
    Favor
        With ``phi = favor(...)``, ``linear_attention(phi.queries(q), phi.keys(k), v, rule="linear",
        normalize=True, eps=0)`` estimates softmax attention, causal or not. (The features are positive but
        may be small: `eps` would count.)

    Raises
    ------
    TypeError, ValueError
        If a number is no integer of at least 1, or a seed none of at least 0.

    Notes
    -----
    ``phi(x) = exp(w . y - |y|^2 / 2) / sqrt(num_features)`` with ``y = x / head_dim^(1/4)``. The directions w
    are orthogonal in blocks of head_dim, of the lengths that independent normal vectors have. Mapping costs
    ``2 * len * head_dim * num_features`` FLOP, by NumPy.
    Source: K. Choromanski et al., "Rethinking Attention with Performers", 2021, arXiv:2009.14794.
    """
    head_dim = integer("head_dim", head_dim, 1, _MOST_FEATURES)
    num_features = integer("num_features", num_features, 1, _MOST_FEATURES)
    rng = generator("rng", rng)
    blocks = []
    for _ in range(math.ceil(num_features / head_dim)):
        directions, signs = np.linalg.qr(rng.standard_normal((head_dim, head_dim)))
        blocks.append((directions * np.sign(np.diag(signs))).T)  # uniform over rotations
    lengths = np.linalg.norm(rng.standard_normal((num_features, head_dim)), axis=1, keepdims=True)
    return Favor(np.concatenate(blocks)[:num_features] * lengths)
