"""Cache of keys and values in pages, which sequences share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastattn._args.cache import append_args, require_blocks
from fastattn._args.dtypes import float_dtype
from fastattn._args.errors import named
from fastattn._args.quiet import quiet
from fastattn._args.types import FLOAT32, Array, ArrayLike, DTypeLike, columns
from fastattn._args.values import MOST_SIZE, integer
from fastattn._engine.slots import stored


class PagedKVCache:
    """Keys and values of many sequences in pages of fixed size, for `fastattn.attention` with a block_table.

    Memory is allocated once. Sequences come and go without copies, and a fork shares the full pages of its
    parent. There is no scheduler: the caller frees sequences when pages run out.

    Parameters
    ----------
    pages : int
        Number of pages of all sequences together.
    page_size : int
        Tokens of a page. Pages of 64 tokens, or a multiple, are as fast as keys in one piece.
    num_kv_heads : int
        Key heads.
    head_dim : int
        Dimension of keys and values.
    dtype : dtype, default float32
        dtype of the arrays; "int8" and "int4" round as `KVCache` does, with scales of int8 in float32.

    Examples
    --------
    >>> import fastattn, numpy as np
    >>> from fastattn.layers import PagedKVCache
    >>> cache = PagedKVCache(pages=8, page_size=64, num_kv_heads=2, head_dim=16)
    >>> prompt = cache.allocate()
    >>> q, k = np.ones((1, 4, 100, 16), np.float32), np.ones((1, 2, 100, 16), np.float32)
    >>> out = fastattn.attention(q, **cache.append([prompt], k, k), causal=True)
    >>> other = cache.fork(prompt)  # shares one page and copies the other
    >>> cache.free_pages
    5
    >>> q, k = np.ones((2, 4, 1, 16), np.float32), np.ones((2, 2, 1, 16), np.float32)
    >>> fastattn.attention(q, **cache.append([prompt, other], k, k)).shape
    (2, 4, 1, 16)
    """

    @named("PagedKVCache")
    def __init__(
        self, pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike = "float32"
    ):
        kept_as = float_dtype(dtype, of_cache=True)
        sizes = {"pages": pages, "num_kv_heads": num_kv_heads, "page_size": page_size, "head_dim": head_dim}
        shape = tuple(integer(name, x, 1, MOST_SIZE) for name, x in sizes.items())
        self._dtype, self._page = kept_as, shape[2]
        require_blocks("head_dim is", shape[3], kept_as)
        shape = *shape[:3], columns(kept_as, shape[3])
        # Keys and values, (pages, heads, page, head_dim), and of int8 their scales.
        self._held: tuple[Array, ...] = np.zeros(shape, kept_as), np.zeros(shape, kept_as)
        if kept_as == np.int8:
            self._held += np.zeros(shape[:3], FLOAT32), np.zeros(shape[:3], FLOAT32)
        self._free = list(range(shape[0]))
        self._owners = [0] * shape[0]  # sequences of each page
        self._pages: dict[int, list[int]] = {}  # of each sequence
        self._lengths: dict[int, int] = {}
        self._allocated = 0

    def __repr__(self) -> str:
        k = self._held[0]
        return f"<PagedKVCache: {len(self._lengths)} sequences, {len(self._free)} of {len(k)} pages free>"

    @property
    def free_pages(self) -> int:
        """Number of pages that no sequence has."""
        return len(self._free)

    @named("PagedKVCache.length")
    def length(self, sequence: int) -> int:
        """Number of tokens of a sequence."""
        return self._lengths[self._known(sequence)]

    @named("PagedKVCache.allocate")
    def allocate(self) -> int:
        """Make an empty sequence, and return its number; pages come with its tokens."""
        self._allocated += 1
        self._pages[self._allocated], self._lengths[self._allocated] = [], 0
        return self._allocated

    @named("PagedKVCache.fork")
    def fork(self, sequence: int) -> int:
        """Make a sequence with the same tokens, and return its number: full pages are shared.

        Raises MemoryError where the last page is not full and no page is free for its copy.
        """
        old = self._known(sequence)
        pages, length = list(self._pages[old]), self._lengths[old]
        if length % self._page:
            (last,) = self._take(1)
            for x in self._held:
                x[last] = x[pages[-1]]
            pages[-1] = last
        for page in pages[: length // self._page]:
            self._owners[page] += 1
        new = self.allocate()
        self._pages[new], self._lengths[new] = pages, length
        return new

    @named("PagedKVCache.free")
    def free(self, sequence: int) -> None:
        """Forget a sequence; pages that no other sequence has are free."""
        number = self._known(sequence)
        del self._lengths[number]
        for page in self._pages.pop(number):
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)

    @named("PagedKVCache.append")
    @quiet  # a float32 too large for float16 becomes infinite
    def append(
        self, sequences: Sequence[int], k: ArrayLike, v: ArrayLike, lengths: ArrayLike | None = None
    ) -> dict[str, Any]:
        """Append tokens to sequences; return the arguments of `fastattn.attention` for them, by name.

        Parameters
        ----------
        sequences : sequence of int, (batch,)
            Numbers from `allocate` or `fork`, each once.
        k, v : array_like, (batch, heads, tokens, head_dim)
            Keys and values of the new tokens.
        lengths : array_like of int, (batch,), optional
            The first so many tokens of each sequence are appended; the others are padding.

        Returns
        -------
        dict
            ``k`` and ``v``, all pages; ``block_table`` (batch, n), ``kv_lengths`` and ``q_offset`` (batch,);
            in int8 ``k_scale`` and ``v_scale``.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit; nothing was changed.
        MemoryError
            If too few pages are free; nothing was changed.
        """
        numbers = [self._known(sequence) for sequence in sequences]
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"(): sequences is {numbers}; expected each once")
        held = tuple(np.broadcast_to(x[0], (len(numbers), *x.shape[1:])) for x in self._held)
        new_k, new_v, counts = append_args(k, v, lengths, held, self._dtype)
        tokens = new_k.shape[2]
        added = [tokens] * len(numbers) if counts is None else counts.tolist()
        starts = [self._lengths[number] for number in numbers]
        ends = [start + count for start, count in zip(starts, added, strict=True)]
        tables = [self._pages[number] for number in numbers]
        wanted = [-(-end // self._page) - len(table) for end, table in zip(ends, tables, strict=True)]
        parts = stored(new_k, new_v, self._dtype, self._held[2].dtype if len(self._held) > 2 else None)
        fresh = iter(self._take(sum(wanted)))
        for number, end, pages, count in zip(numbers, ends, tables, wanted, strict=True):
            pages += [next(fresh) for _ in range(count)]
            self._lengths[number] = end
        table = np.zeros((len(tables), max(map(len, tables), default=0)), np.int32)
        for i, pages in enumerate(tables):
            table[i, : len(pages)] = pages
        sequence, token = np.nonzero(np.arange(tokens) < np.array(added)[:, None])
        place = np.array(starts, np.int64)[sequence] + token
        page, row = table[sequence, place // self._page], place % self._page
        for whole, part in zip(self._held, parts, strict=True):
            whole[page, :, row] = part[sequence, :, token]
        names = ("k", "v", "k_scale", "v_scale")[: len(self._held)]
        lengths_of = {"kv_lengths": np.array(ends, np.int64), "q_offset": np.array(starts, np.int64)}
        return {**dict(zip(names, self._held, strict=True)), "block_table": table, **lengths_of}

    def _known(self, sequence: int) -> int:
        number = integer("sequence", sequence, 0)
        if number not in self._lengths:
            raise ValueError(f"(): there is no sequence {number}; expected a number from allocate or fork")
        return number

    def _take(self, count: int) -> list[int]:
        """Take so many free pages, each for one sequence."""
        if count > len(self._free):
            raise MemoryError(f"(): {len(self._free)} pages are free; expected at least {count}")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._owners[page] = 1
        return taken
