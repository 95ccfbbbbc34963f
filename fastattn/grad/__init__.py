"""Gradients of what lies between attention calls: vector-Jacobian products of `fastattn.ops` and more.

Each function takes the gradient of a result, `dout`, and what the forward function took, and returns the
gradients that `need` names, in its order. All are pure: they write only to what they return. Gradients have
the shape and dtype of what they are gradients of. Those of parameters are sums over rows: float32, and
float64 where x is. Their bits do not depend on the number of threads. Options are those of the forward
function; with others, gradients are wrong, without an error.
"""

from fastattn._args.names import show_public
from fastattn.grad._channels import causal_conv1d
from fastattn.grad._linear import linear
from fastattn.grad._loss import cross_entropy
from fastattn.grad._places import dropout, embedding, rope
from fastattn.grad._rows import activate, layer_norm, rms_norm, softmax
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
