"""torch's threads, which do our work, too.

They wait awake between torch's operators. A second pool beside them gets half of each core.
"""

from __future__ import annotations

import torch

from fastattn._engine import beside_torch, settings


def borrow() -> None:
    """Let torch's OpenMP threads do what our own would, where they can be found."""
    if settings.core is not None and "OpenMP" in torch.__config__.parallel_info():
        settings.core.borrow_threads(beside_torch.gomp_parallel() or 0)
