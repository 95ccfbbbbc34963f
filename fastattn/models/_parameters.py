"""Parameters of models: the tensors that each is made of, and what makes it, or makes it again in place.

Gradients go back the same way, from parameters to the tensors of the files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fastattn._args.dtypes import dtype_choice
from fastattn._args.errors import wrong_type
from fastattn._args.ops import integer_activations
from fastattn._args.packed import PackArgs, PackedLinear
from fastattn._args.types import Array, ArrayLike, Rounding, Shape, lane_dtype
from fastattn._args.values import as_array, is_float, short
from fastattn._args.weight_types import BLOCK, BLOCKED, INTEGERS, OF_FLOAT32, STORED
from fastattn._engine.settings import get_num_threads
from fastattn._engine.values import Gradients, Parameter
from fastattn.models._files import ModelError, require
from fastattn.models._tensors import Part, Tensors

DTYPES = ("float32", "float64", "bfloat16")
OF_FILE = "file"  # of each tensor the type that the file has it in, or the nearest one
_Model = TypeVar("_Model")


@dataclass(frozen=True, slots=True)
class Precision:
    """The type between a model's layers, how it keeps their weights, and what it rounds their inputs to."""

    dtype: np.dtype[Any]
    weights: str
    activations: Rounding | None = None

    @classmethod
    def of(cls, dtype: Any, weights_dtype: Any, activations: Any, of_file: bool = False) -> Precision:
        """Check the names or types that a caller gives; `of_file`, a file may have types of its own."""
        name = dtype_choice("dtype", dtype, DTYPES)
        fitting = ("float64",) if name == "float64" else OF_FLOAT32 + (OF_FILE,) * of_file
        usual = OF_FILE if OF_FILE in fitting else name
        weights = usual if weights_dtype is None else weights_dtype
        hint = "" if name == "float64" else "; float64 comes with dtype='float64'"
        weights = dtype_choice("weights_dtype", weights, fitting, f" for dtype {name}{hint}")
        integer_activations(activations, "q8" if weights == OF_FILE else weights)  # a file may have blocks
        kind = np.dtype(require("ml_dtypes").bfloat16 if name == "bfloat16" else name)
        return cls(kind, weights, activations)

    @property
    def lane(self) -> np.dtype[Any]:
        """The type that the kernels compute in."""
        return lane_dtype(self.dtype)

    def rounding(self, weight: PackedLinear) -> Rounding | None:
        """The rounding of a map's inputs: in a file's own types, only of weights that are integers."""
        return self.activations if weight.dtype in INTEGERS else None

    def __str__(self) -> str:
        how = "as in the file" if self.weights == OF_FILE else f"in {self.weights}"
        kept = "" if self.weights == self.dtype.name else f", weights {how}"
        rounded = "" if self.activations is None else f", activations in {self.activations}"
        return f"{self.dtype}{kept}{rounded}"


class Whole(NamedTuple):
    """Makes an array that is a tensor, in the tensor's type."""

    def make(self, parts: Sequence[Part], tensors: Tensors, over: Any = None) -> Array:
        """Make it: a new one, or the earlier one `over` again, in place."""
        return tensors.whole(parts[0].name, over)


class Vector(NamedTuple):
    """Makes an array of rows end to end; a constant, or the first row of another tensor, is added.

    The sum is multiplied by `scale`. Where the rows are ``-exp(x)``, `of_rates`, they become x first.
    """

    shape: Shape
    dtype: np.dtype[Any]
    offset: float = 0.0
    added: str | None = None
    scale: float = 1.0
    of_rates: bool = False

    def make(self, parts: Sequence[Part], tensors: Tensors, over: Any = None) -> Array:
        """Make it; see `Whole`."""
        lane = lane_dtype(self.dtype)
        arrays = [np.atleast_1d(tensors.whole(part.name)) for part in parts]
        rows = zip(arrays, parts, strict=True)
        found: Array = np.concatenate(
            [x[p.begin : p.begin + p.rows].astype(lane, copy=False) for x, p in rows]
        )
        if self.of_rates:
            if not (found < 0).all():
                what = "numbers that are not below 0; expected -exp(x)"
                raise ModelError(f"{tensors.where}: {parts[0].name!r} has {what}")
            found = np.log(-found)
        if self.offset:
            found += lane.type(self.offset)
        if self.added is not None:
            found += tensors.whole(self.added)[0].astype(lane, copy=False)
        if self.scale != 1:
            found *= lane.type(self.scale)
        if over is None:
            return found.reshape(self.shape).astype(self.dtype, copy=False)
        over[...] = found.reshape(self.shape)
        return np.asarray(over)

    def pulled(self, gradient: Array, vector: Any) -> Array:
        """The gradient of the rows from that of the `vector` that they became."""
        if self.of_rates:
            gradient = gradient * -np.exp(-vector)
        return gradient if self.scale == 1 else gradient * gradient.dtype.type(self.scale)


class Packed(NamedTuple):
    """Makes the packed weight of a linear map, or of a gated pair of `maps`."""

    in_features: int
    out_features: int
    maps: int
    stored: str
    tiles: tuple[int, int] = 1, 1  # of the input features in the file: see `PackArgs`

    @property
    def dtype(self) -> str:
        """Type of the weight; this takes its place while tensors are checked."""
        return self.stored

    @property
    def panels(self) -> Array:
        """The numbers, of which there are none yet."""
        return np.zeros(0)

    def make(self, parts: Sequence[Part], tensors: Tensors, over: Any = None) -> PackedLinear:
        """Make it; see `Whole`."""
        sizes, tiles = self[:4], self.tiles
        unit = BLOCK if self.stored in BLOCKED else STORED[self.stored].features
        head = self.in_features // math.prod(tiles)
        if min(tiles) > 1 and head % unit:
            expected = f"a multiple of {unit} for weights in {self.stored}"
            raise ModelError(f"{tensors.where}: {parts[0].name!r} has heads of {head}; expected {expected}")
        return tensors.pack(parts, PackArgs([], *sizes, get_num_threads(), over, tiles))

    def pulled(self, gradient: Array, _: Any) -> Array:
        """The gradient of the tensors from that of the weight."""
        if min(self.tiles) == 1:
            return gradient
        grouped = gradient.reshape(*gradient.shape[:-1], *self.tiles[::-1], -1)
        return grouped.swapaxes(-2, -3).reshape(gradient.shape)


class Computed(NamedTuple):
    """Makes what ``function(tensors, *names)`` returns: always a new array, or packed weight."""

    function: Callable[..., Any]  # which pickle finds

    def make(self, parts: Sequence[Part], tensors: Tensors, over: Any = None) -> Any:
        """Make it; see `Whole`."""
        return self.function(tensors, *(part.name for part in parts))


Maker = Whole | Vector | Packed | Computed


class Made(NamedTuple):
    """A parameter, what it consists of, and what made it."""

    parameter: Parameter
    parts: tuple[Part, ...]
    maker: Maker

    def reads(self, names: Collection[str]) -> bool:
        """Tell whether it depends on one of the tensors `names`."""
        return getattr(self.maker, "added", None) in names or any(part.name in names for part in self.parts)


class Parameters:
    """Parameters of a model, each known by identity."""

    def __init__(self, made: Sequence[Made] = ()) -> None:
        self._made = list(made)

    def __iter__(self) -> Iterator[Made]:
        return iter(self._made)

    def make(self, maker: Maker, parts: Sequence[Part], tensors: Tensors) -> Any:
        """A new parameter."""
        made = maker.make(parts, tensors)
        self._made.append(Made(made, tuple(parts), maker))
        return made

    def shapes(self) -> dict[str, Shape]:
        """The shapes of the tensors, by their names."""
        return {part.name: part.shape for made in self._made for part in made.parts}

    def maps(self, but: Any) -> set[str]:
        """The names of the tensors that are weights of linear maps, but for those in the parameter `but`."""
        maps = [made for made in self._made if isinstance(made.parameter, PackedLinear)]
        left_out = {part.name for made in maps if made.parameter is but for part in made.parts}
        return {part.name for made in maps for part in made.parts} - left_out

    def gradients(self, gradients: Gradients) -> dict[str, Array]:
        """Gradients of tensors, by their names, from those of parameters."""
        found: dict[str, Array] = {}
        for made in self._made:
            gradient = gradients.of(made.parameter)
            if gradient is None:
                continue
            if isinstance(made.maker, (Vector, Packed)):
                gradient = made.maker.pulled(gradient, made.parameter)
            for part in made.parts:
                _add(found, part, gradient)
        return found

    def again(self, tensors: Tensors, changed: Collection[str], own: Collection[int] = ()) -> dict[int, Made]:
        """Make parameters of `changed` tensors again: those whose ids are in `own` in place, if they can be.

        Returns the others, which are new, by the ids of those that they replace.
        """
        new, in_place = {}, []
        for old, parts, maker in self._made:
            if not Made(old, parts, maker).reads(changed):
                continue
            if id(old) in own and not isinstance(maker, Computed):
                in_place.append((old, parts, maker))
            else:
                new[id(old)] = Made(maker.make(parts, tensors), parts, maker)
        for old, parts, maker in in_place:  # last: the others may fail, as for want of memory
            maker.make(parts, tensors, old)
        return new


def _add(found: dict[str, Array], part: Part, gradient: Array) -> None:
    """Add what `gradient`, of a parameter, has of a part to that of the part's tensor."""
    flat = gradient.reshape(-1) if len(part.shape) < 2 else gradient.reshape(-1, gradient.shape[-1])
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
    """Origin of a model's parameters: a folder, or other tensors in place of the folder's."""

    folder: Path
    precision: Precision
    parameters: Parameters
    state: Mapping[str, Array] | None = None  # tensors in place of those of the folder's files

    def state_dict(self) -> dict[str, Array]:
        """Copies of the tensors that the parameters consist of."""
        with ExitStack() as stack:
            read = self.reader(stack)
            return {name: read(name) for name in self.parameters.shapes()}

    def reader(self, stack: ExitStack) -> Callable[[str], Array]:
        """Function that copies a tensor, in the type of the kernels, while `stack` is open."""
        lane, state = self.precision.lane, self.state
        if state is not None:
            return lambda name: state[name].astype(lane)
        tensors = Tensors.of_folder(self.folder, lane.name, stack)
        return lambda name: tensors.whole(name).astype(lane, copy=False)

    def changed(self, model: _Model, state_dict: Mapping[str, ArrayLike]) -> _Model:
        """`model`, whose origin this is, with other tensors: `with_state_dict`."""
        state = self._checked(state_dict)
        new = self.parameters.again(Tensors.of_state(state, self.precision.weights), state)
        return self.with_parameters(model, new, state)

    def with_parameters(
        self, model: _Model, new: Mapping[int, Made], state: Mapping[str, Array] | None
    ) -> _Model:
        """`model`, whose origin this is, with parameters `new`, as from `Parameters.again`, of a `state`."""
        parameters = Parameters([new.get(id(made.parameter), made) for made in self.parameters])
        origin = self._replace(parameters=parameters, state=state)
        held = {key: made.parameter for key, made in new.items()}
        found: _Model = substituted(model, {id(self): origin, **held})
        return found

    def _checked(self, state: Mapping[str, ArrayLike]) -> dict[str, Array]:
        """`state` as arrays of their own, or one error with all that does not fit."""
        if not isinstance(state, Mapping):
            expected = "a mapping of names to arrays, as safetensors.numpy.load_file(path) returns"
            raise wrong_type("state_dict", state, expected)
        shapes = self.parameters.shapes()
        arrays = {name: as_array(name, x) for name, x in state.items()}
        problems = [f"missing: {name} {shape}" for name, shape in shapes.items() if name not in arrays]
        for name, array in arrays.items():
            if name not in shapes:
                problems.append(f"not known: {short(name)}")
            elif array.shape != shapes[name]:
                problems.append(f"{name}: shape {array.shape}, expected {shapes[name]}")
            elif not is_float(array.dtype):
                problems.append(f"{name}: dtype {array.dtype}, expected a floating type")
        if problems:
            raise ValueError("\n  ".join(["():", *problems]))
        return {name: np.array(array, order="C") for name, array in arrays.items()}


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
        names: set[str] = self.current.origin.parameters.maps(self.current.embeddings.tokens)
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


def required(origin: Origin | None) -> Origin:
    """`origin`, which models have that `load` made."""
    if origin is None:
        raise ValueError("(): the model has no files; expected one that load() made")
    return origin


def substituted(x: Any, new: Mapping[int, Any]) -> Any:
    """`x` with other objects in place of those whose ids are in `new`; what holds none of them is shared."""
    if id(x) in new:
        return new[id(x)]
    if is_dataclass(x) and not isinstance(x, type):
        held = {field.name: getattr(x, field.name) for field in fields(x) if field.init}
        found = {name: substituted(value, new) for name, value in held.items()}
        changed = {name: value for name, value in found.items() if value is not held[name]}
        return replace(x, **changed) if changed else x
    if isinstance(x, tuple):
        items = [substituted(item, new) for item in x]
        if all(item is old for item, old in zip(items, x, strict=True)):
            return x
        return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
    return x
