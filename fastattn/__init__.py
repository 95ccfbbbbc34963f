"""FlashAttention for CPUs as a NumPy package: exact, fused, multi-threaded attention on NumPy arrays.

`attention` is the function; `explain` and `show_config` say what runs.
"""

from fastattn import layers, masks, ops, positions, rope
from fastattn._backend import (
    FallbackWarning,
    available_isas,
    get_num_threads,
    set_num_threads,
    show_config,
)
from fastattn.attention import (
    attention,
    attention_weights,
    explain,
    merge_states,
    scaled_dot_product_attention,
)
from fastattn.linear_attention import linear_attention

__version__ = "0.1.0"

__all__ = [
    "FallbackWarning",
    "attention",
    "attention_weights",
    "available_isas",
    "explain",
    "get_num_threads",
    "layers",
    "linear_attention",
    "masks",
    "merge_states",
    "ops",
    "positions",
    "rope",
    "scaled_dot_product_attention",
    "set_num_threads",
    "show_config",
]
