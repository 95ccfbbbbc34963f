"""Attention by flash-attn's names: (batch, length, heads, head_dim), or (tokens, heads, head_dim)."""

from __future__ import annotations

from typing import Any

from fastattn._args.attention import dropout_of
from fastattn._args.errors import put_name
from fastattn._args.names import show_public
from fastattn._args.types import FLOAT32
from fastattn._args.values import flag, number
from fastattn.flash_attn._arrays import attend, cached
from fastattn.flash_attn._check import (
    is_tensor,
    raise_shape,
    require_shapes,
    same_kind,
    softcap_of,
    window_of,
)
from fastattn.flash_attn._lazy import of_tensors

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention to arrays, or to CPU tensors, with gradients.

    Parameters
    ----------
    q : array or tensor, (batch, len_q, heads_q, head_dim)
        All arguments are arrays, or all are tensors.
    k, v : array or tensor, (batch, len_k, heads_kv, head_dim)
        ``heads_q`` is a multiple of ``heads_kv``; v may have another head_dim.
    dropout_p : float, default 0.0
        The share of probabilities that become 0, by a seed from torch's generator, or of ``np.random``.
    softmax_scale : float, optional
        Default ``1 / sqrt(head_dim)``.
    causal : bool, default False
        Let each query attend the keys up to its position. The last query is at the last key.
    window_size : (int, int), default (-1, -1)
        Keys from ``position - left`` to ``position + right``; -1 is unbounded.
    softcap : float, default 0.0
        Scores become ``softcap * tanh(scores / softcap)``; 0 is none.
    alibi_slopes : array or tensor, (heads_q,) or (batch, heads_q), optional
        Adds ``-slope * abs(i + len_k - len_q - j)``.
    deterministic : bool, default False
        Ignored: the bits are always the same.
    return_attn_probs : bool, default False
        Return ``(out, lse, None)``, lse (batch, heads_q, len_q) in float32, or float64 for float64.

    Returns
    -------
    array or tensor, (batch, len_q, heads_q, head_dim)
        In q's dtype. A query without keys gets 0.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, before anything is computed.

    Notes
    -----
    docs/flash-attn.md has each argument beside flash-attn's.

    Examples
    --------
    >>> import numpy as np
    >>> from fastattn.flash_attn import flash_attn_func
    >>> q, k = np.ones((2, 5, 8, 64), np.float32), np.ones((2, 7, 2, 64), np.float32)
    >>> flash_attn_func(q, k, k, causal=True).shape
    (2, 5, 8, 64)
    """
    return _attend(
        "flash_attn_func", {"q": q, "k": k, "v": v}, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Any, kv: Any, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_func` of k and v in one array, kv (batch, len_k, 2, heads_kv, head_dim)."""
    return _attend(
        "flash_attn_kvpacked_func", {"q": q, "kv": kv}, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Any, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_func` of q, k and v in one array, qkv (batch, length, 3, heads, head_dim)."""
    return _attend(
        "flash_attn_qkvpacked_func", {"qkv": qkv}, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any = None,
    max_seqlen_k: Any = None, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Any = None,
) -> Any:  # fmt: skip
    """`flash_attn_func` of sequences of any lengths, whose tokens are concatenated.

    q, k and v are (tokens, heads, head_dim), lse (heads_q, tokens). Sequence i has the tokens
    ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]`` (exclusive); `max_seqlen_q` and `max_seqlen_k` are ignored.
    With `block_table`, (sequences, n), k and v are pages (pages, page, heads_kv, head_dim) of any size,
    without gradients: key j of sequence i is row ``j % page`` of page ``block_table[i, j // page]``.
    """
    return _attend(
        "flash_attn_varlen_func", {"q": q, "k": k, "v": v}, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, return_attn_probs, cu_seqlens_q, cu_seqlens_k, block_table,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Any, kv: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any = None,
    max_seqlen_k: Any = None, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_varlen_func` of k and v in one array, kv (tokens, 2, heads_kv, head_dim)."""
    return _attend(
        "flash_attn_varlen_kvpacked_func", {"q": q, "kv": kv}, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, return_attn_probs, cu_seqlens_q, cu_seqlens_k,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Any, cu_seqlens: Any, max_seqlen: Any = None, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_varlen_func` of q, k and v in one array, qkv (tokens, 3, heads, head_dim)."""
    return _attend(
        "flash_attn_varlen_qkvpacked_func", {"qkv": qkv}, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, return_attn_probs, cu_seqlens, cu_seqlens,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, rotary_cos: Any = None,
    rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None,
    block_table: Any = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, rotary_interleaved: bool = True,
    alibi_slopes: Any = None, num_splits: int = 0, return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Attention to a cache, into which new keys and values are written in place before; no gradients.

    Parameters
    ----------
    q : array or tensor, (batch, len_q, heads_q, head_dim)
        Queries; the last is at the last key.
    k_cache, v_cache : ndarray or tensor, (batch_cache, len_cache, heads_kv, head_dim)
        The cache; with `block_table` its pages, as in `flash_attn_varlen_func`.
    k, v : array or tensor, (batch, len_new, heads_kv, head_dim), optional
        New keys and values, written from row ``cache_seqlens`` on.
    rotary_cos, rotary_sin : array or tensor, (positions, rotary_dim / 2), optional
        Only with k and v: new key i is turned by row ``cache_seqlens + i``, and so is query i, but by row
        ``cache_seqlens`` where neither `causal` nor a window is given.
    cache_seqlens : int, or array or tensor of int, (batch,), optional
        Rows of the cache that are filled, with the padding on their left. Default all.
    cache_batch_idx : array or tensor of int, (batch,), optional
        Number of each sequence in the cache.
    cache_leftpad : array or tensor of int, (batch,), optional
        First row of each sequence that counts. Default 0.
    rotary_interleaved : bool, default True
        Turn dimensions 2i and 2i + 1 together; False: i and ``i + rotary_dim / 2``.
    num_splits : int, default 0
        Ignored: splits of the keys never change the bits.
    return_softmax_lse : bool, default False
        Return ``(out, lse)``.
    block_table, softmax_scale, causal, window_size, softcap, alibi_slopes
        As in `flash_attn_varlen_func`.

    Returns
    -------
    array or tensor, (batch, len_q, heads_q, head_dim)
        In q's dtype.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, a row would be written twice, or rows are missing; nothing was written.

    Examples
    --------
    >>> import numpy as np
    >>> from fastattn.flash_attn import flash_attn_with_kvcache
    >>> k_cache, v_cache = np.zeros((2, 1, 64, 4, 32), np.float32)
    >>> q = k = v = np.ones((1, 1, 4, 32), np.float32)
    >>> out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=3)
    >>> k_cache[0, 2:4, 0, 0]
    array([0., 1.], dtype=float32)
    """
    try:
        run = of_tensors().cached_tensors if is_tensor(q) else cached
        out, lse = run(
            q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
            block_table, alibi_slopes, softmax_scale, causal, window_of(window_size), softcap_of(softcap),
            rotary_interleaved, flag("return_softmax_lse", return_softmax_lse),
        )  # fmt: skip
        return (out, lse) if return_softmax_lse else out
    except Exception as error:
        put_name("flash_attn_with_kvcache", error)
        raise


def _attend(
    name: str, arrays: dict[str, Any], dropout_p: Any, softmax_scale: Any, causal: Any, window_size: Any,
    softcap: Any, alibi_slopes: Any, return_attn_probs: Any, *packed: Any,
) -> Any:  # fmt: skip
    """The result of the function `name` for q, k and v, of which some may be in one array."""
    try:
        more = {"alibi_slopes": alibi_slopes}
        more |= zip(("cu_seqlens_q", "cu_seqlens_k", "block_table"), packed, strict=False)
        given = arrays | more
        given = dict(zip(given, same_kind(next(iter(arrays.values())), **given), strict=True))
        q, k, v = (x for name in arrays for x in _parts(name, given.pop(name), "tokens" if packed else ""))
        if not packed:
            require_shapes(("q", "k", "v"), q.shape, k.shape, v.shape)
        options = {
            "window": window_of(window_size),
            "causal": flag("causal", causal),
            "scale": None if softmax_scale is None else number("softmax_scale", softmax_scale, FLOAT32),
            "softcap": softcap_of(softcap),
        }
        if dropout_p:
            options["dropout"], _ = dropout_of(dropout_p, 0, "dropout_p")
        if flag("return_attn_probs", return_attn_probs) and dropout_p:
            came = f"return_attn_probs is True and dropout_p {dropout_p}"
            raise ValueError(f"(): {came}; expected one of them: probabilities are never stored")
        run = of_tensors().attend_tensors if is_tensor(q) else attend
        out, lse = run((q, k, v), given, options, return_attn_probs)
        return (out, lse, None) if return_attn_probs else out
    except Exception as error:
        put_name(name, error, "varlen_attention" if packed else "attention")
        raise


def _parts(name: str, x: Any, rows: str) -> list[Any]:
    """The parts of `x`, the argument `name`, along its axis before the heads: q, k and v, or some of them."""
    if len(name) == 1:
        return [x]
    dims = f"({rows or 'batch, length'}, {len(name)}, heads, head_dim)"
    if x.ndim != dims.count(",") + 1 or x.shape[-3] != len(name):
        raise_shape(name, x.shape, dims)
    return [x[..., i, :, :] for i in range(len(name))]


show_public(__name__)
