"""Caches of layers and stacks: a decoder layer's, lists of one for each layer, and how a call uses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from fastattn._args.cache import counts_of
from fastattn._args.errors import named, put_name
from fastattn._args.types import Array, ArrayLike
from fastattn._args.values import integer
from fastattn._engine.slots import Slots
from fastattn.layers._cache import KVCache, chosen, restored_on_error


@dataclass(eq=False, repr=False)
class DecoderCache:
    """State of a decoder layer between steps: keys and values of its tokens and of the memory.

    Select sequences here: selecting in `tokens` alone would pair sequences with the memory of others.
    """

    tokens: KVCache  # stays empty in a layer that attends another layer's keys
    memory: Any = None  # the array that `keys_values` were computed from; None after `select`
    keys_values: tuple[Array, Array] | None = None  # (batch, heads_kv, len_memory, head_dim) each
    key_padding_mask: Array | None = None  # of the memory, (batch, len_memory); True hides, as in torch

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, KVCache):
            kind = type(self.tokens).__name__
            raise TypeError(f"DecoderCache(): tokens is of type {kind}; expected a KVCache")

    def __repr__(self) -> str:
        keys = "no memory" if self.keys_values is None else f"memory {self.keys_values[0].shape}"
        return f"<DecoderCache: {self.tokens!r}, {keys}>"

    @named("DecoderCache.truncate")
    def truncate(self, length: int) -> None:
        """Drop all tokens from position `length` on; the memory stays."""
        if self.tokens._held or self.keys_values is None:
            self.tokens.truncate(length)
        else:
            integer("length", length, 0)

    @named("DecoderCache.select")
    def select(self, sequences: ArrayLike) -> None:
        """Keep these sequences, as `KVCache.select` does, with their memory and its mask.

        Later calls must omit the memory and its mask: the caller's arrays have the old order.
        """
        index = chosen(sequences, self.tokens._held or self.keys_values)
        with restored_on_error((self,)):
            if self.keys_values is not None:
                k, v = self.keys_values
                self.keys_values, self.memory = (k[index], v[index]), None
            if self.key_padding_mask is not None:
                self.key_padding_mask = self.key_padding_mask[index]
            if self.tokens._held:
                self.tokens.select(index)


OneCache = TypeVar("OneCache", KVCache, DecoderCache)


class Caches(list[OneCache]):
    """List of caches, one for each layer, from `new_cache`."""

    def truncate(self, length: int) -> None:
        """Drop all tokens from position `length` on, in all layers."""
        with restored_on_error(self):
            for cache in self:
                cache.truncate(length)

    def select(self, sequences: ArrayLike) -> None:
        """Keep these sequences, in this order, in all layers; see `KVCache.select`."""
        with restored_on_error(self):
            for cache in self:
                cache.select(sequences)


def slots_of(
    caches: Sequence[KVCache],
    heads: Sequence[tuple[int, int]],
    sizes: tuple[int, int],
    dtype: np.dtype[Any],
    lengths: ArrayLike | None,
) -> tuple[Slots, ...] | None:
    """Where a program writes keys and values of `sizes`, (batch, tokens), with so many `heads` of each size.

    None where only the caches' `append` can tell what happens.
    """
    (batch, tokens), first = sizes, caches[0]
    for cache, own in zip(caches, heads, strict=True):
        alike = cache is first or (
            np.array_equal(cache.offset, first.offset) and np.array_equal(cache._rows, first._rows)
        )
        if not (alike and cache._fits(batch, *own, dtype)):
            return None
    counts = None
    if lengths is not None:
        try:
            counts = counts_of(lengths, batch, tokens)
        except Exception as error:
            put_name("KVCache.append", error)
            raise
    shapes = [(batch, heads_kv, tokens, head_dim) for heads_kv, head_dim in heads]
    given = zip(caches, shapes, strict=True)
    return tuple(cache._extend(shape, shape, dtype, counts) for cache, shape in given)
