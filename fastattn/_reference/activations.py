"""The activations and their derivatives in NumPy: the readable twins of src/activations.inc."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fastattn._args.types import Activation, Array


class Twin(NamedTuple):
    """A function of an array, float32 or float64, and its derivative. NaN stays NaN in both."""

    formula: Callable[[Array], Array]
    slope: Callable[[Array], Array]


def _erf(x: Array) -> Array:
    """The error function, which NumPy lacks; 0.1 microseconds an element."""
    return np.array([math.erf(value) for value in x.ravel().tolist()], x.dtype).reshape(x.shape)


def _sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without its overflow."""
    result: Array = 0.5 + 0.5 * np.tanh(0.5 * x)
    return result


def _gelu_slope(x: Array) -> Array:
    density = np.exp(-0.5 * np.square(x)) / math.sqrt(2 * math.pi)
    result: Array = 0.5 * (1 + _erf(x / math.sqrt(2))) + x * density
    return result


def _gelu_tanh_slope(x: Array) -> Array:
    x = np.clip(x, -30, 30)  # beyond, it is 0 or 1; x**2 might overflow
    tanh = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    inner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * np.square(x))
    result: Array = 0.5 * (1 + tanh) + 0.5 * x * (1 - np.square(tanh)) * inner
    return result


def _silu_slope(x: Array, factor: float = 1.0) -> Array:
    """The derivative of x sigmoid(factor x)."""
    x = np.clip(x, -1000, 1000)  # beyond, it is 0 or 1; factor * x might overflow
    y = _sigmoid(factor * x)
    return y + factor * x * y * _sigmoid(-factor * x)


ACTIVATIONS: dict[Activation, Twin] = {
    "relu": Twin(lambda x: np.maximum(x, 0), lambda x: np.where(np.isnan(x), x, x > 0).astype(x.dtype)),
    "gelu": Twin(lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))), _gelu_slope),
    "gelu_tanh": Twin(
        lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))), _gelu_tanh_slope
    ),
    "silu": Twin(lambda x: _sigmoid(x) * x, _silu_slope),
    "sigmoid": Twin(_sigmoid, lambda x: _sigmoid(x) * _sigmoid(-x)),
    "quick_gelu": Twin(lambda x: _sigmoid(1.702 * x) * x, lambda x: _silu_slope(x, 1.702)),
}


def activate(x: Array, name: Activation | None) -> Array:
    """The activation `name` of x."""
    return x if name is None else ACTIVATIONS[name].formula(x)


def slope(x: Array, name: Activation | None) -> Array:
    """The derivative of the activation `name` at x; broadcasts to x."""
    return np.ones((), x.dtype) if name is None else ACTIVATIONS[name].slope(x)
