"""The arguments of the layers' kernels, checked and normalised: `ops.py`'s only place that raises."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args import lane_dtype
from fastattn._backend import get_num_threads, require_backend, threads
from fastattn._inputs import float_array, number, readable, require_result
from fastattn.packed import PackedLinear

if TYPE_CHECKING:
    from fastattn._args import Array

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "sigmoid")


@dataclass(slots=True, eq=False)
class LinearArgs:
    """out (m, n) = activation(x (m, k) weight^T + bias) + residual; for a gated weight see `ops.linear`."""

    x: Array  # last axis contiguous, as of all that follow; float32, float64, float16 or bfloat16
    weight: PackedLinear
    bias: Array | None  # (n), or (2, n) if gated: lane dtype
    activation: str | None
    residual: Array | None  # (m, n), x's dtype
    out: Array  # (m, n), x's dtype
    num_threads: int


@dataclass(slots=True, eq=False)
class RowsArgs:
    """One pass over the rows of x (m, n): `kind` says which; the rest is None where it takes no part."""

    kind: str  # "layer_norm", "rms_norm", "softmax", "activate"
    x: Array
    out: Array  # (m, n), x's dtype
    num_threads: int
    residual: Array | None = None  # (m, n), x's dtype: added to x first
    total: Array | None = None  # (m, n): receives x + residual
    up: Array | None = None  # (m, n): multiplies the result of "activate"
    weight: Array | None = None  # (n), lane dtype
    bias: Array | None = None
    eps: float = 0.0
    activation: str | None = None


@dataclass(slots=True, eq=False)
class RopeArgs:
    """out = x (..., heads, length, head_dim) rotated; cos and sin are (..., 1, length, pairs), lane dtype."""

    x: Array  # last axis contiguous, at least three dimensions, as of all
    out: Array  # x's shape and dtype; may be x
    cos: Array
    sin: Array
    interleaved: bool
    num_threads: int


def data(func: str, name: str, x: Any) -> Array:
    """`x` as a floating array of at least one dimension that the kernels can read."""
    array = float_array(func, name, x)
    if array.ndim == 0:
        raise ValueError(f"{func}(): {name} has shape (); expected (..., features)")
    return readable(array, name, [], "the last axis")


def rows(array: Array) -> Array:
    """`array` (..., n) as (m, n): a view wherever one stride can serve all rows."""
    return array if array.ndim == 2 else array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def like(func: str, name: str, x: Any, array: Array, of: str) -> Array:
    """`x` as an array of `array`'s shape and dtype, which is called `of`."""
    result = data(func, name, x)
    if result.dtype != array.dtype:
        raise TypeError(f"{func}(): {name} has dtype {result.dtype}; expected {of}'s, {array.dtype}")
    if result.shape != array.shape:
        raise ValueError(f"{func}(): {name} has shape {result.shape}; expected {of}'s, {array.shape}")
    return result


def vector(func: str, name: str, x: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array | None:
    """`x`, parameters of exactly `shape`, in the lane type of `dtype`; None stays None."""
    if x is None:
        return None
    lane = lane_dtype(dtype)
    if type(x) is np.ndarray and x.dtype is lane and x.shape == shape and x.flags.c_contiguous:
        return x
    array = float_array(func, name, x)
    if array.shape != shape:
        raise ValueError(f"{func}(): {name} has shape {array.shape}; expected {shape}")
    return np.ascontiguousarray(array, lane)


def result(
    func: str, out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], inputs: dict[str, Any]
) -> Array:
    """A new array for the result, or `out` if it will do."""
    if out is None:
        return np.empty(shape, dtype)
    require_result(func, out, shape, dtype, inputs)
    if out.ndim > 2 and not np.shares_memory(rows(out), out):
        raise ValueError(f"{func}(): out has strides {out.strides}; expected rows at one distance")
    array: Array = out
    return array


def linear_args(
    func: str,
    x: Any,
    weight: Any,
    bias: Any,
    activation: str | None,
    residual: Any,
    out: Any,
    num_threads: int | None,
    backend: str | None,
) -> tuple[LinearArgs, Array]:
    """Check the arguments of `ops.linear`; also returns the result in the caller's shape."""
    if backend is not None:
        require_backend(func, backend)
    if not isinstance(weight, PackedLinear):
        raise TypeError(f"{func}(): weight is of type {type(weight).__name__}; expected what pack() returns")
    x_array = data(func, "x", x)
    lane = lane_dtype(x_array.dtype)
    if (weight.dtype == "float64") != (lane == np.float64):
        raise TypeError(
            f"{func}(): x has dtype {x_array.dtype}; expected"
            f" {'float64' if weight.dtype == 'float64' else 'float32, float16 or bfloat16'} for a weight in"
            f" {weight.dtype}"
        )
    if x_array.shape[-1] != weight.in_features:
        raise ValueError(
            f"{func}(): x has shape {x_array.shape}; expected (..., {weight.in_features}) for this weight"
        )
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"{func}(): activation is {activation!r}; expected one of {', '.join(ACTIVATIONS)}")
    n = weight.out_features
    shape = (*x_array.shape[:-1], n)
    inputs = {"x": x_array, "bias": bias}
    if residual is not None and residual is not out:  # in place is allowed: it is read, then written
        inputs["residual"] = residual
    full = result(func, out, shape, x_array.dtype, inputs)
    if residual is not None:
        residual = rows(like(func, "residual", residual, full, "the result"))
    args = LinearArgs(
        x=rows(x_array),
        weight=weight,
        bias=vector(func, "bias", bias, (2, n) if weight.gated else (n,), x_array.dtype),
        activation=activation,
        residual=residual,
        out=rows(full),
        num_threads=get_num_threads() if num_threads is None else threads(func, num_threads),
    )
    return args, full


def norm_args(
    func: str,
    x: Any,
    weight: Any,
    bias: Any,
    eps: float,
    residual: Any,
    return_sum: bool,
    out: Any,
    num_threads: int | None,
    backend: str | None,
) -> tuple[RowsArgs, Any]:
    """Check the arguments of the norms; also returns what the caller gets."""
    if backend is not None:
        require_backend(func, backend)
    array = data(func, "x", x)
    shape = array.shape[-1:]
    full = result(func, out, array.shape, array.dtype, {"x": array, "residual": residual})
    total = np.empty(array.shape, array.dtype) if return_sum else None
    args = RowsArgs(
        kind=func,
        x=rows(array),
        out=rows(full),
        num_threads=get_num_threads() if num_threads is None else threads(func, num_threads),
        residual=None if residual is None else rows(like(func, "residual", residual, array, "x")),
        total=None if total is None else rows(total),
        weight=vector(func, "weight", weight, shape, array.dtype),
        bias=vector(func, "bias", bias, shape, array.dtype),
        eps=number(func, "eps", eps, lane_dtype(array.dtype)) if eps else 0.0,
    )
    if args.eps < 0:
        raise ValueError(f"{func}(): eps is {eps}; expected 0 or more")
    return args, full if total is None else (full, total)


def elementwise_args(
    func: str,
    x: Any,
    activation: str | None,
    up: Any,
    out: Any,
    num_threads: int | None,
    backend: str | None,
) -> tuple[RowsArgs, Array]:
    """Check the arguments of `softmax` and `activate`; also returns the result in the caller's shape."""
    if backend is not None:
        require_backend(func, backend)
    array = data(func, "x", x)
    if func == "activate" and activation not in ACTIVATIONS:
        raise ValueError(f"{func}(): activation is {activation!r}; expected one of {', '.join(ACTIVATIONS)}")
    full = result(func, out, array.shape, array.dtype, {"x": array, "up": up})
    args = RowsArgs(
        kind=func,
        x=rows(array),
        out=rows(full),
        num_threads=get_num_threads() if num_threads is None else threads(func, num_threads),
        up=None if up is None else rows(like(func, "up", up, array, "x")),
        activation=activation,
    )
    return args, full
