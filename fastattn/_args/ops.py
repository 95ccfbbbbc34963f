"""The arguments of the layers' kernels, checked and normalised: `ops.py`'s only place that raises."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.packed import PackedLinear
from fastattn._args.results import require_result
from fastattn._args.types import ACTIVATIONS, FLOAT64, LinearArgs, RowsArgs, lane_dtype
from fastattn._args.values import choice, flag, float_array, is_ready, number, readable
from fastattn._engine.settings import get_num_threads, require_backend, threads

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastattn._args.types import Activation, Array


def data(func: str, name: str, x: Any) -> Array:
    """`x` as a floating array of at least one dimension that the kernels can read."""
    if is_ready(x, 1):
        ready: Array = x
        return ready
    array = float_array(func, name, x)
    if array.ndim == 0:
        raise ValueError(f"{func}(): {name} has shape (); expected (..., features)")
    return readable(array, name, [], "the last axis")


def rows(array: Array) -> Array:
    """`array` (..., n) as (m, n): a view wherever one stride can serve all rows."""
    return array if array.ndim == 2 else array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def like(func: str, name: str, x: Any, shape: tuple[int, ...], dtype: np.dtype[Any], of: str) -> Array | None:
    """`x` as an array of `shape` and `dtype`, which are those of `of`; None stays None."""
    if x is None:
        return None
    result = data(func, name, x)
    if result.dtype != dtype:
        raise TypeError(f"{func}(): {name} has dtype {result.dtype}; expected {of}'s, {dtype}")
    if result.shape != shape:
        raise ValueError(f"{func}(): {name} has shape {result.shape}; expected {of}'s, {shape}")
    return result


def vector(func: str, name: str, x: Any, shape: tuple[int, ...], lane: np.dtype[Any]) -> Array | None:
    """`x`, parameters of exactly `shape`, as `lane`, a lane type; None stays None."""
    if x is None:
        return None
    if is_ready(x, 1) and x.dtype is lane and x.shape == shape and x.flags.c_contiguous:
        ready: Array = x
        return ready
    array = float_array(func, name, x)
    if array.shape != shape:
        raise ValueError(f"{func}(): {name} has shape {array.shape}; expected {shape}")
    return np.require(array, lane, ("C", "ALIGNED"))


def epsilon(func: str, name: str, x: Any, lane: np.dtype[Any]) -> float:
    """`x`, what is added to a mean of squares: finite in a lane type, 0 or more."""
    value = number(func, name, x, lane)
    if value < 0:
        raise ValueError(f"{func}(): {name} is {x}; expected 0 or more")
    return value


def result(
    func: str,
    out: Any,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    inputs: Iterable[tuple[str, Any, Any]],
) -> Array:
    """A new array for the result, of x's dtype, or `out` if it will do."""
    if out is None:
        return np.empty(shape, dtype)
    require_result(func, out, shape, dtype, "x", inputs)
    if out.ndim > 2 and not out.flags.c_contiguous and not np.may_share_memory(rows(out), out):
        raise ValueError(f"{func}(): out has strides {out.strides}; expected rows at one distance")
    array: Array = out
    return array


def linear_args(
    func: str,
    x: Any,
    weight: Any,
    bias: Any,
    activation: Activation | None,
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
    array = data(func, "x", x)
    dtype = array.dtype
    lane = lane_dtype(dtype)
    if (weight.dtype == "float64") != (lane is FLOAT64):
        raise TypeError(
            f"{func}(): x has dtype {dtype}; expected"
            f" {'float64' if weight.dtype == 'float64' else 'float32, float16 or bfloat16'} for a weight in"
            f" {weight.dtype}"
        )
    if array.shape[-1] != weight.in_features:
        raise ValueError(
            f"{func}(): x has shape {array.shape}; expected (..., {weight.in_features}) for this weight"
        )
    if activation is not None:
        choice(func, "activation", activation, ACTIVATIONS)
    n = weight.out_features
    shape = (*array.shape[:-1], n)
    bias_array = vector(func, "bias", bias, (2, n) if weight.gated else (n,), lane)
    residual_array = like(func, "residual", residual, shape, dtype, "the result")
    inputs = [("x", x, array), ("bias", bias, bias_array)]
    if residual is not out:  # in place is allowed: it is read, then written
        inputs.append(("residual", residual, residual_array))
    full = result(func, out, shape, dtype, inputs)
    args = LinearArgs(
        rows(array),
        weight,
        bias_array,
        activation,
        None if residual_array is None else rows(residual_array),
        rows(full),
        get_num_threads() if num_threads is None else threads(func, num_threads),
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
    shape, dtype = array.shape, array.dtype
    residual_array = like(func, "residual", residual, shape, dtype, "x")
    lane, features = lane_dtype(dtype), shape[-1:]
    weight_array = vector(func, "weight", weight, features, lane)
    bias_array = vector(func, "bias", bias, features, lane)
    eps = epsilon(func, "eps", eps, lane)
    inputs = (
        ("x", x, array),
        ("residual", residual, residual_array),
        ("weight", weight, weight_array),
        ("bias", bias, bias_array),
    )
    full = result(func, out, shape, dtype, inputs)
    total = np.empty(shape, dtype) if flag(func, "return_sum", return_sum) else None
    args = RowsArgs(
        func,
        rows(array),
        rows(full),
        get_num_threads() if num_threads is None else threads(func, num_threads),
        None if residual_array is None else rows(residual_array),
        None if total is None else rows(total),
        None,
        weight_array,
        bias_array,
        eps,
    )
    return args, full if total is None else (full, total)


def elementwise_args(
    func: str,
    x: Any,
    activation: Activation | None,
    up: Any,
    out: Any,
    num_threads: int | None,
    backend: str | None,
) -> tuple[RowsArgs, Array]:
    """Check the arguments of `softmax` and `activate`; also returns the result in the caller's shape."""
    if backend is not None:
        require_backend(func, backend)
    array = data(func, "x", x)
    if func == "activate":
        choice(func, "activation", activation, ACTIVATIONS)
    up_array = like(func, "up", up, array.shape, array.dtype, "x")
    full = result(func, out, array.shape, array.dtype, (("x", x, array), ("up", up, up_array)))
    args = RowsArgs(
        func,
        rows(array),
        rows(full),
        get_num_threads() if num_threads is None else threads(func, num_threads),
        up=None if up_array is None else rows(up_array),
        activation=activation,
    )
    return args, full
