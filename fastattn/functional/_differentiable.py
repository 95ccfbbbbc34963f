"""A function and its gradients in one text: a generator that yields the result and returns the gradients."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from fastattn._args.backward import OF_OPTIONS, gradient_names
from fastattn._args.errors import told, wrong_dtype, wrong_shape, wrong_type
from fastattn._args.ops import like
from fastattn._args.recurrent import pair
from fastattn._args.types import Array, lane_dtype
from fastattn._args.values import flag, float_array, is_int4, readable, real_values, require_broadcast
from fastattn._args.words import by_position
from fastattn.grad import Pullback

P = ParamSpec("P")
R = TypeVar("R")


class Request(NamedTuple):
    """The arguments of a pullback, checked, and those of the function that have gradients."""

    dout: Array  # of the shape and dtype of the result
    dmore: Any  # the gradient of the second result, or None; that of lse has its shape
    need: tuple[str, ...]
    given: Mapping[str, Any] = MappingProxyType({})  # by name what the caller passed
    own_bias: bool = True  # the bias of the calls is the caller's


_AS_KERNELS = functools.partial(np.errstate, all="ignore")

# Yields the result, is sent the request of a pullback, and returns its gradients.
Steps = Generator[R, Request, tuple[Any, ...]]


def _first_half(running: Steps[R]) -> R:
    with _AS_KERNELS():
        return next(running)


def differentiable(
    *gradients: str, options: type | None = None, calls_kernels: bool = False, **recorded: Any
) -> Callable[[Callable[P, Steps[R]]], Callable[P, R]]:
    """Decorate steps: make the function of their first half, whose `_vjp` goes on with the second.

    A plain call drops the generator at its yield, and so keeps nothing. For gradients it waits there, with
    all local variables. A function with an argument return_lse is called with it then. Both halves run
    without NumPy's warnings, as kernels do. A first half that `calls_kernels` alone has none, and saves the
    microsecond that it takes to ask for that. The others are as in `vjp_of`.
    """
    begin: Callable[[Steps[Any]], Any] = next if calls_kernels else _first_half

    def decorate(steps: Callable[..., Any]) -> Any:
        @functools.wraps(steps)
        def function(*args: Any, **kwargs: Any) -> Any:
            try:
                if len(args) > steps.__code__.co_argcount:
                    raise by_position(args, steps, options)
                return begin(steps(*args, **kwargs))
            except Exception as error:
                raise told(error, steps.__name__, steps, kwargs) from error.__cause__

        signature = _of_result(steps)
        function.__signature__ = signature  # type: ignore[attr-defined]
        function.__annotations__ = {**steps.__annotations__, "return": signature.return_annotation}
        function._vjp = vjp_of(  # type: ignore[attr-defined]
            steps, gradients, options, begin=begin, **recorded
        )
        return function

    return decorate


def vjp_of(
    steps: Callable[..., Steps[Any]],
    gradients: tuple[str, ...],
    options: type | None = None,
    without: tuple[str, ...] = (),
    own_bias: bool = True,
    require: Callable[..., None] | None = None,
    begin: Callable[[Steps[Any]], Any] = next,
) -> Callable[..., Any]:
    """Make the function of `steps` that `grad.vjp` calls.

    `gradients` names the arguments that have some, beside those of `options`, but for the ones `without`.
    `require`, of the keyword arguments, raises where a plain call is possible and gradients are not.
    """
    parameters = inspect.signature(steps).parameters
    name, with_lse = steps.__name__.removeprefix("_"), "return_lse" in parameters
    steps.__qualname__ = name  # for Python's own errors
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    taken = {*parameters, *(() if options is None else options.__annotations__)} - {*gradients, *without}
    sources = (*gradients, *(option for option in OF_OPTIONS if option in taken))
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    refused = [name for name in ("k_scale", "v_scale", "products", "block_table") if name in taken]

    def record(*arrays: Any, **chosen: Any) -> tuple[Any, Pullback]:
        for option in refused:
            if chosen.pop(option, None) is not None:
                of = "pages have" if option == "block_table" else "int8 has"
                raise ValueError(f"(): {option} is given; expected none: {of} no gradients")
        for argument, x in {**dict(zip(positional, arrays, strict=False)), **chosen}.items():
            if is_int4(x):
                raise TypeError(f"(): {argument} is in int4, which has no gradients")
        if require is not None:
            require(**chosen)
        shown = flag("return_lse", chosen.get("return_lse", False))
        try:
            running = steps(*arrays, **{**chosen, "return_lse": True} if with_lse else chosen)
            result = begin(running)
        except Exception as error:
            raise told(error, name, steps, chosen) from error.__cause__
        several = isinstance(result, tuple)
        out = result[0] if several else result
        second = result[1] if several and (shown or not with_lse) else None
        passed = dict(zip(positional, arrays, strict=False))
        values = {**defaults, **passed, **chosen}
        given = {source: values.get(source) for source in sources}
        first = tuple(f"d{n}" for n, x in passed.items() if n in given and x is not None)

        def check(dout: Any, dmore: Any = None, *, need: Any = None) -> tuple[Request]:
            names = gradient_names(first if need is None else need, given, diagonals=own_bias)
            if isinstance(dout, tuple) and second is not None:
                raise wrong_type("dout", dout, "an array (dmore takes the gradient of the second result)")
            if dmore is not None and second is None:
                raise ValueError("(): dmore is given; expected None, since there is one result")
            if dmore is not None:
                like_second: Any = _like_lse if "return_lse" in parameters else _like_state
                dmore = like_second(dmore, second)
            request = Request(_like(dout, out), dmore, tuple(names), given, own_bias)
            if need is None and not first:
                expected = f'need=("d{sources[0]}", ...), as no array was passed by position'
                raise ValueError(f"(): need is None; expected {expected}")
            return (request,)

        def back(request: Request) -> tuple[Any, ...]:
            try:
                with _AS_KERNELS():
                    running.send(request)
            except StopIteration as end:
                found: tuple[Any, ...] = end.value
                return found
            raise AssertionError(f"{name} yields more than its result")

        return (result if shown or not with_lse else out), Pullback(check, back)

    return record


def _of_result(steps: Callable[..., Any]) -> inspect.Signature:
    """The signature of `steps`, whose annotation ``Steps[X]`` becomes X."""
    signature = inspect.signature(steps)
    annotation = str(signature.return_annotation).removeprefix("Steps[").removesuffix("]")
    return signature.replace(return_annotation=annotation)


def _like(dout: Any, out: Array) -> Array:
    array = float_array("dout", dout)
    if array.shape != out.shape:
        raise wrong_shape("dout", array, f"{out.shape}, as the result of the forward pass")
    array = readable(array, "dout", [], "the head dimension" if array.ndim else "")
    if array.dtype != out.dtype:
        raise wrong_dtype("dout", array, f"{out.dtype}, as the result of the forward pass")
    return array


def _like_lse(dlse: Any, lse: Array) -> Array:
    array = real_values("dmore", dlse, lane_dtype(lse.dtype), [])
    require_broadcast("dmore", array.shape, lse.shape, "lse's shape")
    return np.broadcast_to(array, lse.shape)


def _like_state(dstate: Any, state: Any) -> Any:
    """The gradient of a state, or of a pair of states, where they are normalised."""
    states = state if isinstance(state, tuple) else (state,)
    given = pair("dmore", dstate, len(states) == 2)
    found = tuple(
        like(f"dmore[{i}]" if i else "dmore", x, of.shape, of.dtype)
        for i, (x, of) in enumerate(zip(given, states, strict=False))
    )
    return found if len(states) == 2 else found[0]
