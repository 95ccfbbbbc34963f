"""`flash_attn_func` and its kin for arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn.flash_attn._check import sides
from fastattn.functional._attention import attention, varlen_attention


def attend(
    arrays: tuple[Any, ...],
    more: dict[str, Any],
    options: dict[str, Any],
    return_lse: bool,
    num_threads: int | None = None,
    seed: int | None = None,
) -> tuple[Any, Any]:
    """Out and lse of q, k and v, with the heads inside; `more` has arrays, and those of packed sequences."""
    options = {**more, **options, "window": sides(options["window"]), "return_lse": return_lse}
    if "dropout" in options:
        # flash-attn takes no seed: it draws from the generator of the whole process.
        options["seed"] = int(np.random.randint(2**63 - 1, dtype=np.int64)) if seed is None else seed  # noqa: NPY002
    packed = "cu_seqlens_q" in more
    if packed:
        found: Any = varlen_attention(*arrays, **options, num_threads=num_threads)
    else:
        found = attention(*[x.swapaxes(1, 2) for x in arrays], **options, num_threads=num_threads)
    out, lse = found if return_lse else (found, None)
    return out if packed else out.swapaxes(1, 2), lse
