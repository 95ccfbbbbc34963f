"""Attention over keys that are compressed to one short vector a token."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fastattn._args.attention import attention_args
from fastattn._args.errors import wrong_shape
from fastattn._args.options import InnerOptions, require_options
from fastattn._args.types import Array, ArrayLike, AttentionArgs, Unpack, lane_dtype
from fastattn._args.values import (
    broadcast_batch,
    flag,
    float_array,
    operand,
    require_dtypes,
)
from fastattn._engine import dispatch
from fastattn.functional._composed_gradients import ComposedGradients, cotangents, shown
from fastattn.functional._differentiable import Steps, differentiable


@differentiable("q", "cache", "key_weight", "value_weight", options=InnerOptions)
def latent_attention(
    q: ArrayLike,
    cache: ArrayLike,
    key_weight: ArrayLike,
    value_weight: ArrayLike,
    *,
    absorbed: bool | None = None,
    return_lse: bool = False,
    **options: Unpack[InnerOptions],
) -> Steps[Any]:
    """Multi-head latent attention of DeepSeek-V2 and V3, over the compressed cache.

    ``k_jh = [W_h c_j, r_j]`` and ``v_jh = U_h c_j``: c_j is the latent vector of token j, r_j its rotary key,
    shared by all heads.

    Parameters
    ----------
    q : array_like, (..., heads, len_q, nope_dim + rope_dim)
        Queries, the rotated part last.
    cache : array_like, (..., len_k, rank + rope_dim)
        ``[c_j, r_j]`` of each token: c normalised, r rotated. Decoding caches nothing else.
    key_weight : array_like, (heads, nope_dim, rank)
        W. `key_weight` and `value_weight` are the rows of each head of ``kv_b_proj.weight``, in this order.
    value_weight : array_like, (heads, value_dim, rank)
        U.
    absorbed : bool, optional
        True: apply W to the queries and U to the result; all heads attend the cache itself, without a copy.
        False: compute keys and values of all heads first. Results are equal up to rounding; by default what
        takes fewer operations for these dimensions and number of queries.
    return_lse : bool, default False
        As in `attention`.
    **options
        Keyword arguments of `attention` except out and stats. Scale defaults to
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
    Absorbed, a query and key cost ``2 * rank + rope_dim`` multiply-adds per head; otherwise
    ``nope_dim + rope_dim + value_dim``, and ``rank * (nope_dim + value_dim)`` for the key and value of a
    token and head. Source: DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts
    Language Model", 2024, arXiv:2405.04434, section 2.1.
    """
    require_options(options, InnerOptions)
    x = latent_args(q, cache, key_weight, value_weight, absorbed, options)
    if x.absorbed:
        out, lse = x.absorbed_attention(options, return_lse)
    else:
        args = x.expanded_args(options, return_lse)
        dispatch.run(args, options.get("backend"))
        out, lse = args.out, args.lse
    request = yield out if lse is None else (out, lse)

    found = ComposedGradients(request, options)
    args = x.expanded_args(options, True)
    args.out, args.lse = out, lse
    uses = {"dk": ("dcache", "dkey_weight"), "dv": ("dcache", "dvalue_weight")}
    call = found.attend(args, *cotangents(args, request), uses=uses)
    _, nope_dim, rank = x.of_keys.shape
    found.add("dq", call.dq)
    dkeys = None if call.dk is None else call.dk[..., :nope_dim]
    if found.wants("dcache"):
        dlatent = dkeys @ x.of_keys + call.dv @ x.of_values
        dshared = np.concatenate([dlatent, call.dk[..., nope_dim:]], axis=-1)
        found.add("dcache", dshared.sum(axis=-3))
    latent = x.tokens[..., None, :, :rank]
    for name, dx in (("dkey_weight", dkeys), ("dvalue_weight", call.dv)):
        if dx is not None and found.wants(name):
            found.add(name, dx.swapaxes(-1, -2) @ shown(latent, dx))
    return found.results()


class _Latent(NamedTuple):
    """The arrays of latent attention, checked."""

    queries: Array
    tokens: Array  # the cache
    of_keys: Array  # W and U in the lane dtype
    of_values: Array
    absorbed: bool

    def absorbed_queries(self) -> Array:
        """Queries of the cache itself, (..., heads, len_q, rank + rope_dim)."""
        _, nope_dim, rank = self.of_keys.shape
        longer = np.empty((*self.queries.shape[:-1], self.tokens.shape[-1]), self.queries.dtype)
        longer[..., :rank] = (
            self.queries[..., :nope_dim].astype(self.of_keys.dtype, copy=False) @ self.of_keys
        )
        longer[..., rank:] = self.queries[..., nope_dim:]
        return longer

    def from_latents(self, latents: Array) -> Array:
        """Results, (..., heads, len_q, value_dim), of averages of latent vectors."""
        out = latents.astype(self.of_values.dtype, copy=False) @ self.of_values.swapaxes(-1, -2)
        return np.asarray(out).astype(self.queries.dtype, copy=False)

    def absorbed_attention(self, options: InnerOptions, return_lse: bool) -> tuple[Array, Array | None]:
        """Out and lse, by attention of all heads to the cache itself."""
        shared, rank = self.tokens[..., None, :, :], self.of_keys.shape[-1]
        longer = self.absorbed_queries()
        args = attention_args(longer, shared, shared[..., :rank], return_lse=return_lse, **options)
        dispatch.run(args, options.get("backend"))
        return self.from_latents(args.out), args.lse

    def expanded_args(self, options: InnerOptions, return_lse: bool) -> AttentionArgs:
        """The call of attention to keys and values of all heads, which are made here."""
        _, nope_dim, rank = self.of_keys.shape
        heads, _, dim = self.queries.shape[-3:]
        tokens, shared = self.tokens, self.tokens[..., None, :, :]
        latent = shared[..., :rank].astype(self.of_keys.dtype, copy=False)
        k: Array = np.empty((*tokens.shape[:-2], heads, tokens.shape[-2], dim), tokens.dtype)
        k[..., nope_dim:] = shared[..., rank:]
        k[..., :nope_dim] = latent @ self.of_keys.swapaxes(-1, -2)
        v = (latent @ self.of_values.swapaxes(-1, -2)).astype(tokens.dtype, copy=False)
        return attention_args(self.queries, k, v, return_lse=return_lse, **options)


def latent_args(
    q: Any, cache: Any, key_weight: Any, value_weight: Any, absorbed: Any, options: Any
) -> _Latent:
    """Check the arguments of latent attention, but for the options' names, and set the scale."""
    queries = operand("q", q, [])
    tokens = operand("cache", cache, [])
    require_dtypes({"q": queries, "cache": tokens})
    of_keys = float_array("key_weight", key_weight)
    of_values = float_array("value_weight", value_weight)
    if queries.ndim < 3:
        raise wrong_shape("q", queries, "(..., heads, len_q, nope_dim + rope_dim)")
    heads, len_q, dim = queries.shape[-3:]
    for x in (of_keys, of_values):
        if x.ndim != 3 or x.shape[0] != heads or x.shape[-1] != of_keys.shape[-1]:
            shapes = f"shapes {of_keys.shape} and {of_values.shape}"
            expected = f"(heads, dim, rank), q's {heads} heads and one rank for both"
            raise ValueError(f"(): key_weight and value_weight have {shapes}; expected {expected}")
    _, nope_dim, rank = of_keys.shape
    value_dim, rope_dim = of_values.shape[1], dim - nope_dim
    if rope_dim < 0 or tokens.shape[-1] != rank + rope_dim:
        expected = (
            f"(..., len_k, rank + rope_dim), {rank} of key_weight, {of_keys.shape}, and {rope_dim} of q"
        )
        raise wrong_shape("cache", tokens, expected)
    if tokens.ndim >= queries.ndim:
        raise wrong_shape(
            "cache", tokens, f"(..., len_k, rank + rope_dim), without heads, for q {queries.shape}"
        )
    broadcast_batch(q=queries.shape[:-3], cache=tokens.shape[:-2])
    if absorbed is None:
        absorbed = len_q * (2 * rank - nope_dim - value_dim) <= rank * (nope_dim + value_dim)
    absorbed = flag("absorbed", absorbed)
    if options.get("scale") is None:
        options["scale"] = dim**-0.5
    lane = lane_dtype(queries.dtype)
    return _Latent(
        queries, tokens, of_keys.astype(lane, copy=False), of_values.astype(lane, copy=False), absorbed
    )
