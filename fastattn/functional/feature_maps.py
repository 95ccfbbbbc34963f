"""Feature maps for `linear_attention`, where phi(q) . phi(k) replaces exp(q . k)."""

from __future__ import annotations

import numpy as np

from fastattn import ops
from fastattn._args.ops import epsilon
from fastattn._args.types import Array, ArrayLike, lane_dtype
from fastattn._args.values import float_array
from fastattn.functional._differentiable import Steps, differentiable

__all__ = ["elu", "taylor", "unit"]


def __dir__() -> list[str]:
    return __all__


@differentiable("x")
def elu(x: ArrayLike) -> Steps[Array]:
    """``elu(x) + 1`` (Katharopoulos et al. 2020): x + 1 for positive x, else exp(x), in x's shape and dtype.

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
    """``x / sqrt(sum(x**2) + eps)`` over the last axis, for keys and queries of delta rules.

    Raises
    ------
    TypeError, ValueError
        If x is no array of float32, float64, float16 or bfloat16, or eps is negative or no number.
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
    """Features with products ``1 + s + s**2 / 2``, near exp(s), for ``s = q @ k / sqrt(head_dim)``.

    Parameters
    ----------
    x : array_like, (..., head_dim)
        Queries or keys: float32, float64, float16 or bfloat16.

    Returns
    -------
    ndarray, (..., 1 + head_dim + head_dim * (head_dim + 1) / 2)
        1, ``y = x / head_dim^(1/4)``, and ``y_i y_j`` for i <= j, divided by ``sqrt(2)`` if i = j; in x's
        dtype.

    Raises
    ------
    TypeError, ValueError
        If x has another dtype, or no axis.

    Notes
    -----
    The polynomial is at least 1/2, so ``linear_attention(taylor(q), taylor(k), v, rule="linear",
    normalize=True, eps=0)`` never divides by 0. Its state has about head_dim^2 / 2 rows; Based takes a
    head_dim of 16. Source: S. Arora et al., "Simple Linear Attention Language Models Balance the
    Recall-Throughput Tradeoff", 2024, arXiv:2402.18668.
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
