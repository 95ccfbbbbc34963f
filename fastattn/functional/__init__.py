"""Attention variants: other scores, normalisers and positions, selected keys, recurrences.

Options of `fastattn.attention` (causal, windows, grouped heads, ALiBi, sinks, ...) have no function here.
docs/variants.md lists all variants, with recipes for others; `fastattn.grad.vjp` has the gradients.
"""

from fastattn._args.names import show_public
from fastattn.functional import feature_maps
from fastattn.functional._backward import attention_backward, varlen_attention_backward
from fastattn.functional._block_selection import select_blocks
from fastattn.functional._deformable import deformable_attention
from fastattn.functional._gated import gated_attention
from fastattn.functional._recurrent import linear_attention
from fastattn.functional._relative import disentangled_attention
from fastattn.functional._scores import (
    additive_attention,
    entmax15_attention,
    sigmoid_attention,
    sparsemax_attention,
    talking_heads_attention,
    top_k_attention,
)
from fastattn.functional._selection import select_keys, selected_attention
from fastattn.functional._state_space import mamba2_scan, selective_scan
from fastattn.functional._torch import flex_attention

__all__ = [
    "additive_attention",
    "attention_backward",
    "deformable_attention",
    "disentangled_attention",
    "entmax15_attention",
    "feature_maps",
    "flex_attention",
    "gated_attention",
    "linear_attention",
    "mamba2_scan",
    "select_blocks",
    "select_keys",
    "selected_attention",
    "selective_scan",
    "sigmoid_attention",
    "sparsemax_attention",
    "talking_heads_attention",
    "top_k_attention",
    "varlen_attention_backward",
]

show_public(__name__)
