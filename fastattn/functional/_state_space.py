"""State space models: every channel, or every head, carries a state of its own from token to token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn import grad, ops
from fastattn._args.channels import scan_args, scan_grad_args
from fastattn._args.ops import like, rows_args
from fastattn._args.options import Backend, NoOptions
from fastattn._args.types import Array, ArrayLike, Unpack
from fastattn._args.words import not_an_argument
from fastattn._engine import dispatch
from fastattn.functional._differentiable import Steps, differentiable

if TYPE_CHECKING:
    Result = Array | tuple[Array, Array]  # the state where it is asked for


@differentiable("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "state")
def selective_scan(
    x: ArrayLike,
    dt: ArrayLike,
    A: ArrayLike,
    B: ArrayLike,
    C: ArrayLike,
    D: ArrayLike | None = None,
    *,
    z: ArrayLike | None = None,
    dt_bias: ArrayLike | None = None,
    dt_softplus: bool = False,
    state: ArrayLike | None = None,
    begins: ArrayLike | None = None,
    return_state: bool = False,
    out_state: Array | None = None,
    out: Array | None = None,
    num_threads: int | None = None,
    backend: Backend | None = None,
    **others: Unpack[NoOptions],
) -> Steps[Result]:
    r"""Selective scan of Mamba: ``h_t = exp(s_t A) h_{t-1} + s_t x_t B_t``, ``out_t = h_t . C_t + D x_t``.

    Each channel has a state of its own, of a few numbers; s_t is its step, ``dt_t + dt_bias``, or softplus of it.

    Parameters
    ----------
    x : array_like, (..., length, channels) or, with `begins`, (tokens, channels)
        float32, float64, float16 or bfloat16.
    dt : array_like, as x
    A : array_like, (channels, states)
        0 or less: in the paper ``-exp(A_log)``.
    B, C : array_like, (..., length, states) or, with `begins`, (tokens, states)
        In x's dtype.
    D : array_like, (channels,), optional
    z : array_like, as x, optional
        Gates: the result is times ``silu(z)``.
    dt_bias : array_like, (channels,), optional
    dt_softplus : bool, default False
        Without it, steps have to be 0 or more.
    state : array_like, (..., channels, states) or, with `begins`, (sequences, channels, states), optional
        What stood before the first token; 0 if left out. float32, float64 for float64 x.
    begins : array_like of int, (sequences + 1,), optional
        Sequences of different lengths lie end to end: tokens ``begins[s]`` to ``begins[s + 1]`` of x are
        those of sequence s. It begins with 0 and ends with the number of tokens.
    return_state : bool, default False
        Return ``(out, state)``: with it, a later call goes on where this one ended.
    out_state : ndarray, optional
        Where that state goes; it may be `state` itself, and implies `return_state`.
    out, num_threads, backend
        As in `attention`; out has x's shape and dtype.
    **others
        None: an error says what an argument of another library is called here.

    Returns
    -------
    out : ndarray
        In x's shape and dtype.
    state : ndarray, of the shape of `state`
        Only with `return_state` or `out_state`.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    An exponential and three multiply-adds for each token, channel and number of a state. A result does not
    depend on the other sequences, to the bit. Gradients compute the states again, and keep one for every 32
    tokens. Source: A. Gu and T. Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023,
    arXiv:2312.00752.

    Examples
    --------
    >>> import numpy as np
    >>> from fastattn.functional import selective_scan
    >>> x = np.ones((2, 10, 6), np.float32)
    >>> A, B = -np.ones((6, 4), np.float32), np.ones((2, 10, 4), np.float32)
    >>> out, state = selective_scan(x, x, A, B, B, return_state=True)
    >>> out.shape, state.shape
    ((2, 10, 6), (2, 6, 4))
    """
    if others:
        raise not_an_argument(others, selective_scan)
    gated = z is not None
    forward = {
        "x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus,
        "state": state, "begins": begins, "num_threads": num_threads, "backend": backend,
    }  # fmt: skip
    args = scan_args(**forward, return_state=return_state, out_state=out_state, out=None if gated else out)
    compute: Any = {"num_threads": num_threads, "backend": backend}
    gate = like("z", z, args.x.shape, args.x.dtype, "x")
    if gated and out is not None:
        rows_args("activate", gate, out, num_threads, backend, up=args.x, activation="silu")  # checks it
    dispatch.run(args, backend)
    result, scanned = args.result, args.out
    if gate is not None:
        whole = ops.activate(gate, "silu", up=scanned, out=out, **compute)
        result = (whole, args.state_out) if isinstance(result, tuple) else whole
    request = yield result

    dout, found = request.dout, {}
    if gate is not None:
        found["dz"], dout = grad.activate(dout, gate, "silu", up=scanned, **compute)
    back = scan_grad_args(dout, request.need, request.dmore, forward)
    dispatch.run_grad(back, backend)
    found |= {
        "dx": back.dx, "ddt": back.ddt, "dA": back.drates, "dB": back.db, "dC": back.dc, "dD": back.dskip,
        "ddt_bias": back.dbias, "dstate": back.dstate,
    }  # fmt: skip
    given: Any = {name: np.asarray(x).dtype for name, x in request.given.items() if x is not None}
    return tuple(_as(found[name], given.get(name[1:])) for name in request.need)


def _as(x: Array, dtype: Any) -> Array:
    """`x` in the dtype of what it is the gradient of, if that has one."""
    return x if dtype is None else x.astype(dtype.newbyteorder("="), copy=False)
