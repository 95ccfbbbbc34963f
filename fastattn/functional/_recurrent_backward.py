"""Gradients of attention without softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.grad import needed
from fastattn._args.options import (
    Backend,
    DecayGradientOptions,
    DeltaGradientOptions,
    NoOptions,
    require_options,
)
from fastattn._args.recurrent_backward import recurrent_backward_args
from fastattn._args.values import flag, float_array, is_float, shared
from fastattn._args.words import not_an_argument
from fastattn._engine import dispatch
from fastattn.functional._recurrent import retention_decays
from fastattn.functional.feature_maps import unit, unit_backward

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.types import Array, RecurrentBackwardArgs, Shape
    from fastattn.functional._recurrent import Rule, State

    Gradients = tuple[State, ...]  # a pair where `state` is one


def linear_attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    rule: Rule,
    log_decay: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    causal: bool = True,
    scale: float | None = None,
    normalize: bool = False,
    eps: float = 1e-6,
    state: State | None = None,
    dstate_out: State | None = None,
    need: tuple[str, ...] = ("dq", "dk", "dv"),
    num_threads: int | None = None,
    backend: Backend | None = None,
    **others: Unpack[NoOptions],
) -> Gradients:
    """Gradients of `linear_attention`, from that of its result.

    Parameters
    ----------
    dout : array_like
        The gradient of `out`: of its shape and dtype.
    q, k, v, rule, log_decay, beta, causal, scale, normalize, eps, state
        What `linear_attention` was called with.
    dstate_out : ndarray, or with `normalize` a pair of them, optional
        The gradient of the state behind the last token, in its dtype; 0 if left out.
    need : tuple of str, default ("dq", "dk", "dv")
        Which gradients: of "dq", "dk", "dv", "dlog_decay", "dbeta", "dscale" and "dstate", that of the state
        before the first token (of zeros, where none was given).
    num_threads, backend
        As in `attention`.
    **others
        None: an error says what an argument of another library is called here.

    Returns
    -------
    tuple of ndarray
        In the order of `need`. Each has the shape and dtype of what it is the gradient of (of integers the
        state's dtype): what was broadcast, or belongs to several heads, is added up. "dstate" is a pair with
        `normalize`, "dscale" a float.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    Nothing of the forward call is needed but its inputs. States are computed once more, one every 32 tokens
    (16 with a decay for every dimension). A thread keeps up to 8 MB of them; of longer sequences one for
    every 8 MB, and computes those between them a third time. About ``10 * heads * len * head_dim *
    head_dim_v`` FLOP, twice as many with the delta rules. Decays are multiplied and never divided by: that
    of a token which forgets everything has a gradient of 0, and nothing overflows. What is not finite
    reaches only what depends on it: nothing of a row of `dout` reaches keys and values of later tokens, and
    nothing of a key or value the queries before it.

    Examples
    --------
    >>> import numpy as np
    >>> from fastattn.functional import linear_attention, linear_attention_backward
    >>> q = k = v = np.ones((2, 100, 64), np.float32)
    >>> options = {"rule": "decay", "log_decay": np.float32([-0.1, -0.2])}
    >>> out = linear_attention(q, k, v, **options)
    >>> need = ("dq", "dk", "dv", "dlog_decay")
    >>> dq, dk, dv, dlog_decay = linear_attention_backward(2 * out, q, k, v, need=need, **options)
    >>> dq.shape, dlog_decay.shape
    ((2, 100, 64), (2,))
    """
    if others:
        raise not_an_argument("linear_attention_backward", others, linear_attention_backward)
    args = recurrent_backward_args(
        "linear_attention_backward", dout, q, k, v, rule, log_decay, beta, causal, scale, normalize, eps,
        state, dstate_out, need, num_threads, backend,
    )  # fmt: skip
    dispatch.run(args, backend)
    return _results(args, need, log_decay, beta)


def retention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    gamma: ArrayLike | None = None,
    *,
    need: tuple[str, ...] = ("dq", "dk", "dv"),
    **options: Unpack[DecayGradientOptions],
) -> Gradients:
    """Gradients of `retention`: see `linear_attention_backward`.

    Parameters
    ----------
    dout, q, k, v, gamma : array_like
        As in `retention`, and the gradient of its result.
    need : tuple of str, default ("dq", "dk", "dv")
        Of "dq", "dk", "dv", "dgamma", "dstate" and "dscale". That of the default gamma is (heads,), float64.
    **options
        scale, normalize, eps, state, dstate_out, num_threads, backend: as in `linear_attention_backward`.
    """
    func = "retention_backward"
    names = needed(func, need, ("dq", "dk", "dv", "dgamma", "dstate", "dscale"))
    k, v = float_array(func, "k", k), float_array(func, "v", v)
    decays, log_decay = retention_decays(func, k, v, gamma)
    inner = tuple("dlog_decay" if name == "dgamma" else name for name in names)
    fixed = {"rule": "decay", "log_decay": log_decay, "need": inner}
    results: list[Any] = list(_run(func, dout, q, k, v, options, DecayGradientOptions, **fixed))
    for i, name in enumerate(names):
        if name == "dgamma":
            dgamma = results[i] / decays.reshape(-1)
            results[i] = dgamma.reshape(decays.shape).astype(_dtype_of(gamma, decays.dtype))
    return tuple(results)


def gated_linear_attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    log_decay: ArrayLike,
    *,
    need: tuple[str, ...] = ("dq", "dk", "dv", "dlog_decay"),
    **options: Unpack[DecayGradientOptions],
) -> Gradients:
    """Gradients of `gated_linear_attention`: see `linear_attention_backward`.

    Parameters
    ----------
    dout, q, k, v, log_decay : array_like
        As in `gated_linear_attention`, and the gradient of its result.
    need : tuple of str, default ("dq", "dk", "dv", "dlog_decay")
        These, "dstate" and "dscale".
    **options
        As in `retention_backward`.
    """
    fixed = {"rule": "gated", "log_decay": log_decay, "need": need}
    func = "gated_linear_attention_backward"
    return _run(func, dout, q, k, v, options, DecayGradientOptions, **fixed)


def delta_net_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    beta: ArrayLike,
    *,
    unit_keys: bool = True,
    need: tuple[str, ...] = ("dq", "dk", "dv", "dbeta"),
    **options: Unpack[DeltaGradientOptions],
) -> Gradients:
    """Gradients of `delta_net`: see `linear_attention_backward`.

    Parameters
    ----------
    dout, q, k, v, beta, unit_keys
        As in `delta_net`, and the gradient of its result. With `unit_keys` the gradients are those of the
        queries and keys before they are divided by their lengths.
    need : tuple of str, default ("dq", "dk", "dv", "dbeta")
        These, "dstate" and "dscale".
    **options
        As in `retention_backward`, but normalize and eps.
    """
    fixed = {"rule": "delta", "beta": beta, "need": need}
    return _run_delta("delta_net_backward", dout, q, k, v, unit_keys, options, **fixed)


def gated_delta_net_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    log_decay: ArrayLike,
    beta: ArrayLike,
    *,
    unit_keys: bool = True,
    need: tuple[str, ...] = ("dq", "dk", "dv", "dlog_decay", "dbeta"),
    **options: Unpack[DeltaGradientOptions],
) -> Gradients:
    """Gradients of `gated_delta_net`: see `linear_attention_backward`.

    Parameters
    ----------
    dout, q, k, v, log_decay, beta
        As in `gated_delta_net`, and the gradient of its result.
    need : tuple of str, default ("dq", "dk", "dv", "dlog_decay", "dbeta")
        These, "dstate" and "dscale".
    unit_keys, **options
        As in `delta_net_backward`.
    """
    fixed = {"rule": "gated_delta", "log_decay": log_decay, "beta": beta, "need": need}
    return _run_delta("gated_delta_net_backward", dout, q, k, v, unit_keys, options, **fixed)


def _run_delta(
    func: str, dout: Any, q: Any, k: Any, v: Any, unit_keys: bool, options: DeltaGradientOptions, **fixed: Any
) -> Gradients:
    """Gradients of a delta rule, through `unit` if `unit_keys`."""
    if not flag(func, "unit_keys", unit_keys):
        return _run(func, dout, q, k, v, options, DeltaGradientOptions, **fixed)
    q, k = float_array(func, "q", q, 1), float_array(func, "k", k, 1)
    results = list(_run(func, dout, unit(q), unit(k), v, options, DeltaGradientOptions, **fixed))
    for i, name in enumerate(fixed["need"]):
        if name in ("dq", "dk"):
            results[i] = unit_backward(results[i], q if name == "dq" else k)
    return tuple(results)


def _run(
    func: str, dout: Any, q: Any, k: Any, v: Any, options: Any, taken: type, need: Any, **fixed: Any
) -> Gradients:
    """`linear_attention_backward` with what is `fixed`, for messages of `func`, which takes `taken`."""
    require_options(func, options, taken)
    args = recurrent_backward_args(func, dout, q, k, v, need=need, **fixed, **options)
    dispatch.run(args, options.get("backend"))
    return _results(args, need, fixed.get("log_decay"), fixed.get("beta"))


def _results(args: RecurrentBackwardArgs, need: tuple[str, ...], log_decay: Any, beta: Any) -> Gradients:
    """The gradients that are wanted, added up over all that one number served."""
    a = args.forward
    results: list[Any] = []
    for name in need:
        if name == "dscale":
            results.append(_dscale(args))
            continue
        x: Array = getattr(args, name)
        if name == "dstate":
            results.append(x if args.dnorm is None else (x, args.dnorm))
        elif name in ("dlog_decay", "dbeta"):
            given = log_decay if name == "dlog_decay" else beta
            shape = shared(given).shape
            tokens = (*shape, 1) if name == "dlog_decay" and not a.gated and len(shape) == 1 else shape
            total = _added(x, tokens, 2 if a.gated and name == "dlog_decay" else 1)
            results.append(total.reshape(shape).astype(_dtype_of(given, x.dtype), copy=False))
        else:
            like = getattr(a, name[1:])
            if name == "dq" and args.dq_factor != a.scale:
                x = x * x.dtype.type(a.scale)
            results.append(_added(x, like.shape, 2).astype(like.dtype, copy=False))
    return tuple(results)


def _dscale(args: RecurrentBackwardArgs) -> float:
    """The sum of q dq, dq being that of queries times the scale."""
    dq: Any = args.dq
    heads, heads_q = dq.shape[-3], args.forward.heads_q
    q = args.forward.q
    q = np.broadcast_to(q, (*dq.shape[:-3], *q.shape[-3:]))
    total = 0.0
    for b in np.ndindex(dq.shape[:-2]):
        head = (*b[:-1], b[-1] // (heads // heads_q))
        total += float(np.vdot(q[head].astype(np.float64), dq[b].astype(np.float64)))
    return total


def _dtype_of(given: Any, otherwise: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of `given`, in native byte order; `otherwise` where that is no floating one."""
    dtype = shared(given).dtype if hasattr(given, "dtype") else otherwise
    return dtype.newbyteorder("=") if is_float(dtype) else otherwise


def _added(x: Array, shape: Shape, token_axis: int) -> Array:
    """`x` added up to `shape`: heads that share one, axes of length 1, and axes that are not there.

    One term after the other, so that the bits of a sum do not depend on what is computed beside it. Only
    tokens, whose axis is the last but `token_axis` - 1, may be many: they are added in float64.
    """
    if x.shape == shape:
        return x
    whole = (1,) * (x.ndim - len(shape)) + shape
    for axis, (n, kept) in enumerate(zip(x.shape, whole, strict=True)):
        if n == kept:
            continue
        if axis == x.ndim - token_axis:
            x = np.ascontiguousarray(np.moveaxis(x, axis, -1)).sum(-1, dtype=np.float64)[..., None]
            x = np.moveaxis(x, -1, axis)
            continue
        parts = x.reshape(*x.shape[:axis], kept, n // kept, *x.shape[axis + 1 :])
        total = np.zeros((*x.shape[:axis], kept, *x.shape[axis + 1 :]), x.dtype)
        for i in range(n // kept):
            total += parts[(slice(None),) * (axis + 1) + (i,)]
        x = total
    return x.reshape(shape)
