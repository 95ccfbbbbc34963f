"""Masks as values: which keys each query attends, said by its structure and never as an array of all scores.

``attention(q, k, v, mask=masks.causal() & masks.documents(ids))``. Masks combine with ``&``, ``|`` and ``~``,
and print as they were made. They become ranges of keys for each query row, and what is in no range the kernel
does not touch: the cost is that of the blocks of keys that are attended. `compile` makes a mask of any
predicate, and resolves a mask once for many calls; ``to_array`` shows one.
"""

from fastattn.masks._grid import axial, neighborhood, swin
from fastattn.masks._mask import Mask, compile
from fastattn.masks._sequence import (
    all_keys,
    causal,
    chunked,
    dilated,
    documents,
    first_keys,
    fixed,
    lengths,
    prefix,
    sink_tokens,
    strided,
    tree,
    window,
)
from fastattn.masks._sparse import bigbird, block_sparse, dense, global_tokens

__all__ = [
    "Mask",
    "all_keys",
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
    "lengths",
    "neighborhood",
    "prefix",
    "sink_tokens",
    "strided",
    "swin",
    "tree",
    "window",
]
