"""Attention by flash-attn's names: (batch, length, heads, head_dim), or (tokens, heads, head_dim)."""

from __future__ import annotations

from typing import Any

from fastattn._args.attention import dropout_of
from fastattn._args.errors import put_name
from fastattn._args.names import show_public
from fastattn._args.types import FLOAT32
from fastattn._args.values import flag, number
from fastattn.flash_attn._attend import attend
from fastattn.flash_attn._cache import cached
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
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention to arrays, or to CPU tensors, with gradients.

    docs/flash-attn.md has every argument beside flash-attn's; `fastattn.attention` has more options.

    Parameters
    ----------
    q : array or tensor, (batch, len_q, heads_q, head_dim)
        Queries. Tensors have autograd; all arguments are of one kind.
    k, v : array or tensor, (batch, len_k, heads_kv, head_dim)
        Keys and values. ``heads_q`` must be a multiple of ``heads_kv``; v may have another head_dim.
    dropout_p : float, default 0.0
        In [0, 1): the share of probabilities that become 0, by a seed that is drawn from torch's generator,
        or from ``np.random`` for arrays.
    softmax_scale : float, optional
        Default ``1 / sqrt(head_dim)``.
    causal : bool, default False
        Let each query attend the keys up to its position. The last query is at the last key.
    window_size : (int, int), default (-1, -1)
        Keys from ``position - left`` to ``position + right``; -1 is unbounded.
    softcap : float, default 0.0
        Scores become ``softcap * tanh(scores / softcap)``; 0 is none.
    alibi_slopes : array or tensor, (heads_q,) or (batch, heads_q), optional
        Adds ``-slope * abs(i + len_k - len_q - j)`` to the score of query i and key j.
    deterministic : bool, default False
        Ignored: results and gradients always have the same bits.
    return_attn_probs : bool, default False
        Return ``(out, lse, None)``.

    Returns
    -------
    out : array or tensor, (batch, len_q, heads_q, head_dim)
        In q's dtype. A query without keys gets 0.
    lse : array or tensor, (batch, heads_q, len_q)
        Only with `return_attn_probs`; float32, or float64 for float64; -inf for a query without keys.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, before anything is computed.

    Examples
    --------
    >>> import numpy as np
    >>> from fastattn.flash_attn import flash_attn_func
    >>> q, k = np.ones((2, 5, 8, 64), np.float32), np.ones((2, 7, 2, 64), np.float32)
    >>> flash_attn_func(q, k, k, causal=True).shape
    (2, 5, 8, 64)
    """
    return _attend(
        "flash_attn_func", q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Any,
    kv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of keys and values in one array, kv (batch, len_k, 2, heads_kv, head_dim)."""
    name = "flash_attn_kvpacked_func"
    k, v = _parts(name, "kv", kv, "(batch, length, 2, heads, head_dim)")
    return _attend(
        name, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of queries, keys and values in one array, qkv (batch, length, 3, heads, head_dim)."""
    name = "flash_attn_qkvpacked_func"
    q, k, v = _parts(name, "qkv", qkv, "(batch, length, 3, heads, head_dim)")
    return _attend(
        name, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    """`flash_attn_func` of sequences of any lengths, whose tokens are concatenated.

    Parameters
    ----------
    q, k, v : array or tensor, (tokens, heads, head_dim)
        Queries, keys and values of all sequences.
    cu_seqlens_q, cu_seqlens_k : array or tensor of int, (sequences + 1,)
        Sequence i has the tokens ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]`` (exclusive).
    max_seqlen_q, max_seqlen_k : int, optional
        Ignored: they follow from the others.
    block_table : array or tensor of int, (sequences, n), optional
        k and v are pages of any size, (pages, page, heads_kv, head_dim), and key j of sequence i is row
        ``j % page`` of page ``block_table[i, j // page]``. Pages have no gradients.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
        As in `flash_attn_func`; lse is (heads_q, tokens).
    """
    return _attend(
        "flash_attn_varlen_func", q, k, v, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, return_attn_probs, cu_seqlens_q, cu_seqlens_k, block_table,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of keys and values in one array, kv (tokens, 2, heads_kv, head_dim)."""
    name = "flash_attn_varlen_kvpacked_func"
    k, v = _parts(name, "kv", kv, "(tokens, 2, heads, head_dim)")
    return _attend(
        name, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        return_attn_probs, cu_seqlens_q, cu_seqlens_k,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: Any = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of queries, keys and values in one array, qkv (tokens, 3, heads, head_dim)."""
    name = "flash_attn_varlen_qkvpacked_func"
    q, k, v = _parts(name, "qkv", qkv, "(tokens, 3, heads, head_dim)")
    return _attend(
        name, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        return_attn_probs, cu_seqlens, cu_seqlens,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention to a cache, into which new keys and values are written in place before.

    There are no gradients.

    Parameters
    ----------
    q : array or tensor, (batch, len_q, heads_q, head_dim)
        Queries; the last is at the last key.
    k_cache, v_cache : ndarray or tensor, (batch_cache, len_cache, heads_kv, head_dim)
        Keys and values; with `block_table` pages of any size, (pages, page, heads_kv, head_dim).
    k, v : array or tensor, (batch, len_new, heads_kv, head_dim), optional
        New keys and values, written from row ``cache_seqlens`` on.
    rotary_cos, rotary_sin : array or tensor, (positions, rotary_dim / 2), optional
        Rotary tables; only with k and v. New key i is turned by row ``cache_seqlens + i`` before it is
        written. So is query i with `causal` or a window, and by row ``cache_seqlens`` without.
    cache_seqlens : int, or array or tensor of int, (batch,), optional
        Rows in the cache that are filled, padding on the left included. Default all.
    cache_batch_idx : array or tensor of int, (batch,), optional
        Row of the cache of each sequence; each at most once if k is given. Not with `block_table`.
    cache_leftpad : array or tensor of int, (batch,), optional
        First row of each sequence that counts. Default 0.
    block_table : array or tensor of int, (batch, n), optional
        Pages of each sequence, as in `flash_attn_varlen_func`.
    rotary_interleaved : bool, default True
        Turn dimensions 2i and 2i + 1 together; False: i and ``i + rotary_dim / 2``.
    softmax_scale, causal, window_size, softcap, alibi_slopes
        As in `flash_attn_func`.
    num_splits : int, default 0
        Ignored: splits of the keys never change the bits.
    return_softmax_lse : bool, default False
        Return ``(out, lse)``.

    Returns
    -------
    out : array or tensor, (batch, len_q, heads_q, head_dim)
        In q's dtype.
    lse : array or tensor, (batch, heads_q, len_q)
        Only with `return_softmax_lse`.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, a row of the cache would be written twice, or rows are missing; nothing
        was written.

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
        tensors = q, k_cache, v_cache, k, v, rotary_cos, rotary_sin
        more = cache_seqlens, cache_batch_idx, cache_leftpad, block_table, alibi_slopes
        options = (
            softmax_scale, causal, window_of(window_size), softcap_of(softcap), rotary_interleaved,
            flag("return_softmax_lse", return_softmax_lse),
        )  # fmt: skip
        if is_tensor(q):
            run = of_tensors().cached_tensors
            out, lse = run(*tensors, *more, *options)
        else:
            out, lse = cached(*tensors, *more, *options)
        return (out, lse) if return_softmax_lse else out
    except Exception as error:
        put_name("flash_attn_with_kvcache", error)
        raise


def _attend(
    name: str,
    q: Any,
    k: Any,
    v: Any,
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    alibi_slopes: Any,
    return_attn_probs: Any,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    block_table: Any = None,
) -> Any:
    """The result of the function `name`."""
    packed = cu_seqlens_q is not None
    inner = "varlen_attention" if packed else "attention"
    try:
        given = {"q": q, "k": k, "v": v, "alibi_slopes": alibi_slopes}
        if packed:
            given |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "block_table": block_table}
        q, k, v, *_ = same = same_kind(q, **given)
        more = dict(zip(list(given)[3:], same[3:], strict=True))
        if not packed:
            require_shapes(("q", "k", "v"), q.shape, k.shape, v.shape)
        window, causal = window_of(window_size), flag("causal", causal)
        scale = None if softmax_scale is None else number("softmax_scale", softmax_scale, FLOAT32)
        options = {"causal": causal, "scale": scale, "softcap": softcap_of(softcap)}
        if dropout_p:
            options["dropout"], _ = dropout_of(dropout_p, 0, "dropout_p")
        if flag("return_attn_probs", return_attn_probs) and dropout_p:
            came = f"return_attn_probs is True and dropout_p {dropout_p}"
            raise ValueError(f"(): {came}; expected one of them: probabilities are never stored")
        options["window"] = window
        run = attend
        if is_tensor(q):
            run = of_tensors().attend_tensors
        out, lse = run((q, k, v), more, options, return_attn_probs)
        return (out, lse, None) if return_attn_probs else out
    except Exception as error:
        put_name(name, error, inner)
        raise


def _parts(func: str, name: str, x: Any, dims: str) -> Any:
    """The parts of `x`, the argument `name`, along its axis before the heads."""
    try:
        (x,) = same_kind(x, **{name: x})
        if x.ndim != dims.count(",") + 1 or x.shape[-3] != len(name):
            raise_shape(name, x.shape, dims)
    except Exception as error:
        put_name(func, error)
        raise
    return [x[..., i, :, :] for i in range(len(name))]


show_public(__name__)
