"""Kernels for torch's CPU tensors, in shared memory: operators with gradients, and faster models.

Importing this package defines ``torch.ops.fastattn.attention`` and others, and the kernels that
``torch.nn.attention.varlen.varlen_attn`` lacks on CPUs. It makes all calls of the process use torch's
threads: two pools would compete for the cores. docs/torch.md is the guide.
"""

from typing import Any

try:
    import torch  # noqa: F401 - said once, and by the name of what to install
except ImportError as error:
    needed = "pip install torch --index-url https://download.pytorch.org/whl/cpu"  # without CUDA
    raise ImportError(f"fastattn.torch needs torch: {needed} ({error})") from error

import fastattn.flash_attn._torch
import fastattn.torch._attention
import fastattn.torch._variants
import fastattn.torch._varlen  # noqa: F401 - define operators
from fastattn._undo import Undo
from fastattn.torch._hugging_face import register
from fastattn.torch._measure import measured
from fastattn.torch._optimize import optimize
from fastattn.torch._sdpa import patch_sdpa
from fastattn.torch._threads import borrow

borrow()

__all__ = ["Undo", "flex_attention", "measured", "optimize", "patch_sdpa", "register"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name != "flex_attention":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # On first use, as it imports torch's compiler, which takes seconds.
    from fastattn.torch._flex import flex_attention

    return globals().setdefault(name, flex_attention)
