"""Attention as torch calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.attention import add_bias, add_mask, attention_args, dropout_of, layout_hint
from fastattn._args.backward import backward_args
from fastattn._args.errors import put_name, wrong_type
from fastattn._args.types import Array, ArrayLike, Ints, NDArray, Unpack
from fastattn._args.values import flag, float_array, mask_array
from fastattn._args.words import not_an_argument
from fastattn._engine import dispatch
from fastattn._reference import attention as reference
from fastattn._reference import backward
from fastattn.functional._differentiable import Steps, differentiable

if TYPE_CHECKING:
    from fastattn._args.options import NoOptions
    from fastattn.masks import Mask


def scaled_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    seed: int | None = None,
    **others: Unpack[NoOptions],
) -> NDArray[Any]:
    """`attention` with the arguments and semantics of torch's function, on NumPy arrays.

    Parameters
    ----------
    query, key, value, scale
        q, k, v and scale of `attention`. All leading dimensions broadcast, heads included.
    attn_mask : array_like, optional
        Broadcasts to ``(..., heads, len_q, len_k)``. Bool: True where a query attends. Float: added to the
        scores.
    dropout_p : float, default 0.0
        `dropout` of `attention`.
    is_causal : bool, default False
        Query i attends keys up to i, aligned to the first key (top-left), while `attention` aligns to the
        last. Not together with `attn_mask`.
    enable_gqa : bool, default False
        Allow grouped heads: query's number is a multiple of key's. Key and value have the same number, as in
        torch's documentation; its code also takes different ones.
    seed : int, optional
        Seed of `dropout_p`, as in `attention`; torch has a global state instead.
    **others
        None; errors name the right argument.

    Returns
    -------
    ndarray, (..., heads, len_q, head_dim_v)
        In query's dtype.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, or `dropout_p` is given without `seed`.

    Notes
    -----
    Where torch leaves the result open or differs, it is that of `attention`: 0 and not NaN for a query
    without keys; masked NaN and Inf have no effect; -inf in a float mask masks.
    """
    try:
        if others:
            raise not_an_argument(others, scaled_dot_product_attention)
        if flag("is_causal", is_causal) and attn_mask is not None:
            raise ValueError("(): attn_mask is given and is_causal is True; expected one of the two")
        names = ("query", "key", "value")
        given = zip(names, (query, key, value), strict=True)
        q, k, v = (float_array(name, x, least_dims=2) for name, x in given)
        heads = [x.shape[-3] if x.ndim > 2 else 1 for x in (q, k, v)]
        # One key head serves all query heads as one group: nothing is copied.
        if not flag("enable_gqa", enable_gqa) and not heads[1] == heads[2] in (1, heads[0]):
            if any(n not in (1, max(heads)) for n in heads):
                raise ValueError(
                    f"(): query, key and value have {heads[0]}, {heads[1]} and {heads[2]} heads; expected"
                    f" as many of each, or enable_gqa=True for groups of query heads that share a key head"
                    f"{layout_hint(q.shape, k.shape, v.shape)}"
                )
            q, k, v = (np.broadcast_to(x, (*x.shape[:-3], max(heads), *x.shape[-2:])) for x in (q, k, v))
        q_offset = 0 if is_causal else None
        args = attention_args(q, k, v, causal=is_causal, q_offset=q_offset, scale=scale, names=names)
        args.dropout, args.seed = dropout_of(dropout_p, seed, "dropout_p")
        if attn_mask is not None:
            array = mask_array("attn_mask", attn_mask)
            if array.dtype == np.bool_:
                add_mask(args, "attn_mask", array)
            else:
                add_bias(args, "attn_mask", array, [], " or bool (attn_mask != 0, where 1 attends)")
        dispatch.run(args, None)
        return args.result  # type: ignore[no-any-return]
    except Exception as error:
        put_name("scaled_dot_product_attention", error)
        raise


def _require_slope(score_mod: Any = None, score_mod_backward: Any = None, **others: Any) -> None:
    if score_mod is not None and score_mod_backward is None:
        expected = "f(dscores, scores, b, h, i, j) -> dscores, as score_mod has no derivative to be seen"
        raise ValueError(f"(): score_mod_backward is None, but score_mod is given; expected {expected}")


@differentiable("q", "k", "v", require=_require_slope, calls_kernels=True)
def flex_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    score_mod: Callable[[Array, int, Ints, Ints, Ints], Array] | None = None,
    score_mod_backward: Callable[[Array, Array, int, Ints, Ints, Ints], Array] | None = None,
    mask: ArrayLike | Mask | None = None,
    scale: float | None = None,
    q_offset: ArrayLike | None = None,
    return_lse: bool = False,
) -> Steps[Any]:
    """Attention whose scores pass through a Python function, to try out what has no kernel.

    **Slow**: with `score_mod` it runs in NumPy, several times slower than `attention`, whose options
    cover the usual functions. Use `mask` for masking, also
    ``masks.compile(predicate, shape)``: masked blocks are not computed.

    Parameters
    ----------
    q, k, v, mask, scale, q_offset, return_lse
        As in `attention`, also for the results.
    score_mod : callable, optional
        ``f(scores, b, h, i, j) -> scores``, called on blocks of scaled scores (group, rows, keys) in float32
        (float64 for float64). b is the number of the sequence over all batch dimensions; h (query heads), i
        (positions of queries) and j (keys) are integer arrays that broadcast to the scores. The result
        broadcasts to the scores; -inf masks. Without `score_mod` this is `attention`.
    score_mod_backward : callable, optional
        ``f(dscores, scores, b, h, i, j) -> dscores``, for `grad.vjp`: the gradient of the scores from that of
        `score_mod`'s result, ``dscores`` times the derivative, both (group, rows, keys). Called once per
        block, one after another, so it may also accumulate gradients of arrays that `score_mod` reads.

    Raises
    ------
    TypeError, ValueError
        As `attention`, and if `score_mod` is not a function or does not return floats that broadcast.

    Notes
    -----
    O(len_q * len_k * (head_dim + head_dim_v)) per head, less the blocks that `mask` skips; O(block) memory.
    Name and signature of the function are as in torch's ``flex_attention``.

    Examples
    --------
    >>> import fastattn, numpy as np
    >>> x = np.ones((1, 2, 5, 8), np.float32)
    >>> near = lambda s, b, h, i, j: s - 0.1 * abs(i - j)
    >>> fastattn.functional.flex_attention(x, x, x, score_mod=near).shape
    (1, 2, 5, 8)
    """
    for name, function in (("score_mod", score_mod), ("score_mod_backward", score_mod_backward)):
        if function is not None and not callable(function):
            raise wrong_type(name, function, "a function")
    if score_mod is None and score_mod_backward is not None:
        raise ValueError("(): score_mod_backward is given, but score_mod is None; expected both")
    args = attention_args(q, k, v, mask, scale=scale, q_offset=q_offset, return_lse=return_lse)
    if score_mod is None:
        dispatch.run(args, None)
    elif args.out.size:
        args.q_position = np.asarray(args.len_k - args.len_q if q_offset is None else q_offset)
        reference.attention(args, score_mod)
    request = yield args.result

    given = {"dout": request.dout, "q": q, "k": k, "v": v, "scale": scale}
    given |= {"out": args.out.reshape(request.dout.shape), "lse": args.result[1], "dlse": request.dmore}
    found = backward_args(args, given, request.need, None, {})
    if not args.out.size:
        found.clear()
    elif score_mod is None:
        dispatch.run(found.args, None)
    else:
        backward.attention_backward(found.args, score_mod, score_mod_backward)
    return found.results()
