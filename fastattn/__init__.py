"""FlashAttention for CPUs as a NumPy package: exact, fused, multi-threaded attention on NumPy arrays.

`attention` is the function; `explain` and `show_config` say what runs. `functional` has all others.
"""

import signal
import sys

if (
    sys.argv[:1] == ["-m"]
    and "fastattn" in sys.orig_argv
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # `python -m fastattn`: no traceback of imports after Ctrl-C

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastattn import functional, grad, layers, masks, ops, plot, positions
from fastattn._engine.config import show_config
from fastattn._engine.settings import (
    FallbackWarning,
    available_isas,
    get_num_threads,
    set_num_threads,
    set_threading,
)
from fastattn._version import __version__
from fastattn.functional._attention import attention, attention_weights, explain, merge_states
from fastattn.functional._torch import scaled_dot_product_attention
from fastattn.functional._varlen import varlen_attention

if TYPE_CHECKING:
    from fastattn import models, train

__all__ = [
    "FallbackWarning",
    "__version__",
    "attention",
    "attention_weights",
    "available_isas",
    "explain",
    "functional",
    "get_num_threads",
    "grad",
    "layers",
    "masks",
    "merge_states",
    "models",
    "ops",
    "plot",
    "positions",
    "scaled_dot_product_attention",
    "set_num_threads",
    "set_threading",
    "show_config",
    "train",
    "varlen_attention",
]


def __getattr__(name: str) -> Any:
    """`models`, `train` and `torch`, imported when first used: torch takes seconds, or is not there."""
    if name in ("models", "train", "torch"):
        return import_module(f"fastattn.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
