"""Attentions that select their keys: the published ones, of scores, lists and gates."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._args.errors import wrong_shape
from fastattn._args.options import ListedOptions, SelectingOptions, require_options
from fastattn._args.types import Array, ArrayLike, AttentionArgs, Ints, Unpack, lane_dtype
from fastattn._args.values import float_array, integer, require_broadcast
from fastattn._args.variants import how, offsets, variant_args
from fastattn.functional._attention import attention
from fastattn.functional._composed_gradients import ComposedGradients, shown
from fastattn.functional._differentiable import Steps, differentiable
from fastattn.functional._memory import latent_args
from fastattn.functional._selected import selected_attention
from fastattn.functional._selection import SCORES, select_keys
from fastattn.functional._split_calls import weighted

_attention: Any = attention._vjp  # type: ignore[attr-defined]
_selected_attention: Any = selected_attention._vjp  # type: ignore[attr-defined]
_select_keys: Any = select_keys.__wrapped__  # type: ignore[attr-defined]


@differentiable("q", "k", "v", options=ListedOptions)
def moba_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    block_size: int = 512,
    top_k: int = 3,
    **options: Unpack[ListedOptions],
) -> Steps[Array]:
    """Mixture of block attention (MoBA): each query head attends the blocks whose mean key it likes most.

    Parameters
    ----------
    q, k, v : array_like
        As in `attention`, like the result and the errors.
    block_size : int, default 512
        Keys of a block.
    top_k : int, default 3
        Blocks of a query, its own among them, which it attends up to itself.
    **options
        Keyword arguments of `attention`: scale, kv_lengths, q_offset, num_threads, backend. It is causal.

    Notes
    -----
    `select_keys` of the means of blocks, ``q @ mean(k)``, and `selected_attention`, head by head of queries:
    O(len_q * (len_k / block_size + top_k * block_size) * head_dim) a head. The selection has no gradient.
    Source: E. Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs", 2025, arXiv:2502.13189.
    """
    _require_options(options, ListedOptions, "block_size", "top_k")
    args = variant_args(q, k, v, options, ListedOptions)
    size = _within(args, integer("block_size", block_size, 1))
    means = _means(args.k, size)
    selected = _selected(args, args.q, means, size, top_k, options)
    return (yield from _attend_each_head(args, selected, size, options))


@differentiable("q", "k", "v", options=ListedOptions)
def quest_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    page_size: int = 16,
    top_k: int = 128,
    bounds: tuple[ArrayLike, ArrayLike] | None = None,
    **options: Unpack[ListedOptions],
) -> Steps[Array]:
    """Quest: each query head attends the pages of keys that may hold its largest scores.

    The bound of a page is ``sum over d of max(q_d * low_d, q_d * high_d)``, low and high the least and the
    largest number of each feature in its keys.

    Parameters
    ----------
    q, k, v : array_like
        As in `attention`, like the result and the errors.
    page_size : int, default 16
        Keys of a page.
    top_k : int, default 128
        Pages of a query, 2048 keys by default; its own is always one of them.
    bounds : (array_like, array_like), each (..., heads_kv, pages, head_dim), optional
        ``(low, high)`` of all pages, in k's dtype, which a cache may keep; by default they are found here.
    **options
        Keyword arguments of `attention`: scale, kv_lengths, q_offset, num_threads, backend. It is causal.

    Notes
    -----
    `select_keys` and `selected_attention`. The bound is one product of twice the features: the positive part
    of q with high, the negative one with low. Of a page that a query attends in part, later keys count in
    its bound. Source: J. Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference",
    2024, arXiv:2406.10774.
    """
    _require_options(options, ListedOptions, "page_size", "top_k", "bounds")
    args = variant_args(q, k, v, options, ListedOptions)
    size = _within(args, integer("page_size", page_size, 1))
    if bounds is None:
        first = np.arange(0, args.len_k, size)
        low, high = (f.reduceat(args.k, first, axis=-2) if len(first) else args.k for f in _EXTREMES)
    else:
        low, high = (float_array(f"bounds[{i}]", x) for i, x in enumerate(bounds))
        shape = (*args.batch_shape, args.heads_kv, -(-args.len_k // size), args.head_dim)
        for i, x in enumerate((low, high)):
            require_broadcast(f"bounds[{i}]", x.shape, shape, "(..., heads_kv, pages, head_dim)")
    zero = args.q.dtype.type(0)
    both = np.concatenate([np.maximum(args.q, zero), np.minimum(args.q, zero)], axis=-1)
    pages = np.concatenate(np.broadcast_arrays(high, low), axis=-1)
    selected = _selected(args, both, pages, size, top_k, options)
    return (yield from _attend_each_head(args, selected, size, options))


_EXTREMES = np.minimum, np.maximum


@differentiable("q", "k", "v", "gates", "compressed_k", "compressed_v", options=ListedOptions)
def native_sparse_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    gates: ArrayLike,
    *,
    compressed_k: ArrayLike | None = None,
    compressed_v: ArrayLike | None = None,
    compress_size: int = 32,
    compress_stride: int = 16,
    block_size: int = 64,
    top_k: int = 16,
    first: int = 1,
    last: int = 2,
    window: int = 512,
    **options: Unpack[ListedOptions],
) -> Steps[Array]:
    """Native sparse attention (NSA): compressed keys, selected blocks and a window, weighted by gates.

    ``g_1 * attention(q, compressed) + g_2 * attention(q, selected blocks) + g_3 * attention(q, window)``

    Parameters
    ----------
    q, k, v : array_like
        As in `attention`, like the result and the errors. Published for many query heads a key head.
    gates : array_like, (..., heads_q, len_q, 3)
        The weights of the three, after their sigmoid. What has the weight 0 never reaches the result.
    compressed_k, compressed_v : array_like, (..., heads_kv, blocks, head_dim or head_dim_v), optional
        A key and a value for keys ``i * compress_stride`` to ``i * compress_stride + compress_size - 1``, of
        each i for which these are there, as a learned map makes them; by default the means.
    compress_size, compress_stride : int, default 32 and 16
        The first is a multiple of the second.
    block_size : int, default 64
        Keys of a block that is selected, a multiple of `compress_stride`.
    top_k : int, default 16
        Blocks of a query, the same for all heads of a group; among them are always the `first` ones, and the
        `last` ones up to its own.
    first, last : int, default 1 and 2
        How many of the first blocks, and of those up to the query's own, are always selected.
    window : int, default 512
        Keys of the window, the query's own last.
    **options
        Keyword arguments of `attention`: scale, kv_lengths, q_offset, num_threads, backend. It is causal.

    Notes
    -----
    The score of a block is the sum of the probabilities of compressed keys over the heads of a group; each
    counts once for every stride of keys that it covers in the block, equations 9 and 10 of the paper. A query
    sees the compressed keys that end at itself or before. The selection has no gradient. Scores are computed
    in NumPy, a block of queries at a time. Source: J. Yuan et al., "Native Sparse Attention: Hardware-Aligned
    and Natively Trainable Sparse Attention", 2025, arXiv:2502.11089.
    """
    _require_options(options, ListedOptions, *_NSA)
    args = variant_args(q, k, v, options, ListedOptions)
    lane, size = lane_dtype(args.q.dtype), integer("block_size", block_size, 1)
    stride = integer("compress_stride", compress_stride, 1)
    width, window = integer("compress_size", compress_size, 1), integer("window", window, 1)
    for name, n in (("compress_size", width), ("block_size", size)):
        if n % stride:
            raise ValueError(f"(): {name} is {n}; expected a multiple of compress_stride, {stride}")
    size, stride, width = (_within(args, n) for n in (size, stride, width))
    always = integer("first", first, 0) + integer("last", last, 0)
    top_k = min(integer("top_k", top_k, 1), max(-(-args.len_k // size), always))
    shares = float_array("gates", gates).astype(lane)
    shape = (*args.batch_shape, args.heads_q, args.len_q, 3)
    require_broadcast("gates", shares.shape, shape, "(..., heads_q, len_q, 3)")
    shares = np.broadcast_to(shares, shape)
    short = _Compressed(args, width, stride, compressed_k, compressed_v)

    scale: Any = {"scale": args.scale, **how(options)}
    place = {**scale, **_places(options)}
    position = offsets(args, options)[..., None, None] + np.arange(args.len_q)
    last_key = np.minimum(
        position, np.asarray(_places(options).get("kv_lengths", args.len_k))[..., None, None] - 1
    )
    visible = np.clip((last_key - width + 1) // stride + 1, 0, short.k.shape[-2])
    ranges = (0, visible)
    (seen, lse), of_seen = _attention(args.q, short.k, short.v, row_ranges=ranges, return_lse=True, **scale)
    selected = _select_keys(
        args.q, args.k[..., ::size, :], top_k, score=short.scores(args, lse, visible, size), causal=True,
        block_size=size, first=first, last=last, **_lengths(args, options), **how(options),
    )  # fmt: skip
    chosen, of_chosen = _selected_attention(
        args.q, args.k, args.v, selected, block_size=size, causal=True, **place
    )
    near, of_near = _attention(args.q, args.k, args.v, window=(window - 1, 0), causal=True, **place)
    branches = seen, chosen, near
    out = sum(weighted(shares[..., i, None], x.astype(lane, copy=False)) for i, x in enumerate(branches))
    out = np.asarray(out).astype(args.q.dtype, copy=False)
    request = yield out[0] if args.result.ndim == 2 else out

    found = ComposedGradients(request, options)
    dout = request.dout.reshape(out.shape).astype(lane, copy=False)
    found.add("dgates", np.stack([(dout * shown(x, dout)).sum(axis=-1) for x in branches], axis=-1))
    for i, (x, back) in enumerate(zip(branches, (of_seen, of_chosen, of_near), strict=True)):
        names = ("dq", "dk", "dv", *["dscale"] * found.wants("dscale"))
        dq, dk, dv, *dscale = back((dout * shares[..., i, None]).astype(x.dtype, copy=False), need=names)
        found.add("dq", dq)
        for dx in dscale:
            found.add("dscale", dx)
        if i == 0:
            dk, dv = (short.spread(dx, name, found) for name, dx in (("k", dk), ("v", dv)))
        found.add("dk", dk)
        found.add("dv", dv)
    return found.results()


_NSA = (
    "compressed_k",
    "compressed_v",
    "compress_size",
    "compress_stride",
    "block_size",
    "top_k",
    "first",
    "last",
    "window",
)


class _Compressed:
    """Keys and values of overlapping blocks of `width` keys, one after `stride` keys."""

    def __init__(self, args: AttentionArgs, width: int, stride: int, k: Any, v: Any) -> None:
        self.width, self.stride, self.len_k = width, stride, args.len_k
        self.given = {"k": k is not None, "v": v is not None}
        count = max(0, (args.len_k - width) // stride + 1)
        shape = (*args.batch_shape, args.heads_kv, count)
        found = []
        for name, x, given, dim in (("k", args.k, k, args.head_dim), ("v", args.v, v, args.head_dim_v)):
            made = self._means(x, count) if given is None else float_array(f"compressed_{name}", given)
            if given is not None:
                full = (*shape, dim)
                require_broadcast(f"compressed_{name}", made.shape, full, "(..., heads_kv, blocks, head_dim)")
                if made.shape[-3:] != full[-3:]:
                    raise wrong_shape(f"compressed_{name}", made, full)
            found.append(made)
        self.k, self.v = found

    def _means(self, x: Array, count: int) -> Array:
        """Means of the blocks, (..., count, width)."""
        lane, share = lane_dtype(x.dtype), self.width // self.stride
        chunks = _sums(x[..., : (count + share - 1) * self.stride if count else 0, :], self.stride)
        means = sum((chunks[..., i : i + count, :] for i in range(share)), np.zeros((), lane)) / self.width
        return np.asarray(means).astype(x.dtype, copy=False)

    def spread(self, dx: Array, name: str, found: ComposedGradients) -> Any:
        """The gradient of what means were taken of, from theirs; that of given ones is added to `found`."""
        if self.given[name]:
            found.add(f"dcompressed_{name}", dx)
            return None
        lane = lane_dtype(dx.dtype)
        whole = np.zeros((*dx.shape[:-2], self.len_k, dx.shape[-1]), lane)
        count = dx.shape[-2]
        for i in range(self.width):
            rows = whole[..., i : i + count * self.stride : self.stride, :]
            rows[..., :count, :] += dx / lane.type(self.width)
        return whole

    def scores(self, args: AttentionArgs, lse: Array, visible: Ints, block_size: int) -> Any:
        """A function of some queries that gives the scores of blocks of keys."""
        count, lane, group = self.k.shape[-2], lane_dtype(args.q.dtype), args.heads_q // args.heads_kv
        covers = np.zeros((count, -(-args.len_k // block_size)), lane)
        for i in range(self.width // self.stride):
            n = np.arange(count)
            np.add.at(covers, (n, (n + i) * self.stride // block_size), 1)
        keys = np.repeat(self.k.astype(lane, copy=False), group, axis=-3).swapaxes(-1, -2)
        shape = np.broadcast_shapes(visible.shape, lse.shape)
        ends, norms = np.broadcast_to(visible, shape), np.broadcast_to(lse, shape)

        def score(rows: Array, begin: int) -> Array:
            step = max(1, SCORES // max(1, rows.size // rows.shape[-2] // rows.shape[-1] * count))
            parts = [of_some(rows[..., i : i + step, :], begin + i) for i in range(0, rows.shape[-2], step)]
            return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-2)

        def of_some(rows: Array, begin: int) -> Array:
            part = (..., slice(begin, begin + rows.shape[-2]), None)
            probs = np.exp(rows.astype(lane, copy=False) @ keys * lane.type(args.scale) - norms[part])
            probs = np.where(np.arange(count) < ends[part], probs, 0)
            by_group = probs.reshape(*probs.shape[:-3], args.heads_kv, group, *probs.shape[-2:])
            of_blocks: Array = by_group.sum(axis=-3) @ covers
            return of_blocks

        return score


@differentiable("q", "cache", "key_weight", "value_weight", options=SelectingOptions)
def deepseek_sparse_attention(
    q: ArrayLike,
    cache: ArrayLike,
    key_weight: ArrayLike,
    value_weight: ArrayLike,
    index_q: ArrayLike,
    index_k: ArrayLike,
    index_weights: ArrayLike,
    *,
    top_k: int = 2048,
    return_lse: bool = False,
    **options: Unpack[SelectingOptions],
) -> Steps[Any]:
    """DeepSeek sparse attention (DSA): latent attention to the keys that a lightning indexer selects.

    ``I_ij = sum over h of w_ih * relu(index_q_ih . index_k_j)``; query i attends the `top_k` keys up to its
    own with the largest I_ij, for all heads the same.

    Parameters
    ----------
    q, cache, key_weight, value_weight, return_lse
        As in `latent_attention`, like the results and errors.
    index_q : array_like, (..., index_heads, len_q, index_dim)
        Queries of the indexer.
    index_k : array_like, (..., len_k, index_dim)
        Its keys, one a token.
    index_weights : array_like, (..., index_heads, len_q)
        w; a positive factor of all changes nothing.
    top_k : int, default 2048
        Keys of a query.
    **options
        Keyword arguments of `attention`: scale, softcap, sinks, kv_lengths, q_offset, num_threads, backend.
        It is causal.

    Notes
    -----
    `select_keys`, and `selected_attention` of all heads to the cache itself, with the weights absorbed into
    queries and results: a query reads each of its cache rows once for all heads. The selection has no
    gradient; DeepSeek trains the indexer apart. Source: DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of
    Open Large Language Models", 2025, arXiv:2512.02556.
    """
    _require_options(options, SelectingOptions, "top_k", "return_lse")
    x = latent_args(q, cache, key_weight, value_weight, True, options)
    keys = _require_index(x, index_q, index_k, index_weights)
    top_k = min(integer("top_k", top_k, 1), max(1, keys.shape[-2]))
    selected = _select_keys(
        index_q, keys[..., None, :, :], top_k, weights=index_weights, activation="relu", causal=True,
        **_places(options), **how(options),
    )  # fmt: skip
    longer, shared = x.absorbed_queries(), x.tokens[..., None, :, :]
    _, nope_dim, rank = x.of_keys.shape
    (latents, lse), back = _selected_attention(
        longer, shared, shared[..., :rank], selected, causal=True, return_lse=True, **options
    )
    out = x.from_latents(latents)
    request = yield (out, lse) if return_lse else out

    found = ComposedGradients(request, options)
    lane = x.of_keys.dtype
    dout = request.dout.reshape(out.shape).astype(lane, copy=False)
    found.add("dvalue_weight", dout.swapaxes(-1, -2) @ latents.astype(lane, copy=False))
    dlatents = (dout @ x.of_values).astype(latents.dtype, copy=False)
    names = [f"d{name}" for name in ("sinks", "scale", "softcap") if found.wants(f"d{name}")]
    dlonger, dshared, dvalues, *others = back(dlatents, request.dmore, need=("dq", "dk", "dv", *names))
    for name, dx in zip(names, others, strict=True):
        found.add(name, dx)
    dlonger, dshared = dlonger.astype(lane, copy=False), dshared.astype(lane)
    dshared[..., :rank] += dvalues
    found.add("dcache", dshared[..., 0, :, :])
    dkeys = dlonger[..., :rank]
    found.add("dq", np.concatenate([dkeys @ x.of_keys.swapaxes(-1, -2), dlonger[..., rank:]], axis=-1))
    found.add("dkey_weight", shown(x.queries[..., :nope_dim], dkeys[..., :1]).swapaxes(-1, -2) @ dkeys)
    return found.results()


def _require_options(options: Any, taken: type, *named: str) -> None:
    """Raise unless `taken` has all `options`; messages list those `named`, too."""
    if "causal" in options:
        raise TypeError("(): causal is not an argument: this attention is always causal")
    require_options(options, taken, *named)


def _require_index(x: Any, index_q: Any, index_k: Any, index_weights: Any) -> Array:
    """Raise unless the arrays of an indexer fit latent attention `x`; return its keys."""
    queries, keys = (
        float_array("index_q", index_q, least_dims=3),
        float_array("index_k", index_k, least_dims=2),
    )
    heads, len_q, dim = queries.shape[-3:]
    batch = np.broadcast_shapes(x.queries.shape[:-3], x.tokens.shape[:-2])
    for name, array, core, dims in (
        ("index_q", queries, (heads, x.queries.shape[-2], dim), "(..., index_heads, len_q, index_dim)"),
        ("index_k", keys, (x.tokens.shape[-2], dim), "(..., len_k, index_dim)"),
        ("index_weights", np.asarray(index_weights), (heads, len_q), "(..., index_heads, len_q)"),
    ):
        require_broadcast(name, array.shape, (*batch, *core), dims)
        if array.shape[-len(core) :] != core:
            raise wrong_shape(name, array, f"{dims} = {(*batch, *core)}")
    return keys


def _places(options: Any) -> dict[str, Any]:
    """The options that say where queries stand."""
    return {name: options[name] for name in ("kv_lengths", "q_offset") if options.get(name) is not None}


def _lengths(args: AttentionArgs, options: Any) -> dict[str, Any]:
    """Options that say where queries stand among blocks of keys, of which the last one may be a part."""
    return {"kv_lengths": args.len_k, "q_offset": offsets(args, options), **_places(options)}


def _within(args: AttentionArgs, size: int) -> int:
    """`size`, a number of keys, or where it is larger than that of all keys, the next one."""
    return min(size, args.len_k + 1)


def _sums(x: Array, size: int) -> Array:
    """Sums of `size` rows and the last ones, (..., blocks, width), in the lane dtype."""
    lane, first = lane_dtype(x.dtype), np.arange(0, x.shape[-2], size)
    if not len(first):
        return np.zeros((*x.shape[:-2], 0, x.shape[-1]), lane)
    sums: Array = np.add.reduceat(x.astype(lane, copy=False), first, axis=-2)
    return sums


def _means(x: Array, size: int) -> Array:
    """Means of blocks of `size` rows, of which the last one may be a part."""
    sums = _sums(x, size)
    counts = np.minimum(size, x.shape[-2] - size * np.arange(sums.shape[-2]))
    return np.asarray(sums / counts[:, None].astype(sums.dtype)).astype(x.dtype, copy=False)


def _selected(args: AttentionArgs, q: Array, k: Array, size: int, top_k: int, options: Any) -> Ints:
    """Blocks that each query head selects, its own among them, with heads as batch items."""
    group = args.heads_q // args.heads_kv
    queries = q.reshape(*q.shape[:-3], args.heads_kv, group, 1, *q.shape[-2:])
    place = {name: _of_heads(x, args) for name, x in _lengths(args, options).items()}
    selected: Ints = _select_keys(
        queries,
        k[..., None, None, :, :],
        min(integer("top_k", top_k, 1), max(1, k.shape[-2])),
        causal=True,
        block_size=size,
        last=1,
        **place,
        **how(options),
    )
    return selected


def _of_heads(x: Any, args: AttentionArgs) -> Ints:
    """An option of sequences, for calls whose heads are the last two axes of the batch."""
    group = args.heads_q // args.heads_kv
    return np.broadcast_to(np.asarray(x)[..., None, None], (*args.batch_shape, args.heads_kv, group))


def _attend_each_head(args: AttentionArgs, selected: Ints, size: int, options: Any) -> Steps[Array]:
    """Steps of attention whose lists differ by query head."""
    group = args.heads_q // args.heads_kv
    queries = args.q.reshape(*args.q.shape[:-3], args.heads_kv, group, 1, *args.q.shape[-2:])
    keys, values = (x[..., None, None, :, :] for x in (args.k, args.v))
    place: dict[str, Any] = {name: _of_heads(x, args) for name, x in _places(options).items()}
    result, back = _selected_attention(
        queries,
        keys,
        values,
        selected,
        block_size=size,
        causal=True,
        scale=args.scale,
        **place,
        **how(options),
    )
    out = result.reshape(args.out.shape)
    request = yield out[0] if args.result.ndim == 2 else out

    found = ComposedGradients(request, options)
    names = ["dq", "dk", "dv"] + ["dscale"] * found.wants("dscale")
    for name, dx in zip(names, back(request.dout.reshape(result.shape), need=tuple(names)), strict=True):
        shape = {"dq": args.q.shape, "dk": args.k.shape, "dv": args.v.shape}.get(name)
        found.add(name, dx if shape is None else dx.reshape(shape))
    return found.results()
