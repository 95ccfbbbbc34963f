"""FlashAttention for CPUs as a NumPy package: exact, fused, multi-threaded attention on NumPy arrays.

`attention` is the function; `explain` and `show_config` say what runs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastattn import approximate, feature_maps, layers, masks, ops, plot, positions, rope, variants
from fastattn._engine.settings import (
    FallbackWarning,
    available_isas,
    get_num_threads,
    set_num_threads,
    show_config,
)
from fastattn._version import __version__
from fastattn.attention import (
    attention,
    attention_weights,
    explain,
    merge_states,
)
from fastattn.flex import flex_attention
from fastattn.linear_attention import linear_attention
from fastattn.linear_variants import delta_net, gated_delta_net, gated_linear_attention, retention
from fastattn.neighborhood import neighborhood_attention
from fastattn.other_scores import additive_attention, location_attention
from fastattn.sdpa import scaled_dot_product_attention
from fastattn.sigmoid import sigmoid_attention
from fastattn.sparse_attention import entmax15_attention, sparsemax_attention, topk_attention
from fastattn.talking_heads import talking_heads_attention

if TYPE_CHECKING:
    from fastattn import models

__all__ = [
    "FallbackWarning",
    "__version__",
    "additive_attention",
    "approximate",
    "attention",
    "attention_weights",
    "available_isas",
    "delta_net",
    "entmax15_attention",
    "explain",
    "feature_maps",
    "flex_attention",
    "gated_delta_net",
    "gated_linear_attention",
    "get_num_threads",
    "layers",
    "linear_attention",
    "location_attention",
    "masks",
    "merge_states",
    "models",
    "neighborhood_attention",
    "ops",
    "plot",
    "positions",
    "retention",
    "rope",
    "scaled_dot_product_attention",
    "set_num_threads",
    "show_config",
    "sigmoid_attention",
    "sparsemax_attention",
    "talking_heads_attention",
    "topk_attention",
    "variants",
]


def __getattr__(name: str) -> Any:
    """`fastattn.models`, imported when it is first used: it takes half as long as all else."""
    if name == "models":
        return import_module("fastattn.models")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
