"""AdamW and SGD: torch's steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastattn._args.errors import named
from fastattn._args.types import FLOAT32
from fastattn._args.values import flag, short
from fastattn.layers._state import Layer
from fastattn.train._checks import fraction, rate
from fastattn.train._optimizer import Group, Optimizer, Rates
from fastattn.train._tuning import Tuning

if TYPE_CHECKING:
    from fastattn._args.types import Array


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
