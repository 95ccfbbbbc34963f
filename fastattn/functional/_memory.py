"""Attention over keys from elsewhere, beside those of the sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from fastattn._args.attention import attention_args
from fastattn._args.options import AttentionOptions
from fastattn._args.types import lane_dtype
from fastattn._args.values import operand, require_broadcast
from fastattn._args.variants import per_head, variant_args
from fastattn._engine import dispatch
from fastattn.functional._pieces import apart, join

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.types import Array


@overload
def memory_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    memory_k: ArrayLike,
    memory_v: ArrayLike,
    *,
    gate: ArrayLike | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Array: ...
@overload
def memory_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    memory_k: ArrayLike,
    memory_v: ArrayLike,
    *,
    gate: ArrayLike | None = None,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Array, Array]: ...
def memory_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    memory_k: ArrayLike,
    memory_v: ArrayLike,
    *,
    gate: ArrayLike | None = None,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Any:
    """Attention to the keys of the sequence and to those of a memory, which every query attends.

    Parameters
    ----------
    q, k, v : array_like
        As in `attention`.
    memory_k : array_like, (..., heads_kv, len_m, head_dim)
        Keys of the memory: learned ones (persistent memory [1]_, prefix tuning), or such as were kept or
        retrieved (Memorizing Transformers [2]_).
    memory_v : array_like, (..., heads_kv, len_m, head_dim_v)
        Its values.
    gate : float or array_like, (..., heads_q), optional
        Memorizing Transformers: a softmax over either, mixed as ``g * memory + (1 - g) * local`` with
        ``g = sigmoid(gate)``. Without, one softmax over all keys.
    return_lse : bool, default False
        As in `attention`; not with `gate`.
    **options
        Keyword arguments of `attention`, but stats, for the sequence's own keys; scale and softcap hold for
        both.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    Two calls of `attention` whose results are joined by their lse: keys are not copied together, and
    positions count the sequence's keys alone. One memory serves the whole batch by broadcasting.

    References
    ----------
    .. [1] S. Sukhbaatar et al., "Augmenting Self-attention with Persistent Memory", 2019, arXiv:1907.01470.
    .. [2] Y. Wu et al., "Memorizing Transformers", 2022, arXiv:2203.08913.
    """
    func = "memory_attention"
    args = variant_args(func, q, k, v, options, AttentionOptions, return_lse)
    if gate is not None and return_lse:
        raise ValueError(f"{func}(): return_lse is True; expected False with gate: there are two softmaxes")
    shared = ("scale", "softcap", "num_threads", "backend")
    there: Any = {name: x for name, x in options.items() if name in shared}
    keys, values = operand(func, "memory_k", memory_k, []), operand(func, "memory_v", memory_v, [])
    if keys.dtype != values.dtype or not (
        keys.dtype == args.q.dtype or (args.q.dtype == np.float32 and keys.dtype.itemsize == 2)
    ):
        raise TypeError(
            f"{func}(): memory_k and memory_v have dtypes {keys.dtype} and {values.dtype}; expected q's,"
            f" {args.q.dtype}, or if that is float32, float16 or bfloat16 for both"
        )
    of_heads, dims = (args.heads_kv, keys.shape[-2]), "(..., heads_kv, len_m, head_dim)"
    for name, x, dim in (("memory_k", keys, args.head_dim), ("memory_v", values, args.head_dim_v)):
        expected = (*args.batch_shape, *of_heads, dim)
        require_broadcast(func, name, x.shape, expected, dims)
        if (x.shape if x.ndim > 2 else (1, *x.shape))[-3:] != expected[-3:]:
            raise ValueError(f"{func}(): {name} has shape {x.shape}; expected {dims} = {expected}")
    keys, values = (x.reshape((1,) * (3 - x.ndim) + x.shape) for x in (keys, values))
    queries = np.broadcast_to(args.q, (*args.batch_shape, *args.q.shape[-3:]))
    local, memory = apart(args), apart(attention_args(func, queries, keys, values, **there))
    weight = None
    if gate is not None:
        logits = per_head(func, "gate", gate, args).astype(np.float64)[..., None, None]
        with np.errstate(over="ignore"):
            weight = (1 / (1 + np.exp(-logits))).astype(lane_dtype(args.q.dtype))
    for part in (local, memory):
        dispatch.run(part, options.get("backend"))
    if weight is None:
        join((local, memory), args)
    else:
        args.out[...] = weight * memory.out + (1 - weight) * local.out
    return args.result
