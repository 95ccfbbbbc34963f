"""Gradients of row-wise operations, causal convolutions, embeddings and rotary positions; dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastattn._args.channels import conv_grad_args
from fastattn._args.errors import named, wrong_shape
from fastattn._args.grad import dropout_args, rows_grad_args
from fastattn._args.grad_types import ConvGradArgs, ScatterArgs
from fastattn._args.ops import data, rows
from fastattn._args.options import Backend
from fastattn._args.recurrent_types import each_sequence
from fastattn._args.results import result_array
from fastattn._args.types import Activation, Array, ArrayLike, lane_dtype
from fastattn._args.values import MOST_SIZE, as_array, float_array, integer, integers
from fastattn._engine import dispatch
from fastattn._engine.settings import threads
from fastattn.positions._rotary import rotated


def layer_norm(
    dout: ArrayLike,
    x: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    eps: float = 1e-5,
    residual: ArrayLike | None = None,
    dsum: ArrayLike | None = None,
    need: Sequence[str] = ("dx", "dweight", "dbias"),
    into: Sequence[Array | None] | None = None,
    num_threads: int | None = None,
    backend: Backend | None = None,
) -> tuple[Array, ...]:
    """Gradients of `fastattn.ops.layer_norm`.

    Parameters
    ----------
    dout : array_like, (..., features)
        Gradient of the result, in x's shape and dtype.
    x, weight, eps, residual
        As in the forward call. Mean and variance are recomputed in the same pass.
    dsum : array_like, (..., features), optional
        Gradient of the sum that ``return_sum=True`` returned, or of x where it also bypasses the norm, as in
        a residual connection; added to dx.
    need : sequence of {"dx", "dweight", "dbias"}
        The gradient of `residual` is dx.
    into : sequence of (ndarray or None), optional
        Arrays for the gradients, in the order of `need`, without memory of an input; None makes a new one.
    num_threads, backend : optional
        As in `fastattn.ops.linear`.

    Returns
    -------
    tuple of ndarray
        In the order of `need`: dx (..., features) in x's dtype; dweight and dbias (features,) in float32, or
        float64 for float64 x. Without a weight, dweight is the gradient of a weight of ones.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.
    """
    norm = {"weight": weight, "eps": eps, "residual": residual, "dsum": dsum}
    return _run("layer_norm", dout, x, need, ("dx", "dweight", "dbias"), into, num_threads, backend, **norm)


def rms_norm(
    dout: ArrayLike,
    x: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    eps: float = 1e-6,
    gate: ArrayLike | None = None,
    activation: Activation = "silu",
    gate_first: bool = False,
    residual: ArrayLike | None = None,
    dsum: ArrayLike | None = None,
    need: Sequence[str] = ("dx", "dweight"),
    into: Sequence[Array | None] | None = None,
    num_threads: int | None = None,
    backend: Backend | None = None,
) -> tuple[Array, ...]:
    """Gradients of `fastattn.ops.rms_norm`: "dx", "dweight" and, with a gate, "dgate".

    Parameters, results and errors as in `layer_norm`; `gate`, `activation` and `gate_first` as in the forward
    call. Gated norms take no `dsum`.
    """
    norm = {"weight": weight, "eps": eps, "residual": residual, "dsum": dsum}
    norm |= {"gate": gate, "activation": activation, "gate_first": gate_first}
    return _run("rms_norm", dout, x, need, ("dx", "dweight", "dgate"), into, num_threads, backend, **norm)


def softmax(
    dout: ArrayLike,
    out: ArrayLike,
    *,
    into: Array | None = None,
    num_threads: int | None = None,
    backend: Backend | None = None,
) -> Array:
    """Gradient of `fastattn.ops.softmax`: ``out * (dout - sum(dout * out))`` for each row.

    Parameters
    ----------
    dout : array_like, (..., n)
        Gradient of the result, in `out`'s shape and dtype.
    out : array_like, (..., n)
        Result of the forward call. A row of zeros gives zeros.
    into : ndarray, optional
        Array for the gradient.
    num_threads, backend : optional
        As in `layer_norm`, like errors.
    """
    known = ("dx",)
    return _run("softmax", dout, out, known, known, (into,), num_threads, backend, called="out")[0]


def activate(
    dout: ArrayLike,
    x: ArrayLike,
    activation: Activation,
    *,
    up: ArrayLike | None = None,
    need: Sequence[str] | None = None,
    into: Sequence[Array | None] | None = None,
    num_threads: int | None = None,
    backend: Backend | None = None,
) -> tuple[Array, ...]:
    """Gradients of `fastattn.ops.activate`: ``dout * activation'(x) * up`` and ``dout * activation(x)``.

    Parameters
    ----------
    dout : array_like, (..., n)
        Gradient of the result, in x's shape and dtype.
    x, activation, up
        As in the forward call, which is not checked. The derivative of relu at 0 is 0.
    need : sequence of {"dx", "dup"}, optional
        Default: dx, and dup with `up`.
    into, num_threads, backend : optional
        As in `layer_norm`, like errors.

    Returns
    -------
    tuple of ndarray
        In the order of `need`, each (..., n) in x's dtype.
    """
    if need is None:
        need = ("dx",) if up is None else ("dx", "dup")
    known, more = ("dx", "dup"), {"up": up, "activation": activation}
    return _run("activate", dout, x, need, known, into, num_threads, backend, **more)


def _run(*given: Any, **more: Any) -> tuple[Array, ...]:
    """Check the arguments, of which backend is the last (`more` is specific to the kernel), and compute."""
    args, results = rows_grad_args(*given, **more)
    dispatch.run_grad(args, given[-1])
    return results()


@named("causal_conv1d")
def causal_conv1d(
    dout: ArrayLike,
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation | None = None,
    state: ArrayLike | None = None,
    begins: ArrayLike | None = None,
    dstate_out: ArrayLike | None = None,
    need: Sequence[str] = ("dx", "dweight", "dbias"),
    num_threads: int | None = None,
    backend: Backend | None = None,
) -> tuple[Array, ...]:
    """Gradients of `fastattn.ops.causal_conv1d`.

    Parameters
    ----------
    dout : array_like
        Gradient of the result, in x's shape and dtype.
    x, weight, bias, activation, state, begins
        As in the forward call. The input of the activation is recomputed.
    dstate_out : array_like, `state`'s shape, optional
        Gradient of the state that ``return_state=True`` returned, in x's dtype; default 0.
    need : sequence of {"dx", "dweight", "dbias", "dstate"}
    num_threads, backend : optional
        As in `layer_norm`, like errors.

    Returns
    -------
    tuple of ndarray
        In the order of `need`: dx and dstate in x's dtype; dweight (channels, width) and dbias (channels,) in
        float32, or float64 for float64 x. dstate exists even without a state.
    """
    forward = {
        "x": x, "weight": weight, "bias": bias, "activation": activation, "state": state, "begins": begins,
        "num_threads": num_threads, "backend": backend,
    }  # fmt: skip
    args, after = conv_grad_args(dout, need, dstate_out, forward)
    dispatch.run_grad(args, backend)
    if after is not None:
        _add_kept_inputs(args, after)
    found: dict[str, Any] = {"dx": args.dx, "dstate": args.dstate}
    if args.sums is not None:
        found |= {"dweight": np.ascontiguousarray(args.sums[:-1].T), "dbias": args.sums[-1].copy()}
    return tuple(found[name] for name in need)


def _add_kept_inputs(args: ConvGradArgs, after: Array) -> None:
    """Add the gradient of the last inputs of each sequence, which are the state after it."""
    a, many = args.forward, after.shape[-2]
    for tokens, s in each_sequence(a):
        length = a.x[tokens].shape[-2]
        new = min(many, length)
        if args.dx is not None:
            args.dx[tokens][..., length - new :, :] += after[s][..., many - new :, :]
        if args.dstate is not None:
            args.dstate[s][..., new:, :] += after[s][..., : many - new, :]


@named("embedding")
def embedding(dout: ArrayLike, ids: ArrayLike, num_rows: int, *, add_to: Array | None = None) -> Array:
    """Gradient of the table of `fastattn.ops.embedding`: row i is the sum of `dout` where ``ids == i``.

    Parameters
    ----------
    dout : array_like, (..., features)
        Gradient of the result.
    ids : array_like of int, (...)
        As in the forward call.
    num_rows : int
        Rows of the table.
    add_to : ndarray, (num_rows, features), optional
        Array to add to and return: the gradient of a table that is also the last linear map's weight, or of
        earlier batches. float32, or float64 for float64 `dout`.

    Returns
    -------
    ndarray, (num_rows, features)
        float32, or float64 for float64 `dout`.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    Rows are added in the order of `ids`, so every run gives the same bits.
    """
    array = data("dout", dout)
    num_rows = integer("num_rows", num_rows, 0, MOST_SIZE)
    given = as_array("ids", ids)
    if not given.size:
        given = np.zeros(given.shape, np.int64)  # NumPy makes floats of an empty list
    index = integers("ids", given, low=0, high=num_rows - 1)
    if array.shape[:-1] != index.shape:
        raise wrong_shape("dout", array, f"({', '.join(map(str, index.shape))}, features), as ids")
    lane = lane_dtype(array.dtype)
    shape = num_rows, array.shape[-1]
    if add_to is None:
        table = np.zeros(shape, lane)
    else:
        table = result_array(add_to, shape, lane, "sums of dout", [("dout", dout, array)], "add_to")
    flat = index.ravel()
    order = np.argsort(flat, kind="stable")
    places, firsts = np.unique(flat[order], return_index=True)
    firsts = np.append(firsts, len(flat)).astype(np.int64, copy=False)
    dispatch.run_grad(ScatterArgs(rows(array), order, firsts, places, table, threads(None)))
    return table


@named("rope")
def rope(
    dout: ArrayLike, cos: ArrayLike, sin: ArrayLike, *, interleaved: bool = False, out: Array | None = None
) -> Array:
    """Gradient of `fastattn.positions.apply_rope`: inverse rotation of `dout`.

    Parameters
    ----------
    dout : array_like, (..., heads, length, head_dim)
        Gradient of the result.
    cos, sin, interleaved
        As in the forward call.
    out : ndarray, optional
        Array for the result; may be `dout`.
    """
    table = float_array("sin", sin)
    return rotated("dout", dout, cos, np.negative(table), interleaved, out)


@named("dropout")
def dropout(
    x: ArrayLike,
    rate: float,
    *,
    seed: int,
    stream: int = 0,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Array:
    """Zero each element of x with probability `rate`, and multiply the others by ``1 / (1 - rate)``.

    The gradient is the same function: ``dropout(dout, rate, seed=seed, stream=stream)``. Which elements are
    dropped depends only on `seed`, `stream` and their place, on all instruction sets and in NumPy.

    Parameters
    ----------
    x : array_like, (..., n)
    rate : float
        At least 0 and less than 1.
    seed : int
        64 bits.
    stream : int, default 0
        32 bits: distinguishes uses of one seed, such as the layers of a model.
    out : ndarray, (..., n), optional
        Array for the result, in x's dtype; may be x.
    num_threads : int, optional
        As in `fastattn.ops.linear`.

    Returns
    -------
    ndarray, (..., n)
        In x's dtype.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    Philox4x32-10 (Salmon et al. 2011) with `seed` as its key. The counter for column j of row i (leading axes
    flattened) is ``(i, j // 64 * 16 + j % 16, stream, 0)``. The element is kept if word ``j // 16 % 4`` is at
    least ``int(rate * 2**32)``.
    """
    args, result = dropout_args(x, rate, seed, stream, out, num_threads)
    dispatch.run_grad(args)
    return result
