"""The names of activations in config.json, and what `fastattn.ops` calls them."""

from fastattn._args.types import ACTIVATIONS as OURS
from fastattn._args.types import Activation

ACTIVATIONS: dict[str, Activation] = {
    **{name: name for name in OURS},
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "swish": "silu",
}
