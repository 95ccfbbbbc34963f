"""Parameters of an optimizer: those of a layer, of a tuning, or of several layers and arrays by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastattn.layers._state import Layer
from fastattn.train._checks import plain
from fastattn.train._tuning import Tuning

if TYPE_CHECKING:
    from fastattn._args.types import Array


class Layers(Layer):
    """Several layers as one: the parameters of each have its name in front."""

    weights_dtype = "float32"  # it has no weights itself

    def __init__(self, layers: Mapping[str, Layer]):
        self._layers = layers

    def _children(self) -> dict[str, Layer]:
        return {f"{name}.": layer for name, layer in self._layers.items()}


def held_by(parameters: Any) -> tuple[Layer | Tuning | None, dict[str, Array]]:
    """Return what is packed again after a step, if anything is, and all arrays that a step changes."""
    if isinstance(parameters, Tuning):
        return parameters, parameters._run.parameters
    if isinstance(parameters, Layer):
        return parameters, parameters.state_dict()
    given = parameters if isinstance(parameters, Mapping) else {}
    layers = {name: x for name, x in given.items() if isinstance(x, Layer)}
    if not layers:
        return None, plain(parameters)
    others = {name: x for name, x in given.items() if name not in layers}
    arrays = plain(others) if others else {}
    seen: dict[int, str] = {}
    for name, layer in layers.items():
        if not isinstance(name, str):
            raise TypeError(f"(): parameters has the key {name!r}; expected names of layers and arrays")
        for part in {id(part) for _, part in layer._walk()}:
            if part in seen:
                came = f"parameters[{seen[part]!r}] and parameters[{name!r}] share a layer"
                raise ValueError(f"(): {came}; expected one of them")
            seen[part] = name
        for inner, array in layer.state_dict().items():
            if f"{name}.{inner}" in arrays:
                came = f"parameters has {name + '.' + inner!r} twice"
                raise ValueError(f"(): {came}; expected layers and arrays of other names")
            arrays[f"{name}.{inner}"] = array
    return Layers(layers), arrays
