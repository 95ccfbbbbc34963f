"""Gradients of models, by the names of the tensors in their files; and models that are trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastattn._args.ops import like, rows
from fastattn.models._tensors import Tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from numpy.typing import ArrayLike

    from fastattn._args.types import Array, Bools, Shape
    from fastattn._engine.tape import Tape, Value
    from fastattn.models._parameters import Origin


@dataclass(slots=True, eq=False)
class Recorded:
    """A forward pass on a tape, of the tokens that count, end to end."""

    tape: Tape
    out: Value  # hidden states (tokens, hidden_size)
    finish: Callable[[], None]  # adds the gradients of what made the program's input
    origin: Origin

    def gradients(self, dout: Array) -> dict[str, Array]:
        """Gradients of the tensors, from the gradient of `out`."""
        self.tape.pull(self.out, dout)
        self.finish()
        return self.origin.parameters.gradients(self.tape.gradients)


class Pullback:
    """Function from the gradient of hidden states to those of a model's tensors, by name; call it once.

    ``pullback(dout)`` takes the gradient of a scalar with respect to the hidden states, in their shape and
    dtype. What stands where a token does not count is not read. Gradients are float32, in float64 float64.
    Weights in int8, int4 and nf4 have none.
    """

    def __init__(self, func: str, recorded: Recorded, mask: Bools | None, shape: Shape):
        self._func, self._mask, self._shape = f"{func}.forward_backward", mask, shape
        self._dtype, self._recorded = recorded.out.array.dtype, recorded
        self._called = False

    def __call__(self, dout: ArrayLike) -> dict[str, Array]:
        """The gradients."""
        if self._called:
            raise RuntimeError(f"{self._func}(): its pullback was called before; each forward pass has one")
        array = like(self._func, "dout", dout, self._shape, self._dtype, "the result")
        if array is None:
            raise TypeError(f"{self._func}(): dout is None; expected an array")
        self._called = True
        return self._recorded.gradients(rows(array) if self._mask is None else array[self._mask])


class TunedModel:
    """A model whose tensors change while it is trained: from the first change on, in place.

    `current` computes with the tensors as they are, and must be passed on to nobody: see `snapshot`.
    """

    def __init__(self, model: Any):
        self.current = model
        self.tensors: dict[str, Array] = model.state_dict()  # and arrays of others, which `put` was given
        self._own: set[int] = set()  # ids of parameters that are nobody else's

    def maps(self) -> set[str]:
        """The names of the weights of linear maps, without a table of tokens that is the output layer."""
        names: set[str] = self.current.origin.parameters.maps(getattr(self.current, "tokens", None))
        return names

    def put(self, tensors: Mapping[str, Array]) -> None:
        """Take over `tensors`, which may change until the next call.

        If they cannot be stored, or something else fails, the model is unusable until the next call.
        """
        self.tensors |= tensors
        origin: Origin = self.current.origin
        held = Tensors.of_state(self.tensors, origin.precision.weights)
        new = origin.parameters.again(held, tensors.keys(), self._own)
        if new:
            self.current = origin.with_parameters(self.current, new, None)
            self._own |= {id(made.parameter) for made in new.values()}

    def snapshot(self, changing: Collection[str]) -> Any:
        """The model as it is now, which stays so; it has copies of the tensors that are `changing`."""
        if self._own:
            state = {name: x.copy() if name in changing else x for name, x in self.tensors.items()}
            self.current = self.current.origin.with_parameters(self.current, {}, state)
            self._own.clear()
        return self.current
