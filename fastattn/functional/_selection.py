"""Which keys, or blocks of keys, attention is to look at: the best by scores of their own."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Literal

import numpy as np

from fastattn._args.errors import named, wrong_type
from fastattn._args.options import Backend, NoOptions
from fastattn._args.selection import given_scores, selection_args
from fastattn._args.types import Array, ArrayLike, Ints, NDArray, Unpack
from fastattn._args.words import not_an_argument
from fastattn._engine import dispatch

SCORES = 2**20  # that `score` makes at a time, about


@named("select_keys")
def select_keys(
    q: ArrayLike,
    k: ArrayLike,
    top_k: int,
    *,
    weights: ArrayLike | None = None,
    activation: Literal["relu"] | None = None,
    score: Callable[[Array, int], ArrayLike] | None = None,
    k_scale: ArrayLike | None = None,
    causal: bool = False,
    q_offset: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    block_size: int = 1,
    first: int = 0,
    last: int = 0,
    num_threads: int | None = None,
    backend: Backend | None = None,
    **others: Unpack[NoOptions],
) -> NDArray[np.int64]:
    """Numbers of the `top_k` keys, or blocks of keys, with the largest scores, for each query and key head.

    The score of row j of k is the sum over the query heads h of a group of ``weights[h] * f(q[h] @ k[j])``.
    The scores of all queries are never in memory.

    Parameters
    ----------
    q : array_like, (..., heads_q, len_q, head_dim)
        Queries; float32, float64, float16 or bfloat16, strides as in `attention`.
    k : array_like, (..., heads_kv, num_blocks, head_dim)
        A row for each block of `block_size` keys, such as their mean; of a single key, the key. q's dtype, or
        16-bit for float32 queries, or int8 with `k_scale`. ``heads_q`` is a multiple of ``heads_kv``.
    top_k : int
        How many are selected of each query's, at least 1.
    weights : array_like, (..., heads_q, len_q), optional
        What each query head's share of a score is times; 1 if left out.
    activation : {"relu"}, optional
        f; the identity if left out.
    score : callable, optional
        Other scores: ``score(q_rows, begin)`` returns those of ``q_rows = q[..., begin:begin + rows, :]``, an
        array (..., heads_kv, rows, num_blocks) or one that broadcasts to it. It is called block by block.
        There is neither weights, activation nor k_scale then, and the numbers in q and k do not matter.
    k_scale : array_like, (..., heads_kv, num_blocks), optional
        What each row of an int8 k is times.
    causal : bool, default False
        Let a query select the blocks alone whose first key is not behind its own position.
    q_offset : int or array_like of int, optional
        Position of the first query, one a sequence. By default the last query stands at the last key.
    kv_lengths : int or array_like of int, optional
        How many keys, not blocks, each sequence has: ``num_blocks * block_size`` if left out, so give it
        where the last block is a part of one. Blocks behind it are never selected.
    block_size : int, default 1
        Keys of a block.
    first, last : int, default 0
        How many of the `top_k` are always the first, and the last, of the blocks that the query may select.
        With `causal` the last one is the query's own.
    num_threads, backend
        As in `attention`.
    **others
        None: an error says what an argument of another library is called here.

    Returns
    -------
    selected : ndarray of int64, (..., heads_kv, len_q, top_k)
        Row numbers of k, ascending, each once; -1 at the end, where a query may select fewer.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    Of equal scores the first is selected. A score of NaN counts as larger than all others. Blocks that no
    query may select are not read. A positive factor of all scores changes nothing: there is no scale.

    ``2 * heads_q * head_dim`` FLOP a query and row of k, and O(num_blocks) to select. Memory beyond the
    result is O(threads * num_blocks). There is no gradient. Sources, with what k holds there: DeepSeek-V3.2,
    arXiv:2512.02556, a key an index, ReLU and weights; E. Lu et al., "MoBA", 2025, arXiv:2502.13189, means of
    blocks, last=1; J. Yuan et al., "Native Sparse Attention", 2025, arXiv:2502.11089, compressed keys; J.
    Tang et al., "Quest", 2024, arXiv:2406.10774, bounds of a page, which need `score`.

    Examples
    --------
    >>> import fastattn, numpy as np
    >>> q = np.eye(4, dtype=np.float32)
    >>> fastattn.functional.select_keys(q, q, 2, causal=True)
    array([[ 0, -1],
           [ 0,  1],
           [ 0,  2],
           [ 0,  3]])
    """
    if others:
        raise not_an_argument(others, select_keys)
    if score is not None:
        if not callable(score):
            raise wrong_type("score", score, "a function of queries and the number of the first")
        for name, x in (("weights", weights), ("activation", activation), ("k_scale", k_scale)):
            if x is not None:
                raise ValueError(f"(): {name} is given with score; expected one of them")
    args = selection_args(
        q,
        k,
        top_k,
        weights=weights,
        activation=activation,
        k_scale=k_scale,
        causal=causal,
        q_offset=q_offset,
        kv_lengths=kv_lengths,
        block_size=block_size,
        first=first,
        last=last,
        num_threads=num_threads,
        backend=backend,
    )
    selected: Ints = args.attention.result
    if score is None:
        dispatch.run(args, backend)
        return selected
    a = args.attention
    rows = max(1, SCORES // max(1, prod(a.batch_shape) * a.heads_kv * a.len_k))
    queries = a.q[0] if selected.ndim == 2 else a.q
    for begin in range(0, a.len_q if selected.size else 0, rows):
        end = min(begin + rows, a.len_q)
        scores = given_scores(args, begin, end, score(queries[..., begin:end, :], begin))
        dispatch.run(args.rows(begin, end, scores), backend)
    return selected
