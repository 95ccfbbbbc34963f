"""Attention over keys that are kept elsewhere: in a memory, or compressed to one short vector a token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np

from fastattn._args.attention import attention_args
from fastattn._args.errors import wrong_shape
from fastattn._args.options import InnerOptions, VariantOptions, require_options
from fastattn._args.types import lane_dtype
from fastattn._args.values import (
    broadcast_batch,
    flag,
    float_array,
    operand,
    require_broadcast,
    require_dtypes,
)
from fastattn._args.variants import per_head, variant_args
from fastattn._engine import dispatch
from fastattn.functional._pieces import apart, join, run

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.types import Array, AttentionArgs


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
    **options: Unpack[VariantOptions],
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
    **options: Unpack[VariantOptions],
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
    **options: Unpack[VariantOptions],
) -> Any:
    """Attention to the keys of the sequence and to those of a memory, which every query attends.

    Parameters
    ----------
    q, k, v : array_like
        As in `attention`, like the results and errors.
    memory_k : array_like, (..., heads_kv, len_m, head_dim)
        Keys of the memory: learned ones (persistent memory, prefix tuning), or such as were kept or
        retrieved (Memorizing Transformers).
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

    Notes
    -----
    Two calls of `attention` whose results are joined by their lse: keys are not copied together, and
    positions count the sequence's keys alone. One memory serves the whole batch by broadcasting. Sources: S.
    Sukhbaatar et al., "Augmenting Self-attention with Persistent Memory", 2019, arXiv:1907.01470; Y. Wu et
    al., "Memorizing Transformers", 2022, arXiv:2203.08913.
    """
    func = "memory_attention"
    args = variant_args(func, q, k, v, options, VariantOptions, return_lse)
    if gate is not None and return_lse:
        raise ValueError(f"{func}(): return_lse is True; expected False with gate: there are two softmaxes")
    local, memory, weight = memory_parts(func, args, memory_k, memory_v, gate, options)
    for part in (local, memory):
        dispatch.run(part, options.get("backend"))
    if weight is None:
        join((local, memory), args)
    else:
        args.out[...] = weight * memory.out + (1 - weight) * local.out
    return args.result


def memory_parts(
    func: str, args: AttentionArgs, memory_k: Any, memory_v: Any, gate: Any, options: InnerOptions
) -> tuple[AttentionArgs, AttentionArgs, Array | None]:
    """The calls to the sequence's keys and to the memory's, and with a gate the share of the latter."""
    shared = ("scale", "softcap", "num_threads", "backend")
    there: Any = {name: x for name, x in options.items() if name in shared}
    keys, values = operand(func, "memory_k", memory_k, []), operand(func, "memory_v", memory_v, [])
    require_dtypes(func, q=args.q, memory_k=keys, memory_v=values)
    of_heads, dims = (args.heads_kv, keys.shape[-2]), "(..., heads_kv, len_m, head_dim)"
    for name, x, dim in (("memory_k", keys, args.head_dim), ("memory_v", values, args.head_dim_v)):
        expected = (*args.batch_shape, *of_heads, dim)
        require_broadcast(func, name, x.shape, expected, dims)
        if (x.shape if x.ndim > 2 else (1, *x.shape))[-3:] != expected[-3:]:
            raise wrong_shape(func, name, x, f"{dims} = {expected}")
    keys, values = (x.reshape((1,) * (3 - x.ndim) + x.shape) for x in (keys, values))
    queries = np.broadcast_to(args.q, (*args.batch_shape, *args.q.shape[-3:]))
    weight = None
    if gate is not None:
        logits = per_head(func, "gate", gate, args).astype(np.float64)[..., None, None]
        with np.errstate(over="ignore"):
            weight = (1 / (1 + np.exp(-logits))).astype(lane_dtype(args.q.dtype))
    return apart(args), apart(attention_args(func, queries, keys, values, **there)), weight


@overload
def latent_attention(
    q: ArrayLike,
    cache: ArrayLike,
    key_weight: ArrayLike,
    value_weight: ArrayLike,
    *,
    absorbed: bool | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[InnerOptions],
) -> Array: ...
@overload
def latent_attention(
    q: ArrayLike,
    cache: ArrayLike,
    key_weight: ArrayLike,
    value_weight: ArrayLike,
    *,
    absorbed: bool | None = None,
    return_lse: Literal[True],
    **options: Unpack[InnerOptions],
) -> tuple[Array, Array]: ...
@np.errstate(all="ignore")  # as in the kernels
def latent_attention(
    q: ArrayLike,
    cache: ArrayLike,
    key_weight: ArrayLike,
    value_weight: ArrayLike,
    *,
    absorbed: bool | None = None,
    return_lse: bool = False,
    **options: Unpack[InnerOptions],
) -> Any:
    """Multi-head latent attention of DeepSeek-V2 and V3, over the compressed cache.

    ``k_jh = [W_h c_j, r_j]`` and ``v_jh = U_h c_j``: c_j is the latent vector of token j, r_j its key with
    rotary position, which all heads share.

    Parameters
    ----------
    q : array_like, (..., heads, len_q, nope_dim + rope_dim)
        Queries, the part with rotary position last, and rotated.
    cache : array_like, (..., len_k, rank + rope_dim)
        ``[c_j, r_j]`` of each token: c after its norm, r rotated. This is all that decoding keeps.
    key_weight : array_like, (heads, nope_dim, rank)
        W; with `value_weight` the rows of each head of ``kv_b_proj.weight``, first these, then those.
    value_weight : array_like, (heads, value_dim, rank)
        U.
    absorbed : bool, optional
        True: W goes into the queries and U into the result, and all heads attend to the cache itself, of
        which nothing is copied. False: keys and values of all heads are made first. The same numbers up to
        rounding; by default what takes fewer operations for these dimensions and that many queries.
    return_lse : bool, default False
        As in `attention`.
    **options
        Keyword arguments of `attention`, but out and stats. Scale is by default
        ``1 / sqrt(nope_dim + rope_dim)``.

    Returns
    -------
    out : ndarray, (..., heads, len_q, value_dim)
        In q's dtype.
    lse : ndarray, (..., heads, len_q)
        Only with `return_lse`.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit.

    Notes
    -----
    Absorbed, a pair of a query and a key costs ``2 * rank + rope_dim`` multiply-adds a head. Otherwise it
    costs ``nope_dim + rope_dim + value_dim``, which is less, but every key costs ``rank * (nope_dim +
    value_dim)`` a head first. Absorbed, a step of decoding reads the cache once for all heads.
    Source: DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model",
    2024, arXiv:2405.04434, section 2.1.
    """
    func = "latent_attention"
    x = latent_args(func, q, cache, key_weight, value_weight, absorbed, options)
    rank = x.of_keys.shape[-1]
    nope_dim = x.of_keys.shape[-2]
    dtype, lane = x.queries.dtype, lane_dtype(x.queries.dtype)
    shared = x.tokens[..., None, :, :]
    if x.absorbed:
        longer = np.empty((*x.queries.shape[:-1], x.tokens.shape[-1]), dtype)
        longer[..., :rank] = x.queries[..., :nope_dim].astype(lane, copy=False) @ x.of_keys
        longer[..., rank:] = x.queries[..., nope_dim:]
        args = attention_args(func, longer, shared, shared[..., :rank], return_lse=return_lse, **options)
        dispatch.run(args, options.get("backend"))
        out = (args.out.astype(lane, copy=False) @ x.of_values.swapaxes(-1, -2)).astype(dtype, copy=False)
        return out if args.lse is None else (out, args.lse)
    return run(attention_args(func, x.queries, *x.expanded(), return_lse=return_lse, **options), options)


class LatentArgs(NamedTuple):
    """The arrays of latent attention, checked."""

    queries: Array
    tokens: Array  # the cache
    of_keys: Array  # W and U in the lane dtype
    of_values: Array
    absorbed: bool

    def expanded(self) -> tuple[Array, Array]:
        """Keys and values of all heads."""
        _, nope_dim, rank = self.of_keys.shape
        heads, _, dim = self.queries.shape[-3:]
        tokens, shared = self.tokens, self.tokens[..., None, :, :]
        latent = shared[..., :rank].astype(self.of_keys.dtype, copy=False)
        k: Array = np.empty((*tokens.shape[:-2], heads, tokens.shape[-2], dim), tokens.dtype)
        k[..., nope_dim:] = shared[..., rank:]
        k[..., :nope_dim] = latent @ self.of_keys.swapaxes(-1, -2)
        v = (latent @ self.of_values.swapaxes(-1, -2)).astype(tokens.dtype, copy=False)
        return k, v


def latent_args(
    func: str, q: Any, cache: Any, key_weight: Any, value_weight: Any, absorbed: Any, options: InnerOptions
) -> LatentArgs:
    """Check the arguments of latent attention, and set the scale."""
    require_options(func, options, InnerOptions)
    queries = operand(func, "q", q, [])
    tokens = operand(func, "cache", cache, [])
    require_dtypes(func, q=queries, cache=tokens)
    of_keys = float_array(func, "key_weight", key_weight)
    of_values = float_array(func, "value_weight", value_weight)
    if queries.ndim < 3:
        raise wrong_shape(func, "q", queries, "(..., heads, len_q, nope_dim + rope_dim)")
    heads, len_q, dim = queries.shape[-3:]
    for name, x in (("key_weight", of_keys), ("value_weight", of_values)):
        if x.ndim != 3 or x.shape[0] != heads or x.shape[-1] != of_keys.shape[-1]:
            expected = f"(heads, dim, rank), q's {heads} heads and one rank for both"
            raise wrong_shape(func, name, x, expected)
    _, nope_dim, rank = of_keys.shape
    value_dim, rope_dim = of_values.shape[1], dim - nope_dim
    if rope_dim < 0 or tokens.shape[-1] != rank + rope_dim:
        expected = f"(..., len_k, rank + rope_dim), {rank} and {rope_dim} of weights and q"
        raise wrong_shape(func, "cache", tokens, expected)
    broadcast_batch(func, q=queries.shape[:-3], cache=tokens.shape[:-2])
    if absorbed is None:
        absorbed = len_q * (2 * rank - nope_dim - value_dim) <= rank * (nope_dim + value_dim)
    absorbed = flag(func, "absorbed", absorbed)
    if options.get("scale") is None:
        options["scale"] = dim**-0.5
    lane = lane_dtype(queries.dtype)
    return LatentArgs(
        queries, tokens, of_keys.astype(lane, copy=False), of_values.astype(lane, copy=False), absorbed
    )
