"""Rotary positions by flash-attn's names, for arrays and for CPU tensors with gradients."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from fastattn._args.errors import named, wrong_shape
from fastattn._args.names import show_public
from fastattn._args.types import Array
from fastattn._args.values import flag
from fastattn.flash_attn._check import is_tensor, of_tensors, same_kind
from fastattn.flash_attn._rotate import rotate_by_offsets

__all__ = ["RotaryEmbedding", "apply_rotary_emb", "apply_rotary_emb_kv_", "apply_rotary_emb_qkv_"]


@named("apply_rotary_emb")
def apply_rotary_emb(
    x: Any, cos: Any, sin: Any, interleaved: bool = False, inplace: bool = False, seqlen_offsets: Any = 0,
    cu_seqlens: Any = None, max_seqlen: Any = None,
) -> Any:  # fmt: skip
    """Turn pairs of the first dimensions of queries or keys by their positions.

    x is (batch, length, heads, head_dim), or with `cu_seqlens` (tokens, heads, head_dim); cos and sin are
    (positions, rotary_dim / 2), without gradients. Dimensions 2i and 2i + 1 turn together if `interleaved`,
    else i and ``i + rotary_dim / 2``. `seqlen_offsets` is the position of the first token, or of each
    sequence's; `max_seqlen` is ignored. With `inplace`, x itself is turned and returned.
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
    qkv: Any, cos: Any, sin: Any, cos_k: Any = None, sin_k: Any = None, interleaved: bool = False,
    seqlen_offsets: Any = 0, num_heads_q: int | None = None,
) -> Any:  # fmt: skip
    """`apply_rotary_emb` in place to the queries and keys of qkv, which is returned.

    qkv is (batch, length, 3, heads, head_dim), or (batch, length, num_heads_q + 2 * num_heads_k, head_dim).
    """
    (qkv,) = same_kind(qkv, qkv=qkv)
    if qkv.ndim == 5 and qkv.shape[2] == 3:
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    elif qkv.ndim == 4 and num_heads_q and (rest := qkv.shape[2] - num_heads_q) >= 0 and not rest % 2:
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + rest // 2]
    else:
        expected = "(batch, length, 3, heads, head_dim), or with num_heads_q (batch, length, heads, head_dim)"
        raise wrong_shape("qkv", qkv, expected)
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    for name, table in (("cos_k", cos_k), ("sin_k", sin_k)):
        if table.shape != cos.shape:
            raise wrong_shape(name, table, f"{tuple(cos.shape)}, as cos")
    turned_q = apply_rotary_emb(q, cos, sin, interleaved, False, seqlen_offsets)
    turned_k = apply_rotary_emb(k, cos_k, sin_k, interleaved, False, seqlen_offsets)
    q[...], k[...] = turned_q, turned_k  # after all checks
    return qkv


@named("apply_rotary_emb_kv_")
def apply_rotary_emb_kv_(
    kv: Any, cos: Any, sin: Any, interleaved: bool = False, seqlen_offsets: Any = 0
) -> Any:
    """`apply_rotary_emb` in place to the keys of kv (batch, length, 2, heads, head_dim); returns it."""
    (kv,) = same_kind(kv, kv=kv)
    if kv.ndim != 5 or kv.shape[2] != 2:
        raise wrong_shape("kv", kv, "(batch, length, 2, heads, head_dim)")
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


class RotaryEmbedding:
    """`apply_rotary_emb` in place, with tables that grow; it has no parameters and is no module of torch.

    Pair i of the first `dim` dimensions turns by ``inv_freq[i]`` a position: ``base ** (-2 * i / dim)``, or
    what is assigned, or what a class's own `_compute_inv_freq` returns. With `scale_base`, queries and keys
    are scaled by their positions, as by XPos (Sun et al., 2022, arXiv:2212.10554).
    """

    def __init__(
        self, dim: int, base: float = 10000.0, interleaved: bool = False, scale_base: float | None = None,
        device: Any = None,
    ) -> None:  # fmt: skip
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.inv_freq = self._compute_inv_freq(device=device)
        self._made_of: tuple[Array, Any] | None = None  # frequencies and dtype of the tables
        # For `flash_attn_with_kvcache`, after `_update_cos_sin_cache`; without `scale_base` keys have none.
        self._cos_cached: Any = None
        self._sin_cached: Any = None
        self._cos_k_cached: Any = None
        self._sin_k_cached: Any = None

    def __call__(
        self, qkv: Any, kv: Any = None, seqlen_offset: Any = 0, max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:  # fmt: skip
        """Turn the queries and keys of qkv, or with kv of both, and return what was given.

        `max_seqlen` is the number of positions, if known.
        """
        if max_seqlen is None:
            is_number = isinstance(seqlen_offset, int)
            last = seqlen_offset if is_number else int(np.asarray(seqlen_offset).max(initial=0))
            max_seqlen = max(qkv.shape[1], 0 if kv is None else kv.shape[1]) + last
        self._update_cos_sin_cache(max_seqlen, dtype=qkv.dtype)
        cos, sin, more = self._cos_cached, self._sin_cached, (self.interleaved, seqlen_offset)
        cos_k, sin_k = (cos, sin) if self._cos_k_cached is None else (self._cos_k_cached, self._sin_k_cached)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, *more, num_heads_q)
        if qkv.ndim != 4:  # before kv is turned
            raise wrong_shape("qkv", qkv, "(batch, length, heads, head_dim), as kv is given")
        kv = apply_rotary_emb_kv_(kv, cos_k, sin_k, *more)
        return apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset), kv

    forward = __call__

    def _compute_inv_freq(self, device: Any = None) -> Any:
        """Radians a position of each pair of dimensions; flash-attn's name, which programs override."""
        found: Array = self.base ** (-np.arange(0, self.dim, 2) / self.dim)
        return found

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: Any = None) -> None:
        """Make tables of `seqlen` positions or more, of a dtype of NumPy (float32 if None) or of torch."""
        torch = sys.modules.get("torch")
        of_tensors = torch is not None and isinstance(dtype, torch.dtype)
        dtype = dtype if of_tensors else np.dtype(dtype or np.float32)
        freq = self.inv_freq.double().numpy() if is_tensor(self.inv_freq) else self.inv_freq
        same = self._made_of is not None and dtype == self._made_of[1] and seqlen <= len(self._cos_cached)
        if same and np.array_equal(freq, self._made_of[0]):  # type: ignore[index]
            return
        self._made_of = np.array(freq, np.float64), dtype  # a copy: it may be written to
        pair, scale = np.arange(0, self.dim, 2), np.ones(1)
        angles = np.outer(np.arange(seqlen), self._made_of[0])
        if self.scale_base is not None:
            power = (np.arange(seqlen) - seqlen // 2) / self.scale_base
            scale = ((pair + 0.4 * self.dim) / (1.4 * self.dim)) ** power[:, None]
        found: Any = [f(angles) * s for s in (scale, 1 / scale) for f in (np.cos, np.sin)]
        if of_tensors:
            found = [sys.modules["torch"].from_numpy(x).to(dtype) for x in found]
        else:
            found = [x.astype(dtype) for x in found]
        self._cos_cached, self._sin_cached = found[:2]
        if self.scale_base is not None:
            self._cos_k_cached, self._sin_k_cached = found[2:]


show_public(__name__)
