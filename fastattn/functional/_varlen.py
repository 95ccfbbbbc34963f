"""Attention of sequences of different lengths, one after the other in one array."""

from __future__ import annotations

from typing import Any, Literal, overload

from fastattn._args.errors import put_name
from fastattn._args.options import VarlenOptions, require_options
from fastattn._args.types import ArrayLike, NDArray, Unpack
from fastattn._args.varlen import varlen_args
from fastattn._args.words import by_position
from fastattn._engine import dispatch


@overload
def varlen_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[VarlenOptions],
) -> NDArray[Any]: ...
@overload
def varlen_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[NDArray[Any], NDArray[Any]]: ...
def varlen_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *more: object,
    return_lse: bool = False,
    **options: Unpack[VarlenOptions],
) -> Any:
    """Attention over a ragged batch: each sequence attends its own keys, in one call.

    The tokens of all sequences are concatenated, without padding. Each sequence's result is bit-identical to
    a separate call of `attention`.

    Parameters
    ----------
    q : array_like, (tokens_q, heads_q, head_dim)
        Queries of all sequences; dtypes and strides as in `attention`.
    k : array_like, (tokens_k, heads_kv, head_dim)
        Keys. ``heads_q`` must be a multiple of ``heads_kv``.
    v : array_like, (tokens_k, heads_kv, head_dim_v)
        Values.
    cu_seqlens_q : array_like of int, (sequences + 1,)
        Sequence i has the queries ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1]`` (exclusive): the first is 0,
        the last ``tokens_q``. A sequence may be empty.
    cu_seqlens_k : array_like of int, (sequences + 1,)
        The same for keys and values.
    causal : bool, default False
        Let each query attend the keys up to its own position. The last query of a sequence is at its last
        key.
    window : (int or None, int or None), optional
        ``(left, right)``: keys from ``position - left`` to ``position + right``; None is unbounded.
    scale, softcap : float, optional
        As in `attention`.
    alibi_slopes, sinks : array_like, (heads_q,) or (sequences, heads_q), optional
        As in `attention`.
    k_scale, v_scale : array_like, (tokens_k, heads_kv), optional
        Scales of int8 keys and values, as in `attention`.
    products : {"int8"}, optional
        As in `attention`, with k and v in int8 alone.
    block_table : array_like of int, (sequences, n), optional
        Keys and values in pages, (pages, page, heads_kv, head_dim), as in `attention`: key j of sequence i is
        row ``j % page`` of page ``block_table[i, j // page]``, and `cu_seqlens_k` has their numbers alone.
    dropout, seed : optional
        As in `attention`. The number of the sequence counts as the batch item, so the mask is that of the
        padded batch.
    out : ndarray, (tokens_q, heads_q, head_dim_v), optional
        Array for the result, as in `attention`.
    return_lse : bool, default False
        Return ``(out, lse)``: lse is the natural logarithm of each row's softmax denominator, sink included.
    num_threads, backend : optional
        As in `attention`.
    *more
        None; errors name the right argument.

    Returns
    -------
    out : ndarray, (tokens_q, heads_q, head_dim_v)
        In q's dtype.
    lse : ndarray, (heads_q, tokens_q)
        Only with `return_lse`; float32, or float64 for float64.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, before anything is computed.

    See Also
    --------
    fastattn.attention : one length for all, more options.

    Notes
    -----
    Time is the sum of O(len_q * len_k * (head_dim + head_dim_v)) per head over the sequences. Memory beyond
    inputs and output is O(threads), 400 bytes per sequence, and with causal or window 40 bytes per query.

    ``cu_seqlens`` are as in the flash-attention package (T. Dao, "FlashAttention-2", 2023, arXiv:2307.08691).
    Its window of -1 is None here.

    Examples
    --------
    >>> import fastattn, numpy as np
    >>> q = k = v = np.ones((7, 8, 64), np.float32)  # sequences of 3 and 4 tokens
    >>> fastattn.varlen_attention(q, k, v, [0, 3, 7], [0, 3, 7], causal=True).shape
    (7, 8, 64)
    """
    try:
        if more:
            given = (q, k, v, cu_seqlens_q, cu_seqlens_k, *more)
            raise by_position(given, varlen_attention, VarlenOptions)
        require_options(options, VarlenOptions, "return_lse")
        args = varlen_args(q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=return_lse, **options)
    except Exception as error:
        put_name("varlen_attention", error)
        raise
    dispatch.run(args, options.get("backend"))
    return args.result
