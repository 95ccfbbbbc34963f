"""The layers between attention calls: linear maps, norms and the feed-forward. Each is one or two kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn import ops
from fastattn._args.errors import put_name, wrong_shape
from fastattn._args.ops import data, epsilon, linear_args, rows, rows_args
from fastattn._args.types import ACTIVATIONS as PLAIN_ACTIVATIONS
from fastattn._args.types import FLOAT32, Activation, Array, ArrayLike, Rounding
from fastattn._args.values import MOST_SIZE, choice, flag, integer
from fastattn._engine import dispatch
from fastattn._engine.tape import PLAIN
from fastattn.layers import _computation
from fastattn.layers._block import Norm, Projection
from fastattn.layers._computation import Made
from fastattn.layers._state import Layer, Parameter, constant, lane_of, linear, uniform

if TYPE_CHECKING:
    from fastattn._engine.tape import Tape
    from fastattn.layers._state import Fields, Taken

# For each activation of a feed-forward: what `ops.linear` calls it, and whether its result multiplies a
# second map of the input (a gated feed-forward).
ACTIVATIONS: dict[str, tuple[Activation, bool]] = {
    **{name: (name, False) for name in PLAIN_ACTIVATIONS},
    "glu": ("sigmoid", True),
    "reglu": ("relu", True),
    "geglu": ("gelu", True),
    "geglu_tanh": ("gelu_tanh", True),
    "swiglu": ("silu", True),
}


@dataclass(eq=False)
class Linear(Layer):
    """``x @ weight.T + bias``: torch's ``nn.Linear``, its weight packed for `fastattn.ops.linear`.

    Parameters
    ----------
    in_features, out_features : int
    bias : bool, default True
    weights_dtype, activations, rng
        As in `MultiHeadAttention`.
    """

    in_features: int
    out_features: int
    bias: bool = True
    _: KW_ONLY
    weights_dtype: str = "float32"
    activations: Rounding | None = None
    rng: InitVar[np.random.Generator | int | None] = None
    packed_weight: ops.PackedLinear = field(init=False, repr=False)
    bias_vector: Array | None = field(init=False, default=None, repr=False)

    _matrices = (("weight", "packed_weight"),)
    _vectors = (("bias", "bias_vector"),)
    _zero_bias = False  # torch draws the bias of an attention's out_proj as zeros

    def _place(self) -> str:
        return f"a Linear({self.in_features}, {self.out_features})"

    def __post_init__(self, rng: np.random.Generator | int | None) -> None:
        for name in ("in_features", "out_features"):
            setattr(self, name, integer(name, getattr(self, name), 1, MOST_SIZE))
        flag("bias", self.bias)
        self._set_up(rng)

    def __call__(
        self,
        x: ArrayLike,
        *,
        activation: Activation | None = None,
        residual: ArrayLike | None = None,
        out: Array | None = None,
    ) -> Array:
        """Compute ``activation(x @ weight.T + bias) + residual`` of x, (..., in_features)."""
        weight, bias = self.packed_weight, self.bias_vector
        try:
            args, result = linear_args(
                x, weight, bias, activation, residual, self.activations, False, out, None, None
            )
        except Exception as error:
            put_name(type(self).__name__, error)
            raise
        dispatch.run(args)
        return result

    def _computation(self, x: ArrayLike, *, activation: Activation | None = None) -> Made:
        array = _computation.checked("x", x, self.in_features, self.weights_dtype)
        if activation is not None:
            choice("activation", activation, PLAIN_ACTIVATIONS)

        def run(tape: Tape, x: Any) -> Any:
            return tape.linear(x, *self._projection(), activation=activation)

        return [self], {"x": array}, run, (*array.shape[:-1], self.out_features)

    def _projection(self) -> Projection:
        return Projection(self.packed_weight, self.bias_vector, self.activations)

    def _parameters(self) -> dict[str, Parameter]:
        draw = uniform(self.in_features**-0.5)
        parameters = {"weight": Parameter((self.out_features, self.in_features), draw)}
        if self.bias:
            parameters["bias"] = Parameter((self.out_features,), constant(0.0) if self._zero_bias else draw)
        return parameters


@dataclass(eq=False)
class NormLayer(Layer):
    """A norm over the last axis: the base of `LayerNorm` and `RMSNorm`."""

    features: int
    eps: float = 1e-5
    _: KW_ONLY
    weights_dtype: str = "float32"
    rng: InitVar[np.random.Generator | int | None] = None
    weight_vector: Array = field(init=False, repr=False)
    bias_vector: Array | None = field(init=False, default=None, repr=False)

    bias = False
    _kind = ""  # its function in `ops`
    _vectors = (("weight", "weight_vector"), ("bias", "bias_vector"))

    def _place(self) -> str:
        return f"a norm of {self.features} features"

    def __post_init__(self, rng: np.random.Generator | int | None) -> None:
        flag("bias", self.bias)
        self.features = integer("features", self.features, 1, MOST_SIZE)
        epsilon("eps", self.eps, FLOAT32)
        self._set_up(np.random.default_rng(0))  # the parameters are ones and zeros: nothing is drawn

    def __call__(self, x: ArrayLike, *, residual: ArrayLike | None = None, out: Array | None = None) -> Array:
        """Normalise ``x + residual``, (..., features)."""
        try:
            weight, bias = self.weight_vector, self.bias_vector
            args, result, _ = rows_args(self._kind, x, out, None, None, weight, bias, self.eps, residual)
        except Exception as error:
            raise self._error(x, error) from error.__cause__
        dispatch.run(args)
        return result

    def _error(self, x: ArrayLike, error: Exception) -> Exception:
        """`error` of a call with `x`, or what is wrong with x alone: the kernel knows no `features`."""
        try:
            self._input(x)
        except Exception as of_input:
            error = of_input
        put_name(type(self).__name__, error, self._kind)
        return error

    def _computation(self, x: ArrayLike) -> Made:
        array = self._input(x)
        return [self], {"x": array}, self._forward, array.shape

    def _input(self, x: ArrayLike) -> Array:
        """`x`, checked: of any of the four types, in which the parameters then are."""
        array = data("x", x)
        if array.shape[-1] != self.features:
            raise wrong_shape("x", array, f"(..., {self.features})")
        return array

    def _forward(self, tape: Tape, x: Any) -> Any:
        """The norm of rows."""
        return tape.norm(x, *self._of_block())

    def _of_block(self) -> Norm:
        return Norm(self._kind, self.weight_vector, self.bias_vector, self.eps)

    def _parameters(self) -> dict[str, Parameter]:
        parameters = {"weight": Parameter((self.features,), constant(1.0))}
        if self.bias:
            parameters["bias"] = Parameter((self.features,), constant(0.0))
        return parameters


@dataclass(eq=False)
class LayerNorm(NormLayer):
    """``(x - mean) / sqrt(var + eps) * weight + bias``: torch's ``nn.LayerNorm`` over the last axis.

    Parameters
    ----------
    features : int
    eps : float, default 1e-5
    bias : bool, default True
    weights_dtype : str
        "float64" keeps the parameters in float64; anything else in float32.
    rng : Generator or int, optional
        Ignored: the parameters start as ones and zeros.
    """

    bias: bool = True

    _kind = "layer_norm"


@dataclass(eq=False)
class RMSNorm(NormLayer):
    """``x / sqrt(mean(x**2) + eps) * weight``: torch's ``nn.RMSNorm`` over the last axis.

    Parameters as in `LayerNorm`, without a bias. eps is 1e-6 by default, as in most models; torch's default
    is the type's machine epsilon.
    """

    eps: float = 1e-6

    _kind = "rms_norm"


@dataclass(eq=False)
class FeedForward(Layer):
    """``linear2(activation(linear1(x)))``, or gated, ``linear2(activation(linear_gate(x)) * linear1(x))``.

    Parameters
    ----------
    d_model, dim_feedforward : int
        Width outside and inside.
    activation : str, default "relu"
        One of `fastattn.ops.activate`; or gated (Shazeer 2020): "glu" (sigmoid), "reglu", "geglu",
        "geglu_tanh", "swiglu".
    bias : bool, default True
    weights_dtype, activations, rng
        As in `MultiHeadAttention`.

    Notes
    -----
    Parameters are ``linear1.*`` and ``linear2.*`` as in torch's layers, and ``linear_gate.*``, which torch
    lacks. One kernel computes the first map, its gate and their product.
    """

    d_model: int
    dim_feedforward: int
    activation: str = "relu"
    bias: bool = True
    _: KW_ONLY
    weights_dtype: str = "float32"
    activations: Rounding | None = None
    rng: InitVar[np.random.Generator | int | None] = None
    weight1: ops.PackedLinear = field(init=False, repr=False)  # gated: both maps
    weight2: ops.PackedLinear = field(init=False, repr=False)
    bias1: Array | None = field(init=False, default=None, repr=False)  # gated: (2, dim_feedforward)
    bias2: Array | None = field(init=False, default=None, repr=False)

    _matrices = (("linear2.weight", "weight2"),)
    _vectors = (("linear2.bias", "bias2"),)

    def _place(self) -> str:
        return f"a FeedForward with d_model {self.d_model}"

    def __post_init__(self, rng: np.random.Generator | int | None) -> None:
        for name in ("d_model", "dim_feedforward"):
            setattr(self, name, integer(name, getattr(self, name), 1, MOST_SIZE))
        choice("activation", self.activation, ACTIVATIONS)
        flag("bias", self.bias)
        self._function, self._gated = ACTIVATIONS[self.activation]
        # The maps in `weight1` and `bias1`: the gate comes first.
        self._inner = ("linear_gate", "linear1") if self._gated else ("linear1",)
        self._set_up(rng)

    def __call__(self, x: ArrayLike, *, residual: ArrayLike | None = None, out: Array | None = None) -> Array:
        """Compute the feed-forward of x, (..., d_model), plus `residual`, which may be `out` itself."""
        try:
            array = _computation.checked("x", x, self.d_model, self.weights_dtype)
            if residual is None and out is None:
                result: Array = self._forward(PLAIN, rows(array)).reshape(array.shape)
                return result
            rounded = self.activations
            hidden = ops.linear(
                array, self.weight1, self.bias1, activation=self._function, activations=rounded
            )
            return ops.linear(
                hidden, self.weight2, self.bias2, residual=residual, activations=rounded, out=out
            )
        except Exception as error:
            put_name(type(self).__name__, error)
            raise

    def _computation(self, x: ArrayLike) -> Made:
        array = _computation.checked("x", x, self.d_model, self.weights_dtype)
        return [self], {"x": array}, self._forward, array.shape

    def _forward(self, tape: Tape, x: Any) -> Any:
        """The feed-forward of rows."""
        inner, outer = self._of_block()
        hidden = tape.linear(x, *inner, self._function, use="hidden")
        out = tape.linear(hidden, *outer)
        tape.done("hidden", hidden)
        return out

    def _of_block(self) -> tuple[Projection, Projection]:
        rounding = self.activations
        return Projection(self.weight1, self.bias1, rounding), Projection(self.weight2, self.bias2, rounding)

    def _parameters(self) -> dict[str, Parameter]:
        wide, narrow = self.dim_feedforward, self.d_model
        maps = linear("linear1", wide, narrow, self.bias) | linear("linear2", narrow, wide, self.bias)
        return maps | linear("linear_gate", wide, narrow, self.bias) if self._gated else maps

    def _pack(self, arrays: Mapping[str, Array], weights_dtype: str) -> Fields:
        bias1 = None
        if self.bias:
            inner = [arrays[f"{name}.bias"].astype(lane_of(weights_dtype)) for name in self._inner]
            bias1 = np.stack(inner) if self._gated else inner[0]
        gate = arrays.get("linear_gate.weight")
        return {
            "weight1": ops.pack(arrays["linear1.weight"], gate=gate, dtype=weights_dtype),
            "bias1": bias1,
            **super()._pack(arrays, weights_dtype),
        }

    def _named(self, plain: Taken) -> dict[str, Array]:
        arrays = super()._named(plain)
        for kind, inner in (("weight", plain(self.weight1)), ("bias", plain(self.bias1))):
            if inner is not None:
                maps = inner if self._gated else inner[None]
                arrays |= {f"{name}.{kind}": x for name, x in zip(self._inner, maps, strict=True)}
        return arrays
