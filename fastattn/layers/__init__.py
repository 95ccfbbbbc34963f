"""Transformer layers in NumPy, with torch's names and parameters, batch first.

A layer checks its arguments and its parameters. A TypeError or a ValueError names the layer, the argument,
what came and what was expected; without parameters, it says how to load some.
"""

from fastattn._args.names import show_public
from fastattn.layers._attention import MultiHeadAttention
from fastattn.layers._basic import FeedForward, LayerNorm, Linear, RMSNorm
from fastattn.layers._cache import Cached, KVCache
from fastattn.layers._decoder_layer import TransformerDecoderLayer
from fastattn.layers._delta_rules import GatedDeltaNet, KimiDeltaAttention
from fastattn.layers._layer_caches import Caches, DecoderCache
from fastattn.layers._paged_cache import PagedKVCache
from fastattn.layers._recurrent import RecurrentState, ShortConvolution
from fastattn.layers._rotary import Rope
from fastattn.layers._stacks import Transformer, TransformerDecoder, TransformerEncoder
from fastattn.layers._state import Layer
from fastattn.layers._state_space import Mamba, Mamba2
from fastattn.layers._transformer import TransformerEncoderLayer

__all__ = [
    "Cached",
    "Caches",
    "DecoderCache",
    "FeedForward",
    "GatedDeltaNet",
    "KVCache",
    "KimiDeltaAttention",
    "Layer",
    "LayerNorm",
    "Linear",
    "Mamba",
    "Mamba2",
    "MultiHeadAttention",
    "PagedKVCache",
    "RMSNorm",
    "RecurrentState",
    "Rope",
    "ShortConvolution",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
]

show_public(__name__)
