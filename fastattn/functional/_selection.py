"""Selection of the best-scoring keys for each query, or of blocks of them, and attention to those listed."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Literal

import numpy as np

from fastattn._args.errors import named, wrong_type
from fastattn._args.options import Backend, SelectedOptions, require_options
from fastattn._args.selection import given_scores, selected_args, selection_args
from fastattn._args.types import Array, ArrayLike, Ints, NDArray, Unpack, lane_dtype
from fastattn._engine import dispatch
from fastattn._reference.selection import gathered, ranged
from fastattn.functional._composed_gradients import ComposedGradients, cotangents
from fastattn.functional._differentiable import Steps, differentiable

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
) -> NDArray[np.int64]:
    """Indices of the `top_k` best keys, or blocks of keys, for each query and key head.

    The score of row j of k sums ``weights[h] * f(q[h] @ k[j])`` over the query heads h of a group. Scores are
    never stored for all queries.

    Parameters
    ----------
    q : array_like, (..., heads_q, len_q, head_dim)
        Queries: float32, float64, float16 or bfloat16.
    k : array_like, (..., heads_kv, num_blocks, head_dim)
        A row for each block of `block_size` keys, such as their mean; for a block of one key, the key. q's
        dtype, or 16-bit for float32 queries, or int8 with `k_scale`. ``heads_q`` is a multiple of
        ``heads_kv``.
    top_k : int
        Number of selected rows per query, at least 1.
    weights : array_like, (..., heads_q, len_q), optional
        Weight of each query head's share of the score; default 1.
    activation : {"relu"}, optional
        f; default identity.
    score : callable, optional
        Function for other scores: ``score(q_rows, begin)`` returns the scores of ``q_rows = q[...,
        begin:begin + rows, :]``, an array that broadcasts to (..., heads_kv, rows, num_blocks). It is called
        block by block. Excludes weights, activation and k_scale; the numbers in q and k do not matter.
    k_scale : array_like, (..., heads_kv, num_blocks), optional
        Scale of each row of an int8 k.
    causal : bool, default False
        Let a query select only blocks whose first key is not after its own position.
    q_offset : int or array_like of int, optional
        Position of the first query, per sequence. By default the last query has the position of the last key.
    kv_lengths : int or array_like of int, optional
        Number of keys (not blocks) per sequence, default ``num_blocks * block_size``: required if the last
        block is shorter. Later blocks are never selected.
    block_size : int, default 1
    first, last : int, default 0
        How many of the first, and of the last, blocks that a query may select always count among its `top_k`.
        With `causal`, the last one is the query's own.
    num_threads, backend
        As in `attention`.

    Returns
    -------
    selected : ndarray of int64, (..., heads_kv, len_q, top_k)
        Row numbers of k, ascending, without duplicates; padded with -1 if a query may select fewer.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    Among equal scores the first wins. NaN counts as the largest score. Blocks that no query may select are
    not read. A positive factor of all scores changes nothing, so there is no scale.

    ``2 * heads_q * head_dim`` FLOP per query and row of k, and O(num_blocks) to select. Memory beyond the
    result is O(threads * num_blocks). There is no gradient. Sources: DeepSeek-V3.2, arXiv:2512.02556 (one key
    a row, ReLU and weights); E. Lu et al., "MoBA", 2025, arXiv:2502.13189 (means of blocks, last=1); J. Yuan
    et al., "Native Sparse Attention", 2025, arXiv:2502.11089 (with `score`); J. Tang et al., "Quest", 2024,
    arXiv:2406.10774 (bounds of pages).

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
    if score is not None:
        if not callable(score):
            raise wrong_type("score", score, "a function of queries and the number of the first")
        for name, x in (("weights", weights), ("activation", activation), ("k_scale", k_scale)):
            if x is not None:
                raise ValueError(f"(): {name} is given with score; expected one of them")
    args = selection_args(
        q, k, top_k, weights, activation, k_scale, causal, q_offset, kv_lengths, block_size, first, last,
        num_threads, backend,
    )  # fmt: skip
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


@differentiable("q", "k", "v", options=SelectedOptions, calls_kernels=True)
def selected_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    selected: ArrayLike,
    *,
    block_size: int = 1,
    return_lse: bool = False,
    **options: Unpack[SelectedOptions],
) -> Steps[Any]:
    """Fused attention of each query to listed keys, or blocks of keys.

    Parameters
    ----------
    q, k, v : array_like
        As in `attention`.
    selected : array_like of int, (..., heads_kv, len_q, any number)
        Key numbers, or numbers of blocks of `block_size` keys, for each query and key head, in any order. -1
        is ignored, and duplicates count once. Block b has keys ``b * block_size`` to ``(b + 1) * block_size -
        1``; the last block may be shorter. Broadcasts over batch and key heads. `select_keys` makes such
        lists.
    block_size : int, default 1
    return_lse : bool, default False
        As in `attention`.
    **options
        Keyword arguments of `attention` except mask, bias, row_ranges, alibi_slopes, dropout, seed and stats.
        causal, window, kv_lengths and q_offset also apply to selected keys.

    Returns
    -------
    out : ndarray, (..., heads_q, len_q, head_dim_v)
        In q's dtype; 0 for a query without keys.
    lse : ndarray, (..., heads_q, len_q)
        Only with `return_lse`, as in `attention`; for a query without keys -inf, or its sink.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, or `selected` has a number below -1 or past the last block; nothing was
        computed.

    See Also
    --------
    select_keys : computes scores and selects the largest.
    fastattn.masks.block_sparse : a mask of blocks, for selections that many queries share.

    Notes
    -----
    Time is O(n * (head_dim + head_dim_v)) per query and head for n selected keys, plus one bit per 4096
    blocks. Unselected keys are never read. Neighbouring queries, up to 256 rows of all heads of a group,
    share loads where their lists agree. Memory beyond inputs and output is about 32 MB, or the lists of 256
    queries if larger; each thread has 4 MB for its sets of blocks, or two bits a block if larger. Lists that
    are not int64 are copied. The same input gives the same bits, for any number of threads and whatever else
    is in the batch.

    Gradients of blocks of 16 keys and more are computed by attention with ranges of keys. For smaller ones,
    each query is computed separately from gathered keys, which takes many times the forward pass unless heads
    share lists. Lists have no gradient. Sources: DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of Open
    Large Language Models", 2025, arXiv:2512.02556; J. Yuan et al., "Native Sparse Attention", 2025,
    arXiv:2502.11089; E. Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs", 2025,
    arXiv:2502.13189.

    Examples
    --------
    >>> import fastattn, numpy as np
    >>> q, k = np.ones((1, 2, 4)), np.ones((1, 6, 4))
    >>> v = np.arange(6.0).reshape(1, 6, 1)
    >>> fastattn.functional.selected_attention(q, k, v, [[[0, 2, -1], [1, 1, 5]]])[0, :, 0]
    array([1., 3.])
    """
    require_options(options, SelectedOptions, "block_size", "return_lse")
    args = selected_args(q, k, v, selected, block_size, return_lse, options)
    dispatch.run(args, options.get("backend"))
    request = yield args.attention.result

    found = ComposedGradients(request, options)
    a, lane = args.attention, lane_dtype(args.attention.q.dtype)
    dout, dlse = cotangents(a, request)
    if (call := ranged(args)) is not None:
        found.add_all(found.attend(call, dout, dlse))
        return found.results()
    sums = {
        "dq": np.zeros((*a.batch_shape, a.heads_q, a.len_q, a.head_dim), lane),
        "dk": np.zeros((*a.batch_shape, a.heads_kv, a.len_k, a.head_dim), lane),
        "dv": np.zeros((*a.batch_shape, a.heads_kv, a.len_k, a.head_dim_v), lane),
    }
    for part in gathered(args):
        rows = part.of_rows(dout), None if dlse is None else part.of_rows(dlse)
        gradients = found.attend(part.call(), *rows, item=(part.batch, a.batch_shape))
        if gradients.dq is not None:
            sums["dq"][part.batch][:, part.rows] = gradients.dq[:, :, 0].swapaxes(0, 1)
        for name in ("dk", "dv"):
            if (x := getattr(gradients, name)) is not None:
                for scatter in part.sums(x, sums[name][part.batch]):
                    dispatch.run_grad(scatter, options.get("backend"))
    for name, x in sums.items():
        found.add(name, x)
    return found.results()
