"""Transformer layers: fields over pure functions, with the names and parameters of torch's modules, batch first."""

from fastattn.layers.attention import MultiHeadAttention
from fastattn.layers.basic import FeedForward, LayerNorm, Linear, RMSNorm
from fastattn.layers.rotary import Rope
from fastattn.layers.state import Layer

__all__ = ["FeedForward", "Layer", "LayerNorm", "Linear", "MultiHeadAttention", "RMSNorm", "Rope"]
