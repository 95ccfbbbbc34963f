"""Gradients of operations between attention calls, and `vjp` for functions, layers and models.

A gradient function takes the gradient `dout` of a result and the arguments of the forward function, and
returns the gradients in `need`, in that order. It writes only to what it returns. Gradients have the shape
and dtype of their argument; for parameters, they are sums over rows in float32, or float64 for float64 x.
The bits do not depend on the number of threads. Pass the options of the forward function: with others,
gradients are wrong, without an error.
"""

from fastattn._args.names import show_public
from fastattn.grad._linear import linear
from fastattn.grad._loss import cross_entropy
from fastattn.grad._rows import (
    activate,
    causal_conv1d,
    dropout,
    embedding,
    layer_norm,
    rms_norm,
    rope,
    softmax,
)
from fastattn.grad._vjp import Pullback, vjp

__all__ = [
    "Pullback",
    "activate",
    "causal_conv1d",
    "cross_entropy",
    "dropout",
    "embedding",
    "layer_norm",
    "linear",
    "rms_norm",
    "rope",
    "softmax",
    "vjp",
]

show_public(__name__)
