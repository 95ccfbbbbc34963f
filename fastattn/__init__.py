"""FlashAttention for CPUs as a NumPy package: exact, fused, multi-threaded attention on NumPy arrays.

`attention` is the function; `explain` and `show_config` say what runs. `functional` has all others.
"""

import signal
import sys

if (
    sys.argv[:1] == ["-m"]
    and ("-m", "fastattn") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # `python -m fastattn`: no traceback of imports after Ctrl-C

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastattn._engine.settings import (
    FallbackWarning,
    get_num_threads,
    set_num_threads,
    set_threading,
)
from fastattn._version import __version__

if TYPE_CHECKING:
    from fastattn import functional, grad, layers, masks, models, ops, plot, positions, train
    from fastattn._engine.config import show_config
    from fastattn.functional._attention import attention, attention_weights, explain, merge_states
    from fastattn.functional._torch import scaled_dot_product_attention
    from fastattn.functional._varlen import varlen_attention

__all__ = [
    "FallbackWarning",
    "__version__",
    "attention",
    "attention_weights",
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

# What is imported when first used: modules, and functions by the modules that have them.
_MODULES = (
    "flash_attn", "functional", "grad", "layers", "masks", "models", "ops", "plot", "positions", "torch",
    "train",
)  # fmt: skip
_FUNCTIONS = {
    "show_config": "_engine.config",
    **dict.fromkeys(("attention", "attention_weights", "explain", "merge_states"), "functional._attention"),
    "scaled_dot_product_attention": "functional._torch",
    "varlen_attention": "functional._varlen",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"fastattn.{name}")
    if name in _FUNCTIONS:
        found = globals()[name] = getattr(import_module(f"fastattn.{_FUNCTIONS[name]}"), name)
        return found
    raise import_module("fastattn._args.names").missing_name(__name__, name, sys._getframe(1))


def __dir__() -> list[str]:
    return __all__
