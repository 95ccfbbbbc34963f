"""Gradients of linear maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastattn import ops
from fastattn._args.errors import named, wrong_shape, wrong_type
from fastattn._args.grad import Results, needed
from fastattn._args.grad_types import OuterArgs, RowsGradArgs, rounds
from fastattn._args.ops import data, like, rows, vector
from fastattn._args.options import Backend
from fastattn._args.packed import PackedLinear
from fastattn._args.types import ACTIVATIONS, FLOAT64, Activation, Array, ArrayLike, lane_dtype
from fastattn._args.values import choice
from fastattn._engine import dispatch
from fastattn._engine.settings import require_backend, threads

TRAINED = ("float32", "float64", "bfloat16")  # types of weights that have gradients


@named("linear")
def linear(
    dout: ArrayLike,
    x: ArrayLike,
    weight: PackedLinear,
    bias: ArrayLike | None = None,
    *,
    activation: Activation | None = None,
    pre: ArrayLike | None = None,
    need: Sequence[str] = ("dx", "dweight", "dbias"),
    into: Sequence[Array | None] | None = None,
    num_threads: int | None = None,
    backend: Backend | None = None,
) -> tuple[Array, ...]:
    """Gradients of `fastattn.ops.linear`. The gradient of its residual is `dout`.

    Parameters
    ----------
    dout : array_like, (..., out_features)
        Gradient of the result, in x's dtype.
    x, weight, bias, activation
        As in the forward call, which is not checked.
    pre : array_like, (..., out_features) or, gated, (..., 2, out_features), optional
        The array that the forward call filled; recomputed if None and the map has an activation or a gate.
    need : sequence of {"dx", "dweight", "dbias"}
        int8 and block weights are frozen: they have no dweight.
    into, num_threads, backend : optional
        As in `layer_norm`, like errors.

    Returns
    -------
    tuple of ndarray
        In the order of `need`: dx (..., in_features) in x's dtype; dweight (out_features, in_features) and
        dbias (out_features,) in float32, or float64 for float64 x. If gated, dweight is (2, out_features,
        in_features), gate first as in `PackedLinear.unpack`, and dbias (2, out_features).

    Notes
    -----
    ``dx = dpre @ weight``, ``dweight = dpre.T @ x``, ``dbias = sum(dpre)`` with ``dpre = dout *
    activation'(pre)``: ``4 * rows * in_features * out_features`` FLOP, twice that if gated. If x or the
    weight is bfloat16 and the instruction set has a dot product of bfloat16 pairs, dweight is computed from x
    and dpre rounded to bfloat16. For dx of a bfloat16 weight, dpre is rounded on `amx` only.
    """
    if backend is not None:
        require_backend(backend)
    if not isinstance(weight, PackedLinear):
        raise wrong_type("weight", weight, "what ops.pack() returns")
    k, n, maps = weight.in_features, weight.out_features, 1 + weight.gated
    array = data("x", x)
    dtype, lane = array.dtype, lane_dtype(array.dtype)
    if array.shape[-1] != k:
        raise wrong_shape("x", array, f"(..., {k}) for this weight")
    if (weight.dtype == "float64") != (lane is FLOAT64):
        expected = "float64" if weight.dtype == "float64" else "float32, float16 or bfloat16"
        raise TypeError(f"(): x has dtype {dtype}; expected {expected} for a weight in {weight.dtype}")
    leading = array.shape[:-1]
    gradient = like("dout", dout, (*leading, n), dtype, "the result")
    if gradient is None:
        raise wrong_type("dout", dout, "an array")
    inner = (2, n) if weight.gated else (n,)
    before = like("pre", pre, (*leading, *inner), dtype, "the map")
    bias_array = vector("bias", bias, inner, lane)
    if activation is not None:
        choice("activation", activation, ACTIVATIONS)
    names = needed(need, ("dx", "dweight", "dbias"))
    if "dweight" in names and weight.dtype not in TRAINED:
        raise ValueError(
            f"(): need has 'dweight' for a weight in {weight.dtype}; expected one of"
            f" {', '.join(TRAINED)}, or need without it"
        )
    given = {"dout": gradient, "x": array, "pre": before, "bias": bias_array}
    results = Results(names, into, given)
    dx = results.array("dx", array.shape, dtype)
    dweight = results.array("dweight", (*inner, k), lane, "sums of")
    dbias = results.array("dbias", inner, lane, "sums of")
    count = threads(num_threads)
    if activation is not None or weight.gated:
        if before is None:
            before = np.empty((*leading, *inner), dtype)
            ops.linear(array, weight, bias_array, pre=before, num_threads=count, backend=backend)
        gradient = _before_activation(gradient, before, activation, weight.gated, count, backend)
    if dx is not None:
        ops.linear(gradient, weight, transposed=True, out=dx, num_threads=count, backend=backend)
    if dweight is not None or dbias is not None:
        flat = gradient.reshape(*leading, maps * n) if weight.gated else gradient
        out = None if dweight is None else dweight.reshape(maps * n, k)
        sums = None if dbias is None else dbias.reshape(maps * n)
        args = OuterArgs(rows(flat), rows(array), out, sums, count, pairs=rounds(dtype, weight))
        dispatch.run_grad(args, backend)
    return results()


def _before_activation(
    dout: Array, pre: Array, activation: Activation | None, gated: bool, count: int, backend: Any
) -> Array:
    """The gradient of `pre`."""
    result = np.empty(pre.shape, pre.dtype)
    gate, dgate = (pre[..., 0, :], result[..., 0, :]) if gated else (pre, result)
    args = RowsGradArgs("activate", rows(dout), rows(gate), count, rows(dgate), activation=activation)
    if gated:
        args.up, args.dup = rows(pre[..., 1, :]), rows(result[..., 1, :])
    dispatch.run_grad(args, backend)
    return result
