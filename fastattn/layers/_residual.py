"""The base of encoder and decoder layers: attention and feed-forward, each added to its input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.dtypes import dtype_choice
from fastattn._args.ops import epsilon, integer_activations
from fastattn._args.packed import WEIGHT_DTYPES
from fastattn._args.types import FLOAT32
from fastattn._args.values import MOST_SIZE, choice, flag, integer, short
from fastattn.layers import _calls
from fastattn.layers._attention import MultiHeadAttention
from fastattn.layers._basic import ACTIVATIONS, FeedForward, LayerNorm, RMSNorm
from fastattn.layers._heads import HeadOptions
from fastattn.layers._state import Layer

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fastattn._args.types import Array, Rounding
    from fastattn._engine.tape import Plain

    Norm = LayerNorm | RMSNorm


def require_head_options(func: str, name: str, given: Any) -> None:
    """Raise unless `given` is None or has options of `MultiHeadAttention`, by their names alone."""
    known = HeadOptions.__annotations__
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"{func}(): {name} is {short(given)}; expected a dict of {', '.join(known)}")
    if unknown := [key for key in given or () if key not in known]:
        raise TypeError(f"{func}(): {name} has {short(unknown[0])}; expected {', '.join(known)}")


def require_fields(layer: Any) -> None:
    """Raise unless the fields of `layer`, a `TransformerLayer` or a `Transformer`, make a layer.

    Its parts check them once more, but their messages would call them by other names.
    """
    func = type(layer).__name__
    for name in ("d_model", "num_heads", "dim_feedforward"):
        setattr(layer, name, integer(func, name, getattr(layer, name), 1, MOST_SIZE))
    for name in ("norm_first", "bias"):
        flag(func, name, getattr(layer, name))
    choice(func, "activation", layer.activation, ACTIVATIONS)
    choice(func, "norm", layer.norm, ("layer_norm", "rms_norm"))
    layer.weights_dtype = dtype_choice(func, "weights_dtype", layer.weights_dtype, WEIGHT_DTYPES)
    integer_activations(func, layer.activations, layer.weights_dtype)
    epsilon(func, "layer_norm_eps", layer.layer_norm_eps, FLOAT32)
    for name in ("attention", "cross_attention"):
        if not hasattr(layer, name):
            continue  # an encoder layer
        require_head_options(func, name, getattr(layer, name))
        options = getattr(layer, name) or {}
        if options.get("head_dim") is None and layer.d_model % layer.num_heads:
            expected = f"a multiple of num_heads, {layer.num_heads}, or head_dim in {name}"
            raise ValueError(f"{func}(): d_model is {layer.d_model}; expected {expected}")


@dataclass(eq=False)
class TransformerLayer(Layer):
    """The base of both layers: options, attention to itself, feed-forward and two norms."""

    d_model: int
    num_heads: int
    dim_feedforward: int = 2048
    activation: str = "relu"
    _: KW_ONLY
    norm_first: bool = False
    norm: str = "layer_norm"
    layer_norm_eps: float = 1e-5
    bias: bool = True
    attention: HeadOptions | None = None
    weights_dtype: str = "float32"
    activations: Rounding | None = None
    rng: InitVar[np.random.Generator | int | None] = None
    self_attn: MultiHeadAttention = field(init=False, repr=False)
    feed_forward: FeedForward = field(init=False, repr=False)
    norm1: Norm = field(init=False, repr=False)
    norm2: Norm = field(init=False, repr=False)

    def __post_init__(self, rng: np.random.Generator | int | None) -> None:
        require_fields(self)
        source = self._source(rng)
        for name in self._parts:  # in the order in which they draw their parameters
            setattr(self, name, self._made(name, source))
        self._set_up(None)

    def _made(self, name: str, rng: np.random.Generator | None) -> Layer:
        """The part `name`, new."""
        common: Any = {"weights_dtype": self.weights_dtype, "activations": self.activations, "rng": rng}
        if name == "feed_forward":
            return FeedForward(self.d_model, self.dim_feedforward, self.activation, self.bias, **common)
        if name.startswith("norm"):
            return self._new_norm()
        options = getattr(self, "attention" if name == "self_attn" else "cross_attention") or {}
        return MultiHeadAttention(self.d_model, self.num_heads, bias=self.bias, **common, **options)

    def _new_norm(self) -> Norm:
        """A norm of the kind that the field `norm` names."""
        dtype = self.weights_dtype
        if self.norm == "rms_norm":
            return RMSNorm(self.d_model, self.layer_norm_eps, weights_dtype=dtype)
        return LayerNorm(self.d_model, self.layer_norm_eps, self.bias, weights_dtype=dtype)

    def _input(self, name: str, x: ArrayLike, cache: Any, kind: type) -> tuple[Array, Array]:
        """`x`, the argument `name`, as it is, and (batch, length, d_model); `cache` is None or of `kind`."""
        func = type(self).__name__
        if cache is not None:
            _calls.require(func, "cache", cache, kind, f"a {kind.__name__}")
        self._require_parts()
        array = _calls.checked(func, name, x, self.d_model, self.weights_dtype)
        return array, _calls.batch_first(func, name, array)

    def _add_attention(
        self, tape: Plain, norm: Norm, x: Any, attention: MultiHeadAttention, sizes: Any, **options: Any
    ) -> Any:
        """Rows x plus attention of them, with the norm; `options` are those of `_attend`."""
        if self.norm_first:
            return attention._attend(tape, norm._forward(tape, x), sizes, residual=x, **options)[0]
        total, _ = attention._attend(tape, x, sizes, residual=x, **options)
        return norm._forward(tape, total, over=True)

    def _add_feed_forward(self, tape: Plain, norm: Norm, x: Any) -> Any:
        """Rows x plus the feed-forward of them, with the norm. It may overwrite x."""
        if self.norm_first:
            return self.feed_forward._forward(tape, norm._forward(tape, x), residual=x, over=True)
        total = self.feed_forward._forward(tape, x, residual=x)
        return norm._forward(tape, total, over=True)

    def _children(self) -> dict[str, Layer]:
        # A feed-forward's parameters have no prefix: torch's layers hold its maps themselves.
        return {"" if name == "feed_forward" else f"{name}.": getattr(self, name) for name in self._parts}
