"""Attention with any function of the scores, in NumPy: general and slow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.attention import attention_args
from fastattn._args.errors import wrong_type
from fastattn._engine import dispatch
from fastattn._reference import attention as reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike, NDArray

    from fastattn._args.types import Array, Ints
    from fastattn.masks import Mask


def flex_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    score_mod: Callable[[Array, int, Ints, Ints, Ints], Array] | None = None,
    mask: ArrayLike | Mask | None = None,
    scale: float | None = None,
    q_offset: ArrayLike | None = None,
    return_lse: bool = False,
) -> NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]:
    """Attention whose scores pass through a function of yours: for trying out what has no kernel.

    **Slow**: with `score_mod` it runs on NumPy, always, several times slower than `attention`, whose options
    (bias, softcap, ALiBi) cover the usual functions. Who attends whom belongs into `mask`, which may be
    ``masks.compile(predicate, shape)``: that runs in the kernels, and what it hides is not computed.

    Parameters
    ----------
    q, k, v, mask, scale, q_offset, return_lse
        As in `attention`.
    score_mod : callable, optional
        ``f(scores, b, h, i, j) -> scores``, called on blocks: scores (group, rows, keys) after scaling, in
        float32 (float64 for float64); b an int, the sequence, counted over all batch dimensions; and integer
        arrays that broadcast to the scores: h, query heads; i, positions of queries; j, keys. Its result
        broadcasts to the scores; -inf in it masks. Without it this is `attention`.

    Returns
    -------
    out : ndarray, (..., heads_q, len_q, head_dim_v)
        In q's dtype.
    lse : ndarray, (..., heads_q, len_q)
        Only with `return_lse`.

    Raises
    ------
    TypeError, ValueError
        As `attention`, and if `score_mod` is no function, or returns no floating numbers that broadcast.

    Notes
    -----
    O(len_q * len_k * (head_dim + head_dim_v)) a head, less the blocks that `mask` hides; memory O(block). The
    name and the signature of the function are those of torch's ``flex_attention``.

    Examples
    --------
    >>> import fastattn, numpy as np
    >>> x = np.ones((1, 2, 5, 8), np.float32)
    >>> near = lambda s, b, h, i, j: s - 0.1 * abs(i - j)
    >>> fastattn.functional.flex_attention(x, x, x, score_mod=near).shape
    (1, 2, 5, 8)
    """
    func = "flex_attention"
    if score_mod is not None and not callable(score_mod):
        raise wrong_type(func, "score_mod", score_mod, "a function")
    args = attention_args(func, q, k, v, mask, scale=scale, q_offset=q_offset, return_lse=return_lse)
    if score_mod is None:
        dispatch.run(args, None)
    elif args.out.size:
        args.q_position = np.asarray(args.len_k - args.len_q if q_offset is None else q_offset)
        reference.attention(args, score_mod)
    result: NDArray[Any] | tuple[NDArray[Any], NDArray[Any]] = args.result
    return result
