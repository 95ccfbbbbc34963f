"""The gradients of attention: what they mean. `_args` checks, the kernels compute."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from fastattn._args.attention import attention_args
from fastattn._args.backward import OF_OPTIONS, backward_args
from fastattn._args.errors import named
from fastattn._args.options import (
    AttentionOptions,
    BackwardOptions,
    VarlenBackwardOptions,
    VarlenOptions,
    require_options,
)
from fastattn._args.types import ArrayLike, NDArray, Unpack
from fastattn._args.varlen import varlen_args
from fastattn.functional._attention import attention
from fastattn.functional._composed_gradients import computed
from fastattn.functional._differentiable import Steps, vjp_of
from fastattn.functional._varlen import varlen_attention

_NEED = ("dq", "dk", "dv")


@named("attention_backward")
def attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    dlse: ArrayLike | None = None,
    need: Sequence[str] = _NEED,
    into: Sequence[NDArray[Any] | None] | None = None,
    **options: Unpack[BackwardOptions],
) -> tuple[Any, ...]:
    """Gradients of `fastattn.attention` with respect to its inputs, fused: vector-Jacobian products.

    Probabilities are recomputed from lse, tile by tile; neither they nor a mask are stored.

    Parameters
    ----------
    dout : array_like, (..., heads_q, len_q, head_dim_v)
        Gradient of a scalar with respect to `out`, in q's dtype.
    q, k, v : array_like
        Inputs of `attention`; int8 keys and values have no gradients.
    out : array_like, (..., heads_q, len_q, head_dim_v)
        Result of ``attention(q, k, v, return_lse=True, ...)`` with the same options.
    lse : array_like, (..., heads_q, len_q)
        Its lse: float32, or float64 for float64.
    dlse : array_like, optional
        Gradient with respect to `lse`, as after `merge_states`; broadcasts to lse's shape. Default 0.
    need : tuple of str, default ("dq", "dk", "dv")
        Gradients to compute, in the order of the results: ``"dq"``, ``"dk"``, ``"dv"``, ``"dscale"``, and for
        given options ``"dbias"``, ``"dsinks"``, ``"dalibi_slopes"``, ``"dsoftcap"``. ``"dbias_diagonals"``,
        (..., len_q + len_k - 1), is dbias summed along its diagonals: number ``j - i + len_q - 1`` for query
        i and key j. For a bias of distances, such as T5's, it avoids ``len_q * len_k`` numbers.
    into : tuple of ndarray or None, optional
        Arrays for the results, in the order of `need`, with their shapes, dtypes and contiguous last axes;
        None makes a new one.
    **options
        Options of the call of `attention`, except `out`, `return_lse` and `stats`. They are not checked: with
        others, gradients are wrong.

    Returns
    -------
    tuple
        A gradient for each name in `need`, in its source's shape and dtype, summed over broadcast axes. A
        float for options that are numbers.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, before anything is computed.

    Notes
    -----
    Time is that of five matrix products, where `attention` takes two: ``2 * len_q * len_k * (3 * head_dim + 2
    * head_dim_v)`` FLOP per head, less what masks skip. Memory beyond inputs and results is O(threads) tiles,
    O(len_q) per head, and for up to 8 queries a number for each and 64 to 256 keys. A gradient in 16 bits, or
    of what was broadcast over batch dimensions, takes an array in float32 of the whole batch's shape first.

    For up to 8 queries in float32 or float64, probabilities are divided by their sum, as the rounding of lse
    shows in them. A sum that differs from 1 by more than ``4 * eps * max(1, abs(lse))`` is not rounding: lse
    counts other keys, too, as after `merge_states`, and nothing is divided.

    A query without keys and a key without queries get 0. Masked keys, values, queries and rows of dout, NaN
    included, never affect a gradient. The same input gives the same bits for any number of threads.

    Sources: T. Dao et al., "FlashAttention", 2022, arXiv:2205.14135, algorithm 4; T. Dao, "FlashAttention-2",
    2023, arXiv:2307.08691.

    Examples
    --------
    >>> import numpy as np
    >>> from fastattn import attention, functional
    >>> q, k, v = np.ones((1, 8, 3, 64)), np.ones((1, 2, 5, 64)), np.ones((1, 2, 5, 64))
    >>> out, lse = attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv = functional.attention_backward(np.ones_like(out), q, k, v, out, lse, causal=True)
    >>> dk.shape
    (1, 2, 5, 64)
    """
    require_options(options, BackwardOptions)
    args = attention_args(q, k, v, return_lse=True, **options)
    given: dict[str, Any] = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse}
    given |= {name: options.get(name) for name in OF_OPTIONS}
    return computed(backward_args(args, given, need, into, options), options)


@named("varlen_attention_backward")
def varlen_attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    dlse: ArrayLike | None = None,
    need: Sequence[str] = _NEED,
    into: Sequence[NDArray[Any] | None] | None = None,
    **options: Unpack[VarlenBackwardOptions],
) -> tuple[Any, ...]:
    """Per-sequence gradients of `fastattn.varlen_attention`.

    Parameters
    ----------
    dout : array_like, (tokens_q, heads_q, head_dim_v)
        Gradient of a scalar with respect to `out`, in q's dtype.
    q, k, v, cu_seqlens_q, cu_seqlens_k : array_like
        Inputs of `varlen_attention`.
    out : array_like, (tokens_q, heads_q, head_dim_v)
        Its result with ``return_lse=True`` and the same options.
    lse : array_like, (heads_q, tokens_q)
        Its lse.
    dlse, need, into
        As in `attention_backward`; there is no bias.
    **options
        Options of the call of `varlen_attention`, except `out` and `return_lse`; not checked.

    Returns
    -------
    tuple
        A gradient for each name in `need`, as from `attention_backward`.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, before anything is computed.

    See Also
    --------
    attention_backward : one length for all, more options.
    """
    require_options(options, VarlenBackwardOptions)
    args = varlen_args(q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=True, **options)
    begins = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    given: dict[str, Any] = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse}
    given |= {name: options.get(name) for name in OF_OPTIONS if name != "bias"}
    return computed(backward_args(args, given, need, into, {**options, **begins}), options)


def _recorded(
    forward: Callable[..., Any], backward: Callable[..., Any], taken: type, options: type
) -> Callable[..., Any]:
    """What `grad.vjp` calls for a function that has a gradient function, of the options `taken`."""
    signature = inspect.signature(forward)
    names = [name for name, p in signature.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]

    def steps(*arrays: ArrayLike, return_lse: bool, **given: Any) -> Steps[Any]:
        rest = takewhile(given.__contains__, names[len(arrays) :])  # what is missing is for `forward` to say
        arrays = *arrays, *(given.pop(name) for name in rest)
        require_options({name: x for name, x in given.items() if name not in names}, taken)
        out, lse = forward(*arrays, return_lse=True, **given)
        request = yield out, lse
        saved = request.dout, *arrays[:3], out, lse, *arrays[3:]
        found: tuple[Any, ...] = backward(*saved, dlse=request.dmore, need=request.need, **given)
        return found

    steps.__name__, steps.__signature__ = forward.__name__, signature  # type: ignore[attr-defined]
    return vjp_of(steps, ("q", "k", "v"), options)


attention._vjp = _recorded(  # type: ignore[attr-defined]
    attention, attention_backward, BackwardOptions, AttentionOptions
)
varlen_attention._vjp = _recorded(  # type: ignore[attr-defined]
    varlen_attention, varlen_attention_backward, VarlenBackwardOptions, VarlenOptions
)
