"""flash-attn's functions for CPUs: its names and arguments, for CPU tensors and for NumPy arrays.

`install` lets programs that say ``import flash_attn`` have them. docs/flash-attn.md is the guide.
"""

import sys

from fastattn._args.names import show_public
from fastattn.flash_attn._check import of_tensors
from fastattn.flash_attn._install import install
from fastattn.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__version__ = "2.8.3"  # the version of flash-attn whose arguments these are

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
]

if sys.modules.get("torch"):  # else with the first tensor: what is compiled needs its operators before
    of_tensors()

show_public(__name__)
