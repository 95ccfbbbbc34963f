"""A function and its gradients in one text: a generator that yields the result and returns the gradients."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar, overload

import numpy as np

from fastattn._args.errors import wrong_dtype, wrong_shape
from fastattn._args.types import lane_dtype
from fastattn._args.values import flag, float_array, readable, real_values, require_broadcast
from fastattn.grad import Pullback

if TYPE_CHECKING:
    from fastattn._args.types import Array

P = ParamSpec("P")
R = TypeVar("R")


class Request(NamedTuple):
    """The arguments of a pullback, checked but for `need`."""

    func: str  # for messages
    dout: Array  # of the shape and dtype of the result
    dmore: Any  # the gradient of the second result, or None; that of lse has its shape
    need: tuple[str, ...]


# Yields the result, is sent the request of a pullback, and returns its gradients.
Steps = Generator[R, Request, tuple[Any, ...]]


@overload
def differentiable(steps: Callable[P, Steps[R]]) -> Callable[P, R]: ...
@overload
def differentiable(*, keeps_lse: bool) -> Callable[[Callable[P, Steps[R]]], Callable[P, R]]: ...
def differentiable(steps: Callable[..., Any] | None = None, *, keeps_lse: bool = False) -> Any:
    """Turn `steps` into the function of its first half, whose `_vjp` goes on with the second.

    A plain call drops the generator at its yield, and so keeps nothing. For gradients it waits there, with
    all local variables. A function with an argument return_lse is asked for lse then, unless it keeps one
    anyway. The second half runs without NumPy's warnings, as kernels do.
    """
    if steps is None:
        return functools.partial(differentiable, keeps_lse=keeps_lse)

    @functools.wraps(steps)
    def function(*args: Any, **kwargs: Any) -> Any:
        return next(steps(*args, **kwargs))

    signature = _of_result(steps)
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__annotations__ = {**steps.__annotations__, "return": signature.return_annotation}
    function._vjp = vjp_of(steps, keeps_lse=keeps_lse)  # type: ignore[attr-defined]
    return function


def vjp_of(
    steps: Callable[..., Steps[Any]], frozen: tuple[str, ...] = (), keeps_lse: bool = False
) -> Callable[..., Any]:
    """Make the function of `steps` that `grad.vjp` calls; `frozen` arguments have no gradient."""
    parameters = inspect.signature(steps).parameters
    name, with_lse = steps.__name__.removeprefix("_"), "return_lse" in parameters and not keeps_lse
    steps.__qualname__ = name  # for Python's own errors
    names = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]

    def record(*arrays: Any, **options: Any) -> tuple[Any, Pullback]:
        shown = flag(name, "return_lse", options.get("return_lse", False))
        running = steps(*arrays, **{**options, "return_lse": True} if with_lse else options)
        result = next(running)
        several = isinstance(result, tuple)
        out = result[0] if several else result
        lse = result[1] if several and "return_lse" in parameters else None
        given = zip(names, arrays, strict=False)
        first = tuple(f"d{n}" for n, x in given if n not in frozen and x is not None)
        func = f"pullback of {name}"

        def check(dout: Any, dmore: Any = None, *, need: Any = None) -> tuple[Request]:
            if dmore is not None and not (several and (shown or not with_lse)):
                raise ValueError(f"{func}(): dmore is given; expected None, since there is one result")
            if lse is not None:
                dmore = _like_lse(func, dmore, lse)
            return (Request(func, _like(func, dout, out), dmore, first if need is None else need),)

        def back(request: Request) -> tuple[Any, ...]:
            try:
                with np.errstate(all="ignore"):
                    running.send(request)
            except StopIteration as end:
                found: tuple[Any, ...] = end.value
                return found
            raise AssertionError(f"{name} yields more than its result")

        check.__qualname__ = func
        return (result if shown or not with_lse else out), Pullback(func, check, back)

    return record


def _of_result(steps: Callable[..., Any]) -> inspect.Signature:
    """The signature of `steps`, whose annotation ``Steps[X]`` becomes X."""
    signature = inspect.signature(steps)
    annotation = str(signature.return_annotation).removeprefix("Steps[").removesuffix("]")
    return signature.replace(return_annotation=annotation)


def _like(func: str, dout: Any, out: Array) -> Array:
    array = float_array(func, "dout", dout)
    if array.shape != out.shape:
        raise wrong_shape(func, "dout", array, f"{out.shape}, as the result of the forward pass")
    array = readable(array, "dout", [], "the head dimension" if array.ndim else "")
    if array.dtype != out.dtype:
        raise wrong_dtype(func, "dout", array, f"{out.dtype}, as the result of the forward pass")
    return array


def _like_lse(func: str, dlse: Any, lse: Array) -> Array | None:
    if dlse is None:
        return None
    array = real_values(func, "dmore", dlse, lane_dtype(lse.dtype), [])
    require_broadcast(func, "dmore", array.shape, lse.shape, "lse's shape")
    return np.broadcast_to(array, lse.shape)
