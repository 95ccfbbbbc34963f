"""Attention of each query to the keys listed for it, and its gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._args.options import SelectedOptions, require_options
from fastattn._args.selected import selected_args
from fastattn._args.types import ArrayLike, Unpack, lane_dtype
from fastattn._engine import dispatch
from fastattn._reference.selection import gathered, ranged
from fastattn.functional._composed_gradients import ComposedGradients, cotangents
from fastattn.functional._differentiable import Steps, differentiable


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
        Keyword arguments of `attention`: causal, window, kv_lengths and q_offset, which also apply to
        selected keys; scale, softcap, sinks, k_scale, v_scale, out, num_threads, backend.

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
