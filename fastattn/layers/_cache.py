"""The cache of keys and values of one attention, for decoding token by token."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fastattn import _safetensors
from fastattn._args.cache import append_args, cache_args
from fastattn._args.errors import named, put_name
from fastattn._args.types import (
    FLOAT32,
    INT4,
    INT4_BLOCK,
    INT4_BYTES,
    Array,
    ArrayLike,
    DTypeLike,
    Ints,
    Shape,
    columns,
    dtype_name,
    lane_dtype,
    shape_of,
)
from fastattn._args.values import integer, integers, is_float, require_broadcast, short
from fastattn._engine.slots import Slots

_LEAST_CAPACITY = 16
_FORMAT, _KEY = 1, "fastattn.cache"  # of files
_NAMES = ("k", "v", "k_scale", "v_scale")  # of the arrays that a cache holds


class _Cached(NamedTuple):
    k: Array  # (batch, heads_kv, len_k, head_dim), a view
    v: Array
    kv_lengths: Ints | None  # (batch,); None where all sequences have len_k keys
    q_offset: Ints | int  # position of the first new token


class Cached(_Cached):
    """Arguments of `fastattn.attention` for the tokens just appended, from `KVCache.append`.

    A tuple ``(k, v, kv_lengths, q_offset)``. For a cache in int8, it also has the attributes ``k_scale`` and
    ``v_scale``, (batch, heads_kv, len_k), otherwise None. ``attention(q, **cached._asdict())`` passes
    everything. ``_replace`` and ``repr`` include the scales; unpacking does not.
    """

    k_scale: Array | None = None
    v_scale: Array | None = None
    _dropped: Ints | int = 0  # tokens before the first new one that `KVCache.keep` has dropped

    def _asdict(self) -> dict[str, Any]:
        """Return the arguments that are not None, by name."""
        named = super()._asdict()
        if self.k_scale is not None:
            named |= {"k_scale": self.k_scale, "v_scale": self.v_scale}
        return named

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Cached:  # type: ignore[override]
        """Iterate over the four elements and, in int8, the scales after them."""
        k, v, kv_lengths, q_offset, *scales = iterable
        made = cls(k, v, kv_lengths, q_offset)
        if scales:
            made.k_scale, made.v_scale = scales
        return made

    def _replace(self, **changes: Any) -> Cached:
        """Return the arguments that are not None, with `changes`."""
        there = self._asdict()
        if unknown := [name for name in changes if name not in there]:
            raise ValueError(f"Cached._replace(): {unknown[0]} is not there; expected {', '.join(there)}")
        return self._make((there | changes).values())

    def __repr__(self) -> str:
        return f"Cached({', '.join(f'{name}={x!r}' for name, x in self._asdict().items())})"


class KVCache:
    """Keys and values of one attention layer, appended in place.

    The arrays are ``(batch, heads_kv, capacity, head_dim)``, and attention reads them without a copy. Their
    capacity doubles when they are full, so that appending a token takes amortised O(1) time. Sequences may
    have different lengths: sequence b has the first ``lengths[b]`` keys.

    Parameters
    ----------
    capacity : int, default 0
        Tokens of each sequence to allocate for at the first append.
    dtype : dtype, optional
        dtype of the arrays; default that of the first keys. "float16" or "bfloat16" halves the memory that a
        step of float32 queries reads, "int8" quarters it, and "int4" halves int8's.

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
    >>> cache = KVCache(dtype="int8")
    >>> k, v = np.ones((1, 2, 1, 64), np.float32), np.ones((1, 2, 1, 64), np.float32)
    >>> out = fastattn.attention(q.astype(np.float32), **cache.append(k, v)._asdict())
    >>> cache.nbytes  # of 16 tokens: 2 heads of 2 * (64 + 4) bytes each
    4352

    Notes
    -----
    In "int8", each key and value of a token and head is rounded to integers from -127 to 127 times its scale,
    the largest magnitude / 127: elements err by at most half the scale. The Notes of `fastattn.attention`
    give the error of scores and results. A key or value with NaN or Inf becomes NaN as a whole: its scale is
    NaN. Scales are float32, or float64 if the first keys are; later float64 has to fit scales in float32.

    In "int4", head dimensions are multiples of 32. Keys and values are multiplied by Hadamard matrices, which
    spread elements that stand out: H(1) = 1, H(2n) = [[H(n), H(n)], [H(n), -H(n)]] / sqrt(2), of the largest
    powers of two that fit, at most 256, one after the other: 96 elements by H(64) and H(32). Each 32 elements
    of the product become integers from -8 to 7 times a float16 scale, the element of the largest magnitude /
    -8: they err by at most half of the scale, or by all of it next to 8. Arrays are (batch, heads_kv, len_k,
    18 * head_dim / 32), for values with their own head_dim, and their dtype is ``[("int4", "u1")]``: a row
    has the scales, then 16 bytes for each 32 elements, i in the lower half of byte i and i + 16 in the upper,
    8 added. A row with NaN or Inf, or too large for such scales (beyond 524,000 after the product), becomes
    NaN as a whole. Scales below 6e-5 have fewer digits: 32 elements below 5e-4 err by more, and those below
    2e-7 become 0.

    Sources: for "int4", S. Ashkboos et al., "QuaRot", 2024, arXiv:2404.00456.
    """

    @named("KVCache")
    def __init__(self, capacity: int = 0, dtype: DTypeLike | None = None):
        self._capacity, self._dtype = cache_args(capacity, dtype)
        self._length = 0
        self._lengths: Ints | None = None  # None where all sequences have self._length tokens
        self._dropped: Ints | None = None  # by `keep`: tokens of each sequence, (batch,); None for none
        self._kept = 0  # the most tokens that it left in a sequence
        # Keys and values, and their scales; empty before the first append.
        self._held: tuple[Array, ...] = ()

    def __repr__(self) -> str:
        k = self._held[0] if self._held else None
        shape = "empty" if k is None else f"{shape_of(k)} in {dtype_name(k.dtype)}"
        return f"<KVCache: {self._length} of {self._capacity} tokens, {shape}>"

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        raise TypeError("append returns its arrays: attention(q, **cache.append(k, v)._asdict())")

    @property
    def capacity(self) -> int:
        """Allocated tokens of each sequence."""
        return self._capacity

    @property
    def length(self) -> int:
        """Number of tokens in the longest sequence."""
        return self._length

    @property
    def lengths(self) -> Ints:
        """Number of tokens in each sequence, (batch,)."""
        if self._lengths is not None:
            return self._lengths.copy()
        return np.full(self.batch or 0, self._length, np.int64)

    @property
    def batch(self) -> int | None:
        """Number of sequences; None before the first append."""
        return len(self._held[0]) if self._held else None

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the arrays."""
        return sum(x.nbytes for x in self._held)

    @property
    def offset(self) -> Ints | int:
        """Position of the next token, for rotary positions: an integer, or an array (batch,).

        Counts tokens that `keep` has dropped; `lengths` and ``q_offset`` count held tokens alone.
        """
        return self._rows if self._dropped is None else self._rows + self._dropped

    @property
    def _rows(self) -> Ints | int:
        """Number of tokens held, of all sequences or of each: where the next token goes."""
        return self._length if self._lengths is None else self._lengths

    def append(self, k: ArrayLike, v: ArrayLike, lengths: ArrayLike | None = None) -> Cached:
        """Append the keys and values of the next tokens, in amortised O(tokens) time.

        Parameters
        ----------
        k : array_like, (batch, heads_kv, tokens, head_dim)
        v : array_like, (batch, heads_kv, tokens, head_dim_v)
            In k's dtype.
        lengths : array_like of int, (batch,), optional
            Number of new tokens in each sequence; the rest is padding. Default: all.

        Returns
        -------
        Cached
            ``(k, v, kv_lengths, q_offset)``: views of all keys and values, and the lengths and positions for
            `attention`. ``**cached._asdict()`` also passes the scales of a cache in int8.

        Raises
        ------
        TypeError, ValueError
            If k and v do not fit the cache, or their values its scales; nothing was changed.
        """
        try:
            new_k, new_v, counts = append_args(k, v, lengths, self._held, self._dtype)
        except Exception as error:
            put_name("KVCache.append", error)
            raise
        with restored_on_error((self,)):  # rounding to int8 may be interrupted
            slots = self._extend(new_k.shape, new_v.shape, new_k.dtype, counts)
            slots.put(new_k, new_v)
        held_k, held_v, *scales = slots.held(0, new_k.shape[1])
        cached = Cached(held_k, held_v, slots.ends, slots.starts)
        if self._dropped is not None:
            cached._dropped = self._dropped
        if scales:
            cached.k_scale, cached.v_scale = scales
        return cached

    def _fits(self, batch: int, heads_kv: int, head_dim: int, dtype: np.dtype[Any]) -> bool:
        """Whether a program may write such keys and values, and attend them; `append` says why not."""
        kept = self._dtype or dtype
        if kept == INT4 and head_dim % INT4_BLOCK:
            return False
        if kept != dtype and kept not in (np.int8, INT4) and not (dtype == FLOAT32 and kept.itemsize == 2):
            return False
        if not self._held:
            return True
        k, v, *scales = self._held
        fits = shape_of(k) == shape_of(v) == (batch, heads_kv, self._capacity, head_dim) and k.dtype == kept
        return fits and not (scales and scales[0].dtype != lane_dtype(dtype))

    def _extend(self, k: Shape, v: Shape, dtype: np.dtype[Any], counts: Ints | None) -> Slots:
        """Make room for new tokens and count them; the caller writes them next.

        The shapes (batch, heads_kv, tokens, head_dim) of the new keys and values are known to fit. The first
        counts (batch,) tokens of each sequence are not padding; None counts all.
        """
        batch, _, tokens, _ = k
        before = self._rows
        room = self._length + tokens
        if not self._held or room > self._capacity:
            self._grow((k, v), dtype, room)
        ends = None
        if counts is None and self._lengths is None:
            self._length = room
        else:
            ends = before + (np.full(batch, tokens) if counts is None else counts)
            self._end_at(ends)
        held_k, held_v, *scales = self._held
        return Slots(held_k, held_v, before, ends, self._length, *scales)

    def _staggered(self, tokens: int) -> KVCache:
        """Count so many more tokens of the only sequence; return a cache whose sequence i has i of them.

        Its sequences share this one's memory: each token is computed over those before it, and in a batch
        all of them at once, with the bits that they have one by one.
        """
        before = self._length
        k, v = ((*x.shape[:2], tokens, shape_of(x)[3]) for x in self._held[:2])
        self._extend(k, v, self._held[0].dtype, None)
        cache = KVCache(self._capacity, self._dtype)
        strided = np.lib.stride_tricks.as_strided
        cache._held = tuple(strided(x, (tokens, *x.shape[1:]), (0, *x.strides[1:])) for x in self._held)
        cache._end_at(before + np.arange(tokens))
        return cache

    def _end_at(self, ends: Ints) -> None:
        """Set the number of tokens of each sequence, (batch,)."""
        ends.flags.writeable = False  # callers see this array
        self._length = int(ends.max(initial=0))
        self._lengths = None if (ends == self._length).all() else ends

    @named("KVCache.truncate")
    def truncate(self, length: int) -> None:
        """Drop all held tokens but the first `length`, such as rejected guesses.

        After `keep`, `length` is 0 or not less than what it kept: the positions of kept tokens are not known.
        """
        length = integer("length", length, 0, self._length)
        if self._dropped is not None and length < self._kept:
            if length:
                expected = f"0, or at least {self._kept}, the tokens that keep has left"
                raise ValueError(f"(): length is {length}; expected {expected}")
            self._dropped = None
        if self._lengths is None:
            self._length = length
        else:
            self._end_at(np.minimum(self._lengths, length))

    @named("KVCache.select")
    def select(self, sequences: ArrayLike) -> None:
        """Keep these sequences, in this order: to drop finished ones, or to follow beams.

        An index may occur several times. All keys and values are copied.
        """
        index = chosen(sequences, self._held)
        self._held = tuple(x[index] for x in self._held)
        if self._dropped is not None:
            self._dropped = self._dropped[index]
        if self._lengths is not None:
            self._end_at(self._lengths[index])

    @named("KVCache.keep")
    def keep(self, indices: ArrayLike) -> None:
        """Keep these tokens of each sequence and key head, and drop all others, so that memory is bounded.

        Parameters
        ----------
        indices : array_like of int, (..., n)
            Indices of held tokens, ascending; broadcasts to (batch, heads_kv, n). Heads may keep different
            tokens, but equal numbers of them. Fill with -1 at the end where a sequence keeps fewer than n.

        Raises
        ------
        TypeError, ValueError
            If a token is not held, or the indices do not fit or ascend; nothing was changed.

        Notes
        -----
        Keys keep their rotary positions. The next token has the position `offset`, which counts dropped
        tokens; layers rotate by it. Masks count held tokens: with ``causal``, later tokens attend all of
        them; windows and ALiBi distances skip dropped tokens. O(batch * heads_kv * capacity) memory for a
        copy. ``stats=("key_sums",)`` of `fastattn.attention` gives the attention that each key received, as
        in H2O (Zhang et al. 2023, arXiv:2306.14048).
        """
        if not self._held:
            raise ValueError("(): the cache is empty; expected one that has been filled")
        before = self.lengths
        given = np.atleast_1d(integers("indices", indices, low=-1, high=self._length - 1))
        shape = *self._held[0].shape[:2], given.shape[-1]
        require_broadcast("indices", given.shape, shape, "(batch, heads_kv, n)")
        index = np.broadcast_to(given, shape)
        counts = (index >= 0).sum(axis=-1)
        kept, first, later = counts.max(axis=1, initial=0), index[..., :-1], index[..., 1:]
        wrong = None
        if ((later >= 0) & ((first < 0) | (first >= later))).any():
            wrong = "out of order; expected ascending ones, and -1 after them"
        elif (index >= before[:, None, None]).any():
            wrong = f"that are not held; expected those of sequences of lengths {short(before)}"
        elif (counts != kept[:, None]).any():
            wrong = "in other numbers by head; expected as many for each"
        if wrong:
            raise ValueError(f"(): indices has tokens {wrong}")
        index = index[..., : kept.max(initial=0)]
        arrays = tuple(np.empty_like(x) for x in self._held)  # earlier views and copies stay as they are
        for new, x in zip(arrays, self._held, strict=True):
            places = index.reshape(*index.shape, *(1,) * (x.ndim - 3))
            new[:, :, : index.shape[-1]] = np.take_along_axis(x, places, axis=2)
        dropped = before - kept
        self._held, self._dropped = arrays, dropped if self._dropped is None else self._dropped + dropped
        self._kept = int(kept.max(initial=0))
        self._end_at(kept)

    @named("KVCache.save")
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache to a safetensors file, if it is not empty; requires the safetensors package."""
        _safetensors.write(path, self._arrays(), {"format": _FORMAT}, _KEY)

    @classmethod
    @named("KVCache.load")
    def load(cls, path: str | os.PathLike[str]) -> KVCache:
        """Read a cache that `save` wrote."""
        arrays, _ = _safetensors.read(path, _KEY, "cache", _FORMAT)
        return cls._of(arrays, os.fsdecode(path))

    def _arrays(self) -> dict[str, Array]:
        """Keys, values, scales and lengths, by name: copies."""
        if not self._held:
            raise ValueError("(): the cache is empty; expected one that has been filled")
        lengths = self.lengths
        held = {name: x[:, :, : self._length].copy() for name, x in zip(_NAMES, self._held, strict=False)}
        for name, x in held.items():
            held[name] = x = x.view(np.uint8) if x.dtype == INT4 else x  # files know no INT4
            # What was not written may be any memory of the process.
            x.swapaxes(1, 2)[np.arange(self._length) >= lengths[:, None]] = 0
        dropped = {}
        if self._dropped is not None:
            dropped = {"dropped": self._dropped, "kept": np.full_like(lengths, self._kept)}
        return {**held, "lengths": lengths, **dropped}

    @classmethod
    def _of(cls, arrays: dict[str, Array], where: str) -> KVCache:
        """The cache with these `_arrays`, of the file `where`."""
        names = _NAMES[: 4 if "k_scale" in arrays else 2]
        if arrays.keys() not in ({*names, "lengths"}, {*names, "lengths", "dropped", "kept"}):
            came = f"{where} has the arrays {', '.join(arrays)}"
            expected = f"{', '.join(_NAMES)} and lengths, or {', '.join(_NAMES[:2])} and lengths"
            raise ValueError(f"(): {came}; expected {expected}")
        held, lengths = tuple(arrays[name] for name in names), arrays["lengths"]
        held = tuple(x.view(INT4) if x.dtype == np.uint8 else x for x in held)
        dropped, most = (arrays.get(name, np.zeros_like(lengths)) for name in ("dropped", "kept"))
        k, v, *scales = held
        fit = k.ndim == v.ndim == 4 and k.shape[:3] == v.shape[:3] and k.dtype == v.dtype
        fit = fit and all(x.dtype == np.int64 and x.shape == k.shape[:1] for x in (lengths, dropped, most))
        fit = fit and (k.dtype == np.int8 if scales else k.dtype == INT4 or is_float(k.dtype))
        fit = fit and not (k.dtype == INT4 and (k.shape[3] % INT4_BYTES or v.shape[3] % INT4_BYTES))
        fit = fit and all(
            x.shape == k.shape[:3] and x.dtype == scales[0].dtype == lane_dtype(x.dtype) for x in scales
        )
        if not fit:
            came = ", ".join(f"{name} {x.shape} in {x.dtype}" for name, x in arrays.items())
            raise ValueError(f"(): {where} has {came}; expected what a cache holds")
        if lengths.size and not (lengths.min() >= 0 and lengths.max() == k.shape[2]):
            came = f"lengths from {lengths.min()} to {lengths.max()}"
            raise ValueError(f"(): {where} has {came}; expected the longest to be {k.shape[2]}, as k")
        if (dropped < 0).any():
            raise ValueError(f"(): {where} has a negative number in dropped; expected what a cache holds")
        cache = cls(k.shape[2], k.dtype)
        cache._held, cache._dropped = held, dropped if dropped.any() else None
        cache._kept = int(most.max(initial=0))
        cache._end_at(lengths)
        return cache

    def _grow(self, shapes: tuple[Shape, Shape], dtype: np.dtype[Any], room: int) -> None:
        """Make room for at least `room` tokens, and for twice as many as before."""
        wanted = 2 * self._capacity if self._held else self._capacity
        capacity = max(room, wanted, _LEAST_CAPACITY)
        lane, dtype = lane_dtype(dtype.newbyteorder("=")), self._dtype or dtype.newbyteorder("=")
        roomy = [(*shape[:2], capacity, columns(dtype, shape[3])) for shape in shapes]
        arrays = tuple(np.empty(shape, dtype) for shape in roomy)
        if dtype == np.int8:
            lane = self._held[2].dtype if self._held else lane
            arrays += tuple(np.empty(shape[:3], lane) for shape in roomy)
        self._move(arrays, 0)

    def _forget(self, count: int, capacity: int) -> None:
        """Drop the first `count` tokens, which all sequences have, and hold the others in new memory.

        Caches that share the old memory keep what they see. Later tokens have earlier positions then.
        """
        shapes = ((*x.shape[:2], capacity, *x.shape[3:]) for x in self._held)
        self._move(tuple(np.empty(n, x.dtype) for n, x in zip(shapes, self._held, strict=True)), count)
        self._end_at(self.lengths - count)

    def _move(self, arrays: tuple[Array, ...], first: int) -> None:
        """Hold the tokens from `first` on in these arrays."""
        for array, old in zip(arrays, self._held, strict=False):
            array[:, :, : self._length - first] = old[:, :, first : self._length]
        # Nothing has changed so far: if there was no memory, the cache is as it was.
        self._held, self._capacity = arrays, arrays[0].shape[2]


class restored_on_error:
    """Context manager that restores `caches` if its block raises; one of `contextlib` takes longer."""

    __slots__ = ("_states",)

    def __init__(self, caches: Sequence[Any]) -> None:
        # References are enough: a cache writes to its arrays only after the tokens that it counts.
        self._states: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for cache in caches:
            tokens = getattr(cache, "tokens", None)  # of a DecoderCache
            self._states += [(vars(x), dict(vars(x))) for x in (tokens, cache) if x is not None]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is not None:
            for now, before in self._states:
                now.update(before)


def chosen(sequences: ArrayLike, held: Sequence[Array] | None) -> Ints:
    """Check `sequences` of a cache with the arrays `held`; raise if it is empty."""
    if not held:
        raise ValueError("(): the cache is empty; expected one that has been filled")
    index = integers("sequences", sequences, low=0, high=len(held[0]) - 1)
    if index.ndim != 1:
        raise ValueError(f"(): sequences has shape {index.shape}; expected (n,)")
    return index
