"""Gradients of causal convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.channels import conv_grad_args
from fastattn._args.errors import named
from fastattn._args.grad_types import ConvGradArgs
from fastattn._args.recurrent_types import each_sequence
from fastattn._args.types import Activation, Array, ArrayLike
from fastattn._engine import dispatch

if TYPE_CHECKING:
    from fastattn._args.options import Backend


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
