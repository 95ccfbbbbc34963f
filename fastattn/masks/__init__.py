"""Structural masks: which keys each query attends, without an array of all scores.

``attention(q, k, v, mask=masks.causal() & masks.documents(ids))``. Masks combine with ``&``, ``|`` and ``~``,
and print as they were made. Each becomes ranges of keys per query row; the kernel computes only blocks with
attended keys. `compile` makes a mask of any predicate, and resolves a mask once for many calls; ``to_array``
shows a mask.
"""

from fastattn._args.names import show_public
from fastattn.masks._compile import compile
from fastattn.masks._grid import axial, neighborhood, swin
from fastattn.masks._mask import Mask
from fastattn.masks._sequence import (
    causal,
    chunked,
    dilated,
    documents,
    first_keys,
    fixed,
    strided,
    tree,
    window,
)
from fastattn.masks._sparse import bigbird, block_sparse, dense, global_tokens

__all__ = [
    "Mask",
    "axial",
    "bigbird",
    "block_sparse",
    "causal",
    "chunked",
    "compile",
    "dense",
    "dilated",
    "documents",
    "first_keys",
    "fixed",
    "global_tokens",
    "neighborhood",
    "strided",
    "swin",
    "tree",
    "window",
]

show_public(__name__)
