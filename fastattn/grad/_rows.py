"""Gradients of what goes row by row: norms, softmax, activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastattn._args.grad import rows_grad_args
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
        The gradient of the result; in x's shape and dtype.
    x, weight, eps, residual
        As the forward function had them. Mean and variance are computed again, in the same pass.
    dsum : array_like, (..., features), optional
        The gradient of the sum that ``return_sum=True`` returned, or of x where it also goes around the norm,
        as in a residual connection: it is added to dx.
    need : sequence of {"dx", "dweight", "dbias"}
        Which gradients. That of `residual` is dx, too.
    into : sequence of (ndarray or None), optional
        Arrays for them, in the order of `need`; None is a new one. They share no memory with an input.
    num_threads, backend : optional
        As in `fastattn.ops.linear`.

    Returns
    -------
    tuple of ndarray
        In the order of `need`: dx (..., features) in x's dtype, dweight and dbias (features,) in float32, for
        x in float64 in float64. Without a weight, dweight is that of a weight of ones.

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
    """Gradients of `fastattn.ops.rms_norm`: "dx", "dweight" and, where there is a gate, "dgate".

    Parameters, results and errors as in `layer_norm`; `gate`, `activation` and `gate_first` as the forward
    function had them. `dsum` is not for gated norms.
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
    """Gradient of `fastattn.ops.softmax`'s input: ``out * (dout - sum(dout * out))``, row by row.

    Parameters
    ----------
    dout : array_like, (..., n)
        The gradient of the result; in `out`'s shape and dtype.
    out : array_like, (..., n)
        What the forward function returned. A row of zeros gives zeros.
    into : ndarray, optional
        Array for the result.
    num_threads, backend : optional
        As in `layer_norm`, like the errors.
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
        The gradient of the result; in x's shape and dtype.
    x, activation, up
        As the forward function had them, which nothing checks. relu's derivative at 0 is 0.
    need : sequence of {"dx", "dup"}, optional
        Which gradients; by default dx, and dup where there is an `up`.
    into, num_threads, backend : optional
        As in `layer_norm`, like the errors.

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
    """Check the arguments, of which `more` are the kernel's own, and compute."""
    args, results = rows_grad_args(kernel, dout, x, need, known, into, num_threads, backend, **more)
    dispatch.run_grad(args, backend)
    return results()
