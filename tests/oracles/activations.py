"""The activations and their derivatives by their definitions, in float64, for all tests in Python."""

import math
from typing import NamedTuple

import numpy as np

ROOT = math.sqrt(2 / math.pi)


class Activation(NamedTuple):
    formula: object
    slope: object


def sigmoid(x):
    return 0.5 + 0.5 * np.tanh(x / 2)


def erf(x):
    return np.vectorize(math.erf)(x)


def silu_slope(x, factor=1):
    y = sigmoid(factor * x)
    return y + factor * x * y * (1 - y)


def gelu_tanh_slope(x):
    y, inner = ROOT * (x + 0.044715 * x**3), ROOT * (1 + 3 * 0.044715 * x**2)
    return 0.5 * (1 + np.tanh(y)) + 0.5 * x * inner / np.cosh(np.clip(y, -300, 300)) ** 2


ACTIVATIONS = {
    None: Activation(lambda x: x, np.ones_like),
    "relu": Activation(lambda x: np.maximum(x, 0), lambda x: (x > 0) * 1.0),
    "gelu": Activation(
        lambda x: x * 0.5 * (1 + erf(x / math.sqrt(2))),
        lambda x: 0.5 * (1 + erf(x / math.sqrt(2))) + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi),
    ),
    "gelu_tanh": Activation(lambda x: x * 0.5 * (1 + np.tanh(ROOT * (x + 0.044715 * x**3))), gelu_tanh_slope),
    "silu": Activation(lambda x: x * sigmoid(x), silu_slope),
    "sigmoid": Activation(sigmoid, lambda x: sigmoid(x) * (1 - sigmoid(x))),
    "quick_gelu": Activation(lambda x: x * sigmoid(1.702 * x), lambda x: silu_slope(x, 1.702)),
}
