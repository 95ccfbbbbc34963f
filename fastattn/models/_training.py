"""Gradients of models, by the names of the tensors in their files; and models that are trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastattn._args.ops import like, rows
from fastattn.grad import Pullback
from fastattn.models._tensors import Tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from numpy.typing import ArrayLike

    from fastattn._args.types import Array, Bools, Shape
    from fastattn._engine.tape import Tape
    from fastattn._engine.values import Value
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


def pullback_of(recorded: Recorded, mask: Bools | None, shape: Shape) -> Pullback:
    """Map from the gradient of a result of `shape` to those of a model's tensors, by their names.

    It does not read its argument where a token does not count.
    """
    dtype = recorded.out.array.dtype

    def check(dout: ArrayLike) -> tuple[Array]:
        array = like("dout", dout, shape, dtype, "the result")
        if array is None:
            raise TypeError("(): dout is None; expected an array")
        return (array,)

    def back(dout: Array) -> dict[str, Array]:
        return recorded.gradients(rows(dout) if mask is None else dout[mask])

    return Pullback(check, back)


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
