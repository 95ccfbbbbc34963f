"""Masks that models are trained with, made of the others."""

from __future__ import annotations

import math

import numpy as np

from fastattn._args.errors import named
from fastattn._args.types import ArrayLike
from fastattn._args.values import integer
from fastattn.masks._grid import neighborhood, sizes
from fastattn.masks._mask import Mask
from fastattn.masks._sequence import causal, chunked, documents, first_keys
from fastattn.masks._sparse import block_sparse


@named("block_diffusion")
def block_diffusion(size: int, length: int | None = None) -> Mask:
    """Blocks of `size` tokens that are denoised together: a query attends its own block and those before it.

    With a `length`, that of the text, it is the mask of training, for a noised copy of the text and then the
    clean one, 2 `length` tokens. Noised tokens attend their own block and clean blocks before it; clean ones
    attend clean blocks up to their own. Source: M. Arriola et al., "Block Diffusion", 2025, arXiv:2503.09573.
    """
    size = integer("size", size, 1)
    if length is None:
        return causal() | chunked(size)
    blocks, rest = divmod(integer("length", length, 1), size)
    if rest:
        raise ValueError(f"(): length is {length}; expected a multiple of size, {size}")
    own, up_to = np.eye(blocks, dtype=bool), np.tri(blocks, dtype=bool)
    return block_sparse(np.block([[own, up_to & ~own], [own & ~own, up_to]]), size)


@named("shared_prefix")
def shared_prefix(length: int, ids: ArrayLike) -> Mask:
    """Continuations of one prefix of `length` tokens, end to end: each attends the prefix and itself.

    `ids` (..., tokens) tell the continuations apart; those of the prefix may be any. It is causal. Source: J.
    Juravsky et al., "Hydragen", 2024, arXiv:2402.05099.
    """
    return causal() & (first_keys(length) | documents(ids))


@named("sliding_tiles")
def sliding_tiles(tiles: int | tuple[int, ...], kernel: int | tuple[int, ...], size: int) -> Mask:
    """Tiles of `size` tokens on a grid: a token attends the `kernel` tiles nearest to its own, on each axis.

    `tiles` are the tiles along each axis, whose tokens come tile by tile; `kernel` is an integer or one for
    each axis. Source: P. Zhang et al., "Sliding Tile Attention", 2025, arXiv:2502.04507.
    """
    shape = sizes("tiles", tiles)
    near = neighborhood(shape, kernel).to_array(math.prod(shape))
    return block_sparse(near, integer("size", size, 1))
