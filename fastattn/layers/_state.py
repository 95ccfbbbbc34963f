"""The base of all layers: parameters by name, which can be loaded and saved.

A layer says which parameters it holds (`_parameters`), which other layers it consists of (`_children`), how
named arrays become its fields (`_pack`) and how its fields become named arrays again (`_named`). Loading
packs everything first and assigns last, so that an error changes nothing.

A layer checks its fields once, so they cannot be set afterwards. Only a part can be replaced, by another that
fits. After a change to any layer, every layer checks its parts once more before it computes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import prod
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from fastattn._args.dtypes import dtype_choice
from fastattn._args.errors import named, put_name, told, wrong_type
from fastattn._args.ops import integer_activations
from fastattn._args.packed import PackedLinear
from fastattn._args.types import Array, DTypeLike, Rounding, Shape
from fastattn._args.values import MOST_SIZE, as_array, generator, is_float, short
from fastattn._args.weight_types import WEIGHT_DTYPES, is_finite
from fastattn._args.words import not_an_argument
from fastattn._safetensors import opened
from fastattn.layers import _computation
from fastattn.ops import pack

if TYPE_CHECKING:
    from typing_extensions import Self

    from fastattn._engine.values import Gradients
    from fastattn._safetensors import TensorFile
    from fastattn.grad import Pullback

    Fields = dict[str, Any]
    Draw = Callable[[np.random.Generator, Shape], Array]
    # From what a field holds to an array in plain layout: itself, or its gradient. None: there is none.
    Taken = Callable[[Array | PackedLinear | None], Array | None]


_EARLIER = "none: keys and values of earlier calls have no gradients"
_WITHOUT_GRADIENTS = {  # options of calls, and what is expected where there are gradients
    **dict.fromkeys(("cache", "lengths", "keys_values"), _EARLIER),
    "state": "none: tokens of earlier calls have no gradients",
    "out": "None: the pullback reads the result",
    "residual": "None: add it outside of the layer, where it has the gradient of the sum",
    **dict.fromkeys(("need_weights", "average_attn_weights"), "none: weights have no gradients"),
}


class Parameter(NamedTuple):
    """One array that a layer holds."""

    shape: Shape
    draw: Draw  # its random initialisation
    or_none: bool = False  # it may hold -inf, which means "none"; all others are finite

    def drawn(self, name: str, rng: np.random.Generator) -> Array:
        """The random initialisation; `name` is what messages call it."""
        if prod(self.shape) > MOST_SIZE:
            raise ValueError(f"(): {name} would have shape {self.shape}; expected a smaller one")
        return self.draw(rng, self.shape)


def constant(value: float) -> Draw:
    """One value everywhere; nothing is drawn."""
    return lambda rng, shape: np.full(shape, value)


def uniform(bound: float) -> Draw:
    """Uniform in [-bound, bound)."""
    return lambda rng, shape: rng.uniform(-bound, bound, shape)


def linear(name: str, out_features: int, in_features: int, bias: bool = False) -> dict[str, Parameter]:
    """The parameters of a linear map."""
    draw = uniform(in_features**-0.5)
    more = {f"{name}.bias": Parameter((out_features,), draw)} if bias else {}
    return {f"{name}.weight": Parameter((out_features, in_features), draw), **more}


def normal(deviation: float) -> Draw:
    """Normal, around 0."""
    return lambda rng, shape: rng.normal(0, deviation, shape)


def xavier_uniform(rng: np.random.Generator, shape: Shape) -> Array:
    """Uniform with variance 2 / (fan_in + fan_out), for a weight (fan_out, fan_in) (Glorot & Bengio 2010)."""
    bound = (6 / (shape[0] + shape[1])) ** 0.5
    return rng.uniform(-bound, bound, shape)


def lane_of(weights_dtype: str) -> np.dtype[Any]:
    """Type of biases and norms beside weights stored as `weights_dtype`."""
    return np.dtype(np.float64 if weights_dtype == "float64" else np.float32)


# The last change to any layer, a new object each: what was derived at another one may be out of date.
last_change = object()


class ParametersMissing(AttributeError, ValueError):
    """A layer is used before it has parameters; for `hasattr`, an attribute that is not there."""


def _building(post_init: Callable[..., None]) -> Callable[..., None]:
    """Decorate a `__post_init__`: its errors get the name of the outermost layer that is being made."""

    @functools.wraps(post_init)
    def checked(self: Layer, *args: Any) -> None:
        try:
            post_init(self, *args)
        except Exception as error:
            put_name(type(self).__name__, error, error.__dict__.get("layer", ""))
            error.__dict__["layer"] = type(self).__name__
            raise

    return checked


class Layer:
    """A layer with the named parameters of torch's modules.

    Without ``rng=`` it has none, and cannot be called, until `load_state_dict`.
    """

    weights_dtype: str
    activations: Rounding | None = None  # what the inputs of its linear maps are rounded to
    _changes = 0  # how often its fields were set: whether optimizers and pullbacks know its weights
    _built = False  # True from the end of construction on: fields cannot be set any more
    # Names of parameters that are kept as they are, in the lane type, or packed; the fields that hold them.
    _vectors: ClassVar[tuple[tuple[str, str], ...]] = ()
    _matrices: ClassVar[tuple[tuple[str, str], ...]] = ()
    _parts: ClassVar[tuple[str, ...]] = ()  # fields that hold other layers

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        call = next((vars(c)["__call__"] for c in cls.__mro__ if "__call__" in vars(c)), None)
        if isinstance(call, FunctionType) and not hasattr(call, "computation"):
            # A subclass may share it, and Python's own errors call it by its name.
            how = "__call__", call.__defaults__, call.__closure__
            own: Any = functools.update_wrapper(FunctionType(call.__code__, call.__globals__, *how), call)
            own.__kwdefaults__, own.__qualname__ = call.__kwdefaults__, f"{cls.__name__}.__call__"
            cls.__call__ = own  # type: ignore[method-assign]
        if "__post_init__" in vars(cls):
            cls.__post_init__ = _building(vars(cls)["__post_init__"])  # type: ignore[attr-defined]

    def __new__(cls, *args: Any, **named: Any) -> Self:
        """Raise if an argument has a name that only another library knows; else as usual."""
        fields = vars(cls).get("__dataclass_fields__")
        if fields and not fields.keys() >= named.keys():
            error = not_an_argument(named, cls.__init__)
            put_name(cls.__name__, error)
            raise error
        return super().__new__(cls)

    def _parameters(self) -> dict[str, Parameter]:
        """Parameters that this layer itself holds, in torch's order."""
        return {}

    def _children(self) -> dict[str, Layer]:
        """Parts of the layer, by the prefix of their parameters' names."""
        return {f"{name}.": getattr(self, name) for name in self._parts}

    def _pack(self, arrays: Mapping[str, Array], weights_dtype: str) -> Fields:
        """The fields that hold the own parameters `arrays`; here of `_matrices` and `_vectors`."""
        lane = lane_of(weights_dtype)
        packed = {field: pack(arrays[name], dtype=weights_dtype) for name, field in self._matrices}
        held = ((field, arrays.get(name)) for name, field in self._vectors)
        return packed | {field: None if x is None else x.astype(lane) for field, x in held}

    def _named(self, plain: Taken) -> dict[str, Array]:
        """Results of `plain` for the fields, by the names that `_pack` takes."""
        held = ((name, plain(getattr(self, field))) for name, field in self._matrices + self._vectors)
        return {name: array for name, array in held if array is not None}

    def _computation(self, *inputs: Any, **options: Any) -> Any:
        """A call, checked: a `Computation`."""
        return type(self).__call__.computation(self, *inputs, **options)  # type: ignore[attr-defined]

    def _vjp(
        self,
        *inputs: Any,
        checkpoint: bool = False,
        dropout: float = 0.0,
        seed: int | None = None,
        **options: Any,
    ) -> tuple[Any, Pullback]:
        """The result of a call, and its pullback: see `fastattn.grad.vjp`."""
        if options.get("need_weights") is False:
            del options["need_weights"]
        for name, given in options.items():
            if given is not None and name in _WITHOUT_GRADIENTS:
                expected = _WITHOUT_GRADIENTS[name]
                raise ValueError(f"(): {name} is given; expected {expected}")
        options = {name: x for name, x in options.items() if name not in _WITHOUT_GRADIENTS}
        call = getattr(type(self).__call__, "computation", type(self)._computation)
        try:
            computation = _computation.Computation(*call(self, *inputs, **options))
            return computation.with_pullback(checkpoint, dropout, seed)
        except Exception as error:
            name, own = type(self).__name__, call.__qualname__
            raise told(error, name, call, options, inner=own) from error.__cause__

    def _settle(self, gradients: Gradients) -> None:
        """Move gradients of packed parameters to the fields that share them."""

    def __getattr__(self, name: str) -> Any:
        """Raise: `name` is a field that waits for parameters, or no attribute at all."""
        if name in type(self).__dict__.get("__dataclass_fields__", ()):
            how = "load_state_dict() them, or build it with rng=numpy.random.default_rng()"
            raise ParametersMissing(f"{type(self).__name__} has no parameters yet; {how}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _place(self) -> str:
        """Description of the layer from outside; a layer with an equal one can replace it."""
        return f"a {type(self).__name__}"

    def __setattr__(self, name: str, value: Any) -> None:
        if self._built and not name.startswith("_"):
            self._replace(name, value)
        else:
            object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be deleted")

    def _replace(self, name: str, value: Any) -> None:
        """Set the part `name` to `value`, if that fits. No other field can be set."""
        there = self.__dict__.get(name)
        if not isinstance(there, Layer):
            why = "parameters change by load_state_dict(), and another size or option makes another layer"
            raise AttributeError(f"{type(self).__name__}.{name} cannot be set: {why}")
        if not isinstance(value, Layer) or value._place() != there._place():
            came = value._place() if isinstance(value, Layer) else short(value)
            raise ValueError(f"{type(self).__name__}.{name} is set to {came}; expected {there._place()}")
        self._change({name: value})

    def _change(self, fields: Fields) -> None:
        """Set `fields`, which fit."""
        global last_change
        self.__dict__.update(fields, _changes=self._changes + 1)
        last_change = object()

    def _require_parts(self) -> None:
        """Raise unless all parts have parameters and compute in this layer's type.

        It looks only after a change to a layer.
        """
        change = last_change
        if self.__dict__.get("_checked_at") is change:
            return
        lane = lane_of(self.weights_dtype)
        for prefix, part in self._walk():
            with self._naming(prefix, part):
                for name in vars(type(part)).get("__dataclass_fields__", ()):
                    if name not in ("_", "rng"):  # not fields
                        getattr(part, name)  # raises if the part waits for it
            if lane_of(part.weights_dtype) != lane:
                came = f"its part {prefix}{type(part).__name__} has weights in {part.weights_dtype}"
                expected = f"ones that compute in {lane}, as the layer's own in {self.weights_dtype} do"
                raise TypeError(f"(): {came}; expected {expected}")
        self.__dict__["_checked_at"] = change

    def _set_up(self, rng: np.random.Generator | int | None) -> None:
        """Draw the parameters, or leave them out without `rng`. This is the last step of construction."""
        self.__dict__["weights_dtype"] = dtype_choice("weights_dtype", self.weights_dtype, WEIGHT_DTYPES)
        self.__dict__["_built"] = True
        self._require_rounding(self.weights_dtype)
        source = self._source(rng)
        if source is not None:
            arrays = {key: p.drawn(key, source) for key, p in self._parameters().items()}
            self._change(self._pack(arrays, self.weights_dtype))

    def _require_rounding(self, weights_dtype: str) -> None:
        """Raise unless `activations` fits weights that are stored as `weights_dtype`."""
        widest = max((p.shape[1] for p in self._parameters().values() if len(p.shape) == 2), default=0)
        integer_activations(self.activations, weights_dtype, widest)

    def _source(self, rng: np.random.Generator | int | None) -> np.random.Generator | None:
        """Generator of parameters: `rng`, or one of this seed, made once for all parts."""
        return None if rng is None else generator("rng", rng)

    def _versions(self) -> dict[str, tuple[Layer, int]]:
        """The layer and all below it, and how often each has changed: the same as long as its weights are."""
        return {prefix: (part, part._changes) for prefix, part in self._walk()}

    def _walk(self, prefix: str = "") -> Iterator[tuple[str, Layer]]:
        """The layer and all below it, with the prefixes of their names."""
        yield prefix, self
        for name, child in self._children().items():
            yield from child._walk(prefix + name)

    def parameters(self) -> dict[str, Parameter]:
        """Return shape and random initialisation of all parameters by name, including parts."""
        return {
            prefix + name: parameter
            for prefix, layer in self._walk()
            for name, parameter in layer._parameters().items()
        }

    def state_dict(self) -> dict[str, Array]:
        """Return copies of all parameters by torch's names, in float32, or float64 where stored so."""
        return self._all_named(copied)

    def _all_named(self, plain: Taken) -> dict[str, Array]:
        """Results of `plain` for all parameters, by name, in torch's order."""
        found: dict[str, Array] = {}
        for prefix, part in self._walk():
            with self._naming(prefix, part):
                found |= {prefix + name: array for name, array in part._named(plain).items()}
        return {name: found[name] for name in self.parameters() if name in found}

    @contextmanager
    def _naming(self, prefix: str, part: Layer) -> Iterator[None]:
        """Let the error of a part without parameters say whose part it is."""
        try:
            yield
        except ParametersMissing as missing:
            if part is self:
                raise
            raise ParametersMissing(f"{type(self).__name__}'s part {prefix}{missing}") from None

    @named("{cls}.load_state_dict")
    def load_state_dict(
        self,
        state_dict: Mapping[str, Any] | str | os.PathLike[str],
        *,
        prefix: str = "",
        weights_dtype: DTypeLike | None = None,
    ) -> None:
        """Load all parameters, by the names of torch's modules, and pack the weights.

        Parameters
        ----------
        state_dict : mapping of str to array_like, or path
            Arrays of any floating type: ``np.load("x.npz")``, or a torch module's ``state_dict()``. Or a
            safetensors file (requires the safetensors package).
        prefix : str, default ""
            Read only names that start with it, and remove it: for one layer of a whole model.
        weights_dtype : str, optional
            New type of the stored weights, a `dtype` of `fastattn.ops.pack`; default unchanged. With
            ``activations="int8"``, only int8 and types of blocks.

        Raises
        ------
        TypeError, ValueError
            If names are missing or unknown, or arrays do not fit; one message lists all, and nothing changes.
        FileNotFoundError
            If `state_dict` is a path, and no file is there.

        Notes
        -----
        NaN, infinities, and numbers that are infinite in the stored type raise. Only ``sinks``, which are
        logits, may be -inf: no sink for that head.
        """
        if weights_dtype is not None:
            weights_dtype = dtype_choice("weights_dtype", weights_dtype, WEIGHT_DTYPES)
        with ExitStack() as stack:
            names, read, _ = reader(state_dict, prefix, stack)
            # Walk once: another thread may replace a part meanwhile.
            walked = [(path, layer, weights_dtype or layer.weights_dtype) for path, layer in self._walk()]
            for _, layer, dtype in walked:
                layer._require_rounding(dtype)
            known = {
                path + name: (parameter, dtype)
                for path, layer, dtype in walked
                for name, parameter in layer._parameters().items()
            }
            arrays = checked_state(known, names, read, prefix)
            packed = []
            for path, layer, dtype in walked:
                own = {name: arrays[path + name] for name in layer._parameters()}
                packed.append((layer, {"weights_dtype": dtype, **layer._pack(own, dtype)}))
        for layer, fields in packed:
            layer._change(fields)

    @named("{cls}")
    def _repack(self, arrays: Mapping[str, Array], changed: Collection[str]) -> None:
        """Take over those of `arrays`, in the lane type, whose names are `changed`; all or none.

        Only the parts that hold them are packed again. `arrays` has the other parameters of these, too.
        """
        packed = []
        for path, layer in self._walk():
            own = {name: arrays[path + name] for name in layer._parameters()}
            if not any(path + name in changed for name in own):
                continue
            for name, array in own.items():
                if array.ndim < 2 and not is_finite(array, array.dtype.name, or_none=True):
                    raise ValueError(
                        f"(): {path + name} has values that are not finite; expected finite ones"
                    )
            packed.append((layer, layer._pack(own, layer.weights_dtype)))
        for layer, fields in packed:
            layer._change(fields)


def copied(parameter: Array | PackedLinear | None) -> Array | None:
    """A parameter in plain layout, in memory of its own."""
    if parameter is None or isinstance(parameter, np.ndarray):
        return None if parameter is None else parameter.copy()
    return parameter.unpack()


def reader(
    state_dict: Any, prefix: Any, stack: ExitStack
) -> tuple[Collection[str], Callable[[str], Any], TensorFile | None]:
    """Names in a state dict, a function from a name to its array, and the open file if it is one."""
    if not isinstance(prefix, str):
        raise TypeError(f"(): prefix is {short(prefix)}; expected a string")
    if isinstance(state_dict, (str, os.PathLike)):
        file = opened(os.fsdecode(state_dict), stack)
        return file.names, file.get_tensor, file
    if not isinstance(state_dict, Mapping):
        expected = "a mapping of names to arrays, or the path of a safetensors file"
        own = "its state_dict()" if hasattr(state_dict, "state_dict") else expected
        raise wrong_type("state_dict", state_dict, own)
    return state_dict.keys(), state_dict.__getitem__, None


def checked_state(
    known: Mapping[str, tuple[Parameter, str]],
    names: Collection[Any],
    read: Callable[[str], Any],
    prefix: str,
) -> dict[str, Array]:
    """The arrays whose `names` begin with `prefix`, without it, or one error with all faults.

    `known` has each parameter and the dtype of its layer's weights. `read` has the array of a name.
    """
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise TypeError(f"(): state_dict has the key {wrong[0]!r}; expected names of parameters")
    given = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
    hint = _prefixes(known, names) if given.keys().isdisjoint(known) else []
    if 0 < len(hint) < 4:  # of more, as those of one Linear in a whole model, all names say more
        expected = " or ".join(map(repr, hint))
        raise ValueError(f"(): prefix is {prefix!r}, and no name fits; expected {expected}")
    missing = (name for name in known if name not in given)
    problems = [f"missing: {prefix}{name} {known[name][0].shape}" for name in missing]
    problems += [f"not known: {full}" for name, full in given.items() if name not in known]
    arrays: dict[str, Array] = {}
    for name, (parameter, weights_dtype) in known.items():
        if name not in given:
            continue
        full = given[name]
        # Matrices are stored as the layer's weights are, everything else as the kernels' lanes.
        stored = weights_dtype if len(parameter.shape) == 2 else lane_of(weights_dtype).name
        try:
            array = as_array(full, read(full))
        except (TypeError, ValueError) as error:
            problems.append(str(error).removeprefix("(): "))
            continue
        if not is_float(array.dtype):
            problems.append(f"{full}: dtype {array.dtype}, expected a floating type")
        elif array.shape != parameter.shape:
            problems.append(f"{full}: shape {array.shape}, expected {parameter.shape}")
        elif not is_finite(array, stored, parameter.or_none):
            problems.append(f"{full}: values that are not finite as {stored}, expected finite ones")
        else:
            arrays[name] = array
    if problems:
        raise ValueError("\n  ".join(["(): nothing was loaded:", *problems]))
    return arrays


def _prefixes(known: Collection[str], names: Collection[str]) -> list[str]:
    """Prefixes before all of `known` in `names`; in a file of a `Trainer`, those of the weights."""
    there, first = set(names), next(iter(known), "")
    found = [name.removesuffix(first) for name in names if first and name.endswith(f".{first}")]
    found = [prefix for prefix in found if all(prefix + name in there for name in known)]
    return [prefix for prefix in found if prefix.startswith("params.")] or found
