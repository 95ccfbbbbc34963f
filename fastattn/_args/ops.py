"""The arguments of the layers' kernels, checked and normalised: `ops.py`'s only place that raises."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from fastattn._args.errors import put_name, wrong_dtype, wrong_shape, wrong_type
from fastattn._args.packed import LinearArgs, PackedLinear
from fastattn._args.results import result_array
from fastattn._args.types import (
    ACTIVATIONS,
    FLOAT64,
    ROUNDINGS,
    Activation,
    Array,
    Ints,
    Rounding,
    RowsArgs,
    Shape,
    lane_dtype,
)
from fastattn._args.values import (
    as_array,
    choice,
    converted,
    flag,
    float_array,
    integers,
    is_ready,
    number,
    readable,
)
from fastattn._args.weight_types import INTEGERS
from fastattn._engine.settings import require_backend, threads


def data(name: str, x: Any) -> Array:
    """`x` as a floating array of at least one dimension that the kernels can read."""
    if is_ready(x, 1):
        return x
    array = float_array(name, x, hint=converted(name, x, "float32"))
    if array.ndim == 0:
        raise wrong_shape(name, array, "(..., features)")
    return readable(array, name, [], "the last axis")


def rows(array: Array) -> Array:
    """`array` (..., n) as (m, n): a view wherever one stride can serve all rows."""
    return array if array.ndim == 2 else array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def like(name: str, x: Any, shape: Shape, dtype: np.dtype[Any], of: str = "") -> Array | None:
    """`x` as an array of `shape` and `dtype`, which may be those of an argument `of`; None stays None."""
    if x is None:
        return None
    result = data(name, x)
    whose = f"{of}'s, " if of else ""
    if result.dtype != dtype:
        raise wrong_dtype(name, result, f"{whose}{dtype}")
    if result.shape != shape:
        raise wrong_shape(name, result, f"{whose}{shape}")
    return result


def cotangent(dout: Any, others: Collection[str], shape: Shape, dtype: np.dtype[Any]) -> Array:
    """`dout` of a layer's or a model's pullback, which takes no `others`."""
    if others:
        expected = "dout alone: all gradients are returned"
        raise TypeError(f"(): {min(others)} is not an argument; expected {expected}")
    array = like("dout", dout, shape, dtype, "the result")
    if array is None:
        raise TypeError("(): dout is None; expected an array")
    return array


def vector(name: str, x: Any, shape: Shape, lane: np.dtype[Any]) -> Array | None:
    """`x`, parameters of exactly `shape`, as `lane`, a lane type; None stays None."""
    if x is None:
        return None
    if is_ready(x, 1) and x.dtype is lane and x.shape == shape and x.flags.c_contiguous:
        return x
    array = float_array(name, x)
    if array.shape != shape:
        raise wrong_shape(name, array, shape)
    return np.require(array, lane, ("C", "ALIGNED"))


def epsilon(name: str, x: Any, lane: np.dtype[Any]) -> float:
    """`x`, what is added to a mean of squares: finite in a lane type, 0 or more."""
    value = number(name, x, lane)
    if value < 0:
        raise ValueError(f"(): {name} is {x}; expected 0 or more")
    return value


def result(
    out: Any,
    shape: Shape,
    dtype: np.dtype[Any],
    inputs: Iterable[tuple[str, Any, Any]],
    of: str = "x",
    called: str = "out",
) -> Array:
    """A new array for the result, of the dtype of the argument `of`, or `out` if it will do."""
    array = result_array(out, shape, dtype, of, inputs, called)
    if array.ndim > 2 and not array.flags.c_contiguous and not np.may_share_memory(rows(array), array):
        raise ValueError(f"(): {called} has strides {array.strides}; expected rows at one distance")
    return array


def group_args(weights: Any, counts: Any) -> tuple[PackedLinear, Ints]:
    """Check the groups of `ops.grouped_linear`; return the first weight and the rows of each group."""
    if not isinstance(weights, (list, tuple)):
        raise wrong_type("weights", weights, "a list of what pack() returns")
    if not weights:
        raise ValueError("(): weights is empty; expected at least one")
    first = weights[0]
    for i, weight in enumerate(weights):
        if not isinstance(weight, PackedLinear):
            raise wrong_type(f"weights[{i}]", weight, "what pack() returns")
        found, wanted = ((w.in_features, w.out_features, w.gated, w.dtype) for w in (weight, first))
        if found != wanted:
            raise ValueError(
                f"(): weights[{i}] has (in_features, out_features, gated, dtype) {found}; expected {wanted}"
            )
    given = as_array("counts", counts)
    rows = integers("counts", given if given.size else given.astype(np.int64))
    if rows.shape != (len(weights),):
        raise wrong_shape("counts", rows, f"({len(weights)},), the rows of each weight")
    if rows.min() < 0:
        raise ValueError(f"(): counts has {rows.min()}; expected 0 or more rows")
    return first, rows


def linear_args(
    x: Any,
    weight: Any,
    bias: Any,
    activation: Activation | None,
    residual: Any,
    activations: Rounding | None,
    transposed: bool,
    out: Any,
    num_threads: int | None,
    backend: str | None,
    pre: Any = None,
) -> tuple[LinearArgs, Array]:
    """Check the arguments of `ops.linear`; also returns the result in the caller's shape."""
    if backend is not None:
        require_backend(backend)
    if not isinstance(weight, PackedLinear):
        raise wrong_type("weight", weight, "what pack() returns")
    array = data("x", x)
    dtype = array.dtype
    lane = lane_dtype(dtype)
    if (weight.dtype == "float64") != (lane is FLOAT64):
        hint = converted("x", x, "float32" if lane is FLOAT64 else "float64")
        expected = "float32, float16 or bfloat16" if lane is FLOAT64 else "float64"
        raise wrong_dtype("x", array, f"{expected} for a weight in {weight.dtype}{hint}")
    k, n, gated = weight.in_features, weight.out_features, weight.gated
    width: Shape = (k,)
    if flag("transposed", transposed):
        width, n, gated = (2, n) if gated else (n,), k, False
        if activations is not None:
            raise ValueError(f"(): activations is {activations!r}; expected None for a transposed product")
    if array.shape[array.ndim - len(width) :] != width:
        expected = ", ".join(("...", *map(str, width)))
        raise wrong_shape("x", array, f"({expected}) for this weight")
    if activation is not None:
        choice("activation", activation, ACTIVATIONS)
    integer_activations(activations, weight.dtype, weight.in_features)
    leading = array.shape[: array.ndim - len(width)]
    shape = (*leading, n)
    bias_array = vector("bias", bias, (2, n) if gated else (n,), lane)
    residual_array = like("residual", residual, shape, dtype, "the result")
    inputs = [("x", x, array), ("bias", bias, bias_array)]
    if residual is not out:  # in place is allowed: it is read, then written
        inputs.append(("residual", residual, residual_array))
    full = result(out, shape, dtype, inputs)
    if pre is not None:
        shape = (*leading, 2, n) if gated else shape
        pre = result_array(pre, shape, dtype, "x", [*inputs, ("out", full, full)], "pre")
        if not pre.flags.c_contiguous:
            raise ValueError(f"(): pre has strides {pre.strides}; expected a C-contiguous array")
        pre = pre.reshape(math.prod(leading), math.prod(shape[len(leading) :]))
    if len(width) > 1:  # where a map has one feature, those of both may lie apart
        array = readable(array.reshape(*leading, math.prod(width)), "x", [], "the last axis")
    args = LinearArgs(
        rows(array),
        weight,
        bias_array,
        activation,
        None if residual_array is None else rows(residual_array),
        rows(full),
        threads(num_threads),
        activations,
        transposed,
        pre,
    )
    return args, full


# Products whose sum surely fits 32 bits: x is at least -127, a weight of someone else's panels -128. The sum
# of so many elements of x alone is below 2**24, so that float32 holds it: src/linear_input.inc.h.
_MOST_BYTES = (2**31 - 1) // (127 * 128)


def integer_activations(activations: Any, weights_dtype: str, in_features: int = 0) -> None:
    """Raise unless products with weights in `weights_dtype` can round their inputs to `activations`."""
    if activations is None:
        return
    choice("activations", activations, ROUNDINGS)
    if weights_dtype not in INTEGERS:
        expected = f"weights in {', '.join(INTEGERS)}, or activations None"
        came = f"activations is {activations!r} for weights in {weights_dtype}"
        raise ValueError(f"(): {came}; expected {expected}")
    if weights_dtype == "int8" and in_features > _MOST_BYTES:
        raise ValueError(
            f"(): the weight has {in_features} input features; expected at most {_MOST_BYTES} for"
            " weights and activations in int8, whose sums have 32 bits"
        )


def rows_args(
    kernel: str,
    x: Any,
    out: Any,
    num_threads: int | None,
    backend: str | None,
    weight: Any = None,
    bias: Any = None,
    eps: float = 0.0,
    residual: Any = None,
    return_sum: bool = False,
    up: Any = None,
    activation: Activation | None = None,
    gate_first: bool = False,
) -> tuple[RowsArgs, Array, Array | None]:
    """Check the arguments of the norms, `softmax` and `activate`; also returns the results in x's shape.

    `up` is what `activate` calls so, or the gate of a norm.
    """
    try:
        if backend is not None:
            require_backend(backend)
        array = data("x", x)
        shape, dtype, lane = array.shape, array.dtype, lane_dtype(array.dtype)
        if kernel == "activate" or activation is not None or up is not None:
            choice("activation", activation, ACTIVATIONS)
        called = "gate" if kernel == "rms_norm" else "up"
        if kernel == "rms_norm":
            require_gate_alone(up, flag("gate_first", gate_first), residual=residual, return_sum=return_sum)
        residual_array = None if residual is None else like("residual", residual, shape, dtype, "x")
        up_array = None if up is None else like(called, up, shape, dtype, "x")
        weight_array = vector("weight", weight, shape[-1:], lane)
        bias_array = vector("bias", bias, shape[-1:], lane)
        if kernel in ("layer_norm", "rms_norm"):
            eps = epsilon("eps", eps, lane)
        inputs = [("x", x, array), ("residual", residual, residual_array), (called, up, up_array)]
        inputs += [("weight", weight, weight_array), ("bias", bias, bias_array)]
        full = result(out, shape, dtype, inputs)
        total = np.empty(shape, dtype) if flag("return_sum", return_sum) else None
        args = RowsArgs(
            kernel,
            rows(array),
            rows(full),
            threads(num_threads),
            None if residual_array is None else rows(residual_array),
            None if total is None else rows(total),
            None if up_array is None else rows(up_array),
            weight_array,
            bias_array,
            eps,
            activation,
            gate_first,
        )
        return args, full, total
    except Exception as error:
        put_name(kernel, error)
        raise


def require_gate_alone(gate: Any, gate_first: bool, **others: Any) -> None:
    """Raise where a norm's gate meets one of `others`, or `gate_first` no gate."""
    if gate is None:
        if gate_first:
            raise ValueError("(): gate_first is True, but gate is None; expected an array gate")
        return
    for name, given in others.items():
        if given is not None and given is not False:
            raise ValueError(f"(): {name} is given; expected none with a gate")
