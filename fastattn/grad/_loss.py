"""Cross-entropy and its gradients in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from fastattn import ops
from fastattn._args.errors import named, wrong_dtype, wrong_shape, wrong_type
from fastattn._args.grad import Results, needed
from fastattn._args.grad_types import LogitsArgs, OuterArgs, rounds
from fastattn._args.ops import data, rows, vector
from fastattn._args.options import Backend
from fastattn._args.packed import PackedLinear
from fastattn._args.types import FLOAT64, Array, ArrayLike, Ints, lane_dtype
from fastattn._args.values import as_array, choice, integers, number, real_values, require_broadcast
from fastattn._engine import dispatch
from fastattn._engine.settings import require_backend, threads

_REDUCTIONS = ("mean", "sum", "none")
# Logits that are held at a time: 128 MB in float32. Of a vocabulary of 50,000 these are 640 rows, so that
# reading the weight for each of them takes a hundredth of the time of its products.
_LOGITS = 1 << 25


@named("cross_entropy")
def cross_entropy(
    x: ArrayLike,
    weight: PackedLinear | None,
    targets: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    dloss: ArrayLike = 1.0,
    need: Sequence[str] | None = None,
    into: Sequence[Array | None] | None = None,
    num_threads: int | None = None,
    backend: Backend | None = None,
) -> tuple[float | Array, ...]:
    """The loss ``-log(softmax(x @ weight.T + bias)[target])`` and its gradients, in one pass.

    Logits are computed a block of rows at a time and replaced by their gradient.

    Parameters
    ----------
    x : array_like, (..., in_features) or (..., num_classes)
        Input of the last linear map, or the logits if `weight` is None.
    weight : PackedLinear, (num_classes, in_features), or None
        From `fastattn.ops.pack`, not gated. int8 and block weights are frozen: they have no dweight.
    targets : array_like of int, (...)
        Class of each row, or `ignore_index`.
    bias : array_like, (num_classes,), optional
        Of the linear map.
    ignore_index : int, default -100
        Rows with this target are ignored, whatever they hold: their gradient is 0.
    label_smoothing : float, default 0.0
        Share of each target that is spread evenly over all classes.
    reduction : {"mean", "sum", "none"}
        "mean" divides by the number of rows that are not ignored; without such rows, loss and gradients are
        0.
    dloss : array_like, default 1.0
        Gradient of the loss: a number, or with "none" optionally one per row.
    need : sequence of {"dx", "dweight", "dbias"}, optional
        Default: dx, and dweight and dbias where they exist. ``()`` computes the loss alone.
    into, num_threads, backend : optional
        As in `layer_norm`, like errors.

    Returns
    -------
    loss : float or ndarray
        With "none" (...), float32, or float64 for float64 x; 0 for ignored rows.
    *gradients : ndarray
        In the order of `need`: dx in x's shape and dtype; dweight (num_classes, in_features) and dbias
        (num_classes,) in float32, or float64 for float64 x.

    Notes
    -----
    ``6 * rows * in_features * num_classes`` FLOP. Logits are float32 for 16-bit x, too. For a bfloat16
    weight, their gradients are rounded to bfloat16 for dweight and dx as in `linear`.
    """
    if backend is not None:
        require_backend(backend)
    array = data("x", x)
    lane = lane_dtype(array.dtype)
    classes = array.shape[-1] if weight is None else _classes(weight, array)
    index, counted, smoothing = targets_of(targets, array.shape[:-1], classes, ignore_index, label_smoothing)
    bias_array = vector("bias", bias, (classes,), lane)
    choice("reduction", reduction, _REDUCTIONS)
    factor = _factors(dloss, array.shape[:-1], reduction, lane)
    known = ["dx"]
    if isinstance(weight, PackedLinear) and weight.dtype in ("float32", "float64", "bfloat16"):
        known.append("dweight")
    if bias is not None:
        known.append("dbias")
    names = needed(known if need is None else need, known)
    results = Results(names, into, {"x": array, "bias": bias_array})
    dx = results.array("dx", array.shape, array.dtype)
    dweight = results.array("dweight", (classes, array.shape[-1]), lane, "sums of")
    dbias = results.array("dbias", (classes,), lane, "sums of")
    count = threads(num_threads)
    if reduction == "mean":
        factor = factor / lane.type(max(1, len(counted)))
    whole, losses = len(counted) == len(index), np.zeros(index.shape, lane)
    for result in (None if whole else dx, *((dweight, dbias) if not len(counted) else ())):
        if result is not None:
            result[...] = 0
    flat, flat_dx = rows(array), None if dx is None else rows(dx)
    pairs = isinstance(weight, PackedLinear) and rounds(lane, weight)
    step = max(1, _LOGITS // max(1, classes))
    memory = np.empty((min(step, len(counted)), classes), lane)
    for first in range(0, len(counted), step):
        which: Any = slice(first, first + step) if whole else counted[first : first + step]
        inputs = flat[which]
        if inputs.dtype != lane:  # in C's order, also of rows that are all the same memory
            inputs = inputs.astype(lane, order="C")
        logits = memory[: len(inputs)]
        if isinstance(weight, PackedLinear):
            ops.linear(inputs, weight, bias_array, out=logits, num_threads=count, backend=backend)
        else:
            np.add(inputs, 0 if bias_array is None else bias_array, out=logits)
        loss = np.empty(len(inputs), lane)
        scales = np.ascontiguousarray(factor[which]) if names else None
        dispatch.run_grad(LogitsArgs(logits, index[which], loss, scales, smoothing, count), backend)
        losses[which] = loss
        if flat_dx is not None:
            product, out = logits, None
            if isinstance(weight, PackedLinear):
                out = flat_dx[which] if whole and flat_dx.dtype == lane else None
                product = ops.linear(
                    logits, weight, transposed=True, out=out, num_threads=count, backend=backend
                )
            if out is None:
                with np.errstate(over="ignore"):  # what is too large for float16 is infinite, as in kernels
                    flat_dx[which] = product
        if dweight is not None or dbias is not None:
            more = first > 0
            dispatch.run_grad(OuterArgs(logits, inputs, dweight, dbias, count, more, pairs), backend)
    if reduction == "none":
        return losses.reshape(array.shape[:-1]), *results()
    total = float(losses.sum(dtype=np.float64))
    return (total / max(1, len(counted)) if reduction == "mean" else total), *results()


def _classes(weight: Any, x: Array) -> int:
    """Number of classes of a checked weight."""
    if not isinstance(weight, PackedLinear):
        raise wrong_type("weight", weight, "what ops.pack() returns, or None")
    if weight.gated:
        raise ValueError("(): weight is a gated pair; expected one map")
    if x.shape[-1] != weight.in_features:
        raise wrong_shape("x", x, f"(..., {weight.in_features}) for this weight")
    if (weight.dtype == "float64") != (x.dtype == FLOAT64):
        expected = "float64" if weight.dtype == "float64" else "float32, float16 or bfloat16"
        raise wrong_dtype("x", x, f"{expected} for a weight in {weight.dtype}")
    return weight.out_features


def targets_of(
    targets: Any,
    shape: tuple[int, ...],
    classes: int,
    ignore_index: Any,
    label_smoothing: Any,
) -> tuple[Ints, Ints, float]:
    """Checked targets (rows,), indices of rows that are not ignored, and the smoothing."""
    smoothing = number("label_smoothing", label_smoothing, FLOAT64)
    if not 0 <= smoothing <= 1:
        raise ValueError(f"(): label_smoothing is {label_smoothing}; expected 0 to 1")
    ignored = int(integers("ignore_index", ignore_index, (), "one number"))
    given = as_array("targets", targets)
    index = integers("targets", given if given.size else np.zeros(given.shape, np.int64))
    if index.shape != shape:
        raise wrong_shape("targets", index, f"{shape}, as x without its last axis")
    index = index.ravel()
    counted = np.flatnonzero(index != ignored)
    used = index[counted]
    if used.size and not ((least := used.min()) >= 0 and (most := used.max()) < classes):
        bad = least if least < 0 else most
        raise ValueError(
            f"(): targets has {bad}; expected 0 to {classes - 1}, or {ignored}, which is ignored"
        )
    return index, counted, smoothing


def _factors(dloss: Any, shape: tuple[int, ...], reduction: str, lane: np.dtype[Any]) -> Array:
    """`dloss` of each row."""
    array = real_values("dloss", dloss, lane, [])
    require_broadcast("dloss", array.shape, shape if reduction == "none" else (), "the loss")
    return np.broadcast_to(array, shape).ravel()
