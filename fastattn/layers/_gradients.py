"""Gradients of layers: a call on a tape, and its pullback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastattn._args.attention import dropout_of
from fastattn._args.ops import like, rows
from fastattn._args.values import flag
from fastattn._engine.tape import Drops, Tape, Value
from fastattn.grad import Pullback

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import ArrayLike

    from fastattn._args.types import Array, Shape
    from fastattn.layers._state import Layer

    Record = Callable[[Tape, Sequence[Value]], Value]
    Versions = list[dict[str, tuple[Layer, int]]]


def _versions(layers: Sequence[Layer]) -> Versions:
    return [layer._versions() for layer in layers]


def named_gradients(layer: Layer, tape: Tape) -> dict[str, Array]:
    """The gradients of the layer's parameters by their names."""
    for _, part in layer._walk():
        part._settle(tape.gradients)
    return layer._all_named(tape.gradients.of)


def pulled(
    layer: Layer,
    record: Record,
    inputs: Sequence[Array],
    shape: Shape,
    checkpoint: bool = False,
    dropout: float = 0.0,
    seed: int | None = None,
) -> tuple[Array, Pullback]:
    """The result of `record` on inputs (..., features), of `shape` but for its features, and the way back.

    With `checkpoint`, only the inputs are kept, and `record` runs once more for the gradients.
    """
    func = type(layer).__name__
    return pulled_through(func, [layer], record, inputs, shape, checkpoint, dropout, seed)


def pulled_through(
    func: str,
    layers: Sequence[Layer],
    record: Record,
    inputs: Sequence[Array],
    shape: Shape,
    checkpoint: bool,
    dropout: float,
    seed: int | None,
) -> tuple[Array, Pullback]:
    """The same of `func`, which is made of several layers: each has a dict of gradients."""
    checkpoint = flag(func, "checkpoint", checkpoint)
    drops = Drops(*dropout_of(func, dropout, seed))
    for layer in layers:
        layer._require_parts()
    versions = _versions(layers)
    tape, values = Tape(drops=drops), [Value(rows(x)) for x in inputs]
    out = tape.checkpoint(record, values) if checkpoint else record(tape, values)
    result = out.array.reshape(*shape[:-1], out.array.shape[-1])
    shape, dtype, name = result.shape, result.dtype, f"pullback of {func}"

    def check(dout: ArrayLike) -> tuple[Array]:
        if _versions(layers) != versions:
            raise RuntimeError(
                f"{name}(): the weights have changed since; call vjp again for their gradients"
            )
        array = like(name, "dout", dout, shape, dtype, "the result")
        if array is None:
            raise TypeError(f"{name}(): dout is None; expected an array")
        return (array,)

    def back(dout: Array) -> tuple[Any, ...]:
        tape.pull(out, rows(dout))
        found = (value.found().reshape(x.shape) for value, x in zip(values, inputs, strict=True))
        return *found, *(named_gradients(layer, tape) for layer in layers)

    return result, Pullback(name, check, back)


def refuse_cache(func: str, options: Mapping[str, Any]) -> None:
    """Raise if there is a cache among `options`."""
    for name in ("cache", "lengths", "keys_values"):
        if options.get(name) is not None:
            expected = "none: keys and values of earlier calls have no gradients"
            raise ValueError(f"{func}(): {name} is given; expected {expected}")
