"""Gradients of row-wise operations, norms, softmax, activations; and of causal convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.channels import conv_grad_args
from fastattn._args.errors import named
from fastattn._args.grad import rows_grad_args
from fastattn._args.grad_types import ConvGradArgs
from fastattn._args.recurrent_types import each_sequence
from fastattn._args.types import Activation, Array, ArrayLike
from fastattn._engine import dispatch

if TYPE_CHECKING:
    from fastattn._args.options import Backend


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


def _run(
    kernel: str,
    dout: Any,
    x: Any,
    need: Any,
    known: Any,
    into: Any,
    num_threads: Any,
    backend: Any,
    **more: Any,
) -> tuple[Array, ...]:
    """Check the arguments (`more` is specific to the kernel) and compute."""
    args, results = rows_grad_args(kernel, dout, x, need, known, into, num_threads, backend, **more)
    dispatch.run_grad(args, backend)
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
