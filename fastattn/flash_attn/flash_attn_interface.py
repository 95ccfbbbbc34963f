"""Attention by flash-attn's names: (batch, length, heads, head_dim), or (tokens, heads, head_dim)."""

from __future__ import annotations

from typing import Any

from fastattn._args.attention import dropout_of
from fastattn._args.errors import put_name, wrong_shape
from fastattn._args.names import show_public
from fastattn._args.values import flag, integer
from fastattn.flash_attn._arrays import attend, cached
from fastattn.flash_attn._check import (
    is_tensor,
    of_tensors,
    require_shapes,
    same_kind,
    scale_of,
    softcap_of,
    window_of,
)

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
    """Attention to arrays, or to CPU tensors, with gradients: flash-attn's, argument by argument.

    q is (batch, len_q, heads_q, head_dim), k and v (batch, len_k, heads_kv, head_dim); all are arrays, or all
    are tensors. The last query is at the last key; in `window_size`, -1 is unbounded. `dropout_p` draws a
    seed from torch's generator, or ``np.random``. Returns (batch, len_q, heads_q, head_dim) in q's dtype,
    with `return_attn_probs` ``(out, lse, None)``, lse (batch, heads_q, len_q). A query without keys gets 0,
    and lse -inf. docs/flash-attn.md has every argument.

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

    q is (batch, len_q, heads_q, head_dim). k_cache and v_cache are (batch_cache, len_cache, heads_kv,
    head_dim), or pages, as in `flash_attn_varlen_func`. k and v, (batch, len_new, heads_kv, head_dim),
    are written from row `cache_seqlens` on: an integer, or (batch,), padding on the left included.
    `cache_leftpad` is the first row of each sequence that counts, `cache_batch_idx` its number in the
    cache. New key i is turned by row ``cache_seqlens + i`` of `rotary_cos` and `rotary_sin`, (positions,
    rotary_dim / 2), and so is query i, but by row ``cache_seqlens`` with neither `causal` nor a window.
    `num_splits` is ignored: the bits are always the same. Returns out, or ``(out, lse)``.
    docs/flash-attn.md has every argument.

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
        if type(num_splits) is not int or num_splits < 0:
            integer("num_splits", num_splits, 0)
        run = of_tensors().cached_tensors if is_tensor(q) else cached
        out, lse = run(
            q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
            block_table, alibi_slopes, softmax_scale=softmax_scale, causal=causal,
            window=window_of(window_size), softcap=softcap_of(softcap), rotary_interleaved=rotary_interleaved,
            return_lse=flag("return_softmax_lse", return_softmax_lse),
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
        found: list[Any] = []
        for each in arrays:
            x = given.pop(each)
            found += [x] if len(each) == 1 else _parts(each, x, "tokens" if packed else "batch, length")
        q, k, v = found
        if not packed:
            require_shapes(("q", "k", "v"), q, k, v)
            if len(q) != len(k):
                raise wrong_shape("k", k, f"a batch of {len(q)}, as q has")
        options = {
            "window": window_of(window_size),
            "causal": flag("causal", causal),
            "scale": scale_of(softmax_scale),
            "softcap": softcap_of(softcap),
        }
        if dropout_p != 0:
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
    dims = f"({rows}, {len(name)}, heads, head_dim)"
    if x.ndim != dims.count(",") + 1 or x.shape[-3] != len(name):
        raise wrong_shape(name, x, dims)
    return [x[..., i, :, :] for i in range(len(name))]


show_public(__name__)
