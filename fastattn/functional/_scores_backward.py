"""The gradients of attention with other normalisers than softmax, or other scores than products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.backward import gradient_names, gradients, like_result
from fastattn._args.options import NoSoftmaxInnerOptions
from fastattn._args.rowwise_backward import rowwise_backward_args
from fastattn._args.types import BackwardArgs
from fastattn._args.variants import (
    additive_args,
    rowwise_args,
    talking_heads_args,
    top_k_args,
    variant_args,
)
from fastattn._engine import dispatch
from fastattn.functional._scores import bias_of_sigmoid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.backward import Gradients
    from fastattn._args.types import RowwiseArgs

_NEED = ("dq", "dk", "dv")


def sparsemax_attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    need: Sequence[str] = _NEED,
    **options: Unpack[NoSoftmaxInnerOptions],
) -> tuple[Any, ...]:
    """Gradients of `sparsemax_attention`, fused: vector-Jacobian products.

    Of the scores, ``ds = dp - mean(dp)`` over the keys with probability, 0 for the others.

    Parameters
    ----------
    dout : array_like, (..., heads_q, len_q, head_dim_v)
        The gradient of a scalar with respect to the result, in q's dtype.
    q, k, v, **options
        As they were given to `sparsemax_attention`, but for `out`.
    need : tuple of str, default ("dq", "dk", "dv")
        Which gradients to compute, and in which order to return them: ``"dq"``, ``"dk"``, ``"dv"``,
        ``"dscale"``, and of the options that are given ``"dbias"``, ``"dbias_diagonals"``,
        ``"dalibi_slopes"``, ``"dsoftcap"``, all as from `attention_backward`.

    Returns
    -------
    tuple
        A gradient for each name in `need`, with the shape and dtype of what it is the gradient of: summed
        over axes that this was broadcast along. Of scale and softcap a float.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit. The message says what came and what was expected; nothing was computed.

    Notes
    -----
    Scores and thresholds are computed again; nothing of the forward pass has to be kept. The products with
    dout, keys, queries and values, ``6 * head_dim + 4 * head_dim_v`` FLOP a query and key, are computed only
    for keys that have a probability for some query of a tile. Memory is that of the forward pass twice,
    O(threads * len_k) for scores; gradients of k and v in 16 bits take arrays in float32 first.

    What stands in keys and values with a probability of 0, NaN and Inf included, never reaches a gradient,
    nor do rows of q and dout reach those of such keys. A query that may attend nothing gives 0. The same
    input gives the same bits for any number of threads. Where scores are at the edge of the support the
    function has a kink, and this is the gradient of one side.
    """
    func = "sparsemax_attention_backward"
    args = rowwise_args(func, "sparsemax", q, k, v, options, NoSoftmaxInnerOptions)
    return _gradients(func, args, dout, {"q": q, "k": k, "v": v}, need, options)


def entmax15_attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    need: Sequence[str] = _NEED,
    **options: Unpack[NoSoftmaxInnerOptions],
) -> tuple[Any, ...]:
    """Gradients of `entmax15_attention`: ``ds = w * (dp - sum(w * dp) / sum(w))`` with ``w = sqrt(p)``.

    Parameters
    ----------
    dout, q, k, v, need, **options
        As in `sparsemax_attention_backward`, like the results, the errors and the costs.

    Returns
    -------
    tuple
        A gradient for each name in `need`.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.
    """
    func = "entmax15_attention_backward"
    args = rowwise_args(func, "entmax15", q, k, v, options, NoSoftmaxInnerOptions)
    return _gradients(func, args, dout, {"q": q, "k": k, "v": v}, need, options)


def top_k_attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    top_k: int,
    need: Sequence[str] = _NEED,
    **options: Unpack[NoSoftmaxInnerOptions],
) -> tuple[Any, ...]:
    """Gradients of `top_k_attention`: those of softmax over the keys that are selected, which are held fixed.

    Parameters
    ----------
    dout, q, k, v, need, **options
        As in `sparsemax_attention_backward`, like the results, the errors and the costs.
    top_k : int
        As it was given to `top_k_attention`.

    Returns
    -------
    tuple
        A gradient for each name in `need`.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.
    """
    func = "top_k_attention_backward"
    args = top_k_args(func, q, k, v, top_k, options, NoSoftmaxInnerOptions)
    return _gradients(func, args, dout, {"q": q, "k": k, "v": v}, need, options)


def additive_attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    weight: ArrayLike,
    *,
    need: Sequence[str] = (*_NEED, "dweight"),
    **options: Unpack[NoSoftmaxInnerOptions],
) -> tuple[Any, ...]:
    """Gradients of `additive_attention`, Bahdanau's attention.

    Parameters
    ----------
    dout : array_like, (..., heads_q, len_q, head_dim_v)
        The gradient of a scalar with respect to the result, in q's dtype.
    q, k, v, weight, **options
        As they were given to `additive_attention`, but for `out`.
    need : tuple of str, default ("dq", "dk", "dv", "dweight")
        As in `sparsemax_attention_backward`, with ``"dweight"``, and without ``"dscale"``.

    Returns
    -------
    tuple
        A gradient for each name in `need`, with the shape and dtype of what it is the gradient of.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    len_q * len_k * head_dim hyperbolic tangents a head, computed twice and not stored. Memory is
    O(threads * len_k * head_dim).
    """
    func = "additive_attention_backward"
    args = additive_args(func, q, k, v, weight, options, NoSoftmaxInnerOptions)
    return _gradients(func, args, dout, {"q": q, "k": k, "v": v, "weight": weight}, need, options)


def talking_heads_attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    pre: ArrayLike | None = None,
    post: ArrayLike | None = None,
    *,
    need: Sequence[str] | None = None,
    **options: Unpack[NoSoftmaxInnerOptions],
) -> tuple[Any, ...]:
    """Gradients of `talking_heads_attention`, of the mixing matrices, too.

    Parameters
    ----------
    dout : array_like, (..., heads_q, len_q, head_dim_v)
        The gradient of a scalar with respect to the result, in q's dtype.
    q, k, v, pre, post, **options
        As they were given to `talking_heads_attention`, but for `out`.
    need : tuple of str, optional
        As in `sparsemax_attention_backward`, with ``"dpre"`` and ``"dpost"``. Default "dq", "dk", "dv", and
        those of the matrices that are given.

    Returns
    -------
    tuple
        A gradient for each name in `need`, with the shape and dtype of what it is the gradient of.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    Scores are computed three times, and the gradients of the probabilities twice, so that memory is
    O(threads * heads), whatever the lengths.
    """
    func = "talking_heads_attention_backward"
    args = talking_heads_args(func, q, k, v, pre, post, options, NoSoftmaxInnerOptions)
    given = {"q": q, "k": k, "v": v, "pre": pre, "post": post}
    if need is None:
        need = (*_NEED, *(f"d{name}" for name in ("pre", "post") if given[name] is not None))
    return _gradients(func, args, dout, given, need, options)


def sigmoid_attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    sigmoid_bias: float | None = None,
    need: Sequence[str] = _NEED,
    **options: Unpack[NoSoftmaxInnerOptions],
) -> tuple[Any, ...]:
    """Gradients of `sigmoid_attention`: ``ds = p * (1 - p) * dp``.

    Parameters
    ----------
    dout : array_like, (..., heads_q, len_q, head_dim_v)
        The gradient of a scalar with respect to the result, in q's dtype.
    q, k, v, sigmoid_bias, **options
        As they were given to `sigmoid_attention`, but for `out`, and without int8 keys and values.
    need : tuple of str, default ("dq", "dk", "dv")
        As in `sparsemax_attention_backward`. A bias that is learned, one a head, goes to bias, as
        ``bias[:, None, None]``.

    Returns
    -------
    tuple
        A gradient for each name in `need`, with the shape and dtype of what it is the gradient of.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    The kernels of `attention_backward`, with their costs and promises. Nothing of the forward pass is needed.
    """
    func = "sigmoid_attention_backward"
    args = variant_args(func, q, k, v, options, NoSoftmaxInnerOptions)
    args.sigmoid_bias = bias_of_sigmoid(func, args, sigmoid_bias)
    given = _with_options({"q": q, "k": k, "v": v}, options)
    names = gradient_names(func, need, given)
    cotangent = like_result(func, "dout", dout, args, np.shape(args.result), [])
    backward = BackwardArgs(args, cotangent, dq_factor=1.0 if "dscale" in names else args.scale)
    return _run(gradients(func, backward, names, given), options)


def _gradients(
    func: str,
    args: RowwiseArgs,
    dout: ArrayLike,
    given: dict[str, Any],
    need: Sequence[str],
    options: NoSoftmaxInnerOptions,
) -> tuple[Any, ...]:
    """The gradients `need` of what is `given` and of the options."""
    given = _with_options(given, options)
    if args.kind == "additive":  # of its weight, which the scale multiplies, there is a gradient
        del given["scale"]
    return _run(rowwise_backward_args(func, args, dout, given, need), options)


def _with_options(given: dict[str, Any], options: NoSoftmaxInnerOptions) -> dict[str, Any]:
    """What there are gradients of: `given`, and options."""
    named: dict[str, Any] = dict(options)
    return given | {name: named.get(name) for name in ("bias", "alibi_slopes", "softcap", "scale")}


def _run(found: Gradients, options: NoSoftmaxInnerOptions) -> tuple[Any, ...]:
    if found.args.out.size:
        dispatch.run(found.args, options.get("backend"))
    else:
        found.clear()
    return found.results()
