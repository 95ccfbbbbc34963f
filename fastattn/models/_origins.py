"""Which tensors of a model's files its parameters consist of: gradients go back the same way."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._args.packed import PackedLinear

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from fastattn._args.types import Array, Shape
    from fastattn._engine.tape import Gradients, Parameter
    from fastattn.models._files import Config
    from fastattn.models._weights import Precision


class Part(NamedTuple):
    """Rows of a tensor that are rows of a parameter; of a vector, elements are rows."""

    name: str  # as the file has it
    shape: Shape  # of the whole tensor
    rows: int  # how many
    first: int  # in the parameter, where maps of a gated pair follow one another
    begin: int = 0  # in the tensor
    transposed: bool = False  # the tensor is (in, out)

    @property
    def is_vector(self) -> bool:
        """Whether the tensor has one axis."""
        return len(self.shape) < 2


class Origins:
    """Of each parameter, which is known by identity, its parts."""

    def __init__(self) -> None:
        self._parts: list[tuple[Parameter, tuple[Part, ...]]] = []
        self.made: dict[Any, Parameter] = {}  # those read of the files as they are, by what was asked for

    def note(self, parameter: Parameter, parts: Sequence[Part]) -> None:
        """Say what `parameter` consists of."""
        self._parts.append((parameter, tuple(parts)))

    def of(self, parameter: Parameter) -> tuple[Part, ...]:
        """What it consists of."""
        return next((parts for held, parts in reversed(self._parts) if held is parameter), ())

    def shapes(self) -> dict[str, Shape]:
        """The tensors' shapes, by their names."""
        return {part.name: part.shape for _, parts in self._parts for part in parts}

    def maps(self) -> set[str]:
        """The names of the tensors that are weights of linear maps."""
        held = (parts for parameter, parts in self._parts if isinstance(parameter, PackedLinear))
        return {part.name for parts in held for part in parts}

    def tensors(self, gradients: Gradients) -> dict[str, Array]:
        """Gradients of tensors, by their names, from those of parameters."""
        found: dict[str, Array] = {}
        for parameter, parts in self._parts:
            gradient = gradients.of(parameter)
            for part in parts if gradient is not None else ():
                assert gradient is not None
                _add(found, part, gradient)
        return found


def _add(found: dict[str, Array], part: Part, gradient: Array) -> None:
    flat = gradient.reshape(-1) if part.is_vector else gradient.reshape(-1, gradient.shape[-1])
    own = flat[part.first : part.first + part.rows]
    own = own.T if part.transposed else own
    if part.name not in found and own.size == math.prod(part.shape):
        found[part.name] = own.reshape(part.shape)
        return
    if part.name not in found:
        found[part.name] = np.zeros(part.shape, own.dtype)
    elif not (found[part.name].flags.writeable and found[part.name].flags.owndata):
        found[part.name] = found[part.name].copy()  # it is a view of a parameter's gradient
    whole = found[part.name]
    there = whole if part.transposed else whole[part.begin : part.begin + part.rows]
    there += own.reshape(there.shape)


class Origin(NamedTuple):
    """Where a model comes from."""

    folder: Path
    outer: Path
    config: Config
    precision: Precision
    origins: Origins
    state: Mapping[str, Array] | None = None  # tensors in place of those of the files
