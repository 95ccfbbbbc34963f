"""Optimizers: AdamW and SGD, with torch's steps, fused, on arrays and on the layers that they belong to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, TypedDict

import numpy as np

from fastattn._args.errors import named
from fastattn._args.types import FLOAT32, FLOAT64, Array
from fastattn._args.updates import Update, UpdateArgs
from fastattn._args.values import choice, flag, integer, number, short
from fastattn._engine import dispatch
from fastattn._engine.settings import get_num_threads
from fastattn.grad._linear import TRAINED
from fastattn.layers._state import Layer, copied
from fastattn.train._checks import fault_of, fraction, matching, own_options, plain, rate
from fastattn.train._gradients import clip_factor, gradients, mapping, norm_of, require_known
from fastattn.train._interrupts import interrupts_wait
from fastattn.train._tuning import Tuning

NONFINITE = ("raise", "skip")
# Up to here numbers fit every type that weights are stored in, and so do products of two, as of adapters.
_SAFE = 1e15


class Group(TypedDict, total=False):
    """Parameter group with its own options."""

    params: str | Sequence[str]
    lr: float
    weight_decay: float


class Rates(NamedTuple):
    """Rates of one group of parameters."""

    dtype: np.dtype[Any]
    lr: float
    weight_decay: float


class Optimizer:
    """Base of `AdamW` and `SGD`: parameters in groups, some frozen; `step`; a state to be saved."""

    parameters: dict[str, Array]
    trained: dict[str, Array]
    layer: Layer | Tuning | None
    steps: int  # that have been done; those that were skipped do not count
    _moments: ClassVar[tuple[str, ...]] = ()
    _kind: ClassVar[Any] = ""

    @named("{cls}")
    def __init__(
        self,
        parameters: Layer | Tuning | Mapping[str, Array | Layer],
        lr: float,
        weight_decay: float,
        groups: Sequence[Group],
        frozen: str | Sequence[str],
        decay_vectors: bool,
    ):
        self.layer, self.parameters = _held_by(parameters)
        self.steps = 0
        self._quantised = self._without_gradients()
        hidden = self._quantised | matching("frozen", frozen, self.parameters)
        self.trained = {name: array for name, array in self.parameters.items() if name not in hidden}
        if not self.trained:
            also = " beside weights in int8 and in blocks, which are frozen, too" if self._quantised else ""
            came = f"frozen is {short(frozen)}; expected one that leaves a parameter"
            raise ValueError(f"(): {came}{also}")
        own = own_options(groups, self.parameters)
        usual = {"lr": rate("lr", lr), "weight_decay": rate("weight_decay", weight_decay)}
        flag("decay_vectors", decay_vectors)
        self._groups: dict[Rates, list[str]] = {}
        for name, array in self.trained.items():
            options = {**usual, **own.get(name, {})}
            if array.ndim < 2 and not decay_vectors and "weight_decay" not in own.get(name, {}):
                options["weight_decay"] = 0.0
            self._groups.setdefault(Rates(array.dtype, **options), []).append(name)
        self.moments = {
            moment: {name: np.zeros_like(array) for name, array in self.trained.items()}
            for moment in self._moments
        }
        self._seen = self._parts()

    def __repr__(self) -> str:
        numbers = sum(array.size for array in self.trained.values())
        lr = " and ".join(f"{each:g}" for each in dict.fromkeys(rates.lr for rates in self._groups))
        return f"<{type(self).__name__}: {numbers} numbers, lr {lr}, step {self.steps}>"

    def _parts(self) -> dict[str, tuple[Layer, int]]:
        """The parts of the layer, by their prefixes, and how often each has changed."""
        return self.layer._versions() if isinstance(self.layer, Layer) else {}

    def _without_gradients(self) -> set[str]:
        """The names of matrices in int8 and in blocks."""
        return {
            prefix + name
            for prefix, (part, _) in self._parts().items()
            for name, parameter in (part._parameters() if part.weights_dtype not in TRAINED else {}).items()
            if len(parameter.shape) == 2
        }

    def _take_over(self) -> None:
        """Read again what has been loaded into the layer since this optimizer wrote to it."""
        for prefix, (part, changes) in self._parts().items():
            held, before = self._seen[prefix]
            if part is held and changes == before:
                continue
            if self._without_gradients() != self._quantised:
                whose = f"the layer's part {prefix[:-1]}" if prefix else "the layer"
                came = f"the weights of {whose} are in {part.weights_dtype} now"
                raise TypeError(f"(): {came}; expected a new optimizer, since others are frozen")
            for name, array in part._named(copied).items():
                own = self.parameters[prefix + name]
                if array.dtype != own.dtype:
                    came = f"the layer's {prefix}{name} is {array.dtype} now"
                    raise TypeError(f"(): {came}; expected {own.dtype}, as when the optimizer was made")
                own[...] = array
        self._seen = self._parts()

    def _settings(self) -> dict[str, Any]:
        """The fields of UpdateArgs that all parameters share, of the step that comes."""
        raise NotImplementedError

    def _reach(self, weight: float, moment: float, grad: float, rates: Rates) -> float:
        """Upper bound of all numbers after a step, from the norms of weights, first moments and gradients."""
        raise NotImplementedError

    @named("{cls}.step")
    def step(
        self,
        grads: Mapping[str, Array],
        *,
        factor: float = 1.0,
        max_norm: float | None = None,
        scale: float = 1.0,
        nonfinite: str = "raise",
    ) -> float:
        """Update all parameters in place by their gradients, and pack them into the layer.

        Parameters
        ----------
        grads : mapping of str to array_like
            Gradient of each parameter by name; gradients of frozen ones are ignored.
        factor : float, default 1
            Multiplies every learning rate: the result of a `Schedule`, 0 or more.
        max_norm : float, optional
            Scale all gradients so that their common norm is at most this, as torch's ``clip_grad_norm_``.
        scale : float, default 1
            Multiplies every gradient before clipping.
        nonfinite : {"raise", "skip"}, default "raise"
            What to do if a gradient has NaN or infinities, or if new weights would not be finite as the layer
            stores them: raise, or skip the step.

        Returns
        -------
        float
            Norm of all gradients before clipping; not finite if the step was skipped.

        Raises
        ------
        FloatingPointError
            If a gradient is not finite, or new weights do not fit the stored type. Nothing was changed.
        TypeError, ValueError
            If an argument does not fit, or a gradient is missing. Nothing was changed.

        Notes
        -----
        The step starts at weights that were loaded into the layer since the last one; moments stay.
        """
        factor = rate("factor", factor)
        most = None if max_norm is None else number("max_norm", max_norm, FLOAT64, positive=True)
        by = number("scale", scale, FLOAT64)
        choice("nonfinite", nonfinite, NONFINITE)
        require_known(grads, self.parameters)
        arrays = gradients(grads, self.trained)
        norm = norm_of(arrays.values(), get_num_threads()) * abs(by)
        if not math.isfinite(norm):
            if nonfinite == "raise":
                raise FloatingPointError(f"(): {fault_of(arrays)}; at step {self.steps + 1}, not done")
            return norm
        clipped = clip_factor(norm, most)
        with interrupts_wait():
            self._take_over()
            try:
                with self._undone(self._is_safe(norm * clipped, factor)) as require_finite:
                    self.steps += 1
                    self._update(arrays, factor, by * clipped)
                    require_finite()
                    self._repack(self.trained)
            except FloatingPointError:
                if nonfinite == "raise":
                    raise
                return math.inf
        return norm

    def _is_safe(self, grad: float, factor: float) -> bool:
        """Tell whether the next step, of gradients of this norm, leaves all numbers far from infinity."""
        moments = next(iter(self.moments.values()), {})
        weight, moment = (norm_of(x.values(), get_num_threads()) for x in (self.trained, moments))
        reach = (
            self._reach(weight, moment, grad, rates._replace(lr=rates.lr * factor)) for rates in self._groups
        )
        return all(most < _SAFE for most in reach)  # not so of NaN

    @contextmanager
    def _undone(self, safe: bool) -> Iterator[Callable[[], None]]:
        """Undo what is done to weights, moments and steps if it fails; what is `safe` does not.

        Gives what raises if a number is infinite now: to be called before the layer has the weights.
        """
        if safe:
            yield lambda: None
            return
        held = {name: x for name, x in self._state().items() if name != "steps"}
        before, steps = {name: x.copy() for name, x in held.items()}, self.steps

        def require_finite() -> None:
            for name, x in held.items():
                if (np.isfinite(before[name]) & ~np.isfinite(x)).any():
                    raise FloatingPointError(
                        f"{type(self).__name__}(): {name} is not finite after step {self.steps}"
                    )

        try:
            with np.errstate(all="ignore"):
                yield require_finite
        except BaseException:
            for name, x in held.items():
                x[...] = before[name]
            self.steps = steps
            if isinstance(self.layer, Tuning):  # whose model is packed in place
                self.layer._repack(self.parameters, self.trained)
            raise

    def _update(self, grads: Mapping[str, Array], rate: float, scale: float) -> None:
        settings = self._settings()
        for rates, names in self._groups.items():
            updates = [
                Update(
                    grads[name], self.parameters[name], *(moment[name] for moment in self.moments.values())
                )
                for name in names
            ]
            args = UpdateArgs(
                self._kind,
                updates,
                get_num_threads(),
                scale=scale,
                lr=rates.lr * rate,
                weight_decay=rates.weight_decay,
                **settings,
            )
            dispatch.run(args)

    def _repack(self, changed: Iterable[str]) -> None:
        if self.layer is None:
            return
        try:
            self.layer._repack(self.parameters, set(changed))
        except ValueError as error:
            what = f"the weights of step {self.steps} cannot be stored: {error}"
            raise FloatingPointError(f"(): {what}; nothing was changed") from error
        self._seen = self._parts()

    @named("{cls}.state_dict")
    def state_dict(self) -> dict[str, Any]:
        """Return weights and moments, "params.<name>", "first.<name>" and so on, not copied; and "steps".

        Weights that were loaded into the layer since the last step are included. A TypeError says that the
        layer stores them in another type now.
        """
        self._take_over()
        return self._state()

    def _state(self) -> dict[str, Any]:
        """`state_dict` of what is held here."""
        parts = {"params": self.parameters, **self.moments}
        state: dict[str, Any] = {
            f"{part}.{name}": x for part, each in parts.items() for name, x in each.items()
        }
        return {**state, "steps": self.steps}

    @named("{cls}.load_state_dict")
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, of an optimizer with the same parameters, frozen ones included.

        A TypeError or a ValueError says that names, shapes or dtypes do not fit. Nothing was changed then.
        """
        given, own = mapping("state_dict", state_dict), self._state()
        for name in sorted(own.keys() ^ given.keys(), key=str):
            here = "lacks" if name in own else "has"
            other = "which this optimizer has" if name in own else "which this optimizer does not have"
            if here == "lacks" and name == "steps":
                other += "; a file that Trainer.save wrote is one for Trainer.load"
            raise ValueError(f"(): state_dict {here} {name!r}, {other}")
        steps = integer("steps", given["steps"], 0)
        for name, array in own.items():
            x = given[name]
            if name != "steps" and (
                not isinstance(x, np.ndarray) or x.shape != array.shape or x.dtype != array.dtype
            ):
                raise ValueError(f"(): {name} is {short(x)}; expected {short(array)}")
        with interrupts_wait(), self._undone(safe=False) as require_finite:
            for name, array in own.items():
                if name != "steps":
                    array[...] = given[name]
            self.steps = steps
            require_finite()
            self._repack(self.parameters)


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019), with the steps of torch's ``AdamW``.

    Parameters
    ----------
    parameters : Layer, tuning, or mapping of str to Layer or ndarray
        A layer or a tuning: its weights are kept here in full precision, and packed again after every step.
        Arrays in float32 or float64 are updated in place. In a mapping, parameters of a layer are named
        ``"key.name"``. Not ``layer.state_dict()``, a copy that the layer never sees. Weights that a layer
        stores in int8 or in blocks are frozen.
    lr : float, default 1e-3
        Learning rate; `step` multiplies it by its `factor`.
    betas : (float, float), default (0.9, 0.999)
        Decay of the means of gradients and of squared gradients.
    eps : float, default 1e-8
        Above 0 in the dtype of the parameters.
    weight_decay : float, default 0.01
    groups : sequence of dict, default ()
        Parameters with their own rates: ``{"params": patterns, "lr": ..., "weight_decay": ...}``, with one
        pattern of names or several, ``"encoder.*"``, ``"*.bias"``. The first group with a name counts.
    frozen : str or sequence of str, default ()
        Patterns of parameters that are not trained.
    decay_vectors : bool, default False
        Whether biases and norms decay, too, as in torch. By default only matrices and groups with a
        ``weight_decay`` do.

    Attributes
    ----------
    parameters : dict of str to ndarray
        The weights. What was loaded into the layer is here after `step` or `state_dict`.
    trained : dict of str to ndarray
        Parameters that are not frozen.
    moments : dict
        "first" and "second": the means, by name.
    steps : int
        Number of steps done.
    """

    _moments, _kind = ("first", "second"), "adamw"

    @named("{cls}")
    def __init__(
        self,
        parameters: Layer | Tuning | Mapping[str, Array | Layer],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        groups: Sequence[Group] = (),
        frozen: str | Sequence[str] = (),
        decay_vectors: bool = False,
    ):
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ValueError(f"AdamW(): betas is {short(betas)}; expected a pair of numbers")
        self.betas = fraction("betas[0]", betas[0]), fraction("betas[1]", betas[1])
        self.eps = rate("eps", eps)
        super().__init__(parameters, lr, weight_decay, groups, frozen, decay_vectors)
        dtypes = {rates.dtype for rates in self._groups}
        if not all(dtype.type(self.eps) > 0 for dtype in dtypes):
            lane = "float32" if FLOAT32 in dtypes else "float64"
            raise ValueError(f"AdamW(): eps is {short(eps)}; expected a number above 0 in {lane}")

    def _settings(self) -> dict[str, Any]:
        (beta1, beta2), step = self.betas, self.steps
        corrections = {"first_correction": 1 - beta1**step, "second_correction": math.sqrt(1 - beta2**step)}
        return {"momentum": beta1, "beta2": beta2, "eps": self.eps, **corrections}

    def _reach(self, weight: float, moment: float, grad: float, rates: Rates) -> float:
        first = moment + grad
        share = rates.lr / ((1 - self.betas[0] ** (self.steps + 1)) * self.eps)
        return weight * (1 + rates.lr * rates.weight_decay) + first * (1 + share) + grad * grad


class SGD(Optimizer):
    """Gradient descent with momentum, with the steps of torch's ``SGD``.

    Parameters
    ----------
    parameters, groups, frozen, decay_vectors
        As in `AdamW`.
    lr : float, default 1e-3
    momentum : float, default 0
    weight_decay : float, default 0
        Added to the gradient, times the weight.
    nesterov : bool, default False
        Nesterov's momentum.
    """

    @named("{cls}")
    def __init__(
        self,
        parameters: Layer | Tuning | Mapping[str, Array | Layer],
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        groups: Sequence[Group] = (),
        frozen: str | Sequence[str] = (),
        decay_vectors: bool = False,
    ):
        self.momentum = fraction("momentum", momentum)
        self.nesterov = flag("nesterov", nesterov)
        if nesterov and not self.momentum:
            raise ValueError("SGD(): nesterov is True with a momentum of 0; expected one above 0")
        self._moments = ("first",) if self.momentum else ()  # type: ignore[misc]
        super().__init__(parameters, lr, weight_decay, groups, frozen, decay_vectors)

    _kind = "sgd"

    def _settings(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "nesterov": self.nesterov}

    def _reach(self, weight: float, moment: float, grad: float, rates: Rates) -> float:
        first = moment + grad + rates.weight_decay * weight
        return weight + first * (1 + 2 * rates.lr)


class _Layers(Layer):
    """Several layers as one: the parameters of each have its name in front."""

    weights_dtype = "float32"  # it has no weights itself

    def __init__(self, layers: Mapping[str, Layer]):
        self._layers = layers

    def _children(self) -> dict[str, Layer]:
        return {f"{name}.": layer for name, layer in self._layers.items()}


def _held_by(parameters: Any) -> tuple[Layer | Tuning | None, dict[str, Array]]:
    """Return what is packed again after a step, if anything is, and all arrays that a step changes."""
    if isinstance(parameters, Tuning):
        return parameters, parameters._parameters
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
    return _Layers(layers), arrays
