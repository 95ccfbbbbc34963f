"""Attention variants that are a few lines over `fastattn.attention`: other products, positions, gates, keys.

What is only an argument of `attention` (causal, windows, grouped heads, ALiBi, sinks, ...) is not here:
docs/variants.md is the table of all.
"""

from fastattn.variants.gates import forgetting_attention, gated_attention
from fastattn.variants.heads import (
    cosine_attention,
    differential_attention,
    general_attention,
    qk_norm_attention,
)
from fastattn.variants.latent import latent_attention
from fastattn.variants.memory import memory_attention
from fastattn.variants.position import disentangled_attention, shaw_attention, transformer_xl_attention
from fastattn.variants.sets import induced_set_attention, perceiver, pooling_by_attention, set_attention
from fastattn.variants.strided import dilated_window_attention, strided_attention

__all__ = [
    "cosine_attention",
    "differential_attention",
    "dilated_window_attention",
    "disentangled_attention",
    "forgetting_attention",
    "gated_attention",
    "general_attention",
    "induced_set_attention",
    "latent_attention",
    "memory_attention",
    "perceiver",
    "pooling_by_attention",
    "qk_norm_attention",
    "set_attention",
    "shaw_attention",
    "strided_attention",
    "transformer_xl_attention",
]
