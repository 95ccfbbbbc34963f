"""Operations between attention calls: linear maps, norms, activations, softmax, convolutions, embeddings.

Each is one multi-threaded compiled kernel with a NumPy twin. All take float32, float64, float16 and bfloat16,
compute in float32 (float64 for float64), return x's dtype, and accept any leading dimensions. An input is
copied if its last axis is not contiguous, or if no single stride reaches all of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict, overload

import numpy as np

from fastattn._args.blocks import blocks, copied
from fastattn._args.channels import conv_args, next_inputs
from fastattn._args.errors import named, put_name, wrong_shape
from fastattn._args.names import show_public
from fastattn._args.ops import group_args, linear_args, rows_args
from fastattn._args.options import Backend, ComputeOptions, OutOption
from fastattn._args.pack import pack_args
from fastattn._args.packed import PackedLinear
from fastattn._args.recurrent_types import ConvArgs, each_sequence
from fastattn._args.results import result_array
from fastattn._args.types import Activation, Array, ArrayLike, DTypeLike, Rounding, Unpack
from fastattn._args.values import as_array, flag, float_array, integers
from fastattn._engine import dispatch

__all__ = [
    "PackedLinear",
    "activate",
    "causal_conv1d",
    "embedding",
    "grouped_linear",
    "layer_norm",
    "linear",
    "pack",
    "rms_norm",
    "softmax",
]
show_public(__name__)


class _NormOptions(OutOption, ComputeOptions, total=False):
    """Keyword arguments of the norms, except `return_sum`, by which they return a pair."""

    eps: float
    residual: ArrayLike | None


class _GateOptions(TypedDict, total=False):
    gate: ArrayLike | None
    activation: Activation
    gate_first: bool


class _Norm(_NormOptions, total=False):
    return_sum: Literal[False]


class _NormSum(_NormOptions):
    return_sum: Literal[True]


class _GatedNorm(_Norm, _GateOptions): ...


class _GatedNormSum(_NormSum, _GateOptions): ...


class _ConvOptions(OutOption, ComputeOptions, total=False):
    """Keyword arguments of `causal_conv1d`, except `return_state` and `out_state`."""

    activation: Activation | None
    state: ArrayLike | None
    begins: ArrayLike | None


class _Conv(_ConvOptions, total=False):
    return_state: Literal[False]
    out_state: None


class _ConvState(_ConvOptions, total=False):
    return_state: bool
    out_state: Array | None


@named("pack")
def pack(
    weight: ArrayLike,
    *,
    gate: ArrayLike | None = None,
    dtype: DTypeLike | None = None,
    num_threads: int | None = None,
    backend: Backend | None = None,
) -> PackedLinear:
    """Pack the weight of a linear map for `linear`, once, in O(weight) time and memory.

    Parameters
    ----------
    weight : array_like, (out_features, in_features)
        As torch's ``Linear.weight``: float32, float64, float16 or bfloat16.
    gate : array_like, (out_features, in_features), optional
        Makes a gated pair: `linear` computes ``activation(x @ gate.T) * (x @ weight.T)`` in one pass.
    dtype : {"float32", "float64", "bfloat16", "int8", "q8", "int4", "uint4", "nf4", "iq4", "fp4"}, optional
        Storage type, by name or as a NumPy type; default the weight's dtype (float32 for float16). bfloat16
        rounds to nearest even. int8 is symmetric, with one scale per output feature, ``max(abs(row)) / 127``.
        The others have a float16 scale per block of 32 input features:

        - q8: int8 (GGUF's Q8_0).
        - int4: -8 to 7 (Q4_0); the element of largest magnitude becomes -8. Elements err by half a
          scale, at the opposite end by a whole one.
        - uint4: 0 to 15 (Q4_1), after subtracting a float16 minimum; the scale is a fifteenth of the
          range.
        - nf4: the nearest of sixteen quantiles of the normal distribution (Dettmers et al. 2023), scaled
          by the largest magnitude. Elements err by up to 0.152 scales.
        - iq4, fp4: the nearest number of IQ4_NL and of MXFP4; the element of largest magnitude becomes
          -127 and -12.

        Where the scale is too small for the precision of float16, its rounding adds an error of up to
        ``2**-25`` times the largest code: ``2**-22`` in int4, ``2**-18`` in q8.
    num_threads, backend
        As in `linear`.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, or has values that are not finite in `dtype`.
    """
    args = pack_args(weight, gate, dtype, num_threads, backend)
    dispatch.run(args, backend)
    return args.packed()


def linear(
    x: ArrayLike,
    weight: PackedLinear,
    bias: ArrayLike | None = None,
    *,
    activation: Activation | None = None,
    residual: ArrayLike | None = None,
    activations: Rounding | None = None,
    transposed: bool = False,
    pre: Array | None = None,
    out: Array | None = None,
    num_threads: int | None = None,
    backend: Backend | None = None,
) -> Array:
    """``activation(x @ weight.T + bias) + residual`` in one pass over the result.

    With a gated weight: ``activation(x @ gate.T + bias[0]) * (x @ weight.T + bias[1]) + residual``, which is
    GLU with "sigmoid" (Dauphin et al. 2017), and ReGLU, GEGLU, SwiGLU with "relu", "gelu", "silu" (Shazeer
    2020).

    Parameters
    ----------
    x : array_like, (..., in_features)
        float32, float16 or bfloat16; float64 for a float64 weight.
    weight : PackedLinear
        From `pack`. With a bfloat16 weight, x is rounded to bfloat16 if the CPU has a dot product of bfloat16
        pairs; otherwise the weight is widened. int8 and block weights are widened to float32 unless
        `activations` is given.
    bias : array_like, (out_features,) or, gated, (2, out_features), optional
    activation : str, optional
        A name that `activate` takes, for instance "relu".
    residual : array_like, (..., out_features), optional
        Added last; in x's dtype. May be `out`.
    activations : {"int8"}, optional
        Round each row of x to int8 and multiply integers, for int8 and block weights: several times as fast
        for many rows. Each row has 255 levels from its smallest to its largest element, with the step
        ``(max(row) - min(row)) / 254``, so elements err by at most half a step: one large element makes its
        row coarse. Rows of one or two distinct values are exact. NF4's numbers are rounded to multiples of 1
        / 127, too. A row with NaN or infinity gives NaN.
    transposed : bool, default False
        Compute ``x @ weight`` instead of ``x @ weight.T``, from the same panels: the gradient of a linear
        map's input. x is (..., out_features); bias, residual and result have in_features. With a gated
        weight, x is (..., 2, out_features) and the product ``x[..., 0, :] @ gate + x[..., 1, :] @ weight``.
        The weight is widened exactly and x is not rounded, except on AMX, whose tiles multiply bfloat16
        weights by x rounded to bfloat16. Many rows take about as long as in float32. Few rows wait for the
        weight to be turned: one row takes 1.5 times as long as a plain float32 product, and 3 to 5 times as
        long in narrower types; `pack` the transpose, too, if single rows are frequent.
    pre : ndarray, (..., out_features) or, gated, (..., 2, out_features), optional
        C-contiguous array in x's dtype for the input of the activation (gated: first of the gate, then of the
        other map), which `fastattn.grad.linear` reads.
    out : ndarray, (..., out_features), optional
        Array for the result: in x's dtype, with a contiguous last axis and equally spaced rows.
    num_threads, backend : optional
        As in `fastattn.attention`.

    Returns
    -------
    out : ndarray, (..., out_features)
        In x's dtype.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    ``2 * rows * in_features * out_features`` FLOP, twice that if gated. The bits of a row do not depend on
    other rows. One accumulator sums at most 256 products, or 256 dot products of bfloat16 pairs, or, of
    blocks by int8, the exact sums of 64 blocks.

    Rounding the weights w changes an element of the product by at most ``sum(abs(x) * e)`` over its k, where
    e is the error of each weight stated by `pack`; in int8, ``dw / 2`` with a scale dw. Int8 `activations`
    add ``sum((abs(w) + e) * dx / 2)`` with the row's step dx, at least ``2**-100 / 127``. In int8 both are
    ``sum(abs(x) * dw / 2 + abs(w) * dx / 2 + dx * dw / 4)``. NF4's e then grows by ``dw / 254``. To this add
    the rounding of float32, as in every product. Sums of int8 by int8 are exact integers; the middle of the
    row's range, multiplied by the sum of the weights, is added: both parts round like products of
    ``max(abs(row))``, and overflow like them.

    Before bfloat16 results are rounded, "gelu" without a gate errs by at most 2.5e-5, which for arguments
    below -2.8 exceeds the rounding. Other activations err by 5e-6 relative to their value. Denormal bfloat16
    results may be 0 in products of int8 by int8 and of bfloat16 pairs.
    """
    try:
        args, result = linear_args(
            x, weight, bias, activation, residual, activations, transposed, out, num_threads, backend, pre
        )
    except Exception as error:
        put_name("linear", error)
        raise
    dispatch.run(args, backend)
    return result


def grouped_linear(
    x: ArrayLike,
    weights: Sequence[PackedLinear],
    counts: ArrayLike,
    *,
    activation: Activation | None = None,
    activations: Rounding | None = None,
    out: Array | None = None,
    num_threads: int | None = None,
    backend: Backend | None = None,
) -> Array:
    """`linear` for groups of rows with different weights: the experts of a mixture.

    Parameters
    ----------
    x : array_like, (rows, in_features)
        The rows of the first group, then of the second, and so on.
    weights : sequence of PackedLinear
        One per group: of the same features and dtype, gated or not. Weights without rows are not read.
    counts : array_like of int, (groups,)
        Number of rows of each group.
    activation, activations, out, num_threads, backend : optional
        As in `linear`.

    Returns
    -------
    out : ndarray, (rows, out_features)
        In x's dtype, with the bits of `linear`.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.
    """
    try:
        first, total = group_args(weights, counts)
        args, result = linear_args(
            x, first, None, activation, None, activations, False, out, num_threads, backend
        )
        if args.x.shape != (total.sum(), first.in_features) or result.ndim != 2:
            raise wrong_shape("x", np.asarray(x), f"({total.sum()}, {first.in_features}): counts' rows")
    except Exception as error:
        put_name("grouped_linear", error)
        raise
    dispatch.run_groups(args, weights, total, backend)
    return result


@overload
def layer_norm(
    x: ArrayLike, weight: ArrayLike | None = None, bias: ArrayLike | None = None, **options: Unpack[_Norm]
) -> Array: ...
@overload
def layer_norm(
    x: ArrayLike, weight: ArrayLike | None = None, bias: ArrayLike | None = None, **options: Unpack[_NormSum]
) -> tuple[Array, Array]: ...
def layer_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    eps: float = 1e-5,
    residual: ArrayLike | None = None,
    return_sum: bool = False,
    out: Array | None = None,
    num_threads: int | None = None,
    backend: Backend | None = None,
) -> Any:
    """``(z - mean(z)) / sqrt(var(z) + eps) * weight + bias`` with ``z = x + residual`` (Ba et al. 2016).

    Parameters
    ----------
    x : array_like, (..., features)
    weight, bias : array_like, (features,), optional
    eps : float, default 1e-5
    residual : array_like, (..., features), optional
        Added to x first, in x's shape and dtype.
    return_sum : bool, default False
        Return ``(out, x + residual)``.
    out : ndarray, (..., features), optional
        Array for the result, in x's dtype, without memory of an input.
    num_threads, backend : optional
        As in `linear`.

    Returns
    -------
    out : ndarray, (..., features)
        In x's dtype.
    sum : ndarray, (..., features)
        Only with `return_sum`.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.
    """
    args, result, total = rows_args(
        "layer_norm", x, out, num_threads, backend, weight, bias, eps, residual, return_sum
    )
    dispatch.run(args, backend)
    return result if total is None else (result, total)


@overload
def rms_norm(x: ArrayLike, weight: ArrayLike | None = None, **options: Unpack[_GatedNorm]) -> Array: ...
@overload
def rms_norm(
    x: ArrayLike, weight: ArrayLike | None = None, **options: Unpack[_GatedNormSum]
) -> tuple[Array, Array]: ...
def rms_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    eps: float = 1e-6,
    gate: ArrayLike | None = None,
    activation: Activation = "silu",
    gate_first: bool = False,
    residual: ArrayLike | None = None,
    return_sum: bool = False,
    out: Array | None = None,
    num_threads: int | None = None,
    backend: Backend | None = None,
) -> Any:
    """``z / sqrt(mean(z**2) + eps) * weight`` with ``z = x + residual`` (Zhang & Sennrich 2019).

    Parameters
    ----------
    x, weight, eps, residual, return_sum, out, num_threads, backend
        As in `layer_norm`, like results and errors.
    gate : array_like, (..., features), optional
        Multiply the result by ``activation(gate)`` in the same pass; in x's shape and dtype. Not with
        `residual` or `return_sum`.
    activation : str, default "silu"
        As in `activate`: "silu" in Qwen3-Next, "sigmoid" in Kimi Linear.
    gate_first : bool, default False
        Normalize ``x * activation(gate)`` instead, as in Mamba-2.
    """
    args, result, total = rows_args(
        "rms_norm", x, out, num_threads, backend, weight, None, eps, residual, return_sum, gate, activation,
        gate_first,
    )  # fmt: skip
    dispatch.run(args, backend)
    return result if total is None else (result, total)


def softmax(
    x: ArrayLike,
    *,
    out: Array | None = None,
    num_threads: int | None = None,
    backend: Backend | None = None,
) -> Array:
    """Softmax over the last axis of x (..., n).

    A row of -inf gives 0; NaN makes its whole row NaN. Parameters, results and errors as in `layer_norm`.
    """
    args, result, _ = rows_args("softmax", x, out, num_threads, backend)
    dispatch.run(args, backend)
    return result


def activate(
    x: ArrayLike,
    activation: Activation,
    *,
    up: ArrayLike | None = None,
    out: Array | None = None,
    num_threads: int | None = None,
    backend: Backend | None = None,
) -> Array:
    """``activation(x)``, or ``activation(x) * up`` for gated forms that are not fused into `linear`.

    Parameters
    ----------
    x : array_like, (..., n)
    activation : str
        "relu", "gelu" (exact, by the error function), "gelu_tanh" or "quick_gelu" (its approximations,
        Hendrycks & Gimpel 2016), "silu" or "sigmoid".
    up : array_like, (..., n), optional
        In x's shape and dtype.
    out, num_threads, backend : optional
        As in `layer_norm`, like results and errors.
    """
    args, result, _ = rows_args("activate", x, out, num_threads, backend, up=up, activation=activation)
    dispatch.run(args, backend)
    return result


@overload
def causal_conv1d(
    x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, **options: Unpack[_Conv]
) -> Array: ...
@overload
def causal_conv1d(
    x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, **options: Unpack[_ConvState]
) -> tuple[Array, Array]: ...
@named("causal_conv1d")
def causal_conv1d(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation | None = None,
    state: ArrayLike | None = None,
    begins: ArrayLike | None = None,
    return_state: bool = False,
    out_state: Array | None = None,
    out: Array | None = None,
    num_threads: int | None = None,
    backend: Backend | None = None,
) -> Any:
    """Causal depthwise convolution: ``activation(bias + sum of weight[:, w] * x[t - width + 1 + w])``.

    The short convolution of hybrid models (Mamba, gated DeltaNet, Kimi Linear, LFM2). Its state is the last
    ``width - 1`` inputs.

    Parameters
    ----------
    x : array_like, (..., length, channels) or, with `begins`, (tokens, channels)
        float32, float64, float16 or bfloat16.
    weight : array_like, (channels, width)
        Width 1 to 8, the last column for the token itself; as torch's ``Conv1d.weight[:, 0]``.
    bias : array_like, (channels,), optional
    activation : str, optional
        A name that `activate` takes; mostly "silu".
    state : array_like, (..., width - 1, channels), optional
        The inputs before the first token, in x's dtype; default 0. With `begins`, (sequences, width - 1,
        channels).
    begins, return_state, out_state
        As in `fastattn.functional.linear_attention`.
    out : ndarray, optional
        Array for the result, in x's shape and dtype, without memory of an input.
    num_threads, backend : optional
        As in `linear`.

    Returns
    -------
    out : ndarray
        In x's shape and dtype.
    state : ndarray, of the shape of `state`
        Only with `return_state` or `out_state`: the last inputs of each sequence.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    ``2 * width`` FLOP per element, summed in one accumulator. Bound by memory bandwidth; x is read once.
    Neither other sequences nor splitting a sequence change a bit. NaN and infinities stay in their channel
    and reach no earlier tokens.

    Examples
    --------
    >>> import numpy as np
    >>> from fastattn import ops
    >>> x, weight = np.ones((2, 5, 3), np.float32), np.full((3, 4), 0.25, np.float32)
    >>> first, state = ops.causal_conv1d(x[:, :3], weight, return_state=True)
    >>> rest = ops.causal_conv1d(x[:, 3:], weight, state=state)
    >>> rest[0, :, 0]
    array([1., 1.], dtype=float32)
    """
    args = conv_args(x, weight, bias, activation, state, begins, out, num_threads, backend)
    with_state = flag("return_state", return_state) or out_state is not None
    after = next_inputs(args, out_state, state) if with_state else None
    dispatch.run(args, backend)
    if after is None:
        return args.out
    _keep_inputs(args, after)
    return args.out, after


def _keep_inputs(args: ConvArgs, after: Array) -> None:
    """Write the last inputs of sequences to `after` (..., width - 1, channels), which may be the state."""
    many = after.shape[-2]
    for tokens, s in each_sequence(args):
        x, to = args.x[tokens], after[s]
        new = min(many, x.shape[-2])
        kept = 0 if args.state is None else args.state[s][..., new:, :].copy()
        to[..., : many - new, :] = kept
        to[..., many - new :, :] = x[..., x.shape[-2] - new :, :]


def embedding(ids: ArrayLike, table: ArrayLike, *, out: Array | None = None) -> Array:
    """Rows of `table` (n_rows, features) at the integers `ids` (...): an array (..., features).

    NumPy copies whole rows, bound by memory bandwidth.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, or an id is not in ``[0, n_rows)``.
    """
    try:
        rows = float_array("table", table)
        if rows.ndim != 2:
            raise wrong_shape("table", rows, "(n_rows, features)")
        given = as_array("ids", ids)
        if not given.size:
            given = np.zeros(given.shape, np.int64)  # NumPy makes floats of an empty list
        index = integers("ids", given, low=0, high=len(rows) - 1)
        shape, dtype = (*index.shape, rows.shape[1]), rows.dtype.newbyteorder("=")
        inputs = [("table", table, rows), ("ids", ids, given)]
        out = result_array(out, shape, dtype, "table", inputs)
    except Exception as error:
        put_name("embedding", error)
        raise
    found = out if rows.dtype.isnative else np.empty(shape, rows.dtype)
    for block in blocks(index.shape, rows.shape[1]):
        np.take(rows, index[block], axis=0, out=found[block], mode="clip")  # mode "raise" would copy twice
    return out if found is out else copied(found, out)
