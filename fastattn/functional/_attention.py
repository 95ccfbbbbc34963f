"""The public functions: what they mean. `_args` checks, the kernels compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from fastattn._args.attention import attention_args, partial_states
from fastattn._args.errors import named, put_name
from fastattn._args.options import (
    AttentionOptions,
    Backend,
    NoOptions,
    WeightsOptions,
    require_options,
)
from fastattn._args.types import Array, ArrayLike, NDArray, Unpack
from fastattn._args.words import by_position, not_an_argument
from fastattn._engine import dispatch, settings
from fastattn._engine.rounding import by_integers
from fastattn._engine.tiles import count_tiles
from fastattn._reference import attention as reference

if TYPE_CHECKING:
    from typing_extensions import NotRequired

    from fastattn._args.statistics import Statistics
    from fastattn.masks import Mask

    # What a call returns: out, or out and lse, or out and statistics, or any of these.
    class _Out(AttentionOptions, total=False):
        return_lse: Literal[False]
        stats: None

    class _Lse(AttentionOptions):
        return_lse: Literal[True]
        stats: NotRequired[None]

    class _Stats(AttentionOptions):
        return_lse: NotRequired[Literal[False]]
        stats: Sequence[str]

    class _Results(AttentionOptions):
        return_lse: bool
        stats: NotRequired[Sequence[str] | None]


@overload
def attention(q: ArrayLike, k: ArrayLike, v: ArrayLike, **options: Unpack[_Out]) -> Array: ...
@overload
def attention(q: ArrayLike, k: ArrayLike, v: ArrayLike, **options: Unpack[_Lse]) -> tuple[Array, Array]: ...
@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, **options: Unpack[_Stats]
) -> tuple[Array, Statistics]: ...
@overload
def attention(q: ArrayLike, k: ArrayLike, v: ArrayLike, **options: Unpack[_Results]) -> Any: ...
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *more: object,
    mask: ArrayLike | Mask | None = None,
    bias: ArrayLike | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    q_offset: ArrayLike | None = None,
    row_ranges: tuple[ArrayLike, ArrayLike] | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    products: Literal["int8"] | None = None,
    block_table: ArrayLike | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    out: NDArray[Any] | None = None,
    return_lse: bool = False,
    stats: Sequence[str] | None = None,
    num_threads: int | None = None,
    backend: Backend | None = None,
    **others: Unpack[NoOptions],
) -> Any:
    """Exact scaled dot-product attention, ``softmax(scale * q @ k.T) @ v``, fused.

    All options but `products` are exact, and but for it all combine. Scores are transformed in this order:
    scale, softcap, bias and ALiBi, masks (a key must pass all of `mask`, bias of -inf, `causal`, `window`,
    `kv_lengths` and `row_ranges`), softmax with sinks.

    Parameters
    ----------
    q : array_like, (..., heads_q, len_q, head_dim)
        Queries: float32, float64, float16 or bfloat16 (of ml_dtypes). Any strides; only a non-contiguous head
        dimension, unaligned elements and foreign byte order are copied. A 2-D array is one head.
    k : array_like, (..., heads_kv, len_k, head_dim)
        Keys. ``heads_q`` must be a multiple of ``heads_kv``: each key head serves that many consecutive query
        heads (grouped-query attention). Leading dimensions broadcast.
    v : array_like, (..., heads_kv, len_k, head_dim_v)
        Values. q, k and v have the same dtype, or q is float32 and k and v are both float16 or both bfloat16,
        or k and v are both int8, with `k_scale` and `v_scale`, or both what a `KVCache` in "int4" holds.
    mask : array_like of bool or masks.Mask, optional
        True where a query attends a key. Broadcasts to ``(..., heads_q, len_q, len_k)``: a mask of keys for
        each sequence is ``mask[:, None, None, :]``. Tiles without a True are skipped. A mask of
        `fastattn.masks`, such as ``masks.causal() | masks.first_keys(9)``, never becomes an array: its empty
        blocks cost nothing.
    bias : array_like, optional
        Added to the scores; float32 or q's dtype; broadcasts as `mask`. -inf masks its key, finite values
        never do. Tiles that are all -inf are skipped.
    causal : bool, default False
        Let each query attend the keys up to its own position.
    window : (int or None, int or None), optional
        ``(left, right)``: keys from ``position - left`` to ``position + right``; None is unbounded.
    scale : float, optional
        Default ``1 / sqrt(head_dim)``.
    softcap : float, optional
        Positive; scores become ``softcap * tanh(scores / softcap)``.
    alibi_slopes : array_like, (..., heads_q), optional
        Adds ``-slope * abs(position - j)`` to the score of key j. Integers or any of the four dtypes.
    sinks : array_like, (..., heads_q), optional
        A logit per head that enters only the softmax's denominator, as a key without a value; -inf is none.
        Integers or any of the four dtypes.
    kv_lengths : int or array_like of int, optional
        Number of keys that count, from the first; one for all sequences, or one for each.
    q_offset : int or array_like of int, optional
        Position of the first query, for `causal`, `window` and ALiBi; one for all sequences, or one for each.
        By default the last query is at the last key, as with a KV cache: ``kv_lengths - len_q``, or
        ``len_k - len_q``. With ``q_offset=0``, query i is at key i.
    row_ranges : (array_like of int, array_like of int), optional
        ``(begin, end)``: query i attends keys ``begin[i] <= j < end[i]``. Both broadcast to
        ``(..., heads_q, len_q)`` and are clipped to ``[0, len_k]``; end <= begin is an empty range.
    k_scale, v_scale : array_like, (..., heads_kv, len_k), optional
        Scales of int8 k and v, one per row, as `KVCache` makes them: attention to ``k * k_scale[..., None]``
        and ``v * v_scale[..., None]``. They broadcast. Integers or any of the four dtypes; only float32
        (float64 with float64 queries) is read in place.
    products : {"int8"}, optional
        Multiply in int8 where the kernel can: not exact, see Notes. k and v in int8 are used as they are, all
        rows of others are rounded first. ``explain(...)["int8_products"]`` tells whether it can; else nothing
        changes. Excludes dropout and pages of floats.
    block_table : array_like of int, (..., n), optional
        Keys and values in pages: k is (pages, heads_kv, page, head_dim), v (pages, heads_kv, page,
        head_dim_v), with any strides, and key j of a sequence is row ``j % page`` of page
        ``block_table[..., j // page]``. Sequences may share pages. Then ``len_k = n * page``, and scales are
        (pages, heads_kv, page). Entries of pages that no query attends by `kv_lengths`, `window`, `causal` or
        `row_ranges` are not read and may hold anything.
    dropout : float, default 0.0
        In [0, 1): each probability becomes 0 with this probability, and the others are divided by
        ``1 - dropout``. Does not affect lse and `stats`.
    seed : int, optional
        From 0 to 2**64 - 1; required with `dropout`. What is dropped depends only on the seed and on the
        number of the query, key, head and batch item: docs/attention.md has the definition. Gradients take
        the same two.
    out : ndarray, optional
        Array for the result, with its exact shape, q's dtype, a contiguous last axis and no memory of an
        input.
    return_lse : bool, default False
        Return ``(out, lse)``: lse is the natural logarithm of each row's softmax denominator, sink included.
    stats : sequence of str, optional
        Statistics of the probabilities p, returned last; p is never stored. ``"row_max"``: each row's largest
        score. ``"entropy"``: ``-sum p log p`` over the keys, in nats. ``"top_k:8"``: the 8 (or any number)
        largest p of a row and their keys. ``"key_sums"``: the sum of p over all queries, for each key.
        ``"mean_weights"``: the mean of p over the heads, ``len_q * len_k`` numbers.
    num_threads : int, optional
        Threads of this call; default ``get_num_threads()``. The bits do not depend on it. At most as many
        threads run as there are CPUs, or 64 if there are fewer, and fewer where the system refuses
        (``ulimit -u``).
    backend : {"compiled", "numpy"}, optional
        Run only this implementation. By default the compiled one, or NumPy if it is missing, with one
        `FallbackWarning`.
    *more, **others
        None; errors name the right argument.

    Returns
    -------
    out : ndarray, (..., heads_q, len_q, head_dim_v)
        In q's dtype; 2-D if q, k and v are.
    lse : ndarray, (..., heads_q, len_q)
        Only with `return_lse`; float32, or float64 for float64.
    stats : dict
        Only with `stats`, in the dtype of lse: ``row_max`` and ``entropy`` (..., heads_q, len_q); ``top_k`` a
        pair (weights, keys) of (..., heads_q, len_q, k), best first, ties by the first key; ``key_sums``
        (..., heads_q, len_k); ``mean_weights`` (..., len_q, len_k).

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, before anything is computed.

    See Also
    --------
    scaled_dot_product_attention : torch's names and semantics.
    explain : the kernel for these arguments, what it skips and what is copied.
    merge_states : join results over disjoint keys.

    Notes
    -----
    Time is O(len_q * len_k * (head_dim + head_dim_v)) per head, less what masks skip. Memory beyond inputs
    and output is O(threads) for one tile of scores each, and 184 bytes per batch item; causal, window,
    lengths and row ranges take up to 48 bytes per query row (per head if they differ by head), masks 16 bytes
    per range. Products are accumulated in float32 (float64 for float64).

    A query without keys gets 0, and lse -inf (with a sink, the sink). Masked keys and values, NaN and Inf
    included, never affect a result; NaN that a query attends does.

    int8 keys and values are widened in blocks of 64, or in registers for few query rows. The result has the
    error of float32 on the widened arrays, and for bfloat16 queries that of bfloat16. Rounding k by up to
    ``abs(k_scale) / 2`` and v by up to ``abs(v_scale) / 2`` changes, over the keys that a query attends and
    with ``e = abs(scale) * abs(q).sum() * abs(k_scale).max() / 2``: scores and lse by at most e, an element
    of the result by at most ``abs(v_scale).max() / 2 + tanh(e / 2) * (v.max() - v.min())``, v that element of
    the values. Softcap, biases, ALiBi and masks keep this bound; a sink counts as a value of 0.

    Keys and values of a cache in int4 are widened in blocks of 64, too: the result has the error of float32
    on what they stand for. For bfloat16 queries, where the CPU has dot products of bfloat16, it has that of
    bfloat16: keys, and queries times the Hadamard matrix, are rounded, which changes scores and lse by about
    ``abs(scale) * norm(q) * norm(k) / 256`` at most. Up to 8 query rows of a key head against more keys are
    another exception, but for float64 and the NumPy backend: each 32 elements of a query times the Hadamard
    matrix are rounded to int8, by up to 1/254 of their largest magnitude, and each probability times a scale
    to 16 bits, by up to 1/65,534 of the largest of 64 keys.

    With ``products="int8"``, each query is rounded as well, by up to ``abs(q).max() / 254``. Each probability
    times its v_scale is rounded by up to 1/510 (1/254 on Arm) of the largest probability times the largest
    v_scale, of the 64 keys of its block. Only keys that a query attends count. The sum of the probabilities
    is not rounded: of 64 keys, one of which has e**7 times the weight of each other, those lose all of their
    5%. Rows of float keys are multiplied by a Hadamard matrix before they are rounded, and queries, too: this
    spreads dimensions that stand out, and changes no score. Their copies in int8 take ``head_dim + head_dim_v
    + 8`` bytes per key and head. A query with NaN or Inf, and one that attends a key or value with it, gives
    NaN. Up to 8 query rows of a key head against more keys, head_dim above 65,536, float64, and instruction
    sets without dot products of bytes multiply floats; so padding to more than 8 rows changes results by what
    rounding does.

    ``row_max``, ``entropy`` and ``top_k`` are computed with the result; the other statistics compute the
    scores again. ``top_k`` inserts keys into a sorted list per row in O(k), for tens of keys; for hundreds,
    `attention_weights` and ``np.argpartition`` are faster. A sink takes part of the probabilities but is no
    key and no term of the entropy. Missing keys of ``top_k`` have weight 0 and key -1. A query without keys
    has row_max -inf and entropy 0; where lse is NaN, they are NaN.

    The same input gives the same bits on one instruction set, in every run and in any batch. Up to 8 query
    rows of a key head use another kernel. Padding changes the last bits of such rows if it adds rows beyond
    8, of int4 by what that kernel rounds, or keys that only a mask hides. Self-attention is unaffected.

    Sources: M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018, arXiv:1805.02867;
    T. Dao, D. Y. Fu, S. Ermon, A. Rudra, C. Ré, "FlashAttention: Fast and Memory-Efficient Exact Attention
    with IO-Awareness", 2022, arXiv:2205.14135; for int8, J. Zhang et al., "SageAttention", 2024,
    arXiv:2410.02367, and S. Ashkboos et al., "QuaRot", 2024, arXiv:2404.00456.

    Examples
    --------
    >>> import fastattn, numpy as np
    >>> q, k, v = np.ones((1, 8, 2, 64)), np.ones((1, 2, 5, 64)), np.ones((1, 2, 5, 64))
    >>> fastattn.attention(q, k, v, causal=True).shape
    (1, 8, 2, 64)
    """
    if (  # no option
        mask is None and bias is None and causal is False and window is None and scale is None
        and softcap is None and alibi_slopes is None and sinks is None and kv_lengths is None
        and q_offset is None and row_ranges is None and k_scale is None and v_scale is None
        and products is None and block_table is None and type(dropout) is float and dropout == 0
        and seed is None and out is None and return_lse is False and stats is None
        and num_threads is None and backend is None and not (more or others)
    ):  # fmt: skip
        plain = dispatch.plain_attention(q, k, v)
        if plain is not None:
            return plain
    try:
        if more:
            raise by_position((q, k, v, *more), attention)
        if others:
            raise not_an_argument(others, attention)
        args = attention_args(
            q, k, v, mask, bias, causal, window, scale, softcap, alibi_slopes, sinks, kv_lengths,
            q_offset, row_ranges, out, return_lse, num_threads, backend, stats, ("q", "k", "v"),
            "k_scale and v_scale", k_scale, v_scale, dropout, seed, block_table, products,
        )  # fmt: skip
    except Exception as error:
        put_name("attention", error)
        raise
    dispatch.run(by_integers(args, backend), backend)
    return args.result


@named("attention_weights")
def attention_weights(q: ArrayLike, k: ArrayLike, **options: Unpack[WeightsOptions]) -> NDArray[Any]:
    """Probabilities of `attention`, for inspection.

    Parameters and errors are as in `attention`. Computed in NumPy, with O(len_q * len_k) memory per head.

    Returns
    -------
    ndarray, (..., heads_q, len_q, len_k)
        In q's dtype; 2-D if q and k are. Rows sum to 1, to less with a sink, and to 0 for a query without
        keys.
    """
    require_options(options, WeightsOptions)
    names, scale = ("q", "k", "k"), options.get("k_scale")
    args = attention_args(q, k, k, names=names, scales="k_scale", v_scale=scale, **options)
    probs = reference.weights(args)
    return probs[0] if args.result.ndim == 2 else probs


@named("merge_states")
def merge_states(
    outs: Sequence[ArrayLike] | NDArray[Any], lses: Sequence[ArrayLike] | NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Merge results of the same queries over disjoint keys: exact, as one call over all keys.

    Parameters
    ----------
    outs : sequence of array_like, (..., len_q, head_dim_v) each
        Results of `attention`, or an array with the parts along its first axis.
    lses : sequence of array_like, (..., len_q) each
        Their lses. With sinks, give these to only one part.

    Returns
    -------
    out : ndarray, (..., len_q, head_dim_v)
        In the parts' dtype; merged in float32, or float64 for float64.
    lse : ndarray, (..., len_q)
        Of all keys; float32, or float64 for float64.

    Raises
    ------
    TypeError, ValueError
        If there are no parts, or shapes or dtypes differ.

    Notes
    -----
    O(parts * len_q * head_dim_v). A part whose lse is -inf is ignored, whatever its values.

    Examples
    --------
    >>> import fastattn, numpy as np
    >>> q, k, v = np.ones((2, 8)), np.ones((6, 8)), np.arange(48.0).reshape(6, 8)
    >>> parts = [fastattn.attention(q, k[j], v[j], return_lse=True) for j in (slice(0, 4), slice(4, 6))]
    >>> out, lse = fastattn.merge_states(*zip(*parts))
    >>> np.allclose(out, fastattn.attention(q, k, v))
    True
    """
    out_parts, lse_parts, out, lse = partial_states(outs, lses)
    reference.merge_states(out_parts, lse_parts, out, lse)
    return out, lse


@named("explain")
def explain(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_lse: bool = False,
    stats: Sequence[str] | None = None,
    **options: Unpack[AttentionOptions],
) -> settings.Report:
    """Describe how `attention` would run on these arguments, without running it.

    Parameters and errors are as in `attention`.

    Returns
    -------
    Report
        A dict that prints as a table. ``backend``; ``why_numpy`` (None if compiled); the kernel's plan:
        ``kernel`` ("tile"; "few_rows", for up to 8 query rows of a key head; "numpy"), ``isa``, ``block_q``
        and ``block_k`` (query rows of all heads of a group, and keys, of a tile), ``int8_products`` (see
        `products`), ``split_k`` (keys per run
        of work, None if not split); ``tiles``, of which ``tiles_skipped`` are never touched, ``tiles_full``
        need no test and ``tiles_edge`` do; ``second_pass``, whether statistics compute the scores again;
        ``copies``, what is copied and why; ``conversions``, what the kernel converts or gathers block by
        block; ``num_threads``.

    Notes
    -----
    Tiles are counted from row ranges, the mask and the -inf of the bias, in one pass over the latter two;
    without them, in constant time.
    """
    require_options(options, AttentionOptions, "return_lse", "stats")
    args = attention_args(
        q, k, v, return_lse=return_lse, stats=stats, scales="k_scale and v_scale", **options
    )
    backend = options.get("backend")
    plan = dispatch.plan(args, backend)
    conversions = plan.pop("conversions")
    tiles = count_tiles(args, plan["block_q"], plan["block_k"])
    return settings.Report(
        backend=backend or settings.default_backend(),
        why_numpy=settings.why_numpy(backend),
        **plan,
        tiles=tiles.total,
        tiles_skipped=tiles.skipped,
        tiles_full=tiles.full,
        tiles_edge=tiles.edge,
        second_pass=args.statistics is not None and args.statistics.second_pass,
        copies=args.copies,
        conversions=conversions,
        num_threads=args.num_threads,
    )
