"""Vector-Jacobian products of functions of attention, layers and models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastattn._args.errors import put_name
from fastattn._args.types import ArrayLike

_EXPECTED = (
    "attention, varlen_attention, a variant of fastattn.functional, a feature map, a layer"
    " or a model (operations of ops have functions in grad)"
)


class Pullback:
    """Map from the gradient of a result to the gradients of its inputs; call it once.

    ``pullback(dout)`` takes the gradient of a scalar with respect to the result, in its shape and dtype, and
    returns what `vjp` documents. A call frees what the forward pass kept; after an error about an argument,
    it may be called again. Inputs and result are not copied: do not modify them before.
    """

    def __init__(self, check: Callable[..., tuple[Any, ...]], back: Callable[..., Any]):
        self._kept: list[tuple[Callable[..., Any], Callable[..., Any]]] = [(check, back)]
        self._name = "pullback"

    def of(self, name: str) -> Pullback:
        """Let messages say that it is the pullback of the function `name`."""
        self._name = f"pullback of {name}"
        for check, _ in self._kept:
            check.__qualname__ = self._name  # for Python's own errors
        return self

    def __repr__(self) -> str:
        return f"<{self._name}{'' if self._kept else ', called'}>"

    def __call__(self, dout: ArrayLike, *more: Any, **options: Any) -> Any:
        """Return the gradients."""
        given: tuple[Any, ...] = ()
        try:
            for check, _ in tuple(self._kept):
                given = check(dout, *more, **options)
            try:
                _, back = self._kept.pop()  # one of several threads gets it
            except IndexError:
                again = "it was called before; each call of vjp gives one pullback"
                raise RuntimeError(f"(): {again}") from None
            return back(*given)
        except Exception as error:
            put_name(self._name, error)
            raise


def vjp(function: Callable[..., Any], *arrays: object, **options: Any) -> tuple[Any, Pullback]:
    """Result and pullback of a function, a layer or a model: a vector-Jacobian product.

    Parameters
    ----------
    function : callable
        `fastattn.attention`, `fastattn.varlen_attention`, a function of `fastattn.functional` or
        `fastattn.functional.feature_maps`, a layer, or a model.
    *arrays : array_like
        Its positional arguments.
    **options
        Its keyword arguments, except `out`, `out_state` and `stats`. Layers and models also take

        - ``checkpoint=True``: keep only the inputs of each layer, and recompute it for its gradients;
        - ``dropout=0.1, seed=1``: apply dropout where torch's layers do.

    Returns
    -------
    result
        ``function(*arrays, **options)``.
    pullback : Pullback
        For functions, ``pullback(dout, dmore=None, *, need=None)`` returns a tuple with the gradient of each
        positional array that has one and is not None, in their order; integers and selections have none.
        `dmore` is the gradient of the second result, with ``return_lse=True`` or ``return_state=True``;
        default 0. `need` names gradients explicitly, such as ``("dq", "dbias", "dscale")``, including
        arguments passed by keyword; it is required if no array was passed by position.

        For layers, ``pullback(dout)`` returns a tuple: the gradient of each floating-point input, then a dict
        of the gradients of the parameters, by their names in `state_dict`; for several layers, one dict each.
        For `MultiHeadAttention`, `dout` is the gradient of `out`. An array passed as several inputs of an
        attention, as in ``vjp(layer, x, x, x)``, has one gradient. For models, it returns the dict.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    The forward pass runs the same kernels and gives the same bits as a plain call, except for encoders of
    `fastattn.models` in float32 with int8 activations, which may keep bfloat16 between products in a plain
    call. It keeps what gradients need: for attention out and lse, never scores. A gradient has the shape and
    dtype of its argument, summed over broadcast axes. Gradients of parameters are float32, or float64 in a
    float64 layer. The same input gives the same bits for any number of threads.

    See Also
    --------
    fastattn.functional.attention_backward : fused gradients of `attention`, from its saved results.

    Examples
    --------
    >>> import numpy as np
    >>> from fastattn import functional
    >>> from fastattn.grad import vjp
    >>> q, k, v, gate = np.ones((4, 2, 5, 8), np.float32)
    >>> out, pullback = vjp(functional.gated_attention, q, k, v, gate, causal=True)
    >>> dq, dk, dv, dgate = pullback(out)
    >>> dgate.shape
    (2, 5, 8)
    """
    record = None if isinstance(function, type) else getattr(function, "_vjp", None)
    if record is None:
        what = getattr(function, "__name__", f"of type {type(function).__name__}")
        raise TypeError(f"vjp(): function is {what}; expected {_EXPECTED}")
    for option in ("out", "out_state", "stats"):
        if options.pop(option, None) is not None:
            raise ValueError(
                f"vjp(): {option} is given; expected None: the pullback reads inputs and results"
            )
    name: str = getattr(function, "__name__", getattr(function, "model_type", type(function).__name__))
    try:
        result, pullback = record(*arrays, **options)
    except Exception as error:
        put_name(name, error, record.__qualname__)
        raise
    return result, pullback.of(name)
