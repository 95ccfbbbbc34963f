"""Gradients of embeddings and rotary positions; dropout."""

from __future__ import annotations

import numpy as np

from fastattn._args.errors import named, wrong_shape
from fastattn._args.grad import dropout_args
from fastattn._args.grad_types import ScatterArgs
from fastattn._args.ops import data, rows
from fastattn._args.results import result_array
from fastattn._args.types import Array, ArrayLike, lane_dtype
from fastattn._args.values import MOST_SIZE, as_array, float_array, integer, integers
from fastattn._engine import dispatch
from fastattn._engine.settings import threads
from fastattn.positions._rotary import rotated


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
    args, result = dropout_args(x, "x", rate, seed, stream, out, num_threads)
    dispatch.run_grad(args)
    return result
