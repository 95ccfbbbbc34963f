"""Attention of each query to keys that are listed for it, and what is made of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._args.options import SelectedOptions, require_options
from fastattn._args.selected import selected_args
from fastattn._args.types import ArrayLike, Unpack, lane_dtype
from fastattn._engine import dispatch
from fastattn._reference.selected import gathered, ranged
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
    """Attention of each query to the keys, or the blocks of keys, that are listed for it, fused.

    Parameters
    ----------
    q, k, v : array_like
        As in `attention`.
    selected : array_like of int, (..., heads_kv, len_q, any number)
        For each query and key head the numbers of keys, or of blocks of `block_size` keys, in any order; -1
        is none, and a number twice counts once. Block b has the keys from ``b * block_size`` on, the last one
        perhaps fewer. It broadcasts over the batch and key heads. `select_keys` makes such lists.
    block_size : int, default 1
        Keys of a block.
    return_lse : bool, default False
        As in `attention`.
    **options
        Keyword arguments of `attention`: causal, window, kv_lengths and q_offset, which hide selected keys,
        too; scale, softcap, sinks, k_scale, v_scale, out, num_threads, backend.

    Returns
    -------
    out : ndarray, (..., heads_q, len_q, head_dim_v)
        In q's dtype. A query without keys gets 0.
    lse : ndarray, (..., heads_q, len_q)
        Only with `return_lse`, as from `attention`; of a query without keys -inf, or its sink.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit: a number in `selected` below -1, or beyond the last block. Nothing was
        computed.

    See Also
    --------
    select_keys : scores and the largest of them.
    fastattn.masks.block_sparse : a mask by blocks; what many queries share needs no lists.

    Notes
    -----
    Time is O(n * (head_dim + head_dim_v)) a query and head, n the keys that it attends, beside one bit for
    4096 blocks of all. No number of keys that are not selected is read. Neighbouring queries, up to 256 rows
    of all heads of a group, share what they load where their lists are alike; which do is a function of their
    own lists. Memory beyond inputs and output is about 32 MB, or the lists of 256 queries; a thread has 4 MB
    for its sets of blocks, or two bits a block where those are more; lists that are not int64 are copied. The
    same input gives the same bits for any number of threads, and whatever else is in the batch.

    Gradients of blocks of 16 keys or more are those of attention with ranges of keys. Of smaller ones they
    gather the keys of some queries at a time, and each query is computed apart, which takes many times the
    forward pass where heads do not share lists. The selection has none. Sources: DeepSeek-AI, "DeepSeek-V3.2:
    Pushing the Frontier of Open Large Language Models", 2025, arXiv:2512.02556; J. Yuan et al., "Native
    Sparse Attention", 2025, arXiv:2502.11089; E. Lu et al., "MoBA: Mixture of Block Attention for
    Long-Context LLMs", 2025, arXiv:2502.13189.

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
