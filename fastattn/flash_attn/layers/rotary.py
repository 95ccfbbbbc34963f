"""Rotary positions by flash-attn's names, for arrays and for CPU tensors with gradients."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import numpy as np

from fastattn._args.errors import named
from fastattn._args.names import show_public
from fastattn._args.values import flag
from fastattn.flash_attn._check import is_tensor, raise_shape, same_kind
from fastattn.flash_attn._lazy import of_tensors
from fastattn.flash_attn._rotate import rotate_by_offsets

__all__ = ["RotaryEmbedding", "apply_rotary_emb", "apply_rotary_emb_kv_", "apply_rotary_emb_qkv_"]


@named("apply_rotary_emb")
def apply_rotary_emb(
    x: Any,
    cos: Any,
    sin: Any,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Any = 0,
    cu_seqlens: Any = None,
    max_seqlen: Any = None,
) -> Any:
    """Turn pairs of the first dimensions of queries or keys by their positions.

    Parameters
    ----------
    x : array or tensor, (batch, length, heads, head_dim)
        With `cu_seqlens`, (tokens, heads, head_dim).
    cos, sin : array or tensor, (positions, rotary_dim / 2)
        Tables; they have no gradients.
    interleaved : bool, default False
        Turn dimensions 2i and 2i + 1 together; False: i and ``i + rotary_dim / 2``.
    inplace : bool, default False
        Write the result to `x`.
    seqlen_offsets : int, or array or tensor of int, (batch,), default 0
        Position of the first token of each sequence.
    cu_seqlens : array or tensor of int, (sequences + 1,), optional
        Sequence i has the tokens ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]`` (exclusive).
    max_seqlen : int, optional
        Ignored.

    Returns
    -------
    array or tensor
        In x's shape and dtype.
    """
    tables = {"cos": cos, "sin": sin, "cu_seqlens": cu_seqlens}
    x, cos, sin, cu_seqlens = same_kind(x, x=x, **tables)
    inplace = flag("inplace", inplace)
    if not is_tensor(x):
        return rotate_by_offsets(x, cos, sin, seqlen_offsets, cu_seqlens, interleaved, inplace, False)
    rotated = of_tensors().rotate_tensor(
        x, cos, sin, seqlen_offsets, cu_seqlens, flag("interleaved", interleaved)
    )
    return x.copy_(rotated) if inplace else rotated


@named("apply_rotary_emb_qkv_")
def apply_rotary_emb_qkv_(
    qkv: Any,
    cos: Any,
    sin: Any,
    cos_k: Any = None,
    sin_k: Any = None,
    interleaved: bool = False,
    seqlen_offsets: Any = 0,
    num_heads_q: int | None = None,
) -> Any:
    """`apply_rotary_emb` in place to the queries and keys of qkv, which is returned.

    qkv is (batch, length, 3, heads, head_dim), or with `num_heads_q` (batch, length, num_heads_q + 2 *
    num_heads_k, head_dim). Keys are turned by `cos_k` and `sin_k` where given.
    """
    (qkv,) = same_kind(qkv, qkv=qkv)
    if qkv.ndim == 5 and qkv.shape[2] == 3:
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    elif (
        qkv.ndim == 4
        and num_heads_q is not None
        and 0 <= (rest := qkv.shape[2] - num_heads_q) == rest // 2 * 2
    ):
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + rest // 2]
    else:
        expected = "(batch, length, 3, heads, head_dim), or with num_heads_q (batch, length, heads, head_dim)"
        raise_shape("qkv", qkv.shape, expected)
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    apply_rotary_emb(k, cos_k, sin_k, interleaved, True, seqlen_offsets)
    return qkv


@named("apply_rotary_emb_kv_")
def apply_rotary_emb_kv_(
    kv: Any, cos: Any, sin: Any, interleaved: bool = False, seqlen_offsets: Any = 0
) -> Any:
    """`apply_rotary_emb` in place to the keys of kv (batch, length, 2, heads, head_dim); returns it."""
    (kv,) = same_kind(kv, kv=kv)
    if kv.ndim != 5 or kv.shape[2] != 2:
        raise_shape("kv", kv.shape, "(batch, length, 2, heads, head_dim)")
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


class RotaryEmbedding:
    """`apply_rotary_emb` with tables that grow with the positions that come.

    A ``torch.nn.Module`` without parameters where torch is imported.

    Parameters
    ----------
    dim : int
        Dimensions that are turned.
    base : float, default 10000.0
        Pair i turns by ``base ** (-2 * i / dim)`` a position.
    interleaved : bool, default False
        As in `apply_rotary_emb`.
    scale_base : float, optional
        Scale queries and keys with their positions, as in XPos (Sun et al., 2022, arXiv:2212.10554).
    device : optional
        Ignored: the CPU.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a module of torch, if it is imported."""
        return super().__new__(_module() if cls is RotaryEmbedding and sys.modules.get("torch") else cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self).__module__ != __name__:
            return super().__reduce_ex__(protocol)
        # The class depends on whether torch is imported.
        return RotaryEmbedding, (self.dim, self.base, self.interleaved, self.scale_base)

    def __init__(
        self, dim: int, base: float = 10000.0, interleaved: bool = False, scale_base: float | None = None,
        device: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self._tables: dict[Any, tuple[Any, ...]] = {}

    def _tables_for(self, length: int, like: Any) -> tuple[Any, ...]:
        """Cos and sin of at least `length` positions in the dtype of `like`, those of keys after them."""
        tensor = is_tensor(like)
        key = tensor, like.dtype
        found = self._tables.get(key)
        if found is None or len(found[0]) < length:
            pair = np.arange(0, self.dim, 2)
            angles = np.outer(np.arange(length), self.base ** (-pair / self.dim))
            scale: Any = 1.0
            if self.scale_base is not None:
                power = (np.arange(length) - length // 2) / self.scale_base
                scale = ((pair + 0.4 * self.dim) / (1.4 * self.dim)) ** power[:, None]
            arrays = [f(angles) * s for s in (scale, 1 / scale) for f in (np.cos, np.sin)]
            if tensor:
                torch = sys.modules["torch"]
                found = tuple(torch.from_numpy(x).to(like.dtype) for x in arrays)
            else:
                found = tuple(x.astype(like.dtype) for x in arrays)
            self._tables[key] = found
        return found

    def forward(
        self,
        qkv: Any,
        kv: Any = None,
        seqlen_offset: Any = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:
        """Turn queries and keys in place.

        `qkv` is as in `apply_rotary_emb_qkv_`, and is returned; with `kv` (batch, length, 2, heads,
        head_dim), it is queries alone, and both are returned. `seqlen_offset` is the position of the first token, or one
        for each sequence; then `max_seqlen` is the number of positions.
        """
        length = max_seqlen
        if length is None:
            most = seqlen_offset if isinstance(seqlen_offset, int) else int(np.asarray(seqlen_offset).max())
            length = qkv.shape[1] + most
        cos, sin, cos_k, sin_k = self._tables_for(length, qkv)
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q
            )
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)

    __call__ = forward


@cache
def _module() -> Any:
    """`RotaryEmbedding` as a module of torch."""
    module = sys.modules["torch"].nn.Module
    return type("RotaryEmbedding", (RotaryEmbedding, module), {"__call__": module.__call__})


show_public(__name__)
