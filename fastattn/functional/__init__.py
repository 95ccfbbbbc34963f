"""Every attention but the plain one: other scores, normalisers, positions, recurrences, approximations.

What is only an argument of `fastattn.attention` (causal, windows, grouped heads, ALiBi, sinks, ...) has no
function here. docs/variants.md is the table of all variants.
"""

from fastattn.functional import feature_maps
from fastattn.functional._approximate import linformer_attention, lsh_attention, nystrom_attention
from fastattn.functional._approximate_backward import lsh_attention_backward, nystrom_attention_backward
from fastattn.functional._backward import attention_backward, varlen_attention_backward
from fastattn.functional._gates import forgetting_attention, gated_attention
from fastattn.functional._gates_backward import forgetting_attention_backward, gated_attention_backward
from fastattn.functional._heads import (
    cosine_attention,
    differential_attention,
    general_attention,
    qk_norm_attention,
)
from fastattn.functional._heads_backward import (
    cosine_attention_backward,
    differential_attention_backward,
    general_attention_backward,
    qk_norm_attention_backward,
)
from fastattn.functional._memory import latent_attention, memory_attention
from fastattn.functional._memory_backward import (
    latent_attention_backward,
    linformer_attention_backward,
    memory_attention_backward,
)
from fastattn.functional._neighborhood import neighborhood_attention
from fastattn.functional._patterns import dilated_window_attention, strided_attention
from fastattn.functional._patterns_backward import (
    dilated_window_attention_backward,
    location_attention_backward,
    neighborhood_attention_backward,
    strided_attention_backward,
)
from fastattn.functional._recurrent import (
    delta_net,
    gated_delta_net,
    gated_linear_attention,
    linear_attention,
    retention,
)
from fastattn.functional._recurrent_backward import (
    delta_net_backward,
    gated_delta_net_backward,
    gated_linear_attention_backward,
    linear_attention_backward,
    retention_backward,
)
from fastattn.functional._relative import disentangled_attention, shaw_attention, transformer_xl_attention
from fastattn.functional._relative_backward import (
    disentangled_attention_backward,
    transformer_xl_attention_backward,
)
from fastattn.functional._scores import (
    additive_attention,
    entmax15_attention,
    location_attention,
    sigmoid_attention,
    sparsemax_attention,
    talking_heads_attention,
    top_k_attention,
)
from fastattn.functional._scores_backward import (
    additive_attention_backward,
    entmax15_attention_backward,
    sigmoid_attention_backward,
    sparsemax_attention_backward,
    talking_heads_attention_backward,
    top_k_attention_backward,
)
from fastattn.functional._shaw_backward import shaw_attention_backward
from fastattn.functional._torch import flex_attention, flex_attention_backward

__all__ = [
    "additive_attention",
    "additive_attention_backward",
    "attention_backward",
    "cosine_attention",
    "cosine_attention_backward",
    "delta_net",
    "delta_net_backward",
    "differential_attention",
    "differential_attention_backward",
    "dilated_window_attention",
    "dilated_window_attention_backward",
    "disentangled_attention",
    "disentangled_attention_backward",
    "entmax15_attention",
    "entmax15_attention_backward",
    "feature_maps",
    "flex_attention",
    "flex_attention_backward",
    "forgetting_attention",
    "forgetting_attention_backward",
    "gated_attention",
    "gated_attention_backward",
    "gated_delta_net",
    "gated_delta_net_backward",
    "gated_linear_attention",
    "gated_linear_attention_backward",
    "general_attention",
    "general_attention_backward",
    "latent_attention",
    "latent_attention_backward",
    "linear_attention",
    "linear_attention_backward",
    "linformer_attention",
    "linformer_attention_backward",
    "location_attention",
    "location_attention_backward",
    "lsh_attention",
    "lsh_attention_backward",
    "memory_attention",
    "memory_attention_backward",
    "neighborhood_attention",
    "neighborhood_attention_backward",
    "nystrom_attention",
    "nystrom_attention_backward",
    "qk_norm_attention",
    "qk_norm_attention_backward",
    "retention",
    "retention_backward",
    "shaw_attention",
    "shaw_attention_backward",
    "sigmoid_attention",
    "sigmoid_attention_backward",
    "sparsemax_attention",
    "sparsemax_attention_backward",
    "strided_attention",
    "strided_attention_backward",
    "talking_heads_attention",
    "talking_heads_attention_backward",
    "top_k_attention",
    "top_k_attention_backward",
    "transformer_xl_attention",
    "transformer_xl_attention_backward",
    "varlen_attention_backward",
]
