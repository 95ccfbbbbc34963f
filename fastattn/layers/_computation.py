"""A checked call of a layer, which runs plainly or with a pullback."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

from fastattn._args.attention import dropout_of
from fastattn._args.ops import like, rows
from fastattn._args.values import flag
from fastattn._engine.tape import PLAIN, Drops, Tape, Value
from fastattn.grad import Pullback

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fastattn._args.types import Array, Shape
    from fastattn.layers._state import Layer

P = ParamSpec("P")


class Computation(NamedTuple):
    """One call, checked; `run` computes it on the operations of a tape."""

    func: str  # for messages, in which `inputs` have their names
    layers: Sequence[Layer]
    inputs: Mapping[str, Array]  # (..., features)
    run: Callable[..., Any]  # from a tape and the inputs' values, which are rows, to the value of the result
    shape: Shape  # of the result, but for its features
    by_block: bool = False  # `run` makes checkpoints of its blocks

    def result(self) -> Array:
        """The result, with nothing kept."""
        out: Array = self.run(PLAIN, *map(rows, self.inputs.values()))
        return out.reshape(*self.shape[:-1], out.shape[-1])

    def with_pullback(self, checkpoint: bool, dropout: float, seed: int | None) -> tuple[Array, Pullback]:
        """The result and its pullback, as `fastattn.grad.vjp` returns them."""
        func, inputs, layers = self.func, self.inputs, self.layers
        checkpoint = flag(func, "checkpoint", checkpoint)
        tape = Tape(drops=Drops(*dropout_of(func, dropout, seed)), by_block=checkpoint)
        (first, x), *others = inputs.items()
        for other, y in others:
            if y.dtype != x.dtype:
                raise TypeError(f"{func}(): {other} has dtype {y.dtype}; expected {x.dtype}, as {first} has")
        for layer in layers:
            layer._require_parts()
        versions = [layer._versions() for layer in layers]
        values = [Value(rows(x)) for x in inputs.values()]
        out = self.run(tape, *values) if self.by_block else tape.block(self.run, *values)
        result = out.array.reshape(*self.shape[:-1], out.array.shape[-1])
        shape, dtype, name = result.shape, result.dtype, f"pullback of {func}"

        def check(dout: ArrayLike) -> tuple[Array]:
            if [layer._versions() for layer in layers] != versions:
                again = "call vjp again for their gradients"
                raise RuntimeError(f"{name}(): the weights have changed since; {again}")
            array = like(name, "dout", dout, shape, dtype, "the result")
            if array is None:
                raise TypeError(f"{name}(): dout is None; expected an array")
            return (array,)

        def back(dout: Array) -> tuple[Any, ...]:
            tape.pull(out, rows(dout))
            found = (value.found().reshape(x.shape) for value, x in zip(values, inputs.values(), strict=True))
            return *found, *(_by_name(layer, tape) for layer in layers)

        return result, Pullback(name, check, back)


def _by_name(layer: Layer, tape: Tape) -> dict[str, Array]:
    """The gradients of a layer's parameters."""
    for _, part in layer._walk():
        part._settle(tape.gradients)
    return layer._all_named(tape.gradients.of)


def differentiable(computation: Callable[P, Computation]) -> Callable[P, Array]:
    """Turn a function that makes a `Computation` into one that runs it, and that `grad.vjp` takes."""

    @functools.wraps(computation)
    def function(*args: P.args, **kwargs: P.kwargs) -> Array:
        return computation(*args, **kwargs).result()

    def record(
        *args: Any, checkpoint: bool = False, dropout: float = 0.0, seed: int | None = None, **options: Any
    ) -> tuple[Array, Pullback]:
        found: Computation = computation(*args, **options)
        return found.with_pullback(checkpoint, dropout, seed)

    function._vjp = record  # type: ignore[attr-defined]
    function.__signature__ = inspect.signature(computation).replace(return_annotation="Array")  # type: ignore[attr-defined]
    function.__annotations__ = {**computation.__annotations__, "return": "Array"}
    return function
