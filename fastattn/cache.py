"""Keys and values of the tokens so far, for step-by-step decoding."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from fastattn._args.values import MOST_SIZE, as_array, float_array, float_dtype, integer, integers, is_ready

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import ArrayLike, DTypeLike

    from fastattn._args.types import Array, Ints, Shape

_LEAST_CAPACITY = 16
_APPEND = "KVCache.append"


class Cached(NamedTuple):
    """What `KVCache.append` returns: the arguments of `fastattn.attention` for the tokens just appended."""

    k: Array  # (batch, heads_kv, len_k, head_dim), a view
    v: Array
    kv_lengths: Ints | None  # (batch,); None where all sequences have len_k keys
    q_offset: Ints | int  # position of the first new token


class Slots(NamedTuple):
    """Where the keys and values of new tokens go: the memory of a cache, which already counts them."""

    k: Array  # (batch, heads_kv, capacity, head_dim)
    v: Array
    starts: Ints | int  # of the new tokens: one number, or one a sequence, (batch,)
    ends: Ints | None  # (batch,); None where all sequences end at `length`
    length: int  # of the longest sequence, with them

    @np.errstate(over="ignore")  # what float32 holds and float16 does not is infinite
    def put(self, k: Array, v: Array, first: int = 0) -> tuple[Array, Array]:
        """Write k and v (batch, heads, tokens, head_dim) to the heads from `first` on; views of all of these.

        Padding is written, too, and then overwritten.
        """
        batch, heads, tokens, _ = k.shape
        held = self.k[:, first : first + heads], self.v[:, first : first + heads]
        for new, there in zip((k, v), held, strict=True):
            if isinstance(self.starts, int):
                there[:, :, self.starts : self.starts + tokens] = new
            else:
                place = self.starts[:, None] + np.arange(tokens)
                there[np.arange(batch)[:, None], :, place] = new.swapaxes(1, 2)
        return held[0][:, :, : self.length], held[1][:, :, : self.length]


class KVCache:
    """Keys and values of one attention layer, appended in place; capacity doubles, so a token costs O(1).

    They lie as ``(batch, heads_kv, capacity, head_dim)``, and attention reads them there without a copy.
    Sequences may have different lengths: the keys of sequence b are its first ``lengths[b]``.

    Parameters
    ----------
    capacity : int, default 0
        Tokens a sequence to make room for with the first append. More is made when it is needed.
    dtype : dtype, optional
        How keys and values are kept; default as they come. "float16" or "bfloat16" halves the memory that a
        step of float32 queries reads.

    Examples
    --------
    >>> import fastattn, numpy as np
    >>> from fastattn.layers import KVCache
    >>> cache = KVCache()
    >>> for _ in range(3):  # token by token
    ...     q, k, v = np.ones((1, 8, 1, 64)), np.ones((1, 2, 1, 64)), np.ones((1, 2, 1, 64))
    ...     k, v, kv_lengths, q_offset = cache.append(k, v)
    ...     out = fastattn.attention(q, k, v, kv_lengths=kv_lengths, q_offset=q_offset, causal=True)
    >>> cache.length
    3
    """

    __slots__ = ("_capacity", "_dtype", "_k", "_length", "_lengths", "_v")

    def __init__(self, capacity: int = 0, dtype: DTypeLike | None = None):
        self._capacity = integer("KVCache", "capacity", capacity, 0, MOST_SIZE)
        self._length = 0
        self._dtype = None if dtype is None else float_dtype("KVCache", dtype)
        self._lengths: Ints | None = None  # where they differ
        self._k: Array | None = None
        self._v: Array | None = None

    def __repr__(self) -> str:
        shape = "empty" if self._k is None else f"{self._k.shape} in {self._k.dtype}"
        return f"<KVCache: {self._length} of {self._capacity} tokens, {shape}>"

    @property
    def capacity(self) -> int:
        """Tokens a sequence that there is room for."""
        return self._capacity

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return self._length

    @property
    def lengths(self) -> Ints:
        """Tokens of each sequence, (batch,)."""
        if self._lengths is not None:
            return self._lengths.copy()
        return np.full(0 if self._k is None else len(self._k), self._length, np.int64)

    @property
    def batch(self) -> int | None:
        """Number of sequences; None as long as nothing was appended."""
        return None if self._k is None else len(self._k)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are held."""
        return 0 if self._k is None or self._v is None else self._k.nbytes + self._v.nbytes

    @property
    def offset(self) -> Ints | int:
        """Position of the next token: one number, or one a sequence, (batch,)."""
        return self._length if self._lengths is None else self._lengths

    def append(self, k: ArrayLike, v: ArrayLike, lengths: ArrayLike | None = None) -> Cached:
        """Append the keys and values of the next tokens; O(tokens), amortised.

        Parameters
        ----------
        k : array_like, (batch, heads_kv, tokens, head_dim)
        v : array_like, (batch, heads_kv, tokens, head_dim_v)
            k's dtype.
        lengths : array_like of int, (batch,), optional
            How many of the tokens count in each sequence, from the first: prompts padded at their ends.

        Returns
        -------
        Cached
            ``(k, v, kv_lengths, q_offset)``: all keys and values so far, as views, and what tells
            `attention` where they end and where the new tokens stand.

        Raises
        ------
        TypeError, ValueError
            If they do not fit those that are there; nothing was changed.
        """
        new_k: Array = k if is_ready(k, 4) else float_array(_APPEND, "k", k)  # type: ignore[assignment]
        new_v: Array = v if is_ready(v, 4) else float_array(_APPEND, "v", v)  # type: ignore[assignment]
        counts = self._require_fit(new_k, new_v, lengths)
        slots = self._extend(new_k.shape, new_v.shape, new_k.dtype, counts)
        return Cached(*slots.put(new_k, new_v), slots.ends, slots.starts)

    def _extend(self, shape_k: Shape, shape_v: Shape, dtype: np.dtype[Any], counts: Ints | None) -> Slots:
        """Count new tokens, of which the first counts (batch,) are none of padding, and make room for them.

        The shapes are theirs, (batch, heads_kv, tokens, head_dim), and fit. They are to be written, next.
        """
        batch, _, tokens, _ = shape_k
        before = self.offset
        room = self._length + tokens
        if self._k is None or room > self._capacity:
            self._grow(shape_k, shape_v, dtype, room)
        assert self._k is not None
        assert self._v is not None
        ends = None
        if counts is None and self._lengths is None:
            self._length = room
        else:
            ends = before + (np.full(batch, tokens) if counts is None else counts)
            self._end_at(ends)
        return Slots(self._k, self._v, before, ends, self._length)

    def _end_at(self, ends: Ints) -> None:
        """Take over how many tokens each sequence has, (batch,)."""
        ends.flags.writeable = False  # a caller gets to see it
        self._length = int(ends.max(initial=0))
        self._lengths = None if (ends == self._length).all() else ends

    def mark(self) -> Any:
        """What is there now, for `restore`."""
        return self._k, self._v, self._capacity, self._length, self._lengths

    def restore(self, mark: Any) -> None:
        """Forget what was appended since `mark`."""
        self._k, self._v, self._capacity, self._length, self._lengths = mark

    def truncate(self, length: int) -> None:
        """Forget all tokens from position `length` on: to take back what a model only guessed."""
        length = integer("KVCache.truncate", "length", length, 0, self._length)
        if self._lengths is None:
            self._length = length
        else:
            self._end_at(np.minimum(self._lengths, length))

    def select(self, sequences: ArrayLike) -> None:
        """Keep the sequences of these indices, in this order: to drop those that ended, or to follow beams.

        O(memory held): everything is copied. An index may occur several times.
        """
        index = self._index("KVCache.select", sequences)
        assert self._k is not None
        assert self._v is not None
        self._k, self._v = self._k[index], self._v[index]
        if self._lengths is not None:
            self._end_at(self._lengths[index])

    def _index(self, func: str, sequences: ArrayLike) -> Ints:
        """`sequences`, checked; raises if nothing is there to be selected."""
        if self._k is None:
            raise ValueError(f"{func}(): the cache is empty; expected one that has been filled")
        index = as_array(func, "sequences", sequences)
        index = integers(func, "sequences", index, index.shape, "", 0, len(self._k) - 1)
        if index.ndim != 1:
            raise ValueError(f"{func}(): sequences has shape {index.shape}; expected (n,)")
        return index

    def _require_fit(self, k: Array, v: Array, lengths: ArrayLike | None) -> Ints | None:
        """Raise unless k and v continue what is there; lengths, checked."""
        if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]:
            raise ValueError(
                f"{_APPEND}(): k and v have shapes {k.shape} and {v.shape}; expected"
                f" (batch, heads_kv, tokens, head_dim) for both"
            )
        if k.dtype.newbyteorder("=") != v.dtype.newbyteorder("="):
            raise TypeError(f"{_APPEND}(): v has dtype {v.dtype}; expected k's, {k.dtype}")
        for name, x, there in (("k", k, self._k), ("v", v, self._v)):
            if there is None:
                continue
            if x.shape[:2] != there.shape[:2] or x.shape[3] != there.shape[3]:
                expected = f"({there.shape[0]}, {there.shape[1]}, tokens, {there.shape[3]})"
                raise ValueError(f"{_APPEND}(): {name} has shape {x.shape}; expected {expected} as before")
            if self._dtype is None and x.dtype.newbyteorder("=") != there.dtype:
                raise TypeError(f"{_APPEND}(): {name} has dtype {x.dtype}; expected {there.dtype} as before")
        if lengths is None:
            return None
        batch, _, tokens, _ = k.shape
        counts = integers(_APPEND, "lengths", lengths, (batch,), "(batch,)", 0, tokens)
        return np.broadcast_to(counts, (batch,))

    def _grow(self, shape_k: Shape, shape_v: Shape, dtype: np.dtype[Any], room: int) -> None:
        """Make room for at least `room` tokens: twice what there was."""
        wanted = self._capacity if self._k is None else 2 * self._capacity
        capacity = max(room, wanted, _LEAST_CAPACITY)
        dtype = self._dtype or dtype.newbyteorder("=")
        # All that can fail first: without memory, what was there stays.
        self._k, self._v = (
            self._moved(old, (*shape[:2], capacity, shape[3]), dtype)
            for old, shape in ((self._k, shape_k), (self._v, shape_v))
        )
        self._capacity = capacity

    def _moved(self, old: Array | None, shape: Shape, dtype: np.dtype[Any]) -> Array:
        new: Array = np.empty(shape, dtype)
        if old is not None:
            new[:, :, : self._length] = old[:, :, : self._length]
        return new


@dataclass(eq=False)
class DecoderCache:
    """What one decoder layer keeps from step to step: its own tokens, and the memory's keys and values.

    Select sequences here, not in `tokens` alone, or each goes on over the memory of another.
    """

    tokens: KVCache
    memory: Any = None  # what `keys_values` are of; None also after `select`
    keys_values: tuple[Array, Array] | None = None  # (batch, heads_kv, len_memory, head_dim) each
    key_padding_mask: Array | None = None  # of the memory, (batch, len_memory)

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, KVCache):
            kind = type(self.tokens).__name__
            raise TypeError(f"DecoderCache(): tokens is of type {kind}; expected a KVCache")

    def mark(self) -> Any:
        """What is there now, for `restore`."""
        return self.tokens.mark(), self.memory, self.keys_values, self.key_padding_mask

    def restore(self, mark: Any) -> None:
        """Forget what came since `mark`."""
        tokens, self.memory, self.keys_values, self.key_padding_mask = mark
        self.tokens.restore(tokens)

    def truncate(self, length: int) -> None:
        """Forget all tokens from position `length` on; the memory stays."""
        self.tokens.truncate(length)

    def select(self, sequences: ArrayLike) -> None:
        """Keep these sequences, as `KVCache.select` does, with their part of the memory and its mask.

        Later calls have to leave the memory and its mask out: those that the caller holds have another order.
        """
        index = self.tokens._index("DecoderCache.select", sequences)
        with restored_on_error((self,)):
            if self.keys_values is not None:
                k, v = self.keys_values
                self.keys_values, self.memory = (k[index], v[index]), None
            if self.key_padding_mask is not None:
                self.key_padding_mask = self.key_padding_mask[index]
            self.tokens.select(index)


OneCache = TypeVar("OneCache", KVCache, DecoderCache)


class Caches(list[OneCache]):
    """One cache a layer, of a stack's `new_cache`: a list that truncates and selects in all of them."""

    def truncate(self, length: int) -> None:
        """Forget all tokens from position `length` on: to take back what a model only guessed."""
        with restored_on_error(self):
            for cache in self:
                cache.truncate(length)

    def select(self, sequences: ArrayLike) -> None:
        """Keep the sequences of these indices, in this order: see `KVCache.select`."""
        with restored_on_error(self):
            for cache in self:
                cache.select(sequences)


@contextmanager
def restored_on_error(caches: Sequence[KVCache | DecoderCache | None]) -> Iterator[None]:
    """A context that leaves `caches` as they were if it ends in an error."""
    held = [cache for cache in caches if cache is not None]
    marks = [cache.mark() for cache in held]
    try:
        yield
    except BaseException:
        for cache, mark in zip(held, marks, strict=True):
            cache.restore(mark)
        raise
