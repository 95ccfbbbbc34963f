"""What `forward_backward` of all layers is: a call on a tape, and the way back through it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastattn._args.attention import dropout_of
from fastattn._args.ops import like, rows
from fastattn._args.values import flag
from fastattn._engine.tape import Drops, Tape, Value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import ArrayLike

    from fastattn._args.types import Array, Shape
    from fastattn.layers._state import Layer

    Record = Callable[[Tape, Sequence[Value]], Value]
    Versions = list[dict[str, tuple[Layer, int]]]


class Pullback:
    """From the gradient of a layer's result to those of its inputs and parameters; call it once.

    ``pullback(dout)`` takes the gradient of a scalar with respect to the result, in its shape and dtype. It
    returns the gradient of each input, and a dict of those of the parameters, by their names in `state_dict`.
    These are float32, in a layer of float64 float64; weights in int8, int4 and nf4 have none. Of functions of
    several layers it returns such a dict for each.

    A call frees what was kept of the forward pass, so that there is no second one. The weights have to be
    those of the forward pass: a call after a step of an optimizer, `load_state_dict` or another part raises
    RuntimeError. Inputs and the result are not copied: do not change them before the call.
    """

    def __init__(
        self,
        func: str,
        layers: Sequence[Layer],
        versions: Versions,
        tape: Tape,
        inputs: Sequence[Value],
        shapes: Sequence[Shape],
        out: Value,
        shape: Shape,
    ):
        self._func, self._layers, self._shape = func, layers, shape
        self._versions = versions
        self._kept: tuple[Tape, Sequence[Value], Sequence[Shape], Value] | None = (tape, inputs, shapes, out)

    def __call__(self, dout: ArrayLike) -> Any:
        """The gradients of the inputs, and the dict of those of the parameters."""
        func = self._func
        if self._kept is None:
            raise RuntimeError(f"{func}(): its pullback was called before; each forward pass has one")
        if _versions(self._layers) != self._versions:
            raise RuntimeError(f"{func}(): the weights have changed since; call it again for their gradients")
        tape, inputs, shapes, out = self._kept
        array = like(func, "dout", dout, self._shape, out.array.dtype, "the result")
        if array is None:
            raise TypeError(f"{func}(): dout is None; expected an array")
        self._kept = None
        tape.pull(out, rows(array))
        found = (x.found().reshape(shape) for x, shape in zip(inputs, shapes, strict=True))
        return *found, *(named_gradients(layer, tape) for layer in self._layers)


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
    func = f"{type(layer).__name__}.forward_backward"
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
    return result, Pullback(
        func, layers, versions, tape, values, [x.shape for x in inputs], out, result.shape
    )


def refuse_cache(func: str, options: Mapping[str, Any]) -> None:
    """Raise if there is a cache among `options`."""
    for name in ("cache", "lengths", "keys_values"):
        if options.get(name) is not None:
            expected = "none: keys and values of earlier calls have no gradients"
            raise ValueError(f"{func}.forward_backward(): {name} is given; expected {expected}")
