"""FlashAttention for CPUs as a NumPy package."""

from fastattn._backend import FallbackWarning, available_isas, get_num_threads, set_num_threads, show_config
from fastattn.attention import attention, attention_weights

__version__ = "0.1.0"

__all__ = [
    "FallbackWarning",
    "attention",
    "attention_weights",
    "available_isas",
    "get_num_threads",
    "set_num_threads",
    "show_config",
]
